"""Finished runs over the same documents whose scores a test chooses: one is run, the others are copies of it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.answers.select import Answering, select_all
from pipeline.plan.description import build_config
from pipeline.run.manifest import read_run
from pipeline.run.scored import each_in_turn, read_scored
from pipeline.store.files import Store
from tests.helpers.finished import refile, run, with_column
from tests.helpers.made_up import sentence, write_audit, write_jsonl
from tests.helpers.signed import sign

ITEMS, KNOWN = 60, 99


def first_run(folder: Path, model: Path, items: Sequence[Any]) -> Path:
    """Run an audit of direction clean over made-up items; its run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = {
        "audit": {"path": write_jsonl(folder / "bench.jsonl", items)},
        "seen": {"path": write_jsonl(folder / "seen.jsonl", [sentence(5000 + i) for i in range(KNOWN)])},
    }
    selections = [{"name": "clean", "direction": "clean", "detectors": ["loss"], "alpha": 0.2}]
    run(write_audit(folder, model, corpus=corpus, detectors=["loss", "zlib"], selections=selections, error_budget=0.5))
    return folder / "run"


def benchmark_run(base: Path, model: Path) -> Path:
    """The run of direction clean over ITEMS items that several modules copy, made once a session; an item is empty."""
    folder = base / "benchmark"
    if not (folder / "run").exists():
        first_run(folder, model, [*(sentence(i) for i in range(ITEMS - 1)), ""])
    return folder / "run"


def copied(source: Path, place: Path, seen: np.ndarray, seed: int, model: str, sets: Sequence[str] = ()) -> Path:
    """A copy of a run, as if another model had scored its documents: the rows that it has `seen` score 6 higher."""
    shutil.copytree(source, place)
    rng = np.random.default_rng(seed)

    def scores(table: pa.Table, receipt: Any) -> pa.Table:
        effect = 6.0 if receipt.role == "seen" else 6.0 * seen[table["row"].to_numpy()]
        return with_column(table, "loss", pa.array(rng.normal(size=len(table)) + effect))

    refile(place, scores)
    amend(place, "manifest.json", {"fingerprint": {"model": model}})
    store = Store(str(place))
    manifest, shards = read_run(store)
    config = build_config(manifest.config.model_dump(mode="json", by_alias=True), list(sets))
    select_all(config, read_scored(store, shards), manifest.limit, each_in_turn, Answering("select"))  # no report
    return place


def amend(place: Path, name: str, changes: Mapping[str, Any]) -> None:
    value = json.loads((place / name).read_text())
    for key, change in changes.items():
        value[key] = {**value[key], **change} if isinstance(change, dict) else change
    (place / name).write_text(json.dumps(value))
    sign(Store(str(place)))
