"""A scan of pictures: what its stages make of them, what it refuses, and that no picture is lost."""

import json
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import seenset
from benchmarks.plain_loop import process
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.picture_files import open_picture
from pipeline.corpus.shard import Shard
from pipeline.models.load import open_picture_model
from pipeline.models.picture_prompts import INSTRUCTION, picture_prompt, picture_token
from pipeline.passes.picture_forward import describe
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.run.scored import read_scored
from pipeline.stages.base import Output, Placement
from pipeline.stages.local import finish_shards
from pipeline.stages.picture_scoring import shown_pictures
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts
from tests.helpers.commands import user_error
from tests.helpers.picture_models import encoded, random_pictures, save_qwen_vl

PICTURES = random_pictures([(40, 30), (64, 64), (30, 60), (33, 32)] * 3, seed=5)
CAPTIONS = [" ".join(["a red house", "the quiet river", "one tree"][: 1 + row % 3]) for row in range(len(PICTURES))]
DETECTORS: list[Any] = [
    {"renyi": {"order": 0.5, "k": 1.0, "part": ["image", "instruction", "description", "instruction_description"]}},
    {"loss": {"part": "description", "caption": ["given", "generated"]}},
]
GIVEN = "loss(part=description, caption=given)"
OF_CAPTIONS: list[Any] = [{"loss": {"part": "description", "caption": "given"}}]


def trial_audit(folder: Path, model: Any, rows: dict[str, Sequence[Any]] | None = None, **settings: Any) -> AuditConfig:
    """An audit of pictures in a Parquet file, of which a few make a shard."""
    columns = rows or {"image": [encoded(picture) for picture in PICTURES], "caption": CAPTIONS}
    columns = {"id": [f"picture-{row}" for row in range(len(columns["image"]))], **columns}
    pq.write_table(pa.table({name: list(column) for name, column in columns.items()}), folder / "audit.parquet", 5)
    source = {"path": str(folder / "audit.parquet"), "id": "id", "image": "image", "caption": "caption"}
    model = {"path": str(model), "dtype": "float32"} if isinstance(model, Path) else model
    described = {"run": str(folder / "run"), "model": model, "corpus": {"audit": source}, "detectors": DETECTORS}
    resources = {"shard_bytes": 30_000, **settings.pop("resources", {})}
    return build_config({**described, **settings, "resources": resources})


def finished(config: AuditConfig, workers: int = 1) -> dict[str, list[pa.Table]]:
    """The rows that each stage of an audit makes, a table a shard, and those in quarantine."""
    plan, store = make_plan(config), Store(config.run)
    tables: dict[str, list[pa.Table]] = {"quarantine": []}
    for stage in plan_stages(config):
        events = finish_shards(stage, plan.shards, store, workers)
        receipts = sorted((e for e in events if isinstance(e, Receipt)), key=lambda receipt: receipt.shard)
        assert len(receipts) == len(plan.shards)
        tables[stage.name] = [store.read_table(receipt.data) for receipt in receipts]
        tables["quarantine"] += [store.read_table(r.quarantine) for r in receipts if r.quarantine]
    return tables


def test_the_scores_are_those_of_a_plain_loop_over_the_models_own_logits(tmp_path: Path, llava: Path) -> None:
    config = trial_audit(tmp_path, llava)
    scores = pa.concat_tables(finished(config)["score"]).to_pylist()
    for receipt in read_receipts(Store(config.run), "describe"):
        assert receipt.tokens == sum(map(len, Store(config.run).read_table(receipt.data)["ids"].to_pylist())) > 0
    lm = open_picture_model(ModelConfig(path=str(llava), dtype="float32"))
    network: Any = lm.model
    token = picture_token(network.config)
    assert len(scores) == len(PICTURES)
    for row in scores:
        index = int(row["doc_id"].removeprefix("picture-"))
        prompt = picture_prompt(lm, open_picture(encoded(PICTURES[index])))

        def logits(ids: list[int], numbers: dict[str, Any] = prompt.numbers) -> torch.Tensor:
            with torch.no_grad():
                return network(input_ids=torch.tensor([ids]), **numbers).logits[0].double()

        ids = [*prompt.ids, *describe(lm, [prompt], 32)[0]]
        start, end = len(prompt.ids), len(ids)
        image = [place for place in range(start) if ids[place] == token]
        places = {
            "image": image,
            "instruction": list(range(image[-1] + 1, start)),
            "description": list(range(start, end)),
            "instruction_description": list(range(image[-1] + 1, end)),
        }
        log_p = torch.log_softmax(logits(ids), 1)
        entropy = 2 * torch.logsumexp(0.5 * log_p, 1)  # of order 1/2
        for part, where in places.items():
            expected = -entropy[[place - 1 for place in where[1:]]].mean().item()
            assert row[f"renyi(order=0.5, k=1.0, part={part})"] == pytest.approx(expected, abs=1e-4)
        mean = log_p[range(start, end - 1), ids[start + 1 :]].mean().item()
        assert row["loss(part=description, caption=generated)"] == pytest.approx(mean, abs=1e-4)
        given = lm.tokenizer(f" {CAPTIONS[index]}", add_special_tokens=False)["input_ids"]
        log_p = torch.log_softmax(logits([*prompt.ids, *given]), 1)
        mean = log_p[range(start, start + len(given) - 1), given[1:]].mean().item()
        assert row[GIVEN] == pytest.approx(mean, abs=1e-4)


