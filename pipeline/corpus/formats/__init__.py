"""The input formats: one module of this package defines the record of each."""

from __future__ import annotations

import csv
import importlib
import itertools
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa

from pipeline.config.corpus import SourceConfig
from pipeline.config.dialect import PLAIN, Dialect
from pipeline.config.retired import retired
from pipeline.corpus.formats.base import ExportSource, Format
from pipeline.corpus.input_files import Extent, read_head
from pipeline.corpus.shard import InputFile, Shard
from pipeline.corpus.unpacking import COMPRESSIONS, UNPACK, binary_kind, stand_in, suffix_compression
from pipeline.errors import SettingError, UserError, error_line, nearest


def _formats() -> Iterator[Format]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        yield from (one for one in vars(importlib.import_module(module.name)).values() if isinstance(one, Format))


FORMATS = {form.name: form for form in sorted(_formats(), key=lambda form: form.place)}
"""Format name -> record, the most common first."""

_SOME, _FEW = 200, 8  # rows that `init` reads
_MANY = 50_000  # rows in which repeated ids are compared
_MOST_KINDS, _LONGEST_LABEL = 20, 60
_APPLY = {"encoding": "CSV, JSONL and .txt files", "delimiter": "CSV files", "quoting": "CSV files"}


def format_named(name: str) -> Format:
    """The format of an input or a shard.

    Raises:
        UserError: no format has this name.
    """
    if name not in FORMATS:
        raise UserError(f"no format {name!r}; {nearest(name, FORMATS, 'formats')}")
    return FORMATS[name]


def suffix_format(path: str, pictures: bool = False) -> Format | None:
    """The format indicated by a file name's suffix, or None.

    Args:
        path: path of the file.
        pictures: whether the documents are pictures, which may be separate files or members of .tar files.
    """
    stem, suffix = os.path.splitext(path)
    compressed = suffix.lower() in COMPRESSIONS
    suffix = (os.path.splitext(stem)[1] if compressed else suffix).lower()
    for form in FORMATS.values():
        if suffix in form.suffixes and (pictures or not form.only_pictures) and (form.compressed or not compressed):
            return form
    return None


def retired_suffix(path: str) -> str | None:
    """The refusal of a file whose suffix is read no more, or None."""
    return retired("suffix", os.path.splitext(path)[1].lower())


def content_format(form: Format, path: str) -> Format:
    """The format of a file, from its suffix and the start of its content."""
    name = None if form.content is None else form.content(path)
    return form if name is None else FORMATS[name]


def document_suffixes(pictures: bool) -> str:
    """The suffixes of files that hold documents, for messages.

    Args:
        pictures: whether the documents are pictures.
    """
    forms = [form for form in FORMATS.values() if pictures or not form.only_pictures]
    suffixes, packed = (
        ", ".join(suffix for form in some for suffix in form.suffixes)
        for some in (forms, [form for form in forms if form.compressed])
    )
    return f"{suffixes} ({packed} also with {' or '.join(COMPRESSIONS)})"


def _remedies() -> Iterator[tuple[str, str]]:
    kinds = {
        "save as .txt": "docx doc odt rtf pages epub pdf htm html xhtml pptx ppt odp eml msg tex wpd",
        "save as .csv": "xlsx xls xlsm ods numbers",
        "rename to .txt": "md markdown rst text log asc",
        "rename to .jsonl": "jsonlines jsonline jl ldjson",
        "rename to .tsv": "tab",
        "rename to .gz": "gzip",
        "rename to .zst": "zstd",
        "export as .jsonl or .csv": "avro orc db sqlite sqlite3 duckdb sql xml mbox pkl pickle h5 hdf5 lmdb rds dta",
        "unpack it": "zip 7z rar gz zst bz2 xz z tgz tbz tbz2 txz tzst lz4 lzma br",
    }
    yield from ((f".{suffix}", remedy) for remedy, suffixes in kinds.items() for suffix in suffixes.split())


REMEDIES = dict(_remedies())
"""Suffix of files that may hold documents and are not read -> what makes Seenset read them."""


def format_remedy(path: str) -> str:
    """What makes Seenset read a file of no known format, with the command where there is one; empty if nothing does."""
    lower = path.lower()
    command = next((command for suffix, command in UNPACK.items() if lower.endswith(suffix)), None)
    remedy = REMEDIES.get(os.path.splitext(lower)[1], "")
    return remedy if command is None else f"unpack it: {command.format(os.path.basename(path))}"


def remedy_by_content(path: str, head: bytes) -> str | None:
    """What a file is whose content is not what its suffix says, and what to do; None if its content is not known.

    Args:
        path: path of the file.
        head: its first bytes.
    """
    if (instead := stand_in(head)) is not None:
        return instead
    name, packed, kind = os.path.basename(path), suffix_compression(path), binary_kind(head)
    form = suffix_format(path, pictures=True)
    if kind is None or (form is not None and kind.suffix in (*form.suffixes, form.inside)):
        return None
    if COMPRESSIONS.get(kind.suffix, "") != packed:
        stem = name if kind.packs and packed is None else os.path.splitext(name)[0]
        renamed = stem + kind.suffix
        readable, remedy = suffix_format(renamed, pictures=True) is not None, format_remedy(renamed)
        then = "" if readable or not remedy else f", then {remedy}"
        return f"by its first bytes it is {kind.words}: rename it to {renamed}{then}"
    try:
        inner = binary_kind(read_head(path))
    except (OSError, EOFError, UserError):
        return None
    unpack = UNPACK[kind.suffix].format(name)
    return (
        None
        if inner is None
        else f"it holds {inner.words}: unpack it ({unpack}), and rename what it holds to {inner.suffix}"
    )


