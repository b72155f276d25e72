"""DrawnReplies that are no answer are left out by one rule in every role: this costs power, and not the level.

Tolerances are four standard errors of the runs at hand; seeds are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate

from pipeline.endpoint.replies import DrawnReplies, answers, read_replies
from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.procedures.record import decide

ALPHA = Fraction(1, 10)
DRAWS, CALIBRATION, NULLS, MEMBERS = 3, 150, 60, 60
RUNS = 1_000


@dataclass(frozen=True, slots=True)
class Refusing:
    """How often draws are refused, and by which rule they are left out."""

    nulls: float  # mean probability
    members: float
    calibration_rule: bool = True  # False: refusals of calibration documents are scored as texts


def documents(count: int, shift: float, refused: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores of draws, NaN where one is refused, and those scores with 0 in its place, as a refusal has.

    The probability of a refusal grows with what the model knows of a document, as its scores do.
    """
    known = rng.normal(shift, 1, count)
    scores = np.exp(known[:, None] + rng.normal(0, 0.5, (count, DRAWS)))
    odds = refused / (1 - refused) * np.exp(known - shift) if refused else np.zeros(count)
    none = rng.random((count, DRAWS)) < (odds / (1 + odds))[:, None]
    return np.where(none, np.nan, scores), np.where(none, 0.0, scores)


def score(draws: np.ndarray) -> np.ndarray:
    """The mean over the answers of each document that has one."""
    answered = draws[~np.isnan(draws).all(axis=1)]
    return np.nanmean(answered, axis=1)


def audit(setting: Refusing, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """The share of wrong documents and the power of each procedure in one audit."""
    left_out, scored = documents(CALIBRATION, 0, setting.nulls, rng)
    calibration = calibrate(score(left_out) if setting.calibration_rule else scored.mean(axis=1))
    nulls, members = (
        np.bincount(
            ranks(score(documents(count, shift, refused, rng)[0]), calibration, "members") - 1,
            minlength=calibration.size + 1,
        )
        for count, shift, refused in ((NULLS, 0.0, setting.nulls), (MEMBERS, 2.5, setting.members))
    )
    unanswered = NULLS + MEMBERS - int(nulls.sum() + members.sum())
    counts = RankCounts(nulls + members).with_quarantined(unanswered)
    found = {}
    for procedure in ("bh", "storey"):
        rank = decide(procedure, counts, ALPHA).rank
        wrong, right = int(nulls[:rank].sum()), int(members[:rank].sum())
        found[procedure] = wrong / max(1, wrong + right), right / MEMBERS
    return found


def simulate(setting: Refusing, seed: int) -> dict[str, tuple[Estimate, Estimate]]:
    rng = np.random.default_rng(seed)
    runs = [audit(setting, rng) for _ in range(RUNS)]
    return {
        name: (Estimate.of([run[name][0] for run in runs]), Estimate.of([run[name][1] for run in runs]))
        for name in ("bh", "storey")
    }


SETTINGS = {
    "none is refused": Refusing(0.0, 0.0),
    "all alike": Refusing(0.4, 0.4),
    "members more": Refusing(0.2, 0.7),
    "members less": Refusing(0.6, 0.1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_level_holds_however_often_members_are_refused(name: str) -> None:
    null_share = NULLS / (NULLS + MEMBERS)
    for procedure, (fdr, _) in simulate(SETTINGS[name], 5).items():
        promised = float(ALPHA) * (null_share if procedure == "bh" else 1)
        assert fdr.mean <= promised + 4 * fdr.se, (procedure, fdr)


def test_members_that_are_refused_more_often_cost_power() -> None:
    alike, more = (simulate(Refusing(0.2, members), 6) for members in (0.2, 0.7))
    for procedure in ("bh", "storey"):
        (_, before), (_, after) = alike[procedure], more[procedure]
        assert before.mean - after.mean > 4 * np.hypot(before.se, after.se) + 0.1


def test_another_rule_for_the_documents_that_calibrate_would_break_the_level() -> None:
    """So the first test notices a rule that one role alone follows."""
    for fdr, _ in simulate(Refusing(0.4, 0.4, calibration_rule=False), 7).values():
        assert fdr.mean > float(ALPHA) + 4 * fdr.se


def test_the_program_leaves_out_what_is_simulated() -> None:
    rng = np.random.default_rng(8)
    left_out, _ = documents(200, 0, 0.6, rng)
    kept = []
    for row in left_out:
        texts = ["I can't continue copyrighted text." if np.isnan(one) else f"value {one!r}" for one in row]
        draws = DrawnReplies()
        choices = [{"message": {"content": text}} for text in texts]
        draws.add(read_replies({"choices": choices}, "chat", "some document", "that goes on"))
        if draws.problem(DRAWS) is None:
            kept_texts = answers(draws.texts, DRAWS)
            kept.append(
                np.mean(
                    [float(text.removeprefix("value ").removeprefix("np.float64(").rstrip(")")) for text in kept_texts]
                )
            )
    assert 20 < len(kept) < 180
    assert np.allclose(kept, score(left_out), rtol=1e-12)
