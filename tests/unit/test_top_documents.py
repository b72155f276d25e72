"""By what a selection ranks, whose tokens it shows, and what is known of a document's near-duplicates."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.answers.top_documents import NAMED, choose_ranking, related_ids, weighed_tokens
from pipeline.checks.dependent_documents import near_duplicates_file
from pipeline.config.audit import AuditConfig
from pipeline.plan.description import build_config
from pipeline.selection.folds import RoleScores
from pipeline.store.files import Store
from tests.helpers.commands import user_error

PLAIN, STANDARDISED = "log-probability", "standardised log-probability"


@pytest.mark.parametrize(
    ("detectors", "weights", "shown"),
    [
        (["zlib"], [], ("zlib", PLAIN)),
        (["min_k_plus_plus"], [], ("min_k_plus_plus", STANDARDISED)),
        (["zlib", "min_k_plus_plus"], [], ("zlib", PLAIN)),
        (["zlib", "min_k_plus_plus"], [0.2, 0.8], ("min_k_plus_plus", STANDARDISED)),
        (["fsd(base=min_k_plus_plus)"], [], ("fsd(base=min_k_plus_plus)", STANDARDISED)),
        (["gradient_norm", "min_k"], [0.9, 0.1], ("min_k", PLAIN)),
        (["m_entropy"], [], ("loss", PLAIN)),
    ],
)
def test_the_tokens_shown_are_those_of_the_strongest_detector_that_reads_them(
    detectors: list[str], weights: list[float], shown: tuple[str, str]
) -> None:
    written: list[Any] = ["zlib", "min_k", "min_k_plus_plus", "gradient_norm", "m_entropy", "samia"]
    config = AuditConfig.model_validate(
        {
            "run": "r",
            "model": {"path": "m"},
            "corpus": {"audit": {"path": "a.jsonl"}},
            "detectors": [*written, {"fsd": {"base": "min_k_plus_plus"}}],
        }
    )
    assert weighed_tokens(config, detectors, weights) == shown


def test_more_documents_than_the_limit_are_refused_in_one_line() -> None:
    described = {"run": "r", "model": {"path": "m"}, "corpus": {"audit": {"path": "a.jsonl"}}, "detectors": ["loss"]}
    assert build_config(described).evidence == build_config({**described, "evidence": 50}).evidence == 50
    for given in (51, 200, 20_000):  # 200 was the default of 0.10, and 20,000 its limit
        line = user_error(build_config, {**described, "evidence": given})
        assert line == f"evidence: input should be less than or equal to 50, got {given}"


def test_a_selection_ranks_by_its_detector_or_by_the_fused_score() -> None:
    batch = RoleScores(np.array([[1.0, 10.0], [2.0, 20.0]]), None, np.arange(2))

    def fused(batch: RoleScores) -> np.ndarray:
        return batch.matrix.sum(1)

    for arguments, name, scores in (
        ((["a", "b"], [], "bh", None), "a", [1, 2]),
        ((["a", "b"], [], "adadetect", fused), "adadetect", [11, 22]),
        ((["a", "b"], [0.5, 0.5], "td4eval", fused), "td4eval", [11, 22]),
        ((["a", "b"], [0.0, 1.0], "td4eval", fused), "b", [10, 20]),
    ):
        shown, of = choose_ranking(*arguments)
        assert (shown, of(batch).tolist()) == (name, scores)


def test_the_near_duplicates_of_a_document_are_the_first_others_of_its_family(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert related_ids(store, {("a", 1)}) == {}
    rows = [(f"d{i}", "a", i, 0) for i in range(3)] + [(f"e{i}", "ab"[i % 2], i, 1) for i in range(40)]
    columns = dict(zip(("doc_id", "source", "row", "family"), map(list, zip(*rows, strict=True)), strict=True))
    store.write_table(near_duplicates_file("audit"), pa.table(columns))
    large = related_ids(store, {("a", 1), ("b", 3), ("b", 99), ("a", 38)})
    assert large["a", 1] == ["d0", "d2"]
    assert large["b", 3] == [f"e{i}" for i in (0, 1, 2, *range(4, 11))]
    assert large["a", 38] == [f"e{i}" for i in range(10)]
    assert len(large["b", 3]) == NAMED
    assert ("b", 99) not in large
    assert related_ids(store, set()) == {}


def test_whoever_shows_evidence_waits_for_no_model_library() -> None:
    code = "import sys, pipeline.answers.top_documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
