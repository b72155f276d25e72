"""What every stage does once: nothing that changes a row is missing in its fingerprint, and no document is lost."""

import itertools
import os
import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.plain_loop import process
from pipeline.config.corpus import TransformConfig
from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Prefix
from pipeline.detectors.registry import PluginCode
from pipeline.endpoint.parameters import Adjustments
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.unchanged import ModelDigests
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.stages.ask_log_probs import LogProbSettings
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, StagePlan, Window, rows_schema
from pipeline.stages.events import Advance, Ready
from pipeline.stages.local import finish_shards
from pipeline.stages.paraphrase import ParaphraserSettings
from pipeline.stages.prefixes import Prefixes, Shots
from pipeline.stages.process import earlier_rows, file_rows, filed_rows, new_rows, read_rows
from pipeline.stages.registry import plan_stages
from pipeline.stages.sample import SampleSettings
from pipeline.stages.score import ScoreSettings
from pipeline.stages.worker import work_through
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import attempts, user_error
from tests.helpers.made_up import write_corpus
from tests.helpers.recorder import shards_of

SCHEMA = rows_schema(("length", pa.int64()))


@dataclass(frozen=True)
class CountingSettings:
    """Of the stage that these tests make."""

    factor: int
    bad: str = "bad"
    rounds: int = 1


class Counting:
    """Counts characters; a batch with a bad document fails, a deadly one kills its worker."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        self.settings: CountingSettings = stage.settings
        self.window = Window(4)
        self.batch_size: BatchSize | None = None
        self.batches: list[list[str]] = []

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        pass

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        return [Entry(document, len(document.text), document.text) for document in documents]

    def work(self, batch: list[Entry], output: Output) -> None:
        self.batches.append([entry.work for entry in batch])
        if any(self.settings.bad in entry.work for entry in batch):
            raise ValueError(40 * "a bad document")
        if any("unmendable" in entry.work for entry in batch):
            raise UserError("the model has no template")
        if any("deadly" in entry.work for entry in batch):
            os._exit(1)
        for entry in batch:
            output.keep(entry.document, length=len(entry.work) * self.settings.factor)


def counting(**changes: Any) -> Stage:
    digest = ModelDigests()
    stage = Stage("count", "counts", SCHEMA, CountingSettings(2), None, 0, Counting, digest)
    return replace(stage, digest=digest, **changes)


MODEL = EndpointConfig(endpoint="http://127.0.0.1:9/v1", name="one")
OTHER = EndpointConfig(endpoint="http://127.0.0.1:9/v1", name="two")


def audit(**settings: Any) -> tuple[Stage, ...]:
    """The stages of an audit that has all of them, on models whose content is a name."""
    local = "model" in settings and "path" in settings["model"]
    detectors: list[Any] = ["loss", {"samia": {"draws": 2}}]
    detectors += [{"knockoff": {"base": "loss", "draws": 2}}, "fsd"] if local else []
    corpus = {"audit": {"path": "a"}, "unseen": {"path": "u"}}
    described = {"run": "run", "model": MODEL.model_dump(), "corpus": corpus, "paraphraser": {"path": "p"}}

    def digest(model: AnyModel) -> dict[str, str]:
        name = model.path if isinstance(model, ModelConfig) else model.name
        return {"model": name, "tokenizer": name, "dtype": "float32", "quantization": "none"}

    return plan_stages(StagePlan(build_config({**described, "detectors": detectors, **settings}), digest=digest))


def test_all_that_a_worker_is_told_is_in_the_fingerprint() -> None:
    """Each field of each stage's settings, changed alone, gives another fingerprint: none can be forgotten."""
    stages = [*audit(), *audit(model={"path": "m"})]
    assert {wanted for stage in audit() for wanted in stage.wanted_by if stage.name.startswith("log_probs")} == {"loss"}
    kinds = {type(stage.settings) for stage in stages}
    assert kinds == {ScoreSettings, ParaphraserSettings, SampleSettings, LogProbSettings}
    others: dict[str, Any] = {
        "model": OTHER,
        "reference_model": OTHER,
        "paraphraser": ModelConfig(path="other"),
        "adapters": {"default": "other"},
        "prefixes": Prefixes({Prefix("unseen", 1): Shots(([1],), np.zeros((1, 128), np.uint8), 0.5)}),
        "plugins": PluginCode((), {"my_detectors.py": "other"}),
        "detectors": replace(stages[-1].settings.detectors, entries=("zlib",)),
        "chat": ChatSettings({"target": "other"}),
        "compared": "answer",
        "rules": "0",
        "windows": 2,
        "parameters": Adjustments((("seed", None),)),
    }
    for stage in stages:
        for field in fields(stage.settings):
            value = getattr(stage.settings, field.name)
            other = others.get(field.name) or _another(value)
            changed = replace(stage, settings=replace(stage.settings, **{field.name: other}), digest=_by_name)
            same = replace(stage, digest=_by_name)
            assert changed.fingerprint != same.fingerprint, f"{stage.name}: {field.name}"


