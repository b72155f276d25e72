"""What a selection procedure is: one record, and the decision that it makes on rank counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from pipeline.config.selection import Rule as ScheduleRule
from pipeline.config.selection import SelectionConfig
from pipeline.detectors.plugins import BUILT_IN, Registry
from pipeline.errors import UserError, nearest
from pipeline.selection.calibrations import simes_grid, smallest_simes
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.guarantees import Guarantee, GuaranteeKind, adapted
from pipeline.selection.passes import Answer, Asking, SelectionInput
from pipeline.selection.step_up import ONE, step_up
from pipeline.selection.versions import VersionScores


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a procedure, and its guarantee. The audit documents at ranks 1..`rank` are selected.

    `rank` is k* in 0..grid.size, 0 when nothing is selected; the selection holds documents at p = 1, and so
    quarantined ones, only when it is the last. `null_proportion` is the pi0 in use, shown in (0, 1];
    `details` are finite numbers for the report, such as the estimate of pi0 before it was clipped.
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
    factor: Fraction  # BH ran at alpha / factor: pi0 as used, or what dependence costs
    largest_p: Fraction  # the p-value of `rank`, exact; 0 when nothing is selected

    @property
    def threshold(self) -> float | None:
        """The largest p-value that is selected, in (0, 1], that of rank k*; None when nothing is selected."""
        return float(self.largest_p) if self.rank else None


@dataclass(frozen=True, slots=True)
class Given:
    """What a procedure decides on: counts of the m >= 1 audit documents, and what some read besides."""

    counts: RankCounts
    alpha: Fraction  # exact, in (0, 1)
    lambda_: Fraction | None = None  # of Storey's estimate; None: by default
    known: RankCounts | None = None  # over the same grid, of documents that are known not to be nulls


@dataclass(frozen=True, slots=True)
class Rule:
    """A procedure and how its p-values are made, as far as they say how small a selection can be."""

    procedure: Procedure
    alpha: Fraction
    delta: Fraction | None = None  # of calibration conditional
    halved: bool = False  # half of the known documents are learnt from, and the others calibrate
    lambda_: Fraction | None = None  # of Storey's estimate; None: by default

    def calibrating(self, known: int) -> int:
        """How many of the known documents calibrate."""
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
    """How a procedure chooses among documents with versions."""

    terms: Guarantee
    choose: Callable[[VersionScores, Fraction, int, int], tuple[np.ndarray, np.ndarray]]
    """From scores, alpha, the seed of the run, and the number of documents without scores, which stand at p = 1, to
    which documents are selected, bool, and the ranks of their published versions, int64: (documents,)."""
    fewest: Callable[[Fraction, int, int | None], tuple[int, str]]
    """From alpha, m, and the versions of a document, at most, None where they are not read yet: the fewest documents
    that it can select, and a sentence."""


FactorOf = Callable[[Rule, int, int], Fraction]
"""Of a rule, n calibration documents and m >= 1 audited ones."""


def _one(rule: Rule, n: int, m: int) -> Fraction:
    return ONE


@dataclass(frozen=True, slots=True)
class Factor:
    """By what a procedure divides alpha: its estimate of the share of nulls, times what dependence costs."""

    at_one: FactorOf = _one  # at a share of nulls of 1
    least: FactorOf | None = None  # at the smallest share that it can estimate; None: it takes 1
    uncapped: bool = False  # whether its estimate can exceed 1
    steps: bool = False  # whether it depends on the number of calibration documents


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a selection, and its documents, that say which procedure decides on its ranks in the end."""

    step_up: str
    reconformal: bool
    detectors: int
    known_members: bool = False  # whether documents are known not to be nulls


ONLY_POOLED = {name: f"takes calibration pooled, got {name}" for name in ("by_group", "conditional", "weighted")}
"""`Procedure.refuses` of one that ranks among all known documents, on average over them."""

LastRank = Callable[[Fraction], int]
"""From alpha to the last rank that is selected."""


