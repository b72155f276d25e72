"""Input files from the paths of a configuration, and their shards, from metadata and first rows only."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import fsspec
import pyarrow as pa

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import (
    LIMITS,
    CorpusConfig,
    LabelledConfig,
    LimitsConfig,
    Role,
    SourceConfig,
    TransformConfig,
)
from pipeline.config.paths import irregular_kind, path_origin, written
from pipeline.corpus.documents import check_labels, read_labels, read_shard
from pipeline.corpus.draw_features import names_answers
from pipeline.corpus.formats import (
    applicable_dialect,
    by_bytes,
    check_applies,
    content_format,
    document_suffixes,
    format_named,
    format_remedy,
    measure_extent,
    remedy_by_content,
    retired_suffix,
    suffix_format,
)
from pipeline.corpus.formats.base import Format, encodable
from pipeline.corpus.formats.jsonl import lines
from pipeline.corpus.formats.picture import beside_pictures
from pipeline.corpus.formats.saved import HUB, SAVED, SAVED_MARKS
from pipeline.corpus.input_files import is_local, line_digest
from pipeline.corpus.links import (
    check_links,
    files_behind,
    is_special,
    linked_folders,
    links_on_the_way,
    matches_behind,
)
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.errors import SettingError, UserError, error_line, nearest, not_opened

_EDGE = 1 << 16
Seen = TypeVar("Seen")
_SIDE_BY_SIDE = 16


@dataclass(frozen=True, slots=True)
class _Role:
    """A role and the source of its documents."""

    name: Role
    source: SourceConfig
    key: str  # setting in the configuration
    limits: LimitsConfig


def find_inputs(corpus: CorpusConfig, limits: LimitsConfig = LIMITS) -> list[InputFile]:
    """The inputs of every role with checked columns. Reads only metadata and first rows, within the limits.

    Raises:
        UserError: a missing or unreadable file, an unknown format, a missing column, or no documents.
    """
    inputs: list[InputFile] = []
    for role, source in corpus.roles():
        key = corpus.key(role)
        wanted = _Role(role, source, key, limits)
        hub = source.dataset
        entries = [_dataset(HUB, wanted, hub, hub)] if hub else _local_inputs(wanted)
        if not any((entry.rows is None and entry.size > 0) or entry.rows for entry in entries):
            where = hub or ", ".join(map(written, source.paths))
            raise SettingError(key, f" holds no documents: {where}")
        forms = [format_named(entry.format) for entry in entries]
        entries = [replace(entry, stamp=entry.stamp or make_stamp(entry)) for entry in entries]
        if isinstance(source, LabelledConfig) and any(_is_document(form, pictures=False) for form in forms):
            fault = f": .txt files have no column {source.label!r}; give corpus.seen and corpus.unseen instead"
            raise SettingError(key, fault)
        check_applies(key, source, forms)
        inputs += entries
    return inputs


def make_stamp(entry: InputFile) -> str:
    """A digest of the current modification times of an input's files, or of their tags in an object store.

    Equal digests mean that nothing was written in between; if they differ, the content must be compared.

    Raises:
        UserError: a file is missing.
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
        return line_digest(*(_written_at(fs, file) for file in files))
    except OSError as error:
        raise UserError(f"cannot read {entry.name}: {error_line(error)}") from None


def _written_at(fs: Any, path: str) -> str:
    if is_local(fs):
        state = os.stat(path)  # follows links, as readers do
        return f"{state.st_mtime_ns} {state.st_ctime_ns}"
    return _listed_version(fs.info(path))


def _listed_version(info: dict[str, Any]) -> str:
    """The version of a file from a listing of an object store; empty if the listing has none."""
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
        for name, info, fs in _expand(role.key, pattern, role.source.follow_links):
            name, path, local = encodable(name), _address(fs, info["name"]), local and is_local(fs)
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
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:  # each thread waits for its requests
        return list(pool.map(lambda look: look(), looks))


def _readable(key: str, name: str, path: str, look: Callable[[], Seen]) -> Seen:
    """The result of `look` for a path.

    Raises:
        UserError: the path cannot be read, with the reason.
    """
    try:
        return look()
    except OSError as error:
        dangling = isinstance(error, FileNotFoundError) and os.path.islink(error.filename or path)
        reason = "a link to nothing" if dangling else error.strerror or error_line(error)
        raise SettingError(key, f": cannot read {error.filename or name}: {reason}") from None


