"""JSONL files: one JSON object per line. Kept lines are copied byte for byte, not parsed and serialized again."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import IO, Any

from pipeline.config.corpus import PLAIN, LimitsConfig, SourceConfig
from pipeline.corpus.files import (
    Extent,
    Overlong,
    bounded_lines,
    columns_in_dialect,
    compression_of,
    estimated_extent,
    open_plain,
    packed_file,
    skip_line,
)
from pipeline.corpus.formats import base
from pipeline.corpus.notes import Notes
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError

_HEAD = 1 << 30  # bytes that must contain the first row
_MEASURED = 8  # multiple of `limits.document_bytes` up to which the reported size of a line is exact
_PIECE = 1 << 20
Numbered = Iterator[tuple[int, bytes]]
_MARK = b"\xef\xbb\xbf"


def _columns(shard: Shard) -> list[str]:
    """The column names of a file, from its first row; lines that are too long are skipped.

    Raises:
        UserError: the first row is not an object, or all lines of the first GiB are too long.
    """
    most, name, dialect = shard.limits.document_bytes, shard.name, shard.dialect
    passed = False
    try:
        with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
            for line in bounded_lines(file, most, _HEAD, _HEAD):
                if isinstance(line, Overlong):
                    passed = True
                elif line.strip():
                    value = json.loads(line.decode(dialect.codec, dialect.errors), object_pairs_hook=tuple)
                    if isinstance(value, tuple):  # the pairs of an object, in which a name may be repeated
                        return [name for name, _ in value]
                    break
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise UserError(f"{name} is not a readable JSONL file: {' '.join(str(error).split())}") from None
    if passed:
        raise UserError(f"{name}: its first line has more bytes than limits.document_bytes, which is {most:,}")
    raise UserError(f"{name} is not JSONL: its first line is no object with named fields")


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    if source.dialect.is_wide:
        remedy = f"convert {entry.name} to UTF-8"
        raise UserError(f"{entry.name}: encoding {source.encoding} applies to CSV and .txt files; {remedy}")
    base.check_columns(source, entry.name, columns_in_dialect(_columns, entry, source, limits))
    return entry


def lines(shard: Shard) -> Iterator[tuple[int, bytes | Overlong]]:
    """(row number, line) of each line that starts in the shard's byte range; blank lines are skipped."""
    count, document_bytes = 0, shard.limits.document_bytes
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        stop = shard.stop if compression_of(shard.path) is None else None
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
    wanted = base.wanted_columns(shard)
    for row, line in lines(shard):
        deadly = not isinstance(line, Overlong) and watch(row, False)
        value = base.DEADLY if deadly else _object(line, shard, row == 0, wanted)
        if isinstance(value, base.Unreadable):
            yield row, value, *base.NOTHING
        else:
            text = value.get(shard.text, base.Unreadable("not_text", f"no field {shard.text!r}"))
            yield row, text, *base.other_fields(value, shard)


def _object(
    line: bytes | Overlong, shard: Shard, first: bool, wanted: Collection[str] = ()
) -> dict[str, Any] | base.Unreadable:
    """The fields of a line, or why they cannot be read.

    Args:
        line: a line of the shard.
        shard: the shard.
        first: whether the line is the first of its file, which may have a byte order mark.
        wanted: fields that must not be repeated in the line, because the intended one is unknown.
    """
    if isinstance(line, Overlong):
        return base.overlong(line, "bytes", shard)
    try:
        text = line.removeprefix(_MARK if first else b"").decode(shard.dialect.encoding, "surrogateescape")
        value = json.loads(text)
        repeated = _repeated_field(text, wanted)
    except (ValueError, RecursionError) as error:
        return base.Unreadable("undecodable", f"not a JSON line: {error}")
    except MemoryError:
        return base.Unreadable("out_of_memory", f"its {len(line):,} bytes of JSON take too much")
    if repeated is not None:
        return base.Unreadable("undecodable", f"field {repeated!r} stands twice in it")
    if not isinstance(value, dict):
        return base.Unreadable("not_text", f"a JSON {type(value).__name__}, not an object")
    return value


