"""The ledger of a schedule as a state machine: scans that claim and file at once, die anywhere, and go on again.

Each request to the store may fail, be done without an answer, be the last one of a process that dies before or after
it, or wait until another scan has done all of its own. Afterwards the same command runs again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from made_up_scans import calibrations, scan_config, scan_scores, scan_summary
from object_store import object_store as moto_store
from s3fs import S3FileSystem
from stores import Fault, ObjectStore, object_store

from pipeline.errors import IncompleteError, UserError
from pipeline.selection.schedule import Slot
from pipeline.series import claims
from pipeline.series.claims import claim_slots, file_result
from pipeline.series.scans import Schedule, read_schedule
from pipeline.store import ledger as ledger_module
from pipeline.store.files import Store

HORIZON = 6
EVENTS = ("nothing", "refused", "lost", "dies before", "dies after", "another scan")


class _DeathError(BaseException):
    """Ends a process."""


class Scans(RuleBasedStateMachine):
    """Scans of one schedule over a store that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.store = object_store(self._request)
        self.objects: ObjectStore = self.store.fs
        self.events: deque[str] = deque()
        self.waiting: deque[str] = deque()  # scans that run while another one waits for an answer
        self.clock = 0
        self.slots: dict[str, Slot] = {}  # as scans were told, by what was scored
        self.filed: dict[str, int] = {}  # what was selected, by what was scored, of scans that ended
        self.refused = 0
        self.history: dict[str, bytes] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(claims, "open_ledger", lambda series: self.store)
        self.patch.setattr(claims, "_now", lambda: f"2026-11-{self.clock:02}T00:00:00+00:00")
        self.patch.setattr(ledger_module, "PAUSES", (0.0,) * 3)

    # --- requests

    def _request(self, operation: str, path: str) -> Fault:
        event = self.events.popleft() if self.events else "nothing"
        if event == "dies before":
            raise _DeathError
        if event == "dies after":
            self.events.clear()
            self.events.append("dies before")  # at its next request, when this one is done
        if event == "another scan" and self.waiting:
            self._run(self.waiting.popleft())
        return event if event in ("refused", "lost") else None

    def _run(self, content: str) -> None:
        """One scan, from its claim to the filing of its result, as far as it comes."""
        config = scan_config("memory://ledger", horizon=HORIZON)
        scored = scan_scores(config, content)
        selected = sum(content.encode()) % 7
        try:
            slots = claim_slots(config, scored, calibrations(config), None, lambda line: None)
            slot = slots["members"]
            assert self.slots.setdefault(content, slot) == slot, "a scan that goes on keeps its place, exactly"
            file_result(config, scored, None, [scan_summary(config, "members", selected)], lambda line: None)
            self.filed[content] = selected
        except (IncompleteError, _DeathError):
            pass
        except UserError as error:
            if "all 6 places of ledger" not in str(error):
                raise
            self.refused += 1

    # --- what happens

    @rule(
        content=st.sampled_from("abcdefgh"),
        others=st.lists(st.sampled_from("abcdefgh"), max_size=2),
        events=st.lists(st.sampled_from(EVENTS), max_size=25),
    )
    def scan(self, content: str, others: list[str], events: list[str]) -> None:
        """A scan runs, or goes on after it died."""
        self.events, self.waiting = deque(events), deque(others)
        self._run(content)
        self.events.clear()

    @rule(day=st.integers(1, 28))
    def set_clock(self, day: int) -> None:
        """The clock jumps, also backwards."""
        self.clock = day

    # --- what always holds

    def _schedule(self) -> Schedule | None:
        return read_schedule(self.store)

    @invariant()
    def nothing_that_was_appended_ever_changes(self) -> None:
        """Files are added, and none is changed or removed."""
        assert self.history.items() <= self.objects.files.items()
        self.history = dict(self.objects.files)

    @invariant()
    def the_ledger_bears_what_scans_were_told(self) -> None:
        """Places are taken in turn, once a scan; what scans were told and answered stands there."""
        schedule = self._schedule()
        if schedule is None:
            assert not self.slots
            return
        keys = [scan.claim.key for scan in schedule.scans]
        assert len(set(keys)) == len(keys) <= HORIZON
        assert [scan.claim.slot for scan in schedule.scans] == list(range(1, len(keys) + 1))
        assert sum((Fraction(scan.claim.share) for scan in schedule.scans), Fraction(0)) <= 1 + Fraction(1, 10**9)
        numbers = [slot.number for slot in self.slots.values()]
        assert len(set(numbers)) == len(numbers)
        for content, slot in self.slots.items():
            scan = schedule.scans[slot.number - 1]
            assert claims.slot_of(schedule, scan, "members") == slot
            if content in self.filed:
                assert scan.filing is not None
                assert scan.filing.selections[0].n_selected == self.filed[content]
        assert not self.refused or len(keys) == HORIZON

    @invariant()
    def a_claim_counts_what_was_filed_before_it_and_no_more(self) -> None:
        """What was selected before is the sum of the results whose entries come before the claim."""
        before = 0
        for entry in ledger_module.read_ledger(self.store):
            if entry.content["kind"] == "claim":
                assert entry.content["before"] == {"members": before}
            elif entry.content["kind"] == "result":
                before += entry.content["selections"][0]["n_selected"]

    def teardown(self) -> None:
        """The same commands again heal all that was cut short."""
        self.events.clear()
        started = [*self.slots]
        for content in started:
            self._run(content)
        schedule = self._schedule()
        assert set(started) <= set(self.filed)
        assert schedule is None or sum(scan.filing is not None for scan in schedule.scans) == len(self.filed)
        self.patch.undo()


