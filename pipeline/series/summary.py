"""The summary of a schedule of scans: the selections of each, the guarantee for all of them, and its limits.

It lists the new documents of the latest scan, as far as the run directories are available.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field
from rich.table import Table
from rich.text import Text

from pipeline.config.selection import Direction
from pipeline.errors import DamagedError, ExitCode, UserError, is_of_storage
from pipeline.report.tables import of_numbers
from pipeline.results.history import read_history
from pipeline.results.status import made_answer
from pipeline.results.summary import read_summary
from pipeline.run.conclusion import STYLES, Concluded
from pipeline.run.conclusion_text import conclusion_shown
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.schedule import alpha_share
from pipeline.series import series_text as wording
from pipeline.series.scans import Claim, FiledSelection, Scan, Schedule, read_schedule
from pipeline.series.series_text import new_on_list, unread_earlier, unread_list
from pipeline.store.files import Store

LISTED = 200
"""Maximum number of new documents that are named."""

_SHOWN = ["doc_id", "source"]
_KEY = "text_key"
"""Two documents are equal if their texts, or the pixels of their pictures, have the same key."""

_STYLES = {"no result": "bold red", **{conclusion_shown(conclusion): style for conclusion, style in STYLES.items()}}


class NewDocument(Record):
    """A document that no earlier filed scan had selected."""

    doc_id: str = Field(description="Its id.")
    source: str = Field(description="Input file that contains it.")


class LatestList(Concluded):
    """The new documents on one list of the scan that was filed last."""

    name: str = Field(description="Name of the selection.")
    slot: int = Field(description="Place of the scan.")
    n_selected: int = Field(description="Number of documents that it selected.")
    n_new: int | None = Field(
        description="Of these, those that no earlier filed scan had selected under this name; null: the list cannot be "
        "read, and it counts as new."
    )
    documents: list[NewDocument] = Field(description="The first new documents, in the order of the list.")
    notes: list[str] = Field(description="Lists that could not be read, and the consequences.")

    def sentence(self) -> str:
        """The list in one sentence."""
        return new_on_list(self.slot, self.n_selected, self.n_new, self.conclusion == ConclusionValue.CONTRADICTED)


class _Unreadable(Exception):
    """A list of a run directory cannot be read, or no longer matches its claim; states why."""


def latest_lists(schedule: Schedule, url: str) -> list[LatestList]:
    """The new documents on the lists of the scan filed last; empty where no scan has a result.

    Args:
        schedule: schedule of the ledger.
        url: address of the ledger, which identifies the lists of its scans in a run directory.
    """
    filed = schedule.filed_scans()
    if not filed or (filing := filed[-1].filing) is None:
        return []
    return [_latest(filed[-1], answer, filed[:-1], schedule, url) for answer in filing.selections]


def _latest(scan: Scan, answer: FiledSelection, earlier: list[Scan], schedule: Schedule, url: str) -> LatestList:
    new, notes = _new_documents(scan, answer, earlier, schedule, url) if answer.n_selected else (_NOTHING, [])
    shown = [] if new is None else new.slice(0, LISTED).to_pylist()
    return LatestList(
        name=answer.name,
        slot=scan.claim.slot,
        n_selected=answer.n_selected,
        conclusion=answer.conclusion,
        n_new=None if new is None else len(new),
        documents=[NewDocument(**row) for row in shown],
        notes=notes,
    )


def _new_documents(
    scan: Scan, answer: FiledSelection, earlier: list[Scan], schedule: Schedule, url: str
) -> tuple[pa.Table | None, list[str]]:
    """The rows of a list that no earlier list has, and the unread lists; None where the list itself cannot be read."""
    try:
        rows = _selected(scan, answer, schedule, url)
    except _Unreadable as error:
        return None, [unread_list(scan.claim.slot, str(error))]
    new, notes = rows, []
    for other in earlier:
        for one in other.filing.selections if other.filing is not None else ():
            if (one.name, one.direction) != (answer.name, answer.direction) or not one.n_selected:
                continue
            try:
                known = _selected(other, one, schedule, url)[_KEY].combine_chunks()
                new = new.filter(pc.invert(pc.is_in(new[_KEY], value_set=known)))
            except _Unreadable as error:
                notes.append(unread_earlier(other.claim.slot, str(error), scan.claim.slot))
    return new.select(_SHOWN), notes


def _selected(scan: Scan, answer: FiledSelection, schedule: Schedule, url: str) -> pa.Table:
    """Ids, sources and keys of a filed list, if the run directory still has it.

    Raises:
        _Unreadable: it does not, cannot be reached, or was written by an earlier version.
        DamagedError: a file of the answer is missing or was changed.
    """
    claim, opening = scan.claim, schedule.opening
    try:
        store = Store(claim.run)
        names = {question.name for entry in read_history(store)[-1:] for question in entry.questions}
        summary = made_answer(store, answer.name) if answer.name in names else read_summary(store, answer.name)
        if summary is None:
            raise _Unreadable(f"{claim.run} cannot be reached, or holds no selection {answer.name} any more")
        place = summary.series
        if (
            place is None
            or Store(place.ledger).url != url
            or (place.slot, place.alpha, place.horizon) != (claim.slot, opening.alpha, opening.horizon)
        ):
            raise _Unreadable(f"selection {answer.name} in {claim.run} is no longer the one of this scan")
        rows = store.read_table(f"selection/{answer.name}/selected.parquet", _NOTHING.column_names)
    except DamagedError:
        raise
    except UserError as error:
        raise _Unreadable(str(error)) from None
    except Exception as error:
        if not is_of_storage(error):
            raise
        raise _Unreadable(f"{claim.run} cannot be reached ({type(error).__name__})") from None
    if len(rows) != answer.n_selected:
        raise _Unreadable(
            f"selection {answer.name} in {claim.run} holds {len(rows):,} documents, and {answer.n_selected:,} are filed"
        )
    return rows.cast(_NOTHING.schema)


_NOTHING = pa.schema([("doc_id", pa.string()), ("source", pa.string()), (_KEY, pa.int64())]).empty_table()


class ScanAnswer(FiledSelection):
    """One answer of a scan, and why nothing is guaranteed for it, if so."""

    doubt: str | None = Field(description="Why the schedule guarantees nothing for this list; null where it does.")


class ScanSummary(Record):
    """One scan of a schedule."""

    slot: int = Field(description="Number of its place: 1 for the first scan.")
    at: str = Field(description="Time of its claim, by the clock of its command: ISO 8601, UTC.")
    run: str = Field(description="Run directory of the scan.")
    model: str = Field(description="The audited model, by its name on the run's pages.")
    level: float = Field(description="The part of alpha that it has spent, with a result or without one.")
    filed_at: str | None = Field(description="Time of its filing; null: there is none, and it states nothing.")
    answers: list[ScanAnswer] = Field(description="Its answers; empty where none is filed.")


class ListsBound(Record):
    """The simultaneous bound on the lists of all scans, with probability `confidence`."""

    confidence: float = Field(description="Probability of all statements together, in (0, 1).")
    wrong_at_most: int = Field(
        description="Maximum number of wrong selected documents; all of a list without a bound may be wrong."
    )
    right_at_least: int = Field(description="Minimum number of selected members (with direction clean, non-members).")
    n_without: int = Field(description="Selected documents of lists without a bound.")
    sentence: str = Field(description="The bound in words.")


class SelectionSums(Record):
    """The sums of the scans under one selection name, and the guarantee for them."""

    name: str = Field(description="Name of the selection, in every scan.")
    direction: list[Direction] = Field(description="members, clean or both; nothing is guaranteed for the sum of both.")
    n_scans: int = Field(description="Scans that have filed an answer of this name.")
    n_audit: int = Field(description="Documents that they audited; one that several audited counts in each.")
    n_selected: int = Field(description="Documents that they selected; one that several selected counts in each.")
    n_promised: int = Field(description="Of these, those on lists that the guarantee covers.")
    promised: bool | None = Field(
        description="True: at most alpha of all selected are wrong on average, and no check contradicts it; null: as "
        "much, but a list's assumption was not tested; false: not guaranteed for all of them."
    )
    promise: str = Field(description="The guarantee of the error rate over all scans.")
    not_promised: list[str] = Field(description="Limits of the guarantee with reasons, one line each.")
    bound: ListsBound | None = Field(
        description="The bound on all lists at once; null where no list has a bound, or nothing is selected."
    )


class SeriesSummary(VersionedRecord):
    """A schedule of scans from its first to its latest: `seenset series --json`, and series.json next to its page."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    ledger: str = Field(description="Folder of the ledger.")
    alpha: float = Field(description="Largest share of all that the scans select together that may be wrong.")
    horizon: int | None = Field(description="Number of scans of the schedule; null: no end.")
    opened_at: str = Field(description="Time at which its first scan opened it.")
    spent: float = Field(description="Sum of the levels of all scans: the part of alpha that is spent.")
    places_left: int | None = Field(description="Places that no scan has taken; null: no end.")
    scans: list[ScanSummary] = Field(description="All scans by their places.")
    unfiled: list[int] = Field(description="Places without a result: their level is spent.")
    selections: list[SelectionSums] = Field(description="Sums by the name of the selection.")
    latest: int | None = Field(description="Place of the scan whose result was filed last; null: there is none.")
    new: list[LatestList] = Field(description="New documents of the scan that was filed last.")
    notes: list[str] = Field(description="Further cautions, one line each.")

    def exit_code(self) -> ExitCode:
        """Exit code of `--fail-if-new`: 5 where a check contradicts a list with new documents, else 4."""
        lists = [one for one in self.new if one.n_new != 0]  # None: unknown, with selected documents
        if any(one.conclusion == ConclusionValue.CONTRADICTED for one in lists):
            return ExitCode.UNSUPPORTED
        return ExitCode.SELECTED if lists else ExitCode.DONE


