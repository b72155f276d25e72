"""The folder of an export: never an input, never somebody else's, and never taken for whole before it is."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

from pydantic import Field

from pipeline.audit.records import VersionedRecord, read_record
from pipeline.config.paths import origin_of, written
from pipeline.corpus.formats import format_named
from pipeline.errors import UserError
from pipeline.export.request import ExportQuestion
from pipeline.export.sources import source_place
from pipeline.report.wording.export import UNFINISHED_NOTE
from pipeline.store.files import Store

MARKER_FILE = ".seenset-export.json"
CARD_FILE = "README.md"
UNFINISHED_FILE = "NOT_FINISHED"

_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}")


class ExportMarker(VersionedRecord):
    """What an export consists of: `.seenset-export.json`, in its folder."""

    state: Literal["writing", "complete"] = Field(description="Whether all of it is there.")
    run: str = Field(description="Digest of the address of the run.")
    files: list[str] = Field(description="Names of its files in the folder; while it is written, those that may come.")


@dataclass(frozen=True, slots=True)
class ExportFolder:
    """A folder that is being written."""

    store: Store
    run: str  # digest of the run's address
    names: list[str]  # of files that are written so far

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file of the export, which stands under its name when the block ends without an error."""
        with _in_words_of_a_folder(), self.store.replaced(name) as file:
            yield file
        self.names.append(name)

    def write(self, name: str, data: bytes) -> None:
        """A small file of the export."""
        with _in_words_of_a_folder():
            self.store.write(name, data)
        self.names.append(name)

    def finish(self) -> None:
        """Say that all of it is there."""
        with _in_words_of_a_folder():
            marker = ExportMarker(state="complete", run=self.run, files=sorted(self.names))
            self.store.write_json(MARKER_FILE, marker.plain())
            self.store.remove(UNFINISHED_FILE)


def begin_folder(question: ExportQuestion, names: Sequence[str]) -> ExportFolder:
    """Take a folder that is not there, empty, or holds an export of this run, whose files are removed.

    Args:
        question: whose answer is written.
        names: of the files that may be written.

    Raises:
        UserError: the folder is an input, lies in one or holds one; it holds something else.
    """
    check_outside(question)
    with _in_words_of_a_folder():
        store = Store(question.out)
        present = _listed(store)
        marker = read_record(store, MARKER_FILE, ExportMarker, "export into another folder")
        _check_ours(question, present, marker)
        planned = ExportMarker(state="writing", run=question.run_digest, files=sorted({*names, CARD_FILE}))
        # what is there now may be there still when this is killed too
        known = planned.model_copy(update={"files": sorted({*planned.files, *(marker.files if marker else [])})})
        store.write_json(MARKER_FILE, known.plain())
        store.write(UNFINISHED_FILE, f"{UNFINISHED_NOTE}\n".encode())
        for name in present:
            if name not in (MARKER_FILE, UNFINISHED_FILE):
                store.remove(name)
        store.write_json(MARKER_FILE, planned.plain())
    return ExportFolder(store, question.run_digest, [])


def _check_ours(question: ExportQuestion, present: Sequence[str], marker: ExportMarker | None) -> None:
    """Check that a folder holds nothing but an export of the run. Raises UserError."""
    if marker is None and all(_is_temporary(name, {MARKER_FILE}) for name in present):
        return  # empty, or an export was killed while it wrote its first file
    if marker is None:
        raise UserError(f"{question.out} is not empty, and no export: it holds {_some(present)}; name another folder")
    if marker.run != question.run_digest:
        raise UserError(f"{question.out} holds the export of another run: name another folder")
    ours = {*marker.files, MARKER_FILE, UNFINISHED_FILE}
    if others := [name for name in present if name not in ours and not _is_temporary(name, ours)]:
        raise UserError(
            f"{question.out} holds files that no export wrote, {_some(others)}: move them, or name another folder"
        )


def _is_temporary(name: str, ours: set[str]) -> bool:
    """Whether a file is what a killed export left of one that it was writing."""
    if not _TEMPORARY.fullmatch(name):
        return False
    folder, base = os.path.split(name)
    return os.path.join(folder, base[1:-9]) in ours


def _listed(store: Store) -> list[str]:
    """The names of all files in a folder, sorted."""
    store.fs.invalidate_cache()
    try:
        paths = store.fs.find(store.root)
    except FileNotFoundError:
        return []
    return sorted(path[len(store.root) + 1 :] for path in paths)


def check_outside(question: ExportQuestion) -> None:
    """Check that a folder is no input and no run, lies in none and holds none, however it is written.

    Raises:
        UserError: it does.
    """
    out = source_place(question.out)
    run = source_place(question.store.url)
    if _nested(out, run) or _nested(run, out):
        raise UserError(f"{question.out} and the run directory {question.store.url} lie in one another: name another")
    for entry in question.manifest.inputs:
        if format_named(entry.format).has_path:
            place, what = source_place(entry.path), f"corpus.{entry.role}'s {entry.name}"
            if _nested(out, place):
                raise UserError(f"{question.out} is an input of the run, {what}: an export never changes its input")
            if _nested(place, out):
                raise UserError(f"{question.out} holds an input of the run, {what}: name a folder of its own")
    for role, source in question.manifest.config.corpus.roles():
        for pattern in source.paths:
            if (folder := _read_whole(pattern)) is not None and _nested(out, source_place(folder)):
                raise UserError(
                    f"{question.out} lies in corpus.{role}'s folder {written(pattern)}, so a later run would read the "
                    "export as documents: name a folder outside of it"
                )


def _read_whole(pattern: str) -> str | None:
    """The folder of which a path of a configuration reads all; None for files and for globs of one folder."""
    base = origin_of(pattern)
    path = written(pattern) if base is None else os.path.join(base, written(pattern))
    if "**" in path:
        return path[: path.index("**")].rpartition("/")[0] or "."
    return path if "://" in path or os.path.isdir(os.path.expanduser(path)) else None


def _nested(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    """Whether a place is another one, or lies in it."""
    return inner[: len(outer)] == outer


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


@contextlib.contextmanager
def _in_words_of_a_folder() -> Iterator[None]:
    """Let what is wrong with a folder be said of an output folder: the store is one of run directories."""
    try:
        yield
    except UserError as error:
        error.args = (str(error).replace("run directory", "output folder"),)
        raise
