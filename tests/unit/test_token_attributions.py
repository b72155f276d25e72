"""Documents that are read once more: numbers of a plain loop, one document's fault its own, the same bytes anyhow."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.config.audit import ResourcesConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import text_key
from pipeline.errors import LostDeviceError
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.sharing import SharedModels
from pipeline.models.tokens import tokenize
from pipeline.run.machine import LocalMachine
from pipeline.stages.events import ScoredText, ScoredTexts, TokenSettings
from pipeline.stages.local import finish_shards
from pipeline.stages.tokens import token_stage
from pipeline.store.attempts import MOST_DEATHS
from pipeline.store.receipts import read_receipts
from ray_jobs.token_attributions import FOLDER, token_reader
from tests.helpers.commands import attempts, in_a_process
from tests.helpers.recorder import shards_of

TEXTS = ["the river été of 数据", "a quiet garden in winter", *(" ".join(WORDS[i : i + 9]) for i in range(20))]
MOST = 12


class Rereads:
    """Reads documents of a file once more in this process, as the model of a folder has scored them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        (self.shard,), self.store = shards_of(folder, TEXTS)
        self.tokenizer = self.opened().tokenizer

    def opened(self) -> LanguageModel:
        """The model, opened anew."""
        return open_model(ModelConfig(path=str(self.model)))

    def ids(self, row: int) -> list[int]:
        (tokens,) = tokenize(self.tokenizer, [TEXTS[row]], MOST)
        return tokens.ids

    def hooked(self, row: int, act: Callable[[], None]) -> LanguageModel:
        """The model, which acts when it reads one document alone."""

        def look(module: Any, args: Any, kwargs: Any) -> None:
            if kwargs["input_ids"].tolist() == [self.ids(row)]:
                act()

        opened = self.opened()
        opened.model.base_model.register_forward_pre_hook(look, with_kwargs=True)
        return opened

    def __call__(
        self, rows: Sequence[int] = range(len(TEXTS)), given: LanguageModel | None = None, **other: Any
    ) -> tuple[pa.Table | None, list[str]]:
        """Read rows by a given model or the opened one: (models=, check=, workers=, **changes of what was scored)."""
        lines: list[str] = []
        models = other.pop("models", given and SimpleNamespace(copy_model=lambda *_: given))
        check = other.pop("check", lambda: None)
        machine = LocalMachine(other.pop("workers", 1), 0.0, 1)
        scored = [ScoredText(row, text_key(TEXTS[row]), len(self.ids(row)))._replace(**other) for row in rows]
        settings = TokenSettings(ScoredTexts({self.shard.id: scored}), ModelConfig(path=str(self.model)), "cpu")
        reader = token_reader(self.store, ResourcesConfig(), machine, models, lines.append, check)
        table = reader([self.shard], settings)
        assert lines[0].startswith(f"token attributions: reading {len(rows)} selected documents")
        return table, lines[1:]


@pytest.fixture
def rereads(tmp_path: Path, tiny_model_folder: Path) -> Rereads:
    return Rereads(tmp_path, tiny_model_folder)


def rows_of(table: pa.Table | None) -> list[int]:
    return table["row"].to_pylist()


def test_the_numbers_are_those_of_a_plain_loop_over_the_logits(rereads: Rereads) -> None:
    lm = rereads.opened()
    table, _ = rereads(given=lm)
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
        assert row["log_prob"][1:] == pytest.approx(log_probs[1:], abs=1e-5)
        assert row["standardised"][1:] == pytest.approx(standard[1:], abs=3e-5)
        assert len(row["pieces"]) == len(row["log_prob"]) == len(ids)
        assert text.startswith("".join(row["pieces"]))


def test_rows_are_the_same_bytes_however_many_threads_and_whatever_else_is_read(rereads: Rereads) -> None:
    threads = torch.get_num_threads()
    table, _ = rereads()
    assert rereads(models=SharedModels(), workers=3)[0] == table
    assert rereads([5])[0] == table.slice(5, 1)
    assert torch.get_num_threads() == threads
    assert not rereads.store.names(FOLDER)


def test_a_document_that_fails_has_a_problem_and_the_others_have_rows(rereads: Rereads) -> None:
    def fail() -> None:
        raise RuntimeError("the kernel does not like it")

    table, lines = rereads(given=rereads.hooked(3, fail))
    assert lines == ["token attributions: 1 could not be read; the first: the kernel does not like it"]
    assert [row for row in range(len(TEXTS)) if row != 3] == rows_of(table)


@pytest.mark.parametrize(
    ("change", "problem"), [({"key": 1}, "its text is missing or has changed"), ({"tokens": 40}, "tokens now, 40 were")]
)
def test_a_document_that_is_another_now_has_no_row(rereads: Rereads, change: dict[str, int], problem: str) -> None:
    table, lines = rereads([1], **change)
    assert rows_of(table) == []
    assert [problem in line for line in lines] == [True]
    Path(rereads.shard.path).unlink()
    assert rereads([0, 1])[1][0].startswith("token attributions: 2 could not be read; the first: ")


def test_a_receipt_counts_the_tokens_that_were_read(rereads: Rereads) -> None:
    scored = [ScoredText(row, text_key(TEXTS[row]), len(rereads.ids(row))) for row in range(3)]
    settings = TokenSettings(ScoredTexts({rereads.shard.id: scored}), ModelConfig(path=str(rereads.model)), "cpu")
    stage = token_stage(settings, [rereads.shard])
    list(finish_shards(stage, [rereads.shard], rereads.store, workers=1))
    (receipt,) = read_receipts(rereads.store, stage.name)
    assert receipt.tokens == sum(one.tokens for one in scored)


def test_what_stops_the_run_stops_the_reading(rereads: Rereads) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rereads(check=stop)


@pytest.mark.parametrize("lost", [False, True])
def test_a_model_that_cannot_be_opened_or_a_lost_device_costs_the_attributions_alone(
    rereads: Rereads, lost: bool
) -> None:
    def copy_model(*_: Any) -> LanguageModel:
        raise LostDeviceError("the device is gone: it refuses all further work of this process")

    if not lost:
        rereads.model = Path("gone")
    table, lines = rereads([0], models=SimpleNamespace(copy_model=copy_model) if lost else None)
    assert table is None
    assert "gone" in lines[-1]
    assert lines[-1].startswith("no token attributions")
    assert not rereads.store.names(FOLDER)


def test_a_document_that_kills_its_process_is_left_out_after_a_few_deaths(rereads: Rereads) -> None:
    deadly = rereads.hooked(2, lambda: os._exit(1))
    assert attempts(lambda: rereads(range(5), deadly)) == MOST_DEATHS + 1
    for _ in range(2):
        table, lines = rereads(range(5), deadly)
        assert rows_of(table) == [0, 1, 3, 4]
        assert "killed" in lines[0]


def test_a_process_that_was_killed_from_outside_costs_no_attributions(rereads: Rereads) -> None:
    killed = rereads.opened()
    hook = killed.model.base_model.register_forward_pre_hook(lambda *_: os._exit(1))
    assert in_a_process(lambda: rereads(given=killed))
    assert rereads.store.names(FOLDER)
    hook.remove()
    table, lines = rereads(given=killed)
    assert rows_of(table) == list(range(len(TEXTS)))
    assert lines == []
    assert not rereads.store.names(FOLDER)
