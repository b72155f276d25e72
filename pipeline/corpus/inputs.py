"""From the paths of a configuration to input files, checked by their metadata and first rows."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.corpus import LIMITS, CorpusConfig, LabelledConfig, LimitsConfig, Role, SourceConfig
from pipeline.config.dialect import PLAIN, Dialect
from pipeline.config.paths import irregular_kind, origin_of, written
from pipeline.corpus.dialects import check_applies, columns_of
from pipeline.corpus.formats import (
    HUB_SPLIT,
    Format,
    compression_of,
    dialect_of,
    format_of,
    hub_dataset_info,
    open_saved_dataset,
    suffixes_of,
)
from pipeline.corpus.parquet import check_chunks, open_footer, text_bytes_of
from pipeline.corpus.picture_files import beside_pictures, is_picture, tar_columns
from pipeline.corpus.pictures import check_picture_column
from pipeline.errors import UserError, nearest

_EDGE = 1 << 16
Seen = TypeVar("Seen")
_SIDE_BY_SIDE = 16


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input as planned: a file, a saved dataset, a hub dataset's split, or one folder's text files."""

    role: Role
    name: str  # as the user wrote it; ids begin with it
    path: str  # what fsspec opens
    format: Format
    size: int  # bytes; 0 where unknown
    rows: int | None  # None where they are unknown before the file is read
    content: str  # digest of the size and of both ends of the file, to notice changes
    files: tuple[str, ...] = ()  # of a folder of text files
    text_bytes: int = 0  # of the text column, decompressed, where the metadata say
    stamp: str = ""  # digest of when its files were written last, as the file system says; empty of a dataset's name
    dialect: Dialect = PLAIN

    @property
    def splittable(self) -> bool:
        """Whether a shard may begin inside the file without reading what stands before it."""
        return self.format not in ("csv", "tar") and compression_of(self.path) is None


PlannedInputs = Mapping[tuple[str, str], InputFile]
"""Inputs as they were planned earlier, of the same sources: by role and path."""


def find_inputs(
    corpus: CorpusConfig, limits: LimitsConfig = LIMITS, known: PlannedInputs | None = None
) -> list[InputFile]:
    """The inputs of every role, their columns checked. Reads metadata and first rows only, within the limits.

    A file in an object store that is as `known` has it, by the size and the stamp in a listing, is not opened.

    Raises:
        UserError: a missing or unreadable file, an unknown format, a column that is not there, no documents.
    """
    inputs: list[InputFile] = []
    for role, source in corpus.roles():
        key = corpus.key(role)
        entries = _hub_input(role, source) if source.dataset else _local_inputs(role, source, key, limits, known or {})
        if not any((entry.rows is None and entry.size > 0) or entry.rows for entry in entries):
            where = source.dataset or ", ".join(map(written, source.paths))
            raise UserError(f"{key} holds no documents: {where}")
        if isinstance(source, LabelledConfig) and any(entry.format == "txt" for entry in entries):
            raise UserError(
                f"{key}: .txt files have no column {source.label!r}; give corpus.seen and corpus.unseen instead"
            )
        check_applies(key, source, (entry.format for entry in entries))
        for entry in entries:
            dialect = dialect_of(entry.format, source.dialect)
            inputs.append(replace(entry, dialect=dialect, stamp=entry.stamp or stamp_of(entry)))
    return inputs


def stamp_of(entry: InputFile) -> str:
    """A digest of when the files of an input were written last, or of their tags in an object store, as they are now.

    Two that are equal say that nothing was written in between; of two that differ only reading tells.

    Raises:
        UserError: a file is gone.
    """
    if entry.format == "hub":
        return ""
    try:
        fs, path = fsspec.core.url_to_fs(entry.path)
        if not _is_local(fs):
            fs.invalidate_cache()
        files = [f"{path}/{name}" if name else path for name in entry.files]
        if not files:
            files = sorted(fs.find(path)) if entry.format == "dataset" else [path]
        files += beside_pictures(fs, files) if entry.format == "picture" else []  # captions may be among them
        return _digest(*(_written_at(fs, file) for file in files))
    except OSError as error:
        raise UserError(f"cannot read {entry.name}: {' '.join(str(error).split())}") from None


