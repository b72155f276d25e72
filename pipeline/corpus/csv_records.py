"""Records of CSV files: one parser for reading, for extents and for copies.

A record that does not fit the column names, or whose quotes are not those of CSV, is replaced by the reason with its
line. Memory holds one record, within the limit of its length.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from pipeline.config.dialect import PLAIN, Dialect
from pipeline.corpus.input_files import Overlong, named_separator
from pipeline.corpus.notes import HEADER_AGAIN, ROWS_IN_FIELD, SHORT_RECORDS, SURPLUS_FIELDS, Notes
from pipeline.errors import UserError

_PIECE = 1 << 20
_LEAST_ROWS = 3
"""Minimum number of lines of a field that look like records, from which the field is reported."""

_MARK = "\ufeff"
_RECORD_END = "\r\n"  # whose characters `csv.writer` puts into quotes
_LINE_END = re.compile("\r\n|\r|\n")

csv.field_size_limit(1 << 31)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """Placeholder for a record that is not what its column names announce."""

    message: str  # with its line


class UnclosedQuoteError(csv.Error):
    """A quoted field that ends only with its file."""

    def __init__(self, line: int) -> None:
        """`line`: number of the line at which the field opens."""
        super().__init__(line)
        self.line = line

    def __str__(self) -> str:
        return (
            f"the quote that opens a field on line {self.line:,} is not closed until the file ends: close it, double "
            "it, or set quoting: none for a file without quoted fields"
        )


class DelimiterError(UserError):
    """A file has a single column, and the requested one with another delimiter.

    Attributes:
        problem: the missing column and the file.
        written: the delimiter as a configuration may state it.
    """

    def __init__(self, problem: str, written: str) -> None:
        super().__init__(problem, written)
        self.problem, self.written = problem, written

    def __str__(self) -> str:
        return f"{self.problem}; set delimiter: {self.written}"


def csv_records(
    file: IO[bytes], most: int, dialect: Dialect = PLAIN, required: Collection[str] = (), notes: Notes | None = None
) -> Iterator[dict[str, str] | BadRecord | Overlong]:
    """The records of a CSV file as mappings from the names in its first record; blank lines are skipped.

    Surplus fields that are all empty are dropped, and missing last fields are empty. Other records with another number
    of fields are bad, and so are those with text after a closing quote.

    Args:
        file: file open at its start.
        most: maximum characters of a record, >= 1.
        dialect: dialect of the file.
        required: columns that must not be missing from a record.
        notes: receives what is completed or doubtful.

    Raises:
        csv.Error: the first record is too long or is not CSV, or a quoted field is not closed.
        UnicodeDecodeError: the file does not have the encoding, and the rest cannot be decoded.
    """
    source = _RecordLines(file, most, dialect)
    records = _records(source)
    names: list[str] = next(records)
    for record in records:
        if record is None:
            _note_rows(source, ["".join(source.record)], names, notes)
            for _ in source.rest_of_record():
                pass
            yield Overlong(source.size)
        elif isinstance(record, BadRecord):
            _note_rows(source, ["".join(source.record)], names, notes)
            yield record
        else:
            _note_rows(source, record, names, notes)
            yield _completed(source, record, names, required, notes)


def csv_rows(file: IO[bytes], most: int, dialect: Dialect = PLAIN) -> Iterator[tuple[int, list[str] | str]]:
    """The fields of every record of a CSV file with its number in `csv_records`; -1 for the column names.

    Instead of a record that cannot be read there is its text, of one that is too long in several pieces.

    Args:
        file: file open at its start.
        most: maximum characters of a record, >= 1.
        dialect: dialect of the file.

    Raises:
        csv.Error: as `csv_records`.
        UnicodeDecodeError: as `csv_records`.
    """
    source = _RecordLines(file, most, dialect)
    for row, record in enumerate(_records(source), -1):
        if isinstance(record, list):
            yield row, record
            continue
        yield row, "".join(source.record)
        if record is None:
            yield from ((row, piece) for piece in source.rest_of_record())


def csv_columns(file: IO[bytes], most: int, dialect: Dialect = PLAIN) -> list[str]:
    """The column names of a CSV file, from its first record.

    Raises:
        csv.Error: the record is too long or is not CSV.
        UnicodeDecodeError: as `csv_records`.
    """
    return list(next(_records(_RecordLines(file, most, dialect))))


def count_records(data: bytes, dialect: Dialect) -> int:
    """The number of records of a whole file, without the column names.

    Raises:
        csv.Error: as `csv_records`.
    """
    records = _records(_RecordLines(io.BytesIO(data), len(data) + 1, dialect))
    return sum(1 for _ in records) - 1


def count_ends(data: bytes, columns: int, dialect: Dialect) -> int | None:
    """The number of records that end in a part of a file, which may start inside a quoted field.

    Of the parses from outside and from inside a quoted field, the one with more records of the expected number of
    fields is used; None if neither is CSV.

    Args:
        data: the part.
        columns: number of column names of the file.
        dialect: dialect of the file.
    """
    text = data.decode(dialect.encoding, "replace")
    parses = []
    for start in ("", '"') if '"' in text and dialect.quoting != "none" else ("",):
        try:
            lines = io.StringIO(start + text, newline="")
            rows = [len(row) for row in csv.reader(lines, **_format(dialect)) if row]
        except csv.Error:
            continue
        parses.append((-rows[1:-1].count(columns) / max(1, len(rows) - 2), len(rows)))
    return min(parses)[1] - 1 if parses else None


def split_record(record: str, dialect: Dialect) -> list[str]:
    """The fields of one record."""
    return next(csv.reader(io.StringIO(record, newline=""), **_format(dialect)), [])


def csv_record(fields: Sequence[str], dialect: Dialect) -> str:
    """One record of fields, without a line end, from which `csv_records` reads the same fields.

    Raises:
        UserError: a field with a delimiter or a line end in a file without quoted fields.
    """
    record = io.StringIO(newline="")
    try:
        csv.writer(record, lineterminator=_RECORD_END, **_format(dialect)).writerow(fields)
    except csv.Error:
        raise UserError(
            "a text with a delimiter or a line end cannot be a field of a file without quoted fields (quoting: none)"
        ) from None
    text = record.getvalue().removesuffix(_RECORD_END)
    return f"{_MARK}{text}" if text.startswith(_MARK) else text  # a mark at the start of a record is skipped


def _format(dialect: Dialect, strict: bool = False) -> dict[str, Any]:
    """The arguments of `csv` for a dialect."""
    if dialect.quoting == "none":
        return {"delimiter": dialect.delimiter, "quoting": csv.QUOTE_NONE, "quotechar": None}
    return {"delimiter": dialect.delimiter, "strict": strict}


def _records(source: _RecordLines) -> Iterator[Any]:
    """The column names of a CSV file, then the fields of its records.

    A record that is too long is None, before its rest is read.
    """
    try:
        names = _next_fields(source, source.reader())
        if names is not None and source.line == 1 and named_separator("".join(source.record)) is not None:
            names = _next_fields(source, source.reader())
    except _TooLongError:
        most = source.most
        raise csv.Error(f"its first record has more than {most:,} characters (limits.document_bytes)") from None
    if isinstance(names, BadRecord):
        raise csv.Error(names.message)
    source.columns = len(names or [])
    yield names or []
    reader = source.reader()
    while True:
        try:
            fields = _next_fields(source, reader)
        except _TooLongError:
            yield None
            reader = source.reader()
        else:
            if fields is None:
                return
            yield fields


def _next_fields(source: _RecordLines, reader: Iterator[list[str]]) -> list[str] | BadRecord | None:
    """The fields of the next record that is not blank; None at the end of the file.

    Raises:
        UnclosedQuoteError: a quoted field is not closed.
        _TooLongError: the record is too long.
    """
    fields: list[str] | None = []
    while not fields and fields is not None:
        source.begin()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            return source.resolve(error)
    return fields


def _completed(
    source: _RecordLines, fields: list[str], names: list[str], required: Collection[str], notes: Notes | None
) -> dict[str, str] | BadRecord:
    """The fields of a record by name, or why they cannot be named."""
    missing = names[len(fields) :]
    if any(fields[len(names) :]) or any(name in required for name in missing):
        return BadRecord(f"line {source.first:,} has {_numbers(fields, len(names))}")
    if missing and notes is not None:
        notes.add(SHORT_RECORDS, source.first)
    if len(fields) > len(names) and notes is not None:
        notes.add(SURPLUS_FIELDS, source.first)
    if fields == names and notes is not None:
        notes.add(HEADER_AGAIN, source.first)
    return dict(zip(names, [*fields, *[""] * len(missing)], strict=False))


def _numbers(fields: Sequence[str], columns: int) -> str:
    """The numbers of fields of a record and of column names, in words."""
    return f"{len(fields):,} {'field' if len(fields) == 1 else 'fields'}, and the header has {columns:,}"


def _note_rows(source: _RecordLines, fields: Sequence[str], names: list[str], notes: Notes | None) -> None:
    """Note fields with lines that look like records, as after a quote that is not closed."""
    if notes is None or len(names) < 2:
        return
    for field in fields:
        if field.count(source.delimiter) < len(names) - 1 or not ("\n" in field or "\r" in field):
            continue
        inner = _LINE_END.split(field)
        alone = [split_record(line, source.dialect) if '"' in line else line.split(source.delimiter) for line in inner]
        rows = sum(len(one) == len(names) and not _is_prose(one) for one in alone)
        if rows >= _LEAST_ROWS or names in alone:
            notes.add(ROWS_IN_FIELD, source.first)
            return


def _is_prose(fields: Sequence[str]) -> bool:
    """Whether the parts of a line are those of prose, code or verse, in which a blank or a line end follows a comma.

    The records behind an open quote have none there: a quote behind a blank opens no field.
    """
    return any(field[:1].isspace() for field in fields) or sum(map(bool, fields)) < min(2, len(fields))


class _TooLongError(Exception):
    """The current record is too long."""


class _RecordLines:
    """The lines of a text for `csv.reader`, with a limit on the length of a record."""

    def __init__(self, file: IO[bytes], most: int, dialect: Dialect) -> None:
        self.dialect, self.delimiter = dialect, dialect.delimiter
        self.text = io.TextIOWrapper(file, encoding=dialect.codec, errors=dialect.errors, newline="")
        self.most = most
        self.line = 0  # number of the current line, from 1
        self.columns = 0  # number of column names; 0 before they are read
        self.ended = True
        self.begin()

    def reader(self) -> Iterator[list[str]]:
        """A reader of records that stops at text after a closing quote."""
        return csv.reader(self, **_format(self.dialect, strict=True))

    def begin(self) -> None:
        """Start a new record with the next line."""
        self.size = 0
        self.first = self.line + 1
        self.record: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._read(self.most + 2)
        if not line:
            raise StopIteration
        if not self.record:
            line = line.removeprefix(_MARK)  # of a file that was joined to another
        self.record.append(line)
        if self.size > self.most + 2 or not (self.ended or len(line) < self.most + 2):
            raise _TooLongError
        return line

    def _read(self, most: int) -> str:
        """The next line, or its first `most` characters; empty at the end of the text."""
        line = self.text.readline(most)
        self.size += len(line)
        self.line += bool(line) and self.ended
        self.ended = not line or line.endswith(("\n", "\r"))
        return line

    def resolve(self, error: csv.Error) -> list[str] | BadRecord:
        """The record that a strict parser refuses: read to its end, it is bad unless only blanks follow its quotes.

        Raises:
            csv.Error: the error, where the quotes are in order.
            UnclosedQuoteError: a quoted field is not closed.
            _TooLongError: the record is too long.
        """
        quotes = self._followed()
        while quotes.quoted:
            if (line := next(self, None)) is None:
                raise UnclosedQuoteError(quotes.opened)
            quotes.feed(line)
        fields = split_record("".join(self.record), self.dialect)
        if quotes.wrong:
            where = f"line {quotes.wrong:,}: text follows the closing quote of a field"
            where += " (quotes in a quoted field are doubled; quoting: none reads all quotes as text)"
            makes = _numbers(fields, self.columns) if self.columns and len(fields) != self.columns else ""
            return BadRecord(f"{where}, which makes {makes}" if makes else where)
        if self.dialect.quoting == "none" or not fields:
            raise error
        return fields

    def rest_of_record(self) -> Iterator[str]:
        """The rest of a record that is too long, in pieces.

        Raises:
            UnclosedQuoteError: a quoted field is not closed.
        """
        quotes = self._followed()
        self.record = []
        while quotes.quoted or not self.ended:
            if not (piece := self._read(_PIECE)):
                if quotes.quoted:
                    raise UnclosedQuoteError(quotes.opened)
                return
            quotes.feed(piece)
            yield piece

    def _followed(self) -> _Quotes:
        """The quotes of the record so far."""
        quotes = _Quotes(self.dialect, self.first)
        for line in self.record:
            quotes.feed(line)
        return quotes


class _Quotes:
    """The quotes of one record, followed line by line as `csv` follows them when it is not strict."""

    def __init__(self, dialect: Dialect, line: int) -> None:
        self.line = line  # number of the current line in the file
        self.opened = line  # line of the last opening quote
        self.wrong = 0  # first line with text after a closing quote
        self._state = _START
        self._ended = False  # whether the next character is on the next line
        self._special = re.compile("[\r\n]" if dialect.quoting == "none" else f'["\r\n{re.escape(dialect.delimiter)}]')

    @property
    def quoted(self) -> bool:
        """Whether the next character is inside a quoted field."""
        return self._state == _QUOTED

    def feed(self, text: str) -> None:
        """Follow a line or a part of one."""
        self.line += self._ended
        position = 0
        for match in self._special.finditer(text):
            self._pass(text[position : match.start()])
            position = match.end()
            if match[0] == '"':
                self._pass_quote()
            elif self._state != _QUOTED:
                self._state = _START
        self._pass(text[position:])
        self._ended = text.endswith(("\n", "\r"))

    def _pass(self, text: str) -> None:
        """Pass characters that are neither quotes nor the end of a field."""
        if not text or self._state in (_QUOTED, _PLAIN):
            return
        if self._state == _START:
            self._state = _PLAIN
        else:
            self._state = _BEHIND
            self.wrong = self.wrong or (self.line if text.strip(" \t") else 0)

    def _pass_quote(self) -> None:
        if self._state == _START:
            self.opened = self.line
        if self._state == _BEHIND:
            self.wrong = self.wrong or self.line
        self._state = {_START: _QUOTED, _QUOTED: _CLOSED, _CLOSED: _QUOTED}.get(self._state, self._state)


_START, _PLAIN, _QUOTED, _CLOSED, _BEHIND = range(5)
"""Places in a record: start of a field, an unquoted field, a quoted one, its closing quote, and behind that."""
