"""Detectors of 2024 to 2026 that read one forward pass are their papers' formulas, whatever else is in the batch."""

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.small_model import WORDS
from pipeline.config.audit import DetectorEntry
from pipeline.config.models import ModelConfig
from pipeline.detectors.base import Evidence, plan_passes
from pipeline.detectors.camia import REPEATED, Signal
from pipeline.detectors.registry import parse_detectors
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.tokens import repeated, tokenize
from pipeline.passes.forward import TokenStatistics, forward
from pipeline.plan.description import load_config
from pipeline.stages.registry import forward_passes
from pipeline.store.receipts import read_receipts
from tests.helpers.finished import score_run

TEXTS = [" ".join(WORDS[(7 * i + 3 * j * j) % len(WORDS)] for j in range(2 + 5 * i % 61)) for i in range(32)]
ENTRIES: list[DetectorEntry] = [
    {"etd": {"beta": [0, 0.5, 2]}},
    {"min_k": {"k": 0.3, "window": [1, 4, 1000]}},
    {"min_k_plus_plus": {"k": 0.3, "window": [1, 4, 1000]}},
    {"gap_k": {"k": 0.3, "window": [4, 1000]}},
]


@pytest.fixture(scope="module")
def lm(tiny_model_folder: Path) -> LanguageModel:
    opened = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    model: Any = opened.model
    model.get_output_embeddings().weight.data.mul_(30)  # surer than by chance: else float32 has no variance
    return opened


def ids_of(lm: LanguageModel, texts: list[str]) -> list[list[int]]:
    return [entry.ids for entry in tokenize(lm.tokenizer, texts, 256)]


def scores(lm: LanguageModel, texts: list[str]) -> torch.Tensor:
    detectors = parse_detectors(ENTRIES)
    passes = {needed: forward(lm, ids_of(lm, texts), names) for needed, names in plan_passes(detectors).items()}
    return torch.stack([one.score(Evidence(texts, passes)) for one in detectors], 1)


def transcribed(lm: LanguageModel, text: str) -> list[float]:
    """The scores of one text by the formulas, from all its logits in float64."""
    (ids,) = ids_of(lm, [text])
    with torch.inference_mode():
        log_p = lm.model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(1)
    lp, p = log_p[range(len(ids) - 1), ids[1:]], log_p.exp()
    mu, h = (p * log_p).sum(1), -(p * log_p).sum(1)
    sd = ((p * log_p.square()).sum(1) - mu.square()).sqrt()
    first = [at for at, token in enumerate(ids[1:]) if token not in ids[1 : at + 1]]
    out = [(lp + beta * h)[first].mean() for beta in (0, 0.5, 2)]
    for values, windows in ((lp, (1, 4, 1000)), ((lp - mu) / sd, (1, 4, 1000)), ((lp - log_p.amax(1)) / sd, (4, 1000))):
        for w in windows:
            moving = values.unfold(0, w, 1).mean(1) if w <= len(values) else values
            out.append(moving.sort().values[: max(1, int(0.3 * len(moving)))].mean())
    return [float(value) for value in out]


def test_each_is_its_formula_and_batches_change_nothing(lm: LanguageModel) -> None:
    expected = torch.tensor([transcribed(lm, text) for text in TEXTS], dtype=torch.float64)
    lengths = [len(ids) for ids in ids_of(lm, TEXTS)]
    assert min(lengths) - 1 < 4 < max(lengths) - 1  # texts below and above the window
    for size in (1, 7, 32):
        rows = [scores(lm, TEXTS[at : at + size]) for at in range(0, len(TEXTS), size)]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)


def camia_scores(read: TokenStatistics) -> torch.Tensor:
    detectors = parse_detectors([{"camia": {"signal": list(get_args(Signal)), "of": ["first", "difference"]}}])
    evidence = Evidence([""] * len(read.mask), {REPEATED: read})
    return torch.stack([one.score(evidence) for one in detectors], 1)


