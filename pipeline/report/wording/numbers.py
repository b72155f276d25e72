"""Counts, shares and the shortest possible list as text."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.audit.summary import Summary
from pipeline.selection.guarantees import Outcome, at_most, percentage
from pipeline.selection.passes import Basis
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.record import Options, Procedure


def percent(share: float) -> str:
    """A share as a percentage, as written: 0.1 is 10%; a part of alpha is rounded up."""
    return percentage(at_most(float(share)))


def share_text(share: float) -> str:
    """An estimated null share, which some procedures do not cap at 1."""
    return f"{share:.3g}" if share <= 1 else f"{share:.3g} (this estimate may exceed 1)"


def documents(count: int) -> str:
    """A count with its noun."""
    return f"{count:,} document{'' if count == 1 else 's'}"


def was(count: int) -> str:
    """The verb "was" or "were" for a count."""
    return "was" if count == 1 else "were"


def sample_of(limit: int) -> str:
    """States that only the first documents of each role were read."""
    return f"This is a sample: only the first {limit:,} documents of each role were read."


def applied_in(summary: Summary) -> tuple[Procedure, bool]:
    """The procedure that finally decided on ranks, and whether only half of the known documents calibrated."""
    options = Options(
        "storey" if "lambda" in summary.details else "bh",
        summary.guarantee == "finite-sample",
        len(summary.detectors),
        "known_members" in summary.details,
    )
    return procedure_of(summary.procedure).applied(options)


def null_share(summary: Summary) -> tuple[float, bool]:
    """The null share that the procedure used, and whether it was estimated; uncapped where the rule has no cap."""
    procedure, _ = applied_in(summary)
    if procedure.factor.uncapped and summary.factor is not None:
        return summary.factor, True
    share = summary.null_proportion
    return share, share != 1 or procedure.estimates  # nothing else determines it for a plugin's procedure


def shortest(summary: Summary) -> str:
    """The minimum length of a list, or that none was possible: a clause shared by all lengths of an answer."""
    share, estimated = null_share(summary)
    none, kind = ("none", "not trained on") if summary.direction == "members" else ("each", "trained on")
    of = f"{share:.1%} of the audited documents were {kind}" if share < 1 else f"{none} of them was trained on"
    at = f" (as estimated, {of})" if estimated else ""
    if summary.minimum_selectable > summary.n_audit:
        return f"nothing could have been selected{at}" if at else "nothing could ever have been selected"
    return f"the shortest possible list has {documents(summary.minimum_selectable)}{at}"


@dataclass(frozen=True, slots=True)
class ResolutionFacts:
    """The documents of a shortest possible list."""

    n: int  # calibration documents
    m: int  # audited documents
    role: str  # the calibration role
    basis: Basis

    def __str__(self) -> str:
        """The first clause of a sentence."""
        if self.basis.one_of_each:
            half = f", {'half of one document' if self.basis.halved else 'one'} of each block,"
        else:
            half = ", half of those that are known," if self.basis.halved else ""
        share = "" if self.basis.share is None else f" at an estimated null share of {self.basis.share:.3g}"
        return f"With {self.n:,} {self.role} documents to calibrate on{half} and {self.m:,} to judge{share}"

    def for_a_hundredth(self, enough: int) -> str:
        """States the number of known documents for a selection of 1% of the audited ones."""
        half = ", half of which calibrate," if self.basis.halved else ""
        group = " of one group" if self.basis.grouped else ""
        if self.basis.one_of_each:
            group += " of different blocks"
        few = "as few as 1% of the audited documents" if self.m >= 200 else "a single document"
        return f" With {enough:,} {self.role} documents{group}{half} {few} can be selected"


def shortest_list(given: ResolutionFacts, needed: int, outcome: Outcome, enough: int | None) -> str:
    """States the shortest possible list.

    Args:
        given: the documents.
        needed: number of documents of the list.
        outcome: failed where `needed` exceeds the audited documents; passed where as few as 1% can be selected.
        enough: number of known documents for a selection of 1%; None where it does not matter.
    """
    text = f"{given}, the shortest possible list has {documents(needed)}."
    if outcome == Outcome.FAILED:
        text = f"{given}, nothing can be selected: the shortest possible list would have {documents(needed)}."
    return text if outcome == Outcome.PASSED or enough is None else f"{text}{given.for_a_hundredth(enough)}."


def shortest_list_by_share(given: ResolutionFacts, lengths: tuple[int, int, int], outcome: Outcome, enough: int) -> str:
    """States the shortest possible list where the procedure estimates the share of nulls.

    Args:
        given: the documents.
        lengths: lengths of the list at a share of 1, at 0.5, and at the smallest share that can be estimated.
        outcome: as in `shortest_list`, at a share of 1.
        enough: number of known documents for a selection of 1% at a share of 1.
    """
    needed, half, best = lengths
    if best > given.m:
        text = (
            f"{given}, nothing can be selected at any estimated null share: the shortest possible list would have "
            f"{best:,} documents."
        )
    else:
        text = (
            f"{given}, the length of the shortest possible list depends on the estimated null share: {needed:,} at a "
            f"share of 1, {half:,} at 0.5, never fewer than {best:,}."
        )
    if outcome == Outcome.PASSED:
        return text
    were = "were" if given.role == "unseen" else "were not"
    return f"{text}{given.for_a_hundredth(enough)}; fewer suffice if part of the audited documents {were} trained on."


def shortest_list_of_plugin(given: ResolutionFacts, needed: int, procedure: str) -> str:
    """States the shortest list for a plugin's procedure, for which only that of bh is known."""
    return (
        f"{given}, the shortest possible list of procedure bh has {documents(needed)}; that of {procedure}, a plugin's "
        "procedure, is not known."
    )


def before_pass(sentence: str, at_most: bool) -> str:
    """Adapt a sentence on the shortest list to documents that are not read yet.

    Args:
        sentence: a sentence that starts with "With".
        at_most: whether adapters take documents of a group, which may be fewer.
    """
    return sentence.replace("With ", "With at most ", 1) if at_most else sentence
