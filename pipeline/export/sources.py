"""The inputs of an export: what they are called in it, and that they are as the run read them."""

from __future__ import annotations

import itertools
import os
import posixpath
from collections import Counter
from collections.abc import Sequence

import fsspec

from pipeline.corpus.documents import ContentDigest, read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.inputs import find_inputs, stamp_of
from pipeline.corpus.shard import InputFile, Shard
from pipeline.errors import UserError, not_opened
from pipeline.export.request import ExportQuestion
from pipeline.store.receipts import Receipt


def sources_of(question: ExportQuestion) -> list[ExportSource]:
    """The inputs of a run's audited documents, in their order."""
    groups = [tuple(group) for _, group in itertools.groupby(question.shards, key=lambda shard: shard.path)]
    places = [source_place(group[0].path, not format_named(group[0].format).has_path, follow=False) for group in groups]
    names = relative_names(places)
    return [ExportSource(group, name) for group, name in zip(groups, names, strict=True)]


def source_place(path: str, hub: bool = False, follow: bool = True) -> tuple[str, ...]:
    """A path or URL as its parts, so that two ways to write one place are equal.

    Args:
        path: local, or an fsspec URL.
        hub: whether it is the name of a dataset on the hub.
        follow: whether links count as what they lead to.

    Raises:
        UserError: no file system has such a URL.
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
    """Different names for different places: their paths below the folder that they have in common."""
    levels = zip(*(place[:-1] for place in places), strict=False)
    common = len(list(itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)))
    return ["/".join(part.rstrip(":") or "_" for part in place[common:]) for place in places]


def check_unchanged(question: ExportQuestion) -> list[InputFile]:
    """The audited inputs as they are now, none of which differs in size or at an end from what the run read.

    Raises:
        UserError: one is gone or was changed.
    """
    config = question.manifest.config
    corpus = config.corpus.model_copy(update={"unseen": None, "seen": None})
    try:
        inputs = {entry.path: entry for entry in find_inputs(corpus, config.limits)}
    except UserError as error:
        raise UserError(
            f"the documents of this run cannot be read any more ({error}): put them back, or export --list, which "
            "needs none"
        ) from None
    present = []
    for record in question.manifest.inputs:
        if record.role == "audit":
            entry = inputs.get(record.path)
            if entry is None:
                raise UserError(
                    f"{record.name} is gone since the run: put it back, or export --list, which needs no texts"
                )
            if entry.content != record.content:
                raise _changed(record.name)
            present.append(entry)
    return present


def check_digest(shard: Shard, receipt: Receipt) -> None:
    """Read a shard, and check that its documents are those that were scored.

    A shard with a document that killed its readers is not read: of that the run keeps no digest.

    Raises:
        UserError: they are others.
    """
    if not receipt.documents:
        return
    digest = ContentDigest()
    for _ in read_shard(shard, digest):
        pass
    if digest.hexdigest() != receipt.documents:
        raise _changed(shard.name)


def check_untouched(inputs: Sequence[InputFile]) -> None:
    """Check that no input was written to since `check_unchanged` looked at it.

    Raises:
        UserError: one was.
    """
    for entry in inputs:
        if stamp_of(entry) != entry.stamp:
            raise UserError(f"{entry.name} was written to while it was exported: the same command begins anew")


def _changed(name: str) -> UserError:
    return UserError(
        f"{name} was changed since the run: its documents are not those that were scored, so no verdict is about them; "
        "seenset run on the data as they are now, in another run directory, judges them"
    )


def check_names(names: Sequence[str]) -> None:
    """Check that no two files of an export have one name.

    Raises:
        UserError: two have.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"{count} inputs would be exported as {name}: give them other names")
