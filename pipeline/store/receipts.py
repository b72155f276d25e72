"""Receipts: durable proof that one stage finished one shard; and their tables, checked by digest."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import DamagedError, UserError, VersionError, error_line
from pipeline.store.files import Store, to_json

_log = logging.getLogger(__name__)

DIGEST = "digest"
"""Key of a receipt's file with the SHA-256 of all its other keys."""

REMADE = "seenset run writes it again"

COMPACTED = 500
"""Maximum number of receipts of one compaction."""

AT_ONCE = 256
"""Receipts that are read concurrently and held in memory."""

_SUFFIX = ".json.gz"
_Entry = tuple[str, list[str], str]  # shard, mark of its receipt in the listing, receipt


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and digest of a table of a run directory when it was written."""

    rows: int
    size: int  # bytes
    sha256: str  # hexadecimal, of the whole file


@dataclass(frozen=True, slots=True)
class Receipt:
    """The durable proof that one stage finished one shard: n_in == n_scored + n_quarantined + n_judged."""

    shard: str
    role: str
    n_in: int
    n_scored: int
    n_quarantined: int
    data: str
    quarantine: str | None
    reasons: dict[str, int]
    fingerprint: dict[str, Any]
    files: dict[str, FileRecord]  # by name: data, quarantine and all other files that are read through the receipt
    documents: str  # SHA-256 of the shard's ids and texts before any transform
    tokens: int = 0
    n_truncated: int = 0
    seconds: float = 0.0
    gradient: dict[str, Any] | None = None  # weights and method of the gradient norm, if computed
    spent: dict[str, int] | None = None  # requests and tokens, if an endpoint was used
    earlier: tuple[str, ...] = ()  # tables of earlier receipts, in order, that its data extends
    n_judged: int = 0  # left out because an earlier run audited their text
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)  # `Notes.counts` of the reader; omitted if empty

    def __post_init__(self) -> None:
        """Refuse a receipt with inconsistent counts, or with a file without digest."""
        if self.n_in != self.n_scored + self.n_quarantined + self.n_judged:
            raise ValueError(
                f"shard {self.shard}: {self.n_in} in, {self.n_scored} scored, {self.n_quarantined} quarantined, "
                f"{self.n_judged} already audited"
            )
        for name in (self.data, self.quarantine, *self.earlier):
            if name is not None and name not in self.files:
                raise ValueError(f"shard {self.shard}: no digest of {name}")

    @property
    def n_new(self) -> int:
        """Documents that no earlier run has audited."""
        return self.n_in - self.n_judged

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file; the receipt's digest is the last."""
        value = json.loads(to_json(asdict(self)))
        return sealed(value if self.notes else {key: value[key] for key in value if key != "notes"})

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Receipt:
        """The inverse of `to_dict`.

        Args:
            value: content of a file.
            where: path of the file, for messages.

        Raises:
            DamagedError: a value differs from the written one.
            VersionError: a version without digests wrote it.
        """
        if not isinstance(value, dict):
            raise DamagedError(where, "is damaged: no mapping of keys to values", REMADE)
        if DIGEST not in value and "files" not in value:
            fingerprint = value.get("fingerprint")
            writer = fingerprint.get("code") if isinstance(fingerprint, dict) else None
            fault = f"was written by seenset {writer or 'of an unknown version'}, which kept no digests of files"
            raise VersionError(
                where, fault, "start a new run directory with seenset run, or use that version", mark=": "
            )
        if not is_sealed(value):
            raise DamagedError(where, "is damaged: its digest is not the one that was written", REMADE)
        kept = {key: value[key] for key in value if key in _KEYS}
        try:
            files = {name: FileRecord(**record) for name, record in value["files"].items()}
            notes = {name: (int(count), int(first)) for name, (count, first) in value.get("notes", {}).items()}
            return cls(**{**kept, "files": files, "earlier": tuple(value.get("earlier", ())), "notes": notes})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise VersionError(where, f"was written by another version of seenset: {error}") from None