def _expand(key: str, path: str, follow: bool) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(name as in a configuration, information from the file system, file system) of every match of a path."""
    base, pattern = path_origin(path), written(path)
    try:
        fs, full = fsspec.core.url_to_fs(_opened(base, pattern))
        local = is_local(fs)
        if not local:
            fs.invalidate_cache()
        magic = any(mark in full for mark in "*?[") and not (local and fs.exists(full))
        infos = (_matching(key, fs, full, follow) if magic else []) or _path_info(fs, full)
    except (ImportError, ValueError, OSError) as error:
        raise SettingError(key, f": cannot open {pattern}: {not_opened(error)}") from None
    if not infos:
        raise SettingError(key, f": no file {pattern}{_neighbours(fs, full)}")
    for info in infos:
        path = _address(fs, info["name"])
        relative = local and not os.path.isabs(os.path.expanduser(pattern))
        yield os.path.relpath(path, base) if relative else path, info, fs


def _matching(key: str, fs: Any, full: str, follow: bool) -> list[dict[str, Any]]:
    """The information of a file system about the paths that match a pattern, in order.

    Raises:
        UserError: links lead out of the folder in which a local pattern looks, and are not to be followed.
    """
    infos: dict[str, dict[str, Any]] = fs.glob(full, detail=True)
    if is_local(fs):
        folder = full[: re.search(r"[*?\[]", full).start()].rpartition("/")[0] or "/"  # type: ignore[union-attr]
        folders = links_on_the_way(full, folder)
        links = [path for path, info in infos.items() if info.get("islink")]
        check_links(key, written(folder), folder, sorted({*links, *folders}), follow)
        inside = [path for link in folders for path in matches_behind(full, link)]
        check_links(key, written(folder), folder, inside, follow)
        infos |= {path: fs.info(path) for path in inside}
    return [info for _, info in sorted(infos.items())]


def _path_info(fs: Any, full: str) -> list[dict[str, Any]]:
    """The information of a file system about one path, in one request; empty if the path does not exist."""
    try:
        return [fs.info(full)] if not is_local(fs) or fs.exists(full) else []
    except FileNotFoundError:
        return []


def _address(fs: Any, path: str) -> str:
    """A path of a file system that is independent of the working directory."""
    return path if is_local(fs) else str(fs.unstrip_protocol(path)).rstrip("/")


def _opened(base: str | None, pattern: str) -> str:
    if "://" in pattern:
        return pattern
    path = os.path.expanduser(pattern)
    return path if base is None else os.path.normpath(os.path.join(base, path))


def _neighbours(fs: Any, full: str) -> str:
    folder, base = full.rstrip("/").rsplit("/", 1) if "/" in full else ("", full)
    try:
        names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(folder, detail=False))
        hidden = [name for name in names if name.startswith(".") and not base.startswith(".")]
        names = [name for name in names if name not in hidden][:20]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return f"; no folder {folder} either"
    except OSError as error:  # network error
        return f": {error_line(error)}"
    if not names:
        return "; the folder holds hidden files alone" if hidden else "; the folder is empty"
    return f"; {nearest(base, names, 'the folder holds')}"


def _folder(role: _Role, name: str, path: str, fs: Any) -> list[Callable[[], InputFile]]:
    """Functions that inspect the inputs in a folder; its text files are one input."""
    root = fs._strip_protocol(path).rstrip("/")
    pictures = role.source.image is not None
    infos = _listed(role, name, root, fs)
    if any(f"{root}/{mark}" in infos for mark in SAVED_MARKS):
        return [partial(_dataset, SAVED, role, name, path)]
    inside = [(path[len(root) + 1 :], info) for path, info in infos.items()]
    files = {inner: (form, info) for inner, info in inside if (form := suffix_format(inner, pictures))}
    files = {inner: file for inner, file in files.items() if not _is_hidden(inner)}
    for _, info in files.values():
        _check_kind(fs, info)
    if not any(form.only_pictures for form, _ in files.values()):
        for inner, _ in inside:
            if (line := retired_suffix(inner)) and not _is_hidden(inner):
                raise SettingError(role.key, f": {name.rstrip('/')}/{inner}: {line}")
    if not files:
        raise SettingError(role.key, f": folder {name} holds no file that ends in {document_suffixes(pictures)}")
    if any(form.only_pictures for form, _ in files.values()):  # other files describe the pictures
        files = {inner: file for inner, file in files.items() if file[0].only_pictures}
    prefix = name.rstrip("/")
    looks: list[Callable[[], InputFile]] = []
    documents = {inner: info for inner, (form, info) in files.items() if _is_document(form, pictures)}
    if documents:
        form = files[next(iter(documents))][0]
        sizes = {inner: int(info["size"] or 0) for inner, info in documents.items()}
        digest = line_digest(*(f"{inner}:{size}" for inner, size in sizes.items()))
        marks = [] if is_local(fs) or pictures else [_listed_version(info) for info in documents.values()]
        stamp = line_digest(*marks) if all(marks) and marks else ""
        entry = InputFile(role.name, prefix, path, form.name, sum(sizes.values()), len(sizes), digest, tuple(sizes))
        looks.append(partial(replace, entry, stamp=stamp, dialect=applicable_dialect(form, role.source.dialect)))
    for inner, (_, info) in files.items():
        if inner not in documents:
            looks.append(partial(_file, role, encodable(f"{prefix}/{inner}"), info, fs))
    return looks


def _listed(role: _Role, name: str, root: str, fs: Any) -> dict[str, dict[str, Any]]:
    """The files below a folder by path, in order, also behind links to folders if these are followed.

    Raises:
        UserError: links lead out of the folder, and are not to be followed.
    """
    infos: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    if is_local(fs):
        follow = role.source.follow_links
        folders = [path for path in linked_folders(infos.values(), root) if not _is_hidden(path[len(root) :])]
        saved = any(f"{root}/{mark}" in infos for mark in SAVED_MARKS)
        links = [
            path for path, info in infos.items() if info.get("islink") and (saved or _is_read(role, path[len(root) :]))
        ]
        check_links(role.key, name, root, sorted({*links, *folders}), follow)
        for path in (path for folder in folders for path in files_behind(folder)):
            if _is_read(role, path[len(root) :]):
                check_links(role.key, name, root, [path], follow)
                infos[path] = fs.info(path)
    return dict(sorted(infos.items()))


def _is_read(role: _Role, inner: str) -> bool:
    """Whether a path in a folder is that of documents, or of the captions of pictures."""
    captions = role.source.caption is not None and inner.endswith(f".{role.source.caption}")
    return (captions or suffix_format(inner, role.source.image is not None) is not None) and not _is_hidden(inner)


def _is_hidden(inner: str) -> bool:
    """Whether a path in a folder has a part that starts with a dot."""
    return "/." in f"/{inner}"


def _is_document(form: Format, pictures: bool) -> bool:
    """Whether every file of a format is a document of the requested type."""
    return form.unit == "file" and form.only_pictures == pictures


def _dataset(form: Format, role: _Role, name: str, path: str) -> InputFile:
    return form.inspect(InputFile(role.name, name, path, form.name, 0, None, ""), role.source, role.limits, b"")


def _check_kind(fs: Any, info: dict[str, Any]) -> None:
    """Check that a local path is a file. Raises OSError: it does not exist, or it may block a reader."""
    if not is_local(fs):
        return
    if kind := irregular_kind(info["name"]):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", info["name"])
    if is_special(info["name"], ("/proc", "/sys")):
        real = os.path.realpath(info["name"])
        raise OSError(errno.EINVAL, f"it leads to {real}, which the system makes", info["name"])


def _file(role: _Role, name: str, info: dict[str, Any], fs: Any) -> InputFile:
    path = _address(fs, info["name"])
    _check_kind(fs, info)
    pictures = role.source.image is not None
    form = suffix_format(path, pictures)
    if line := retired_suffix(path):
        raise SettingError(role.key, f": {name}: {line}")
    if form is None:
        remedy = format_remedy(path)
        hint = f"; {remedy}" if remedy else ""
        raise SettingError(role.key, f": {name} is none of {document_suffixes(pictures)}{hint}")
    size = int(info["size"] or 0)
    mark = "" if is_local(fs) else _listed_version(info)
    stamp = line_digest(mark) if mark else ""
    form = content_format(form, path)
    head, tail = _ends(fs, info["name"], size)
    content = line_digest(str(size), hashlib.sha256(head + (tail if size > _EDGE else b"")).hexdigest())
    if form.unit == "file" and not _is_document(form, pictures):
        fault = f": .txt files hold no pictures, and {name} is to have column {role.source.image!r} of them"
        raise SettingError(role.key, fault)
    stamp = "" if form.only_pictures else stamp
    dialect = applicable_dialect(form, role.source.dialect)
    entry = InputFile(role.name, name, path, form.name, size, None, content, stamp=stamp, dialect=dialect)
    if size == 0 and form.estimate is not None:
        return replace(entry, rows=0)
    try:
        return form.inspect(entry, role.source, role.limits, tail)
    except UserError:
        known = None if form.only_pictures else remedy_by_content(path, head)
        if known is None:
            raise
        raise SettingError(role.key, f": {name}: {known}") from None


def _ends(fs: Any, path: str, size: int) -> tuple[bytes, bytes]:
    """The first and the last bytes of a file."""
    if size <= 2 * _EDGE:
        data = fs.cat_file(path, start=0, end=size) if size else b""
        return data[:_EDGE], data[-_EDGE:]
    return fs.cat_file(path, start=0, end=_EDGE), fs.cat_file(path, start=size - _EDGE, end=size)


DRAWN_TYPES = {
    "id": pa.string(),
    "versions": pa.list_(pa.string()),
    "index": pa.int32(),
    "salt": pa.binary(32),
}
"""Columns of the private file of `seenset mark`, which draws each published version by a key."""

SHARDS = 32
_FIRST = 100  # documents of which some must have precomputed scores
_BLOCK = 1 << 18  # bytes per read when lines are counted
LEAST_BYTES, MOST_BYTES = 1 << 11, 1 << 20
"""Limits of the default size of a shard, which cuts a corpus into about SHARDS shards."""

PICTURE_BYTES = 1 << 18, 1 << 26
"""The limits for pictures: one takes as long as some hundred words, and a hundred times their bytes."""


def check_limit(limit: int | None) -> None:
    """Check the maximum number of documents, before an input is listed. Raises UserError: it is below 1."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, got {limit}")