def _by_name(model: AnyModel) -> dict[str, str]:
    return {"model": model.path if isinstance(model, ModelConfig) else model.name}


def _another(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}!"
    first = fields(value)[0].name
    return replace(value, **{first: "other"})


def test_seed_transform_and_what_is_read_are_in_every_fingerprint() -> None:
    plain = audit(model={"path": "m"})
    for changes in ({"seed": 1}, {"text_transform": {"dates": "remove"}}, {"max_tokens": 9}):
        for stage, other in zip(plain, audit(model={"path": "m"}, **changes), strict=True):
            assert stage.fingerprint != other.fingerprint, (stage.name, changes)
    scoring = audit(model={"path": "m"}, paraphraser={"path": "p", "temperature": 1.0})[-1]
    assert scoring.fingerprint != plain[-1].fingerprint
    assert {key for key in scoring.fingerprint if scoring.fingerprint[key] != plain[-1].fingerprint[key]} == {"reads"}
    assert list(map(len, scoring.fingerprint["reads"].values())) == [16, 16]


def test_a_shard_of_another_transform_is_not_worked_on(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, ["one", "two"], text_transform={"dates": "remove"})
    stage = counting()
    with pytest.raises(ValueError, match="transforms texts by"):
        process(stage, stage.make(stage, Placement()), shard, store)
    stage = counting(transform=TransformConfig(dates="remove"))
    assert process(stage, stage.make(stage, Placement()), shard, store).n_scored == 2


def test_a_failing_batch_is_halved_until_the_culprit_stands_alone(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, ["a", "bb", "a bad one", "dddd", "eeeee", ""])
    stage = counting()
    worker = stage.make(stage, Placement())
    receipt = process(stage, worker, shard, store)
    assert (receipt.n_in, receipt.n_scored, receipt.n_quarantined) == (6, 4, 2)
    assert receipt.reasons == {"empty": 1, "model_error": 1}
    first = ["a", "bb", "a bad one", "dddd"]
    assert worker.batches == [first, first[:2], first[2:], ["a bad one"], ["dddd"], ["eeeee"]]
    rows = read_rows(stage, shard, store)
    assert {number: row["length"] for number, row in rows.items()} == {0: 2, 1: 4, 2: None, 3: 8, 4: 10}
    assert (rows[2]["reason"], rows[2]["problem"]) == ("model_error", (40 * "a bad document")[:300])
    assert process(stage, worker, shard, store) == receipt
    assert len(worker.batches) == 6


def test_a_killed_process_suspects_no_document_that_another_thread_worked_on(tmp_path: Path) -> None:
    texts = [["a", "bb"], ["ccc", "deadly"], ["eeeee", "ffffff"]]
    (shards, store), stage = shards_of(tmp_path, *texts), counting()
    assert attempts(lambda: list(finish_shards(stage, shards, store, workers=3))) == 4
    assert [receipt.reasons for receipt in read_receipts(store, "count")] == [{}, {"model_error": 1}, {}]
    assert not store.names("attempts/count", ".json")


def test_threads_end_soon_when_nobody_waits_for_them(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, ["a"] * 39 + ["a bad one"])
    stage = counting()
    events = finish_shards(stage, [shard], store, workers=2)
    assert isinstance(next(events), Ready)
    events.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("seenset-worker")]
    done = [event for event in finish_shards(stage, [shard], store, workers=2) if isinstance(event, Advance)]
    assert done[-1].documents == 40, "with the one that is refused"
    assert [receipt.n_scored for receipt in read_receipts(store, "count")] == [39]


