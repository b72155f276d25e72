"""Documents that were cut to their first max_tokens tokens."""

from __future__ import annotations

from pipeline.checks.check import AnswerFacts, Check
from pipeline.checks.diagnostic import ShareDiagnostic
from pipeline.selection.guarantees import Outcome
from pipeline.wording import was


def truncated_diagnostic(facts: AnswerFacts) -> ShareDiagnostic:
    """The share of the scored documents that were truncated."""
    scored = facts.scored
    if scored is None or any(shard.scores for shard in scored.shards.values()):
        unknown = "How many documents were cut is not known."
        return ShareDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=unknown, share=0.0)
    total = sum(receipt.n_scored for receipt in scored.receipts)
    count = sum(receipt.n_truncated for receipt in scored.receipts)
    outcome = Outcome.PASSED if total and not count else Outcome.INCONCLUSIVE
    share = count / total if total else 0.0
    windows = scored.receipts[0].fingerprint.get("windows", 1) if scored.receipts else 1
    return ShareDiagnostic(outcome=outcome, sentence=truncated_sentence(count, total, windows), share=share)


def truncated_sentence(count: int, total: int, windows: int = 1) -> str:
    """States how many of the scored documents were truncated, where up to `windows` windows of each were read."""
    if total and not count:
        return f"None of the {total} documents was truncated."
    if windows > 1:
        return (
            f"{count} of {total} documents {was(count)} read in part: {windows} windows of max_tokens tokens, spread "
            "from the beginning to the end. Such a document is judged by these windows alone."
        )
    return (
        f"{count} of {total} documents {was(count)} truncated at max_tokens. A truncated "
        "document is judged by its first max_tokens tokens alone."
    )


CHECK = Check(
    name="truncated",
    title="Truncation",
    record=ShareDiagnostic,
    description="Documents that were cut to their first max_tokens tokens, or of which only windows were read.",
    absent="never",
    place=7,
    on_scores=truncated_diagnostic,
)