def _written_at(fs: Any, path: str) -> str:
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        state = os.stat(path)  # of what a link leads to, as it is what is read
        return f"{state.st_mtime_ns} {state.st_ctime_ns}"
    return _mark_of(fs.info(path))


def _mark_of(info: dict[str, Any]) -> str:
    """What a listing of an object store says of when a file was written; empty where it does not."""
    for keys in (("ETag", "etag", "md5Hash"), ("LastModified", "last_modified", "mtime", "created")):
        values = [str(info[key]).strip('"') for key in keys if info.get(key) is not None]
        if values:
            return " ".join(values)
    return ""


def _local_inputs(
    role: Role, source: SourceConfig, key: str, limits: LimitsConfig, known: PlannedInputs
) -> list[InputFile]:
    seen: set[str] = set()
    looks: list[Callable[[], InputFile]] = []
    local = True
    for pattern in source.paths:
        for name, info, fs in _expand(key, pattern):
            path, local = _address(fs, info["name"]), local and _is_local(fs)
            if path in seen:
                continue
            seen.add(path)
            if os.path.isdir(path) if _is_local(fs) else info["type"] == "directory":
                inside = partial(_folder, role, source, key, name, path, fs, limits, known)
                looks += [partial(_readable, key, name, path, look) for look in _readable(key, name, path, inside)]
            else:
                look = partial(_file, role, source, key, name, info, fs, limits, known)
                looks.append(partial(_readable, key, name, path, look))
    if local:
        return [look() for look in looks]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:  # each waits for its requests
        return list(pool.map(lambda look: look(), looks))


def _readable(key: str, name: str, path: str, look: Callable[[], Seen]) -> Seen:
    """What is seen at a place.

    Raises:
        UserError: it cannot be read; says why.
    """
    try:
        return look()
    except OSError as error:
        dangling = isinstance(error, FileNotFoundError) and os.path.islink(error.filename or path)
        reason = "a link to nothing" if dangling else error.strerror or " ".join(str(error).split())
        raise UserError(f"{key}: cannot read {error.filename or name}: {reason}") from None


