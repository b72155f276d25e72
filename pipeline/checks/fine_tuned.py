"""Known documents that adapters were trained on or prefixes hold, which do not calibrate."""

from __future__ import annotations

from pipeline.checks.check import AnswerFacts, Check
from pipeline.checks.diagnostic import CountDiagnostic
from pipeline.selection.guarantees import Outcome


def fine_tuned_diagnostic(facts: AnswerFacts) -> CountDiagnostic | None:
    """The number of documents of the null role that do not calibrate; None where no adapter or prefix has any."""
    n_near = 0 if facts.overlap is None else facts.overlap.n_trained
    if facts.scored is None or not (facts.scored.finetuned or n_near):
        return None
    count = facts.scored.n_finetuned(facts.role)
    sentence = fine_tuned_sentence(count, facts.role, n_near)
    return CountDiagnostic(outcome=Outcome.PASSED, sentence=sentence, count=count)


def fine_tuned_sentence(count: int, role: str, n_near: int) -> str:
    """States the documents that adapters were trained on or that are in a prefix.

    Args:
        count: number of these in the calibration role, with their near-duplicates.
        role: the calibration role.
        n_near: number of audited documents that are near-duplicates of one.
    """
    text = (
        f"{count} {role} documents do not calibrate: they were fine-tuned on or are in a prefix, or are "
        "near-duplicates of such a document."
    )
    if n_near:
        text += f" {n_near} audited documents are near-duplicates of one: to fsd they look less like members"
        text += ", and also after a prefix of unseen documents."
    return text


CHECK = Check(
    name="fine_tuned",
    title="Documents of adapters and prefixes",
    record=CountDiagnostic,
    description="Known documents that adapters were trained on; null where no adapter was.",
    place=8,
    on_scores=fine_tuned_diagnostic,
)