def plan_shards(
    corpus: CorpusConfig,
    inputs: Sequence[InputFile],
    resources: ResourcesConfig,
    transform: TransformConfig | None = None,
    limit: int | None = None,
    limits: LimitsConfig = LIMITS,
) -> list[Shard]:
    """Split inputs into shards.

    Args:
        corpus: sources of every role.
        inputs: result of `find_inputs`.
        resources: a shard has about `shard_bytes` and at most `shard_documents`.
        transform: changes of every text.
        limit: number of first rows of each role that are kept.
        limits: limits of documents, and of files that cannot be split.

    Raises:
        UserError: a limit below 1, or invalid labels.
    """
    check_limit(limit)
    if (labelled := corpus.labelled) is not None:
        files = [entry for entry in inputs if entry.role == "unseen"]  # each is also an input of role seen
        labels = (label for entry in files for label in read_labels(whole_shard(entry, labelled, transform, limits)))
        check_labels(labels, labelled.label, ", ".join(entry.name for entry in files))
    if corpus.audit is not None and corpus.audit.window and limit is not None:  # the limit counts documents, not rows
        limit *= corpus.audit.window
    if corpus.audit is not None and corpus.audit.companions:  # the result depends on every index
        for entry in inputs:
            whole = whole_shard(entry, corpus.audit, transform, limits)
            for _ in read_shard(replace(whole, no_features=True)):
                pass
    for entry, source in ((entry, corpus.source(entry.role)) for entry in inputs):
        if source is not None and source.scores:
            _check_scores(whole_shard(entry, source, transform, limits))
    shards: list[Shard] = []
    if corpus.has_versions:  # a file may hold many in few bytes
        inputs = [replace(entry, size=max(entry.size, entry.text_bytes)) for entry in inputs]
    shard_bytes = _shard_bytes(inputs, resources, limit, corpus.has_pictures)
    for role, source in corpus.roles():
        parts = (
            shard
            for entry in inputs
            if entry.role == role
            for shard in _split_input(
                entry, _drawn(whole_shard(entry, source, transform, limits)), shard_bytes, resources.shard_documents
            )
        )
        kept = parts if limit is None else _first_rows(parts, limit)
        shards += (replace(shard, id=f"{role}-{number:06d}") for number, shard in enumerate(kept))
    return shards


