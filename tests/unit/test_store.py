"""The run directory: whole files or none, and one driver at a time."""

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import BusyError, ExitCode, UserError
from pipeline.store import lock as lock_module
from pipeline.store.files import Store
from pipeline.store.lock import RunLock, lock_is_live
from pipeline.store.receipts import FileRecord, Receipt


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run") if request.param == "local" else f"memory://run-{time.time_ns()}")


def test_a_receipt_that_loses_a_document_or_the_digest_of_a_file_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="no digest of q"):
        Receipt("s", "audit", 3, 2, 1, "d", "q", {"empty": 1}, {}, {"d": FileRecord(2, 100, "ab12")}, "cd34")
    with pytest.raises(ValueError, match="3 in, 1 scored, 1 quarantined"):
        Receipt("s", "audit", 3, 1, 1, "d", None, {}, {}, {"d": FileRecord(1, 100, "ab12")}, "cd34")


def test_no_flipped_bit_of_the_pages_of_a_table_gives_other_values(tmp_path: Path) -> None:
    store, table = Store(str(tmp_path)), pa.table({"row": range(2000), "weight": [7 * i for i in range(2000)]})
    store.write_table("weights.parquet", table)
    path = tmp_path / "weights.parquet"
    whole = path.read_bytes()
    pages = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for bit in range(0, 8 * pages, 211):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert store.read_table("weights.parquet").equals(table)  # a bit of a page's head may say nothing
        except UserError:
            refused += 1
    assert refused > 0.9 * len(range(0, 8 * pages, 211))


def test_listing_shows_no_half_written_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("receipts/score/a.json", b"{}")
    (tmp_path / "receipts" / "score" / ".b.json.123").write_bytes(b"{")
    assert store.names("receipts/score") == ["a.json"]


def test_a_second_driver_is_told_who_holds_the_run(store: Store) -> None:
    with RunLock(store), pytest.raises(BusyError, match=f"process {os.getpid()}") as caught, RunLock(store):
        pass
    assert caught.value.exit_code == ExitCode.BUSY == 75
    with RunLock(store):
        pass
    assert not lock_is_live(store)


def test_a_driver_whose_lock_was_taken_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.05)
    with RunLock(store) as lock:
        store.write_json("lock/000002.json", {"owner": "another"})
        assert lock.lost.wait(20)
        for refused in (lock.check, lambda: lock.held.write_json("status.json", {}), lambda: lock.held.remove("a")):
            with pytest.raises(BusyError, match="taken over"):
                refused()
    assert not store.exists("status.json")
    assert store.read_json("lock/000002.json") == {"owner": "another"}
