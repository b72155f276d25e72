"""The ledger: entries that are appended once, in order, and cannot be changed unnoticed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem

from pipeline.store.files import Store
from pipeline.store.ledger import append_entry, entry_file, read_ledger
from pipeline.store.receipts import sealed
from tests.helpers.commands import user_error


@pytest.fixture
def ledger(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "ledger"))
    for value in range(4):
        append_entry(store, lambda entries, value=value: {"value": value})
    return store


def problem(store: Store) -> str:
    return user_error(read_ledger, store)


def test_entries_come_back_in_their_order_and_no_changed_byte_goes_unnoticed(ledger: Store, tmp_path: Path) -> None:
    assert len(append_entry(ledger, lambda entries: None)) == 4, "nothing is left to append"
    assert [(entry.number, entry.content) for entry in read_ledger(ledger)] == [(n, {"value": n}) for n in range(4)]
    assert read_ledger(Store(str(tmp_path / "none"))) == []
    assert not (tmp_path / "none").exists()
    whole = ledger.read(entry_file(3))
    for at in range(0, len(whole), 7):
        ledger.write(entry_file(3), whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "entry 3 " in problem(ledger)


def edited(number: int, mended: bool = False) -> Callable[[Store], None]:
    """Changes an entry, and with it the digest in it if that is mended."""

    def edit(ledger: Store) -> None:
        value = {**ledger.read_json(entry_file(number)), "content": {"value": 99}}
        digest = value.pop("digest")
        ledger.write_json(entry_file(number), sealed(value) if mended else {**value, "digest": digest})

    return edit


def fork(ledger: Store) -> None:
    other = Store("memory://fork")
    for number in range(3):
        other.write(entry_file(number), ledger.read(entry_file(number)))
    for value in ("x", "y"):
        append_entry(other, lambda entries, value=value: {"value": value})
    ledger.write(entry_file(4), other.read(entry_file(4)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ledger: ledger.remove(entry_file(2)), "entry 2 is missing"),
        (lambda ledger: ledger.remove(entry_file(0)), "entry 0 is missing"),
        *((edited(number), f"entry {number} was edited") for number in range(4)),
        *((edited(number, True), f"entry {number + 1} follows another entry {number}") for number in range(3)),
        (lambda ledger: ledger.write("99999999.json", ledger.read(entry_file(0))), "is missing, and later ones are"),
        (fork, "entry 4 follows another entry 3"),
        *(
            (lambda ledger, name=name: ledger.write(name, b"{}"), f"it holds {name}")
            for name in ("manifest.json", "00000004.json.bak", "notes", "4.json")
        ),
        *(
            (lambda ledger, data=data: ledger.write(entry_file(4), data), "entry 4 is damaged")
            for data in (b"", b"\xff", b"[]", b"{}", b"null", b'{"number": 4}', b"[" * 100_000)
        ),
        (lambda ledger: (Path(ledger.root) / entry_file(4)).mkdir(), "Is a directory"),
        (
            lambda ledger: ledger.write(entry_file(4), ledger.read(entry_file(3))),
            "entry 4 was replaced: 00000004.json is entry 3",
        ),
    ],
)
def test_what_is_not_as_it_was_appended_is_named(ledger: Store, change: Callable[[Store], None], words: str) -> None:
    change(ledger)
    assert words in problem(ledger)


def test_a_store_without_exclusive_writes_holds_no_ledger() -> None:
    class Forgetful(AbstractFileSystem):
        protocol = "forgetful"

        def ls(self, path: str, detail: bool = True, **_: object) -> list[str]:
            raise FileNotFoundError(path)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
            if mode == "create":
                raise NotImplementedError

    store = Store("memory://ledger")
    store.fs = Forgetful()
    error = user_error(append_entry, store, lambda entries: {"value": 1})
    assert "cannot create a file only where it is absent" in error
    error = user_error(append_entry, Store("/proc/seenset-ledger"), lambda entries: {"kind": "opening"})
    assert error.startswith("ledger /proc/seenset-ledger cannot be written to: ")
    assert ": grant write access" in error
