"""An append-only, tamper-evident list of entries in one folder, for concurrent writers.

Entry n is the file `0000000n.json`. It holds its content, its number, the SHA-256 of the previous entry's file and a
digest of itself. An entry is appended by exclusive creation of the next number; a writer that loses the race reads the
winner's entry and uses the following number. No file is ever overwritten or removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.config.paths import irregular_kind
from pipeline.errors import IncompleteError, NotWrittenError, UserError, is_of_storage, one_line
from pipeline.store.files import Store, to_json
from pipeline.store.receipts import is_sealed, sealed

PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between attempts of a request that a store did not answer."""

_ENTRY = re.compile(r"[0-9]{8}\.json")
_KEYS = frozenset({"number", "previous", "writer", "content", "digest"})
_RACES = 1000
T = TypeVar("T")

Content = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One entry of a ledger."""

    number: int  # 0 for the first
    content: dict[str, Any]
    sha256: str  # hexadecimal digest of its file, which the next entry contains


def read_ledger(store: Store) -> list[LedgerEntry]:
    """All entries, in order; empty if there are none.

    Args:
        store: the folder of the ledger.

    Raises:
        UserError: one line with the number: a missing or edited entry, one that does not follow the previous one, or a
            file that is not an entry.
        IncompleteError: the store does not answer.
    """
    names = _patiently(store, lambda: store.names(""))
    for name in names:
        if not _ENTRY.fullmatch(name):
            what = f"it holds {one_line(name)}; name a folder of its own"
            raise UserError(f"{store.url} is no ledger, or not only one: {what}")
        path = f"{store.url}/{name}"
        if store.local and os.path.exists(path) and (kind := irregular_kind(path)):
            raise UserError(f"ledger {store.url}: {name} is {kind}, not a regular file")
    hole = next((number for number, name in enumerate(names) if name != entry_file(number)), None)
    if hole is not None and _read(store, hole) is None:
        raise UserError(_missing(store, hole))
    known = range(int(names[-1][:8]) + 1 if names else 0)
    files = _patiently(store, lambda: store.read_many([entry_file(number) for number in known]))
    while (data := _read(store, len(files))) is not None:  # a listing may be older than the last entry
        files.append(data)
    entries: list[LedgerEntry] = []
    for number, data in enumerate(files):
        entries.append(_checked(store, number, data, entries))
    return entries


def append_entry(store: Store, make: Callable[[Sequence[LedgerEntry]], Content | None]) -> list[LedgerEntry]:
    """Append content computed from the previous entries; it is computed again if another writer appends first.

    Args:
        store: the folder of the ledger; it need not exist yet.
        make: returns the content to append for all entries, as plain values; None to append nothing. It is called
            again for each entry that another writer appends meanwhile.

    Returns:
        All entries, including the appended one, if any, as the last.

    Raises:
        UserError: as `read_ledger`, or the store cannot create a file only if it is absent.
        IncompleteError: the store does not answer. The entry may have been written; `make` receives it in the next
            call.
    """
    for _ in range(_RACES):
        entries = read_ledger(store)
        content = make(entries)
        if content is None:
            return entries
        number = len(entries)
        data = to_json(
            sealed(
                {
                    "number": number,
                    "previous": entries[-1].sha256 if entries else None,
                    "writer": uuid.uuid4().hex,
                    "content": json.loads(to_json(content)),
                }
            )
        )
        if _created(store, entry_file(number), data):
            return [*entries, _checked(store, number, data, entries)]
    raise IncompleteError(f"{store.url}: {_RACES} other writers appended first; rerun the command")


def entry_file(number: int) -> str:
    """The file name of an entry in the folder of the ledger."""
    return f"{number:08d}.json"


def _read(store: Store, number: int) -> bytes | None:
    """The file of an entry; None if it does not exist."""
    return _patiently(store, lambda: store.read_many([entry_file(number)])[0])


def _created(store: Store, name: str, data: bytes) -> bool:
    """Create an entry; False if another writer created it first.

    A creation whose response is lost may have succeeded, also if the file system repeats requests by itself; the
    existing file is then this writer's.
    """

    def create() -> bool:
        try:
            return store.create(name, data, last_may_win=False) or store.read(name) == data
        except NotWrittenError as error:
            raise UserError(
                f"ledger {store.url} cannot be written to: {error.reason}: grant write access and rerun the command"
            ) from None

    return _patiently(store, create)


def _patiently(store: Store, work: Callable[[], T]) -> T:
    """Repeat idempotent requests until the store answers.

    Raises:
        UserError: the folder does not exist or access is denied, or the store is a local disk.
        IncompleteError: the store does not answer.
    """
    for pause in (*PAUSES, None):
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            raise UserError(f"ledger {store.url}: {_reason(error)}") from None
        except Exception as error:
            if not is_of_storage(error):
                raise
            if store.local:  # another attempt would fail as well
                raise UserError(f"ledger {store.url}: {_reason(error)}") from None
            if pause is None:
                raise IncompleteError(
                    f"ledger {store.url} does not answer ({_reason(error)}): rerun the command later"
                ) from None
            time.sleep(pause)
    raise AssertionError


def _missing(store: Store, number: int) -> str:
    return f"ledger {store.url}: entry {number} is missing, and later ones are there: put {entry_file(number)} back"


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _checked(store: Store, number: int, data: bytes | None, before: Sequence[LedgerEntry]) -> LedgerEntry:
    """Parse an entry and check that it is unchanged and follows the previous one.

    Raises:
        UserError: one of these checks fails.
    """
    where = f"ledger {store.url}: entry {number}"
    if data is None:
        raise UserError(_missing(store, number))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is damaged: {entry_file(number)} is not JSON") from None
    if not isinstance(value, dict) or value.keys() != _KEYS or not isinstance(value["content"], dict):
        raise UserError(f"{where} is damaged: {entry_file(number)} is no entry of a ledger")
    if not is_sealed(value) or to_json(value) != data:
        raise UserError(f"{where} was edited: {entry_file(number)} is not as it was appended; put the first one back")
    if value["number"] != number:
        raise UserError(f"{where} was replaced: {entry_file(number)} is entry {value['number']}")
    previous = before[-1].sha256 if before else None
    if value["previous"] != previous:
        what = f"follows another entry {number - 1} than the one that is there" if before else "is no first entry"
        raise UserError(f"{where} {what}: one of both was replaced, or comes from another ledger")
    return LedgerEntry(number, value["content"], hashlib.sha256(data).hexdigest())
