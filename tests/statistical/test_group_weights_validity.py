"""Monte Carlo claims about weights of groups (`boost: group`): the level holds, and what they find.

Seeds are fixed. Tolerances are four standard errors, of the difference where a figure of 1,000 runs is recorded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from simulation import Estimate

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import Scores, answer_all

RUNS, RECORDED_RUNS = 250, 1_000
QUESTIONS = [("bh", None), ("bh", "group"), ("storey", None), ("storey", "group")]


@dataclass(frozen=True)
class Audit:
    """Audits of groups; scores are level + scale z, and z of members is `shift` higher."""

    known: tuple[int, ...]  # calibration documents of each group
    audited: tuple[int, ...]
    members: tuple[int, ...]  # of the audited documents
    shift: float = 2.5
    levels: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    outliers: float = 0.0  # share of documents of both roles whose z is 6 higher
    decimals: int | None = None  # rounded, so that many scores are equal
    quarantined: int = 0

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores and groups of the known and then of the audited documents, and which of these are members."""
        groups = [np.repeat(np.arange(len(sizes)), sizes) for sizes in (self.known, self.audited)]
        group = np.concatenate(groups)
        z = rng.normal(size=group.size) + 6.0 * (rng.random(group.size) < self.outliers)
        member = np.concatenate([np.arange(m) < k for m, k in zip(self.audited, self.members, strict=True)])
        z[groups[0].size :] += self.shift * member
        z = z if self.decimals is None else np.round(z, self.decimals)
        level, scale = np.zeros(len(self.known)), np.ones(len(self.known))
        level[: len(self.levels)], scale[: len(self.scales)] = self.levels, self.scales
        return level[group] + scale[group] * z, group, member


def simulate(
    audit: Audit,
    alpha: float = 0.1,
    runs: int = RUNS,
    draw: Callable[..., tuple[np.ndarray, ...]] | None = None,
    family: np.ndarray | None = None,
    ranks: Literal["whole", "smoothed"] = "whole",
) -> dict[str, tuple[Estimate, float]]:
    """FDR and power of each procedure by group, and with weights, in the same audits of fresh documents."""
    rng = np.random.default_rng([23, *audit.audited, *audit.members])
    shared = {"detectors": ["x"], "calibration": "by_group", "alpha": alpha, "ranks": ranks}
    asked = [
        SelectionConfig.model_validate({"name": f"{name}.{boost}", "procedure": name, "boost": boost, **shared})
        for name, boost in QUESTIONS
    ]
    wrong: dict[str, list[float]] = {one.name: [] for one in asked}
    right: dict[str, list[float]] = {one.name: [] for one in asked}
    first = sum(audit.known)
    for _ in range(runs):
        scores, group, member = (draw or audit.draw)(rng)
        names = pa.array([f"g{one}" for one in group])
        documents = Scores({"x": scores}, rng.integers(0, 2**62, scores.size), names, family)
        roles = {"audit": np.arange(first, scores.size), "unseen": np.arange(first)}
        for one, made in zip(asked, answer_all(asked, documents, roles, audit.quarantined, 0), strict=True):
            false, true = int((made.selected & ~member).sum()), int((made.selected & member).sum())
            wrong[one.name].append(false / max(1, false + true))
            right[one.name].append(true / max(1, int(member.sum())))
    return {one.name: (Estimate.of(wrong[one.name]), float(np.mean(right[one.name]))) for one in asked}


TWO = Audit((100, 100), (100, 100), (60, 0))
FOUR = Audit((50,) * 4, (50,) * 4, (30, 0, 0, 0))

