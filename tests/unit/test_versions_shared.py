"""A long common beginning of versions is computed once: the same scores as apart, and bytes that no batch changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from architectures import calls_of

from benchmarks.small_model import WORDS
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model
from pipeline.passes.forward import forward
from pipeline.passes.shared import common_beginning, forward_of_versions, shares_beginnings
from pipeline.passes.statistics import STATISTICS
from seenset import score
from tests.helpers.finished import rows as rows_scored
from tests.helpers.marked_runs import run_here, versions_audit


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> Any:
    """Its predictions vary as those of a trained model: of near-uniform ones float32 rounds the variance either way."""
    lm = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    lm.model.get_output_embeddings().weight.mul_(20)
    return lm


def draw_versions(rng: np.random.Generator, common: int, lengths: list[int]) -> list[list[int]]:
    beginning = rng.integers(2, 20, size=common).tolist()
    return [[*beginning, version, *rng.integers(2, 20, size=rest).tolist()] for version, rest in enumerate(lengths)]


def test_statistics_are_those_of_versions_apart(tiny: Any) -> None:
    ids = draw_versions(np.random.default_rng(0), 9, [3, 0, 5, 4, 2, 3])
    assert shares_beginnings(tiny)
    together = forward_of_versions(tiny, ids, frozenset(STATISTICS), 9)
    apart = forward(tiny, ids, frozenset(STATISTICS))
    assert torch.equal(together.mask, apart.mask)
    for name in ("log_prob", "mean", "variance", "m_entropy", "renyi"):
        torch.testing.assert_close(getattr(together, name), getattr(apart, name), atol=1e-4, rtol=0)
    standardised = [((one.log_prob - one.mean) / one.variance.sqrt())[one.mask] for one in (together, apart)]
    torch.testing.assert_close(*standardised, atol=1e-4, rtol=0)


@pytest.mark.parametrize("k", [5, 20])
def test_a_common_half_costs_at_most_six_tenths_of_the_tokens(tiny: Any, k: int) -> None:
    ids = draw_versions(np.random.default_rng(1), 20, [19] * k)
    assert shares_beginnings(tiny)
    with calls_of(tiny.model.model) as calls:
        forward_of_versions(tiny, ids, frozenset({"log_prob"}), common_beginning(ids))
    assert sum(call["input_ids"].numel() for call in calls) <= 0.6 * sum(map(len, ids))


def test_a_beginning_ends_before_the_shortest_version_and_must_save_enough() -> None:
    assert common_beginning([[1, 2, 3, 4], [1, 2, 3, 4, 5]]) == 3
    assert common_beginning([[1, 2, 3, 4], [1, 2, 9, 4]]) == 0
    assert common_beginning([[1, 2, 3, 4]] * 1) == 0
    assert common_beginning([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]) == 3, "7 of 10 tokens"
    assert common_beginning([[1], [1, 2]]) == 0


def scored(folder: Path, model: Path, rows: list[dict[str, Any]], name: str, **resources: Any) -> list[list[float]]:
    path = folder / "versions.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    source = {"path": str(path), "id": "id", "versions": {}}
    settings = {"detectors": ["loss", "min_k"], "resources": {"cluster": "local", **resources}}
    assert run_here(folder, versions_audit(folder, model, source, run=str(folder / name), **settings)) == 0
    held = rows_scored(folder / name)
    return [held[row["id"]]["versions"]["scores"] for row in rows]


def test_runs_give_the_scores_of_versions_apart_and_the_same_bytes_in_any_shards(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    rng = np.random.default_rng(2)
    rows = []
    for number in range(12):
        common = " ".join(WORDS[i] for i in rng.integers(20, size=30))
        texts = [f"{common} {WORDS[20 + version]} " + "red " * (number % 3) for version in range(6)]
        rows.append({"id": f"d{number}", "versions": texts, "index": int(rng.integers(6))})
    together = scored(tmp_path, tiny_model_folder, rows, "together")
    assert scored(tmp_path, tiny_model_folder, rows, "cut", shard_documents=5, shard_bytes=1 << 30) == together
    names = ["loss", "min_k"]
    apart = score(tiny_model_folder, [text for row in rows for text in row["versions"]], names)
    expected = np.stack([apart[name].to_numpy() for name in names], axis=1).reshape(12, 12)
    np.testing.assert_allclose(together, expected, atol=1e-4, rtol=0)
    assert together != expected.tolist()  # so that beginnings were shared
