"""Receipts of a stage, several hundred in one file, so that an object store is asked once for all of these.

The listing of the receipts says which there are. A compaction only saves reading them one by one: what it holds of a
receipt counts while the listing says of that receipt what it said then, so a receipt that was withdrawn or made again
is read itself. A compaction is named after its content and never changed; whoever writes one twice writes the same.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.store.files import Store

COMPACTED = 500
"""Receipts of one compaction, at most."""

LEAST = 2
AT_ONCE = 256
"""Receipts that are read side by side; memory holds no more of them."""

_SUFFIX = ".json"
_ENDING = ".json.gz"
_Entry = tuple[str, list[str], str]  # shard, what the listing said of its receipt, the receipt


def read_filed_receipts(store: Store, stage: str) -> Iterator[tuple[str, bytes]]:
    """Shard and content of every receipt of a stage, in the order of their shards."""
    marks = _marks(store, stage)
    places = {} if store.local else _places(store, stage, marks)
    shards = sorted(marks)
    opened: tuple[str, dict[str, str]] = ("", {})
    for start in range(0, len(shards), AT_ONCE):
        some = shards[start : start + AT_ONCE]
        single = [shard for shard in some if shard not in places]
        read = dict(zip(single, store.read_many([_name(stage, shard) for shard in single]), strict=True))
        for shard in some:
            if shard in places:
                if opened[0] != places[shard]:
                    opened = places[shard], {shard: text for shard, _, text in _entries(store, places[shard])}
                yield shard, opened[1][shard].encode("utf-8", "surrogateescape")
            elif (data := read[shard]) is not None:
                yield shard, data


def compact_receipts(store: Store, stage: str) -> None:
    """Compact the receipts of a stage that no compaction holds, and remove compactions that hold none that counts.

    On a local disk nothing is done: its files are read at no cost. May be called at any time, by several drivers.
    """
    if store.local:
        return
    marks = _marks(store, stage)
    places = _places(store, stage, marks)
    for name in _compactions(store, stage):
        if name not in places.values():
            store.remove(name)
    single = sorted(marks.keys() - places.keys())
    if len(single) < LEAST:
        return
    for start in range(0, len(single), COMPACTED):
        group = single[start : start + COMPACTED]
        texts = store.read_many([_name(stage, shard) for shard in group])
        entries = [
            (s, marks[s], text.decode("utf-8", "surrogateescape"))
            for s, text in zip(group, texts, strict=True)
            if text is not None
        ]
        _write(store, stage, entries)


def _write(store: Store, stage: str, entries: Sequence[_Entry]) -> None:
    data = gzip.compress(json.dumps(entries).encode(), mtime=0)
    store.write(f"{_folder(stage)}/{hashlib.sha256(data).hexdigest()}{_ENDING}", data)


def _places(store: Store, stage: str, marks: dict[str, list[str]]) -> dict[str, str]:
    """The compaction of every shard whose receipt is as it was when it was compacted."""
    names = _compactions(store, stage)
    store.read_many(names, keep=True)  # side by side
    return {shard: name for name in names for shard, mark, _ in _entries(store, name) if marks.get(shard) == mark}


def _entries(store: Store, name: str) -> list[_Entry]:
    """What a compaction holds; nothing where it is gone or not what its name says."""
    (data,) = store.read_many([name], keep=True)
    if data is None or hashlib.sha256(data).hexdigest() != name.rsplit("/", 1)[-1].removesuffix(_ENDING):
        return []
    value: Any = json.loads(gzip.decompress(data))
    return [(shard, mark, text) for shard, mark, text in value]


def _compactions(store: Store, stage: str) -> list[str]:
    return [f"{_folder(stage)}/{name}" for name in store.names(_folder(stage), _ENDING)]


def _marks(store: Store, stage: str) -> dict[str, list[str]]:
    listing = store.listing(f"receipts/{stage}")
    return {name.removesuffix(_SUFFIX): mark for name, mark in listing.items() if name.endswith(_SUFFIX)}


def _name(stage: str, shard: str) -> str:
    return f"receipts/{stage}/{shard}{_SUFFIX}"


def _folder(stage: str) -> str:
    return f"compacted/{stage}"
