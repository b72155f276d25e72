"""WebDataset .tar files: members with the same name up to the first dot are one sample, a picture or a text."""

from __future__ import annotations

import codecs
import itertools
import json
import os
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import itemgetter
from tarfile import EOFHeaderError, HeaderError  # type: ignore[attr-defined]  # missing in its stubs
from typing import IO, Any, Literal, Self, cast

import fsspec

from pipeline.config.corpus import LimitsConfig, SourceConfig
from pipeline.corpus.formats import base
from pipeline.corpus.formats.jsonl import json_fault, object_columns, parsed_json, repeated_field
from pipeline.corpus.formats.picture import IMAGE, is_picture
from pipeline.corpus.input_files import Extent
from pipeline.corpus.notes import HIDDEN_MEMBERS, Notes
from pipeline.corpus.picture_files import Problem
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, error_line

KEY = "__key__"
"""Column of the sample name."""

_KNOWN_BY = 64
"""Samples of a .tar file from which the number of its samples is estimated."""

_LOOKED_AT = 8  # samples whose columns are collected for texts

Sample = dict[str, Any]
Problems = dict[str, Problem]


def _read_archive(
    path: str, most: int, notes: Notes | None = None, wanted: Collection[str] = (), as_written: bool = False
) -> Iterator[tuple[Sample, Problems]]:
    """The samples of a .tar file, in order: members with the same name up to the first dot are one sample.

    A sample has the column `image`, the bytes of its first picture (or the reason why there are none); a text column
    for every other member, named by its suffix; the fields of its .json member; and `__key__`. The problems of members
    that are not columns are returned by suffix. Memory holds one sample.

    Args:
        path: local path or fsspec URL of the file.
        most: maximum bytes of a member; those of a sample together have at most twice as many.
        notes: receives the members that are left out.
        wanted: fields that must not be repeated in a .json member.
        as_written: whether numbers of a .json member are texts.

    Raises:
        OSError: the file is damaged or truncated.
    """
    with _open_tar(path, "r|") as archive:
        for _, group in itertools.groupby(_numbered(archive, notes), key=itemgetter(0)):
            sample: Sample = {}
            problems: Problems = {}
            size = 0
            for _, member in group:
                key, suffix = _key_and_suffix(member.name)
                sample.setdefault(KEY, key)
                size += member.size if member.size <= most else 0  # larger ones are not read
                content = _content(archive, member, most, size)
                if (problem := _add(sample, suffix.lower(), content, wanted, as_written)) is not None:
                    problems[suffix.lower()] = problem
            yield sample, problems


_OWN = {"size", "GNU.sparse.size", "GNU.sparse.realsize"}
"""Fields of a header that are not of all members: data would be cut, or go on in the next member."""


class _Member(tarfile.TarInfo):
    """The header of a member. `tarfile` treats a damaged header as the end of the archive; this class raises."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:  # the end mark
            raise
        except (HeaderError, IndexError) as error:  # IndexError: a list of the parts of a sparse file that breaks off
            raise OSError(f"not a whole .tar file: {error} at byte {tarfile.offset}") from None


@contextmanager
def _open_tar(path: str, mode: Literal["r|", "r:"], shown: str = "") -> Iterator[tarfile.TarFile]:
    """Open an archive for reading.

    Args:
        path: local path or fsspec URL of the file.
        mode: `r|` reads everything in order, `r:` seeks from header to header.
        shown: start of error messages.

    Raises:
        OSError: the archive is damaged, or data follow its end.
    """
    try:
        with fsspec.open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            with tarfile.open(fileobj=cast(IO[bytes], file), mode=mode, tarinfo=_Member) as archive:
                archive.whole = size  # type: ignore[attr-defined]
                yield archive
                end = archive.offset if archive._loaded else None  # type: ignore[attr-defined]  # read to its end
            if end is not None:
                file.seek(end)
                while block := file.read(1 << 20):
                    if block.count(0) < len(block):
                        raise OSError(
                            f"more follows the end of the archive at byte {end}: give every archive as a file"
                        )
    except (
        tarfile.TarError,
        MemoryError,
        OverflowError,
        ValueError,
        RecursionError,
    ) as error:  # also of damaged headers
        raise OSError(f"{shown}not a whole .tar file: {error or type(error).__name__}") from None


def _read_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files and links of an archive. Memory holds one.

    Raises:
        OSError: a member goes on behind the end of the file, or a header states one size for all.
    """
    file = archive.whole  # type: ignore[attr-defined]
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # it keeps all members
        end = archive.offset - tarfile.BLOCKSIZE + 1  # its last block may not be padded
        if member.size < 0 or end > file:
            raise OSError(
                f"not a whole .tar file: member {member.name[:200]!r} goes on behind its end, which is byte {file:,}"
            )
        if not _OWN.isdisjoint(archive.pax_headers):
            raise OSError("not a whole .tar file: a header for all members states the size of each")
        if member.isfile() or member.islnk() or member.issym():
            yield member


def _numbered(archive: tarfile.TarFile, notes: Notes | None = None) -> Iterator[tuple[int, tarfile.TarInfo]]:
    """The members of an archive, each with the number of its sample.

    Hidden members are left out, such as the ._ files that macOS adds. A member whose name is already in its sample
    starts the next one, so that no document hides another.
    """
    row, last, suffixes = -1, "", set[str]()
    for member in _read_members(archive):
        key, suffix = _key_and_suffix(member.name)
        if _is_hidden(member.name):
            if notes is not None:
                notes.add(HIDDEN_MEMBERS, row + 1)
            continue
        if row < 0 or key != last or suffix in suffixes:
            row, last, suffixes = row + 1, key, set()
        suffixes.add(suffix)
        yield row, member


