"""The record of the verdict on a collection: was it trained on? `verdict.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.audit.records import VERDICT_FILE, Record, VersionedRecord, read_record
from pipeline.audit.summary import BlindDiagnostic, Diagnostic, Summary
from pipeline.errors import ExitCode
from pipeline.store.files import Store

LEVEL = 0.05
"""Largest share of collections without a trained document for which the permutation test may say that there is one."""

BlockKind = Literal["group", "family"]
Statement = Literal["trained on", "not shown", "not supported"]


class MemberCount(Record):
    """How many of the audited documents were trained on at least, by one selection."""

    selection: str = Field(description="Name of the selection.")
    detectors: list[str] = Field(description="Score columns that it reads.")
    confidence: float = Field(description="The count is too high with at most one less this probability.")
    at_least: int = Field(description="So many of the audited documents were trained on, at least.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    supported: bool | None = Field(
        description="False: a check contradicts what the count rests on; true: none does; null: not tested."
    )


class BlockTest(Record):
    """The permutation test of a linear score over whole blocks of documents."""

    p_value: float = Field(description="Twice the median over the splits, at most 1; exact.")
    p_values: list[float] = Field(description="Of each split.")
    permutations: int = Field(description="Permutations of the labels in each split.")
    auc: float = Field(
        description="Area under the ROC curve of the fitted score on blocks that it was not fitted on, mean over the "
        "splits; 0.5 is chance."
    )
    blocks: BlockKind = Field(description="What moves whole: groups (and near copies), or families of near copies.")
    n_audit: int = Field(description="Audited documents that were compared.")
    n_unseen: int = Field(description="Unseen documents that were compared.")
    n_audit_blocks: int = Field(description="Blocks of these audited documents.")
    n_unseen_blocks: int = Field(description="Blocks of these unseen documents.")
    n_mixed: int = Field(description="Documents of blocks that stand in both roles; they are left out.")
    differences: dict[str, float] = Field(
        description="By score column, how far audited blocks lie above unseen ones on average, in standard deviations."
    )


class CollectionVerdict(VersionedRecord):
    """Was this collection trained on: `verdict.json`."""

    run: str = Field(description="The run directory.")
    model: str = Field(description="The model that was asked.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    seed: int = Field(description="Seed of the splits, the permutations and the classifier's folds.")
    answer: Statement = Field(
        description="trained on: the count or the test shows it, and the checks passed; not shown: neither does, which "
        "is no proof that it was not; not supported: one does, and a check failed or could not be made."
    )
    supported: bool | None = Field(
        description="False: a check contradicts what the verdict rests on; true: none does, which is no proof; null: "
        "not tested."
    )
    reasons: list[str] = Field(description="Why the verdict is not supported, one line each; empty where it is.")
    sentences: list[str] = Field(
        description="The verdict in words: the answer, the count, the test, what they rest on."
    )
    level: float = Field(description="Largest p-value of the test that counts as shown.")
    counts: list[MemberCount] = Field(
        description="What the selections that seek members say, in their order; the verdict reads the first alone."
    )
    test: BlockTest = Field(description="The permutation test.")
    blind: BlindDiagnostic = Field(
        description="Whether the words alone tell the unseen documents from the audited ones."
    )
    direction: Diagnostic = Field(description="Whether the audited documents score higher, as trained ones do.")

    @property
    def exit_code(self) -> ExitCode:
        """How a command ends that fails where the collection was trained on."""
        codes = {"trained on": ExitCode.SELECTED, "not supported": ExitCode.UNSUPPORTED, "not shown": ExitCode.DONE}
        return codes[self.answer]


def count_of(summary: Summary) -> MemberCount | None:
    """How many documents were trained on at least, as a selection says; None where it bounds no such number."""
    bound = summary.bound
    if bound is None or summary.direction != "members":
        return None
    return MemberCount(
        selection=summary.name,
        detectors=summary.detectors,
        confidence=bound.confidence,
        at_least=bound.members_at_least,
        n_audit=summary.n_audit,
        supported=summary.supported,
    )


def write_verdict(store: Store, verdict: CollectionVerdict) -> None:
    """Write the verdict into the run directory."""
    store.write_json(VERDICT_FILE, verdict.plain())


def read_verdict(store: Store) -> CollectionVerdict | None:
    """The verdict of a run directory; None where none was asked for since its last answers.

    Raises:
        UserError: in one line, a damaged verdict, or one of another version.
    """
    return read_record(store, VERDICT_FILE, CollectionVerdict, f"ask anew with seenset verdict {store.url}")
