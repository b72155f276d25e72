"""The promise of each procedure, in words that need no statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from pipeline.detectors.plugins import Registry
from pipeline.selection.digits import percentage
from pipeline.selection.grid import Grid

Guarantee = Literal["finite-sample", "asymptotic", "heuristic"]


@dataclass(frozen=True, slots=True)
class Terms:
    """The promise of a procedure, in words that need no statistics."""

    guarantee: Guarantee
    assumption: str  # one sentence: what must hold for the promise to hold
    promise: str  # what then holds


@dataclass(frozen=True, slots=True)
class StrictAnswer:
    """The answer with a finite-sample guarantee that stands beside every answer."""

    procedure: Annotated[str, Field(description="The procedure, with how it is used where that matters.")]
    n_selected: Annotated[int, Field(description="Documents that it selects.")]
    threshold: Annotated[float | None, Field(description="The largest p-value that it selects; null if none.")]
    guarantee: Annotated[Guarantee, Field(description="finite-sample: proved for any number of documents.")]


_NULLS = "for which the null holds (direction members: never trained on; direction clean: trained on)"
_EXCHANGEABLE = (
    f"The audited documents {_NULLS} and the calibration documents are exchangeable: they come from one "
    "source in one way, and nothing tells one kind from the other."
)

_ONE_BY_ONE = (
    f"Each audited document {_NULLS} is, taken by itself, exchangeable with the calibration documents; how "
    "the audited documents depend on one another is free."
)

_MANY = (
    f"The audited documents {_NULLS} and the calibration documents are exchangeable, and there are so many "
    "of them that the share of nulls is estimated without noticeable error."
)

_ALIKE = (
    f"{_MANY} The documents that are known to have the property searched for score like those that are hidden "
    "in the audit."
)

_SHARE = "The expected share of wrong documents (those for which the null holds) among the selected"
_REPEATED = "over repetitions of the whole audit with fresh documents"
_ON_AVERAGE = (
    f"This is an average {_REPEATED}; in this one list the share "
    "may be higher or lower, and no single document is proven to be selected rightly."
)

_NO_PROMISE = (
    "for the documents at hand nothing is promised, and the share can exceed alpha, so the strict answer stands "
    "beside this one."
)

_BUILT_IN: dict[str, Terms] = {
    "bh": Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents. {_ON_AVERAGE}",
    ),
    "by": Terms(
        "finite-sample",
        _ONE_BY_ONE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents and any "
        f"dependence between them. {_ON_AVERAGE}",
    ),
    "ebh": Terms(
        "finite-sample",
        _ONE_BY_ONE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents and any "
        f"dependence between them; whatever procedure by selects is selected here too. {_ON_AVERAGE}",
    ),
    "storey": Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"{_SHARE} is at most alpha, for any number of documents, with the share of nulls estimated from the "
        f"audit itself. {_ON_AVERAGE}",
    ),
    "bky": Terms(
        "asymptotic",
        _MANY,
        f"{_SHARE} approaches a limit of at most alpha as the numbers of documents grow, with the share of nulls "
        f"estimated by a first selection; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
    "quantile": Terms(
        "asymptotic",
        _MANY,
        f"{_SHARE} approaches a limit of at most alpha as the numbers of documents grow, with the share of nulls "
        f"read off where the sorted p-values first rise more slowly; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
    "ptdi": Terms(
        "asymptotic",
        _MANY,
        f"{_SHARE} approaches a limit of at most alpha as the numbers of documents grow; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
    "ptdi_known_members": Terms(
        "asymptotic",
        _ALIKE,
        f"{_SHARE} approaches a limit of at most alpha as the numbers of documents grow, if the known documents "
        f"are like the hidden ones; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
    "known_members": Terms(
        "heuristic",
        _ALIKE,
        f"{_SHARE} comes near alpha in simulations where the known documents have the mean p-value of the hidden ones, "
        f"and exceeds it where theirs is smaller; no theorem says more; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
    "kernel": Terms(
        "heuristic",
        _MANY,
        f"{_SHARE} stayed at or below alpha in the simulations that come with this program, and no theorem says that "
        f"it does elsewhere; {_NO_PROMISE} {_ON_AVERAGE}",
    ),
}

TERMS: Registry[Terms] = Registry("procedure", _BUILT_IN)
"""Terms of the procedures that decide on one detector's rank counts, also of those that plugins add."""


def terms_of_bound(confidence: Fraction) -> Terms:
    """The terms of procedure `bound` at a confidence in (0, 1): of this one list, and no average."""
    sure, rest = percentage(confidence), percentage(1 - confidence)
    return Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"With {sure} confidence the share of wrong documents (those for which the null holds) in this one list is at "
        f"most alpha, for any number of documents: of audits with fresh documents, at most {rest} would give a list "
        "with a larger share. That is no average, and no single document is proven to be selected rightly.",
    )


SPECIAL_TERMS: dict[str, Terms] = {
    "td4eval": Terms(
        "heuristic",
        "None is known that would do: the weights are chosen by the audited documents that they then judge, so not "
        f"even detectors that are independent of one another for those {_NULLS} keep the share of wrong ones down.",
        f"{_SHARE} is not promised to stay at or below alpha. With six independent detectors and no document to be "
        "found, this procedure selected some in 47% of simulated audits of one document and in 41% of those of 20, at "
        "alpha = 0.1, where 10% are due. The strict answer beside this one ranks the fused statistic anew and holds.",
    ),
    "ktd": Terms(
        "heuristic",
        "For every audited document that was never trained on, the statistic W is as likely to be positive as "
        "negative, whatever its size; the sign test in this report checks that on the known documents.",
        f"{_SHARE} is at most alpha only if that symmetry holds. {_ON_AVERAGE}",
    ),
    "adadetect": Terms(
        "finite-sample",
        _EXCHANGEABLE,
        f"{_SHARE} is at most alpha times the true share of nulls, for any number of documents and whatever the "
        f"classifier learnt. {_ON_AVERAGE}",
    ),
    "bound": terms_of_bound(Fraction(95, 100)),
}
"""Terms of the procedures that read more than the rank counts of one detector."""

