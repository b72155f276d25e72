"""Scores of what differs between versions: aligned by text, the same tokens whatever was published."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.passes.forward import TokenStatistics, restricted
from pipeline.stages.score_versions import differing_spans, tokens_in
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.marked_runs import run_here, versions_audit

TEXTS = (
    "The color of the sky, and of water, is blue.",
    "The colour of the sky and of water is blue.",
    "The colour of the sky, and of water, is blue.",
)


def parts_of(text: str, spans: list[tuple[int, int]]) -> list[str]:
    return [text[start:stop] for start, stop in spans]


def test_spans_are_what_differs_and_where_nothing_stands_what_follows() -> None:
    spans = differing_spans(TEXTS)
    assert list(map(parts_of, TEXTS, spans)) == [["color", ",", ","], ["colour", " ", " "], ["colour", ",", ","]]
    assert differing_spans(["one two", "one two three"])[0] == [(6, 7)]
    assert list(map(parts_of, ("b a", "a"), differing_spans(["b a", "a"]))) == [["b "], ["a"]]


def test_texts_without_blanks_are_aligned_by_characters() -> None:
    texts = ("今天的天气很好、我们去公园。", "今天的天气真好、我们去公园。")
    assert list(map(parts_of, texts, differing_spans(texts))) == [["很"], ["真"]], "not the whole clause"
    texts = ("ภาษาไทยไม่มี", "ภาษาไทยก็ไม่มี")
    assert [parts_of(text, spans)[0][:1] for text, spans in zip(texts, differing_spans(texts), strict=True)] == [
        "ไ",
        "ก",
    ]
    mixed = ("我有 iPhone 手机", "我有 Android 手机")
    assert list(map(parts_of, mixed, differing_spans(mixed))) == [["iPhone"], ["Android"]]


def test_spans_do_not_depend_on_the_order_of_the_versions() -> None:
    """Repeated words can be aligned in several ways: the one with the first version depended on the file."""
    rng = random.Random(5)
    for _ in range(40):
        base = rng.choices(WORDS[:4], k=12)
        texts = sorted({" ".join(word for word in base if rng.random() > 0.3) or "x" for _ in range(5)})
        if len(texts) < 2:
            continue
        expected = dict(zip(texts, differing_spans(texts), strict=True))
        shuffled = rng.sample(texts, len(texts))
        assert dict(zip(shuffled, differing_spans(shuffled), strict=True)) == expected


def test_every_version_has_a_span_at_every_place_and_the_rest_is_common_to_all() -> None:
    rng = random.Random(2)
    for _ in range(50):
        base = rng.choices(WORDS, k=15)
        texts = list({" ".join(word for word in base if rng.random() > 0.2) or "x" for _ in range(5)})
        if len(texts) < 2:
            continue
        spans = differing_spans(texts)
        assert len({len(one) for one in spans}) == 1
        assert all(start < stop <= len(text) for text, one in zip(texts, spans, strict=True) for start, stop in one)


def test_statistics_of_some_tokens_are_moved_together() -> None:
    values = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = restricted(
        TokenStatistics(log_prob=values, mask=mask, renyi={"2": -values}), [[True, False, True], [False, True]]
    )
    assert found.log_prob.tolist() == [[-1.0, -3.0], [-5.0, 0.0]]
    assert found.mask.tolist() == [[True, True], [True, False]]
    assert found.renyi["2"].tolist() == [[1.0, 3.0], [5.0, 0.0]]
    assert found.mean is None


def run(folder: Path, model: Path, texts: list[tuple[str, ...]], **changed: Any) -> int:
    rows = [{"id": f"d{number}", "versions": list(one), "index": number % 3} for number, one in enumerate(texts)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "versions.parquet")
    source = {"path": str(folder / "versions.parquet"), "id": "id", "versions": {"differing": True}}
    resources = {"cluster": "local", "shard_documents": 9, "shard_bytes": 1 << 30}
    return run_here(folder, versions_audit(folder, model, source, resources=resources, error_budget=0.5, **changed))


def test_the_score_is_the_mean_log_probability_of_the_differing_tokens(tmp_path: Path, tiny_model_folder: Path) -> None:
    behind = tuple(f"{' '.join(WORDS * 10)} {word}" for word in ("one", "two", "three"))
    assert run(tmp_path, tiny_model_folder, [TEXTS, TEXTS[::-1], behind], max_tokens=120) == 0
    store = Store(str(tmp_path / "run"))
    (receipt,) = read_receipts(store, "score")
    assert receipt.reasons == {"too_short": 1}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    expected = []
    for text, spans in zip(TEXTS, differing_spans(TEXTS), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        keep = tokens_in(tokenizer, text, spans, ids.shape[1])
        differing = {place for span in spans for place in range(*span)}
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert keep == [not differing.isdisjoint(range(*of_token)) for of_token in offsets[1:]]
        assert 0 < sum(keep) < len(keep)
        expected.append(float(log_probs[torch.tensor(keep)].mean()))
    assert receipt.tokens == 2 * sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    first, second = (row["versions"]["scores"] for row in store.read_table(receipt.data).to_pylist())
    np.testing.assert_allclose(first, expected, rtol=1e-4)
    assert second == pytest.approx(first[::-1]), "the first version only aligns the others"


@pytest.mark.parametrize("detector", ["gradient_norm", "lowercase"])
def test_detectors_that_read_more_than_token_probabilities_are_refused(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], detector: str
) -> None:
    one = {"name": "list", "detectors": [detector], "procedure": "versions"}
    assert run(tmp_path, tiny_model_folder, [TEXTS] * 3, detectors=[detector], selections=[one]) == 2
    assert "of documents with versions.differing only some tokens are scored" in capsys.readouterr().err