LEVEL: dict[str, Audit] = {
    "no members": Audit((19,) * 3, (20, 40, 10), (0, 0, 0)),
    "one document of each group": Audit((9,) * 6, (1,) * 6, (0,) * 6),
    "few members": Audit((40, 40), (60, 60), (6, 0), 4),
    "many members": Audit((60, 60), (80, 80), (72, 40), 3),
    "nearly all of one group, none of another": Audit((100, 100), (100, 100), (95, 0), 4),
    "20 calibration documents": Audit((10, 10), (30, 30), (15, 0), 4),
    "1,000 calibration documents": Audit((600, 400), (90, 60), (30, 0), 3),
    "ties": Audit((60, 60), (50, 50), (25, 5), 3, decimals=0),
    "another mix of groups": Audit((180, 20, 50), (20, 160, 20), (10, 40, 0), 3),
    "other levels and scales": Audit((60,) * 3, (50,) * 3, (30, 5, 0), 3, levels=(0, 3, -8), scales=(1, 3, 0.2)),
    "outliers in both roles": Audit((80, 80), (60, 60), (20, 0), 3, outliers=0.1),
    "half without a score": Audit((60, 60), (40, 40), (30, 0), 3, quarantined=80),
    "small nulls beside a large group": Audit((200, 9, 9), (100, 4, 4), (60, 0, 0), 3),
}


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("name", LEVEL)
def test_the_level_holds_with_weights(name: str, alpha: float) -> None:
    """Assumption: in each group null and calibration documents are exchangeable, independent draws for storey."""
    for procedure, (fdr, _) in simulate(LEVEL[name], alpha).items():
        assert fdr.mean <= alpha + 4 * fdr.se, (procedure, fdr)


AT_OTHER_LEVELS = ["no members", "20 calibration documents", "another mix of groups"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "alpha"), [*((name, 0.1) for name in LEVEL), *itertools.product(AT_OTHER_LEVELS, (0.05, 0.3))]
)
def test_the_level_holds_with_weights_and_smoothed_ranks(name: str, alpha: float) -> None:
    """Assumption: as with whole ranks, and ids, whose hashes smooth the ranks, have nothing to do with scores."""
    for procedure, (fdr, _) in simulate(LEVEL[name], alpha, ranks="smoothed").items():
        assert fdr.mean <= alpha + 4 * fdr.se, (procedure, fdr)


@pytest.mark.slow
def test_without_members_weights_and_smoothed_ranks_use_the_whole_level() -> None:
    """An equality for bh without ties: alpha times the sum of the weights over m, at other mixes of groups too."""
    fdr = simulate(Audit((19, 39), (60, 20), (0, 0)), 0.2, 1_000, ranks="smoothed")["bh.group"][0]
    assert abs(fdr.mean - 0.2) <= 4 * fdr.se
    assert simulate(Audit((19, 39), (60, 20), (0, 0)), 0.2, 400)["bh.group"][0].mean < 0.1


