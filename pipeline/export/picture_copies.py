"""Pictures that are files, and the samples of .tar files: what is kept is copied byte for byte."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

import fsspec

from pipeline.corpus.picture_files import open_tar, sample_key, tar_members
from pipeline.corpus.shard import Shard
from pipeline.export.place import ExportFolder
from pipeline.export.sources import ExportSource
from pipeline.export.text_files import kept_numbered
from pipeline.export.verdicts import RowMarks


def picture_names(source: ExportSource) -> list[str]:
    """The files that a folder of pictures, or a single one, may be exported to: pictures and their captions."""
    return list(dict.fromkeys(name for files in _files_of(source) for name, _ in files))


def copy_pictures(source: ExportSource, marks: RowMarks, folder: ExportFolder) -> None:
    """Copy the kept pictures of a folder, each with the file of its caption, if it has one.

    Raises:
        OSError: one cannot be read.
    """
    flags = marks.following(len(source.files)).tolist()
    for (picture, *captions), kept in zip(_files_of(source), flags, strict=True):
        if kept:
            present = [caption for caption in captions if caption[0] not in folder.names and _is_there(caption[1])]
            for name, path in [picture, *present]:
                with fsspec.open(path, "rb") as file, folder.file(name) as sink:
                    shutil.copyfileobj(file, sink)


def _files_of(source: ExportSource) -> list[list[tuple[str, str]]]:
    """Of each picture its file, and that of its caption: name in the export and address."""
    shard, files = source.first, []
    for inner in source.files:
        places = [(f"{each}/{inner}" if inner else each) for each in (source.name, shard.path)]
        files.append([(places[0], places[1])])
        if shard.caption_column is not None:
            name, path = (f"{os.path.splitext(place)[0]}.{shard.caption_column}" for place in places)
            files[-1].append((name, path))
    return files


def _is_there(path: str) -> bool:
    fs, place = fsspec.core.url_to_fs(path)
    return bool(fs.isfile(place))


def copy_tar(shard: Shard, marks: RowMarks, sink: BinaryIO) -> None:
    """Copy the kept samples of a .tar file, each with all its files, in their order.

    Args:
        shard: any one of the file.
        marks: of the samples of the whole file.
        sink: to be written.

    Raises:
        OSError: the file is damaged.
    """
    try:
        with (
            open_tar(shard.path, "r|") as archive,
            tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as copy,
        ):
            for _, member in kept_numbered(_members(archive), marks):
                copy.addfile(member, archive.extractfile(member) if member.isfile() else None)
    except tarfile.TarError as error:
        raise OSError(f"{shard.name} is not a whole .tar file: {error}") from None


def _members(archive: tarfile.TarFile) -> Iterator[tuple[int, tarfile.TarInfo]]:
    """The files of an archive, with the number of the sample that each belongs to."""
    row, last = -1, None
    for member in tar_members(archive):
        key = sample_key(member.name)
        row += key != last
        last = key
        yield row, member