_KEYS = frozenset(entry.name for entry in fields(Receipt))  # other keys indicate another version


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A record of plain values with its digest as the last key."""
    return {**value, DIGEST: json_digest(value)}


def is_sealed(value: Mapping[str, Any]) -> bool:
    """Whether a record from `sealed` is unchanged."""
    return value.get(DIGEST) == json_digest({key: value[key] for key in value if key != DIGEST})


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys, hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def receipt_name(stage: str, shard: str) -> str:
    """The file name of a receipt in the run directory."""
    return f"receipts/{stage}/{shard}.json"


def write_receipt(store: Store, stage: str, receipt: Receipt) -> Receipt:
    """Write the receipt if the shard has none; return the valid one.

    If two attempts end at the same time, one wins, and readers use only the files that its receipt names.
    """
    if store.create(receipt_name(stage, receipt.shard), to_json(receipt.to_dict())):
        return receipt
    filed = read_receipt(store, stage, receipt.shard)
    assert filed is not None
    return filed


def withdraw_receipt(store: Store, stage: str, shard: str) -> None:
    """Remove the receipt of a shard, so that the stage processes the shard again."""
    store.remove(receipt_name(stage, shard))


def read_receipt(store: Store, stage: str, shard: str) -> Receipt | None:
    """The receipt of one shard; None if the stage has not finished it.

    Raises:
        DamagedError: it is damaged.
        VersionError: a version without digests wrote it.
    """
    data = store.find(receipt_name(stage, shard))
    return None if data is None else _parsed(store, stage, shard, data)


def _parsed(store: Store, stage: str, shard: str, data: bytes) -> Receipt:
    where = f"{store.url}/{receipt_name(stage, shard)}"
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedError(where, "is damaged: not JSON", REMADE) from None
    receipt = Receipt.from_dict(value, where)
    if receipt.shard != shard:
        raise DamagedError(where, f"is damaged: it is the receipt of shard {receipt.shard}", REMADE)
    return receipt


def intact_receipts(store: Store, stage: str) -> Iterator[Receipt]:
    """All receipts of a stage; a damaged receipt is removed, and its shard is processed again.

    Raises:
        VersionError: a version without digests wrote one.
    """
    for shard, data in _contents_of_receipts(store, stage):
        try:
            yield _parsed(store, stage, shard, data)
        except DamagedError as error:
            withdraw_receipt(store, stage, shard)
            _log.warning("%s", made_again(error))


def made_again(error: DamagedError) -> str:
    """The error as a message of the run that writes the file again."""
    return f"{error.problem}; its shard is processed again"


def read_receipts(store: Store, stage: str) -> Iterator[Receipt]:
    """All receipts of a stage, ordered by shard.

    Raises:
        DamagedError: a receipt is damaged.
        VersionError: a version without digests wrote one.
    """
    for shard, data in _contents_of_receipts(store, stage):
        yield _parsed(store, stage, shard, data)


def _contents_of_receipts(store: Store, stage: str) -> Iterator[tuple[str, bytes]]:
    """Shard and content of every receipt of a stage, ordered by shard."""
    places: dict[str, str] = {}
    if store.local:
        names = store.names(f"receipts/{stage}", ".json")
    else:
        marks = _marks(store, stage)
        places, names = _places(store, stage, marks), sorted(marks)
    opened: tuple[str, dict[str, str]] = ("", {})
    for start in range(0, len(names), AT_ONCE):
        some = [name.removesuffix(".json") for name in names[start : start + AT_ONCE]]
        single = [shard for shard in some if shard not in places]
        read = dict(zip(single, store.read_many([receipt_name(stage, shard) for shard in single]), strict=True))
        for shard in some:
            if shard in places:
                if opened[0] != places[shard]:
                    opened = places[shard], {shard: text for shard, _, text in _entries(store, places[shard])}
                yield shard, opened[1][shard].encode("utf-8", "surrogateescape")
            elif (data := read[shard]) is not None:
                yield shard, data


def compact_receipts(store: Store, stage: str) -> None:
    """Compact the receipts of a stage that no compaction contains, and remove compactions without valid receipts.

    A local disk needs no compaction. May be called at any time, by several drivers.
    """
    if store.local:
        return
    marks = _marks(store, stage)
    places = _places(store, stage, marks)
    for name in _compactions(store, stage):
        if name not in places.values():
            store.remove(name)
    single = sorted(marks.keys() - places.keys())
    if len(single) < 2:
        return
    for start in range(0, len(single), COMPACTED):
        group = single[start : start + COMPACTED]
        texts = store.read_many([receipt_name(stage, shard) for shard in group])
        entries = [
            (s, marks[s], text.decode("utf-8", "surrogateescape"))
            for s, text in zip(group, texts, strict=True)
            if text is not None
        ]
        data = gzip.compress(json.dumps(entries).encode(), mtime=0)
        store.write(f"compacted/{stage}/{hashlib.sha256(data).hexdigest()}{_SUFFIX}", data)


def _places(store: Store, stage: str, marks: dict[str, list[str]]) -> dict[str, str]:
    """The compaction of every shard whose receipt has not changed since compaction."""
    names = _compactions(store, stage)
    store.read_many(names, keep=True)  # concurrently
    return {shard: name for name in names for shard, mark, _ in _entries(store, name) if marks.get(shard) == mark}


def _entries(store: Store, name: str) -> list[_Entry]:
    """The entries of a compaction; empty if it is missing or does not match its name."""
    (data,) = store.read_many([name], keep=True)
    if data is None or hashlib.sha256(data).hexdigest() != name.rsplit("/", 1)[-1].removesuffix(_SUFFIX):
        return []
    value: Any = json.loads(gzip.decompress(data))
    return [(shard, mark, text) for shard, mark, text in value]


def _compactions(store: Store, stage: str) -> list[str]:
    return [f"compacted/{stage}/{name}" for name in store.names(f"compacted/{stage}", _SUFFIX)]


def _marks(store: Store, stage: str) -> dict[str, list[str]]:
    listing = store.listing(f"receipts/{stage}")
    return {name.removesuffix(".json"): mark for name, mark in listing.items() if name.endswith(".json")}


_checked: set[tuple[str, str, object]] = set()
"""Files that this process has checked: address, digest, and on a local disk the modification time.

