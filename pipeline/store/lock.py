"""The run lock: only one driver works in a run directory at a time.

Every taking of the lock has a number and a file of its own, `lock/000007.json`, which only its taker writes. The
highest number holds the lock. To take over is to create the next number, which a store lets only one of several do.
No number comes twice, so a driver that slept and wakes can never write over its successor's file. Clocks are not
compared: the holder beats by changing its file, and who waits for it watches whether the file changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pipeline.errors import BusyError, UserError
from pipeline.store.files import Store
from pipeline.store.holder import Holder, describe_process, is_alive, read_holder
from pipeline.store.space import remove_quietly

FOLDER = "lock"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 45.0
"""A lock whose file does not change for so long is nobody's, where its process cannot be seen from here."""

CONFIRM_SECONDS = STALE_SECONDS / 3
"""A driver changes nothing in its run directory if its last beat is older: it asks the store first."""

_FREE = b""
"""In the place of what a lock's file holds: its holder is gone, or has given it back."""

_TRIES = 20
_READS = 3
_LIVE: set[str] = set()
"""Owners of the locks that this process holds: it may live longer than one that it could not give back."""


class RunLock:
    """Only one driver works in a run directory: a lock file with a heartbeat.

    A lock is free when it was given back, when its process is gone (as seen on the same machine and in the same
    container), or when its heart has not beaten for 45 s, as watched by whoever wants it.
    """

    def __init__(self, store: Store, say: Callable[[str], None] | None = None) -> None:
        """Prepare to take the lock of a run directory.

        Args:
            store: the run directory.
            say: called with a line where the holder must be watched.
        """
        self.store = store
        self.held: Store = _HeldStore(self)
        """The run directory, in which this driver changes nothing any more once another one has taken it over."""
        self.lost = threading.Event()
        self._holder = describe_process(uuid.uuid4().hex, beats=1)
        self._number = 0
        self._say = say
        self._confirmed = 0.0
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def owner(self) -> str:
        """A random name of this taking of the lock."""
        return self._holder.owner

    def __enter__(self) -> RunLock:
        """Take the lock.

        Raises:
            BusyError: another live driver holds it.
            UserError: the run directory cannot be written to, or what is in place of its lock cannot be read.
        """
        _LIVE.add(self.owner)
        try:
            self._take()
        except BaseException:
            _LIVE.discard(self.owner)
            raise
        self._thread = threading.Thread(target=self._renew, name="seenset-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back, unless another driver has taken it over."""
        self._stop.set()
        _LIVE.discard(self.owner)
        if self._thread is not None:
            self._thread.join(STALE_SECONDS)  # a store that does not answer holds up no exit
        with contextlib.suppress(Exception):  # then the next driver sees that this process is gone, or watches it
            self._confirm_if_late()
            if not self.lost.is_set():
                self._write(describe_process(self.owner, self._holder.beats + 1, released=True))

    def check(self) -> None:
        """Stop this driver if another one took its lock over, which happens if it was suspended for over 45 s.

        Raises:
            BusyError: another driver holds the lock.
        """
        with contextlib.suppress(Exception):  # of the store: what needs it will say so
            self._confirm_if_late()
        self._refuse_if_lost()

    def guard(self) -> None:
        """Check before a change in the run directory that it is still this driver's.

        Raises:
            BusyError: another driver holds the lock.
            Exception: the store does not say whose it is.
        """
        if not self._stop.is_set():
            self._confirm_if_late()
        self._refuse_if_lost()

    def _take(self) -> None:
        for _ in range(_TRIES):
            latest = _latest(self.store)
            watched = self._wait_for(latest) if latest else _FREE
            self._confirmed = _now()
            if watched is not None and self._create(latest + 1, watched):
                return
        raise BusyError(f"run {self.store.url} was just taken by another driver")

    def _refuse_if_lost(self) -> None:
        if self.lost.is_set():
            raise BusyError(f"run {self.store.url} was taken over by another driver")

    def _confirm_if_late(self) -> None:
        if not self.lost.is_set() and _now() - self._confirmed > CONFIRM_SECONDS:
            self._beat()

    def _beat(self) -> None:
        """Change the file of the lock, and then see whether the lock is still this driver's.

        Who takes it over creates a number and then sees whether the file has changed: one of the two sees the other.
        """
        with self._turn:
            began = _now()
            data = _read(self.store, self._number)
            holder = None if data is None else read_holder(data)
            if holder is not None and holder.owner != self.owner:  # what is damaged, the beat mends
                self.lost.set()
                return
            problem = None
            try:
                self._write(describe_process(self.owner, self._holder.beats + 1))
            except Exception as error:
                problem = error
            if _latest(self.store) != self._number:
                self.lost.set()
            elif problem is not None:
                raise problem
            else:
                self._confirmed = began

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS) and not self.lost.is_set():
            with contextlib.suppress(Exception):  # any fault of the store: the next beat tries again
                self._beat()

    def _write(self, holder: Holder) -> None:
        self._holder = holder
        if not self.store.local:
            self.store.write(_file(self._number), holder.to_bytes())
            return
        with open(self.store.path(_file(self._number)), "r+b", buffering=0) as file:  # in place: a disk may be full
            file.write(holder.to_bytes())
            file.truncate()

    def _create(self, number: int, watched: bytes) -> bool:
        """Take a number, if nobody has it, nobody has gone on to a higher one, and the holder has not woken up.

        `watched` is the file of the number below, where it did not change for long; `_FREE` where it is free.
        """
        name = _file(number)
        try:
            created = self.store.create(name, self._holder.to_bytes()) or self._created(name)
        except Exception:
            created = self._created(name)
            if created is None:
                raise
        if not created:
            return False
        others = [other for other in _numbers(self.store) if other != number]
        woken = watched != _FREE and _read(self.store, number - 1) not in (watched, None)
        if woken or max(others, default=0) > number:
            self.store.remove(name)
            return False
        self._number = number
        with contextlib.suppress(Exception):  # left files of lower numbers mean nothing
            for other in others:
                self.store.remove(_file(other))
        return True

    def _created(self, name: str) -> bool | None:
        """Whether a file is there and this lock's: the answer to its creation may have been lost. None: no file."""
        for attempt in range(_READS):
            if attempt:
                time.sleep(HEARTBEAT_SECONDS / 10)
            try:
                holder = read_holder(self.store.read(name))
            except FileNotFoundError:
                return None
            except Exception:
                continue
            return holder is not None and holder.owner == self.owner
        return None

    def _wait_for(self, number: int) -> bytes | None:
        """Return when a lock may be taken over: what its file holds where it had to be watched, else `_FREE`.

        None where it is no longer the latest: the lock is to be looked at anew, because whoever went on to
        a higher number may have given that up when the holder of this one woke.

        Raises:
            BusyError: a live driver holds it.
        """
        data = _read(self.store, number)
        if data is None:
            return None
        holder = read_holder(data)
        alive = _is_held(holder)
        if alive is False:
            return _FREE
        if alive is None:
            if self._say is not None:
                who = f"process {holder.pid} on {holder.host}" if holder is not None else "a driver"
                self._say(f"watching for at most {STALE_SECONDS:.0f} s whether {who}, which held the run, lives")
            if not _changes(self.store, number, data, STALE_SECONDS):
                return data
            data = _read(self.store, number)
            holder = None if data is None else read_holder(data)
            if data is None or _latest(self.store) != number:
                return None
            if holder is not None and holder.released:
                return _FREE
        who = f"process {holder.pid} on {holder.host}" if holder is not None else "another driver"
        raise BusyError(f"run {self.store.url} is held by {who}; wait for it or give another run directory")


