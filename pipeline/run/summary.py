"""The summary of a selection: the question, the decision, the guarantee, and the checks that contradict it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from pipeline.config.corpus import Role
from pipeline.config.selection import Direction
from pipeline.errors import ExitCode
from pipeline.run import conclusion_text as wording
from pipeline.run.conclusion import Bounded, bound_condition, conclude
from pipeline.run.digests import check_answer, no_digests
from pipeline.run.records import Record, VersionedRecord, read_record
from pipeline.run.remedies import answered_by
from pipeline.selection.guarantees import ConclusionValue, GuaranteeKind, Outcome, StrictAnswer
from pipeline.store.files import Store

LEAST_SHARED = 10
"""Tokens of two characters or more, in common with other documents, that the median document needs for the test."""


class Diagnostic(Record):
    """One check of an assumption of a selection."""

    about_power: ClassVar[bool] = False
    """Whether a failed check leaves the guarantee intact and only states how little could have been selected."""

    decides: ClassVar[bool] = False
    """Whether an answer is inconclusive where the check is."""

    outcome: Outcome = Field(
        description="passed; failed; inconclusive: it could not be made, decided nothing, or only reports a number."
    )
    sentence: str = Field(description="The check and its result, in words that need no statistics.")

    @property
    def contradicts(self) -> bool:
        """Whether the check contradicts the guarantee of an answer."""
        return self.outcome == Outcome.FAILED and not self.about_power


class BlindDiagnostic(Diagnostic):
    """Whether words or tokens alone, or the looks of pictures, distinguish calibration documents from audited ones.

    Numbers are null if not tested.
    """

    decides: ClassVar[bool] = True

    outcome: Outcome = Field(
        description="passed: hardly, at 99% confidence; failed: they do, at 99% confidence; inconclusive: not tested, "
        "or too few documents, or too few words in common, to say either."
    )
    tested: bool = Field(
        True,
        description="Whether the test was made; false: no texts could be read, or documents have versions, which need "
        "no test.",
    )
    by: str = Field(
        "words",
        description="Input of the classifier: words, or tokens where documents are given as token ids; of pictures "
        "thumbnails, colours and files.",
    )
    n_to_settle: int | None = Field(
        None, description="Documents of each kind, approximately, that would decide the test; null where it is decided."
    )
    auc: float | None = Field(None, description="Area under the ROC curve of the classifier, held out; 0.5 is chance.")
    low: float | None = Field(None, description="Lower end of the 99% interval of the area.")
    high: float | None = Field(None, description="Upper end of the 99% interval of the area.")
    n_calibration: int | None = Field(None, description="Calibration documents that were compared.")
    n_audit: int | None = Field(None, description="Audited documents that were compared.")
    n_calibration_blocks: int | None = Field(
        None,
        description="Sets of dependent calibration documents among these, which count once: groups, families of "
        "near-duplicates, single documents; null where all documents are independent.",
    )
    n_audit_blocks: int | None = Field(None, description="The same for the audited documents.")
    shared: float | None = Field(
        None,
        description="Median number of distinct words, or pairs and triples of characters, that another document has: "
        "below 10 the test could not look, and does not pass. Null for pictures.",
    )

    @property
    def looked(self) -> bool:
        """Whether documents have enough words in common for a difference to show."""
        return self.shared is None or self.shared >= LEAST_SHARED

    @property
    def below(self) -> bool:
        """Whether the whole interval of the area is below 0.5, as where documents of the two roles are paired."""
        return self.high is not None and self.high < 0.5


class ResolutionDiagnostic(Diagnostic):
    """Whether there are enough calibration documents for a small selection."""

    about_power: ClassVar[bool] = True

    minimum_selectable: int = Field(description="The fewest documents that can be selected at all.")
    calibration_for_1_percent: int | None = Field(
        description="Known documents of the role that calibrates which it takes to select as few as 1% of the audited "
        "ones; null where their number does not matter."
    )


class DuplicateFamily(Record):
    """Documents that are near-duplicates of each other, directly or through others."""

    size: int = Field(description="Documents of the family.")
    ids: list[str] = Field(description="Ids of the first of them.")


class NearDuplicates(Record):
    """Near-duplicates among the documents of one role."""

    n_documents: int = Field(description="Documents that were compared.")
    whole: bool = Field(description="Whether these are all; else a sample that keeps near-duplicates together.")
    n_copies: int = Field(description="Of these, those that have a near-duplicate among the others.")
    n_families: int = Field(description="Families of near-duplicates, of two documents or more.")
    largest: int = Field(
        description="Documents of the largest family; 1 where there are no near-duplicates, 0 for none."
    )
    n_distinct: int = Field(description="Documents that remain if one of each family is kept.")
    effective: float = Field(
        description="Effective number of independent documents: (sum of sizes)^2 / sum of sizes^2."
    )
    families: list[DuplicateFamily] = Field(description="The largest families.")
    n_large: int = Field(0, description="Families of at least 5 documents.")


class NearDuplicatePair(Record):
    """Two documents that are near-duplicates."""

    audit: str = Field(description="Id of the audited document.")
    calibration: str = Field(description="Id of the calibration document; the first that is a near-duplicate of it.")
    share: float = Field(description="Share of common runs of five words or eight characters, estimated, in [0, 1].")


class OverlapDiagnostic(Diagnostic):
    """Which calibration documents are near-duplicates of audited ones."""

    n_calibration: int = Field(
        description="Calibration documents that are near-duplicates of audited ones, left out of calibration."
    )
    n_equal: int = Field(0, description="Of these, those whose text is the same.")
    n_audit: int = Field(description="Audited documents that calibration documents repeat.")
    pairs: list[NearDuplicatePair] = Field([], description="The first few pairs.")


class NearDuplicatesDiagnostic(Diagnostic):
    """Near-duplicates among the audited documents, and among those that calibrate."""

    audit: NearDuplicates = Field(description="Near-duplicates among the audited documents.")
    calibration: NearDuplicates = Field(description="Near-duplicates among the documents that calibrate.")
    n_selected_by_bh: int | None = Field(
        None,
        description="Documents that bh selects, where near-duplicates break the guarantee of the procedure only.",
    )
    n_selected_by_storey: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description="Documents that storey selects, where bh is stated; left out elsewhere.",
    )
    bh_stands: bool = Field(description="Whether the near-duplicates leave the guarantee of bh as it is.")


class GroupsDiagnostic(Diagnostic):
    """The effect of groups on the guarantee, and on bounds of numbers of documents."""

    n_selected_by_bh: int | None = Field(
        None, description="Documents that bh selects, where groups break the guarantee of the procedure only."
    )
    n_selected_by_storey: int | None = Field(
        None, description="Documents that storey selects, where groups break the guarantee of the procedure only."
    )
    bh_stands: bool = Field(True, description="Whether the groups leave the guarantee of bh as it is.")


class CountDiagnostic(Diagnostic):
    """A number of documents."""

    count: int = Field(description="Number of documents in the sentence.")


class ShareDiagnostic(Diagnostic):
    """A share of the documents."""

    share: float = Field(description="Share of the scored documents in the sentence.")


class SymmetryDiagnostic(Diagnostic):
    """Whether the signs of the knockoff statistic are fair coins among documents of known membership."""

    p_value: float = Field(description="P-value of the hypothesis that they are; a small one contradicts it.")


class TailDiagnostic(Diagnostic):
    """Whether a small part of the audited documents is of a kind that calibration lacks."""

    p_value: float = Field(description="P-value of the hypothesis that audited and calibration documents are alike.")
    share: float | None = Field(
        None, description="Share of the compared documents in this part; null where p is above 0.01."
    )
    n_compared: int | None = Field(
        None, description="Selected documents that were compared; null where p is above 0.01."
    )
    n_selected: int | None = Field(None, description="Of these, those in this part; null where p is above 0.01.")
    documents: list[str] = Field(
        [], description="Ids of the ten highest of these; of the audited documents where none is selected."
    )


class FamiliesDiagnostic(Diagnostic):
    """Whether a family of near-duplicates is in one role only although chance would have put it into both."""

    p_value: float | None = Field(
        None, description="P-value of the largest family in one role only; null where none has 5 documents."
    )
    role: Role | None = Field(None, description="The role of the family; null where p is above 0.01.")
    size: int | None = Field(None, description="Documents of the family; null where p is above 0.01.")
    n_selected: int | None = Field(None, description="Of these, those selected; null where p is above 0.01.")
    documents: list[str] = Field([], description="Ids of the first ten of them.")


class ShuffleDiagnostic(Diagnostic):
    """Whether published orders or versions look drawn at random, from texts alone."""

    documents: int = Field(description="Documents that were compared.")
    left_out: int = Field(
        description="Documents that no answer uses: their draws are not independent of others, or marks of their "
        "options do not stand in place."
    )
    tests: int = Field(description="Tests that were made.")
    feature: str | None = Field(None, description="What the test nearest to its limit counted; null for no test.")
    p_value: float | None = Field(None, description="Its exact p-value; null for no test.")
    limit: float | None = Field(None, description="The p-value below which it contradicts the draw; null for no test.")


class Conclusion(Record):
    """The checks of an answer, by name, and what follows from them."""

    blind: BlindDiagnostic = Field(
        description="Whether words alone distinguish calibration documents from audited ones."
    )
    resolution: ResolutionDiagnostic = Field(
        description="Whether there are enough calibration documents for a small selection."
    )
    overlap: OverlapDiagnostic = Field(description="Calibration documents that are near-duplicates of audited ones.")
    near_copies: NearDuplicatesDiagnostic | None = Field(
        None, description="Near-duplicates among the documents of one role; null where there were no texts."
    )
    groups: GroupsDiagnostic | None = Field(
        None,
        description="Whether documents are grouped, so that they may depend on each other; null where none or few are.",
    )
    duplicates: CountDiagnostic = Field(description="Documents that repeat an id, which are quarantined.")
    truncated: ShareDiagnostic = Field(description="Documents that were cut to their first max_tokens tokens.")
    fine_tuned: CountDiagnostic | None = Field(
        None, description="Known documents that adapters were trained on; null where no adapter was."
    )
    tail: TailDiagnostic | None = Field(
        None,
        description="Whether a small part of the audited documents is of a kind that calibration lacks; null where the "
        "blind test was not made.",
    )
    families: FamiliesDiagnostic | None = Field(
        None,
        description="Whether a family of near-duplicates has documents in one role only; null where documents have "
        "groups or were split by families.",
    )
    sign_symmetry: SymmetryDiagnostic | None = Field(
        None, description="The assumption of the knockoff filter; null for every other procedure."
    )
    shuffle: ShuffleDiagnostic | None = Field(
        None,
        exclude_if=lambda shuffle: shuffle is None,
        description="Whether the published versions look drawn at random; left out for documents without versions and "
        "for those that seenset mark drew.",
    )

    def by_name(self) -> dict[str, Diagnostic]:
        """The checks that apply, in order."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: diagnostic for name, diagnostic in named.items() if diagnostic is not None}

    def failures(self) -> list[str]:
        """The sentences of the failed checks that the guarantee depends on."""
        return [check.sentence for check in self.by_name().values() if check.contradicts]

    @property
    def value(self) -> ConclusionValue:
        """Contradicted where a check that the guarantee rests on failed; else inconclusive where the blind test is."""
        return ConclusionValue.CONTRADICTED if self.failures() else conclude([self.blind.outcome])


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


