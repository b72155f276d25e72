"""Pictures that are files: in a folder, or in the .tar files of WebDataset, with what stands beside them."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

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
        most: bytes that are read of a file in it.

    Raises:
        OSError: the file is damaged, or ends too early.
    """
    try:
        with fsspec.open(path, "rb") as file, tarfile.open(fileobj=cast(IO[bytes], file), mode="r|") as archive:
            sample: Sample = {}
            for member in archive:
                if not member.isfile():
                    continue
                key, _, ending = member.name.partition(".") if "/" not in member.name else _split(member.name)
                if sample and sample[KEY] != key:
                    yield sample
                    sample = {}
                sample = sample or {KEY: key}
                _add(sample, ending.lower(), _content(archive, member, most))
            if sample:
                yield sample
    except tarfile.TarError as error:
        raise OSError(f"not a whole .tar file: {error}") from None


def sample_key(name: str) -> str:
    """The name of the sample that a file of a .tar file belongs to."""
    return _split(name)[0] if "/" in name else name.partition(".")[0]


def _split(name: str) -> tuple[str, str, str]:
    folder, base = name.rsplit("/", 1)
    stem, dot, ending = base.partition(".")
    return f"{folder}/{stem}", dot, ending


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> bytes | Problem:
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
        with fsspec.open(path, "rb") as file, tarfile.open(fileobj=cast(IO[bytes], file), mode="r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
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
