"""The folder of an export: never an input, never a folder with other files, and marked until it is complete.

For its inputs: their names in the export, and the check that they are unchanged since the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

import fsspec
from pydantic import Field

from pipeline.config.paths import path_origin, written
from pipeline.corpus.documents import ContentDigest, read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource, encodable
from pipeline.corpus.inputs import find_inputs, make_stamp
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, not_opened
from pipeline.export.export_text import UNFINISHED_NOTE
from pipeline.export.request import ExportPlan
from pipeline.run.records import VersionedRecord, read_record
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

MARKER_FILE = ".seenset-export.json"
CARD_FILE = "README.md"
UNFINISHED_FILE = "NOT_FINISHED"

_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}")


def export_sources(plan: ExportPlan) -> list[ExportSource]:
    """The inputs of a run's audited documents, in their order."""
    groups = [tuple(group) for _, group in itertools.groupby(plan.shards, key=lambda shard: shard.path)]
    places = [source_place(group[0].path, not format_named(group[0].format).has_path, follow=False) for group in groups]
    names = relative_names(places)
    return [ExportSource(group, name) for group, name in zip(groups, names, strict=True)]


def source_place(path: str, hub: bool = False, follow: bool = True) -> tuple[str, ...]:
    """The parts of a path or URL, such that equivalent paths are equal.

    Args:
        path: local path, or an fsspec URL.
        hub: whether the path is the name of a dataset on the hub.
        follow: whether links are resolved.

    Raises:
        UserError: no file system supports the URL.
    """
    if hub:
        return ("hub:", *path.split("/"))
    try:
        fs, full = fsspec.core.url_to_fs(path if "://" in path else os.path.expanduser(path))
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"cannot open {path}: {not_opened(error)}") from None
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        full = os.path.realpath(full) if follow else os.path.abspath(full)
        return ("file:", *(part for part in full.split("/") if part))
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return (f"{protocol}:", *(part for part in posixpath.normpath(full).split("/") if part))


def relative_names(places: Sequence[tuple[str, ...]]) -> list[str]:
    """Distinct names for distinct places: their paths below their common folder."""
    levels = zip(*(place[:-1] for place in places), strict=False)
    common = len(list(itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)))
    return ["/".join(part.rstrip(":") or "_" for part in place[common:]) for place in places]


def check_unchanged(plan: ExportPlan) -> list[InputFile]:
    """The current audited inputs, checked to have the size and the ends that the run read.

    Raises:
        UserError: an input is missing or was changed.
    """
    config = plan.manifest.config
    corpus = config.corpus.model_copy(update={"unseen": None, "seen": None})
    try:
        inputs = {encodable(entry.path): entry for entry in find_inputs(corpus, config.limits)}
    except UserError as error:
        raise UserError(
            f"the documents of this run cannot be read any more ({error}): put them back, or export --list, which "
            "needs none"
        ) from None
    present = []
    for record in plan.manifest.inputs:
        if record.role == "audit":
            entry = inputs.get(record.path)
            if entry is None:
                raise UserError(
                    f"{record.name} is missing since the run: put it back, or export --list, which needs no texts"
                )
            if entry.content != record.content:
                raise _changed(record.name)
            present.append(entry)
    return present


def check_digest(shard: Shard, receipt: Receipt) -> None:
    """Read a shard, and check that its documents are those that were scored.

    A shard with a document that killed its readers is not read, because the run has no digest of it.

    Raises:
        UserError: the documents differ.
    """
    if not receipt.documents:
        return
    digest = ContentDigest()
    for _ in read_shard(shard, digest):
        pass
    if digest.hexdigest() != receipt.documents:
        raise _changed(shard.name)


def check_untouched(inputs: Sequence[InputFile]) -> None:
    """Check that no input was modified since `check_unchanged`.

    Raises:
        UserError: an input was modified.
    """
    for entry in inputs:
        if make_stamp(entry) != entry.stamp:
            raise UserError(f"{entry.name} was written to while it was exported: run the same command again")


def _changed(name: str) -> UserError:
    return UserError(
        f"{name} was changed since the run: its documents are not those that were scored, so no verdict is about them; "
        "seenset run on the data as they are now, in another run directory, judges them"
    )


