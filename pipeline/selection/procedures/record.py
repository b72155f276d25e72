"""Definition of a selection procedure: one record, and its decision from rank counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from pipeline.config.kinds import Capability
from pipeline.config.selection import SelectionConfig
from pipeline.detectors.plugins import BUILT_IN, Registry
from pipeline.errors import UserError, nearest
from pipeline.selection.calibrations import simes_grid, smallest_simes
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.folds import Answer, Query, SelectionInput
from pipeline.selection.guarantees import Guarantee, GuaranteeKind, adapted
from pipeline.selection.step_up import ONE, step_up
from pipeline.selection.version_scores import VersionScores


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a procedure and its guarantee. The audit documents at ranks 1..`rank` are selected.

    `rank` is k* in 0..grid.size, 0 if nothing is selected; the selection contains documents at p = 1, including
    quarantined ones, only if it is the last rank. `null_proportion` is the pi0 in use, shown in (0, 1];
    `details` are finite numbers for the report, such as the unclipped estimate of pi0.

    Example:
        >>> from fractions import Fraction
        >>> import numpy as np
        >>> counts = seenset.RankCounts(np.array([3, 0, 1, 0, 0, 0, 0, 0, 0, 1]))
        >>> decided = seenset.decision("bh", counts, Fraction(1, 4), rank=1)
        >>> decided.n_selected, decided.threshold, decided.guarantee
        (3, 0.1, 'finite-sample')
    """

    procedure: str
    alpha: Fraction
    rank: int
    n_selected: int
    null_proportion: float
    guarantee: GuaranteeKind
    assumption: str
    promise: str
    details: dict[str, float]
    n: int  # calibration documents
    factor: Fraction  # BH ran at alpha / factor: pi0, or the cost of dependence
    largest_p: Fraction  # the exact p-value of `rank`; 0 if nothing is selected

    @property
    def threshold(self) -> float | None:
        """The largest selected p-value, in (0, 1], that of rank k*; None if nothing is selected."""
        return float(self.largest_p) if self.rank else None


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs of a procedure: counts of the m >= 1 audit documents, and inputs of some procedures."""

    counts: RankCounts
    alpha: Fraction  # exact, in (0, 1)
    lambda_: Fraction | None = None  # of Storey's estimate; None: by default
    known: RankCounts | None = None  # of documents that are known not to be nulls, over the same grid


@dataclass(frozen=True, slots=True)
class Rule:
    """A procedure and its p-values, as far as they determine the minimum size of a selection."""

    procedure: Procedure
    alpha: Fraction
    delta: Fraction | None = None  # of calibration conditional
    halved: bool = False  # half of the known documents train the score, and the others calibrate
    lambda_: Fraction | None = None  # of Storey's estimate; None: by default

    def calibrating(self, known: int) -> int:
        """Number of known documents that calibrate."""
        return known - known // 2 if self.halved else known

    def grid(self, n: int) -> Grid:
        """The p-values against n calibration documents, at least one."""
        return Grid.uniform(max(1, n)) if self.delta is None else simes_grid(max(1, n), self.delta)

    def smallest(self, n: int) -> Fraction:
        """The smallest p-value against n calibration documents."""
        if n == 0:
            return ONE
        return Fraction(1, n + 1) if self.delta is None else smallest_simes(n, self.delta)


@dataclass(frozen=True, slots=True)
class ByVersions:
    """Functions of a procedure for documents with versions."""

    terms: Guarantee
    choose: Callable[[VersionScores, Fraction, int, int], tuple[np.ndarray, np.ndarray]]
    """(scores, alpha, seed of the run, number of documents without scores, which are at p = 1) -> selected, bool, and
    the ranks of the published versions, int64: (documents,) each."""
    fewest: Callable[[Fraction, int, int | None], tuple[int, str]]
    """(alpha, m, maximum versions of a document or None if unknown) -> minimum number of documents that it can select,
    and a sentence."""


FactorOf = Callable[[Rule, int, int], Fraction]
"""(rule, n calibration documents, m >= 1 audited documents) -> factor."""


def _one(rule: Rule, n: int, m: int) -> Fraction:
    return ONE


@dataclass(frozen=True, slots=True)
class Factor:
    """The divisor of alpha in a procedure: its estimate of the share of nulls times the cost of dependence."""

    at_one: FactorOf = _one  # at a share of nulls of 1
    least: FactorOf | None = None  # at the smallest share that it can estimate; None: it assumes 1
    uncapped: bool = False  # whether its estimate can exceed 1
    steps: bool = False  # whether it depends on the number of calibration documents


@dataclass(frozen=True, slots=True)
class Options:
    """Settings and documents of a selection that determine the procedure applied to its ranks."""

    step_up: str
    reconformal: bool
    detectors: int
    known_members: bool = False  # whether there are documents that are known not to be nulls
    learn: str = "split"


ONLY_POOLED = {name: f"takes calibration pooled, got {name}" for name in ("by_group", "conditional")}
"""`Procedure.refuses` of procedures that rank among all known documents, on average over them."""

ONLY_AVERAGES = {"conditional": "takes calibration pooled or by_group, got conditional"}
"""`Procedure.refuses` of procedures whose ranks are valid on average over known documents, within groups too."""

LastRank = Callable[[Fraction], int]
"""alpha -> last selected rank."""


def exact_curve(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank:
    """Decide at each alpha, since the factor may depend on it."""
    counts, decide = answer.counts, procedure.decide
    assert counts is not None
    assert decide is not None
    return lambda alpha: decide(Given(counts, alpha, selection.exact_lambda)).rank


def curve_at_factor(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank | None:
    """Step up with the factor of the answer, which does not depend on alpha."""
    counts, factor = answer.counts, answer.factor
    assert counts is not None
    return None if factor is None else lambda alpha: step_up(counts, alpha, Fraction(factor))


@dataclass(frozen=True, slots=True, eq=False)
class Procedure:
    """A selection procedure: its guarantee, its inputs and its decision."""

    name: str
    terms: Guarantee  # of pooled p-values at the default settings
    decide: Callable[[Given], Decision] | None = None  # from the rank counts of one detector
    answer: Callable[[SelectionInput], Query[Answer]] | None = None  # if it needs more than rank counts
    factor: Factor = field(default_factory=Factor)
    curve: Callable[[Procedure, SelectionConfig, Answer], LastRank | None] | None = None  # None: no function of alpha
    inner: Callable[[Options], tuple[Procedure, bool]] | None = None  # see `applied`
    several: bool = False  # takes several detectors
    learns: bool = False  # learns its score, so that a document with a lower detector score may be selected
    fuses_p: bool = False  # fuses rounded p-values with weights from the audited documents, unless `reconformal`
    smooths: bool = False  # keeps its guarantee with smoothed ranks where each of its p-values is valid
    reads_sought: bool = False  # reads documents that are known not to be nulls, if given
    needs_sought: bool = False  # requires them
    fewest: Callable[[Sequence[str], Fraction, int], tuple[int, str]] | None = None
    """For a procedure that selects by the signs of one statistic, not by ranks among calibration documents:
    (detectors, alpha, m) -> minimum number of documents that it can select, and a sentence."""
    companion: Callable[[str], str | None] | None = None
    """Detector column -> optional second column that scales it; None: none."""
    by_blocks: bool = False  # its estimate of the share of nulls allows for documents that depend on one another
    weighs: bool = False  # its guarantee is proved for p-values divided by weights of groups
    per_list: bool = False  # its guarantee is for this list at the selection's confidence, not on average
    refuses: Mapping[str, str] = field(default_factory=dict)  # calibration -> reason, as a phrase after its name
    refuses_heuristic: Mapping[str, str] = field(default_factory=dict)  # likewise, unless `is_valid`
    versions: ByVersions | None = None  # if it supports documents with versions

    def __reduce__(self) -> tuple[Callable[[str], Procedure], tuple[str]]:
        return procedure_of, (self.name,)  # resolved by name in another process

    @property
    def estimates(self) -> bool:
        """Whether the share of nulls is estimated."""
        return self.factor.least is not None

    @property
    def signed(self) -> bool:
        """Whether it selects by the signs of one statistic."""
        return self.fewest is not None

    @property
    def only_versions(self) -> bool:
        """Whether it requires documents with versions."""
        return self.versions is not None and self.decide is None

    @property
    def needs(self) -> frozenset[Capability]:
        """What it needs of the documents."""
        if self.versions is None:
            return frozenset({Capability.SINGLE})
        return frozenset({Capability.VERSIONS}) if self.only_versions else frozenset()

    @property
    def built_in(self) -> bool:
        """Whether it is built in and not from a plugin."""
        return PROCEDURES.modules.get(self.name) == BUILT_IN

    def applied(self, options: Options) -> tuple[Procedure, bool]:
        """The procedure that is applied to its ranks, and whether half of the known documents calibrate."""
        return (self, False) if self.inner is None else self.inner(options)

    def is_valid(self, reconformal: bool) -> bool:
        """Whether each of its p-values is valid."""
        return reconformal or not self.fuses_p


PROCEDURES: Registry[Procedure] = Registry("procedure")
"""All registered procedures, built-in ones first."""

_UNSTATED = Guarantee("heuristic", "Not known: the plugin that defines this procedure is not loaded.", "Not known.")


def procedure_of(name: str) -> Procedure:
    """The procedure of a name; a placeholder for one of a plugin that is not loaded."""
    return PROCEDURES.get(name) or Procedure(name, _UNSTATED)


def applied_to(selection: SelectionConfig, known_members: bool = False) -> tuple[Procedure, bool]:
    """`Procedure.applied` of a configured selection."""
    settings = selection.step_up, selection.reconformal, len(selection.detectors)
    options = Options(*settings, known_members, selection.learn or "split")
    return procedure_of(selection.procedure).applied(options)


def decide(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    known_members: RankCounts | None = None,
    lambda_: Fraction | None = None,
) -> Decision:
    """Select with a named procedure; exact, a function of the counts only.

    The guarantee is `PROCEDURES[procedure].terms`, `adapted` to the calibration, and is included in the decision.

    Args:
        procedure: key in `PROCEDURES` of a procedure that decides by rank counts.
        counts: counts of the m >= 1 audit documents; quarantined ones are at the last rank, where p = 1.
        alpha: the exact decimal that the user wrote, in (0, 1).
        known_members: for `known_members` only: rank counts, over the same grid, of documents for which
            the null is known not to hold: `seen` in direction members, `unseen` in direction clean.
        lambda_: of Storey's estimate, in (0, 1), for `storey` only; None: `estimating.default_lambda`.

    Raises:
        UserError: an unknown procedure, no audit documents, or missing known members.
    """
    chosen = procedure_of(procedure).decide
    if chosen is None:
        known = [name for name, one in PROCEDURES.items() if one.decide is not None]
        raise UserError(f"unknown procedure {procedure!r}; {nearest(procedure, known)}")
    if counts.m == 0:
        raise UserError("no audit documents")
    return chosen(Given(counts, alpha, lambda_, known_members))


def estimates_share(selection: SelectionConfig) -> bool:
    """Whether the share of nulls is estimated."""
    return applied_to(selection)[0].estimates


def decision(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    rank: int,
    pi0: Fraction = ONE,
    details: Mapping[str, float] | None = None,
    factor: Fraction | None = None,
) -> Decision:
    """The decision to select ranks 1..rank, with the procedure's guarantee.

    Args:
        procedure: name of the procedure.
        counts: counts of the audit documents.
        alpha: alpha given to the procedure.
        rank: last selected rank, 0 for none.
        pi0: share of nulls that it used.
        details: numbers for the report; values that are not finite are omitted.
        factor: BH ran at alpha / factor; default: pi0.

    Example:
        >>> from fractions import Fraction
        >>> import numpy as np
        >>> counts, alpha = seenset.RankCounts(np.array([3, 0, 1, 0, 0, 0, 0, 0, 0, 1])), Fraction(1, 4)
        >>> half = Fraction(1, 2)  # an estimate of the share of nulls
        >>> decided = seenset.decision("storey", counts, alpha, seenset.step_up(counts, alpha, half), half)
        >>> decided.rank, decided.n_selected, decided.null_proportion
        (4, 4, 0.5)
    """
    grid = counts.grid
    stated = adapted(procedure_of(procedure).terms, grid)
    return Decision(
        procedure=procedure,
        alpha=alpha,
        rank=rank,
        n_selected=counts.at_most(rank),
        null_proportion=min(1.0, float(pi0)),
        guarantee=stated.guarantee,
        assumption=stated.assumption,
        promise=stated.promise,
        details={name: value for name, value in (details or {}).items() if math.isfinite(value)},
        n=counts.n,
        factor=pi0 if factor is None else factor,
        largest_p=grid.p(rank),
    )


def adaptive(procedure: str, given: Given, pi0: Fraction, details: dict[str, float]) -> Decision:
    """BH at alpha / pi0."""
    rank = step_up(given.counts, given.alpha, pi0)
    details = {"null_proportion_unclipped": float(pi0), **details}
    return decision(procedure, given.counts, given.alpha, rank, pi0, details)
