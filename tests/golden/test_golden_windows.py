"""Scores of SmolLM2 on texts in windows agree with a plain loop of transformers, one window at a time."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.corpus.documents import Document
from pipeline.corpus.keys import Keys
from pipeline.detectors.base import detector_names
from pipeline.detectors.registry import parse_detectors
from pipeline.plan.allocation import allocation_record, hashes
from pipeline.plan.description import build_config
from pipeline.plan.stage_plan import build_stages
from pipeline.run.plan import make_plan
from pipeline.stages.local import finish_shards
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from tests.helpers.made_up import write_corpus

MOST, WINDOWS, COUNTED = 48, 3, 4
ORDERS = ["0.5", "1", "2", "inf"]
DETECTORS: list[Any] = [
    "loss", "perplexity", "zlib", {"min_k": {"window": [1, 3]}}, {"min_k_plus_plus": {"window": [1, 3]}},
    {"renyi": {"order": ORDERS}}, {"mod_renyi": {"order": ["0.5", "2"]}}, "m_entropy", "gap_k", "etd",
    {"dc_pdd": {"documents": COUNTED}}, "reference", "ez",
]  # fmt: skip

pytestmark = pytest.mark.floating_point


@dataclass(frozen=True)
class Loop:
    """The statistics of one window over its scored tokens, of log-probabilities in float32 as torch has them."""

    token: np.ndarray
    log_p: np.ndarray  # (tokens, vocabulary)
    other: np.ndarray  # of the reference model


def lowest(values: np.ndarray, k: float = 0.2) -> float:
    return float(np.sort(values)[: max(1, int(k * len(values)))].mean())


def averages(windows: list[np.ndarray], width: int) -> np.ndarray:
    """Moving averages inside each window; all values where no window is as long."""
    means = [np.convolve(one, np.ones(width) / width, "valid") for one in windows if len(one) >= width]
    return np.concatenate(means or windows)


def loop_windows(tokenizer: Any, models: list[Any], text: str) -> tuple[Iterator[Loop], str]:
    """The windows of a text and the part of it that they read."""
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    count = min(WINDOWS, -(-len(ids) // MOST))
    starts = [0] if count == 1 else [i * (len(ids) - MOST) // (count - 1) for i in range(count)]
    ends = [0, *(start + MOST for start in starts)]
    news = [max(start, end) for start, end in zip(starts, ends, strict=False)]
    read = "".join(tokenizer.decode(ids[new : start + MOST]) for new, start in zip(news, starts, strict=True))

    def measured() -> Iterator[Loop]:
        for start, new in zip(starts, news, strict=True):
            window = torch.tensor([ids[start : start + MOST]])
            scored = range(max(new, start + 1), min(start + MOST, len(ids)))
            with torch.inference_mode():
                both = [model(input_ids=window).logits[0].log_softmax(1).double().numpy() for model in models]
            rows = [at - start - 1 for at in scored]
            tokens = np.array([ids[at] for at in scored])
            yield Loop(tokens, both[0][rows], both[1][rows, tokens])

    return measured(), read


def expected(windows: list[Loop], read: str, rarity: Callable[[int], float]) -> dict[str, float]:
    """The scores of a document by the formulas of the papers."""
    token = np.concatenate([one.token for one in windows])
    log_p = np.concatenate([one.log_p for one in windows])
    other = np.concatenate([one.other for one in windows])
    p, lp = np.exp(log_p), np.take_along_axis(log_p, token[:, None], 1)[:, 0]
    mean = (p * log_p).sum(1)
    deviation = np.sqrt((p * (log_p - mean[:, None]) ** 2).sum(1))
    standard, gap = (lp - mean) / deviation, (lp - log_p.max(1)) / deviation
    cuts = np.cumsum([len(one.token) for one in windows])[:-1]
    first = np.array([token[at] not in token[:at] for at in range(len(token))])
    hit = np.zeros(p.shape, dtype=bool)
    np.put_along_axis(hit, token[:, None], True, 1)
    p_y = np.exp(lp)

    def modified(order: float) -> float:
        q = abs(1 - order)
        rest = np.where(hit, 0, p * ((1 - p) ** q - 1)).sum(1)
        return float((((1 - p_y) * (p_y**q - 1) + rest) / q).mean())

    entropies = {
        "0.5": 2 * np.log(np.sqrt(p).sum(1)),
        "1": -mean,
        "2": -np.log((p**2).sum(1)),
        "inf": -log_p.max(1),
    }
    missed = token != log_p.argmax(1)
    gains, losses = (np.maximum(sign * (lp - other), 0)[missed].sum() for sign in (1, -1))
    rare = np.array([min(0.01, p_y[at] * rarity(token[at])) for at in range(len(token))])
    return {
        "loss": lp.mean(),
        "perplexity": -np.exp(-lp.mean()),
        "zlib": lp.mean() / len(zlib.compress(read.encode(), 6)),
        "min_k(window=1)": lowest(lp),
        "min_k(window=3)": lowest(averages(np.split(lp, cuts), 3)),
        "min_k_plus_plus(window=1)": lowest(standard),
        "min_k_plus_plus(window=3)": lowest(averages(np.split(standard, cuts), 3)),
        **{f"renyi(order={order})": lowest(-values) for order, values in entropies.items()},
        "mod_renyi(order=0.5)": modified(0.5),
        "mod_renyi(order=2)": modified(2.0),
        "m_entropy": float(((1 - p_y) * lp + np.where(hit, 0, p * np.log1p(-p)).sum(1)).mean()),
        "gap_k": lowest(averages(np.split(gap, cuts), 3)),
        "etd": (lp + -mean)[first].mean(),
        f"dc_pdd(documents={COUNTED})": rare[first].mean(),
        "reference": (lp - other).mean(),
        "ez": gains / (gains + losses),
    }


@pytest.fixture(scope="module")
def folders(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """SmolLM2, and a reference with the same tokenizer that predicts less."""
    folder = tmp_path_factory.mktemp("models") / "reference"
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers[-4:]:
            layer.mlp.down_proj.weight.mul_(0.7)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_folder).save_pretrained(folder)
    return [smollm2_folder, folder]


def texts_of(shared: Path) -> dict[str, list[str]]:
    """Texts of one to five times the tokens of a window."""
    rows = [json.loads(line)["input"] for line in (shared / "data/wikimia/256.jsonl").open(encoding="utf-8")]
    lengths = (20, 36, 44, 70, 100, 160)
    return {
        role: [" ".join(text.split()[:length]) for text, length in zip(rows[at : at + 6], lengths, strict=True)]
        for role, at in (("audit", 0), ("unseen", 6))
    }


def test_every_detector_of_windows_is_its_formula(folders: list[Path], shared_folder: Path, tmp_path: Path) -> None:
    stated = {name for name in detector_names(built_in=True) for one in parse_detectors([name]) if one.windows}
    assert stated == {one.name for one in parse_detectors(DETECTORS)}
    texts = texts_of(shared_folder)
    known = {f"{role}-{at}": text for role, some in texts.items() for at, text in enumerate(some)}
    models = {
        key: {"path": str(path), "dtype": "float32"}
        for key, path in zip(("model", "reference_model"), folders, strict=True)
    }
    described = {"run": str(tmp_path / "run"), "detectors": DETECTORS, "max_tokens": MOST, "windows": WINDOWS, **models}
    config = build_config({**described, "corpus": write_corpus(tmp_path, texts), "resources": {"batch_tokens": 150}})
    shards, store = make_plan(config).shards, Store(config.run)
    work = build_stages(config, shards)
    (counted,) = allocation_record(work.parts, {}).shots.values()
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    opened = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    counts = Counter[int]()
    for key, text in known.items():
        if hashes(Keys.of([Document(0, key, text, None)]).text)[0] in counted:
            counts.update(tokenizer(text, add_special_tokens=False)["input_ids"][:MOST])
    total = counts.total() + opened[0].get_input_embeddings().num_embeddings
    done = [event for event in finish_shards(work.stages[-1], shards, store, 1) if isinstance(event, Receipt)]
    rows = pa.concat_tables([store.read_table(receipt.data) for receipt in done]).to_pylist()
    assert len(rows) == len(known)
    for row in rows:
        measured, read = loop_windows(tokenizer, opened, known[row["doc_id"]])
        windows = list(measured)
        wanted = expected(windows, read, lambda token: log(total / (counts[token] + 1)))
        found = {column: row[column] for column in wanted}
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), row["doc_id"]
        assert row["truncated"] == (len(read) < len(known[row["doc_id"]]))
    assert {row["truncated"] for row in rows} == {True, False}
