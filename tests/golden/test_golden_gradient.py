"""Gradient norms of SmolLM2 on WikiMIA are the recorded ones of autograd, one document at a time."""

from __future__ import annotations

import json

import pytest
import torch

from pipeline.models.tokens import tokenize
from pipeline.passes.gradient import _mismatch, gradient_coverage, gradient_norms

pytestmark = pytest.mark.floating_point


def test_gradient_norms_are_the_golden_ones(smollm2, shared_folder):
    golden = [json.loads(line) for line in (shared_folder / "golden/smollm2_wikimia.jsonl").open(encoding="utf-8")]
    golden = sorted(golden, key=lambda row: row["n_tokens"])[::8]
    texts = []
    for row in golden:
        lines = (shared_folder / f"data/wikimia/{row['length']}.jsonl").read_text(encoding="utf-8").splitlines()
        texts.append(json.loads(lines[row["row"]])["input"])
    ids = [tokens.ids for tokens in tokenize(smollm2.tokenizer, texts, 1024)]
    assert gradient_coverage(smollm2.model).method == "batched"
    found = torch.cat([gradient_norms(smollm2, ids[start : start + 4]) for start in range(0, len(ids), 4)])
    expected = torch.tensor([row["gradient_norm"] for row in golden], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_batched_method_fits_whatever_the_number_of_threads(smollm2, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert _mismatch(smollm2.model) == ""
    finally:
        torch.set_num_threads(before)