class Summary(Bounded, VersionedRecord):
    """The answer of one selection: `selection/<name>/summary.json`."""

    schema_: Literal[3] = Field(  # type: ignore[assignment]
        3, alias="schema", description="Version of the form of this file."
    )
    name: str = Field(description="Name of the selection, and of its folder under selection/.")
    procedure: str = Field(description="The procedure that chose the selected.")
    direction: Direction = Field(description="members: selects documents that were trained on; clean: that were not.")
    alpha: float = Field(
        description="Largest share of the selected that may be wrong, as requested, in (0, 1); of a scan of a "
        "schedule, its level there."
    )
    detectors: list[str] = Field(description="Score columns that the selection reads.")
    calibration: str = Field(description="How p-values were calibrated: pooled, by_group or conditional.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_calibration: int = Field(description="Documents of known membership that the p-values were calibrated on.")
    n_quarantined: int = Field(
        description="Audited documents that could not be scored; each counts as a hypothesis with p = 1."
    )
    n_selected: int = Field(description="Documents selected.")
    threshold: float | None = Field(
        description="The largest p-value selected; null where nothing is, or where p-values do not decide."
    )
    null_proportion: float = Field(
        description="Share of the audited documents taken to be nulls: non-members (with direction clean, members); in "
        "(0, 1]."
    )
    factor: float | None = Field(
        description="R documents are selected if their p-values are at most alpha R / (factor n_audit); null: no such "
        "rule."
    )
    weights: list[float] | None = Field(description="Weight of each detector in a fusion; null for one detector.")
    guarantee: GuaranteeKind = Field(
        description="finite-sample: proved for any number of documents; asymptotic: as numbers grow; heuristic: not "
        "proved."
    )
    assumption: str = Field(description="The assumption of the guarantee.")
    promise: str = Field(description="The guarantee under the assumption.")
    reasons: list[str] = Field(description="Why the guarantee is not supported, one line each; empty where it is.")
    next: str | None = Field(
        None,
        exclude_if=lambda step: step is None,
        description="What to do next, in one sentence, where a check contradicts the answer or leaves it "
        "inconclusive; left out where none does.",
    )
    minimum_selectable: int = Field(description="The fewest documents that could have been selected, if any.")
    strict: StrictAnswer = Field(
        description="The answer of a procedure with a finite-sample guarantee: this one if it has it."
    )
    details: dict[str, float] = Field(description="Further numbers of the procedure, by name.")
    diagnostics: Conclusion = Field(description="Checks of the documents.")
    limit: int | None = Field(description="The most documents of each role that were read; null when all were.")
    series: SeriesPlace | None = Field(None, description="Place in a schedule of scans; null where there is none.")

    @property
    def checked(self) -> bool:
        """Whether the check that calibration and audited documents are alike was made, regardless of its result."""
        return self.diagnostics.blind.tested

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
        return [] if self.conclusion == ConclusionValue.SUPPORTED else [unsettled(self.diagnostics.blind)]

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