def exact_curve(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank:
    """Decide again at each alpha, on which the factor may depend."""
    counts, decide = answer.counts, procedure.decide
    assert counts is not None
    assert decide is not None
    return lambda alpha: decide(Given(counts, alpha, selection.exact_lambda)).rank


def curve_at_factor(procedure: Procedure, selection: SelectionConfig, answer: Answer) -> LastRank | None:
    """Step up at the factor of the answer, which does not depend on alpha."""
    counts, factor = answer.counts, answer.factor
    assert counts is not None
    return None if factor is None else lambda alpha: step_up(counts, alpha, Fraction(factor))


@dataclass(frozen=True, slots=True, eq=False)
class Procedure:
    """A way to choose the selected: what it guarantees, what it reads, and how it decides."""

    name: str
    terms: Guarantee  # of pooled p-values at the default settings
    decide: Callable[[Given], Decision] | None = None  # of the rank counts of one detector
    answer: Callable[[SelectionInput], Asking[Answer]] | None = None  # where more than rank counts decides
    factor: Factor = field(default_factory=Factor)
    curve: Callable[[Procedure, SelectionConfig, Answer], LastRank | None] | None = None  # None: no function of alpha
    inner: Callable[[Options], tuple[Procedure, bool]] | None = None  # see `applied`
    several: bool = False  # takes several detectors
    learns: bool = False  # learns its score from documents, so that a lower score of a detector may select
    fuses_p: bool = False  # fuses rounded p-values by weights that the audited documents choose, unless `reconformal`
    reads_sought: bool = False  # reads documents that are known not to be nulls, where they are given
    needs_sought: bool = False  # needs them
    fewest: Callable[[Sequence[str], Fraction, int], tuple[int, str]] | None = None
    """Of a procedure that selects by the signs of one statistic, not by ranks among calibration documents: from the
    detectors, alpha and m to the fewest documents that it can select, and a sentence."""
    beside: Callable[[str], str | None] | None = None
    """From the column of a detector to another that may stand behind it, by which it is scaled; None: no other."""
    per_list: bool = False  # guarantees something of this one list, at the selection's confidence, and no average
    refuses: Mapping[str, str] = field(default_factory=dict)  # calibration -> why, in words that follow its name
    schedule: ScheduleRule | None = None  # the rule of a schedule that is proved for it alone
    versions: ByVersions | None = None  # where it takes documents with versions

    def __reduce__(self) -> tuple[Callable[[str], Procedure], tuple[str]]:
        return procedure_of, (self.name,)  # another process has its own record

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
        """Whether it takes no other documents than those with versions."""
        return self.versions is not None and self.decide is None

    @property
    def built_in(self) -> bool:
        """Whether it comes with this program and not with a plugin."""
        return PROCEDURES.modules.get(self.name) == BUILT_IN

    def applied(self, options: Options) -> tuple[Procedure, bool]:
        """The procedure that decides on its ranks in the end, and whether half of the known documents calibrate."""
        return (self, False) if self.inner is None else self.inner(options)

    def is_valid(self, reconformal: bool) -> bool:
        """Whether each p-value by which it ranks is valid."""
        return reconformal or not self.fuses_p


PROCEDURES: Registry[Procedure] = Registry("procedure")
"""Every procedure that a selection can name, those of plugins behind the built-in ones."""

_UNSTATED = Guarantee("heuristic", "Not known: the plugin that defines this procedure is not loaded.", "Not known.")


def procedure_of(name: str) -> Procedure:
    """The procedure of a name; of a plugin that this process has not loaded, one of which nothing is known."""
    return PROCEDURES.get(name) or Procedure(name, _UNSTATED)


def applied_to(selection: SelectionConfig, known_members: bool = False) -> tuple[Procedure, bool]:
    """`Procedure.applied` of a configured selection."""
    options = Options(selection.step_up, selection.reconformal, len(selection.detectors), known_members)
    return procedure_of(selection.procedure).applied(options)


def decide(
    procedure: str,
    counts: RankCounts,
    alpha: Fraction,
    known_members: RankCounts | None = None,
    lambda_: Fraction | None = None,
) -> Decision:
    """Select by a named procedure; exact, a function of the counts alone.

    What is guaranteed is in `PROCEDURES[procedure].terms`, is `adapted` to the calibration, and is carried
    by the decision.

    Args:
        procedure: the key in `PROCEDURES` of one that decides by rank counts.
        counts: of the m >= 1 audit documents, quarantined ones at the last rank, where p = 1.
        alpha: the exact decimal that the user wrote, in (0, 1).
        known_members: for `known_members` only: rank counts, over the same grid, of documents for which
            the null is known not to hold: `seen` in direction members, `unseen` in direction clean.
        lambda_: of Storey's estimate, in (0, 1), for `storey` only; None: `estimating.default_lambda`.

    Raises:
        UserError: an unknown procedure, no audit documents, or no known members where they are needed.
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
    """The decision to select ranks 1..rank, with the procedure's own guarantee.

    Args:
        procedure: its name.
        counts: of the audit documents.
        alpha: as the procedure was given it.
        rank: the last rank that is selected, 0 for none.
        pi0: the share of nulls that it used.
        details: numbers for the report; what is not finite is left out.
        factor: BH ran at alpha / factor; pi0 by default.
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
