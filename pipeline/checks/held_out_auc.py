"""Held-out scores of two roles by random halvings, and the AUC that they give, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from pipeline.checks.diagnostic import LEAST_SHARED
from pipeline.selection.collection import joined_blocks
from pipeline.selection.guarantees import Outcome

HALVINGS = 5
LEAST_BLOCKS = 4
"""Minimum number of blocks of each role: two in each half, the fewest that allow a variance estimate."""

Z99 = 2.5758293035489004
TOLERANCE = 0.03
PASSING = 0.05
"""Maximum excess over 0.5 of the upper limit of the interval for the test to pass."""

CERTAINTY = 1.2815515655446004
"""Number of standard errors: nine of ten tests are decided with the stated number of documents."""

LEAST = 20
"""Minimum number of documents of each role for learning weights and for scores of single documents."""
_HALVE = 1  # random number stream of the halves


@dataclass(frozen=True, slots=True)
class BlindBlock:
    """How well one part of conversations distinguishes calibration documents from audited ones."""

    by: str  # questions, answers, or both together
    auc: float
    low: float  # ends of an interval that holds together with those of the other parts at 99%
    high: float

    @property
    def differs(self) -> bool:
        """Whether the whole interval is above 0.53."""
        return self.low > 0.5 + TOLERANCE

    def decides(self) -> tuple[bool, bool, bool, float]:
        """A key that is largest for the part which decides: one that differs, else the one furthest from passing."""
        alike = is_alike(self.auc, self.high)
        return self.differs, not alike, self.high >= 0.5, self.low if self.differs else self.high


@dataclass(frozen=True, slots=True)
class Blind:
    """How well the words alone distinguish calibration documents from audited ones."""

    auc: float  # held out, in [0, 1]: mean over the halves
    low: float  # lower end of the 99% interval
    high: float
    n_calibration: int  # documents that were compared
    n_audit: int
    n_calibration_blocks: int | None = None  # blocks of dependent documents among these; None: all are independent
    n_audit_blocks: int | None = None
    shared: float | None = None  # median number of words that another document has (`Words.shared`); None: pictures
    blocks: tuple[BlindBlock, ...] = ()  # of conversations; the one that decides has the AUC

    @property
    def looked(self) -> bool:
        """Whether documents have enough words in common for a difference to show."""
        return self.shared is None or self.shared >= LEAST_SHARED

    @property
    def below(self) -> bool:
        """Whether the whole interval is below 0.5, as where documents of the two roles are paired."""
        return self.high < 0.5

    @property
    def outcome(self) -> Outcome:
        """Failed if the whole interval is above 0.53, passed if `is_alike` and the test could look.

        Of conversations it fails if that holds of one part, and passes if all parts are alike. The intervals of k parts
        have the level 1 - 0.01 / k, so that one of them misses in at most as many runs as the interval of one part.
        """
        if self.low > 0.5 + TOLERANCE:
            return Outcome.FAILED
        alike = all(is_alike(one.auc, one.high) for one in self.blocks or [self])
        return Outcome.PASSED if alike and self.looked else Outcome.INCONCLUSIVE


def is_alike(auc: float, high: float) -> bool:
    """Whether an AUC and the upper end of its interval show that a classifier hardly distinguishes two roles.

    The upper end is at most 0.55, where an AUC below 0.5 is taken as 0.5, and not below 0.5. An AUC is below 0.5 by
    chance, or because documents of one role were chosen beside documents of the other: the classifier then learns from
    a document of one half that its partner in the other half is of the other role, which hides a difference.

    Args:
        auc: held-out AUC.
        high: upper end of its interval.
    """
    reach = high if auc >= 0.5 else 0.5 + (high - auc)
    return high >= 0.5 and reach <= 0.5 + PASSING


@cache
def documents_to_decide(parts: int = 1) -> int:
    """Approximate number of documents of each kind for which nine of ten tests pass where the words are alike.

    A test passes if the AUC and 2.58 standard errors are at most 0.55. With n documents of each kind, n / 2 in a half,
    DeLong's standard error of a half is sqrt(1 / (3 n)) where the words are alike. The mean AUC varies by that over
    sqrt(2): the two halves of a halving are different documents, and further halvings of the same documents add almost
    no information. One of ten such AUCs is above 0.5 by more than 1.28 of its standard deviations. To two digits. Of
    several parts that must all pass, each does in all but one of ten times their number.
    """
    certainty = CERTAINTY if parts == 1 else NormalDist().inv_cdf(1 - 0.1 / parts)
    errors = interval_errors(parts) + certainty / math.sqrt(2)
    needed = (errors / PASSING) ** 2 / 3
    digits = 10 ** (math.floor(math.log10(needed)) - 1)
    return round(needed / digits) * digits


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Documents of two roles. A block is a set of dependent documents, which halvings keep together."""

    audited: np.ndarray  # bool, (documents,); the others calibrate
    block: np.ndarray  # int64, (documents,), in 0..blocks - 1
    weights: np.ndarray  # float64, (documents,), > 0

    @classmethod
    def of(cls, audited: np.ndarray, block: np.ndarray | None = None, weights: np.ndarray | None = None) -> Compared:
        """By default each document is its own block, and all weights are equal."""
        numbers = np.arange(audited.size) if block is None else np.unique(block, return_inverse=True)[1]
        return cls(audited, numbers.astype(np.int64), np.ones(audited.size) if weights is None else weights)

    @property
    def kinds(self) -> np.ndarray:
        """Roles of each block, int64, (blocks,): 1 calibration, 2 audited, 3 both."""
        count = int(self.block.max(initial=-1)) + 1
        has = [np.bincount(self.block[mask], minlength=count) > 0 for mask in (~self.audited, self.audited)]
        return np.asarray(has[0] + 2 * has[1], dtype=np.int64)

    @property
    def enough(self) -> bool:
        """Whether each role has the minimum number of blocks."""
        kinds = self.kinds
        return all(int(np.count_nonzero(kinds == kind)) >= LEAST_BLOCKS for kind in (1, 2))

    def part(self, inside: np.ndarray) -> Compared:
        """A subset of the documents, by a bool mask or positions."""
        return Compared.of(self.audited[inside], self.block[inside], self.weights[inside])


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Scores of all documents in each halving, by the classifier that was trained on the other half."""

    compared: Compared
    scores: np.ndarray  # float64, (HALVINGS, documents), larger for audited ones
    second: np.ndarray  # bool, (HALVINGS, documents): whether the document is in the second half
    shared: float | None = None  # as in `Blind`

    def halves(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Positions and scores of the documents of each half, two for each halving."""
        for scores, second in zip(self.scores, self.second, strict=True):
            for inside in (~second, second):
                yield np.flatnonzero(inside), scores[inside]

    def auc(self) -> tuple[float, float]:
        """Mean AUC of the halves, and its standard error.

        The standard error is the mean of those of the halves, which is valid whatever their correlation (Minkowski).
        """
        figures = [auc_with_error(self.compared.part(places), scores) for places, scores in self.halves()]
        return float(np.mean([auc for auc, _ in figures])), float(np.mean([error for _, error in figures]))


