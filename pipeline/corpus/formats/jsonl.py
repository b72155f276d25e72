"""JSONL files: one JSON object per line. Kept lines are copied byte for byte, not parsed and serialized again."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from shlex import quote
from typing import IO, Any

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.config.dialect import PLAIN
from pipeline.corpus.formats import base
from pipeline.corpus.input_files import (
    Extent,
    Overlong,
    bounded_lines,
    columns_in_dialect,
    estimated_extent,
    open_plain,
    packed_file,
    skip_line,
)
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.corpus.unpacking import suffix_compression
from pipeline.errors import UserError, error_line

_HEAD = 1 << 30  # bytes that must contain the first row
_FIRST, _FIRST_BYTES = 100, 1 << 22  # lines from which column names are read, and bytes after which they suffice
_MEASURED = 8  # multiple of `limits.document_bytes` up to which the reported size of a line is exact
_PIECE = 1 << 20

ARRAY = "json"
"""Name of the format of a file that is one array of objects."""

_MARK = b"\xef\xbb\xbf"


def object_columns(rows: Sequence[Mapping[str, Any]], wanted: Iterable[str]) -> list[str]:
    """The column names of some rows, and the fields of their objects if a wanted column may be one of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if any("." in column and column not in names for column in wanted):
        names += dict.fromkeys(inner for row in rows for inner in _inner_names(row))
    return names