class _HeldStore(Store):
    """A run directory in the hands of its driver, which stops before it changes what another has taken over."""

    def __init__(self, lock: RunLock) -> None:
        self.__dict__.update(vars(lock.store))
        self._lock = lock

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url,)

    def write(self, name: str, data: bytes) -> None:
        self._lock.guard()
        super().write(name, data)

    def create(self, name: str, data: bytes, last_may_win: bool = True) -> bool:
        self._lock.guard()
        return super().create(name, data, last_may_win)

    def _temporary(self, name: str, data: bytes) -> str:
        path = super()._temporary(name, data)
        try:
            self._lock.guard()  # writing durably may have taken a while
        except BaseException:
            remove_quietly(path)
            raise
        return path

    def append(self, name: str, data: bytes) -> None:
        self._lock.guard()
        super().append(name, data)

    def remove(self, name: str) -> None:
        self._lock.guard()
        super().remove(name)

    def remove_folder(self, name: str) -> None:
        self._lock.guard()
        super().remove_folder(name)


def lock_is_live(store: Store) -> bool:
    """Whether a live driver holds the run directory.

    Where its process cannot be seen from here and its clock does not say that it has just beaten, it is watched for two
    beats.
    """
    number = _latest(store)
    data = _read(store, number) if number else None
    if data is None:
        return False
    holder = read_holder(data)
    alive = _is_held(holder)
    if alive is None and holder is not None:
        alive = 0 <= time.time() - holder.heartbeat < STALE_SECONDS or None
    return _changes(store, number, data, 2.5 * HEARTBEAT_SECONDS) if alive is None else alive


def _is_held(holder: Holder | None) -> bool | None:
    """Whether a holder holds its lock; None where only watching tells."""
    if holder is None:
        return None
    if holder.released:
        return False
    alive = is_alive(holder)
    return holder.owner in _LIVE if alive and holder.pid == os.getpid() else alive


def _changes(store: Store, number: int, data: bytes, seconds: float) -> bool:
    """Whether a lock file changes within so many seconds in which the store answers and this process is awake.

    Raises:
        Exception: of the store, if it fails again and again.
    """
    pause = min(1.0, HEARTBEAT_SECONDS / 5)
    watched, faults, last = 0.0, 0, time.monotonic()
    while watched < seconds:
        time.sleep(pause)
        try:
            if _read(store, number) != data:
                return True
            watched += min(time.monotonic() - last, 2 * pause)  # who slept has not watched
        except UserError:
            raise
        except Exception:
            watched, faults = 0.0, faults + 1  # perhaps the holder cannot reach it either
            if faults * pause > STALE_SECONDS:
                raise
        last = time.monotonic()
    return False


def _read(store: Store, number: int) -> bytes | None:
    """A lock file; None where it is gone.

    Raises:
        UserError: what is there is no file that can be read.
    """
    try:
        return store.read(_file(number))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not store.local:
            raise
        where = f"{store.url}/{_file(number)}"
        raise UserError(f"cannot read {where} ({error.strerror}): if no driver runs, remove it") from None


def _latest(store: Store) -> int:
    """The highest number that was taken; 0 where none was."""
    return max(_numbers(store), default=0)


def _numbers(store: Store) -> list[int]:
    stems = (name.removesuffix(".json") for name in store.names(FOLDER, ".json"))
    return [int(stem) for stem in stems if stem.isdecimal()]


def _file(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _now() -> float:
    """Seconds on a clock that nobody sets and that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