def held_out(features: Any, compared: Compared, seed: int, model: Any, weighted: bool = False) -> HeldOut | None:
    """Score every document by classifiers that were trained on the other half of the blocks, in HALVINGS halvings.

    Args:
        features: (documents, features), sparse or dense.
        compared: the documents.
        seed: seed of the halvings.
        model: classifier with `fit` and `decision_function`.
        weighted: whether the classifier is trained with the weights of the documents.

    Returns:
        None with fewer than LEAST_BLOCKS blocks of a role alone.
    """
    if not compared.enough:
        return None
    labels = compared.audited.astype(int)
    scores = np.empty((HALVINGS, labels.size))
    second = np.stack(list(_halvings(compared, seed)))
    for halving, drawn in enumerate(second):
        for tested in (drawn, ~drawn):
            more = {"sample_weight": compared.weights[~tested]} if weighted else {}
            model.fit(features[~tested], labels[~tested], **more)
            scores[halving, tested] = model.decision_function(features[tested])
    return HeldOut(compared, scores, second)


def _halvings(compared: Compared, seed: int) -> Iterator[np.ndarray]:
    """The half of each document in each halving, True for the second; each has half of the blocks of each kind."""
    kinds = compared.kinds
    rng = np.random.default_rng([seed, _HALVE])
    for _ in range(HALVINGS):
        second = np.zeros(kinds.size, dtype=bool)
        for kind in (1, 2, 3):
            blocks = rng.permutation(np.flatnonzero(kinds == kind))
            second[blocks[: blocks.size // 2]] = True
        yield second[compared.block]


def auc_with_error(compared: Compared, scores: np.ndarray) -> tuple[float, float]:
    """The AUC of scores and DeLong's standard error, with placement values summed within blocks (Obuchowski 1997).

    The standard error is at least that of an AUC half a pair below 1. Scores that are all equal have the largest
    standard error that an AUC can have.

    Args:
        compared: the documents, at least two blocks of each role.
        scores: float64, (documents,), of one classifier, larger for audited documents.
    """
    roles = compared.audited, ~compared.audited
    above, below = (_placed(scores[role], compared.weights[role]) for role in roles)
    placement = below(scores[roles[0]]), 1 - above(scores[roles[1]])
    shares = [compared.weights[role] / compared.weights[role].sum() for role in roles]
    auc = float(shares[0] @ placement[0])
    count = int(compared.block.max()) + 1
    sums, variance = [], 0.0
    for role, share, placed in zip(roles, shares, placement, strict=True):
        sums.append(np.bincount(compared.block[role], share * (placed - auc), minlength=count))
        blocks = np.unique(compared.block[role]).size
        variance += float(sums[-1] @ sums[-1]) * blocks / (blocks - 1)
    variance += 2 * float(sums[0] @ sums[1]) * count / (count - 1)
    worth = [_effective_blocks(compared, role) for role in roles]
    extreme = 1 - 1 / (2 * worth[0] * worth[1])
    if scores.size and (scores == scores[0]).all():
        extreme = 0.5
    return auc, math.sqrt(max(variance, extreme * (1 - extreme) / min(worth)))


def _placed(scores: np.ndarray, weights: np.ndarray) -> Any:
    """A function from values to the weighted share of smaller scores, plus half of the share of equal ones."""
    order = np.argsort(scores, kind="stable")
    ordered, mass = scores[order], np.r_[0.0, np.cumsum(weights[order])]

    def share(values: np.ndarray) -> np.ndarray:
        ends = [mass[np.searchsorted(ordered, values, side)] for side in ("left", "right")]
        return np.asarray((ends[0] + ends[1]) / (2 * mass[-1]))

    return share


def _effective_blocks(compared: Compared, role: np.ndarray) -> float:
    """Blocks of a role; with unequal weights (sum w)^2 / sum w^2 of their mean weights."""
    block = np.unique(compared.block[role], return_inverse=True)[1]
    weights = np.bincount(block, compared.weights[role]) / np.bincount(block)
    return float(weights.sum() ** 2 / (weights @ weights))


def blocks_among(family: np.ndarray, group: np.ndarray, audited: np.ndarray) -> np.ndarray:
    """Number the blocks of dependent documents: families of near-duplicates, groups, and their unions.

    A group with documents of both roles joins no documents: such groups are strata, as of `calibration: by_group`.

    Args:
        family: int64, (documents,), from `near_families`.
        group: int64, (documents,), from 0; -1 for none.
        audited: bool, (documents,).

    Returns:
        int64, (documents,).
    """
    count = int(group.max(initial=-1)) + 1
    in_role = [np.bincount(group[role & (group >= 0)], minlength=count) > 0 for role in (audited, ~audited)]
    shared = np.r_[in_role[0] & in_role[1], False]  # last entry: no group
    return joined_blocks(family, np.where(shared[group], -1, group))


def interval_errors(parts: int = 1) -> float:
    """Standard errors on either side of an AUC for intervals of so many AUCs that hold together at 99% (Bonferroni)."""
    return Z99 if parts == 1 else NormalDist().inv_cdf(1 - 0.005 / parts)


def auc_interval(auc: float, error: float, parts: int = 1) -> tuple[float, float]:
    """The 99% interval of an AUC, within [0, 1]; of one of several AUCs, an interval that holds with the others."""
    errors = interval_errors(parts)
    return max(0.0, auc - errors * error), min(1.0, auc + errors * error)