def test_scans_at_once_that_die_anywhere_spend_no_level_twice() -> None:
    run_state_machine_as_test(Scans, settings=settings(max_examples=10, stateful_step_count=7, deadline=None))


@pytest.mark.slow
def test_scans_at_once_that_die_anywhere_spend_no_level_twice_at_length() -> None:
    run_state_machine_as_test(Scans, settings=settings(max_examples=150, stateful_step_count=15, deadline=None))


def scan_at_once(open_store: Callable[[], Store], scans: int, url: str, patch: pytest.MonkeyPatch) -> list[Slot]:
    """Places that two writers get, each for so many scans, one after another."""
    slots: list[Slot] = []
    problems: list[BaseException] = []
    patch.setattr(claims, "open_ledger", lambda series: open_store())

    def write(writer: str) -> None:
        try:
            for number in range(scans):
                config = scan_config(url, run=f"/runs/{writer}")
                scored = scan_scores(config, f"{writer}-{number}")
                for _ in range(20):  # the same command goes on
                    try:
                        slots.append(claim_slots(config, scored, calibrations(config), None, lambda _: None)["members"])
                        summary = scan_summary(config, "members", 1)
                        file_result(config, scored, None, [summary], lambda _: None)
                        break
                    except IncompleteError:
                        continue
        except BaseException as problem:
            problems.append(problem)

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not problems, problems
    return slots


def test_two_writers_on_one_file_system_get_a_place_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "ledger")
    slots = scan_at_once(lambda: Store(folder), 4, folder, monkeypatch)
    assert sorted(slot.number for slot in slots) == list(range(1, 9))


@pytest.mark.slow
def test_two_writers_on_an_object_store_with_503s_get_a_place_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_store() as server:
        S3FileSystem.clear_instance_cache()  # of another server's address
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.failures = 0.15
        slots = scan_at_once(lambda: Store("s3://bucket/weekly"), 5, "s3://bucket/weekly", monkeypatch)
        server.failures = 0.0
        schedule = read_schedule(Store("s3://bucket/weekly"))
        assert schedule is not None
        assert {slot.number for slot in slots} == set(range(1, 11))
        assert [scan.claim.slot for scan in schedule.scans] == list(range(1, 11))
        assert all(scan.filing is not None for scan in schedule.scans)


@pytest.mark.slow
def test_a_bucket_that_is_not_there_stops_a_scan_before_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_store() as server:
        S3FileSystem.clear_instance_cache()  # of another server's address
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="bucket nowhere is not there"):
            claims.check_ledger(scan_config("s3://nowhere/weekly"))
        assert claims.check_ledger(scan_config("s3://bucket/weekly")) is None
