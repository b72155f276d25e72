"""The nearest calibration documents are those of a comparison with all, however these are cut into shards."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.top_documents import NEIGHBOURS, Neighbours


def brute(score: float, known: np.ndarray) -> list[tuple[str, float]]:
    order = np.argsort(np.abs(known - score), kind="stable")[:NEIGHBOURS]
    return [(f"k{place}", float(known[place])) for place in order]


def taken_in(
    near: Neighbours, known: np.ndarray, groups: np.ndarray | None, size: int
) -> list[list[tuple[str, float]]]:
    for start in range(0, len(known), size):
        part = None if groups is None else groups[start : start + size]
        near.add(known[start : start + size], part, lambda places, start=start: [f"k{start + p}" for p in places])
    return near.pairs()


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), n=st.integers(0, 40), size=st.integers(1, 17))
def test_they_are_the_nearest_of_all_of_any_number_of_shards(seed: int, n: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    scores, known = rng.normal(size=7), rng.normal(size=n)
    assert taken_in(Neighbours.of(scores, None), known, None, size) == [brute(score, known) for score in scores]


def test_equal_scores_count_as_near_and_no_document_twice() -> None:
    known = np.array([1.0] * 9 + [2.0, 0.0])
    (pairs,) = taken_in(Neighbours.of(np.array([1.0]), None), known, None, 4)
    assert [score for _, score in pairs] == [1.0] * NEIGHBOURS
    assert len({name for name, _ in pairs}) == NEIGHBOURS


def test_where_documents_are_ranked_in_their_group_only_those_of_the_group_are_near() -> None:
    rng = np.random.default_rng(3)
    known, groups = rng.normal(size=30), np.array(["a", None, "b"] * 10, dtype=object)
    scores, of = np.array([0.1, 0.2, 0.3]), np.array(["b", "a", "none"], dtype=object)
    pairs = taken_in(Neighbours.of(scores, of), known, groups, 8)
    for index, group in enumerate(["b", "a"]):
        members = np.flatnonzero(groups == group)
        nearest = members[np.argsort(np.abs(known[members] - scores[index]), kind="stable")[:NEIGHBOURS]]
        assert pairs[index] == [(f"k{place}", float(known[place])) for place in nearest]
    assert pairs[2] == []