def read_series(ledger: str) -> SeriesSummary:
    """The summary of the schedule of a ledger; read only.

    Args:
        ledger: folder of the ledger, a local path or an fsspec URL.

    Raises:
        UserError: not a ledger of scans, or a damaged or edited one.
        IncompleteError: the store of the ledger does not answer.
    """
    try:
        store = Store(ledger, "folder")
    except UserError as error:
        raise UserError(f"no ledger at {ledger}: {error}") from None
    schedule = read_schedule(store)
    if schedule is None:
        raise UserError(f"{store.url} holds no ledger: series.ledger of a scan's configuration names its folder")
    return series_summary(schedule, store.url)


def series_summary(schedule: Schedule, url: str) -> SeriesSummary:
    """As `read_series`, for a schedule in memory.

    Args:
        schedule: schedule of the ledger.
        url: address of the ledger.
    """
    opening, scans = schedule.opening, _scans(schedule)
    unfiled = [scan.slot for scan in scans if scan.filed_at is None]
    filed = [scan.claim.slot for scan in schedule.filed_scans()]
    claims = {scan.claim.slot: scan.claim for scan in schedule.scans}
    names = list(dict.fromkeys(answer.name for scan in scans for answer in scan.answers))
    return SeriesSummary(
        ledger=url,
        alpha=opening.alpha,
        horizon=opening.horizon,
        opened_at=opening.at,
        spent=float(sum((_level(opening.alpha, claim) for claim in claims.values()), Fraction(0))),
        places_left=None if opening.horizon is None else max(0, opening.horizon - len(scans)),
        scans=scans,
        unfiled=unfiled,
        selections=[_selection(name, schedule, scans) for name in names],
        latest=filed[-1] if filed else None,
        new=latest_lists(schedule, url),
        notes=[
            *map(wording.unfiled_note, unfiled),
            *([wording.several_names(names)] if len(names) > 1 else []),
            *schedule.clock_notes(),
        ],
    )


