"""Counts and shares in words."""

from __future__ import annotations

from pipeline.audit.summary import Summary
from pipeline.selection.digits import at_most, percentage
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.record import Options, Procedure


def percent(share: float) -> str:
    """A share as a percentage, as it was written: 0.1 is 10%; a part of alpha is rounded up."""
    return percentage(at_most(float(share)))


def share_text(share: float) -> str:
    """An estimated null share, which some procedures do not cap at 1."""
    return f"{share:.3g}" if share <= 1 else f"{share:.3g} (this estimate may exceed 1)"


def documents(count: int) -> str:
    """A count with its noun."""
    return f"{count:,} document{'' if count == 1 else 's'}"


def sample_of(limit: int) -> str:
    """That no more than the first documents of each role were read."""
    return f"This is a sample: only the first {limit:,} documents of each role were read."


def applied_in(summary: Summary) -> tuple[Procedure, bool]:
    """The procedure that decided on ranks in the end, and whether only half of the known documents calibrated."""
    options = Options(
        "storey" if "lambda" in summary.details else "bh",
        summary.guarantee_of_procedure == "finite-sample",
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
    return share, share != 1 or procedure.estimates  # of a plugin's procedure nothing else tells


def shortest(summary: Summary) -> str:
    """How short a list could have been, or that none was possible: a clause that all lengths of an answer share."""
    share, estimated = null_share(summary)
    none, kind = ("none", "not trained on") if summary.direction == "members" else ("each", "trained on")
    of = f"{share:.1%} of the audited documents were {kind}" if share < 1 else f"{none} of them was trained on"
    at = f" (as estimated, {of})" if estimated else ""
    if summary.minimum_selectable > summary.n_audit:
        return f"nothing could have been selected{at}" if at else "nothing could ever have been selected"
    return f"the shortest possible list has {documents(summary.minimum_selectable)}{at}"