def first_rows(shard: Shard) -> list[dict[str, Any]]:
    """Some of the first rows of an input with all their columns, for `init`; fewer if they may hold pictures."""
    form = format_named(shard.format)
    if form.export.tables is not None:
        table = next(form.export.tables(shard), pa.table({}))
        heavy = any("binary" in str(field.type) for field in table.schema)
        return list(table.slice(0, _FEW if heavy else _SOME).to_pylist())
    rows = (row for _, row in form.export.records(ExportSource((shard,), shard.name)) if row is not None)
    return list(itertools.islice(rows, _FEW if form.unit == "sample" else _SOME))


def distinguishing_column(whole: Shard) -> tuple[str, list[str]] | None:
    """The column that differs wherever an id repeats among the first rows of a file, and its values.

    Files of samples of lm-evaluation-harness have each document once for each of its filters, for example.

    Args:
        whole: a shard of all rows of the file.

    Returns:
        The name of the first such column but for that of the texts, with as many short values as an id has rows, and
        these in order; None where there is none.
    """
    if whole.id_column is None:
        return None
    export = format_named(whole.format).export
    if export.tables is not None:
        rows: Iterator[Mapping[str, Any] | None] = (row for table in export.tables(whole) for row in table.to_pylist())
    else:
        rows = (row for _, row in export.records(ExportSource((whole,), whole.name)))
    by_id: dict[Any, list[Mapping[str, Any]]] = {}
    for row in itertools.islice(rows, _MANY):
        name = None if row is None else row.get(whole.id_column)
        if isinstance(name, str | int):
            by_id.setdefault(name, []).append({key: one for key, one in (row or {}).items() if _is_label(one)})
    repeated = [some for some in by_id.values() if len(some) > 1]
    most = max(map(len, repeated), default=0)
    for key in repeated[0][0] if most <= _MOST_KINDS and repeated else ():
        values = [[one.get(key) for one in some] for some in repeated]
        kinds = {value for some in values for value in some}
        differ = None not in kinds and all(len(set(some)) == len(some) for some in values)
        if key != whole.text and differ and len(kinds) == most:
            return key, sorted(map(str, kinds))
    return None


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_LABEL


def by_bytes(shard: Shard) -> bool:
    """Whether start and stop of a shard count bytes (uncompressed JSONL) and not rows."""
    return format_named(shard.format).byte_ranges and suffix_compression(shard.path) is None


def applicable_dialect(form: Format, dialect: Dialect) -> Dialect:
    """The part of a dialect that applies to files of a format."""
    return Dialect(*(getattr(dialect if name in form.settings else PLAIN, name) for name in _APPLY))


def check_applies(key: str, source: SourceConfig, formats: Iterable[Format]) -> None:
    """Check that encoding, delimiter and columns apply to the files of a role.

    Raises:
        UserError: a setting does not apply to the files.
    """
    present = {form.name: form for form in formats}
    kinds = ("versions", "tokens", "messages", "prompt")
    stated = next((name for name in kinds if getattr(source, name) is not None), "")
    listed = source.companions or source.tokens or source.has_chats
    if listed and not all(form.lists for form in present.values()):
        lists = ", ".join(name for name, form in FORMATS.items() if form.lists)
        fault = f": a column of lists is read of {lists}, and these are {', '.join(sorted(present))}"
        raise SettingError(key, f".{stated}{fault}")
    if source.scores and (whole := [name for name, form in present.items() if form.unit in ("file", "sample")]):
        raise SettingError(key, f".scores are columns of a table, and {', '.join(whole)} files have none")
    if source.template is not None and (whole := [name for name, form in present.items() if form.unit == "file"]):
        raise SettingError(key, f".template names columns, and {', '.join(whole)} files have none")
    if source.window and (whole := [name for name, form in present.items() if form.unit == "file"]):
        fault = f".versions: the rows of a file are permuted, and {', '.join(whole)} files hold one text"
        raise SettingError(key, fault)
    if source.split is not None and (others := [name for name, form in present.items() if not form.has_splits]):
        raise SettingError(
            key,
            f": split applies to saved datasets and those of the hub, and these are {', '.join(sorted(others))}; leave "
            "it out, and name the files of the split as path",
        )
    for name, files in _APPLY.items():
        if getattr(source, name) != getattr(PLAIN, name) and not any(
            name in form.settings for form in present.values()
        ):
            fault = f": {name} applies to {files}, and these are {', '.join(sorted(present))}; leave it out"
            raise SettingError(key, fault)


@lru_cache(maxsize=1024)
def measure_extent(entry: InputFile) -> Extent:
    """The extent of an input: counted if its metadata contain it or it is small; else estimated.

    Raises:
        UserError: the file is damaged.
    """
    estimate = format_named(entry.format).estimate
    if entry.rows is not None or estimate is None:
        return Extent(entry.rows or 0, True, entry.size)
    try:
        return estimate(entry)
    except (OSError, EOFError, pa.ArrowException, csv.Error) as error:
        raise UserError(f"{entry.name} is damaged: {error_line(error)}") from None
