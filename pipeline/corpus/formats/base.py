"""Definition of an input format: a record of functions that read, plan, discover and export its files."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.input_files import Extent, Overlong
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, nearest

Watch = Callable[[int, bool], bool]
"""Called with a row number and False before the row is read, and with True before the reader advances to the next row.
Returns whether the step must be skipped because it kills the reader."""

_LOOKUP_ROWS = 1 << 12  # rows whose marks are read together
_Piece = TypeVar("_Piece")


def unwatched(row: int, between: bool) -> bool:
    """Skip no row."""
    return False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for a text: why the row has none."""

    reason: str
    message: str
    cause: str = ""  # of what is not permutable, as in "equal options"


MISSING = Unreadable(Reason.NOT_TEXT, "no value")
"""Placeholder for the value of a column that a row lacks."""

DEADLY = Unreadable(Reason.MODEL_ERROR, "it was being read when its worker was killed, again and again")


def overlong(length: Overlong, unit: str, shard: Shard) -> Unreadable:
    """Placeholder for a text that is longer than the limits allow.

    Args:
        length: length of the text.
        unit: unit of the length: "bytes" or "characters".
        shard: shard that holds the text.
    """
    limit = f"limits.document_bytes, which is {shard.limits.document_bytes:,}"
    return Unreadable(
        Reason.TOO_LARGE, f"{'' if length.whole else 'at least '}{length.size:,} {unit}, more than {limit}"
    )


def encodable(text: str) -> str:
    """A text that UTF-8 can encode: other characters, as in names of files in another encoding, become escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


Row = tuple[int, Any, Any, Any, Any, Any]
"""Number; text, picture or list of versions; id; group; label; and caption or the values of `Shard.value_columns`."""

NOTHING = (None, None, None, None)
"""Id, group, label and caption of a row that cannot be read."""


def other_columns(shard: Shard) -> tuple[str | None, ...]:
    """The columns of id, group, label and caption; None without such a column."""
    return shard.id_column, shard.group_column, shard.label_column, shard.caption_column


def wanted_columns(shard: Shard) -> list[str]:
    """The columns that a shard reads, each once."""
    columns = (shard.text, *other_columns(shard), *shard.value_columns)
    return list(dict.fromkeys(name for name in columns if name is not None))


def other_fields(value: Mapping[str, Any], shard: Shard) -> tuple[Any, Any, Any, Any]:
    """Id, group, label and caption of a row; None without such a column."""
    wanted = other_columns(shard)
    identity, group, label, caption = (None if name is None else field_value(value, name) for name in wanted)
    values = tuple(field_value(value, name) for name in shard.value_columns)
    return identity, group, label, values or caption


def field_value(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value of a column of a row. `a.b` is the field b of the object in a, unless a column has this name.

    Names of columns and fields may have dots themselves: `a.b.c` is also the field `b.c` of a.
    """
    if name in row or "." not in name:
        return row.get(name, default)
    path = _path_in(row, name)
    return default if path is None else functools.reduce(operator.getitem, path, row)


