"""Monte Carlo claims about combined scores ranked by group, with weights too: the level holds, and what they find.

Assumption: in each group null and calibration documents are exchangeable, independent draws for storey. Seeds are
fixed, tolerances four standard errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from simulation import Estimate

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import Scores, answer_all

RUNS, RECORDED_RUNS = 200, 1_000
SHIFTS = np.array([2.5, 1.5, 0.5])


@dataclass(frozen=True)
class Audit:
    """Audits of groups with three detectors that correlate by .5, at levels that differ by 5 and other scales."""

    known: tuple[int, ...]  # calibration documents of each group
    audited: tuple[int, ...]
    members: tuple[int, ...]  # of the audited documents
    seen: int = 0  # known members, of the first group
    outliers: float = 0.0  # share of documents of both roles that are 6 higher by the last detector
    decimals: int | None = None

    def draw(self, rng: np.random.Generator) -> tuple[Scores, np.ndarray]:
        """The scores of unseen, audited and known members, in this order, and which audited ones are members."""
        sizes = [*self.known, *self.audited, self.seen]
        group = np.repeat([*range(len(self.known)), *range(len(self.audited)), 0], sizes)
        member = [np.arange(m) < k for m, k in zip(self.audited, self.members, strict=True)]
        shifted = np.concatenate([np.zeros(sum(self.known), bool), *member, np.ones(self.seen, bool)])
        rows = (rng.normal(size=(group.size, 1)) + rng.normal(size=(group.size, 3))) / np.sqrt(2)
        rows += shifted[:, None] * SHIFTS
        rows[:, 2] += 6.0 * (rng.random(group.size) < self.outliers)
        rows = rows * (1 + group[:, None]) + 5 * group[:, None]
        rows = rows if self.decimals is None else rows.round(self.decimals)
        keys = rng.integers(-(2**63), 2**63 - 1, group.size)
        names = pa.array([f"g{one}" for one in group.tolist()])
        return Scores(dict(zip("xyz", rows.T, strict=True)), keys, names), np.concatenate(member)


WAYS: dict[str, dict[str, Any]] = {
    "half": {"procedure": "adadetect", "learn": "split"},
    "pool": {"procedure": "adadetect", "learn": "pool"},
    "fused": {"procedure": "td4eval", "reconformal": True},
}

LEVEL = {
    "no members": Audit((40, 20), (30, 50), (0, 0)),
    "few members in another mix of groups": Audit((80, 20), (20, 80), (0, 8)),
    "many members": Audit((40, 40), (60, 40), (50, 10)),
    "ties": Audit((40, 40), (40, 40), (15, 5), decimals=0),
    "outliers in both roles": Audit((60, 40), (30, 60), (15, 0), outliers=0.1),
    "20 calibration documents": Audit((10, 10), (30, 30), (12, 0)),
    "known members": Audit((40, 40), (40, 60), (15, 5), seen=30),
}


def simulate(
    audit: Audit,
    alpha: float = 0.1,
    ranks: str = "whole",
    boosts: tuple[str | None, ...] = (None,),
    runs: int = RUNS,
    ways: tuple[str, ...] = tuple(WAYS),
) -> dict[str, tuple[Estimate, float]]:
    """FDR and power by way, step-up and, with weights, "boost", in the same audits."""
    shared = {"detectors": ["x", "y", "z"], "calibration": "by_group", "alpha": alpha, "ranks": ranks}
    asked = [
        SelectionConfig.model_validate(
            {"name": f"{way}.{step_up}{'.boost' * (boost is not None)}", "step_up": step_up, "boost": boost}
            | WAYS[way]
            | shared
        )
        for way in ways
        for step_up in ("bh", "storey")
        for boost in boosts
    ]
    ends = np.cumsum([0, sum(audit.known), sum(audit.audited), audit.seen]).tolist()
    roles = {name: np.arange(*ends[i : i + 2]) for i, name in enumerate(("unseen", "audit", "seen"))}
    roles = {name: places for name, places in roles.items() if places.size}
    rng = np.random.default_rng([*audit.known, *audit.members])
    wrong: dict[str, list[float]] = {one.name: [] for one in asked}
    right: dict[str, list[float]] = {one.name: [] for one in asked}
    for _ in range(runs):
        scores, member = audit.draw(rng)
        for one, made in zip(asked, answer_all(asked, scores, roles, 0, 0), strict=True):
            false, true = int((made.selected & ~member).sum()), int((made.selected & member).sum())
            wrong[one.name].append(false / max(1, false + true))
            right[one.name].append(true / max(1, int(member.sum())))
    return {name: (Estimate.of(wrong[name]), float(np.mean(right[name]))) for name in wrong}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["whole", "smoothed"])
@pytest.mark.parametrize(
    ("name", "alpha"), [*((name, 0.1) for name in LEVEL), ("many members", 0.05), ("no members", 0.3)]
)
def test_the_level_holds_by_group(name: str, alpha: float, ranks: str) -> None:
    audit = LEVEL[name]
    nulls = 1 - sum(audit.members) / sum(audit.audited)
    for way, (fdr, _) in simulate(audit, alpha, ranks).items():
        limit = alpha if way.endswith("storey") else alpha * nulls
        assert fdr.mean <= limit + 4 * fdr.se, (way, fdr)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["whole", "smoothed"])
@pytest.mark.parametrize(
    ("name", "alpha"),
    [*((name, 0.1) for name in LEVEL), *(("few members in another mix of groups", alpha) for alpha in (0.05, 0.3))],
)
def test_the_level_holds_with_weights(name: str, alpha: float, ranks: str) -> None:
    for way, (fdr, _) in simulate(LEVEL[name], alpha, ranks, ("group",)).items():
        assert fdr.mean <= alpha + 4 * fdr.se, (way, fdr)


def test_nulls_alone_in_another_mix_of_groups_use_the_level_up_with_weights() -> None:
    """Few audited documents and a grid of many p-values: a weight that read roles would show above the level."""
    audit = Audit((49, 99), (12, 4), (0, 0))
    for way, (fdr, _) in simulate(audit, 0.3, boosts=("group",), runs=120, ways=("pool", "fused")).items():
        assert fdr.mean <= 0.3 + 4 * fdr.se, (way, fdr)
        assert fdr.mean > 0.1, (way, fdr)


RECORDED: dict[str, tuple[Audit, dict[str, float]]] = {
    "two groups": (
        Audit((100, 100), (100, 100), (60, 0)),
        {
            "half.bh": 0.159,
            "half.bh.boost": 0.256,
            "half.storey": 0.296,
            "half.storey.boost": 0.422,
            "pool.bh": 0.400,
            "pool.bh.boost": 0.478,
            "pool.storey": 0.517,
            "pool.storey.boost": 0.610,
            "fused.bh": 0.065,
            "fused.bh.boost": 0.168,
            "fused.storey": 0.148,
            "fused.storey.boost": 0.355,
        },
    ),
    "four groups": (
        Audit((50,) * 4, (50,) * 4, (30, 0, 0, 0)),
        {"pool.bh": 0.002, "pool.bh.boost": 0.047, "pool.storey": 0.012, "pool.storey.boost": 0.108},
    ),
}
"""Power at alpha .1 in 1,000 audits: docs/methods.md, section 6.3."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_weights_find_the_recorded_share_of_members(name: str) -> None:
    audit, figures = RECORDED[name]
    found = simulate(audit, boosts=(None, "group"))
    for way, figure in figures.items():
        # a list finds none or some of the members: the standard error is at most that of a share of audits
        spread = math.sqrt(max(figure, 0.02) * (1 - figure) * (1 / RUNS + 1 / RECORDED_RUNS))
        assert abs(found[way][1] - figure) <= 4 * spread, (way, found[way][1])