def _scans(schedule: Schedule) -> list[ScanSummary]:
    scans = []
    for scan in schedule.scans:
        claim, filing = scan.claim, scan.filing
        answers = [] if filing is None else filing.selections
        scans.append(
            ScanSummary(
                slot=claim.slot,
                at=claim.at,
                run=claim.run,
                model=claim.model,
                level=float(_level(schedule.opening.alpha, claim)),
                filed_at=None if filing is None else filing.at,
                answers=[ScanAnswer(**dict(answer), doubt=_doubt(answer, claim, schedule)) for answer in answers],
            )
        )
    return scans


def _level(alpha: float, claim: Claim) -> Fraction:
    return Fraction(repr(alpha)) * Fraction(claim.share)


def _doubt(answer: FiledSelection, claim: Claim, schedule: Schedule) -> str | None:
    """Why the guarantee of the schedule does not cover this list; None where it does."""
    why = _why(answer, claim, schedule)
    return None if why is None else wording.doubt(why, answer.procedure, answer.alpha)


def _why(answer: FiledSelection, claim: Claim, schedule: Schedule) -> wording.Doubt | None:
    opening = schedule.opening
    if claim.asked_before:
        return "asked before"
    if answer.conclusion == ConclusionValue.CONTRADICTED:
        return "contradicted"
    if answer.guarantee != "finite-sample":
        return answer.guarantee
    if (opening.horizon is not None and claim.slot > opening.horizon) or claim.share > float(
        alpha_share(claim.slot, opening.horizon)
    ):
        return "share"
    return "level" if answer.alpha > float(_level(opening.alpha, claim)) * (1 + 1e-9) else None


def _selection(name: str, schedule: Schedule, scans: Sequence[ScanSummary]) -> SelectionSums:
    """The sums and the guarantee for one selection name."""
    answers = [(scan.slot, answer) for scan in scans for answer in scan.answers if answer.name == name]
    directions = list(dict.fromkeys(answer.direction for _, answer in answers))
    sound = [(slot, answer) for slot, answer in answers if answer.doubt is None]
    lines = [wording.not_guaranteed(slot, answer.doubt) for slot, answer in answers if answer.doubt is not None]
    broken = wording.MIXED if len(directions) > 1 else None
    untested = [slot for slot, answer in sound if answer.conclusion == ConclusionValue.INCONCLUSIVE]
    limits = [wording.AVERAGE] if any(answer.n_selected for _, answer in answers) else []
    n_promised = 0 if broken else sum(answer.n_selected for _, answer in sound)
    return SelectionSums(
        name=name,
        direction=directions,
        n_scans=len(answers),
        n_audit=sum(answer.n_audit for _, answer in answers),
        n_selected=sum(answer.n_selected for _, answer in answers),
        n_promised=n_promised,
        promised=False if lines or broken else None if untested else True,
        promise=_guarantee(schedule, [slot for slot, _ in sound], bool(lines), untested, broken),
        not_promised=[*lines, *([broken] if broken else []), *limits],
        bound=_bound(name, answers, [scan.claim for scan in schedule.scans]),
    )