def _drawn(whole: Shard) -> Shard:
    """The shard of an input with what the check of draws reads: columns of right answers, or who drew its versions."""
    form = format_named(whole.format)
    if whole.template and not whole.item and form.columns is not None:
        other = {whole.text, whole.id_column, whole.group_column, *whole.companions}
        columns = dict.fromkeys([*form.columns(whole), *_beside(whole)])
        return replace(whole, answers=tuple(name for name in columns if name not in other and names_answers(name)))
    if whole.companions and not whole.template and form.has_path and form.export.schema is not None:
        types = {field.name: field.type for field in form.export.schema(whole)}
        return replace(whole, no_features=DRAWN_TYPES.items() <= types.items())
    return whole


def _beside(whole: Shard) -> list[str]:
    """The fields beside the one of the options, if that is a field of an object, as far as a schema names them."""
    schema, (parent, dot, _) = format_named(whole.format).export.schema, whole.text.rpartition(".")
    if not dot or schema is None:
        return []
    kind: Any = pa.struct(list(schema(whole)))
    for part in parent.split("."):
        place = kind.get_field_index(part) if pa.types.is_struct(kind) else -1
        if place < 0:
            return []
        kind = kind.field(place).type
    return [f"{parent}.{field.name}" for field in kind] if pa.types.is_struct(kind) else []