def _repeated_field(text: str, wanted: Collection[str]) -> str | None:
    """A wanted field that is repeated in a JSON object."""
    if all(text.count(json.dumps(name, ensure_ascii=False)) < 2 for name in wanted):
        return None
    pairs = json.loads(text, object_pairs_hook=tuple)
    names = [name for name, _ in pairs] if isinstance(pairs, tuple) else []
    return next((name for name in names if name in wanted and names.count(name) > 1), None)


def _estimate(entry: InputFile) -> Extent:
    return estimated_extent(
        entry,
        count=lambda data: sum(1 for line in data.split(b"\n") if line.strip()),
        ends=lambda part, _: line_ends(part),
    )


def line_ends(data: bytes) -> int:
    """Number of ends of lines that are not blank."""
    return sum(1 for line in data.split(b"\n")[:-1] if line.strip())


def copy_pieces(
    source: base.ExportSource,
    marks: base.Marks,
    open_file: base.OpenFile,
    pieces: Callable[[Shard, IO[bytes]], Numbered],
) -> None:
    """Copy the kept lines or records of a file byte for byte, with the compression of the file.

    An export of the selected documents drops lines that are not documents; an export of the others keeps them.
    """
    shard = source.first
    packing = compression_of(shard.path)
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(source.name) as sink,
        packed_file(sink, packing) as out,
    ):
        for _, piece in base.kept_numbered(pieces(shard, file), marks):
            out.write(piece)


def _pieces(shard: Shard, file: IO[bytes]) -> Numbered:
    """The lines of a file with their numbers, long ones in several pieces."""
    row = 0
    while piece := file.readline(_PIECE):
        yield row, piece
        row += piece.endswith(b"\n")


def _records(source: base.ExportSource) -> base.Records:
    whole = replace(source.first, start=0, stop=None, first_row=0, max_rows=None)
    for number, line in lines(whole):
        row = _object(line, whole, number == 0)
        yield number, None if isinstance(row, base.Unreadable) else row


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    with (
        open_plain(shard.path, shard.limits.unpacked_bytes) as file,
        open_file(names[0]) as sink,
        packed_file(sink, compression_of(shard.path)) as out,
    ):
        for row, pieces in itertools.groupby(_pieces(shard, file), key=itemgetter(0)):
            edit = edits.of(row)
            if edit is None:
                out.writelines(piece for _, piece in pieces)
            else:
                out.write(_edited_line(b"".join(piece for _, piece in pieces), shard, edit))


def _edited_line(line: bytes, shard: Shard, edit: base.TextEdit) -> bytes:
    """A line of JSON with another text: only the characters of the string change if it occurs once."""
    mark = _MARK if line.startswith(_MARK) and shard.dialect.encoding == PLAIN.encoding else b""
    text = line[len(mark) :].decode(shard.dialect.encoding, shard.dialect.errors)
    value = {**json.loads(text), shard.text: edit.after}
    for ascii_only in (False, True):
        before, after = (json.dumps(one, ensure_ascii=ascii_only) for one in (edit.before, edit.after))
        if text.count(before) == 1 and json.loads(edited := text.replace(before, after)) == value:
            return mark + base.encoded(edit, edited, shard, b"")
    behind = text[len(text.rstrip("\r\n")) :]
    return mark + base.encoded(edit, json.dumps(value, ensure_ascii=text.isascii()) + behind, shard, b"")


JSONL = base.Format(
    "jsonl",
    "line",
    _inspect,
    _rows,
    columns=_columns,
    export=base.Exporter(partial(copy_pieces, pieces=_pieces), records=_records),
    edit=_edit,
    suffixes=(".jsonl", ".ndjson", ".json"),
    estimate=_estimate,
    settings=frozenset({"encoding"}),
    compressed=True,
    byte_ranges=True,
    lists=True,
    place=1,
)