def test_rows_do_not_depend_on_the_number_of_threads_nor_on_what_shares_a_batch(tmp_path: Path, llava: Path) -> None:
    config = trial_audit(tmp_path, llava)
    one = finished(config.model_copy(update={"run": str(tmp_path / "one")}))
    three = finished(config.model_copy(update={"run": str(tmp_path / "three")}), workers=3)
    assert len(one["score"]) > 2
    for name in ("describe", "score"):
        assert all(table.equals(other) for table, other in zip(one[name], three[name], strict=True))
    alone = trial_audit(tmp_path, llava, run=str(tmp_path / "alone"), resources={"batch_tokens": 1})
    for table, other in zip(one["score"], finished(alone)["score"], strict=True):
        for column in table.column_names[9:]:
            assert other[column].to_pylist() == pytest.approx(table[column].to_pylist(), abs=1e-4)


def test_parts_of_one_description_share_a_forward_pass(tmp_path: Path, llava: Path) -> None:
    config = trial_audit(tmp_path, llava)
    (shard, *_), store = make_plan(config).shards, Store(config.run)
    describing, scoring = plan_stages(config)
    list(finish_shards(describing, [shard], store, 1))
    scorer = scoring.make(scoring, Placement())
    work(scorer, shard, store)  # the first pass looks for the head of the model
    passes: list[str] = []
    scorer.lm.model.register_forward_hook(lambda *_: passes.append("whole"))
    scorer.lm.model.model.register_forward_hook(lambda *_: passes.append("base"))
    assert len(work(scorer, shard, store).rows) > 1
    assert Counter(passes) == {"base": 2}, "one with the model's description, one with the caption, all parts of each"


def work(worker: Any, shard: Shard, store: Store) -> Output:
    """Put the documents of a shard through a worker, in one batch."""
    output = Output()
    inputs = worker.open(shard, store, output)
    worker.work(worker.prepare(list(read_shard(shard)), inputs, output), output)
    return output


