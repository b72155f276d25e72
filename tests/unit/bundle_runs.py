"""Finished runs with chosen scores that the tests of bundles pack, and bundles that a forger wrote."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.answers.select import Answering, select_all
from pipeline.bundle.container import INDEX, pack_members, unpack
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.plan.description import load_config
from pipeline.run.manifest import read_run
from pipeline.run.scored import each_in_turn, read_scored
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, Receipt, sealed
from ray_jobs.select import give_verdict, select_again
from tests.helpers.finished import refile, run, score_run, with_column
from tests.helpers.made_up import sentence, write_audit, write_corpus
from tests.helpers.signed import file_blind_test

ALIKE = BlindDiagnostic(outcome=Outcome.PASSED, sentence="Their words do not differ.", auc=0.5, low=0.45, high=0.55)
ASKED: dict[str, dict[str, Any]] = {
    "members": {"procedure": "bh"},
    "storey": {"procedure": "storey", "ties": "random"},
    "conditional": {"procedure": "bky", "calibration": "conditional"},
    "grouped": {"procedure": "by", "calibration": "by_group", "alpha": 0.9},
    "boosted": {"procedure": "storey", "calibration": "by_group", "boost": "group"},
    "weighted": {"procedure": "bh", "calibration": "by_group", "boost": "group"},
    "known": {"procedure": "known_members"},
    "quantile": {"procedure": "quantile"},
    "boundary": {"procedure": "right_boundary"},
    "bounded": {"procedure": "bound"},
    "evalues": {"procedure": "ebh"},
    "kernel": {"procedure": "kernel"},
    "ptdi": {"procedure": "ptdi"},
    "ptdi-known": {"procedure": "ptdi_known_members"},
    "fused": {"procedure": "td4eval", "detectors": ["loss", "min_k"]},
    "reconformal": {"procedure": "td4eval", "detectors": ["loss", "min_k"], "reconformal": True},
    "learnt": {"procedure": "adadetect", "detectors": ["loss", "min_k"], "learn": "split"},
    "pooled": {"procedure": "adadetect", "detectors": ["loss", "min_k"], "learn": "pool", "step_up": "storey"},
    "ktd": {"procedure": "ktd", "detectors": ["min_k_plus_plus"]},
    "clean": {"direction": "clean", "procedure": "storey", "alpha": 0.5},
    "smoothed": {"procedure": "storey", "ranks": "smoothed", "alpha": 0.1},
    "smoothed-groups": {"procedure": "by", "ranks": "smoothed", "calibration": "by_group", "alpha": 0.2},
    "smoothed-learnt": {
        "procedure": "adadetect",
        "detectors": ["loss", "min_k"],
        "learn": "split",
        "ranks": "smoothed",
    },
    "boosted-learnt": {
        "procedure": "adadetect",
        "detectors": ["loss", "min_k"],
        "learn": "pool",
        "calibration": "by_group",
        "boost": "group",
    },
}
"""Every procedure, calibration and direction."""


def asked(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "detectors": ["loss"], "alpha": 0.3, **ASKED[name]} for name in names]


def scored_run(folder: Path, model: Path, selections: list[dict[str, Any]], **settings: Any) -> Store:
    """A finished run of 81 audited documents, of which half score higher and one is empty, with its verdict.

    `each` of the settings changes the row of a role and place, and gives the run its groups; `seen` is the number of
    seen documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = (("audit", 80), ("unseen", 60), ("seen", settings.pop("seen", 40)))
    each = settings.pop("each", None)
    grouped = each is not None or any(one.get("calibration") == "by_group" for one in selections)
    column = {"group": "kind"} if grouped else {}
    rows: dict[str, list[Any]] = {
        role: [{"text": sentence(1000 * first + i), "kind": "ab"[i % 2]} for i in range(number)]
        for first, (role, number) in enumerate(numbers)
        if number
    }
    if each is not None:
        rows = {role: [{**row, **each(role, i)} for i, row in enumerate(some)] for role, some in rows.items()}
    rows["audit"].append({"id": "empty", "text": "", "kind": "a"})
    settings = {"detectors": ["loss", "min_k"], "error_budget": 0.5, **settings}
    corpus = write_corpus(folder, rows, **column)
    path = write_audit(folder, model, corpus=corpus, selections=selections, **settings)
    store = Store(str(folder / "run"))
    if "series" in settings:
        run(path)
    else:  # without a report, whose figures take most of the time of a run
        score_run(load_config(str(path)))
    rng = np.random.default_rng(0)

    def changed(table: pa.Table, receipt: Receipt) -> pa.Table:
        higher = 4.0 * (table["row"].to_numpy() % 2) if receipt.role == "audit" else 4.0 * (receipt.role == "seen")
        for name in table.column_names:
            if name in ("loss", "min_k", "min_k_plus_plus"):
                table = with_column(table, name, pa.array(rng.normal(size=len(table)).round(2) + higher))
        return table

    refile(Path(store.root), changed)
    file_blind_test(store, ALIKE)
    manifest, shards = read_run(store)
    if manifest.config.series is None:
        config, scored = manifest.config, read_scored(store, shards, manifest.config.near_copies)
        select_all(config, scored, manifest.limit, each_in_turn, Answering("select"))
    else:
        select_again(store.url, [], texts=False)
    give_verdict(store.url, "family")
    return Store(store.url)


def in_first(column: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """Changes a value of the first row of a table."""

    def changed(table: pa.Table) -> pa.Table:
        first, *others = table[column].to_pylist()
        return with_column(table, column, pa.array([change(first), *others], table.schema.field(column).type))

    return changed


def in_every(column: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """Changes the values of all rows of a table."""

    def changed(table: pa.Table) -> pa.Table:
        values = list(map(change, table[column].to_pylist()))
        return with_column(table, column, pa.array(values, table.schema.field(column).type))

    return changed


def forged(data: bytes, changes: Mapping[str, Callable[[Any], Any]]) -> bytes:
    """The bundle with changed members, tables or the keys of JSON files, under digests that fit them."""
    index, members = unpack(data, "bundle")
    contents = {name: content for name, content in members.items() if name != INDEX}
    keys = index.model_dump(mode="json", by_alias=True, exclude={"members"})
    for name, change in changes.items():
        if name == INDEX:
            keys = change(keys)
        elif name.endswith(".parquet"):
            buffer = io.BytesIO()
            pq.write_table(change(pq.read_table(io.BytesIO(contents[name]))), buffer, compression="zstd")
            contents[name] = buffer.getvalue()
        else:
            value = json.loads(contents[name])
            was_sealed = value.pop(DIGEST, None) is not None
            value = change(value)
            contents[name] = json.dumps(sealed(value) if was_sealed else value).encode()
    return pack_members(keys, contents)
