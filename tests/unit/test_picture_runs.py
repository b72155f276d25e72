"""Audits of pictures from files to an answer: what is scored, what is refused, and what a killed run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from picture_models import encoded, random_pictures, save_llava

from benchmarks.plain_loop import process
from pipeline.audit.description import build_config
from pipeline.audit.plan import Plan, make_plan
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.stages.base import Placement
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store

WORDS = ["red", "blue", "green", "house", "tree", "river", "stone", "cat", "dog", "sky", "quiet", "small"]
DETECTORS: list[Any] = [
    {"renyi": {"order": 0.5, "k": 1.0, "part": ["image", "description", "instruction_description"]}},
    {"loss": {"part": "description", "caption": "given"}},
    {"mod_renyi": {"part": "instruction"}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llava"
    save_llava(folder)
    return folder


def write(path: Path, count: int, seed: int, spoilt: dict[int, bytes] | None = None) -> list[bytes]:
    """A Parquet file of pictures with captions; some rows hold other bytes."""
    files = [encoded(picture) for picture in random_pictures([(40, 30), (32, 32)] * count, seed)[:count]]
    for row, data in (spoilt or {}).items():
        files[row] = data
    rng = np.random.default_rng(seed)
    captions = [" ".join(rng.choice(WORDS, 5)) for _ in files]
    images = [{"bytes": data, "path": None} for data in files]
    ids = [f"{path.stem}-{row}" for row in range(count)]
    pq.write_table(pa.table({"id": ids, "image": images, "caption": captions}), path)
    return files


def settings(folder: Path, model: Path, **changed: Any) -> dict[str, Any]:
    corpus = {
        role: {"path": str(folder / f"{role}.parquet"), "id": "id", "image": "image", "caption": "caption"}
        for role in ("audit", "unseen")
    }
    plain = {
        "run": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": corpus,
        "detectors": DETECTORS,
        "selections": [{"name": "m", "detectors": ["mod_renyi(part=instruction)"], "procedure": "bh", "alpha": 0.1}],
        "resources": {"cluster": "local", "shard_documents": 6, "shard_bytes": 1 << 30},
    }
    return {**plain, **changed}


def finish(plan: Plan, store: Store, on_batch: Callable[[Shard, int, int], None] = lambda *_: None) -> None:
    """Finish all shards of all stages, as a run does."""
    for stage in stages_of(plan.config):
        worker = stage.make(stage, Placement())
        for shard in plan.shards:
            process(stage, worker, shard, store, on_batch=on_batch)


def test_another_processor_or_limit_of_pixels_is_another_fingerprint(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "audit.parquet", 3, 1)
    write(tmp_path / "unseen.parquet", 3, 2)

    def fingerprint(**changed: Any) -> str:
        plan = make_plan(build_config(settings(tmp_path, model, **changed)))
        stage = stages_of(plan.config)[-1]
        return json.dumps(stage.fingerprint_of(plan.shards[0]), sort_keys=True)

    assert fingerprint() == fingerprint(run=str(tmp_path / "other"))
    assert fingerprint() != fingerprint(limits={"picture_pixels": 1000})
    given = settings(tmp_path, model)
    del given["corpus"]["audit"]["caption"], given["corpus"]["unseen"]["caption"]
    generated = [DETECTORS[0], DETECTORS[2]]
    assert fingerprint(detectors=generated) != fingerprint(detectors=generated, corpus=given["corpus"])


def test_a_picture_that_changes_between_its_description_and_its_scores_stops_its_shard(
    model: Path, tmp_path: Path
) -> None:
    for role in ("audit", "unseen"):
        (tmp_path / role).mkdir()
        for row, picture in enumerate(random_pictures([(40, 30)] * 3, len(role))):
            (tmp_path / role / f"{row}.png").write_bytes(encoded(picture))
        lines = [json.dumps({"id": f"{role}-{row}", "image": f"{role}/{row}.png"}) for row in range(3)]
        (tmp_path / f"{role}.jsonl").write_text("\n".join(lines) + "\n")
    corpus = {
        role: {"path": str(tmp_path / f"{role}.jsonl"), "id": "id", "image": "image"} for role in ("audit", "unseen")
    }
    detectors = [{"renyi": {"part": "description"}}]
    selections = [{"name": "m", "detectors": ["renyi(part=description)"], "procedure": "bh"}]
    given = settings(tmp_path, model, corpus=corpus, detectors=detectors, selections=selections)
    plan = make_plan(build_config(given))
    store = Store(plan.config.run)
    describe, score = stages_of(plan.config)
    (shard, *_) = [shard for shard in plan.shards if shard.role == "audit"]
    process(describe, describe.make(describe, Placement()), shard, store)
    (tmp_path / "audit" / "1.png").write_bytes(encoded(random_pictures([(40, 30)], 9)[0]))
    with pytest.raises(UserError, match="changed since stage describe read it"):
        process(score, score.make(score, Placement()), shard, store)
