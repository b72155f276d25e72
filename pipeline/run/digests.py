"""Digests of the files that state an answer: `selection/<name>/digests.json`, written after all of them.

A selection has an answer when this file is there. Every reader of an answer checks it first.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from pipeline.config.selection import HISTORY
from pipeline.errors import DamagedError, UserError
from pipeline.run.records import (
    AUDITED_RECORD,
    DUPLICATES,
    KEYS_FILE,
    MANIFEST_FILE,
    SHARDS_FILE,
    VersionedRecord,
    read_record,
    write_record,
)
from pipeline.run.remedies import NOT_OF_ANSWER, PUT_BACK, REWRITTEN, answered_by, not_as_written
from pipeline.store.files import SIDE_BY_SIDE, Store
from pipeline.store.receipts import DIGEST, Receipt, json_digest

HISTORY_FILE = f"selection/{HISTORY}"
"""The history of selections: one line per command."""

DOCUMENTS = "documents"
"""Folder of a selection with the verdicts on all documents; each file is checked when it is read."""

_RUN_FILES = {MANIFEST_FILE: REWRITTEN, SHARDS_FILE: REWRITTEN, KEYS_FILE: REWRITTEN, AUDITED_RECORD: PUT_BACK}
"""Files that answers depend on and `seenset select` does not write, each with its remedy."""


_MAY_BE_MISSING = (DUPLICATES,)
"""Files of the run that are read only where they exist."""


class AnswerDigests(VersionedRecord):
    """The files that state the answer of one selection: `selection/<name>/digests.json`."""

    sealed = True

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2,
        alias="schema",
        description="Version of the form of an answer: from 2 on the verdicts on all documents name source and row.",
    )
    selection: str = Field(description="Name of the selection.")
    scores: str = Field(description="SHA-256 of the digests of the audited shards' score and quarantine files.")
    files: dict[str, str] = Field(description="SHA-256 of each file, by its name in the run directory.")


def digests_file(selection: str) -> str:
    """Path of the digests of a selection in a run directory."""
    return f"selection/{selection}/digests.json"


def verdicts_file(selection: str, shard: str) -> str:
    """Path of the verdicts of a selection on the documents of a shard in a run directory."""
    return f"selection/{selection}/{DOCUMENTS}/{shard}.parquet"


def write_digests(store: Store, selection: str, files: Mapping[str, str], scores: str) -> None:
    """Write the digests of an answer, after all of its files.

    Args:
        store: the run directory.
        selection: name of the selection.
        files: SHA-256 by name in the run directory.
        scores: digest from `scores_digest` of the scores that the answer was made from.
    """
    digests = AnswerDigests(selection=selection, scores=scores, files=dict(sorted(files.items())))
    write_record(store, digests_file(selection), digests)


def scores_digest(receipts: Iterable[Receipt]) -> str:
    """SHA-256 of the digests of the score and quarantine files that receipts name, hexadecimal.

    Args:
        receipts: receipts of all audited shards, in any order.
    """
    digests = {
        receipt.shard: [receipt.files[name].sha256 for name in (receipt.data, receipt.quarantine) if name is not None]
        for receipt in receipts
    }
    return json_digest(digests)


def file_digests(store: Store, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files that exist, by name."""
    digests = {name: _digest(store, name) for name in names}
    return {name: digest for name, digest in digests.items() if digest is not None}


def answer_digests(store: Store) -> dict[str, str]:
    """SHA-256 of the digests of every answer of a run, by selection."""
    files = {name: store.digest(digests_file(name)) for name in store.names("selection") if name != HISTORY}
    return {name: digest for name, digest in files.items() if digest is not None}


def read_digests(store: Store, selection: str) -> AnswerDigests | None:
    """The digests of an answer; None where there is no such file.

    Raises:
        DamagedError: the file was changed, or belongs to another selection.
        VersionError: it was written by another version.
    """
    name = digests_file(selection)
    where = f"{store.url}/{name}"
    digests = read_record(store, name, AnswerDigests, answered_by(store.url), answered_by(store.url))
    if digests is not None and digests.selection != selection:
        raise DamagedError(where, f"is damaged: it is of selection {digests.selection}", answered_by(store.url))
    return digests


def check_answer(store: Store, selection: str, whole: bool = False, shared: bool = True) -> AnswerDigests | None:
    """Check that the files of an answer are those that were written.

    Args:
        store: the run directory.
        selection: name of the selection.
        whole: whether the verdicts on all documents are also checked.
        shared: whether files of the run are also checked; not after a command has written them for a new answer.

    Returns:
        The digests; None where the selection has none.

    Raises:
        DamagedError: a file or the digests are missing or changed, or a file is not part of the answer.
    """
    digests = read_digests(store, selection)
    if digests is None:
        return None
    documents = f"selection/{selection}/{DOCUMENTS}/"
    names = [name for name in digests.files if whole or not name.startswith(documents)]
    if not shared:
        names = [name for name in names if name.startswith(f"selection/{selection}/")]
    with ThreadPoolExecutor(1 if store.local and not whole else SIDE_BY_SIDE) as pool:
        for name, digest_now in zip(names, pool.map(partial(_digest, store), names), strict=True):
            if digest_now != digests.files[name]:
                raise changed_file(store, name, digest_now is None)
    _check_unlisted(store, digests, shared)
    return digests


