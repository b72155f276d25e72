"""The run lock as a state machine: drivers, each on a machine of its own with a clock of its own, over one store.

Every request of a driver is a step of its own, so that any other driver may do anything between two of them; a request
may fail, or be done without an answer. A driver that gets no step sleeps, dies, or is slow, while time goes on.
"""

import threading
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from stores import Fault, ObjectStore, object_store

from pipeline.errors import BusyError
from pipeline.store import lock as lock_module
from pipeline.store.lock import RunLock

STALE_SECONDS = 6.0
"""Shorter than in earnest, so that few steps make a takeover."""


class _Ended(BaseException):
    """Ends the thread of a driver that died."""


@dataclass
class Driver:
    """A driver in a thread that runs only while it is given a step."""

    name: str
    shift: float  # of its clock
    lock: RunLock | None = None
    wakes: float = 0.0  # when its sleep ends
    fault: Fault = None  # of its next request
    number: int = 0  # of the lock that it took
    holds: bool = False  # as it believes
    stills: dict[int, float] = field(default_factory=dict)  # for how long the hearts of others had not beaten
    died: bool = False
    command: str | None = None
    problem: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether it waits for a command."""
        return self.command is None and not self.died

    def pause(self) -> None:
        """Give the turn back, and wait for the next one."""
        self.back.release()
        self.turn.acquire()
        if self.died:
            raise _Ended

    def step(self) -> None:
        """Run to the next request, sleep, or end of the command."""
        self.turn.release()
        self.back.acquire()


class Machines(RuleBasedStateMachine):
    """Up to four drivers, one run directory, one true time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.names = count()
        self.drivers: list[Driver] = []
        self.local = threading.local()
        self.taken: dict[int, str] = {}
        self.changed: dict[str, float] = {}  # when each lock file was changed last
        self.store = object_store(self._request)
        self.objects: ObjectStore = self.store.fs
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lock_module, "STALE_SECONDS", STALE_SECONDS)
        self.patch.setattr(lock_module, "CONFIRM_SECONDS", STALE_SECONDS / 3)
        self.patch.setattr(lock_module, "time", self)
        self.patch.setattr(lock_module, "machine", lambda: getattr(self.local, "driver", Driver("none", 0)).name)

    # --- the time of `time`, as each driver reads it

    CLOCK_BOOTTIME = 0

    def time(self) -> float:
        return self.now + self.local.driver.shift

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, _: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        driver = self.local.driver
        driver.wakes = self.now + seconds
        driver.pause()
        self.now = max(self.now, driver.wakes)

    # --- requests

    def _request(self, operation: str, path: str) -> Fault:
        driver: Driver | None = getattr(self.local, "driver", None)
        if driver is None:
            return None
        driver.pause()
        written = operation == "overwrite" or (operation == "create" and path not in self.objects.files)
        if written and driver.fault != "refused":
            self.changed[path] = self.now
        if operation == "create":
            driver.stills = {
                other.number: self.now - self.changed[self.store.path(f"lock/{other.number:06d}.json")]
                for other in self.drivers
                if other.holds and path.endswith(f"/{other.number + 1:06d}.json")
            }
        fault, driver.fault = driver.fault, None
        return fault

    # --- what a driver does

    def _run(self, driver: Driver) -> None:
        self.local.driver = driver
        driver.turn.acquire()
        try:
            while not driver.died:
                try:
                    self._do(driver, str(driver.command))
                except BusyError:
                    driver.holds = False
                except OSError:
                    pass
                driver.command = None
                driver.pause()
        except _Ended:
            pass
        except BaseException as error:
            driver.problem = error
            driver.command = None
        driver.back.release()

    def _do(self, driver: Driver, command: str) -> None:
        lock = driver.lock
        if command == "take":
            driver.lock = lock = RunLock(self.store)
            lock._take()
            assert lock._number not in self.taken, f"{driver.name} and {self.taken[lock._number]} took one number"
            for number, still in driver.stills.items():  # nobody may be taken over while its heart beats
                assert still >= STALE_SECONDS - 1, f"number {number} was taken over {still} s after its last beat"
            self.taken[lock._number] = driver.name
            driver.number, driver.holds = lock._number, True
        elif command == "beat" and lock is not None:
            lock._beat()
        elif command == "change" and lock is not None:
            highest = max(self.taken)
            lock.check_held()
            assert driver.number >= highest, f"{driver.name} was let change what number {highest} holds"
        elif command == "release" and lock is not None:
            driver.holds = False
            lock.__exit__(None, None, None)

    # --- rules

    @precondition(lambda self: len(self.drivers) < 4)
    @rule(shift=st.sampled_from([0.0, -600.0, 600.0]))
    def start(self, shift: float) -> None:
        driver = Driver(f"machine {next(self.names)}", shift)
        driver.thread = threading.Thread(target=self._run, args=(driver,), daemon=True)
        driver.thread.start()
        self.drivers.append(driver)
        driver.command = "take"
        driver.step()

    @precondition(lambda self: self.drivers)
    @rule(data=st.data(), steps=st.integers(1, 40), fault=st.sampled_from([None, None, None, "refused", "lost"]))
    def go_on(self, data: st.DataObject, steps: int, fault: Fault) -> None:
        driver = data.draw(st.sampled_from(self.drivers))
        driver.fault = fault
        for _ in range(steps):
            if driver.died or driver.command is None or driver.problem is not None:
                return
            driver.step()

    @precondition(lambda self: any(driver.command is not None for driver in self.drivers))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        driver = data.draw(st.sampled_from([driver for driver in self.drivers if driver.command is not None]))
        while driver.command is not None and not driver.died and driver.problem is None:
            driver.step()

    @precondition(lambda self: self.drivers)
    @rule(order=st.lists(st.integers(0, 3), min_size=30, max_size=90))
    def race(self, order: list[int]) -> None:
        """All who want the lock try for it, and all who hold it beat, step by step in any order."""
        for driver in self.drivers:
            if driver.idle and driver.problem is None:
                driver.command = "beat" if driver.holds else "take"
        for place in order:
            if place < len(self.drivers):
                driver = self.drivers[place]
                if driver.command is not None and driver.problem is None:
                    driver.step()

    @precondition(lambda self: any(driver.idle and driver.holds for driver in self.drivers))
    @rule(data=st.data(), command=st.sampled_from(["beat", "change", "change", "release"]))
    def order(self, data: st.DataObject, command: str) -> None:
        driver = data.draw(st.sampled_from([driver for driver in self.drivers if driver.idle and driver.holds]))
        driver.command = command
        driver.step()

    @precondition(lambda self: any(driver.idle and not driver.holds for driver in self.drivers))
    @rule(data=st.data())
    def try_again(self, data: st.DataObject) -> None:
        driver = data.draw(st.sampled_from([driver for driver in self.drivers if driver.idle and not driver.holds]))
        driver.command = "take"
        driver.step()

    @precondition(lambda self: any(not driver.died for driver in self.drivers))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        driver = data.draw(st.sampled_from([driver for driver in self.drivers if not driver.died]))
        self._end(driver)
        self.drivers.remove(driver)

    @rule(seconds=st.sampled_from([1.0, 3.0, 10.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def no_driver_met_an_error_of_its_own(self) -> None:
        for driver in self.drivers:
            if driver.problem is not None:
                raise driver.problem

    def _end(self, driver: Driver) -> None:
        driver.died = True
        if driver.problem is not None:
            return
        driver.turn.release()
        driver.back.acquire()
        assert driver.thread is not None
        driver.thread.join()

    def teardown(self) -> None:
        """Whatever has happened: once all are dead, one that comes gets the run, after a bounded time."""
        try:
            for driver in self.drivers:
                if not driver.died:
                    self._end(driver)
            self.drivers.clear()
            self.start(0.0)
            (last,) = self.drivers
            began = self.now
            while last.command is not None and last.problem is None:
                last.step()
            assert last.problem is None, last.problem
            assert last.holds
            assert self.now - began < 2 * STALE_SECONDS
            self._end(last)
        finally:
            self.patch.undo()


STEPS = settings(stateful_step_count=60, deadline=None, derandomize=True)


def test_the_lock_as_a_state_machine() -> None:
    run_state_machine_as_test(Machines, settings=settings(STEPS, max_examples=25))


@pytest.mark.slow
def test_the_lock_as_a_state_machine_many_times() -> None:
    run_state_machine_as_test(Machines, settings=settings(STEPS, max_examples=500))