def signals(lp: list[float]) -> list[float]:
    """All signals of one copy, as their definitions are written down."""
    n, out = len(lp), [math.fsum(lp) / len(lp)]
    middle = (n - 1) / 2
    out.append(sum((i - middle) * v for i, v in enumerate(lp)) / (sum((i - middle) ** 2 for i in range(n)) or 1))
    out += [sum(v >= -level for v in lp[:200]) / len(lp[:200]) for level in (1, 2, 3)]
    out.append(sum(lp[i] > math.fsum(lp[:i]) / i for i in range(1, n)) / max(1, n - 1))
    for bins in (3, 4, 5):
        width, phrases, phrase = (max(lp) - min(lp)) / bins or 1.0, set(), ""
        for v in lp:
            phrase += str(max(0, math.ceil((v - min(lp)) / width - 1e-9) - 1))
            if phrase not in phrases:
                phrases.add(phrase)
                phrase = ""
        out.append(len(phrases) / n)
    for most in (200, 300):
        some = lp[:most]
        radius = 0.8 * statistics.pstdev(some)

        def phi(m: int, some: list[float] = some, radius: float = radius) -> float:
            runs = torch.tensor([some[i : i + m] for i in range(len(some) - m + 1)], dtype=torch.float64)
            close = (runs[:, None] - runs).abs().amax(2) <= radius
            return float(close.double().mean(1).log().mean())

        out.append(abs(phi(8) - phi(9)) if len(some) > 9 else 0.0)
    return out


@pytest.mark.parametrize("mark", [[], [1]])
def test_camia_measures_the_first_copy_and_what_the_last_one_adds(lm: LanguageModel, mark: list[int]) -> None:
    long = [" ".join([*TEXTS[at].split(), *TEXTS[at + 1].split()] * 9)[:1500] for at in (5, 9)]
    texts = [*TEXTS[1:31], *long, "it", "a b c"]
    expected = []
    for ids in ids_of(lm, texts):
        kept = ids[: (900 - len(mark)) // 3]
        with torch.inference_mode():
            log_p = lm.model(input_ids=torch.tensor([[*mark, *kept * 3]])).logits[0, :-1].log_softmax(1)
        lp = log_p[range(len(log_p)), [*mark, *kept * 3][1:]].double().tolist()
        first = lp[: len(kept) - 1 + len(mark)]
        once, again = signals(first), signals(lp[-len(first) :])
        expected.append([v for a, b in zip(once, again, strict=True) for v in (a, a - b)])
    copies = [repeated([*mark, *ids], 900, 1) for ids in ids_of(lm, texts)]
    for size in (1, 7, 32):
        batches = [copies[at : at + size] for at in range(0, len(texts), size)]
        rows = [camia_scores(forward(lm, ids, frozenset({"log_prob"}))) for ids in batches]
        torch.testing.assert_close(torch.cat(rows), torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("marks", [0, 1, 2])
def test_camia_of_log_probabilities_that_tie_and_of_texts_without_them(marks: int) -> None:
    sizes, generator = [1, 2, 3, 8, 9, 10, 11, 40, 202, 304, 304], random.Random(3)
    rows = [[-float(generator.randrange(1 + at % 4)) for _ in range(3 * n - 1 + marks)] for at, n in enumerate(sizes)]
    rows[4][0] = math.nan
    mask = torch.arange(max(map(len, rows))) < torch.tensor([[len(row)] for row in rows])
    expected = []
    for row, size in zip(rows, sizes, strict=True):
        first = row[: size - 1 + marks]
        copies = (first, row[-min(size, len(first)) :]) if first and not math.isnan(first[0]) else ()
        measured = [signals(copy) for copy in copies] or [[math.nan] * 11] * 2
        expected.append([v for a, b in zip(*measured, strict=True) for v in (a, a - b)])
    table = torch.tensor([[*row, *[0.0] * (mask.shape[1] - len(row))] for row in rows])
    np.testing.assert_allclose(camia_scores(TokenStatistics(table, mask)), expected, atol=1e-9)


def test_copies_stay_within_the_kept_tokens_and_the_beginning_is_marked_once() -> None:
    assert repeated([1, 5, 6], 100, 1) == [1, 5, 6, 5, 6, 5, 6]
    assert repeated([5, 6, 7, 8], 7, None) == [5, 6] * 3
    assert repeated([1, 5, 6], 6, 1) == [1, 5, 5, 5]


def test_a_worker_writes_the_columns_of_both_passes(make_audit: Callable[..., Path]) -> None:
    detectors = ["loss", {"camia": {"signal": "mean", "of": ["first", "difference"]}}]
    path = make_audit(TEXTS, detectors=detectors, selections=[], resources={"batch_tokens": 64})
    plan, store = score_run(load_config(str(path)))
    table = pa.concat_tables(store.read_table(receipt.data) for receipt in read_receipts(store, "score"))
    assert table["camia(signal=mean, of=first)"].to_pylist() == pytest.approx(table["loss"].to_pylist(), abs=1e-4)
    assert [forward_passes(entry) for entry in plan.passes()] == [1, 3]