def _check_scores(whole: Shard) -> None:
    """Check that some of the first documents of an input have scores.

    Raises:
        UserError: none of them has scores.
    """
    first = list(itertools.islice(read_shard(whole), _FIRST))
    problems = [
        one.problem[1] for one in first if one.problem is not None and one.problem[0] == Reason.NON_FINITE_SCORE
    ]
    if first and len(problems) == len(first):
        raise UserError(f"{whole.name}: none of the first {len(first)} documents has a score: {problems[0]}")


def number_rows(shards: Sequence[Shard]) -> list[Shard]:
    """Set the first row of byte ranges by counting the lines before them; each byte is read once.

    Ranges in which no line starts, such as inside a long line, are omitted: they contain no documents.
    """
    numbered: list[Shard] = []
    for (_, path), group in itertools.groupby(shards, key=lambda shard: (shard.role, shard.path)):
        of_file = list(group)
        counts = _lines_before(path, [shard.start for shard in of_file if by_bytes(shard) and shard.start > 0])
        for position, shard in enumerate(of_file):
            if by_bytes(shard) and shard.start > 0:
                first_row = next(counts)
                if position and numbered[-1].first_row == first_row:
                    numbered.pop()
                shard = replace(shard, first_row=first_row)
            numbered.append(shard)
    return numbered


def _shard_bytes(inputs: Sequence[InputFile], resources: ResourcesConfig, limit: int | None, pictures: bool) -> int:
    """Text bytes of a shard: as configured, or small enough that a small corpus also has shards for every worker.

    The default depends only on the inputs, never on the machine: scores depend on the documents of a batch.
    """
    if resources.shard_bytes != "auto":
        return resources.shard_bytes
    total = float(sum(entry.size for entry in inputs))
    if limit is not None:
        rows = sum(measure_extent(entry).rows for entry in inputs)
        total *= min(1.0, limit * len({entry.role for entry in inputs}) / max(1, rows))
    step = 1 << max(0, int(total / SHARDS).bit_length() - 1)  # a power of 2: small changes of the corpus keep the cuts
    least, most = PICTURE_BYTES if pictures else (LEAST_BYTES, MOST_BYTES)
    return min(most, max(least, step))


def _split_input(entry: InputFile, whole: Shard, shard_bytes: int, shard_documents: int) -> Iterator[Shard]:
    if entry.rows == 0:
        return
    if whole.window:  # byte ranges would depend on the order of the rows
        yield replace(whole, stop=entry.size) if by_bytes(whole) else whole
        return
    if ranges := by_bytes(whole):
        step, total = shard_bytes, entry.size
    elif entry.rows is None:  # the file can only be read from its start
        yield whole
        return
    else:
        total = entry.rows
        step = max(1, min(shard_documents, shard_bytes * total // max(1, entry.text_bytes or entry.size)))
    # the end of one is the start of the next: both share one integer in memory
    for start, stop in itertools.pairwise(itertools.chain(range(0, total, step), [total])):
        yield replace(whole, start=start, stop=stop, first_row=0 if ranges else start, files=entry.files[start:stop])


def _first_rows(shards: Iterable[Shard], limit: int) -> Iterator[Shard]:
    """The shards that hold the first rows of a role; the last one is shortened."""
    for shard in shards:
        shard, rows = _limited(shard, limit)
        if rows:
            yield shard
        limit -= rows
        if limit == 0:
            return


def _limited(shard: Shard, remaining: int) -> tuple[Shard, int]:
    """The shard shortened to at most `remaining` rows, and its number of rows."""
    if by_bytes(shard) and shard.label_column is None:
        rows = sum(1 for _ in lines(replace(shard, max_rows=remaining)))
    elif shard.stop is None or shard.label_column is not None:
        rows = sum(1 for _ in read_shard(replace(shard, max_rows=remaining, window=0)))
    else:
        rows = min(remaining, shard.stop - shard.start)
        return replace(shard, stop=shard.start + rows, files=shard.files[:rows]), rows
    return replace(shard, max_rows=rows), rows


def _lines_before(path: str, stops: Sequence[int]) -> Iterator[int]:
    """Number of lines that start in bytes [0, stop) of a file, for ascending stops above 0."""
    position = ends = 0
    with fsspec.open(path, "rb") as file:
        for stop in stops:
            last = stop - 1  # the line before a start ends one byte earlier
            while position < last and (block := file.read(min(_BLOCK, last - position))):
                ends += block.count(b"\n")
                position += len(block)
            yield 1 + ends
