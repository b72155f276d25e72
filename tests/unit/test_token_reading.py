"""Documents that are read once more: numbers of a plain loop, one document's fault its own, the same bytes anyhow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.audit.machine import LocalMachine
from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import text_key
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard
from pipeline.errors import LostDeviceError
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.sharing import SharedModels
from pipeline.models.tokens import tokenize
from pipeline.stages.events import ScoredText, ScoredTexts, TokenSettings
from pipeline.store.attempts import MOST_DEATHS
from pipeline.store.files import Store
from ray_jobs.evidence import FOLDER, token_reader

TEXTS = ["the river été of 数据", "a quiet garden in winter", *(" ".join(WORDS[i : i + 9]) for i in range(20))]
MOST = 12


@pytest.fixture(scope="module")
def lm(tiny_model_folder: Path) -> LanguageModel:
    return open_model(ModelConfig(path=str(tiny_model_folder)))


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = AuditConfig.model_validate(
        {"run": "r", "model": {"path": "m"}, "corpus": {"audit": {"path": str(path)}}, "detectors": ["loss"]}
    )
    (shard,) = plan_shards(config.corpus, find_inputs(config.corpus), config.resources)
    return shard


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


Wanted = tuple[list[Shard], TokenSettings]


@pytest.fixture
def wanted(shard: Shard, lm: LanguageModel, tiny_model_folder: Path) -> Callable[..., Wanted]:
    """Documents by their rows, as they were scored."""

    def made(rows: Sequence[int] = range(len(TEXTS)), model: Path = tiny_model_folder, **changes: Any) -> Wanted:
        texts = []
        for row in rows:
            (tokens,) = tokenize(lm.tokenizer, [TEXTS[row]], MOST)
            texts.append(ScoredText(row, text_key(TEXTS[row]), len(tokens.ids))._replace(**changes))
        return [shard], TokenSettings(ScoredTexts({shard.id: texts}), ModelConfig(path=str(model)), "cpu")

    return made


class Given:
    """Stands where weights are shared; the model is one that a test has prepared."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def copy_of(self, *_: Any) -> LanguageModel:
        return self.lm


def read(
    store: Store, wanted: Wanted, models: Any = None, workers: int = 1, check: Callable[[], None] = lambda: None
) -> tuple[pa.Table | None, list[str]]:
    """What comes of a reading in this process, and the lines that are printed after the first."""
    lines: list[str] = []
    machine = LocalMachine(workers, 0.0, 1)
    table = token_reader(store, ResourcesConfig(), machine, models, lines.append, check)(*wanted)
    assert lines[0].startswith(f"evidence: reading {len(wanted[1].texts)} selected documents")
    return table, lines[1:]


def rows_of(table: pa.Table | None) -> list[int]:
    assert table is not None
    rows: list[int] = table["row"].to_pylist()
    return rows


def test_the_numbers_are_those_of_a_plain_loop_over_the_logits(
    store: Store, wanted: Callable[..., Wanted], tiny_model_folder: Path
) -> None:
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))
    lm.model.get_input_embeddings().weight.mul_(
        8
    )  # a random model's distributions are flat, and float32 moments coarse
    table, _ = read(store, wanted(), Given(lm))
    assert table is not None
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == list(range(len(TEXTS)))
    for row, text in zip(rows, TEXTS, strict=True):
        ids = lm.tokenizer(text)["input_ids"][:MOST]
        log_p = lm.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        log_probs, standard = [None], [None]
        for place, token in enumerate(ids[1:]):
            p = log_p[place].exp()
            mean = float((p * log_p[place]).sum())
            deviation = float((p * log_p[place] ** 2).sum() - mean**2) ** 0.5
            log_probs.append(float(log_p[place, token]))
            standard.append((float(log_p[place, token]) - mean) / deviation)
        assert row["log_prob"][0] is row["standardised"][0] is None
        assert row["log_prob"][1:] == pytest.approx(log_probs[1:], abs=1e-4)
        assert row["standardised"][1:] == pytest.approx(standard[1:], abs=1e-4)
        assert len(row["pieces"]) == len(row["log_prob"]) == len(ids)
        assert text.startswith("".join(row["pieces"]))


