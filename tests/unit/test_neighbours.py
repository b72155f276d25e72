"""The nearest calibration documents are those of a comparison with all."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.top_documents import NEIGHBOURS, nearest_known


def places_of(scores: np.ndarray, known: np.ndarray, *groups: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return [[place for place in row if place >= 0] for row in nearest_known(scores, known, *groups).tolist()]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), n=st.integers(0, 40), grouped=st.booleans())
def test_they_are_the_nearest_of_all_or_of_the_group_of_a_document(seed: int, n: int, grouped: bool) -> None:
    rng = np.random.default_rng(seed)
    scores, known = rng.normal(size=7), rng.normal(size=n)
    of, groups = (rng.choice(np.array(["a", "b", None], dtype=object), size) for size in (7, n))
    places = places_of(scores, known, *([(of, groups)] if grouped else []))
    for score, group, found in zip(scores, of, places, strict=True):
        members = np.flatnonzero(groups == group) if grouped else np.arange(n)
        nearest = np.argsort(np.abs(known[members] - score), kind="stable")[:NEIGHBOURS]
        assert found == members[nearest].tolist()


def test_equal_scores_count_as_near_and_no_document_twice() -> None:
    known = np.array([1.0] * 9 + [2.0, 0.0])
    (places,) = places_of(np.array([1.0]), known)
    assert known[places].tolist() == [1.0] * NEIGHBOURS
    assert len(set(places)) == NEIGHBOURS