def _guarantee(
    schedule: Schedule, sound: Sequence[int], partial: bool, untested: Sequence[int], broken: str | None
) -> str:
    """The error rate over all scans; nothing is guaranteed for the sum where one of its lists has no guarantee."""
    if broken or not sound:
        return wording.NO_RATE
    opening, unfiled = schedule.opening, any(scan.filing is None for scan in schedule.scans)
    return wording.rate_over_scans(opening.alpha, sound if partial else [], unfiled, untested)


def _bound(name: str, answered: Sequence[tuple[int, ScanAnswer]], claims: Sequence[Claim]) -> ListsBound | None:
    """The bounds of all lists at once: their error probabilities add up, including scans that filed none.

    Whether a scan files a bound may depend on its result, so scans without one count as well.
    """
    answers = [answer for _, answer in answered]
    sound = [(slot, answer.bound) for slot, answer in answered if answer.bound and answer.doubt is None]
    bounded, bounds = dict(sound), [bound for _, bound in sound]
    failing = sum((1 - Fraction(repr(bound.confidence)) for bound in bounds), Fraction(0))
    shares = {claim.slot: Fraction(claim.share) for claim in claims if name in claim.selections}
    most = max(((1 - Fraction(repr(bound.confidence))) / shares[slot] for slot, bound in sound), default=Fraction(1))
    others = sum((share for slot, share in shares.items() if slot not in bounded), Fraction(0))
    failing += Fraction(math.ceil(1000 * most * others), 1000)
    selected = sum(answer.n_selected for answer in answers)
    if not bounds or failing >= 1 or not selected:
        return None
    without = sum(answer.n_selected for answer in answers if answer.bound is None or answer.doubt is not None)
    wrong, right = without + sum(bound.wrong_at_most for bound in bounds), sum(bound.right_at_least for bound in bounds)
    untested = [
        slot for slot, answer in answered if slot in bounded and answer.conclusion == ConclusionValue.INCONCLUSIVE
    ]
    text = wording.all_may_be_wrong(len(answers), selected)
    if wrong < selected:
        clause = wording.wrong_share_clause(selected, wrong, right)
        text = wording.lists_bound(len(answers), _rounded_down(1 - failing), clause, untested, without)
    return ListsBound(
        confidence=float(1 - failing),
        wrong_at_most=wrong,
        right_at_least=right,
        n_without=without,
        sentence=text,
    )


def _rounded_down(confidence: Fraction) -> Fraction:
    """A confidence for a sentence, rounded down to at most one decimal of a percentage."""
    return Fraction(math.floor(1000 * confidence), 1000) or confidence


def series_table(summary: SeriesSummary) -> Table:
    """Every answer of every scan in its own row; a scan without a result also has one."""
    of = "" if summary.horizon is None else f" of {summary.horizon:,}"
    title = f"{len(summary.scans):,}{of} scans, alpha {summary.alpha:g}"
    figures = of_numbers("documents", "level", "selected", "wrong at most")
    table = Table("scan", "date", "model", "selection", *figures, "guarantee", title=title)
    for row in series_rows(summary):
        *cells, word = row
        table.add_row(*map(Text, cells), Text(word, style=_STYLES.get(word, "")))
    return table


def series_rows(summary: SeriesSummary) -> Iterator[tuple[str, ...]]:
    """(scan, date, model, selection, documents, level, selected, wrong at most, guarantee) of each answer."""
    for scan in summary.scans:
        head, level = (f"{scan.slot:,}", scan.at[:16].replace("T", " "), scan.model), f"{scan.level:.3g}"
        if scan.filed_at is None:
            yield (*head, "-", "-", level, "-", "-", "no result")
        for answer in scan.answers:
            bound = answer.bound
            word = conclusion_shown(answer.conclusion)
            if answer.doubt is not None and answer.conclusion != ConclusionValue.CONTRADICTED:
                word = answer.guarantee if answer.guarantee != "finite-sample" else "not guaranteed"
            yield (
                *head,
                answer.name,
                f"{answer.n_audit:,}",
                level,
                f"{answer.n_selected:,}",
                "-" if bound is None else f"{bound.wrong_at_most:,}",
                word,
            )