def _inner_names(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        for inner in value if isinstance(value, Mapping) else ():
            yield f"{name}.{inner}"
            yield from (f"{name}.{deep}" for deep in _inner_names({inner: value[inner]}))


def _first_objects(shard: Shard) -> list[dict[str, Any]]:
    """The objects of the first lines of a file; lines that are too long or broken are skipped.

    Raises:
        UserError: none of these lines is an object, or all lines of the first GiB are too long.
    """
    most, name, dialect = shard.limits.document_bytes, shard.name, shard.dialect
    rows, size, problem, limit = list[dict[str, Any]](), 0, "", f"limits.document_bytes, which is {most:,}"
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
            for line in itertools.islice(bounded_lines(file, most, _HEAD, _HEAD), _FIRST):
                if rows and size >= _FIRST_BYTES:
                    break
                if isinstance(line, Overlong):
                    problem = problem or f": its first line has more bytes than {limit}"
                elif line.strip():
                    size += len(line)
                    try:
                        value = json.loads(line.removeprefix(_MARK).decode(dialect.encoding, dialect.errors))
                    except (ValueError, RecursionError) as error:
                        problem = problem or f" is not a readable JSONL file: {json_fault(error)}"
                        continue
                    if isinstance(value, dict):
                        rows.append(value)
                    problem = problem or " is not JSONL: its first line is no object with named fields"
    except (OSError, EOFError) as error:
        raise UserError(f"{name} is not a readable JSONL file: {error_line(error)}") from None
    if not rows:
        problem = problem or " is not JSONL: its first line is no object with named fields"
        raise UserError(f"{name}{problem}{_remedy(shard)}")
    return rows


def json_fault(error: Exception) -> str:
    """Why a text is no JSON, in one line."""
    return error_line(error).partition("; use sys.")[0]


def _remedy(shard: Shard) -> str:
    """What to do with a file of JSON that has no object in a line; empty where its start is no JSON."""
    file = quote(os.path.basename(shard.path))
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as opened:
            text = (
                opened.read(_FIRST_BYTES)
                .removeprefix(_MARK)
                .decode(shard.dialect.encoding, "replace")
                .lstrip(" \t\r\n")
            )
        value, end = json.JSONDecoder().raw_decode(text)
    except (OSError, EOFError, ValueError, RecursionError):
        return ""
    if isinstance(value, str):
        return f"; write objects: jq -c '{{text: .}}' {file} > lines.jsonl"
    if not isinstance(value, dict):
        return ""
    if (behind := text[end:].lstrip()).startswith(","):
        return "; remove the comma behind each object"
    if behind:
        return f"; write each object on a line of its own: jq -c . {file} > lines.jsonl"
    return f"; it is one object over several lines{remedy_of_one(value, file)}"


def remedy_of_one(row: Mapping[str, Any], file: str) -> str:
    """What to do with a file that is one object; empty where none of its fields holds the documents."""
    lists = [name for name, held in row.items() if isinstance(held, list) and held and isinstance(held[0], Mapping)]
    if lists:
        return f", whose {lists[0]} is a list of objects: jq -c '.[{json.dumps(lists[0])}][]' {file} > lines.jsonl"
    if row and all(isinstance(held, list) or _is_numbered(held) for held in row.values()):
        return ", which holds columns and not rows: write one object a row (in pandas orient='records', lines=True)"
    objects = len(row) > 1 and all(isinstance(held, Mapping) for held in row.values())
    return f", whose fields are objects: jq -c '.[]' {file} > lines.jsonl" if objects else ""


def _is_numbered(value: Any) -> bool:
    """Whether a value is an object whose fields are numbers, as pandas writes a column."""
    return isinstance(value, Mapping) and bool(value) and all(name.isdigit() for name in value)


def _columns(shard: Shard) -> list[str]:
    """The column names of a file, from its first lines. Raises UserError like `_first_objects`."""
    return object_columns(_first_objects(shard), base.wanted_columns(shard))


def check_first_rows(
    source: SourceConfig, name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> None:
    """Check the columns of the first rows of an input. The first row alone may lack the content, as a notice does.

    Raises:
        UserError: a column is missing, several rows from the first on lack the content, or it is of another kind.
    """
    if len(rows) == 1 and (held := base.field_value(rows[0], source.content, base.MISSING)) is not None:
        remedy = remedy_of_one(rows[0], quote(os.path.basename(name)))
        if remedy and (
            held is base.MISSING or (base.holds_texts(source) and (isinstance(held, list) or _is_numbered(held)))
        ):
            raise UserError(f"no column {source.content!r} of texts in {name}: it is one object{remedy}")
    base.check_columns(source, name, columns)
    lacking = [row for row in rows if base.field_value(row, source.content, base.MISSING) is base.MISSING]
    if len(lacking) > 1 and lacking[0] is rows[0]:
        raise UserError(
            f"no column {source.content!r} in {len(lacking)} of the first {len(rows)} rows of {name}, the first of all "
            f"among them; columns: {', '.join(columns)}"
        )
    base.check_texts(source, name, rows, columns)


def _content(path: str) -> str | None:
    """The format of a file that starts with a bracket: an array, which is no line a document."""
    try:
        with open_plain(path) as file:
            return ARRAY if file.read(_PIECE).removeprefix(_MARK).lstrip()[:1] == b"[" else None
    except (OSError, EOFError, UserError):
        return None  # the error of the file is raised when its columns are read


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    if source.dialect.is_wide:
        remedy = f"convert {entry.name} to UTF-8"
        raise UserError(f"{entry.name}: encoding {source.encoding} applies to CSV and .txt files; {remedy}")
    columns = columns_in_dialect(_columns, entry, source, limits, wide=False)
    rows = _first_objects(whole_shard(entry, source, limits=limits))
    check_first_rows(source, entry.name, rows, columns)
    return entry


def lines(shard: Shard) -> Iterator[tuple[int, bytes | Overlong]]:
    """(row number, line) of each line that starts in the shard's byte range; blank lines are skipped."""
    count, document_bytes = 0, shard.limits.document_bytes
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        stop = shard.stop if suffix_compression(shard.path) is None else None
        position = 0
        if shard.start > 0:
            file.seek(shard.start - 1)  # skip the end of a line that started in an earlier shard
            position = shard.start - 1 + skip_line(file, sys.maxsize if stop is None else stop - shard.start + 1)
        within = sys.maxsize if stop is None else stop - position
        measured = _MEASURED * document_bytes
        for row, line in enumerate(bounded_lines(file, document_bytes, within, max(within, measured)), shard.first_row):
            if isinstance(line, Overlong) and line.size > measured:
                line = Overlong(measured, whole=False)
            if isinstance(line, Overlong) or line.strip():
                yield row, line
                count += 1
                if count == shard.max_rows:
                    return
        if stop is not None and file.tell() < stop:
            raise EOFError(f"it ends at byte {file.tell()}; it was planned to byte {stop}")


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    return parsed_rows(lines(shard), shard, watch)


def parsed_rows(
    numbered: Iterable[tuple[int, bytes | Overlong]], shard: Shard, watch: base.Watch
) -> Iterator[base.Row]:
    """The rows of a shard from its lines, or from the elements of an array, by their numbers."""
    wanted = base.wanted_columns(shard)
    for row, line in numbered:
        deadly = not isinstance(line, Overlong) and watch(row, False)
        value = base.DEADLY if deadly else parsed_line(line, shard, wanted)
        if isinstance(value, base.Unreadable):
            yield row, value, *base.NOTHING
        else:
            text = base.field_value(value, shard.text, base.Unreadable(Reason.NOT_TEXT, f"no field {shard.text!r}"))
            yield row, text, *base.other_fields(value, shard)


def parsed_line(line: bytes | Overlong, shard: Shard, wanted: Collection[str] = ()) -> dict[str, Any] | base.Unreadable:
    """The fields of a line, or why they cannot be read. A byte order mark is skipped: joined files have several.

    Args:
        line: a line of the shard.
        shard: the shard.
        wanted: fields that must not be repeated in the line, because the intended one is unknown.
    """
    if isinstance(line, Overlong):
        return base.overlong(line, "bytes", shard)
    try:
        text = line.removeprefix(_MARK).decode(shard.dialect.encoding, "surrogateescape")
        value = parsed_json(text, bool(shard.item))
        repeated = repeated_field(text, wanted)
    except (ValueError, RecursionError) as error:
        return base.Unreadable(Reason.UNDECODABLE, f"not a JSON line: {json_fault(error)}")
    except MemoryError:
        return base.Unreadable(Reason.OUT_OF_MEMORY, f"its {len(line):,} bytes of JSON take too much")
    if repeated is not None:
        return base.Unreadable(Reason.UNDECODABLE, f"field {repeated!r} stands twice in it")
    if not isinstance(value, dict):
        return base.Unreadable(Reason.NOT_TEXT, f"a JSON {type(value).__name__}, not an object")
    return value


def parsed_json(text: str, as_written: bool) -> Any:
    """A JSON value; `as_written`: whether numbers are texts, because those of an item are a part of its text."""
    written = str if as_written else None
    return json.loads(text, parse_float=written, parse_int=written)


_NAME = re.compile(r'"(?:[^"\\]++|\\.)*+"(\s*:)?')  # a string, and the colon behind it if it names a field
_ESCAPED = ("\\u", "\\/")  # ways to write a letter of a name otherwise


def repeated_field(text: str, wanted: Iterable[str]) -> str | None:
    """A wanted field, or a part of its path, that is repeated in a JSON object: which one counts is unknown.

    Args:
        text: a JSON value that can be parsed.
        wanted: names of fields, as `field_value` reads them.
    """
    cuts = [name.split(".") for name in wanted]
    parts = {".".join(cut[a:b]) for cut in cuts for a, b in itertools.combinations(range(len(cut) + 1), 2)}
    once = all(text.count(json.dumps(part, ensure_ascii=False)) < 2 for part in parts)
    if once and not (any(sign in text for sign in _ESCAPED) and _has_escaped_name(text)):
        return None
    pairs = json.loads(text, object_pairs_hook=tuple)
    return next((part for name in wanted if (part := _repeated_in(pairs, name)) is not None), None)


def _has_escaped_name(text: str) -> bool:
    """Whether the name of a field has an escape."""
    return any(match[1] and "\\" in match[0] for match in _NAME.finditer(text))


def _repeated_in(value: Any, name: str) -> str | None:
    """The part of a field's path that is repeated in an object, which is a tuple of pairs."""
    held: dict[str, list[Any]] = {}
    for key, inner in value if isinstance(value, tuple) else ():
        held.setdefault(key, []).append(inner)
    if name in held:
        return name if len(held[name]) > 1 else None
    for first, rest in base.dotted(name):
        if first in held:
            inside = first if len(held[first]) > 1 else _repeated_in(held[first][0], rest)
            if inside is not None:
                return inside
    return None


def _estimate(entry: InputFile) -> Extent:
    return estimated_extent(
        entry,
        count=lambda data: sum(1 for line in data.split(b"\n") if line.strip()),
        ends=lambda part, _: line_ends(part),
    )


def line_ends(data: bytes) -> int:
    """Number of ends of lines that are not blank."""
    return sum(1 for line in data.split(b"\n")[:-1] if line.strip())


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Copy the kept lines of a file byte for byte, with the compression of the file.

    An export of the selected documents drops lines that are not documents; an export of the others keeps them.
    """
    shard = source.first
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(source.name) as sink,
        packed_file(sink, suffix_compression(shard.path)) as out,
    ):
        for _, piece in base.kept_numbered(_pieces(file), marks):
            out.write(piece)


def _pieces(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, long ones in several pieces."""
    row = 0
    while piece := file.readline(_PIECE):
        yield row, piece
        row += piece.endswith(b"\n")


def _records(source: base.ExportSource) -> base.Records:
    whole = replace(source.first, start=0, stop=None, first_row=0, max_rows=None)
    for number, line in lines(whole):
        row = parsed_line(line, whole)
        yield number, None if isinstance(row, base.Unreadable) else row


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(names[0]) as sink,
        packed_file(sink, suffix_compression(shard.path)) as out,
    ):
        for row, pieces in itertools.groupby(_pieces(file), key=itemgetter(0)):
            edit = edits.at(row)
            if edit is None:
                out.writelines(piece for _, piece in pieces)
            else:
                out.write(edited_line(b"".join(piece for _, piece in pieces), shard, edit))


def edited_line(line: bytes, shard: Shard, edit: base.TextEdit) -> bytes:
    """A line of JSON with another text: only the characters of the string change if it occurs once."""
    mark = _MARK if line.startswith(_MARK) and shard.dialect.encoding == PLAIN.encoding else b""
    text = line[len(mark) :].decode(shard.dialect.encoding, shard.dialect.errors)
    value = base.with_field(json.loads(text), shard.text, edit.after)
    for ascii_only in (False, True):
        before, after = (json.dumps(one, ensure_ascii=ascii_only) for one in (edit.before, edit.after))
        if text.count(before) == 1 and json.loads(edited := text.replace(before, after)) == value:
            return mark + base.encoded(edit.row, edited, shard, b"")
    behind = text[len(text.rstrip("\r\n")) :]
    return mark + base.encoded(edit.row, json.dumps(value, ensure_ascii=text.isascii()) + behind, shard, b"")


JSONL = base.Format(
    "jsonl",
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(_copy, records=_records),
    edit=_edit,
    suffixes=(".jsonl", ".ndjson", ".json"),
    content=_content,
    estimate=_estimate,
    settings=frozenset({"encoding"}),
    compressed=True,
    byte_ranges=True,
    lists=True,
    place=1,
)
