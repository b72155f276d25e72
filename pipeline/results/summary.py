"""The summary of a selection: the question, the decision, the guarantee, and the checks that contradict it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.registry import Conclusion
from pipeline.errors import ExitCode
from pipeline.run import conclusion_text as wording
from pipeline.run.conclusion import SelectionResult, bound_condition
from pipeline.run.digests import check_answer, no_digests
from pipeline.run.records import Record, read_record
from pipeline.run.remedies import answered_by
from pipeline.selection.guarantees import ConclusionValue, GroupWeight
from pipeline.store.files import Store


class SeriesPlace(Record):
    """The place of a scan in its schedule, and the level of its selection there."""

    ledger: str = Field(description="Folder of the scans of the schedule.")
    slot: int = Field(description="Number of the place: 1 for the first scan.")
    horizon: int | None = Field(description="Scans of the schedule; null: no end.")
    alpha: float = Field(description="Largest share of all that the scans select together that may be wrong.")
    level: float = Field(description="The part of alpha that this scan uses.")

    def clause(self) -> str:
        """The place in a short clause."""
        return wording.scan(self.slot, self.horizon, self.level)

    @property
    def sentence(self) -> str:
        """The place and the schedule in one sentence."""
        return wording.part_of_schedule(self.clause(), self.alpha)


class Summary(SelectionResult):
    """The answer of one selection: `selection/<name>/summary.json`."""

    diagnostics: Conclusion = Field(description="Checks of the documents.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    series: SeriesPlace | None = Field(None, description="Place in a schedule of scans; null where there is none.")

    @property
    def checked(self) -> bool:
        """Whether the check that calibration and audited documents are alike was made, regardless of its result."""
        return self.diagnostics.result(BlindDiagnostic).tested

    @property
    def condition(self) -> str | None:
        """The condition under which bounds of this answer are stated, from `bound_condition`."""
        return bound_condition(self.conclusion, self.checked)

    @property
    def conclusion_shown(self) -> str:
        """The conclusion of the checks, as a word for tables."""
        return wording.conclusion_shown(self.conclusion, self.checked)

    @property
    def remarks(self) -> list[str]:
        """Notes on the guarantee for readers of the numbers, one line each; empty where nothing contradicts it."""
        if self.conclusion == ConclusionValue.CONTRADICTED:
            return [f"{wording.WARNING}: {reason}" for reason in self.reasons]
        if self.conclusion == ConclusionValue.SUPPORTED:
            return []
        return [unsettled(self.diagnostics.result(BlindDiagnostic))]

    @property
    def groups_by_weight(self) -> list[GroupWeight]:
        """The groups whose p-values are divided by weights, the largest weight first; empty where none are."""
        return sorted(self.groups or [], key=lambda one: (-one.weight, one.group))

    @property
    def weighting(self) -> str | None:
        """What p-values are divided by, in sentences; None where they are not divided."""
        return wording.weights_of_groups(groups) if (groups := self.groups_by_weight) else None

    def without_bound(self, reason: str) -> Summary:
        """The same answer without a bound, with the reason."""
        return self if self.bound is None else self.model_copy(update={"bound": None, "bound_withheld": reason})

    def line(self) -> str:
        """The answer in one line; contradictions of the guarantee precede the count."""
        count = wording.selected(self.n_selected, self.n_audit)
        level = f"alpha {self.alpha:g}" if self.series is None else self.series.clause()
        settings = f"{self.procedure}, {level}"
        if self.conclusion == ConclusionValue.CONTRADICTED:
            return wording.contradicted_line(self.name, " ".join(self.remarks), count, settings)
        return wording.line(self.name, count, f"{settings}, {self.guarantee}", self.conclusion_shown)


def unsettled(blind: BlindDiagnostic) -> str:
    """Why a blind test leaves an answer inconclusive."""
    return wording.inconclusive_sentence(blind.sentence, blind.tested)


def unsupported(summaries: Iterable[Summary]) -> list[str]:
    """The names of the selections that a check contradicts."""
    return [summary.name for summary in summaries if summary.conclusion == ConclusionValue.CONTRADICTED]


def selection_exit_code(summaries: Iterable[Summary]) -> ExitCode:
    """The exit code of a command that fails where something is selected.

    UNSUPPORTED where a check contradicts any selection that selected something, even if others are supported: after
    SELECTED a caller may act on every list. Inconclusive selections count as supported ones.
    """
    filled = [summary for summary in summaries if summary.n_selected]
    if unsupported(filled):
        return ExitCode.UNSUPPORTED
    return ExitCode.SELECTED if filled else ExitCode.DONE


def summary_file(name: str) -> str:
    """Path of the summary of a selection in the run directory."""
    return f"selection/{name}/summary.json"


def read_summary(store: Store, name: str) -> Summary | None:
    """The summary of a selection with unchanged files; None where it was not made.

    Raises:
        DamagedError: a file of the answer is missing or changed, or the answer has no digests.
        VersionError: a summary of another version.
    """
    if check_answer(store, name) is None:
        if store.exists(summary_file(name)):
            raise no_digests(store, name)
        return None
    return read_record(store, summary_file(name), Summary, answered_by(store.url))