def _check_unlisted(store: Store, digests: AnswerDigests, shared: bool) -> None:
    """Check that every file that would be read as part of the answer is listed.

    Raises:
        DamagedError: an unlisted file exists.
    """
    folder = f"selection/{digests.selection}"
    names = [f"{folder}/{name}" for name in store.names(folder) if name != DOCUMENTS]
    names += [name for name in _MAY_BE_MISSING if shared and name not in digests.files and store.exists(name)]
    for name in names:
        if name not in digests.files and name != digests_file(digests.selection):
            raise DamagedError(f"{store.url}/{name}", "is not part of the answer", answered_by(store.url))


def read_listed(store: Store, digests: AnswerDigests, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A table of an answer.

    Args:
        store: the run directory.
        digests: digests of the answer.
        name: name of the file in the run directory.
        columns: columns to read; None: all.

    Raises:
        DamagedError: the file is missing or changed, or is not part of the answer.
    """
    data = store.read_many([name])[0]
    if data is None or hashlib.sha256(data).hexdigest() != digests.files.get(name):
        raise changed_file(store, name, data is None)
    return pq.read_table(io.BytesIO(data), columns=None if columns is None else list(columns))


def read_selected(store: Store, selection: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The selected documents of an answer.

    Raises:
        DamagedError: the file or the digests are missing or changed.
    """
    digests = read_digests(store, selection)
    if digests is None:
        raise no_digests(store, selection)
    return read_listed(store, digests, f"selection/{selection}/selected.parquet", columns)


@dataclass(frozen=True, slots=True)
class VerdictTables:
    """The verdicts of an answer on all documents, one table per shard, each checked when it is read."""

    store: Store
    digests: AnswerDigests

    @classmethod
    def open(cls, store: Store, selection: str, receipts: Iterable[Receipt] | None = None) -> VerdictTables:
        """The verdict tables of a selection.

        Args:
            store: the run directory.
            selection: name of the selection.
            receipts: receipts of all audited shards, to check that the answer is of their scores; None: not checked.

        Raises:
            DamagedError: the digests are missing or damaged.
            UserError: the answer was made from other scores, or by another version.
        """
        digests = read_digests(store, selection)
        if digests is None:
            raise no_digests(store, selection)
        if receipts is not None and digests.scores != scores_digest(receipts):
            raise UserError(
                f"selection {selection} of {store.url} was made from other scores than the run holds: "
                f"{answered_by(store.url)}"
            )
        return cls(store, digests)

    @property
    def shards(self) -> list[str]:
        """The shards, in the order of their names."""
        folder = f"selection/{self.digests.selection}/{DOCUMENTS}/"
        names = (name for name in self.digests.files if name.startswith(folder))
        return [name[len(folder) :].removesuffix(".parquet") for name in sorted(names)]

    def read(self, shard: str) -> pa.Table:
        """The verdicts on the documents of a shard.

        Raises:
            DamagedError: the file is missing or changed.
        """
        return read_listed(self.store, self.digests, verdicts_file(self.digests.selection, shard))


def no_digests(store: Store, selection: str) -> DamagedError:
    """The error of an answer without digests."""
    place, fault = f"{store.url}/{digests_file(selection)}", "is missing, so the answer cannot be checked"
    return DamagedError(place, fault, answered_by(store.url), ": ")


def changed_file(store: Store, name: str, missing: bool) -> DamagedError:
    """The error for a missing or changed file, with the command that writes it again."""
    fault = NOT_OF_ANSWER if name == MANIFEST_FILE and not missing else not_as_written(missing)
    return DamagedError(f"{store.url}/{name}", fault, _RUN_FILES.get(name) or answered_by(store.url))


def _digest(store: Store, name: str) -> str | None:
    """SHA-256 of a file; of the history, without the fields that depend on the time of the request."""
    digest = store.digest(name)
    if name != HISTORY_FILE or digest is None:
        return digest
    try:
        entries = [json.loads(line) for line in store.read(name).splitlines() if line.strip()]
        kept = [{key: one[key] for key in one if key not in _OF_A_TIME} for one in entries]
    except (ValueError, TypeError):
        return "no digest"
    return json_digest(kept)


_OF_A_TIME = ("when", "command", DIGEST)