def _is_hidden(name: str) -> bool:
    """Whether a part of the path of a member starts with a dot, or is the folder in which macOS keeps its own files."""
    parts = [part for part in name.split("/") if part not in (".", "..")]
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _key_and_suffix(name: str) -> tuple[str, str]:
    """The sample name of a member, and the suffix after the first dot."""
    folder, slash, last = base.encodable(name).rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}{slash}{stem}", suffix


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int, size: int) -> bytes | Problem:
    if not member.isfile():
        return Reason.NOT_PICTURE, f"a link in the archive, to {member.linkname[:200]!r}: links are not followed"
    if size > 2 * most:
        return Reason.TOO_LARGE, f"with it, its sample has {size:,} bytes: more than twice limits.document_bytes"
    if member.size > most:
        return Reason.TOO_LARGE, f"{member.size:,} bytes, more than limits.document_bytes, which is {most:,}"
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _add(
    sample: Sample, suffix: str, content: bytes | Problem, wanted: Collection[str], as_written: bool
) -> Problem | None:
    """Add a member to the columns of a sample, or return why it cannot be a column."""
    if is_picture(f"x.{suffix}"):
        if not isinstance(sample.get(IMAGE), bytes | tuple):  # a picture takes precedence over a field
            sample[IMAGE] = content
        sample[suffix] = content
    elif not isinstance(content, bytes):
        return content
    elif suffix == "json":
        try:
            text = content.decode(json.detect_encoding(content), "surrogatepass")
            fields, repeated = parsed_json(text, as_written), repeated_field(text, wanted)
        except (ValueError, RecursionError) as error:
            return Reason.UNDECODABLE, f"its .json file is not JSON: {json_fault(error)}"
        except MemoryError:
            return Reason.OUT_OF_MEMORY, f"the {len(content):,} bytes of its .json file take too much"
        if repeated is not None:
            return Reason.UNDECODABLE, f"field {repeated!r} stands twice in its .json file"
        if not isinstance(fields, dict):
            return Reason.NOT_TEXT, f"its .json file holds a {type(fields).__name__}, not an object"
        for name, value in fields.items():
            sample.setdefault(name, value)
    else:
        sample.setdefault(suffix, content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape").strip())
    return None


def _inspect(entry: InputFile, source: SourceConfig, limits: LimitsConfig, tail: bytes) -> InputFile:
    columns: dict[str, Any] = {}
    samples: list[Sample] = []
    count = 1 if source.image is not None else _LOOKED_AT  # the .json file of a text may be damaged
    try:
        for sample, _ in itertools.islice(_read_archive(entry.path, limits.document_bytes), count):
            columns |= sample
            samples.append(sample)
            if columns.keys() >= set(source.columns):
                break
    except OSError as error:
        raise UserError(f"{entry.name} is not a readable .tar file: {error_line(error)}") from None
    if not columns:
        raise UserError(f"{entry.name} holds no files")
    names = object_columns([columns], source.columns)
    base.check_columns(source, entry.name, names)
    base.check_texts(source, entry.name, samples, names)
    return entry


def _rows(shard: Shard, watch: base.Watch, notes: Notes) -> Iterator[base.Row]:
    wanted = base.wanted_columns(shard)
    samples = _read_archive(shard.path, shard.limits.document_bytes, notes, wanted, bool(shard.item))
    for row, (sample, problems) in enumerate(samples):
        identity, group, label, caption = base.other_fields(sample, shard)
        value = base.DEADLY if watch(row, False) else _value(sample, problems, shard)
        yield row, value, sample[KEY] if identity is None else identity, group, label, caption


def _value(sample: Sample, problems: Problems, shard: Shard) -> Any:
    """The picture or the text of a sample, or why it has none."""
    value = base.field_value(sample, shard.text, base.MISSING)
    if shard.pictures or value is not base.MISSING:
        return None if value is base.MISSING else value
    missing = Reason.NOT_TEXT, f"no file or field {shard.text!r}"
    reason, message = problems.get(shard.text) or problems.get("json") or missing
    return base.Unreadable(Reason.NOT_TEXT if reason == Reason.NOT_PICTURE else reason, message)


def _estimate(entry: InputFile) -> Extent:
    """The number of samples; estimated from the size of the file unless they are few."""
    rows = 0
    with _open_tar(entry.path, "r:") as archive:
        for row, member in _numbered(archive):
            if row == _KNOWN_BY:
                return Extent(max(row, entry.size * row // max(1, member.offset)), False, entry.size)
            rows = row + 1
    return Extent(rows, True, entry.size)


def _columns(shard: Shard) -> list[str]:
    samples = itertools.islice(_read_archive(shard.path, shard.limits.document_bytes), _LOOKED_AT)
    names = dict.fromkeys(key for sample, _ in samples for key in sample)
    return [key for key in names if key != KEY]


def _copy(source: base.ExportSource, marks: base.Marks, open_file: base.OpenFile) -> None:
    """Copy the kept samples byte for byte with all their members, in order."""
    with (
        _open_tar(source.first.path, "r|", f"{source.first.name} is ") as archive,
        open_file(source.name) as sink,
        tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as copy,
    ):
        for _, member in base.kept_numbered(_numbered(archive), marks):
            copy.addfile(member, archive.extractfile(member) if member.isfile() else None)


def _records(source: base.ExportSource) -> base.Records:
    shard = source.first
    for number, (sample, _) in enumerate(_read_archive(shard.path, shard.limits.document_bytes)):
        yield number, {name: value for name, value in sample.items() if not isinstance(value, tuple)}


WEBDATASET = base.Format(
    "tar",
    "sample",
    _inspect,
    _rows,
    base.Exporter(_copy, records=_records),
    columns=_columns,
    suffixes=(".tar",),
    estimate=_estimate,
    place=6,
)
