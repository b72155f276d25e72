"""The guarantees of procedures in plain language, their sentences and numbers, and the words for what checks find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from pipeline.selection.conformal import Grid

GuaranteeKind = Literal["finite-sample", "asymptotic", "heuristic"]


class _Word(StrEnum):
    """A result as a word, which has no truth value: a failed check is a string that is not empty."""

    def __bool__(self) -> bool:
        """Refuse `if outcome`, which would hold for every result.

        Raises:
            TypeError: always.
        """
        names = ", ".join(f"{type(self).__name__}.{one.name}" for one in type(self))
        raise TypeError(f"{type(self).__name__} has no truth value: compare it with one of {names}")


class Outcome(_Word):
    """The result of a check."""

    PASSED = "passed"
    INCONCLUSIVE = "inconclusive"  # could not be made, decided nothing, or only reports a number
    FAILED = "failed"


class ConclusionValue(_Word):
    """What the checks of an answer say together."""

    SUPPORTED = "supported"  # no check contradicts the answer, which is no proof
    INCONCLUSIVE = "inconclusive"  # the blind test decided nothing, or was not made
    CONTRADICTED = "contradicted"


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The guarantee of a procedure with its assumption, in plain language."""

    guarantee: GuaranteeKind
    assumption: str  # one sentence: the condition of the guarantee
    promise: str  # the guarantee


@dataclass(frozen=True, slots=True)
class StrictAnswer:
    """The answer with a finite-sample guarantee that accompanies every answer."""

    procedure: Annotated[str, Field(description="The procedure, with how it is used where that matters.")]
    n_selected: Annotated[int, Field(description="Documents that it selects.")]
    threshold: Annotated[float | None, Field(description="The largest p-value that it selects; null if none.")]
    guarantee: Annotated[GuaranteeKind, Field(description="finite-sample: proved for any number of documents.")]


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """The weight of a group, and the numbers that it follows from."""

    group: Annotated[str, Field(description="Name of the group.")]
    n_calibration: Annotated[int, Field(description="Documents of known membership that its p-values rank among.")]
    n_audit: Annotated[int, Field(description="Audited documents with a score.")]
    n_pooled: Annotated[int, Field(description="Documents of both roles that were compared with those of all groups.")]
    n_high: Annotated[
        int, Field(description="Of these, those with a standardised score among the highest 20% of all groups.")
    ]
    weight: Annotated[float, Field(description="What its p-values are divided by; on average over documents 1.")]


NULLS = "for which the null holds (direction members: never trained on; direction clean: trained on)"
EXCHANGEABLE = (
    f"The audited documents {NULLS} and the calibration documents are exchangeable: they come from one "
    "source in one way, and nothing tells one kind from the other."
)

ONE_BY_ONE = (
    f"Each audited document {NULLS} is, taken by itself, exchangeable with the calibration documents; how "
    "the audited documents depend on one another is free."
)

MANY = (
    f"The audited documents {NULLS} and the calibration documents are exchangeable, and there are so many "
    "of them that the share of nulls is estimated without noticeable error."
)

ALIKE = (
    f"{MANY} The documents that are known to have the property searched for score like those that are hidden "
    "in the audit."
)

SHARE = "The expected share of wrong documents (those for which the null holds) among the selected"
OF_NULLS = " times the true share of nulls"
IN_THE_LIMIT = f"{SHARE} approaches a limit of at most alpha as the numbers of documents grow"
_REPEATED = "over repetitions of the whole audit with fresh documents"
ON_AVERAGE = (
    f"This is an average {_REPEATED}; in this one list the share "
    "may be higher or lower, and no single document is proven to be selected rightly."
)

UNPROVED = (
    "for the documents at hand nothing is guaranteed, and the share can exceed alpha, so the strict answer stands "
    "beside this one."
)

_DRAWN = (
    f"The audited documents {NULLS} and the calibration documents are independent draws from one source, and nothing "
    "tells one kind from the other."
)

_DRAWN_ONE_BY_ONE = (
    "The calibration documents are independent draws from one source, and each audited document "
    f"{NULLS} is, taken by itself, a draw from it that does not depend on them; how the audited documents depend on "
    "one another is free."
)

_CONDITIONAL = {EXCHANGEABLE: _DRAWN, ONE_BY_ONE: _DRAWN_ONE_BY_ONE}
_WITH_THESE = "over repetitions with fresh audited documents and these same calibration documents"


def _probability(delta: Fraction) -> str:
    """1 - delta, never rounded up: a decimal if a short one is exact."""
    short = f"{float(1 - delta):g}"
    return short if Fraction(short) == 1 - delta else f"1 - {float(delta)!r}"


_SHARE_OF_SOME = (
    "The expected share of wrong documents (those for which the null holds under at least one of the models) among the "
    "selected"
)

JOINTLY: dict[str, Guarantee] = {
    "ebh": Guarantee(
        "finite-sample",
        f"Under each of the models: each audited document {NULLS} is, taken by itself, exchangeable with the "
        "documents that this model was calibrated on. How documents and models depend on one another is free.",
        f"{_SHARE_OF_SOME} is at most alpha times the true share of such documents, for any number of documents and of "
        f"models. {ON_AVERAGE}",
    ),
    "largest_p": Guarantee(
        "heuristic",
        "The largest p-values of the models depend on one another in the way that those of one model do (PRDS). "
        "That is proved for one model, and not for the largest of several.",
        f"{_SHARE_OF_SOME} is not guaranteed to stay at or below alpha; it did in simulated audits whose models "
        f"share documents, and under the worst dependence it exceeds alpha several times. {ON_AVERAGE}",
    ),
}
"""Guarantees of a selection under several models: e-BH on the smallest e-value, and BH on the largest p-value."""


def adapted(stated: Guarantee, grid: Grid) -> Guarantee:
    """A procedure's guarantee for p-values with the calibration of a grid.

    By group, its assumption applies within each group. Calibration-conditional p-values turn a finite-sample
    guarantee on average over calibration sets into one for the given calibration documents, which fails with
    probability delta; they do not change the guarantees of other procedures. With weights of groups the share of wrong
    documents is at most alpha, not alpha times the share of nulls: the nulls can be in the groups of large weights.
    """
    if grid.delta is not None and stated.guarantee == "finite-sample":
        sure = (
            f"With probability at least {_probability(grid.delta)} over the choice of the calibration documents, this "
            "holds for those at hand: "
        )
        promise = sure + stated.promise[0].lower() + stated.promise[1:].replace(_REPEATED, _WITH_THESE)
        stated = replace(stated, assumption=_CONDITIONAL.get(stated.assumption, stated.assumption), promise=promise)
    if grid.groups > 1:
        within = f"Within each of the {grid.groups} groups, and whatever the documents of the other groups are: "
        stated = replace(stated, assumption=within + stated.assumption[0].lower() + stated.assumption[1:])
    if grid.weighting is not None:
        stated = replace(stated, promise=stated.promise.replace(OF_NULLS, ""))
    return stated