def test_what_is_wrong_with_the_settings_is_no_fault_of_a_document(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, ["a", "unmendable"])
    stage = counting()
    assert "no template" in user_error(process, stage, stage.make(stage, Placement()), shard, store)


def test_an_id_that_stands_twice_is_worked_on_once(tmp_path: Path) -> None:
    rows = [{"id": "x", "text": "first"}, {"id": "x", "text": "second"}, {"id": "y", "text": None}]
    described = {"run": str(tmp_path / "run"), "model": {"path": "none"}}
    (shard,) = make_plan(build_config({**described, "corpus": write_corpus(tmp_path, {"audit": rows})})).shards
    store = Store(described["run"])
    stage = counting(quarantines=True)
    receipt = process(stage, stage.make(stage, Placement()), shard, store)
    refused = [(row["row"], row["reason"], row["stage"]) for row in store.read_table(receipt.quarantine).to_pylist()]
    assert refused == [(1, "duplicate_id", "count"), (2, "not_text", "count")]
    assert [row["length"] for row in read_rows(stage, shard, store).values()] == [10]


def test_rows_are_taken_up_where_only_more_of_the_same_is_asked_for(tmp_path: Path) -> None:
    (shard,), store = shards_of(tmp_path, ["a", "bb"])
    one = counting(grows="rounds", name="count/1")
    process(one, one.make(one, Placement()), shard, store)
    store.write_json("receipts/count/no_number", {})
    more = counting(grows="rounds", settings=CountingSettings(2, rounds=5), name="count/5")
    assert [row["length"] for row in earlier_rows(more, shard, store, Output())] == [2, 4]
    for other in (CountingSettings(3), CountingSettings(2, bad="worse")):
        stage = counting(grows="rounds", settings=other, name="count/5")
        assert not list(earlier_rows(stage, shard, store, Output()))


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    tokens=st.integers(1, 2048),
    padding=st.none() | st.integers(0, 200),
)
@example(lengths=[1, 2, 3, 5], tokens=10, padding=2)
def test_a_batch_holds_documents_of_like_length_within_its_size(
    lengths: list[int], tokens: int, padding: int | None
) -> None:
    worker = Counting(counting(), Placement())
    worker.batch_size = BatchSize(tokens, padding)
    entries = [Entry(Document(i, str(i), "", None), length, str(length)) for i, length in enumerate(lengths)]
    output = Output()
    work_through(worker, entries, output)
    batches = [[int(length) for length in batch] for batch in reversed(worker.batches)]  # the longest come first
    assert sorted(output.rows) == list(range(len(lengths)))
    assert [length for batch in batches for length in batch] == sorted(lengths)
    for batch, longer in itertools.zip_longest(batches, batches[1:]):
        full = max(batch) * len(batch)
        assert len(batch) == 1 or (full <= tokens and (padding is None or full - sum(batch) <= padding))
        if longer is not None:  # no batch ends early
            padded = longer[0] * (len(batch) + 1)
            too_much = padding is not None and padded - sum(batch) - longer[0] > padding
            assert padded > tokens or too_much


def test_a_table_holds_the_rows_that_changed_since_those_that_it_goes_on_from(tmp_path: Path) -> None:
    kept = {"doc_id": "a", "row": 0, "rest": "r", "texts": ["x"], "reason": None, "problem": None}
    refused = {**kept, "row": 1, "reason": "endpoint", "problem": "no answer", "texts": []}
    earlier = {0: kept, 1: refused, 2: {**kept, "row": 2}}
    rows = {**earlier, 1: {**refused, "reason": None, "problem": None}, 2: {**kept, "row": 2, "texts": ["x", "y"]}}
    changed = [(row["row"], row["rest"], row["reason"], row["texts"]) for row in new_rows(rows, earlier)]
    assert changed == [(1, None, None, []), (2, None, None, ["y"])]
    (shard,), store = shards_of(tmp_path, ["a"])
    stage = counting(schema=rows_schema(("rest", pa.string()), ("texts", pa.list_(pa.string()))))
    first = file_rows(stage, shard, store, Output(rows=earlier), 0.0)
    output = Output(rows=rows, base=first, base_rows=filed_rows(store, first))
    assert filed_rows(store, file_rows(replace(stage, name="more", digest=_by_name), shard, store, output, 0.0)) == rows
