"""Monte Carlo claims about a selection under several models, which share documents, noise and calibration.

Seeds are fixed, so a test passes always or never. A tolerance is four standard errors, estimated from the runs at hand.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate

from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.joint import JointEvidence, joint_select
from pipeline.selection.procedures.record import decide

ALPHA = Fraction(1, 10)
MODELS = 3


def clean_p_values(
    rng: np.random.Generator, seen: np.ndarray, n: int, effect: float, alike: float, copies: bool
) -> np.ndarray:
    """p-values of direction clean, (models, documents), calibrated on n documents that each model has seen.

    A score is noise, of which a share `alike` is the document's own under every model, plus `effect` where the model
    has seen it. With `copies` all documents of an audit are copies of one.
    """
    m = seen.shape[1]

    def noise(count: int, equal: bool) -> np.ndarray:
        common = rng.normal(size=(1, 1 if equal else count))
        single = rng.normal(size=(MODELS, 1 if equal else count))
        return np.broadcast_to(math.sqrt(alike) * common + math.sqrt(1 - alike) * single, (MODELS, count))

    known, audited = noise(n, False) + effect, noise(m, copies) + effect * seen
    return np.stack([ranks(a, calibrate(k), "clean") / (n + 1) for a, k in zip(audited, known, strict=True)])


def members(rng: np.random.Generator, m: int, kind: str) -> np.ndarray:
    """Which model has seen which document: bool, (models, documents)."""
    if kind == "one model each":  # no document is clean under all
        return np.arange(MODELS)[:, None] == rng.integers(MODELS, size=m)
    if kind == "all the same":
        return np.broadcast_to(rng.random(m) < 0.5, (MODELS, m))
    return rng.random((MODELS, m)) < 0.3


def error(selected: np.ndarray, seen: np.ndarray) -> float:
    """Share of the selected that some model has seen."""
    return float((selected & seen.any(axis=0)).sum() / max(1, selected.sum()))


@pytest.mark.parametrize("alike", [pytest.param(0.0, marks=pytest.mark.slow), 0.95])
@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("kind", ["one model each", "all the same", "by chance"])
@pytest.mark.parametrize(("n", "m"), [(199, 20), pytest.param(499, 200, marks=pytest.mark.slow)])
def test_e_bh_on_the_smallest_e_value_keeps_alpha_under_any_dependence(
    n: int, m: int, kind: str, copies: bool, alike: float
) -> None:
    rng = np.random.default_rng(61)
    evidence = [JointEvidence.of(n, m, ALPHA)] * MODELS
    joint, largest = [], []
    for _ in range(150):
        seen = members(rng, m, kind)
        p = clean_p_values(rng, seen, n, 3.0, alike, copies)
        joint.append(error(joint_select(evidence, p), seen))
        largest.append(error(joint_select([one.plain() for one in evidence], p), seen))
    for values in (joint, largest):
        measured = Estimate.of(values)
        assert measured.mean <= 0.1 + 4 * measured.se


def test_intersected_lists_break_the_promise_that_the_joint_list_keeps() -> None:
    """Each list keeps its alpha; what is on all of them is wrong more often, as what is right on each differs."""
    rng, n, m = np.random.default_rng(62), 999, 300
    evidence = [JointEvidence.of(n, m, ALPHA)] * MODELS
    apart, single, joint = [], [], []
    for _ in range(100):
        seen = np.zeros((MODELS, m), dtype=bool)
        seen[np.arange(MODELS).repeat(95), np.arange(285)] = True  # 15 of 300 are clean under all
        p = clean_p_values(rng, seen, n, 2.0, 0.5, False)
        lists = np.stack([row <= (decide("bh", _counts(row, n), ALPHA).threshold or 0) for row in p])
        apart.append(error(lists.all(axis=0), seen))
        single.append(error(lists[0], seen[:1]))
        joint.append(error(joint_select(evidence, p), seen))
    assert Estimate.of(single).mean <= 0.1 + 4 * Estimate.of(single).se
    assert Estimate.of(apart).mean > 0.5
    assert Estimate.of(joint).mean <= 0.1 + 4 * Estimate.of(joint).se


def _counts(p: np.ndarray, n: int) -> RankCounts:
    return RankCounts.of(np.rint(p * (n + 1)).astype(int), n)


def test_bh_on_the_largest_p_value_breaks_and_the_joint_selection_does_not() -> None:
    """Guo & Rao's (2008) construction, each document a null of one model and certain under the other."""
    n, m, runs, rng = 99, 10, 2_500, np.random.default_rng(63)
    evidence = [JointEvidence.of(n, m, ALPHA)] * 2
    plain = [one.plain() for one in evidence]
    chances = [m / ((n + 1) * k) for k in range(1, m + 1)]
    wrong = np.zeros(2)
    for event in rng.choice(m + 1, size=runs, p=[*chances, 1 - sum(chances)]):
        places = rng.integers(m + 1, n + 2, size=m)
        if event < m:
            places[rng.permutation(m)[: event + 1]] = event + 1
        p = np.full((2, m), 1 / (n + 1))
        p[np.arange(m) % 2, np.arange(m)] = places / (n + 1)
        wrong += [joint_select(plain, p).any(), joint_select(evidence, p).any()]
    bad = 0.1 * sum(1 / k for k in range(1, m + 1))
    assert abs(wrong[0] / runs - bad) <= 4 * math.sqrt(bad * (1 - bad) / runs)
    assert wrong[1] / runs <= 0.1 + 4 * math.sqrt(0.09 / runs)


def test_the_joint_selection_finds_most_of_what_is_clean_under_all_models() -> None:
    """A third of 1,000 items is seen by each of three models: power of e-BH, and of BH on the largest p-value."""
    rng, n, m = np.random.default_rng(64), 1_000, 1_000
    evidence = [JointEvidence.of(n, m, ALPHA)] * MODELS
    joint, largest = [], []
    for _ in range(40):
        seen = rng.random((MODELS, m)) < 1 / 3
        clean = ~seen.any(axis=0)
        p = clean_p_values(rng, seen, n, 4.0, 0.5, False)
        joint.append(float((joint_select(evidence, p) & clean).sum() / clean.sum()))
        largest.append(float((joint_select([one.plain() for one in evidence], p) & clean).sum() / clean.sum()))
    assert Estimate.of(joint).mean > 0.5
    assert Estimate.of(largest).mean > Estimate.of(joint).mean