def with_field(row: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A row with another value of a column that it has, which may be a field of an object."""
    first, *rest = _path_in(row, name) or (name,)
    return {**row, first: with_field(row[first], ".".join(rest), value) if rest else value}


def _path_in(row: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """A column of a row, and the fields within it, that a name stands for; None if there is no such field."""
    if name in row:
        return (name,)
    for first, rest in dotted(name):
        if isinstance(inner := row.get(first), Mapping) and (path := _path_in(inner, rest)) is not None:
            return first, *path
    return None


def dotted(name: str) -> Iterator[tuple[str, str]]:
    """What stands before and behind each dot of a name, the first dot first."""
    return ((name[: dot.start()], name[dot.end() :]) for dot in re.finditer(r"\.", name))


def check_columns(source: SourceConfig, name: str, columns: Sequence[str]) -> None:
    """Check that an input has the columns of a source, each once.

    Raises:
        UserError: a column is missing or occurs several times.
    """
    for column in source.columns:
        marked = source.versions is not None and source.versions.permute is None
        marked = marked and not {"index", source.content} & {*columns}
        if column not in columns and column in (source.content, *source.companions) and marked:
            raise UserError(_no_versions(column, name, columns))
        if column not in columns and source.has_chats and {"chosen", "rejected"} <= {*columns}:
            raise UserError(
                f"no column {column!r} in {name}, whose chosen and rejected are the answers of a preference pair, of "
                "which a document has one: messages: chosen, or prompt: prompt with completion: chosen"
            )
        if column not in columns:
            raise UserError(f"no column {column!r} in {name}; {nearest(column, columns, 'columns')}")
        if (times := list(columns).count(column)) > 1:
            raise UserError(f"column {column!r} occurs {times} times in {name}: rename all but one, or leave them out")


def is_message(names: Collection[str]) -> bool:
    """Whether an object with these fields is a message of a chat."""
    return {"role", "content"} <= {*names} or {"from", "value"} <= {*names}


def not_text(source: SourceConfig, name: str, held: str, fields: Sequence[str], columns: Sequence[str]) -> UserError:
    """The error for a column that holds no texts.

    Args:
        source: source of the documents.
        name: name of the input.
        held: what the column holds, in words.
        fields: fields of its objects.
        columns: columns of the input.
    """
    remedy = f"columns: {', '.join(columns)}"
    if fields:
        remedy = f"name one of its fields, such as text: {source.text}.{fields[0]} (fields: {', '.join(fields)})"
    elif held == "lists of messages":
        remedy = f"messages: {source.text}, in the place of text, reads conversations; {remedy}"
    elif held.startswith("lists"):
        remedy = f"text names a column of texts; {remedy}"
    return UserError(f"column {source.text!r} in {name} holds {held}, not text; {remedy}")


def holds_texts(source: SourceConfig) -> bool:
    """Whether the content of a document is one text."""
    others = source.image or source.tokens or source.companions or source.has_chats or source.item
    return not others and source.has_text


def check_texts(source: SourceConfig, name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Check that the column of texts holds texts in the first rows of an input.

    Raises:
        UserError: it holds other values alone.
    """
    if not holds_texts(source):
        return
    values = [value for row in rows if (value := field_value(row, source.content)) is not None]
    if not values or any(isinstance(value, str) for value in values):
        return
    first = values[0]
    if not isinstance(first, list | Mapping | int | float):
        return  # a picture, which is refused document by document
    if isinstance(first, list):
        messages = first and isinstance(first[0], Mapping) and is_message(first[0])
        raise not_text(source, name, "lists of messages" if messages else "lists", (), columns)
    held = "objects" if isinstance(first, Mapping) else "true or false" if isinstance(first, bool) else "numbers"
    raise not_text(source, name, held, list(first) if isinstance(first, Mapping) else (), columns)


def _no_versions(column: str, name: str, columns: Sequence[str]) -> str:
    """The error for an input without a column of versions, which may be a public file of `seenset mark`."""
    folder, public, _ = f"/{name}".rpartition("/public/")
    private = f"{folder}/private/versions.parquet"[1:] if public else "private/versions.parquet"
    return (
        f"no column {column!r} in {name} (columns: {', '.join(columns)}): the public files of seenset mark hold no "
        f"versions; the file that is missing as corpus.audit.path is {private}, which seenset mark wrote beside them"
    )


class Marks(Protocol):
    """Marks of the rows of an input that an export keeps, read once and in order."""

    def following(self, count: int) -> np.ndarray:
        """Whether each of the next rows is kept, bool, (count,)."""
        ...


OpenFile = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens a file of an export by its name."""


@dataclass(frozen=True, slots=True)
class TextEdit:
    """The text of a row and its replacement; None: the row is unchanged."""

    row: int
    before: str
    after: str | None


def encoded(row: int, text: str, shard: Shard, mark: bytes) -> bytes:
    """A text in the encoding of its file, without a byte order mark.

    Args:
        row: row of the text, for messages.
        text: the text, or the record with it.
        shard: shard of the file.
        mark: byte order mark of the file; empty if it has none.

    Raises:
        UserError: the encoding lacks a character.
    """
    dialect = shard.dialect
    try:
        return text.encode(dialect.encoding_after(mark), dialect.errors)
    except UnicodeEncodeError as error:
        raise UserError(
            f"row {row} of {shard.name} gets character {text[error.start]!r}, which {dialect.label} lacks: save "
            "the file in UTF-8"
        ) from None


class RowEdits:
    """Edits in row order, looked up by ascending rows."""

    def __init__(self, edits: Iterator[TextEdit]) -> None:
        """Use the edits of a file; they are computed while its copy is written."""
        self._edits = edits
        self._next = next(edits, None)

    def at(self, row: int) -> TextEdit | None:
        """The edit of a row; None if the row is unchanged."""
        while self._next is not None and self._next.row < row:
            self._next = next(self._edits, None)
        edit = self._next
        return edit if edit is not None and edit.row == row and edit.after is not None else None

    def finish(self) -> None:
        """Compute the edits of rows that were not looked up."""
        for _ in self._edits:
            pass


Records = Iterator[tuple[int, dict[str, Any] | None]]
"""Numbers and fields of rows; None for a row that cannot be a row of a table."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """An input of audited documents."""

    shards: tuple[Shard, ...]  # in order
    name: str  # in the export: a path below the folder that all inputs have in common

    @property
    def first(self) -> Shard:
        """The first shard: all shards have the same path, format and columns."""
        return self.shards[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a folder of text files."""
        return tuple(file for shard in self.shards for file in shard.files)


def kept_numbered(pieces: Iterable[tuple[int, _Piece]], marks: Marks) -> Iterator[tuple[int, _Piece]]:
    """The pieces of kept rows, and of row -1, which precedes the rows."""
    start, flags = 0, list[bool]()
    for row, piece in pieces:
        while row >= start + len(flags):
            start += len(flags)
            flags = marks.following(_LOOKUP_ROWS).tolist()
        if row < 0 or flags[row - start]:
            yield row, piece


def kept_rows(tables: Iterable[pa.Table], marks: Marks) -> Iterator[pa.Table]:
    """The rows of an input, without those that an export leaves out."""
    for table in tables:
        yield table.filter(pa.array(marks.following(len(table))))


@dataclass(frozen=True, slots=True)
class Exporter:
    """Functions that read an input with all its columns, and write its kept rows.

    The schema of an input is stated in it or inferred from its records. An input yields tables of bounded size, or
    records; neither if its documents cannot be rows of a dataset folder.
    """

    copy: Callable[[ExportSource, Marks, OpenFile], None]  # in the input's format; raises OSError, ArrowException
    names: Callable[[ExportSource], list[str]] = lambda source: [source.name]  # of the files of the copy
    schema: Callable[[Shard], pa.Schema] | None = None
    tables: Callable[[Shard], Iterator[pa.Table]] | None = None
    records: Callable[[ExportSource], Records] = lambda source: iter(())


@dataclass(frozen=True, slots=True)
class Format:
    """One input format. For a damaged file its functions raise the exceptions of its library."""

    name: str  # in manifests and tables of shards
    unit: Literal["row", "line", "file", "sample"]  # the unit of documents
    inspect: Callable[[InputFile, SourceConfig, LimitsConfig, bytes], InputFile]
    """Completes an input from the last bytes of its file; raises UserError for a missing column."""
    rows: Callable[[Shard, Watch, Notes], Iterator[Row]]
    export: Exporter
    edit: Callable[[Shard, Sequence[str], RowEdits, OpenFile], None] | None = None
    """Copies an input to files of the given names and changes only the edited texts; None: not supported."""
    columns: Callable[[Shard], Sequence[str]] | None = None  # for `init`
    suffixes: tuple[str, ...] = ()  # file name suffixes
    inside: str = ""  # suffix of the kind that its first bytes show, if another: ".zip" of files that are archives
    content: Callable[[str], str | None] | None = None
    """Name of the format that the content of a file has, if its suffix does not tell it; None: this one."""
    estimate: Callable[[InputFile], Extent] | None = None  # for inputs whose number of rows is unknown
    has_path: bool = True  # in a file system; False for a name on the hub
    is_folder: bool = False  # whether the path is a folder with one dataset
    settings: frozenset[str] = frozenset()  # settings of a dialect that apply
    compressed: bool = False  # whether its files may be compressed
    only_pictures: bool = False
    has_splits: bool = False  # whether the setting `split` applies
    lists: bool = False  # whether a column may hold lists, such as versions
    place: int = 9  # in messages, the most common format first
    byte_ranges: bool = False  # whether shards of its uncompressed files are ranges of bytes
