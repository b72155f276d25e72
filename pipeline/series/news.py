"""What the scan that was filed last selected and none before it had, as far as the run directories still say."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipeline.audit.conclusion import Concluded
from pipeline.audit.digests import digests_file, no_digests
from pipeline.audit.history import answered_by_0_9_0, read_history
from pipeline.audit.records import Record
from pipeline.audit.status import made_answer
from pipeline.audit.summary import read_summary
from pipeline.errors import DamagedError, UserError, is_of_storage
from pipeline.report.wording.series import new_on_list, unread_earlier, unread_list
from pipeline.series.scans import FiledSelection, Scan, Schedule
from pipeline.store.files import Store

LISTED = 200
"""New documents that are named one by one."""

_SHOWN = ["doc_id", "source"]
_KEY = "text_key"
"""Two documents are the same if their texts, or the pixels of their pictures, have the same key."""


class NewDocument(Record):
    """A document that no scan filed before had selected."""

    doc_id: str = Field(description="Its id.")
    source: str = Field(description="Input file that it stands in.")


class LatestList(Concluded):
    """What is new on one list of the scan that was filed last."""

    name: str = Field(description="Name of the selection.")
    slot: int = Field(description="Place of the scan.")
    n_selected: int = Field(description="Documents that it selected.")
    supported: bool | None = Field(description="Whether the checks support this list; null: inconclusive.")
    n_new: int | None = Field(
        description="Of these, those that no scan filed before had selected under this name; null: the list cannot be "
        "read, and it counts as new."
    )
    documents: list[NewDocument] = Field(description="The first of them, in the order of the list.")
    notes: list[str] = Field(description="Which lists could not be read, and what follows from that.")

    def sentence(self) -> str:
        """The same in words."""
        return new_on_list(self.slot, self.n_selected, self.n_new, self.conclusion == "contradicted")


class _Unreadable(Exception):
    """A list of a run directory cannot be read, or is no longer the one of its claim; says why."""


def latest_lists(schedule: Schedule, url: str) -> list[LatestList]:
    """What is new on the lists of the scan whose result was filed last; empty where none has one.

    Args:
        schedule: of the ledger.
        url: of the ledger, by which a run directory tells that a list is of its scan.
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
        supported=answer.supported,
        n_new=None if new is None else len(new),
        documents=[NewDocument(**row) for row in shown],
        notes=notes,
    )


def _new_documents(
    scan: Scan, answer: FiledSelection, earlier: list[Scan], schedule: Schedule, url: str
) -> tuple[pa.Table | None, list[str]]:
    """The rows of a list that no earlier one holds, and what could not be read; None where the list itself cannot."""
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
    """Ids, sources and keys of a filed list, if the run directory still holds it.

    Raises:
        _Unreadable: it does not, cannot be reached, or an earlier version wrote it.
        DamagedError: a file of the answer is gone or was changed.
    """
    claim, terms = scan.claim, schedule.opening
    try:
        store = Store(claim.run)
        if not store.exists(digests_file(answer.name)) and answered_by_0_9_0(store):
            raise _Unreadable(str(no_digests(store, answer.name)))
        names = {question.name for entry in read_history(store)[-1:] for question in entry.questions}
        summary = made_answer(store, answer.name) if answer.name in names else read_summary(store, answer.name)
        if summary is None:
            raise _Unreadable(f"{claim.run} cannot be reached, or holds no selection {answer.name} any more")
        place = summary.series
        if (
            place is None
            or Store(place.ledger).url != url
            or (place.slot, place.rule, place.alpha) != (claim.slot, terms.rule, terms.alpha)
            or (place.horizon, place.before) != (terms.horizon, claim.before.get(answer.name, 0))
        ):
            raise _Unreadable(f"selection {answer.name} in {claim.run} is no longer the one of this scan")
        rows = store.read_table(f"selection/{answer.name}/selected.parquet", _NOTHING.column_names)
    except DamagedError:
        raise
    except UserError as error:
        if _KEY in str(error):  # lists of version 0.9.0 have no such column
            raise _Unreadable(
                f"the list {answer.name} in {claim.run} has no keys of texts: seenset select {claim.run} writes it "
                "again"
            ) from None
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
