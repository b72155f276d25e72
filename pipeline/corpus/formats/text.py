"""Text files: each file is a document; the files of a folder are one input."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

import fsspec
import pyarrow as pa

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.config.dialect import LONGEST_MARK, mark_of
from pipeline.corpus.formats import base
from pipeline.corpus.input_files import Overlong, wide_encoding
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard
from pipeline.corpus.unpacking import binary_kind


def file_path(place: str, inner: str) -> str:
    """The path of a file in a folder, or of the file that `place` is."""
    return f"{place}/{inner}" if inner else place


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    return replace(entry, rows=1, files=("",))


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    for row, inner in enumerate(shard.files, shard.first_row):
        yield row, base.DEADLY if watch(row, False) else _text(shard, inner), *base.NOTHING


def _text(shard: Shard, inner: str) -> str | base.Unreadable:
    most = shard.limits.document_bytes
    with fsspec.open(file_path(shard.path, inner), "rb") as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = len(data) + sum(map(len, iter(lambda: file.read(1 << 20), b"")))
            return base.overlong(Overlong(size), "bytes", shard)
    if (kind := binary_kind(data)) is not None:
        return base.Unreadable(Reason.NOT_TEXT, f"by its first bytes it is {kind.words}")
    dialect = shard.dialect
    if b"\0" in data and not dialect.is_wide and (wide := wide_encoding(data)) is not None:
        return base.Unreadable(Reason.UNDECODABLE, f"it is {wide}, not {dialect.label}")
    try:
        return str(data.decode(dialect.codec)).removeprefix("\ufeff" if dialect.is_wide else "")
    except UnicodeDecodeError as error:
        return base.Unreadable(Reason.UNDECODABLE, f"byte {error.start} is not {dialect.label}")


def _names(source: base.ExportSource) -> list[str]:
    """The files that a copy may contain: documents, and captions of pictures."""
    return list(dict.fromkeys(name for files in _document_files(source) for name, _ in files))


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Copy the kept files, pictures with the files of their captions."""
    copied: set[str] = set()
    flags = marks.following(len(source.files)).tolist()
    for (document, *captions), kept in zip(_document_files(source), flags, strict=True):
        if kept:
            present = [caption for caption in captions if caption[0] not in copied and _is_there(caption[1])]
            for name, path in [document, *present]:
                copied.add(name)
                with fsspec.open(path, "rb") as file, open_file(name) as sink:
                    shutil.copyfileobj(file, sink, 1 << 20)


def _document_files(source: base.ExportSource) -> list[list[tuple[str, str]]]:
    """The files of each document, including its caption: name in the export and path."""
    shard, files = source.first, []
    for inner in source.files:
        places = [file_path(each, inner) for each in (source.name, shard.path)]
        files.append([(places[0], places[1])])
        if shard.caption_column is not None:
            name, path = (f"{os.path.splitext(place)[0]}.{shard.caption_column}" for place in places)
            files[-1].append((name, path))
    return files


def _is_there(path: str) -> bool:
    fs, place = fsspec.core.url_to_fs(path)
    return bool(fs.isfile(place))


def _schema(shard: Shard) -> pa.Schema:
    return pa.schema([("file", pa.string()), (shard.text, pa.string())])


def _records(source: base.ExportSource) -> base.Records:
    shard = source.first
    for number, inner in enumerate(source.files):
        text = _text(shard, inner)
        row = {"file": base.encodable(inner or source.name), shard.text: text}
        yield number, None if isinstance(text, base.Unreadable) else row


def _edit(shard: Shard, names: Sequence[str], edits: base.RowEdits, open_file: base.OpenFile) -> None:
    for row, (inner, name) in enumerate(zip(shard.files, names, strict=True)):
        edit = edits.at(row)
        with fsspec.open(file_path(shard.path, inner), "rb") as file, open_file(name) as sink:
            if edit is None or edit.after is None:
                shutil.copyfileobj(file, sink, 1 << 20)
            else:
                encoding, mark = mark_of(file.read(LONGEST_MARK)) or ("", b"")
                mark = mark if encoding == shard.dialect.encoding else b""
                sink.write(mark + base.encoded(edit.row, edit.after, shard, mark))


TEXT = base.Format(
    "txt",
    "file",
    _inspect,
    _rows,
    export=base.Exporter(_copy, _names, _schema, records=_records),
    edit=_edit,
    suffixes=(".txt",),
    settings=frozenset({"encoding"}),
    place=3,
)
