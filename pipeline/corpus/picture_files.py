"""Pictures that are files: in a folder, or in the .tar files of WebDataset, with what stands beside them."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tarfile import EOFHeaderError, HeaderError  # type: ignore[attr-defined]  # which its stubs leave out
from typing import IO, Any, Literal, Self, cast

import fsspec

from pipeline.corpus.pictures import Problem, file_beside
from pipeline.errors import UserError

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

IMAGE = "image"
"""The column of a sample's picture, whatever its file is called."""

KEY = "__key__"
"""The column of a sample's name."""

_KNOWN_BY = 64
"""Samples of a .tar file from which the number of all is estimated."""

Sample = dict[str, Any]


def is_picture(name: str) -> bool:
    """Whether a file's name says that it is a picture."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES


def beside_pictures(fs: Any, pictures: Sequence[str]) -> list[str]:
    """The files that share a picture's name and differ in its ending, in order.

    Args:
        fs: the file system.
        pictures: paths in it.
    """
    stems = {os.path.splitext(path)[0] for path in pictures}
    folders = sorted({stem.rpartition("/")[0] for stem in stems})
    names = (str(name) for folder in folders for name in fs.ls(folder, detail=False))
    return sorted(name for name in names if os.path.splitext(name)[0] in stems and not is_picture(name))


def picture_of_file(folder: str, inner: str, caption: str | None, most: int) -> tuple[bytes | Problem, Any]:
    """The bytes of a picture's file, and its caption from the file of the same name with another ending.

    Args:
        folder: that holds it, or the file itself where `inner` is empty.
        inner: its path in the folder.
        caption: the ending of captions, without a dot; None where there are none.
        most: bytes that are read of a file.
    """
    path = f"{folder}/{inner}" if inner else folder
    place, name = path.rsplit("/", 1) if "/" in path else (".", path)
    picture = file_beside(name, place, most)
    if caption is None:
        return picture, None
    beside = file_beside(f"{os.path.splitext(name)[0]}.{caption}", place, most)
    return picture, beside.decode("utf-8", "surrogateescape").strip() if isinstance(beside, bytes) else None


def samples_of(path: str, most: int) -> Iterator[Sample]:
    """The samples of a .tar file, in order: files whose names agree up to the first dot are one.

    A sample has the column `image`, its first picture's bytes (or why it has none); a column of each other file by its
    ending, as text; the fields of its .json file; and `__key__`. Memory holds one sample.

    Args:
        path: of the file, local or an fsspec URL.
        most: bytes that are read of a file in it, and twice as many of all files of a sample.

    Raises:
        OSError: the file is damaged, or ends too early.
    """
    try:
        with open_tar(path, "r|") as archive:
            sample: Sample = {}
            size = 0
            for member in tar_members(archive):
                key, _, ending = member.name.partition(".") if "/" not in member.name else _split(member.name)
                if sample and sample[KEY] != key:
                    yield sample
                    sample, size = {}, 0
                sample = sample or {KEY: key}
                size += member.size if member.size <= most else 0  # the others are not read
                _add(sample, ending.lower(), _content(archive, member, most, size))
            if sample:
                yield sample
    except tarfile.TarError as error:
        raise OSError(f"not a whole .tar file: {error}") from None


class _Member(tarfile.TarInfo):
    """The head of a file in an archive. A damaged one is no end of the archive, for which `tarfile` takes it."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:  # the mark at the end
            raise
        except HeaderError as error:
            raise OSError(f"not a whole .tar file: {error} at byte {tarfile.offset}") from None


@contextmanager
def open_tar(path: str, mode: Literal["r|", "r:"]) -> Iterator[tarfile.TarFile]:
    """An archive to be read.

    Args:
        path: of the file, local or an fsspec URL.
        mode: `r|` from its beginning to its end, `r:` from head to head.

    Raises:
        OSError: it is damaged, or more follows its end.
    """
    with fsspec.open(path, "rb") as file:
        with tarfile.open(fileobj=cast(IO[bytes], file), mode=mode, tarinfo=_Member) as archive:
            yield archive
            end = archive.offset if archive._loaded else None  # type: ignore[attr-defined]  # read to its end
        if end is not None:
            file.seek(end)
            while block := file.read(1 << 20):
                if block.count(0) < len(block):
                    raise OSError(f"more follows the end of the archive at byte {end}: give every archive as a file")


def tar_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive, and the links, which stand for files. Memory holds one."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # which keeps them all
        if member.isfile() or member.islnk() or member.issym():
            yield member


def sample_key(name: str) -> str:
    """The name of the sample that a file of a .tar file belongs to."""
    return _split(name)[0] if "/" in name else name.partition(".")[0]


def _split(name: str) -> tuple[str, str, str]:
    folder, base = name.rsplit("/", 1)
    stem, dot, ending = base.partition(".")
    return f"{folder}/{stem}", dot, ending


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int, size: int) -> bytes | Problem:
    if not member.isfile():
        return "not_picture", f"a link in the archive, to {member.linkname[:200]!r}: links are not followed"
    if size > 2 * most:
        return "too_large", f"with it, its sample has {size:,} bytes: more than twice limits.document_bytes"
    if member.size > most:
        return "too_large", f"{member.size:,} bytes, more than limits.document_bytes, which is {most:,}"
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _add(sample: Sample, ending: str, content: bytes | Problem) -> None:
    """Put a file of a sample into its columns."""
    if is_picture(f"x.{ending}"):
        if not isinstance(sample.get(IMAGE), bytes | tuple):  # a field of the same name says less
            sample[IMAGE] = content
        sample[ending] = content
    elif isinstance(content, bytes):
        if ending == "json":
            try:
                fields = json.loads(content)
            except (ValueError, RecursionError):
                fields = None
            if isinstance(fields, dict):
                for name, value in fields.items():
                    sample.setdefault(name, value)
        else:
            sample.setdefault(ending, content.decode("utf-8", "surrogateescape").strip())


def tar_columns(path: str, name: str, most: int) -> list[str]:
    """The columns of a .tar file's first sample.

    Raises:
        UserError: it has none, or is damaged.
    """
    try:
        sample = next(samples_of(path, most), None)
    except OSError as error:
        raise UserError(f"{name} is not a readable .tar file: {' '.join(str(error).split())}") from None
    if sample is None:
        raise UserError(f"{name} holds no files")
    return list(sample)


def tar_rows(path: str, size: int) -> tuple[int, bool]:
    """How many samples a .tar file holds, and whether they were counted; more than a few are estimated by its size.

    Raises:
        OSError: it is damaged.
    """
    keys: list[str] = []
    try:
        with open_tar(path, "r:") as archive:
            for member in tar_members(archive):
                key = sample_key(member.name)
                if not keys or keys[-1] != key:
                    if len(keys) == _KNOWN_BY:
                        return max(len(keys), size * len(keys) // max(1, member.offset)), False
                    keys.append(key)
    except tarfile.TarError as error:
        raise OSError(f"not a whole .tar file: {error}") from None
    return len(keys), True


def sample_columns(sample: Sample, names: Sequence[str | None]) -> list[Any]:
    """The columns of a sample with these names; None where one has no name, or the sample no such column."""
    return [None if name is None else sample.get(name) for name in names]
