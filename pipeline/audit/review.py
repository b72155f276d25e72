"""A review of unseen documents: those that were listed for it, and those that its file confirms as trained on."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from pipeline.audit.records import Record, VersionedRecord, read_record
from pipeline.config.audit import AuditConfig
from pipeline.config.paths import written
from pipeline.corpus.csv_records import unescape_formula
from pipeline.errors import UserError, nearest
from pipeline.report.wording.conclusion import AS_CSV, CHANGED, review_sentence
from pipeline.report.wording.files import answered_by
from pipeline.selection.guarantees import GuaranteeKind
from pipeline.store.files import Store

LISTED_FILE = "review.json"
"""The documents of a run that were listed for a review; written once."""

REVIEWED_FILE = "reviewed.json"
"""The documents that the review removed from the calibration of the answers."""

COLUMNS = ("doc_id", "source", "row", "excerpt", "review", "trained_on")
ANSWERS = ("yes", "no", "unsure", "")
"""In `trained_on`: only yes removes a document; an empty value states that a document was not reviewed."""

_READ = ("doc_id", "review", "trained_on")
_WORKBOOKS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # of .xlsx and .ods, and of .xls
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SEPARATORS = ("sep=,", "sep=;", "sep=\\t", "sep=")  # a first line that names the delimiter


class ListedForReview(VersionedRecord):
    """The unseen documents with the highest scores, as `seenset review` listed them: `review.json`."""

    sealed = True

    review: str = Field(description="Digest of the unseen documents' scores, of the count and of the detector.")
    count: int = Field(description="Number of listed documents: corpus.unseen.review_count.")
    detector: str = Field(description="Score column that orders the documents.")
    documents: list[str] = Field(description="Their ids, in the order of the inputs.")


class Review(Record):
    """The review of calibration documents, as an answer states it."""

    n_listed: int = Field(description="Calibration documents with the highest scores that were listed for a review.")
    n_reviewed: int = Field(description="Of these, those with yes, no or unsure.")
    n_removed: int = Field(
        description="Of these, those confirmed as trained on, which do not calibrate. From 1 on no guarantee is more "
        "than approximate."
    )
    detector: str = Field(description="Score column that ordered the documents.")
    guarantee: GuaranteeKind = Field("heuristic", description="What the procedure guarantees without a review.")

    @property
    def sentence(self) -> str:
        """The review in one sentence."""
        return review_sentence(self.n_listed, self.n_reviewed, self.n_removed, self.detector)


class Reviewed(VersionedRecord):
    """The documents that a review removed from calibration: `reviewed.json`."""

    sealed = True

    file: str = Field(description="SHA-256 of the file of the review.")
    documents: list[str] = Field(description="Ids of the documents that were confirmed as trained on.")
    review: Review = Field(description="Numbers of documents that were listed, reviewed and removed.")


def read_listed_for_review(store: Store) -> ListedForReview | None:
    """The documents of a run that were listed; None where none were.

    Raises:
        DamagedError: the file was changed.
    """
    return read_record(store, LISTED_FILE, ListedForReview, answered_by(store.url))


def content_of_review(config: AuditConfig) -> bytes | None:
    """The content of the review file; None where the configuration names none, or it does not exist."""
    _, path = config.corpus.review
    if path is None:
        return None
    folder, name = os.path.split(path)
    return Store(folder or ".").find(name) if name else None


def read_review(store: Store, config: AuditConfig) -> Reviewed | None:
    """The documents that the configured review removes; None where the configuration names none.

    Raises:
        UserError: no documents were listed, or the file is missing or not of this run, omits or adds
            a document, or holds an unknown answer.
    """
    count, path = config.corpus.review
    if path is None:
        return None
    where, data = f"corpus.unseen.review: {written(path)}", content_of_review(config)
    if data is None:
        raise UserError(f"{where} is not a file")
    listed = read_listed_for_review(store)
    if listed is None:
        raise UserError(f"{where}: {store.url} has listed no documents: seenset review writes the file to fill in")
    rows = _rows(data, where)
    for row in rows:
        if row["review"].strip() != listed.review or listed.count != count:
            changed = "" if len(row["review"].strip()) == len(listed.review) else CHANGED
            raise UserError(
                f"{where} is of another run or another review_count: document {row['doc_id']!r} has review "
                f"{row['review']!r}, and this run has {listed.review}, with {listed.count} documents{changed}"
            )
    known, times = set(listed.documents), Counter(row["doc_id"] for row in rows)
    for name, number in times.items():
        if name not in known:
            raise UserError(f"{where}: document {name!r} is not one of the {len(known)} listed documents{CHANGED}")
        if number > 1:
            raise UserError(f"{where}: document {name!r} has {number} rows")
    for name in listed.documents:
        if name not in times:
            raise UserError(f"{where}: document {name!r} has no row; leave trained_on empty where nothing is known")
    answers = {row["doc_id"]: row["trained_on"].strip().lower() for row in rows}
    for name, answer in answers.items():
        if answer not in ANSWERS:
            hint = nearest(answer, ANSWERS[:3], "it takes")
            raise UserError(f"{where}: trained_on of document {name!r} is {answer!r}; {hint}, or is empty")
    removed = [name for name in listed.documents if answers[name] == "yes"]
    review = Review(
        n_listed=len(rows),
        n_reviewed=sum(answer != "" for answer in answers.values()),
        n_removed=len(removed),
        detector=listed.detector,
    )
    return Reviewed(file=hashlib.sha256(data).hexdigest(), documents=removed, review=review)


def _rows(data: bytes, where: str) -> list[dict[str, str]]:
    """The rows of a review file, as written by `seenset review` or a spreadsheet program; empty rows are left out.

    Raises:
        UserError: not a CSV file with the required columns.
    """
    if data.startswith(_WORKBOOKS):
        raise UserError(f"{where} is a workbook, not a CSV file; {AS_CSV}")
    try:
        text = data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig")
        lines = list(io.StringIO(text, newline=""))
        lines = lines[bool(lines and lines[0].strip().lower() in _SEPARATORS) :]
        mark = next((mark for mark in ",;\t" if set(_READ) <= set(_header(lines, mark))), ",")
        names, rows = _header(lines, mark), list(csv.reader(lines[1:], strict=True, delimiter=mark))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where} is not a CSV file in UTF-8; {AS_CSV} ({error})") from None
    for name in _READ:
        if names.count(name) > 1:
            raise UserError(f"{where} has {names.count(name)} columns {name}")
        if name not in names:
            raise UserError(f"{where} has no column {name}; seenset review writes {', '.join(COLUMNS)}")
    rows = [row for row in rows if any(map(str.strip, row))]
    for row in rows:
        if any(map(str.strip, row[len(names) :])):
            raise UserError(f"{where}: the row of {row[0]!r} has more values than columns; quote values with {mark!r}")
    read = [{name: dict(zip(names, row, strict=False)).get(name, "") for name in _READ} for row in rows]
    return [{**row, "doc_id": unescape_formula(row["doc_id"])} for row in read]


def _header(lines: Sequence[str], mark: str) -> list[str]:
    """The column names for a delimiter, up to the last non-empty one."""
    names = [name.strip().lower() for name in next(csv.reader(lines[:1], strict=True, delimiter=mark), [])]
    return names[: max((place for place, name in enumerate(names, 1) if name), default=0)]
