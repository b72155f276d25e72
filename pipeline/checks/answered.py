"""Documents without an answer of an endpoint: whether their share differs between the audited and the known documents.

They are left out by one rule in every role, so a difference costs power and not the level.
"""

from __future__ import annotations

from pydantic import Field

from pipeline.checks.check import KNOWN, AnswerFacts, Check
from pipeline.checks.diagnostic import Diagnostic
from pipeline.config.corpus import Role
from pipeline.corpus.reasons import Reason
from pipeline.run.scored import Scored
from pipeline.selection.guarantees import Outcome
from pipeline.wording import documents

LEVEL = 0.01
"""A difference of shares is named where chance alone gives one like it with at most this probability."""


class AnsweredDiagnostic(Diagnostic):
    """Documents without an answer, audited ones and those that calibrate."""

    n_audit: int = Field(description="Audited documents with a score or without an answer.")
    n_audit_unanswered: int = Field(description="Of these, those without an answer; they count with p = 1.")
    n_calibration: int = Field(description="Documents of the role that calibrates with a score or without an answer.")
    n_calibration_unanswered: int = Field(description="Of these, those without an answer; they do not calibrate.")
    p: float = Field(description="Two-sided p-value of Fisher's exact test that both shares are equal.")


def answered_diagnostic(facts: AnswerFacts) -> AnsweredDiagnostic | None:
    """The documents without an answer, by role; None where every document has one."""
    if facts.scored is None:
        return None
    (audit, audit_none), (known, known_none) = (count_unanswered(facts.scored, role) for role in ("audit", facts.role))
    if not audit_none and not known_none:
        return None
    p = difference_p(audit_none, audit, known_none, known)
    return AnsweredDiagnostic(
        outcome=Outcome.INCONCLUSIVE if p <= LEVEL else Outcome.PASSED,
        sentence=unanswered_sentence((audit_none, audit), (known_none, known), facts.role, p),
        n_audit=audit,
        n_audit_unanswered=audit_none,
        n_calibration=known,
        n_calibration_unanswered=known_none,
        p=p,
    )


def count_unanswered(scored: Scored, role: Role) -> tuple[int, int]:
    """The documents of a role with a score or without an answer, and those without an answer."""
    none = scored.quarantined(role)[Reason.NO_ANSWER]
    return sum(receipt.n_scored for receipt in scored.of(role)) + none, none


def difference_p(ones: int, one_total: int, others: int, other_total: int) -> float:
    """Two-sided p-value of Fisher's exact test of two shares, in (0, 1].

    The probability, given both totals and the sum of `ones` and `others`, of all tables that are at most as probable
    as this one.

    Args:
        ones: documents of the first role that are counted.
        one_total: all of that role.
        others: counted documents of the second role.
        other_total: all of that role.
    """
    from scipy.stats import fisher_exact

    return float(fisher_exact([[ones, one_total - ones], [others, other_total - others]]).pvalue)


# --- sentences


def unanswered_sentence(audit: tuple[int, int], known: tuple[int, int], role: str, p: float) -> str:
    """States how many documents have no answer, and whether the shares of both roles differ.

    Args:
        audit: audited documents without an answer, and these and those with a score.
        known: the same of the role that calibrates.
        role: that role.
        p: of the test of both shares.
    """
    (audit_none, audit_all), (known_none, known_all) = audit, known
    counts = (
        f"Of {documents(audit_all)} to audit {audit_none:,} have no answer, and of {known_all:,} {role} ones "
        f"{known_none:,}; one rule leaves them out in both roles, so the guarantee holds."
    )
    if p > LEVEL:
        return f"{counts} Chance explains the difference of the shares (p = {p:.2g}, exact test)."
    audited_more = audit_none * known_all > known_none * audit_all
    cost = "an audited document without an answer is never selected" if audited_more else "fewer calibrate"
    more = "Audited" if audited_more else f"Known {role}"
    often = f"{more} documents lack an answer more often than chance explains (p = {p:.2g}, exact test)"
    return f"{counts} {often}: {cost}."


CHECK = Check(
    name="answered",
    title="Documents without an answer",
    record=AnsweredDiagnostic,
    description="Documents without an answer of an endpoint; left out where all have one.",
    absent="left out",
    place=8,
    needs=KNOWN,
    on_scores=answered_diagnostic,
)