def test_nulls_alone_use_the_level_up_so_that_a_wrong_weight_would_show() -> None:
    """With n + 1 = 20 and alpha (n + 1) / m an integer, some of the nulls are listed in about alpha of the audits."""
    audit = Audit((99, 99), (10, 10), (0, 0))
    found = simulate(audit, 0.2, 500)
    for procedure in ("bh.None", "bh.group", "storey.group"):
        fdr = found[procedure][0]
        assert fdr.mean <= 0.2 + 4 * fdr.se
        assert fdr.mean > 0.1, procedure

    def by_role(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Documents of the first group that are listed are known to be audited: another distribution of them."""
        scores, group, member = audit.draw(rng)
        scores[198:208] += 1.0
        return scores, group, member

    assert simulate(audit, 0.2, 100, by_role)["bh.group"][0].mean > 0.3, "where roles differ the level is lost"


NEAR_COPIES = {
    "families of 25": (Audit((100, 100), (100, 100), (20, 0), 3), 25),
    "families of 10": (Audit((200, 200), (50, 50), (0, 0), 3), 10),
    "five groups": (Audit((200,) * 5, (30,) * 5, (6, *[0] * 4), 3), 10),
}


@pytest.mark.parametrize("name", NEAR_COPIES)
@pytest.mark.parametrize("rho", [0.6, 0.95])
def test_the_level_holds_with_families_among_the_audited_documents(name: str, rho: float) -> None:
    """No theorem: weights depend on the families too. The level is not used up in these settings."""
    audit, size = NEAR_COPIES[name]
    first, many = sum(audit.known), sum(audit.audited)
    member = np.concatenate([np.arange(m) < k for m, k in zip(audit.audited, audit.members, strict=True)])
    numbers = np.where(member, many + np.arange(many), np.arange(many) // size)
    families = np.concatenate([2 * many + np.arange(first), numbers])

    def in_families(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        _, group, member = audit.draw(rng)
        own = rng.normal(size=group.size)
        family = np.repeat(rng.normal(size=member.size // size), size)
        own[first:] = math.sqrt(rho) * family + math.sqrt(1 - rho) * own[first:]
        own[first:][member] = rng.normal(size=int(member.sum())) + audit.shift
        return own, group, member

    found = simulate(audit, 0.1, 200, in_families, families)
    for procedure in ("bh.group", "storey.group"):
        fdr = found[procedure][0]
        assert fdr.mean <= 0.1 + 4 * fdr.se, (procedure, fdr)


RECORDED: dict[str, tuple[Audit, dict[str, float]]] = {
    "equal levels": (TWO, {"bh.None": 0.560, "bh.group": 0.665, "storey.None": 0.681, "storey.group": 0.792}),
    "four groups": (FOUR, {"bh.None": 0.000, "bh.group": 0.164, "storey.None": 0.031, "storey.group": 0.308}),
    "equal shares": (
        replace(TWO, members=(30, 30)),
        {"bh.None": 0.568, "bh.group": 0.517, "storey.None": 0.682, "storey.group": 0.661},
    ),
}
"""Power at alpha .1 in 1,000 audits: docs/methods.md, section 6.3."""


SMOOTHED: dict[str, tuple[Audit, dict[str, float]]] = {
    "equal levels": (TWO, {"bh.None": 0.598, "bh.group": 0.686, "storey.None": 0.692, "storey.group": 0.811}),
    "four groups": (FOUR, {"bh.None": 0.082, "bh.group": 0.341, "storey.None": 0.143, "storey.group": 0.464}),
    "few calibration documents": (
        Audit((20, 20), (50, 50), (25, 0), 3),  # whole ranks: .001, .059, .062, .455
        {"bh.None": 0.074, "bh.group": 0.314, "storey.None": 0.192, "storey.group": 0.637},
    ),
}
"""The same with smoothed ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothed_ranks_find_the_recorded_share_of_members(name: str) -> None:
    find_the_recorded(*SMOOTHED[name], "smoothed")


@pytest.mark.parametrize("name", RECORDED)
def test_weights_find_the_recorded_share_of_members(name: str) -> None:
    find_the_recorded(*RECORDED[name], "whole")


def find_the_recorded(audit: Audit, figures: dict[str, float], ranks: Literal["whole", "smoothed"]) -> None:
    found = simulate(audit, runs=200, ranks=ranks)
    for procedure, figure in figures.items():
        # a list finds none or some of the members: the standard error is at most that of a share of audits
        spread = math.sqrt(max(figure, 0.02) * (1 - figure) * (1 / 200 + 1 / RECORDED_RUNS))
        assert abs(found[procedure][1] - figure) <= 4 * spread, (procedure, found[procedure][1])


def test_weights_find_as_much_where_groups_differ_in_level_and_scale() -> None:
    """The same documents at other levels and scales: the same lists."""
    before = simulate(TWO, runs=40)
    after = simulate(replace(TWO, levels=(0.0, 3.0), scales=(1.0, 3.0)), runs=40)
    assert {name: power for name, (_, power) in after.items()} == {name: power for name, (_, power) in before.items()}
