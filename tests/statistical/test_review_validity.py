"""A review of contaminated calibration: its level alpha / (1 - e), the power regained, and what loses the level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from simulation import Estimate

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import Scores, answer_all

ALPHA, N, M, MEMBERS, LISTED, RUNS = 0.1, 400, 200, 40, 40, 1_500
NULLS = (M - MEMBERS) / M
BH = SelectionConfig(name="bh", detectors=["s"], alpha=ALPHA)
SURE = 4
"""Standard errors: one test in 30,000 fails by chance."""


@dataclass
class Simulated:
    """One simulated audit: scores of N calibration documents, of which some are members, and of M audited ones."""

    scores: np.ndarray  # calibration first, then MEMBERS members, then nulls
    seen: np.ndarray  # bool, (N,)
    listed: np.ndarray  # the LISTED highest calibration documents

    @classmethod
    def draw(cls, rng: np.random.Generator, contaminated: float, shift: float) -> Simulated:
        seen = np.arange(N) < round(contaminated * N)
        scores = rng.normal(size=N + M)
        scores[:N] += shift * seen
        scores[N : N + MEMBERS] += 2.5
        return cls(scores, seen, np.argsort(-scores[:N])[:LISTED])

    def p_values(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """p-values and selected among the audited documents, with the calibration documents that are kept."""
        keys = np.arange(N + M, dtype=np.int64)
        roles = {"unseen": np.flatnonzero(kept), "audit": np.arange(N, N + M)}
        (verdict,) = answer_all([BH], Scores({"s": self.scores}, keys), roles, 0, 0)  # type: ignore[arg-type]
        return verdict.p, verdict.selected

    def without(self, removed: np.ndarray) -> np.ndarray:
        kept = np.ones(N, dtype=bool)
        kept[removed] = False
        return kept


def outcomes(contaminated: float, shift: float = 2.5, runs: int = RUNS) -> dict[str, list[tuple[float, float, float]]]:
    """(share of wrong, power, e) of every audit, by how its calibration documents were reviewed."""
    rng = np.random.default_rng([round(100 * contaminated), round(10 * abs(shift))])
    results: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(runs):
        audit = Simulated.draw(rng, contaminated, shift)
        truth = audit.seen[audit.listed]
        answers = truth | (rng.random(LISTED) < 0.2)  # one unseen document in five is taken for a seen one
        ways = {
            "clean": ~audit.seen,
            "none": np.ones(N, dtype=bool),
            "confirmed": audit.without(audit.listed[truth]),
            "wrong": audit.without(audit.listed[answers]),
            "all": audit.without(audit.listed),
        }
        for way, kept in ways.items():
            _, selected = audit.p_values(kept)
            wrong = selected[MEMBERS:].sum() / max(1, selected.sum())
            results.setdefault(way, []).append((wrong, selected[:MEMBERS].mean(), audit.seen[kept].mean()))
    return results


def excess(results: list[tuple[float, float, float]]) -> Estimate:
    """The share of wrong above NULLS alpha / (1 - e), to which Benjamini-Hochberg keeps on average."""
    return Estimate.of([wrong - NULLS * ALPHA / (1 - e) for wrong, _, e in results])


def gained(better: list[tuple[float, float, float]], worse: list[tuple[float, float, float]]) -> Estimate:
    return Estimate.of([b[1] - w[1] for b, w in zip(better, worse, strict=True)])


@pytest.mark.parametrize("contaminated", [0.02, 0.05, 0.1])
def test_a_confirmed_review_keeps_its_level_and_regains_power_and_others_lose_the_level(contaminated: float) -> None:
    results = outcomes(contaminated)
    level = {way: excess(values) for way, values in results.items()}
    assert level["confirmed"].mean <= SURE * level["confirmed"].se
    assert level["none"].mean <= SURE * level["none"].se
    regained = gained(results["confirmed"], results["none"])
    assert regained.mean >= SURE * regained.se
    lost = gained(results["clean"], results["none"])
    assert regained.mean >= 0.9 * lost.mean > 0.2
    for way in ("all", "wrong"):
        assert level[way].mean >= SURE * level[way].se


def test_the_level_rises_by_the_remaining_documents_where_these_score_low() -> None:
    results = outcomes(0.1, shift=-4.0)
    risen = Estimate.of([r[0] - c[0] for r, c in zip(results["confirmed"], results["clean"], strict=True)])
    assert risen.mean >= SURE * risen.se
    level = excess(results["confirmed"])
    assert level.mean <= SURE * level.se


@pytest.mark.parametrize("shift", [-4.0, 0.0, 2.5])
def test_p_values_are_at_least_those_of_clean_calibration_times_the_share_that_is_clean(shift: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        audit = Simulated.draw(rng, 0.1, shift)
        kept = audit.without(audit.listed[audit.seen[audit.listed]])
        p, _ = audit.p_values(kept)
        clean, nulls = np.sort(audit.scores[:N][~audit.seen]), audit.scores[N:]
        by_hand = (1 + clean.size - np.searchsorted(clean, nulls, side="left")) / (1 + clean.size)
        e = audit.seen[kept].mean()
        assert (p >= (1 - e) * by_hand - 1e-12).all()