def check_names(names: Sequence[str]) -> None:
    """Check that all files of an export have different names.

    Raises:
        UserError: two files have the same name.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{count} inputs would be exported as {name}: give them other names")


class ExportMarker(VersionedRecord):
    """The files of an export: `.seenset-export.json`, in its folder."""

    state: Literal["writing", "complete"] = Field(description="Whether the export is complete.")
    run: str = Field(description="Digest of the address of the run.")
    files: list[str] = Field(description="Names of its files in the folder; while it is written, possible names.")


@dataclass(frozen=True, slots=True)
class ExportFolder:
    """A folder that is being written."""

    store: Store
    run: str  # digest of the run's address
    names: list[str]  # names of the files written so far

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file of the export, which gets its name when the block ends without an error."""
        with self.store.replaced(name) as file:
            yield file
        self.names.append(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the export."""
        self.store.write(name, data)
        self.names.append(name)

    def finish(self) -> None:
        """Mark the export as complete."""
        marker = ExportMarker(state="complete", run=self.run, files=sorted(self.names))
        self.store.write_json(MARKER_FILE, marker.plain())
        self.store.remove(UNFINISHED_FILE)


def begin_folder(plan: ExportPlan, names: Sequence[str]) -> ExportFolder:
    """Start a folder that is missing, empty, or has an export of this run, whose files are removed.

    Args:
        plan: plan of the export.
        names: names of the files that may be written.

    Raises:
        UserError: the folder is, contains or is inside an input, or has other files.
    """
    check_outside(plan)
    store = Store(plan.out, "output folder")
    present = _listed(store)
    marker = read_record(store, MARKER_FILE, ExportMarker, "export into another folder")
    _check_ours(plan, present, marker)
    planned = ExportMarker(state="writing", run=plan.run_digest, files=sorted({*names, CARD_FILE}))
    # existing files may remain if this command is killed
    known = planned.model_copy(update={"files": sorted({*planned.files, *(marker.files if marker else [])})})
    store.write_json(MARKER_FILE, known.plain())
    store.write(UNFINISHED_FILE, f"{UNFINISHED_NOTE}\n".encode())
    for name in present:
        if name not in (MARKER_FILE, UNFINISHED_FILE):
            store.remove(name)
    store.write_json(MARKER_FILE, planned.plain())
    return ExportFolder(store, plan.run_digest, [])


def _check_ours(plan: ExportPlan, present: Sequence[str], marker: ExportMarker | None) -> None:
    """Check that a folder has only files of an export of the run. Raises UserError."""
    if marker is None and all(_is_temporary(name, {MARKER_FILE}) for name in present):
        return  # empty, or an export was killed while it wrote its first file
    if marker is None:
        raise UserError(f"{plan.out} is not empty and not an export: it holds {_some(present)}; name another folder")
    if marker.run != plan.run_digest:
        raise UserError(f"{plan.out} holds the export of another run: name another folder")
    ours = {*marker.files, MARKER_FILE, UNFINISHED_FILE}
    if others := [name for name in present if name not in ours and not _is_temporary(name, ours)]:
        raise UserError(
            f"{plan.out} holds files that no export wrote, {_some(others)}: move them, or name another folder"
        )


def _is_temporary(name: str, ours: set[str]) -> bool:
    """Whether a file is the remainder of a file that a killed export was writing."""
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


def check_outside(plan: ExportPlan) -> None:
    """Check that a folder does not overlap an input or a run, for any spelling of its path.

    Raises:
        UserError: it does.
    """
    out = source_place(plan.out)
    run = source_place(plan.store.url)
    if _nested(out, run) or _nested(run, out):
        raise UserError(f"{plan.out} and the run directory {plan.store.url} overlap: name another folder")
    for entry in plan.manifest.inputs:
        if format_named(entry.format).has_path:
            place, what = source_place(entry.path), f"corpus.{entry.role}'s {entry.name}"
            if _nested(out, place):
                raise UserError(f"{plan.out} is an input of the run, {what}: an export never changes its input")
            if _nested(place, out):
                raise UserError(f"{plan.out} holds an input of the run, {what}: name a folder of its own")
    for role, source in plan.manifest.config.corpus.roles():
        for pattern in source.paths:
            if (folder := _read_whole(pattern)) is not None and _nested(out, source_place(folder)):
                raise UserError(
                    f"{plan.out} is in the folder of corpus.{role}, {written(pattern)}, so a later run would read the "
                    "export as documents: name a folder outside of it"
                )


def _read_whole(pattern: str) -> str | None:
    """The folder that a configured path reads as a whole; None for files and for globs of one folder."""
    base = path_origin(pattern)
    path = written(pattern) if base is None else os.path.join(base, written(pattern))
    if "**" in path:
        return path[: path.index("**")].rpartition("/")[0] or "."
    return path if "://" in path or os.path.isdir(os.path.expanduser(path)) else None


def _nested(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    """Whether a place is another one, or is inside it."""
    return inner[: len(outer)] == outer


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
