"""Scores of SmolLM2 on WikiMIA agree with those of the published formulas, one document at a time."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.detectors.base import Evidence, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from tests.helpers.golden_values import ABSOLUTE, RELATIVE

SHARES = [0.1, 0.2, 0.3, 0.5, 1.0]
COLUMNS = {
    "loss": "loss",
    "zlib": "zlib",
    "lowercase": "lowercase",
    **{f"min_k(k={k})": f"min_k_{k}" for k in SHARES},
    **{f"min_k_plus_plus(k={k})": f"min_k++_{k}" for k in SHARES},
}
DETECTORS = ["loss", "zlib", "lowercase", {"min_k": {"k": SHARES}}, {"min_k_plus_plus": {"k": SHARES}}]

pytestmark = pytest.mark.floating_point


@pytest.fixture(scope="module")
def golden(shared_folder):
    rows = [json.loads(line) for line in (shared_folder / "golden/smollm2_wikimia.jsonl").open(encoding="utf-8")]
    for row in rows:
        lines = (shared_folder / f"data/wikimia/{row['length']}.jsonl").read_text(encoding="utf-8").splitlines()
        row["text"] = json.loads(lines[row["row"]])["input"]
    return rows


def test_token_counts_are_the_golden_ones(smollm2, golden):
    found = tokenize(smollm2.tokenizer, [row["text"] for row in golden], 1024)
    assert [len(tokens.ids) for tokens in found] == [row["n_tokens"] for row in golden]


@pytest.mark.parametrize(("batch", "step"), [(1, 20), (3, 10), (32, 4), pytest.param(32, 1, marks=pytest.mark.slow)])
def test_scores_agree_with_the_golden_values_whatever_the_batch(smollm2, golden, batch, step):
    golden = golden[::step]
    detectors = parse_detectors(DETECTORS)
    scores = []
    for start in range(0, len(golden), batch):
        texts = [row["text"] for row in golden[start : start + batch]]
        found = {}
        for needed, statistics in plan_passes(detectors).items():
            asked = [text.lower() for text in texts] if needed.text == "lowercase" else texts
            found[needed] = forward(
                smollm2, [tokens.ids for tokens in tokenize(smollm2.tokenizer, asked, 1024)], statistics
            )
        scores.append(torch.stack([detector.score(Evidence(texts, found)) for detector in detectors], dim=1))
    whole = torch.cat(scores)
    for index, detector in enumerate(detectors):
        expected = [row[COLUMNS[detector.column]] for row in golden]
        found = whole[:, index].tolist()
        assert found == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), detector.column
