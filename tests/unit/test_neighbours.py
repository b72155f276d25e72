"""The nearest calibration documents are those of a comparison with all."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.top_documents import NEIGHBOURS, nearest_known


def brute(score: float, known: np.ndarray) -> list[int]:
    return np.argsort(np.abs(known - score), kind="stable")[:NEIGHBOURS].tolist()


def places_of(scores: np.ndarray, known: np.ndarray, *groups: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return [[place for place in row if place >= 0] for row in nearest_known(scores, known, *groups).tolist()]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), n=st.integers(0, 40))
def test_they_are_the_nearest_of_all(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    scores, known = rng.normal(size=7), rng.normal(size=n)
    assert places_of(scores, known) == [brute(score, known) for score in scores]


def test_equal_scores_count_as_near_and_no_document_twice() -> None:
    known = np.array([1.0] * 9 + [2.0, 0.0])
    (places,) = places_of(np.array([1.0]), known)
    assert known[places].tolist() == [1.0] * NEIGHBOURS
    assert len(set(places)) == NEIGHBOURS


def test_where_documents_are_ranked_in_their_group_only_those_of_the_group_are_near() -> None:
    rng = np.random.default_rng(3)
    known, groups = rng.normal(size=30), np.array(["a", None, "b"] * 10, dtype=object)
    scores, of = np.array([0.1, 0.2, 0.3]), np.array(["b", "a", "none"], dtype=object)
    places = places_of(scores, known, (of, groups))
    for index, group in enumerate(["b", "a"]):
        members = np.flatnonzero(groups == group)
        assert places[index] == members[brute(scores[index], known[members])].tolist()
    assert places[2] == []
