"""The assumption of the knockoff filter: the signs of its statistic are fair coins among documents of known membership.

The test and its sentence are those of the filter (`pipeline.selection.knockoff`).
"""

from __future__ import annotations

from pipeline.checks.check import AnswerFacts, Check
from pipeline.run.summary import SymmetryDiagnostic


def symmetry_diagnostic(facts: AnswerFacts) -> SymmetryDiagnostic | None:
    """The check of sign symmetry; it never passes, because a test without contradiction proves no symmetry."""
    symmetry = facts.answer.symmetry
    if symmetry is None:
        return None
    return SymmetryDiagnostic(outcome=symmetry.outcome, sentence=symmetry.sentence, p_value=symmetry.p_value)


CHECK = Check(
    name="sign_symmetry",
    title="Symmetry of signs",
    on_scores=symmetry_diagnostic,
    next=lambda diagnostic, role: "Rank the same statistic against unseen documents: select by procedure bh or storey.",
    recomputed=True,
    of_answer=True,
)
