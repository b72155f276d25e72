"""The shard table of a run directory, written and read a shard at a time: there may be hundreds of thousands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeline.corpus.formats import by_bytes
from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError
from pipeline.store.files import Store

SHARDS_FILE = "shards.json"


def write_shards(store: Store, shards: Iterable[Shard]) -> None:
    """Write the table: a JSON list, a line a shard.

    Raises:
        UserError: the run directory cannot be written to.
    """
    with store.replaced(SHARDS_FILE) as file:
        ending = "["
        for shard in shards:
            file.write(f"{ending}\n{json.dumps(shard.to_dict())}".encode())
            ending = ","
        file.write(b"[]\n" if ending == "[" else b"\n]\n")


def read_shards(store: Store) -> list[Shard] | None:
    """The shard table of a run directory; None where there is none.

    Raises:
        DamagedError: a damaged table.
    """
    try:
        return list(_shards(store))
    except FileNotFoundError:
        return None


def reconciled_shards(store: Store, planned: Sequence[Shard]) -> tuple[Shard, ...] | None:
    """The planned shards as the table numbers their rows; None where there is no table, or one of other shards.

    Raises:
        DamagedError: a damaged table.
    """
    shards, expected = [], enumerate(planned)
    try:
        for filed in _shards(store):
            for position, shard in expected:
                if shard.id == filed.id:
                    break
                if not _may_have_no_rows(planned, position):
                    return None
            else:
                return None
            # the numbered one shares what it can with the planned one, which the caller may hold too
            numbered = shard if shard.first_row == filed.first_row else replace(shard, first_row=filed.first_row)
            if numbered != filed:
                return None
            shards.append(numbered)
    except FileNotFoundError:
        return None
    return tuple(shards) if next(expected, None) is None else None


def _may_have_no_rows(planned: Sequence[Shard], position: int) -> bool:
    """Whether counting rows may leave a planned shard out: a range behind the first of a file, before its last."""
    if position + 1 == len(planned):
        return False
    shard, following = planned[position : position + 2]
    return by_bytes(shard) and shard.start > 0 and (shard.role, shard.path) == (following.role, following.path)


def _shards(store: Store) -> Iterator[Shard]:
    """The shards of the table. Raises FileNotFoundError."""
    with store.fs.open(store.path(SHARDS_FILE), "rb") as file:
        try:
            first, second = file.readline(), file.readline()
            if first == b"[\n" and second.startswith(b"{"):
                yield from _of_lines(file, second)
            else:  # an empty one, or as earlier versions wrote it
                yield from map(Shard.from_dict, json.loads(first + second + file.read()))
        except (json.JSONDecodeError, RecursionError):
            raise DamagedError(f"{store.url}/{SHARDS_FILE} is damaged: not JSON") from None
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DamagedError(f"{store.url}/{SHARDS_FILE} is damaged: {error}") from None


def _of_lines(file: Iterable[bytes], line: bytes) -> Iterator[Shard]:
    """A shard a line, up to the bracket that ends the list. Raises ValueError."""
    for following in file:
        yield Shard.from_dict(json.loads(line.rstrip(b",\n")))
        line = following
    if line.strip() != b"]":
        raise ValueError("it is cut off")
