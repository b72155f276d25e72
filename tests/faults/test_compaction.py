"""Compacted receipts: readers trust either form, and neither a crash nor a second driver loses or revives one."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from empty_receipts import receipt_of

from pipeline.errors import DamagedError
from pipeline.store.files import Store
from pipeline.store.receipts import (
    Receipt,
    compact_receipts,
    read_receipts,
    receipt_name,
    withdraw_receipt,
    write_receipt,
)

SHARDS = [f"audit-{number:06d}" for number in range(30)]


@pytest.fixture
def store() -> Store:
    run = Store(f"memory://run-{time.time_ns()}")
    for shard in SHARDS:
        write_receipt(run, "score", receipt_of(shard))
    return run


def names(store: Store) -> list[str]:
    return store.names("compacted/score")


def shards_of(store: Store) -> list[str]:
    return [receipt.shard for receipt in read_receipts(store, "score")]


def test_receipts_are_the_same_compacted_or_not_and_however_often(store: Store) -> None:
    single = list(read_receipts(store, "score"))
    assert [receipt.shard for receipt in single] == SHARDS
    for _ in range(2):
        compact_receipts(store, "score")
        assert len(names(store)) == 1
        assert list(read_receipts(store, "score")) == single
    more = [receipt_of(f"audit-{number:06d}") for number in range(30, 33)]
    for receipt in more:
        write_receipt(store, "score", receipt)
    assert list(read_receipts(store, "score")) == [*single, *more]
    compact_receipts(store, "score")
    assert len(names(store)) == 2
    assert list(read_receipts(store, "score")) == [*single, *more]


def test_a_receipt_that_was_withdrawn_does_not_come_back_and_one_made_again_counts(store: Store) -> None:
    compact_receipts(store, "score")
    withdraw_receipt(store, "score", SHARDS[7])
    assert shards_of(store) == [shard for shard in SHARDS if shard != SHARDS[7]]
    again = receipt_of(SHARDS[7], "scores/again.parquet")
    write_receipt(store, "score", again)
    assert list(read_receipts(store, "score"))[7] == again
    compact_receipts(store, "score")
    assert list(read_receipts(store, "score"))[7] == again


def test_a_late_attempt_at_a_compacted_shard_gets_the_receipt_that_counts(store: Store) -> None:
    compact_receipts(store, "score")
    late = write_receipt(store, "score", receipt_of(SHARDS[3], "scores/late.parquet"))
    assert late == receipt_of(SHARDS[3])
    assert list(read_receipts(store, "score"))[3] == late


def test_a_damaged_compaction_is_passed_over_and_replaced(store: Store) -> None:
    compact_receipts(store, "score")
    (name,) = names(store)
    whole = store.read(f"compacted/score/{name}")
    for damaged in (whole[: len(whole) // 2], b"", whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]):
        store.write(f"compacted/score/{name}", damaged)
        store.begin()
        assert shards_of(store) == SHARDS
        compact_receipts(store, "score")
        store.begin()
        assert store.read(f"compacted/score/{name}") == whole
        assert shards_of(store) == SHARDS


def test_a_damaged_receipt_is_named_whether_it_was_compacted_before_or_after(store: Store) -> None:
    for _ in range(2):
        store.write(receipt_name("score", SHARDS[5]), b'{"shard": "\xff')
        for _ in range(2):
            with pytest.raises(DamagedError, match=r"audit-000005\.json is damaged"):
                shards_of(store)
            compact_receipts(store, "score")


def test_drivers_that_write_withdraw_and_compact_at_once_lose_nothing(store: Store) -> None:
    more = [receipt_of(f"unseen-{number:06d}") for number in range(60)]
    again = [receipt_of(shard, "scores/again.parquet") for shard in SHARDS[:10]]

    def write(receipt: Receipt) -> None:
        if receipt.shard in SHARDS:
            withdraw_receipt(store, "score", receipt.shard)
        write_receipt(store, "score", receipt)

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(write, receipt) for receipt in [*more, *again]]
        jobs += [pool.submit(compact_receipts, store, "score") for _ in range(12)]
        read = [pool.submit(shards_of, store) for _ in range(6)]
        for job in [*jobs, *read]:
            job.result()
    for _ in range(2):
        filed = {receipt.shard: receipt for receipt in read_receipts(store, "score")}
        assert filed.keys() == {*SHARDS, *(receipt.shard for receipt in more)}
        assert all(filed[receipt.shard] == receipt for receipt in [*more, *again])
        compact_receipts(store, "score")


def test_compactions_of_receipts_that_are_gone_are_removed(store: Store) -> None:
    compact_receipts(store, "score")
    store.remove_folder("receipts/score")
    assert shards_of(store) == []
    write_receipt(store, "score", replace(receipt_of(SHARDS[0]), tokens=7))
    write_receipt(store, "score", replace(receipt_of(SHARDS[1]), tokens=7))
    compact_receipts(store, "score")
    assert len(names(store)) == 1
    assert [receipt.tokens for receipt in read_receipts(store, "score")] == [7, 7]
