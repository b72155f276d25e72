"""From the paths of a configuration to input files, checked by their metadata and first rows."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import fsspec

from pipeline.config.corpus import LIMITS, CorpusConfig, LabelledConfig, LimitsConfig, Role, SourceConfig
from pipeline.config.paths import irregular_kind, origin_of, written
from pipeline.corpus.files import digest_of, is_local
from pipeline.corpus.formats import check_applies, dialect_of, format_named, format_of, suffixes_of
from pipeline.corpus.formats.base import Format
from pipeline.corpus.formats.picture import beside_pictures
from pipeline.corpus.formats.saved import HUB, SAVED, SAVED_MARKS
from pipeline.corpus.shard import InputFile
from pipeline.errors import UserError, nearest, not_opened

_EDGE = 1 << 16
Seen = TypeVar("Seen")
_SIDE_BY_SIDE = 16


PlannedInputs = Mapping[tuple[str, str], InputFile]
"""Inputs as they were planned earlier, of the same sources: by role and path."""


@dataclass(frozen=True, slots=True)
class _Role:
    """Whose documents are looked for."""

    name: Role
    source: SourceConfig
    key: str  # in the configuration
    limits: LimitsConfig
    known: PlannedInputs


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
        wanted = _Role(role, source, key, limits, known or {})
        hub = source.dataset
        entries = [_dataset(HUB, wanted, hub, hub)] if hub else _local_inputs(wanted)
        if not any((entry.rows is None and entry.size > 0) or entry.rows for entry in entries):
            where = hub or ", ".join(map(written, source.paths))
            raise UserError(f"{key} holds no documents: {where}")
        forms = [format_named(entry.format) for entry in entries]
        if isinstance(source, LabelledConfig) and any(_is_document(form, pictures=False) for form in forms):
            raise UserError(
                f"{key}: .txt files have no column {source.label!r}; give corpus.seen and corpus.unseen instead"
            )
        check_applies(key, source, forms)
        for entry, form in zip(entries, forms, strict=True):
            dialect = dialect_of(form, source.dialect)
            inputs.append(replace(entry, dialect=dialect, stamp=entry.stamp or stamp_of(entry)))
    return inputs


def stamp_of(entry: InputFile) -> str:
    """A digest of when the files of an input were written last, or of their tags in an object store, as they are now.

    Two that are equal say that nothing was written in between; of two that differ only reading tells.

    Raises:
        UserError: a file is gone.
    """
    form = format_named(entry.format)
    if not form.has_path:
        return ""
    try:
        fs, path = fsspec.core.url_to_fs(entry.path)
        if not is_local(fs):
            fs.invalidate_cache()
        files = [f"{path}/{name}" if name else path for name in entry.files]
        if not files:
            files = sorted(fs.find(path)) if form.is_folder else [path]
        files += beside_pictures(fs, files) if form.only_pictures else []  # captions may be among them
        return digest_of(*(_written_at(fs, file) for file in files))
    except OSError as error:
        raise UserError(f"cannot read {entry.name}: {' '.join(str(error).split())}") from None


def _written_at(fs: Any, path: str) -> str:
    if is_local(fs):
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


def _local_inputs(role: _Role) -> list[InputFile]:
    seen: set[str] = set()
    looks: list[Callable[[], InputFile]] = []
    local = True
    for pattern in role.source.paths:
        for name, info, fs in _expand(role.key, pattern):
            path, local = _address(fs, info["name"]), local and is_local(fs)
            if path in seen:
                continue
            seen.add(path)
            if os.path.isdir(path) if is_local(fs) else info["type"] == "directory":
                some = _readable(role.key, name, path, partial(_folder, role, name, path, fs))
            else:
                some = [partial(_file, role, name, info, fs)]
            looks += [partial(_readable, role.key, name, path, look) for look in some]
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
        local = is_local(fs)
        if not local:
            fs.invalidate_cache()
        magic = any(mark in full for mark in "*?[") and not (local and fs.exists(full))
        infos = [info for _, info in sorted(fs.glob(full, detail=True).items())] if magic else []
        infos = infos or _info_of(fs, full)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"{key}: cannot open {pattern}: {not_opened(error)}") from None
    if not infos:
        raise UserError(f"{key}: no file {pattern}{_neighbours(fs, full)}")
    for info in infos:
        path = _address(fs, info["name"])
        relative = local and not os.path.isabs(os.path.expanduser(pattern))
        yield os.path.relpath(path, base) if relative else path, info, fs


def _info_of(fs: Any, full: str) -> list[dict[str, Any]]:
    """What a file system says of one path, in one request; empty where nothing is there."""
    try:
        return [fs.info(full)] if not is_local(fs) or fs.exists(full) else []
    except FileNotFoundError:
        return []


def _address(fs: Any, path: str) -> str:
    """A path of a file system, as it is opened from anywhere."""
    return path if is_local(fs) else str(fs.unstrip_protocol(path)).rstrip("/")


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


def _folder(role: _Role, name: str, path: str, fs: Any) -> list[Callable[[], InputFile]]:
    """How to look at what a folder holds; its text files are one input."""
    root = fs._strip_protocol(path).rstrip("/")
    infos = dict(sorted(fs.find(root, detail=True).items()))
    if any(f"{root}/{mark}" in infos for mark in SAVED_MARKS):
        return [partial(_dataset, SAVED, role, name, path)]
    pictures = role.source.image is not None
    inside = ((path[len(root) + 1 :], info) for path, info in infos.items())
    files = {inner: (form, info) for inner, info in inside if (form := format_of(inner, pictures))}
    files = {inner: file for inner, file in files.items() if not f"/{inner}".count("/.")}
    for _, info in files.values():
        _check_kind(fs, info)
    if not files:
        raise UserError(f"{role.key}: folder {name} holds no file that ends in {suffixes_of(pictures)}")
    if any(form.only_pictures for form, _ in files.values()):  # what stands beside pictures is about them
        files = {inner: file for inner, file in files.items() if file[0].only_pictures}
    prefix = name.rstrip("/")
    looks: list[Callable[[], InputFile]] = []
    documents = {inner: info for inner, (form, info) in files.items() if _is_document(form, pictures)}
    if documents:
        form = files[next(iter(documents))][0]
        sizes = {inner: int(info["size"] or 0) for inner, info in documents.items()}
        digest = digest_of(*(f"{inner}:{size}" for inner, size in sizes.items()))
        marks = [] if is_local(fs) or pictures else [_mark_of(info) for info in documents.values()]
        stamp = digest_of(*marks) if all(marks) and marks else ""
        entry = InputFile(role.name, prefix, path, form.name, sum(sizes.values()), len(sizes), digest, tuple(sizes))
        looks.append(partial(replace, entry, stamp=stamp))
    for inner, (_, info) in files.items():
        if inner not in documents:
            looks.append(partial(_file, role, f"{prefix}/{inner}", info, fs))
    return looks


def _is_document(form: Format, pictures: bool) -> bool:
    """Whether every file of a format is a document of the kind that is wanted."""
    return form.unit == "file" and form.only_pictures == pictures


def _dataset(form: Format, role: _Role, name: str, path: str) -> InputFile:
    return form.inspect(InputFile(role.name, name, path, form.name, 0, None, ""), role.source, role.limits, b"")


def _check_kind(fs: Any, info: dict[str, Any]) -> None:
    """Check that a local path leads to a file. Raises OSError: to nothing, or to what cannot be read to an end."""
    if is_local(fs) and (kind := irregular_kind(info["name"])):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", info["name"])


def _file(role: _Role, name: str, info: dict[str, Any], fs: Any) -> InputFile:
    path = _address(fs, info["name"])
    _check_kind(fs, info)
    pictures = role.source.image is not None
    form = format_of(path, pictures)
    if form is None:
        raise UserError(f"{role.key}: {name} is none of {suffixes_of(pictures)} (or these with .gz or .zst)")
    size = int(info["size"] or 0)
    mark = "" if is_local(fs) else _mark_of(info)
    stamp = digest_of(mark) if mark else ""
    before = role.known.get((role.name, path))
    if before is not None and stamp and (before.name, before.size, before.stamp) == (name, size, stamp):
        return before
    head, tail = _ends(fs, info["name"], size)
    content = digest_of(str(size), hashlib.sha256(head + (tail if size > _EDGE else b"")).hexdigest())
    if form.unit == "file" and not _is_document(form, pictures):
        raise UserError(
            f"{role.key}: .txt files hold no pictures, and {name} is to have column {role.source.image!r} of them"
        )
    entry = InputFile(role.name, name, path, form.name, size, None, content, stamp="" if form.only_pictures else stamp)
    if size == 0 and form.estimate is not None:
        return replace(entry, rows=0)
    return form.inspect(entry, role.source, role.limits, tail)


def _ends(fs: Any, path: str, size: int) -> tuple[bytes, bytes]:
    """The first and the last bytes of a file."""
    if size <= 2 * _EDGE:
        data = fs.cat_file(path, start=0, end=size) if size else b""
        return data[:_EDGE], data[-_EDGE:]
    return fs.cat_file(path, start=0, end=_EDGE), fs.cat_file(path, start=size - _EDGE, end=size)