def test_rows_are_the_same_bytes_however_many_threads_and_whatever_else_is_read(
    store: Store, wanted: Callable[..., Wanted]
) -> None:
    threads = torch.get_num_threads()
    table, _ = read(store, wanted())
    assert table is not None
    assert read(store, wanted(), SharedModels(), workers=3)[0] == table
    assert read(store, wanted([5]))[0] == table.slice(5, 1)
    assert torch.get_num_threads() == threads
    assert not store.names(FOLDER)


def test_a_document_that_fails_has_a_problem_and_the_others_have_rows(
    store: Store, wanted: Callable[..., Wanted], tiny_model_folder: Path
) -> None:
    failing = open_model(ModelConfig(path=str(tiny_model_folder)))
    (bad,) = tokenize(failing.tokenizer, [TEXTS[3]], MOST)

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].tolist() == [bad.ids]:
            raise RuntimeError("the kernel does not like it")

    failing.model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    table, lines = read(store, wanted(), Given(failing))
    assert lines == ["evidence: 1 could not be read; the first: the kernel does not like it"]
    assert [row for row in range(len(TEXTS)) if row != 3] == rows_of(table)


@pytest.mark.parametrize(
    ("change", "problem"), [({"key": 1}, "its text is gone, or another now"), ({"tokens": 40}, "tokens now, 40 were")]
)
def test_a_document_that_is_another_now_has_no_row(
    change: dict[str, int], problem: str, store: Store, wanted: Callable[..., Wanted]
) -> None:
    table, lines = read(store, wanted([1], **change))
    assert rows_of(table) == []
    assert [problem in line for line in lines] == [True]


def test_a_file_that_is_gone_has_no_rows(store: Store, wanted: Callable[..., Wanted], shard: Shard) -> None:
    Path(shard.path).unlink()
    table, lines = read(store, wanted([0, 1]))
    assert rows_of(table) == []
    assert lines[0].startswith("evidence: 2 could not be read")
    assert shard.name in lines[0]


def test_what_stops_the_run_stops_the_reading(store: Store, wanted: Callable[..., Wanted]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(store, wanted(), check=stop)


def test_a_model_that_cannot_be_opened_costs_the_evidence_alone(
    store: Store, wanted: Callable[..., Wanted], tmp_path: Path
) -> None:
    table, lines = read(store, wanted([0], model=tmp_path / "gone"))
    assert table is None
    assert "gone" in lines[-1]
    assert lines[-1].startswith("no evidence")
    assert not store.names(FOLDER)


def test_a_device_that_is_lost_costs_the_evidence_alone(
    store: Store, wanted: Callable[..., Wanted], lm: LanguageModel
) -> None:
    class Lost(Given):
        def copy_of(self, *_: Any) -> LanguageModel:
            raise LostDeviceError("the device refuses all further work of this process")

    table, lines = read(store, wanted([0]), Lost(lm))
    assert table is None
    assert "refuses" in lines[-1]


def test_a_document_that_kills_its_process_is_left_out_after_a_few_deaths(
    store: Store, wanted: Callable[..., Wanted], tiny_model_folder: Path
) -> None:
    deadly = open_model(ModelConfig(path=str(tiny_model_folder)))
    (bad,) = tokenize(deadly.tokenizer, [TEXTS[2]], MOST)

    def kill(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].tolist() == [bad.ids]:
            os._exit(1)

    deadly.model.base_model.register_forward_pre_hook(kill, with_kwargs=True)
    attempts = 1
    while in_a_process(lambda: read(store, wanted(range(5)), Given(deadly))):
        attempts += 1
    assert attempts == MOST_DEATHS + 1
    for _ in range(2):
        table, lines = read(store, wanted(range(5)), Given(deadly))
        assert rows_of(table) == [0, 1, 3, 4]
        assert "killed" in lines[0]


def test_a_process_that_was_killed_from_outside_costs_no_evidence(
    store: Store, wanted: Callable[..., Wanted], tiny_model_folder: Path
) -> None:
    killed = open_model(ModelConfig(path=str(tiny_model_folder)))
    hook = killed.model.base_model.register_forward_pre_hook(lambda *_: os._exit(1))
    assert in_a_process(lambda: read(store, wanted(), Given(killed)))
    assert store.names(FOLDER)
    hook.remove()
    table, lines = read(store, wanted(), Given(killed))
    assert rows_of(table) == list(range(len(TEXTS)))
    assert lines == []
    assert not store.names(FOLDER)


def in_a_process(work: Callable[[], Any]) -> int:
    """The exit status of work that may kill its process."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
