"""Audits of pictures from files to an answer: what is scored, what is refused, and what a killed run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished import score_all
from picture_models import encoded, random_pictures, save_llava

from benchmarks.plain_loop import process
from pipeline.audit.description import build_config
from pipeline.audit.plan import make_plan
from pipeline.config.models import ModelConfig
from pipeline.corpus.pictures import open_picture, picture_key
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.models.load import open_picture_model
from pipeline.models.pictures import caption_ids, picture_prompt
from pipeline.passes.pictures import describe, forward_pictures
from pipeline.stages.base import Placement
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts

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


def rows_of_run(store: Store) -> list[dict[str, Any]]:
    tables = [store.read_table(receipt.data) for receipt in read_receipts(store, "score")]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: str(row["doc_id"]))


def test_scores_are_those_of_the_passes_over_single_pictures(model: Path, tmp_path: Path) -> None:
    files = write(tmp_path / "audit.parquet", 7, 1)
    write(tmp_path / "unseen.parquet", 7, 2)
    plan = make_plan(build_config(settings(tmp_path, model)))
    store = Store(plan.config.run)
    score_all(plan, store)
    rows = rows_of_run(store)
    assert [row["doc_id"] for row in rows] == [f"{role}-{n}" for role in ("audit", "unseen") for n in range(7)]
    lm = open_picture_model(ModelConfig(path=str(model), dtype="float32"))
    captions = pq.read_table(tmp_path / "audit.parquet")["caption"].to_pylist()
    for row, data, caption in zip(rows, files, captions, strict=False):
        picture = open_picture(data)
        assert row["text_key"] == picture_key(picture)
        prompt = picture_prompt(lm, picture)
        (written,) = describe(lm, [prompt])
        ids = caption_ids(lm, caption)
        half = frozenset({"log_prob", "renyi_0.5"})
        read = forward_pictures(lm, [prompt], [written], {"image": half, "description": half})
        for part in ("image", "description"):
            expected = -read[part].renyi["0.5"].double().mean()
            assert row[f"renyi(order=0.5, k=1.0, part={part})"] == pytest.approx(float(expected), abs=1e-4)
        loss = forward_pictures(lm, [prompt], [ids], {"description": half})["description"].log_prob.double().mean()
        assert row["loss(part=description, caption=given)"] == pytest.approx(float(loss), abs=1e-4)
        assert row["n_tokens"] == len(prompt.ids) + max(len(ids), len(written))


def test_bad_pictures_are_quarantined_and_counted(model: Path, tmp_path: Path) -> None:
    whole = encoded(random_pictures([(200, 200)])[0], "JPEG")
    write(tmp_path / "audit.parquet", 8, 1, {2: b"no picture", 5: whole[: len(whole) // 2], 6: b""})
    write(tmp_path / "unseen.parquet", 8, 2)
    plan = make_plan(build_config(settings(tmp_path, model)))
    store = Store(plan.config.run)
    score_all(plan, store)
    receipts = list(read_receipts(store, "score"))
    assert all(receipt.n_in == receipt.n_scored + receipt.n_quarantined for receipt in receipts)
    quarantined = [row for r in receipts if r.quarantine for row in store.read_table(r.quarantine).to_pylist()]
    assert {(row["doc_id"], row["reason"]) for row in quarantined} == {
        ("audit-2", "undecodable"),
        ("audit-5", "undecodable"),
        ("audit-6", "empty"),
    }


class Killed(BaseException):
    """Ends a run as a kill would: nothing is caught."""


def test_a_killed_run_resumes_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "audit.parquet", 13, 1)
    write(tmp_path / "unseen.parquet", 8, 2)
    whole = make_plan(build_config(settings(tmp_path, model)))
    score_all(whole, Store(whole.config.run))
    torn = make_plan(build_config(settings(tmp_path, model, run=str(tmp_path / "torn"))))
    store = Store(torn.config.run)
    for kills in range(3):  # each attempt dies in another batch, the first while descriptions are made
        left = [kills + 1]

        def die(shard: Shard, documents: int, tokens: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with pytest.raises(Killed):
            score_all(torn, store, die)
    score_all(torn, store)
    first, second = rows_of_run(Store(whole.config.run)), rows_of_run(store)
    assert [{**row, "sketch": None} for row in first] == [{**row, "sketch": None} for row in second]
    assert [row["sketch"] for row in first] == [row["sketch"] for row in second]


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"detectors": ["zlib"]},
            "zlib reads texts, and the documents are pictures; of pictures there are renyi",
        ),
        (
            {"detectors": ["renyi"]},
            r"say which part, as in \{renyi: \{part: description\}\}; parts: image",
        ),
        ({"detectors": [{"loss": {"part": "image"}}]}, "detector loss: part"),
        ({"text_transform": {"dates": "remove"}}, "text_transform changes texts"),
        ({"model": {"endpoint": "https://host/v1", "name": "m"}}, "is an endpoint, and the documents are pictures"),
    ],
)
def test_what_pictures_cannot_be_asked_is_one_line(
    changed: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    selection = {"name": "m", "detectors": [], "procedure": "bh"}
    given = {**settings(tmp_path, model), **changed}
    columns = [entry if isinstance(entry, str) else "loss(part=image)" for entry in given["detectors"]]
    if "detectors" in changed:
        given["selections"] = [{**selection, "detectors": columns}]
    with pytest.raises(UserError, match=message) as error:
        build_config(given)
    assert "\n" not in str(error.value)


def test_parts_of_pictures_are_refused_over_texts_and_captions_where_there_are_none(
    model: Path, tmp_path: Path
) -> None:
    given = settings(tmp_path, model)
    for source in given["corpus"].values():
        del source["caption"]
    with pytest.raises(UserError, match=r"reads captions, and a role has none: give corpus\.\*\.caption"):
        build_config(given)
    for source in given["corpus"].values():
        del source["image"]
    with pytest.raises(UserError, match=r"reads part image of a picture, and the documents are texts"):
        build_config({**given, "detectors": [{"renyi": {"part": "image"}}], "selections": []})


def test_descriptions_are_written_once_and_only_where_they_are_read(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "audit.parquet", 3, 1)
    write(tmp_path / "unseen.parquet", 3, 2)
    names = [stage.name for stage in stages_of(build_config(settings(tmp_path, model)))]
    assert names == ["describe", "score"]
    given = [{"loss": {"part": "description", "caption": "given"}}]
    selections = [{"name": "m", "detectors": ["loss(part=description, caption=given)"], "procedure": "bh"}]
    config = build_config(settings(tmp_path, model, detectors=given, selections=selections))
    assert [stage.name for stage in stages_of(config)] == ["score"]


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
