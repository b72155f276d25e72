"""One selection under several models at one error rate: a document is selected only if every model supports it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.conformal import Grid
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.bh import BY, EBH
from pipeline.selection.procedures.record import Rule
from pipeline.selection.ranked import known_needed
from pipeline.selection.step_up import ONE, dependence_factor, harmonic_bound

EXACT_CALIBRATION = 1 << 25
"""Maximum calibration documents for which two different p-values differ by more than the rounding of float64."""


@dataclass(frozen=True, slots=True)
class JointEvidence:
    """Conversion of one model's p-values to e-values, for m documents at a level alpha fixed beforehand.

    With factor L a document's e-value reaches m / (alpha R), the threshold of e-BH for R selected documents, if and
    only if m p L <= alpha R. `dependence_factor` explains why that e-value has a mean of at most 1 for every null, and
    uses the smaller of two such factors. If the p-values of a model come from several groups, its grid is not known
    here, and L is the harmonic sum, which is valid for any p-value.
    """

    n: int  # calibration documents
    m: int  # audited documents of the joint selection
    alpha: Fraction
    factor: Fraction
    grouped: bool = False  # whether p-values are calibrated within groups
    _places: dict[float, int] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, n: int, m: int, alpha: Fraction, grouped: bool = False) -> JointEvidence:
        """The e-values of a model that was calibrated on n >= 1 documents; `grouped`: within groups."""
        factor = harmonic_bound(m) if grouped else dependence_factor(Grid.uniform(n), m, alpha)
        return cls(n, m, alpha, factor, grouped)

    def plain(self) -> JointEvidence:
        """The same p-values with factor 1, as in BH."""
        return JointEvidence(self.n, self.m, self.alpha, ONE, self.grouped)

    def levels(self, p: np.ndarray) -> np.ndarray:
        """Minimum number R of selected documents that includes a document, ceil(m p L / alpha): int64; m + 1: never.

        Args:
            p: p-values, float64, (documents,), in (0, 1]; each is converted to the exact fraction k / (n_g + 1).
        """
        places, inverse = np.unique(np.asarray(p, dtype=np.float64), return_inverse=True)
        reach = float(self.alpha / self.factor) * (1 + 1e-9)  # documents above it are selected for no R
        values = [self._level(one) if one <= reach else self.m + 1 for one in places.tolist()]
        return np.array(values, dtype=np.int64)[inverse]

    def _level(self, p: float) -> int:
        if p not in self._places:
            self._places[p] = math.ceil(self.m * self.factor * exact_p(p, self.n) / self.alpha)
        return self._places[p]

    @property
    def fewest(self) -> int:
        """Minimum number of documents of a selection with this model; more than m: none is possible."""
        return math.ceil(self.m * self.factor * Fraction(1, self.n + 1) / self.alpha)


def joinable(selection: SelectionConfig) -> bool:
    """Whether each p-value of a selection is marginally valid, on average over calibration sets: it has an e-value."""
    valid = procedure_of(selection.procedure).is_valid(selection.reconformal)
    return valid and not calibration_of(selection.calibration).conditional


def exact_p(p: float, n: int) -> Fraction:
    """The fraction with a denominator of at most n + 1 whose nearest float is a conformal p-value.

    With more than EXACT_CALIBRATION documents it is not unique, and a number just above p is returned.
    """
    if n < EXACT_CALIBRATION:
        return Fraction(p).limit_denominator(n + 1)
    return Fraction(p) * (1 + Fraction(1, 1 << 50))


@dataclass(frozen=True, slots=True)
class JointCut:
    """A joint decision: documents whose level is at most `level` are selected; 0 for none."""

    level: int
    n_selected: int


def joint_levels(evidence: Sequence[JointEvidence], p: np.ndarray) -> np.ndarray:
    """The levels of documents under all models: the maximum over the models, int64, (documents,).

    The smallest of a document's e-values reaches m / (alpha R) if and only if each does. It is an e-value of the
    union null, "the null of some model holds": if the null of model k holds, its mean is at most that of the e-value of
    k, which is at most 1. The models may depend on one another in any way.

    Args:
        evidence: evidence of each model.
        p: float64, (models, documents).
    """
    return np.max([one.levels(values) for one, values in zip(evidence, p, strict=True)], axis=0)


def count_levels(levels: np.ndarray) -> Counter[int]:
    """Number of documents at each level; counts can be added in any order."""
    values, counts = np.unique(levels, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def joint_cut(counts: Mapping[int, int], m: int) -> JointCut:
    """The e-BH decision: R* = max{R : at least R documents have a level of at most R} (Wang & Ramdas 2022).

    Guaranteed with the levels of e-values: FDR <= alpha times the share of nulls, under any dependence (their theorem
    2). With the levels of p-values (`JointEvidence.plain`) it is BH on the largest p-value.

    Args:
        counts: number of documents by level, from `count_levels`; their sum is at most m.
        m: audited documents, including quarantined ones, which have no level.
    """
    cut, reached = JointCut(0, 0), 0
    for level in sorted(level for level in counts if level <= m):
        reached += counts[level]
        if reached >= level:
            cut = JointCut(level, reached)
    return cut


def joint_select(evidence: Sequence[JointEvidence], p: np.ndarray) -> np.ndarray:
    """Whether e-BH selects each document under all models: bool, (documents,).

    Args:
        evidence: evidence of each model; their m includes quarantined documents, which have no row here.
        p: float64, (models, documents).
    """
    levels = joint_levels(evidence, p)
    return levels <= joint_cut(count_levels(levels), evidence[0].m).level


def e_values(levels: np.ndarray, m: int, alpha: Fraction) -> np.ndarray:
    """Lower bounds of e-values from levels: the largest m / (alpha R) that a document's e-value reaches; 0 for none."""
    bound = float(m / alpha)
    return np.where(levels <= m, bound / np.maximum(levels, 1), 0.0)


def exact_level(alpha: float) -> Fraction:
    """Alpha as the exact decimal.

    Raises:
        UserError: it is not in (0, 1).
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha must be in (0, 1), got {alpha:g}")
    return Fraction(repr(float(alpha)))


@dataclass(frozen=True, slots=True)
class JointResolution:
    """The minimum size of a joint selection, and the requirements of smaller ones."""

    fewest: int  # minimum number of selected documents; above m: nothing can be selected
    smallest_alpha: float  # for which anything can be selected
    needed_for_any: int  # calibration documents of every model (and group) for anything to be selectable
    needed_for_1_percent: int  # the same for a list of 1% of the audited documents


def joint_resolution(evidence: Sequence[JointEvidence]) -> JointResolution:
    """The minimum size of a joint selection; with groups a lower bound, with the required documents per group.

    At alpha below 2 / (n + 1) the factor of `dependence_factor` is 1, so that all m documents, at p = 1 / (n + 1), are
    selected at alpha = 1 / (n + 1) and at none below.
    """
    m, alpha = evidence[0].m, evidence[0].alpha
    rule = Rule(BY if any(one.grouped for one in evidence) else EBH, alpha)
    return JointResolution(
        fewest=max(one.fewest for one in evidence),
        smallest_alpha=max(1 / (one.n + 1) for one in evidence),
        needed_for_any=known_needed(rule, m, m),
        needed_for_1_percent=known_needed(rule, m, max(1, m // 100)),
    )