def test_a_bad_picture_stops_nothing_and_never_vanishes(tmp_path: Path, llava: Path) -> None:
    whole = encoded(PICTURES[0].resize((200, 200)), "JPEG")
    images: list[Any] = [encoded(PICTURES[0]), whole[: len(whole) // 2], b"no picture", b"", encoded(PICTURES[1])]
    images += [encoded(PICTURES[2]), encoded(PICTURES[3]), None]
    captions = ["a red house", "cut in half", "words", "nothing", None, "a", "the quiet river", "none"]
    tables = finished(trial_audit(tmp_path, llava, {"image": images, "caption": captions}))
    reasons = {row["doc_id"]: row["reason"] for table in tables["quarantine"] for row in table.to_pylist()}
    kept = [row["doc_id"] for table in tables["score"] for row in table.to_pylist()]
    assert reasons == {
        "picture-1": "undecodable",
        "picture-2": "undecodable",
        "picture-3": "empty",
        "picture-4": "not_text",
        "picture-5": "too_short",
        "picture-7": "not_picture",
    }
    assert kept == ["picture-0", "picture-6"]


def test_a_picture_that_a_models_own_processor_refuses_is_left_out_with_its_words(tmp_path: Path) -> None:
    save_qwen_vl(tmp_path / "model", "2")
    images = [encoded(picture) for picture in random_pictures([(40, 30), (500, 1), (30, 60)])]
    rows = {"image": images, "caption": ["a red house"] * 3}
    tables = finished(trial_audit(tmp_path, tmp_path / "model", rows, detectors=OF_CAPTIONS))
    refused = [row for table in tables["quarantine"] for row in table.to_pylist()]
    kept = [row["doc_id"] for table in tables["score"] for row in table.to_pylist()]
    assert {(row["doc_id"], row["reason"]) for row in refused} == {("picture-1", "model_error")}
    assert "aspect ratio must be smaller than 200" in refused[0]["message"]
    assert kept == ["picture-0", "picture-2"]


def test_a_worker_holds_the_pixels_of_one_picture_and_of_the_next(llava: Path) -> None:
    lm = open_picture_model(ModelConfig(path=str(llava)))
    files = [encoded(picture) for picture in random_pictures([(64, 64)] * 6)]
    documents = [Document(row, str(row), "", None, picture=data) for row, data in enumerate(files)]
    seen: list[weakref.ref[Any]] = []
    for one in shown_pictures(lm, documents, Output()):
        seen.append(weakref.ref(one.picture))
        assert sum(picture() is not None for picture in seen) <= 2
    assert len(seen) == 6


def test_the_same_pixels_have_the_same_key_and_scores_whatever_file_they_are_in(tmp_path: Path, llava: Path) -> None:
    picture = PICTURES[1]
    files = [encoded(picture), encoded(picture, "BMP"), encoded(picture, "WEBP", lossless=True), encoded(PICTURES[2])]
    tables = finished(trial_audit(tmp_path, llava, {"image": files, "caption": ["a red house"] * 4}))
    png, bitmap, webp, other = (row for table in tables["score"] for row in table.to_pylist())
    for same in (bitmap, webp):
        assert (same["text_key"], same["sketch"]) == (png["text_key"], png["sketch"]), "one document"
        assert same[GIVEN] == pytest.approx(png[GIVEN], abs=1e-6)
    assert other["text_key"] != png["text_key"]


def test_a_caption_is_cut_at_max_tokens_and_that_is_noted(tmp_path: Path, llava: Path) -> None:
    lm = open_picture_model(ModelConfig(path=str(llava)))
    lengths = [len(lm.tokenizer(f" {caption}", add_special_tokens=False)["input_ids"]) for caption in CAPTIONS]
    most = sorted(lengths)[len(lengths) // 2]
    config = trial_audit(tmp_path, llava, max_tokens=most, detectors=OF_CAPTIONS)
    (stage,) = plan_stages(config)
    assert stage.name == "score", "nothing is described where the captions are given"
    rows = [row for table in finished(config)["score"] for row in table.to_pylist()]
    assert {row["truncated"] for row in rows} == {True, False}
    for row in rows:
        assert row["truncated"] == (lengths[int(row["doc_id"][8:])] > most)


def test_a_picture_leaves_room_for_two_tokens_or_is_refused(tmp_path: Path, llava: Path) -> None:
    document = Document(0, "a", CAPTIONS[2], None, picture=encoded(PICTURES[0]))
    (stage,) = plan_stages(trial_audit(tmp_path, llava, detectors=OF_CAPTIONS))
    scorer = stage.make(stage, Placement())
    prompt = len(picture_prompt(scorer.lm, PICTURES[0]).ids)
    for room, expected in enumerate(("too_large", "too_short", prompt + 2)):
        scorer.lm, output = replace(scorer.lm, max_tokens=prompt + room), Output()
        entries = scorer.prepare([document], ("audit", {}), output)
        assert [*(reason for _, reason, _ in output.refused.values()), *(one.tokens for one in entries)] == [expected]


def test_roles_name_their_columns_as_they_like(tmp_path: Path, llava: Path) -> None:
    source = {"path": str(tmp_path / "audit.parquet"), "image": "image", "caption": "caption"}
    unseen = {"path": str(tmp_path / "unseen.parquet"), "image": "photo", "caption": "title"}
    images = [encoded(picture) for picture in PICTURES]
    pq.write_table(pa.table({"photo": images, "title": CAPTIONS}), tmp_path / "unseen.parquet")
    corpus, limits = {"audit": source, "unseen": unseen}, {"document_bytes": 100_000, "picture_pixels": 10_000}
    selections = [{"name": "members", "detectors": [GIVEN], "procedure": "bh"}]
    config = trial_audit(tmp_path, llava, corpus=corpus, limits=limits, selections=selections, detectors=OF_CAPTIONS)
    finished(config)
    scored = read_scored(Store(config.run), make_plan(config).shards)
    assert {receipt.role for receipt in scored.receipts} == {"audit", "unseen"}


def test_all_that_changes_a_row_is_in_the_fingerprint(tmp_path: Path, llava: Path) -> None:
    config = trial_audit(tmp_path, llava)
    described, scored = plan_stages(config)
    assert described.fingerprint["instruction"] == INSTRUCTION
    assert described.fingerprint["tokens"] == 32
    again = plan_stages(trial_audit(tmp_path, llava))
    assert [stage.fingerprint for stage in again] == [described.fingerprint, scored.fingerprint]
    narrow = trial_audit(tmp_path, llava, limits={"picture_pixels": 10_000})
    of_shards = [plan_stages(one)[-1].fingerprint_for(make_plan(one).shards[0]) for one in (config, narrow)]
    assert of_shards[0] != of_shards[1]
    without = {"audit": {"path": str(tmp_path / "audit.parquet"), "image": "image"}}
    generated = [trial_audit(tmp_path, llava, detectors=DETECTORS[:1], **more) for more in ({}, {"corpus": without})]
    of_shards = [plan_stages(one)[-1].fingerprint_for(make_plan(one).shards[0]) for one in generated]
    assert of_shards[0] != of_shards[1]
    processor = llava / "processor_config.json"
    before = processor.read_text()
    changed = json.loads(before)
    changed["patch_size"] = 16
    try:
        processor.write_text(json.dumps(changed))
        assert plan_stages(config)[0].fingerprint != described.fingerprint
    finally:
        processor.write_text(before)


def test_a_picture_that_changes_between_description_and_scores_stops_its_shard(tmp_path: Path, llava: Path) -> None:
    for row in range(3):
        (tmp_path / f"{row}.png").write_bytes(encoded(PICTURES[row]))
    lines = (json.dumps({"id": f"audit-{row}", "image": f"{row}.png"}) + "\n" for row in range(3))
    (tmp_path / "audit.jsonl").write_text("".join(lines))
    corpus = {"audit": {"path": str(tmp_path / "audit.jsonl"), "id": "id", "image": "image"}}
    config = trial_audit(tmp_path, llava, corpus=corpus, detectors=[{"renyi": {"part": "description"}}])
    (shard,), store, (describe, score) = make_plan(config).shards, Store(config.run), plan_stages(config)
    process(describe, describe.make(describe, Placement()), shard, store)
    (tmp_path / "1.png").write_bytes(encoded(PICTURES[3]))
    error = user_error(process, score, score.make(score, Placement()), shard, store)
    assert "changed since stage describe read it" in error


def test_what_reads_texts_is_refused_over_pictures(tmp_path: Path, llava: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"detectors": ["loss"]},
            "loss needs log-probabilities of a whole text, and the documents are pictures: take {loss: {part: ",
        ),
        (
            {"detectors": ["renyi"]},
            "or another of renyi, loss, perplexity, min_k, min_k_plus_plus, gap_k, m_entropy, mod_renyi with part, or",
        ),
        ({"detectors": ["zlib"]}, ": take {loss: {part: description}}, or another of loss, perplexity, "),
        ({"detectors": ["gradient_norm"]}, "gradient_norm needs gradients, and the documents are pictures"),
        ({"detectors": ["fsd"]}, "fsd needs log-probabilities of a whole text"),
        ({"detectors": ["samia"]}, "samia needs continuations of a text"),
        ({"detectors": [{"loss": {"part": "image"}}]}, "loss: part must be one of instruction, description"),
        ({"detectors": [{"renyi": {"part": "picture"}}]}, "renyi: part must be one of image, "),
        (
            {"text_transform": {"dates": "remove"}},
            "needs texts to change, and the documents are pictures: leave it out, or give texts (corpus.*.text)",
        ),
        (
            {"model": {"endpoint": "http://127.0.0.1:9/v1", "name": "one"}},
            "endpoint one needs texts to send, and the documents are pictures: give weights",
        ),
    ]
    for settings, message in refused:
        assert message in user_error(trial_audit, tmp_path, **{"model": llava, **settings})


def test_what_reads_pictures_is_refused_over_texts_and_captions_without_any(tmp_path: Path, llava: Path) -> None:
    def refusal(corpus: dict[str, Any], **settings: Any) -> str:
        return user_error(trial_audit, tmp_path, llava, corpus=corpus, **settings)

    texts = refusal({"audit": {"path": "audit.jsonl"}})
    assert "needs a part of a picture and its description, and the documents are texts: take renyi, " in texts
    nameless = refusal({"audit": {"path": "audit.parquet", "image": "image"}})
    assert "needs captions in all roles, and the documents are pictures: take {loss: {part: description}}, " in nameless
    for detector in ({"renyi": {"part": "image"}}, *OF_CAPTIONS):
        refused = user_error(seenset.score, llava, ["a red house"], detectors=[detector])
        assert "passes over a text, and detector " in refused
        assert " needs more: use seenset.audit" in refused
    assert seenset.score(llava, ["a red house"], detectors=["loss"])["problem"].to_pylist() == [None]
