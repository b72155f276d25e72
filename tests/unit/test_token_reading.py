"""Documents that are read once more: numbers of a plain loop, one document's fault its own, the same bytes anyhow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.audit.machine import LocalMachine
from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import text_key
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shard import Shard
from pipeline.corpus.shards import plan_shards
from pipeline.errors import LostDeviceError
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.sharing import SharedModels
from pipeline.models.tokens import tokenize
from pipeline.stages.base import Placement
from pipeline.stages.tokens import DEADLY, ScoredText, TokenReading, TokenRequest, is_deadly, read_tokens
from pipeline.stages.worker import LOCAL_DRIVER
from pipeline.store.attempts import AttemptLog
from pipeline.store.files import Store
from ray_jobs.evidence import token_reader

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
def request_of(shard: Shard, lm: LanguageModel, tiny_model_folder: Path) -> Callable[..., TokenRequest]:
    """Documents by their rows, as they were scored."""

    def made(rows: Sequence[int] = range(len(TEXTS)), **changes: Any) -> TokenRequest:
        texts = []
        for row in rows:
            (tokens,) = tokenize(lm.tokenizer, [TEXTS[row]], MOST)
            texts.append(replace(ScoredText(row, text_key(TEXTS[row]), len(tokens.ids)), **changes))
        return TokenRequest(((shard, tuple(texts)),), ModelConfig(path=str(tiny_model_folder)), "cpu")

    return made


class Given:
    """Stands where weights are shared; the model is one that a test has prepared."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def copy_of(self, *_: Any) -> LanguageModel:
        return self.lm


def read(request: TokenRequest, shared: Any = None, **arguments: Any) -> TokenReading:
    return read_tokens(request, Placement(shared=shared), **arguments)


def test_the_numbers_are_those_of_a_plain_loop_over_the_logits(
    request_of: Callable[..., TokenRequest], tiny_model_folder: Path
) -> None:
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))
    lm.model.get_input_embeddings().weight.mul_(
        8
    )  # a random model's distributions are flat, and float32 moments coarse
    rows = read(request_of(), Given(lm)).table.to_pylist()
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
    request_of: Callable[..., TokenRequest],
) -> None:
    threads = torch.get_num_threads()
    table = read(request_of()).table
    assert read(request_of(), SharedModels(), workers=3).table.equals(table)
    assert read(request_of([5])).table.equals(table.slice(5, 1).combine_chunks())
    assert torch.get_num_threads() == threads


def test_a_document_that_fails_has_a_problem_and_the_others_have_rows(
    request_of: Callable[..., TokenRequest], tiny_model_folder: Path
) -> None:
    failing = open_model(ModelConfig(path=str(tiny_model_folder)))
    (bad,) = tokenize(failing.tokenizer, [TEXTS[3]], MOST)

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].tolist() == [bad.ids]:
            raise RuntimeError("the kernel does not like it")

    failing.model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    reading = read(request_of(), Given(failing))
    assert reading.problems == ["the kernel does not like it"]
    assert [row for row in range(len(TEXTS)) if row != 3] == reading.table["row"].to_pylist()


@pytest.mark.parametrize(
    ("change", "problem"), [({"key": 1}, "its text is gone, or another now"), ({"tokens": 40}, "tokens now, 40 were")]
)
def test_a_document_that_is_another_now_has_no_row(
    change: dict[str, int], problem: str, request_of: Callable[..., TokenRequest]
) -> None:
    reading = read(request_of([1], **change))
    assert len(reading.table) == 0
    assert [problem in line for line in reading.problems] == [True]


def test_a_file_that_is_gone_has_no_rows(request_of: Callable[..., TokenRequest], shard: Shard) -> None:
    Path(shard.path).unlink()
    reading = read(request_of([0, 1]))
    assert (len(reading.table), len(reading.problems)) == (0, 2)


def test_what_stops_the_run_stops_the_reading(request_of: Callable[..., TokenRequest]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(request_of(), check=stop)


# --- in the process of a run


def here(store: Store, lines: list[str], models: Any = None) -> Callable[[TokenRequest], TokenReading | None]:
    return token_reader(store, ResourcesConfig(), LocalMachine(1, 0.0, 1), models, lines.append, lambda: None)


def test_a_model_that_cannot_be_opened_costs_the_evidence_alone(
    request_of: Callable[..., TokenRequest], tmp_path: Path
) -> None:
    lines: list[str] = []
    gone = replace(request_of([0]), model=ModelConfig(path=str(tmp_path / "gone")))
    assert here(Store(str(tmp_path / "run")), lines)(gone) is None
    assert "gone" in lines[-1]
    assert lines[-1].startswith("no evidence")
    assert not Store(str(tmp_path / "run")).names("attempts/evidence")


def test_a_device_that_is_lost_costs_the_evidence_alone(
    request_of: Callable[..., TokenRequest], tmp_path: Path, lm: LanguageModel
) -> None:
    class Lost(Given):
        def copy_of(self, *_: Any) -> LanguageModel:
            raise LostDeviceError("the device refuses all further work of this process")

    lines: list[str] = []
    assert here(Store(str(tmp_path / "run")), lines, Lost(lm))(request_of([0])) is None
    assert "refuses" in lines[-1]


def test_a_document_that_kills_its_process_is_left_out_after_a_few_deaths(
    request_of: Callable[..., TokenRequest], tmp_path: Path, tiny_model_folder: Path
) -> None:
    deadly = open_model(ModelConfig(path=str(tiny_model_folder)))
    (bad,) = tokenize(deadly.tokenizer, [TEXTS[2]], MOST)

    def kill(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].tolist() == [bad.ids]:
            os._exit(1)

    deadly.model.base_model.register_forward_pre_hook(kill, with_kwargs=True)
    store, lines = Store(str(tmp_path / "run")), []
    attempts = 1
    while in_a_process(lambda: here(store, lines, Given(deadly))(request_of(range(5)))):
        attempts += 1
    assert attempts == DEADLY + 2
    for _ in range(2):
        reading = here(store, lines, Given(deadly))(request_of(range(5)))
        assert reading is not None
        assert reading.table["row"].to_pylist() == [0, 1, 3, 4]
        assert "killed" in reading.problems[0]
    assert is_deadly(AttemptLog(store, "evidence/tokens", "", LOCAL_DRIVER))


def test_a_process_that_was_killed_from_outside_costs_no_evidence(
    request_of: Callable[..., TokenRequest], tmp_path: Path
) -> None:
    store, lines = Store(str(tmp_path / "run")), []
    AttemptLog(store, "evidence/tokens", "", LOCAL_DRIVER)
    reading = here(store, lines)(request_of())
    assert reading is not None
    assert reading.table.equals(read(request_of()).table)
    assert not store.names("attempts/evidence")


def in_a_process(work: Callable[[], Any]) -> int:
    """The exit status of work that may kill its process."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