def _expand(key: str, pattern: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(name as the user would write it, what its file system says of it, file system) of every match of a path."""
    base, pattern = origin_of(pattern), written(pattern)
    try:
        fs, full = fsspec.core.url_to_fs(_opened(base, pattern))
        local = _is_local(fs)
        if not local:
            fs.invalidate_cache()
        magic = any(mark in full for mark in "*?[") and not (local and fs.exists(full))
        infos = [info for _, info in sorted(fs.glob(full, detail=True).items())] if magic else []
        infos = infos or _info_of(fs, full)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"{key}: cannot open {pattern}: {' '.join(str(error).split())}") from None
    if not infos:
        raise UserError(f"{key}: no file {pattern}{_neighbours(fs, full)}")
    for info in infos:
        path = _address(fs, info["name"])
        relative = local and not os.path.isabs(os.path.expanduser(pattern))
        yield os.path.relpath(path, base) if relative else path, info, fs


def _info_of(fs: Any, full: str) -> list[dict[str, Any]]:
    """What a file system says of one path, in one request; empty where nothing is there."""
    try:
        return [fs.info(full)] if not _is_local(fs) or fs.exists(full) else []
    except FileNotFoundError:
        return []


def _is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def _address(fs: Any, path: str) -> str:
    """A path of a file system, as it is opened from anywhere."""
    return path if _is_local(fs) else str(fs.unstrip_protocol(path)).rstrip("/")


def _opened(base: str | None, pattern: str) -> str:
    if "://" in pattern:
        return pattern
    path = os.path.expanduser(pattern)
    return path if base is None else os.path.normpath(os.path.join(base, path))


def _neighbours(fs: Any, full: str) -> str:
    folder, base = full.rstrip("/").rsplit("/", 1) if "/" in full else ("", full)
    try:
        names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(folder, detail=False))[:20]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return f"; no folder {folder} either"
    except OSError as error:  # of a network
        return f": {' '.join(str(error).split())}"
    return f"; {nearest(base, names, 'the folder holds')}" if names else "; the folder is empty"


def _folder(
    role: Role,
    source: SourceConfig,
    key: str,
    name: str,
    path: str,
    fs: Any,
    limits: LimitsConfig,
    known: PlannedInputs,
) -> list[Callable[[], InputFile]]:
    """How to look at what a folder holds; its text files are one input."""
    root = fs._strip_protocol(path).rstrip("/")
    infos = dict(sorted(fs.find(root, detail=True).items()))
    if f"{root}/dataset_info.json" in infos or f"{root}/dataset_dict.json" in infos:
        return [partial(_saved_dataset, role, source, name, path)]
    pictures = source.image is not None
    files = {file[len(root) + 1 :]: info for file, info in infos.items() if format_of(file, pictures)}
    files = {inner: info for inner, info in files.items() if not f"/{inner}".count("/.")}
    for info in files.values():
        _check_kind(fs, info)
    if not files:
        raise UserError(f"{key}: folder {name} holds no file that ends in {suffixes_of(pictures)}")
    prefix = name.rstrip("/")
    looks: list[Callable[[], InputFile]] = []
    kind: Format = "picture" if pictures else "txt"
    if pictures and any(map(is_picture, files)):  # what stands beside pictures is about them
        files = {inner: info for inner, info in files.items() if is_picture(inner)}
    texts = {inner: int(info["size"] or 0) for inner, info in files.items() if format_of(inner, pictures) == kind}
    if texts:
        digest, size = _digest(*(f"{inner}:{size}" for inner, size in texts.items())), sum(texts.values())
        marks = [] if _is_local(fs) or pictures else [_mark_of(files[inner]) for inner in texts]
        entry = partial(InputFile, role, prefix, path, kind, size, len(texts), digest, tuple(texts))
        looks.append(partial(entry, stamp=_digest(*marks) if all(marks) and marks else ""))
    for inner, info in files.items():
        if inner not in texts:
            looks.append(partial(_file, role, source, key, f"{prefix}/{inner}", info, fs, limits, known))
    return looks


def _check_kind(fs: Any, info: dict[str, Any]) -> None:
    """Check that a local path leads to a file. Raises OSError: to nothing, or to what cannot be read to an end."""
    if _is_local(fs) and (kind := irregular_kind(info["name"])):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", info["name"])


def _file(
    role: Role,
    source: SourceConfig,
    key: str,
    name: str,
    info: dict[str, Any],
    fs: Any,
    limits: LimitsConfig,
    known: PlannedInputs,
) -> InputFile:
    path = _address(fs, info["name"])
    _check_kind(fs, info)
    pictures = source.image is not None
    form = format_of(path, pictures)
    if form is None:
        raise UserError(f"{key}: {name} is none of {suffixes_of(pictures)} (or these with .gz or .zst)")
    size = int(info["size"] or 0)
    mark = "" if _is_local(fs) else _mark_of(info)
    stamp = _digest(mark) if mark else ""
    before = known.get((role, path))
    if before is not None and stamp and (before.name, before.size, before.stamp) == (name, size, stamp):
        return before
    head, tail = _ends(fs, info["name"], size)
    content = _digest(str(size), hashlib.sha256(head + (tail if size > _EDGE else b"")).hexdigest())
    rows: int | None = None
    text_bytes = 0
    if form == "parquet":
        footer = open_footer(path, name, tail)
        rows = _check_parquet(source, name, footer, size or sys.maxsize)  # 0: the server does not say
        text_bytes = text_bytes_of(footer.metadata, source.content)
    elif form == "txt":
        if pictures:
            raise UserError(
                f"{key}: .txt files hold no pictures, and {name} is to have column {source.image!r} of them"
            )
        return InputFile(role, name, path, "txt", size, 1, content, ("",), stamp=stamp)
    elif form == "picture":
        return InputFile(role, name, path, "picture", size, 1, content, ("",))
    elif size == 0:
        rows = 0
    elif form == "tar":
        _check_columns(source, name, tar_columns(path, name, limits.document_bytes))
    else:
        _check_columns(source, name, columns_of(form, path, name, source, limits))
    return InputFile(role, name, path, form, size, rows, content, text_bytes=text_bytes, stamp=stamp)


def _check_parquet(source: SourceConfig, name: str, footer: pq.ParquetFile, size: int) -> int:
    try:
        check_chunks(footer.metadata, source.columns, size)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is damaged: {' '.join(str(error).split())}") from None
    schema, rows = footer.schema_arrow, _rows_of_footer(footer.metadata, source.columns, name)
    _check_columns(source, name, schema.names)
    if source.image is not None:
        check_picture_column(schema, source.image, name)
        return rows
    kind = schema.field(source.text).type
    stringlike = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(check(kind) for check in stringlike) and str(kind) != "string_view":
        raise UserError(f"column {source.text!r} in {name} holds {kind}, not text; columns: {', '.join(schema.names)}")
    return rows


def _rows_of_footer(metadata: pq.FileMetaData, columns: Sequence[str], name: str) -> int:
    """The rows of a Parquet file. Where its footer says fewer in one place than in another, the rest would be lost.

    Raises:
        UserError: its footer contradicts itself.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    total = sum(group.num_rows for group in groups)
    if total != metadata.num_rows:
        raise UserError(
            f"{name} is damaged: its footer says {metadata.num_rows} rows, and its row groups have {total} in all"
        )
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    for index in (paths.index(column) for column in columns if column in paths):
        for number, group in enumerate(groups):
            if (values := group.column(index).num_values) > group.num_rows:
                raise UserError(
                    f"{name} is damaged: its footer says {group.num_rows} rows of row group {number}, and column "
                    f"{paths[index]!r} has {values} values there"
                )
    return int(total)


def _check_columns(source: SourceConfig, name: str, columns: Sequence[str]) -> None:
    for column in source.columns:
        if column not in columns:
            raise UserError(f"no column {column!r} in {name}; {nearest(column, columns, 'columns')}")
        if (times := list(columns).count(column)) > 1:
            raise UserError(f"column {column!r} stands {times} times in {name}: rename all but one, or leave them out")


def _saved_dataset(role: Role, source: SourceConfig, name: str, path: str) -> InputFile:
    dataset = open_saved_dataset(path, source.split, name)
    _check_columns(source, name, dataset.column_names)
    digest = _digest(str(dataset._fingerprint), str(dataset.num_rows))
    return InputFile(
        role,
        name,
        path,
        "dataset",
        int(dataset.dataset_size or dataset.data.nbytes),
        dataset.num_rows,
        digest,
    )


def _hub_input(role: Role, source: SourceConfig) -> list[InputFile]:
    assert source.dataset is not None
    split = source.split or HUB_SPLIT
    info = hub_dataset_info(source.dataset, source.subset, split)
    _check_columns(source, source.dataset, info.columns)
    digest = _digest(source.dataset, str(source.subset), split, str(info.rows), str(info.size))
    return [InputFile(role, source.dataset, source.dataset, "hub", info.size, info.rows, digest)]


def _ends(fs: Any, path: str, size: int) -> tuple[bytes, bytes]:
    """The first and the last bytes of a file."""
    if size <= 2 * _EDGE:
        data = fs.cat_file(path, start=0, end=size) if size else b""
        return data[:_EDGE], data[-_EDGE:]
    return fs.cat_file(path, start=0, end=_EDGE), fs.cat_file(path, start=size - _EDGE, end=size)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
