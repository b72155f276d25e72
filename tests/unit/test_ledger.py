"""The ledger: entries that are appended once, in order, and cannot be changed unnoticed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import user_error
from fsspec import AbstractFileSystem

from pipeline.errors import UserError
from pipeline.store.files import Store, to_json
from pipeline.store.ledger import LedgerEntry, append_entry, entry_file, read_ledger
from pipeline.store.receipts import sealed


@pytest.fixture
def ledger(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "ledger"))
    for value in range(4):
        append_entry(store, lambda entries, value=value: {"value": value})
    return store


def problem(store: Store) -> str:
    return user_error(read_ledger, store)


def test_entries_come_back_in_the_order_in_which_they_were_appended(ledger: Store) -> None:
    assert [(entry.number, entry.content) for entry in read_ledger(ledger)] == [(n, {"value": n}) for n in range(4)]


def test_a_ledger_that_is_not_there_has_no_entries(tmp_path: Path) -> None:
    assert read_ledger(Store(str(tmp_path / "none"))) == []
    assert not (tmp_path / "none").exists()


def test_nothing_is_appended_where_nothing_is_left_to_append(ledger: Store) -> None:
    assert len(append_entry(ledger, lambda entries: None)) == 4


def test_writers_at_once_get_an_entry_each_and_see_all_before_it(tmp_path: Path) -> None:
    def write(name: str) -> None:
        store = Store(str(tmp_path / "ledger"))
        for turn in range(10):
            append_entry(store, lambda entries, turn=turn: {"writer": name, "turn": turn, "before": len(entries)})

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    entries = read_ledger(Store(str(tmp_path / "ledger")))
    assert [entry.content["before"] for entry in entries] == list(range(30))
    for name in "abc":
        assert [e.content["turn"] for e in entries if e.content["writer"] == name] == list(range(10))


def test_a_hole_is_named(ledger: Store) -> None:
    ledger.remove(entry_file(2))
    assert "entry 2 is missing" in problem(ledger)
    ledger.remove(entry_file(0))
    assert "entry 0 is missing" in problem(ledger)


@pytest.mark.parametrize("number", range(4))
def test_an_edit_of_any_entry_is_named(ledger: Store, number: int) -> None:
    value = ledger.read_json(entry_file(number))
    ledger.write_json(entry_file(number), {**value, "content": {"value": 99}})
    assert f"entry {number} was edited" in problem(ledger)


@pytest.mark.parametrize("number", range(3))
def test_an_edit_that_mends_its_own_digest_is_given_away_by_the_next_entry(ledger: Store, number: int) -> None:
    value = ledger.read_json(entry_file(number))
    del value["digest"]
    ledger.write_json(entry_file(number), sealed({**value, "content": {"value": 99}}))
    assert f"entry {number + 1} follows another entry {number}" in problem(ledger)


def test_no_changed_byte_of_an_entry_goes_unnoticed(ledger: Store) -> None:
    whole = ledger.read(entry_file(3))
    for at in range(0, len(whole), 7):
        ledger.write(entry_file(3), whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "entry 3 " in problem(ledger)


def test_a_stray_number_far_away_is_a_hole_and_costs_no_memory(ledger: Store) -> None:
    ledger.write("99999999.json", ledger.read(entry_file(0)))
    assert "is missing, and later ones are there" in problem(ledger)


def test_the_branches_of_a_fork_cannot_be_put_together(ledger: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    for number in range(3):
        other.write(entry_file(number), ledger.read(entry_file(number)))
    for value in ("x", "y"):
        append_entry(other, lambda entries, value=value: {"value": value})
    ledger.write(entry_file(4), other.read(entry_file(4)))
    assert "entry 4 follows another entry 3" in problem(ledger)


@pytest.mark.parametrize("name", ["manifest.json", "00000004.json.bak", "notes", "4.json"])
def test_a_foreign_file_is_named(ledger: Store, name: str) -> None:
    ledger.write(name, b"{}")
    assert f"it holds {name}" in problem(ledger)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b"null", b'{"number": 4}', b"[" * 100_000])
def test_rubbish_in_place_of_an_entry_is_named(ledger: Store, data: bytes) -> None:
    ledger.write(entry_file(4), data)
    assert "entry 4 is damaged" in problem(ledger)


def test_a_folder_in_place_of_an_entry_is_refused(ledger: Store, tmp_path: Path) -> None:
    (tmp_path / "ledger" / entry_file(4)).mkdir()
    assert "Is a directory" in problem(ledger)


def test_an_entry_under_another_number_is_named(ledger: Store) -> None:
    ledger.write(entry_file(4), ledger.read(entry_file(3)))
    assert "entry 4 was replaced: 00000004.json is entry 3" in problem(ledger)


def test_a_store_that_cannot_tell_the_first_of_two_writers_holds_no_ledger() -> None:
    class Forgetful(AbstractFileSystem):
        protocol = "forgetful"

        def ls(self, path: str, detail: bool = True, **_: object) -> list[str]:
            raise FileNotFoundError(path)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
            if mode == "create":
                raise NotImplementedError

    store = Store("memory://ledger")
    store.fs = Forgetful()
    with pytest.raises(UserError, match="cannot create a file only where it is absent"):
        append_entry(store, lambda entries: {"value": 1})


def test_an_entry_holds_what_a_person_can_read(ledger: Store) -> None:
    value = json.loads(ledger.read(entry_file(1)))
    assert value["content"] == {"value": 1}
    assert value["previous"] == read_ledger(ledger)[0].sha256
    assert to_json(value) == ledger.read(entry_file(1))


def test_what_is_appended_follows_from_all_entries_before(ledger: Store) -> None:
    def total(entries: Sequence[LedgerEntry]) -> dict[str, int]:
        return {"value": sum(entry.content["value"] for entry in entries)}

    assert append_entry(ledger, total)[-1].content == {"value": 6}


def test_a_folder_that_cannot_be_made_is_named_as_the_ledgers() -> None:
    store = Store("/proc/seenset-ledger")
    with pytest.raises(UserError, match=r"^ledger /proc/seenset-ledger cannot be written to: .*: give the right"):
        append_entry(store, lambda entries: {"kind": "opening"})
