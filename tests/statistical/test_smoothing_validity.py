"""Monte Carlo claims about smoothed ranks: the error rate and the power of procedures, and what is not valid.

Assumption: null audit documents and calibration documents are exchangeable, within groups where there are some; ids,
whose hashes smooth the ranks, have nothing to do with scores. Seeds are fixed. Tolerances are four standard errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.special import ndtri
from simulation import Estimate

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import Scores, answer_all

pytestmark = pytest.mark.slow

RUNS = 1_000
NEAR = 0.05
"""Of the power that docs/procedures.md states, from 6,000 audits."""


@dataclass(frozen=True)
class Audit:
    """n unseen and m audited documents, of which a share are members, scored with an AUC; scores may be rounded."""

    n: int
    m: int
    share: float
    auc: float = 0.95
    digits: int | None = None
    groups: int = 1
    outliers: float = 0.0  # share of documents of both roles whose score is 6 higher

    def draw(self, rng: np.random.Generator) -> tuple[Scores, np.ndarray]:
        """The scores of unseen, then of audited documents, and which are members; roles mix groups differently."""
        mix = np.arange(1, self.groups + 1) / (self.groups * (self.groups + 1) / 2)
        group = np.concatenate([np.arange(self.n) % self.groups, rng.choice(self.groups, self.m, p=mix)])
        member = np.concatenate(
            [np.zeros(self.n, dtype=bool), rng.random(self.m) < self.share * (0.5 + group[self.n :])]
        )
        if self.groups == 1:
            member[self.n :] = rng.permutation(np.arange(self.m) < round(self.share * self.m))
        scores = rng.normal(size=self.n + self.m) + member * np.sqrt(2) * ndtri(self.auc)
        scores = scores + 6.0 * (rng.random(scores.size) < self.outliers)
        scores = scores * (1 + group) + 2 * group
        if self.digits is not None:
            scores = scores.round(self.digits)
        keys = rng.integers(-(2**63), 2**63 - 1, scores.size)
        names = pa.array(group.astype(str), pa.string()) if self.groups > 1 else None
        return Scores({"x": scores}, keys, names), member[self.n :]


def simulate(
    audit: Audit, procedure: str, alpha: float, ranks: str = "smoothed", runs: int = RUNS
) -> dict[str, Estimate]:
    """FDR, share of members found, and the mean of alpha times the share of nulls, over audits with fresh documents."""
    grouped = "by_group" if audit.groups > 1 else "pooled"
    one = SelectionConfig.model_validate(
        {
            "name": "a",
            "detectors": ["x"],
            "procedure": procedure,
            "alpha": alpha,
            "ranks": ranks,
            "calibration": grouped,
        }
    )
    rng = np.random.default_rng([audit.n, audit.m, round(100 * audit.share), audit.groups])
    roles = {"unseen": np.arange(audit.n), "audit": np.arange(audit.n, audit.n + audit.m)}
    values: dict[str, list[float]] = {"fdr": [], "power": [], "due": []}
    for _ in range(runs):
        scores, member = audit.draw(rng)
        (made,) = answer_all([one], scores, roles, 0, 0)
        size = max(1, int(made.selected.sum()))
        values["fdr"].append(float((made.selected & ~member).sum() / size))
        values["power"].append(float((made.selected & member).sum() / max(1, member.sum())))
        values["due"].append(alpha * float((~member).mean()))
    return {name: Estimate.of(numbers) for name, numbers in values.items()}


@pytest.mark.parametrize("procedure", ["bh", "by", "storey"])
@pytest.mark.parametrize(
    ("audit", "alpha"),
    [
        (Audit(20, 50, 0.0), 0.1),
        (Audit(50, 10, 0.0), 0.2),
        (Audit(20, 100, 0.1), 0.1),
        (Audit(30, 100, 0.5), 0.05),
        (Audit(100, 300, 0.1, 0.99), 0.1),
        (Audit(60, 200, 0.8), 0.2),
        (Audit(1000, 300, 0.3), 0.05),
        (Audit(40, 100, 0.2, digits=0), 0.2),
        (Audit(80, 120, 0.2, groups=4), 0.1),
        (Audit(60, 90, 0.0, groups=4), 0.2),
        (Audit(50, 100, 0.2, outliers=0.1), 0.1),
        (Audit(50, 100, 0.0, outliers=0.1), 0.05),
    ],
)
def test_the_error_rate_stays_at_alpha(audit: Audit, alpha: float, procedure: str) -> None:
    """Few, many and no members, ties, outliers, groups mixed differently; bh, by: alpha times the share of nulls."""
    made = simulate(audit, procedure, alpha, runs=RUNS if audit.groups == 1 else RUNS // 2)
    limit = alpha if procedure == "storey" else made["due"].mean
    assert made["fdr"].mean <= limit + 4 * made["fdr"].se


@pytest.mark.parametrize(
    ("audit", "procedure", "whole", "smoothed"),
    [
        (Audit(100, 300, 0.1, 0.99), "bh", 0.25, 0.46),
        (Audit(100, 300, 0.1, 0.99), "storey", 0.36, 0.54),
        (Audit(50, 300, 0.3, 0.95), "bh", 0.26, 0.34),
        (Audit(50, 300, 0.3, 0.95), "storey", 0.45, 0.51),
        (Audit(30, 100, 0.5, 0.95), "bh", 0.37, 0.48),
        (Audit(30, 100, 0.5, 0.95), "storey", 0.69, 0.73),
    ],
)
def test_the_power_is_that_of_the_page_on_procedures(
    audit: Audit, procedure: str, whole: float, smoothed: float
) -> None:
    found = {ranks: simulate(audit, procedure, 0.1, ranks)["power"].mean for ranks in ("whole", "smoothed")}
    assert abs(found["whole"] - whole) <= NEAR
    assert abs(found["smoothed"] - smoothed) <= NEAR


@pytest.mark.parametrize("step_up", ["bh", "storey"])
@pytest.mark.parametrize(
    "settings",
    [
        {"procedure": "adadetect", "learn": "split"},
        {"procedure": "adadetect", "learn": "pool"},
        {"procedure": "td4eval", "reconformal": True},
    ],
)
@pytest.mark.parametrize(("share", "seen"), [(0.0, 0), (0.3, 0), (0.3, 30)])
def test_learnt_and_fused_scores_keep_alpha(settings: dict[str, Any], step_up: str, share: float, seen: int) -> None:
    """Held-out ranks of a score that is one function of calibration and audited documents; known members or none."""
    one = SelectionConfig.model_validate(
        {"name": "a", "detectors": ["x", "y", "z"], "alpha": 0.2, "ranks": "smoothed", "step_up": step_up, **settings}
    )
    rng, n, m = np.random.default_rng([seen, round(100 * share)]), 60, 80
    ends = np.cumsum([n, m, seen])
    roles = {"unseen": np.arange(n), "audit": np.arange(n, ends[1]), **({"seen": np.arange(*ends[1:])} if seen else {})}
    member = np.concatenate([np.zeros(n, dtype=bool), np.arange(m) < share * m, np.ones(seen, dtype=bool)])
    wrong = []
    for _ in range(300):
        matrix = np.sqrt(0.5) * (rng.normal(size=(ends[2], 1)) + rng.normal(size=(ends[2], 3)))
        matrix += member[:, None] * np.array([2.5, 1.5, 0.0])
        keys = rng.integers(-(2**63), 2**63 - 1, ends[2])
        (made,) = answer_all([one], Scores(dict(zip("xyz", matrix.T, strict=True)), keys), roles, 0, 0)
        wrong.append(float((made.selected & ~member[n : ends[1]]).sum() / max(1, made.selected.sum())))
    fdr, limit = Estimate.of(wrong), 0.2 if step_up == "storey" else 0.2 * (1 - share)
    assert fdr.mean <= limit + 4 * fdr.se


def test_without_members_alpha_of_the_audits_select_something() -> None:
    """An equality for bh: a grid of whole ranks leaves nearly all of alpha unused, smoothed ranks nothing."""
    audit = Audit(30, 100, 0.0)
    made = simulate(audit, "bh", 0.1, runs=2_000)["fdr"]
    assert abs(made.mean - 0.1) <= 4 * made.se
    assert simulate(audit, "bh", 0.1, "whole")["fdr"].mean < 0.05


def test_an_estimate_of_nulls_from_smoothed_p_would_exceed_alpha() -> None:
    """Why the share of nulls is estimated from whole ranks: an estimate from smoothed p-values selects more."""
    rng, wrong = np.random.default_rng(6), {"whole": [], "smoothed": []}  # type: ignore[var-annotated]
    n, m = 9, 10
    for _ in range(20_000):
        known, audited = np.sort(rng.normal(size=n)), rng.normal(size=m)
        rank = 1 + n - np.searchsorted(known, audited)
        p = (rank - 1 + rng.random(m)) / (n + 1)
        for name, counted in (("whole", rank / (n + 1)), ("smoothed", p)):
            pi0 = (1 + (counted >= 0.5).sum()) / (m * 0.5)
            wrong[name].append(float((np.sort(p) * m * pi0 <= 0.1 * np.arange(1, m + 1)).any()))
    made = {name: Estimate.of(values) for name, values in wrong.items()}
    assert made["whole"].mean <= 0.1 + 4 * made["whole"].se
    assert made["smoothed"].mean > made["whole"].mean


def test_each_smoothed_p_value_of_a_null_is_uniform() -> None:
    """Also in the last cell; ties make it larger."""
    one = SelectionConfig(name="a", detectors=["x"], procedure="bh", ranks="smoothed")
    audit, rng, p = Audit(7, 1, 0.0), np.random.default_rng(9), []
    for _ in range(2_000):
        scores, _ = audit.draw(rng)
        roles = {"unseen": np.arange(7), "audit": np.arange(7, 8)}
        (made,) = answer_all([one], scores, roles, 0, 0)
        assert made.answer.smoothing is not None
        batch = scores.batch(roles["audit"], one)
        columns = made.answer.smoothing.columns(made.answer.smoothing.rank(batch), batch.keys)
        p.append(float(columns["smoothed_p"][0]))
        assert made.selected[0] == (Fraction(p[-1]) <= Fraction(1, 10))
    assert np.abs(np.sort(p) - np.arange(1, 2_001) / 2_001).max() < 1.63 / np.sqrt(2_000), "Kolmogorov-Smirnov at .01"