Selection reads a score file several times; its digest is computed the first time. On a local disk a file that was
changed since is checked again. Objects of an object store are immutable: each attempt writes under another name.
"""


def write_filed(store: Store, name: str, table: pa.Table) -> FileRecord:
    """Write a Parquet file atomically and return its record for the receipt."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    data = buffer.getvalue()
    store.write(name, data)
    return FileRecord(len(table), len(data), hashlib.sha256(data).hexdigest())


def read_filed(
    store: Store, receipt: Receipt, columns: Sequence[str] | None = None, name: str | None = None
) -> pa.Table:
    """A table that a receipt names, by default its data.

    Raises:
        DamagedError: the file is missing, or differs from its record in the receipt.
        UserError: it cannot be read now.
    """
    name = receipt.data if name is None else name
    record = receipt.files[name]
    where = f"{store.url}/{name}"
    try:
        data = check_filed(store, name, record)
        table = _parse_table(data, columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"cannot read {where}: {error_line(error)}") from None
    if len(table) != record.rows:
        raise DamagedError(where, f"is damaged: {len(table)} rows, {record.rows} were filed", REMADE)
    return table


def _parse_table(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    """Parse a table of a few thousand rows; `pq.read_table` takes four times as long, because of its threads.

    Raises:
        pa.ArrowInvalid: it is not a Parquet table, or a column is missing.
    """
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        for name in columns or ():
            if name not in file.schema_arrow.names:
                raise pa.ArrowInvalid(f"it has no column {name!r}")
        table = file.read(columns=None if columns is None else list(columns), use_threads=False)
    return table if columns is None else table.select(list(columns))


def check_filed(store: Store, name: str, record: FileRecord) -> bytes:
    """The content of a file, checked against the digest in its receipt.

    Raises:
        DamagedError: the file is missing, or differs from its record in the receipt.
        OSError: it cannot be read now.
    """
    where = f"{store.url}/{name}"
    try:
        # Taken before the read, so that a change in between is detected the next time.
        state = (where, record.sha256, os.stat(store.path(name)).st_mtime_ns if store.local else None)
        data = store.read_fixed(name)
    except FileNotFoundError:
        raise DamagedError(where, "is missing", REMADE) from None
    if state not in _checked:
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DamagedError(where, "is damaged: its content is not what was filed", REMADE)
        _checked.add(state)
    return data
