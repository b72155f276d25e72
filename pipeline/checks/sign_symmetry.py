"""The assumption of the knockoff filter: the signs of its statistic are fair coins among documents of known membership.

The test and its sentence are those of the filter (`pipeline.selection.knockoff`).
"""

from __future__ import annotations

from pydantic import Field

from pipeline.checks.check import AnswerFacts, Check
from pipeline.checks.diagnostic import Diagnostic


class SymmetryDiagnostic(Diagnostic):
    """Whether the signs of the knockoff statistic are fair coins among documents of known membership."""

    p_value: float = Field(description="P-value of the hypothesis that they are; a small one contradicts it.")


def symmetry_diagnostic(facts: AnswerFacts) -> SymmetryDiagnostic | None:
    """The check of sign symmetry; it never passes, because a test without contradiction proves no symmetry."""
    symmetry = facts.answer.symmetry
    if symmetry is None:
        return None
    return SymmetryDiagnostic(outcome=symmetry.outcome, sentence=symmetry.sentence, p_value=symmetry.p_value)


CHECK = Check(
    name="sign_symmetry",
    title="Symmetry of signs",
    record=SymmetryDiagnostic,
    description="The assumption of the knockoff filter; null for every other procedure.",
    place=11,
    on_scores=symmetry_diagnostic,
    next=lambda diagnostic, role: "Rank the same statistic against unseen documents: select by procedure bh or storey.",
    recomputed=True,
    of_answer=True,
)
