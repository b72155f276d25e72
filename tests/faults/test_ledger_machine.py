"""The ledger of a schedule as a state machine: scans that claim and file at once, die anywhere, and go on again.

Each request to the store may fail, be done without an answer, be the last one of a process that dies before or after
it, or wait until another scan has done all of its own. Afterwards the same command runs again.
"""

import contextlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from stores import Fault, ObjectStore, object_store

from pipeline.errors import IncompleteError, UserError
from pipeline.selection.schedule import Slot
from pipeline.series import claims
from pipeline.series.claims import claim_slots, file_result
from pipeline.series.scans import read_schedule
from pipeline.store import ledger as ledger_module
from pipeline.store.files import Store
from tests.helpers.made_up_scans import scan_config, scan_scores, scan_summary
from tests.helpers.object_store import object_store as moto_store

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
            slots = claim_slots(config, scored, None, lambda line: None)
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

    @invariant()
    def nothing_that_was_appended_ever_changes(self) -> None:
        """Files are added, and none is changed or removed."""
        assert self.history.items() <= self.objects.files.items()
        self.history = dict(self.objects.files)

    @invariant()
    def the_ledger_bears_what_scans_were_told(self) -> None:
        """Places are taken in turn, once a scan; what scans were told and answered stands there."""
        schedule = read_schedule(self.store)
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
            assert claims.scan_slot(schedule, scan) == slot
            if content in self.filed:
                assert scan.filing is not None
                assert scan.filing.selections[0].n_selected == self.filed[content]
        assert not self.refused or len(keys) == HORIZON

    def teardown(self) -> None:
        """The same commands again heal all that was cut short."""
        self.events.clear()
        started = [*self.slots]
        for content in started:
            self._run(content)
        schedule = read_schedule(self.store)
        assert set(started) <= set(self.filed)
        assert schedule is None or sum(scan.filing is not None for scan in schedule.scans) == len(self.filed)
        self.patch.undo()


@pytest.mark.parametrize(("examples", "steps"), [(10, 7), pytest.param(150, 15, marks=pytest.mark.slow)])
def test_scans_at_once_that_die_anywhere_spend_no_level_twice(examples: int, steps: int) -> None:
    run_state_machine_as_test(Scans, settings=settings(max_examples=examples, stateful_step_count=steps))


def scan_at_once(scans: int, url: str) -> list[Slot]:
    """Places that two writers get, each for so many scans, one after another."""

    def write(writer: str) -> list[Slot]:
        slots: list[Slot] = []
        for number in range(scans):
            config = scan_config(url, run=f"/runs/{writer}")
            scored = scan_scores(config, f"{writer}-{number}")
            for _ in range(20):  # the same command goes on
                with contextlib.suppress(IncompleteError):
                    slots.append(claim_slots(config, scored, None, lambda _: None)["members"])
                    file_result(config, scored, None, [scan_summary(config, "members", 1)], lambda _: None)
                    break
        return slots

    with ThreadPoolExecutor() as pool:
        return [slot for slots in pool.map(write, "ab") for slot in slots]


def test_two_writers_on_one_file_system_get_a_place_each(tmp_path: Path) -> None:
    slots = scan_at_once(4, str(tmp_path / "ledger"))
    assert sorted(slot.number for slot in slots) == list(range(1, 9))


@pytest.mark.slow
def test_two_writers_on_an_object_store_with_503s_get_a_place_each() -> None:
    with moto_store() as server:
        server.failures = 0.15
        slots = scan_at_once(5, "s3://bucket/weekly")
        server.failures = 0.0
        schedule = read_schedule(Store("s3://bucket/weekly"))
        assert schedule is not None
        assert {slot.number for slot in slots} == set(range(1, 11))
        assert [scan.claim.slot for scan in schedule.scans] == list(range(1, 11))
        assert all(scan.filing is not None for scan in schedule.scans)


@pytest.mark.slow
def test_a_bucket_that_is_not_there_stops_a_scan_before_it_scores() -> None:
    with moto_store():
        with pytest.raises(UserError, match="bucket nowhere does not exist"):
            claims.check_ledger(scan_config("s3://nowhere/weekly"))
        assert claims.check_ledger(scan_config("s3://bucket/weekly")) is None
