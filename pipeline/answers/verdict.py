"""The record of the verdict on whether a collection was trained on: `verdict.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.checks.diagnostic import BlindDiagnostic, Diagnostic
from pipeline.errors import DamagedError, ExitCode
from pipeline.run.conclusion import Concluded
from pipeline.run.digests import answer_digests
from pipeline.run.records import VERDICT_FILE, Record, VersionedRecord, read_record, write_record
from pipeline.run.remedies import verdict_again_note
from pipeline.store.files import Store

LEVEL = 0.05
"""Largest share of collections without a trained document for which the permutation test may state one."""

BlockKind = Literal["group", "family"]
CountUnit = Literal["document", "group", "family"]
Statement = Literal["trained on", "not shown", "not supported"]


class MemberCount(Concluded):
    """Lower limit, by one selection, of the number of audited documents or blocks that were trained on."""

    selection: str = Field(description="Name of the selection.")
    detectors: list[str] = Field(description="Score columns that it reads.")
    confidence: float = Field(description="The count is too high with at most one less this probability.")
    unit: CountUnit = Field(
        "document",
        description="Unit of the count: documents, or, where documents depend on each other, the blocks that contain a "
        "document that was trained on.",
    )
    at_least: int = Field(description="Minimum number of units that were trained on or contain such a document.")
    n_units: int = Field(0, description="Number of audited units.")
    documents_of_each: int = Field(1, description="Documents of each block whose mean score is its score.")
    n_mixed: int = Field(0, description="Documents of blocks that are in both roles; they are left out.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")


class BlockTest(Record):
    """The permutation test of a linear score over whole blocks of documents."""

    p_value: float = Field(description="Exact; 1 where audited documents do not score higher.")
    permutations: int = Field(description="Permutations of the labels.")
    auc: float = Field(
        description="Area under the ROC curve of the fitted score on blocks that it was not fitted on, mean over the "
        "folds; 0.5 is chance."
    )
    blocks: BlockKind = Field(
        description="Units that are permuted: groups (and near-duplicates), or families of near-duplicates."
    )
    n_audit: int = Field(description="Audited documents that were compared.")
    n_unseen: int = Field(description="Unseen documents that were compared.")
    n_audit_blocks: int = Field(description="Blocks of these audited documents.")
    n_unseen_blocks: int = Field(description="Blocks of these unseen documents.")
    n_mixed: int = Field(description="Documents of blocks that are in both roles; they are left out.")
    differences: dict[str, float] = Field(
        description="By score column, how far audited blocks are above unseen ones on average, in standard deviations."
    )


class VersionsTest(Record):
    """The test of a collection of documents with versions, by redrawing which version of each was published."""

    p_value: float = Field(description="P-value, exact, of the hypothesis that no document was learnt.")
    redraws: int = Field(description="Times that all published versions were drawn again.")
    e_value: float = Field(
        description="E-value of the same hypothesis; its product with the e-value of later documents is one of both."
    )
    documents: int = Field(description="Documents with scores of all their versions.")
    versions: int = Field(description="Versions of a document, at most.")
    above: float = Field(
        description="How far published versions score above the mean of their document's versions, in standard "
        "deviations, on average."
    )


class CollectionVerdict(Concluded, VersionedRecord):
    """Whether this collection was trained on: `verdict.json`.

    Example:
        >>> verdict = seenset.verdict("runs/my-audit")
        >>> verdict.counts[0].at_least, verdict.counts[0].n_audit
        (16, 100)
        >>> verdict.test.p_value <= verdict.level
        True
    """

    sealed = True

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    run: str = Field(description="The run directory.")
    model: str = Field(description="The model that scored the documents.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    seed: int = Field(description="Seed of the draws, the folds and the permutations.")
    answer: Statement = Field(
        description="trained on: the count or the test shows it, and no check contradicts it; not shown: neither does, "
        "which is no proof that it was not; not supported: one does, and a check contradicts it. Whether the checks "
        "support it or are inconclusive, `conclusion` states."
    )
    reasons: list[str] = Field(
        description="Why the verdict is contradicted or inconclusive, one line each; empty where it is supported."
    )
    next: str | None = Field(
        None,
        exclude_if=lambda step: step is None,
        description="What to do next, in one sentence, where a check contradicts the verdict or leaves it "
        "inconclusive; left out where none does.",
    )
    sentences: list[str] = Field(
        description="The verdict in words: the answer, the count, the test, their assumptions."
    )
    level: float = Field(description="Largest p-value of the test that counts as shown.")
    counts: list[MemberCount] = Field(
        description="The counts of the selections of direction members, in their order, as far as they may be stated; "
        "the verdict reads the first alone."
    )
    test: BlockTest | None = Field(
        description="The permutation test; null where no class of size has blocks of both roles, so that no labels "
        "can be permuted."
    )
    blind: BlindDiagnostic = Field(
        description="Whether words alone distinguish the unseen documents from the audited ones."
    )
    direction: Diagnostic = Field(description="Whether the audited documents score higher, as trained ones do.")
    versions: VersionsTest | None = Field(
        None,
        exclude_if=lambda versions: versions is None,
        description="The test of documents with versions, in place of counts and `test`; left out for others.",
    )
    answers: dict[str, str] = Field({}, description="By selection, SHA-256 of the digests of its answer.")

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that fails where the collection was trained on, even if inconclusive."""
        codes = {"trained on": ExitCode.SELECTED, "not supported": ExitCode.UNSUPPORTED, "not shown": ExitCode.DONE}
        return codes[self.answer]


def write_verdict(store: Store, verdict: CollectionVerdict) -> CollectionVerdict:
    """Write the verdict into the run directory, with the digests of the existing answers; returns what was written."""
    verdict = verdict.model_copy(update={"answers": answer_digests(store)})
    write_record(store, VERDICT_FILE, verdict)
    return verdict


def read_verdict(store: Store) -> CollectionVerdict | None:
    """The verdict of a run directory; None where none was requested since its last answers.

    Raises:
        DamagedError: a verdict that was changed, or that is of other answers.
        VersionError: a verdict of another version.
    """
    again = verdict_again_note(store.url)
    verdict = read_record(store, VERDICT_FILE, CollectionVerdict, again, again)
    if verdict is not None and verdict.answers != answer_digests(store):
        raise DamagedError(f"{store.url}/{VERDICT_FILE}", "is not of the answers of this run", again)
    return verdict