_ALSO_GIVEN = (
    f"{_EXCHANGEABLE} They are so also given the known documents that the score is learnt from (direction members: "
    "trained on; direction clean: never trained on), which hold no copy of any of them."
)


def learnt_terms(known_members: bool, estimated: bool) -> Terms:
    """The terms of adadetect.

    Args:
        known_members: whether the score was learnt from known members (direction clean: known non-members).
        estimated: whether the share of nulls is estimated, by Storey.
    """
    terms = SPECIAL_TERMS["adadetect"]
    if known_members:
        terms = replace(terms, assumption=_ALSO_GIVEN)
    if estimated:
        promise = (
            f"{_SHARE} is at most alpha, for any number of documents and whatever the classifier learnt, with the "
            f"share of nulls estimated from the audit itself. {_ON_AVERAGE}"
        )
        terms = replace(terms, promise=promise)
    return terms


def filter_terms(draws: int) -> Terms:
    """The terms of the knockoff filter; `draws` paraphrases compete with each text, 1 where none but one does."""
    terms = SPECIAL_TERMS["ktd"]
    if draws == 1:
        return terms
    assumption = (
        f"Every audited document that was never trained on scores higher than all {draws} of its paraphrases with a "
        f"probability of at most 1/{draws + 1}, whatever the size of W, as it would if it were exchangeable with them; "
        "real paraphrases are not quite. A test in this report checks that on the known documents."
    )
    return replace(terms, assumption=assumption, promise=f"{_SHARE} is at most alpha only if that holds. {_ON_AVERAGE}")


_DRAWN = (
    f"The audited documents {_NULLS} and the calibration documents are independent draws from one source, and nothing "
    "tells one kind from the other."
)

_DRAWN_ONE_BY_ONE = (
    "The calibration documents are independent draws from one source, and each audited document "
    f"{_NULLS} is, taken by itself, a draw from it that does not depend on them; how the audited documents depend on "
    "one another is free."
)

_CONDITIONAL = {_EXCHANGEABLE: _DRAWN, _ONE_BY_ONE: _DRAWN_ONE_BY_ONE}
_WITH_THESE = "over repetitions with fresh audited documents and these same calibration documents"


def _probability(delta: Fraction) -> str:
    """1 - delta, never rounded up: as a decimal where a short one is exact."""
    short = f"{float(1 - delta):g}"
    return short if Fraction(short) == 1 - delta else f"1 - {float(delta)!r}"


_WEIGHTED = Terms(
    "heuristic",
    f"The weights are right: given its words, an audited document {_NULLS} scores like a calibration document, its "
    "weight is how much more often such words stand among the audited documents than among those that calibrate, and "
    "its words do not tell which audited documents have the property searched for.",
    f"{_SHARE} is not promised to stay at or below alpha: the weights are estimated, and where they are wrong it can "
    "exceed alpha. With right weights it stayed at or below alpha in the simulations that come with this program, and "
    f"a theorem says so as numbers grow. {_ON_AVERAGE}",
)

_SHARE_OF_SOME = (
    "The expected share of wrong documents (those for which the null holds under at least one of the models) among the "
    "selected"
)

JOINT_TERMS: dict[str, Terms] = {
    "ebh": Terms(
        "finite-sample",
        f"Under each of the models: each audited document {_NULLS} is, taken by itself, exchangeable with the "
        "documents that this model was calibrated on. How documents and models depend on one another is free.",
        f"{_SHARE_OF_SOME} is at most alpha times the true share of such documents, for any number of documents and of "
        f"models. {_ON_AVERAGE}",
    ),
    "largest_p": Terms(
        "heuristic",
        "The largest p-values of the models depend on one another in the way that those of one model do (PRDS). "
        "That is proved for one model, and not for the largest of several.",
        f"{_SHARE_OF_SOME} is not promised to stay at or below alpha; it did in simulated audits whose models "
        f"share documents, and under the worst dependence it exceeds alpha several times. {_ON_AVERAGE}",
    ),
}
"""Of a selection under several models: e-BH on the smallest e-value, and BH on the largest p-value."""

NOTHING_PROVED = StrictAnswer("none", 0, None, "finite-sample")
"""The strict answer where no procedure has a guarantee: the empty list."""


def terms_of(procedure: str, grid: Grid) -> Terms:
    """A procedure's terms for p-values calibrated in the way that the grid records.

    By group, its assumption is made within each group. Calibration-conditional p-values turn a finite-sample
    promise about the average over calibration sets into one about the calibration documents at hand, which
    fails for a share delta of them; they add nothing to the promise of the other procedures.
    """
    if grid.weighted:
        return _WEIGHTED
    terms = TERMS[procedure]
    if grid.delta is not None and terms.guarantee == "finite-sample":
        sure = (
            f"With probability at least {_probability(grid.delta)} over the choice of the calibration documents, this "
            "holds for those at hand: "
        )
        promise = sure + terms.promise[0].lower() + terms.promise[1:].replace(_REPEATED, _WITH_THESE)
        terms = replace(terms, assumption=_CONDITIONAL.get(terms.assumption, terms.assumption), promise=promise)
    if grid.groups > 1:
        within = f"Within each of the {grid.groups} groups, and whatever the documents of the other groups are: "
        terms = replace(terms, assumption=within + terms.assumption[0].lower() + terms.assumption[1:])
    return terms
