"""The run lock: only one driver works in a run directory at a time.

Every acquisition of the lock has a number and a separate file, `lock/000007.json`, which only its driver writes. The
highest number holds the lock. A takeover is the exclusive creation of the next number. No number is used twice, so a
driver that was suspended never overwrites its successor's file. Clocks are not compared: the holder changes its file
at every heartbeat, and a waiting driver watches whether the file changes.

On a local file system of a known type the holder also locks `lock/flock`, which the kernel releases when its process
ends, so that no driver has to watch there. Other file systems may grant such a lock on two machines at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import BusyError, UserError, write_error
from pipeline.store.files import Store, to_json

FOLDER = "lock"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 45.0
"""A lock whose file does not change for this time is free, if nothing else shows whether its process has ended."""

CONFIRM_SECONDS = STALE_SECONDS / 3
"""A driver whose last heartbeat is older checks the lock in the store before it changes its run directory."""

LOCAL_FILE_SYSTEMS = frozenset({"apfs", "btrfs", "ext4", "ntfs", "overlay", "tmpfs", "xfs", "zfs"})
"""Types of mounts on which a file lock holds for every process that sees the file."""

PADDED_BYTES = 768
"""Size of a lock file: a heartbeat overwrites the last one, which also works on a full disk."""

_TRIES = 20
_FLOCK_SECONDS = 0.25  # wait for the file lock, which `lock_is_live` holds briefly


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lock file: the driver that acquired the lock, and its number of heartbeats."""

    owner: str  # random identifier of one `RunLock`
    host: str
    pid: int
    machine: str | None  # processes with the same value see each other's process ids; None: unknown
    beats: int
    heartbeat: float  # seconds since 1970 by the holder's clock, which may be wrong
    released: bool = False
    flock: bool = False  # whether the holder also locks `lock/flock`

    def to_bytes(self) -> bytes:
        """The JSON of the lock file, padded with spaces."""
        return to_json(asdict(self)).rstrip().ljust(PADDED_BYTES - 1) + b"\n"


_HOLDER = TypeAdapter(Holder)


class RunLock:
    """The lock of a run directory, a context manager.

    The lock is free if it was released, if its process has ended (as seen on the same machine and in the same
    container, or by its file lock), or if its file did not change for `STALE_SECONDS` while it was watched.
    """

    def __init__(self, store: Store, say: Callable[[str], None] | None = None) -> None:
        """Prepare to acquire the lock of a run directory.

        Args:
            store: the run directory.
            say: called with a message when the holder has to be watched.
        """
        self.store = store
        self.held = store.with_check(self.check_held)
        """The run directory; changes raise once another driver has taken it over."""
        self.owner = uuid.uuid4().hex
        self.lost = threading.Event()
        self._flock = _local_flock(store)
        self._number = self._beats = 0
        self._say = say
        self._confirmed = 0.0
        self._beating = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        """Acquire the lock.

        Raises:
            BusyError: another live driver holds it.
            UserError: the run directory cannot be written to, or its lock cannot be read.
        """
        if self._flock is not None and not _acquire(self._flock, self.store):
            raise self._busy(_read_holder(self.store.find(_file(_latest(self.store)))))
        try:
            self._take()
        except BaseException:
            _release(self._flock)
            raise
        self._thread = threading.Thread(target=self._renew, name="seenset-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock, unless another driver has taken it over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STALE_SECONDS)  # limits the delay of the exit if the store does not answer
        with contextlib.suppress(Exception):  # the next driver then sees that this process has ended, or watches it
            if not self.lost.is_set():
                self._write(released=True)
        _release(self._flock)

    def check(self) -> None:
        """Stop this driver if another one has taken over its lock, which happens if it was suspended for over 45 s.

        Raises:
            BusyError: another driver holds the lock.
        """
        try:
            self.check_held()
        except BusyError:
            raise
        except Exception:
            return  # the next change in the run directory reports the error of the store

    def check_held(self) -> None:
        """Check before a change in the run directory that this driver still holds the lock.

        Raises:
            BusyError: another driver holds the lock.
            Exception: the store does not answer.
        """
        if not self.lost.is_set() and not self._stop.is_set() and _now() - self._confirmed > CONFIRM_SECONDS:
            self._beat()
        if self.lost.is_set():
            raise BusyError(f"run {self.store.url} was taken over by another driver")

    def _take(self) -> None:
        """Acquire the number after the latest one, once that is free."""
        for _ in range(_TRIES):
            number = _latest(self.store)
            data = self.store.find(_file(number))
            holder = _read_holder(data)
            free = not number or (holder is not None and (_is_gone(holder) or (holder.flock and bool(self._flock))))
            if free or (data is not None and self._watch(number, data, holder)):
                self._confirmed = _now()
                if self._create(number + 1, None if free else data):
                    return
        raise BusyError(f"run {self.store.url} was just taken by another driver")

    def _watch(self, number: int, data: bytes, holder: Holder | None) -> bool:
        """Whether the file of a lock stays unchanged for `STALE_SECONDS`; False if the locks must be read again.

        Raises:
            BusyError: the file changes, so a live driver holds the lock.
        """
        if self._say is not None:
            name = _name(holder)
            self._say(f"checking for at most {STALE_SECONDS:.0f} s whether {name}, which held the run, still runs")
        if not _changes(self.store, number, data, STALE_SECONDS):
            return True
        holder = _read_holder(self.store.find(_file(number)))
        if _latest(self.store) == number and not (holder is not None and holder.released):
            raise self._busy(holder)
        return False

    def _create(self, number: int, watched: bytes | None) -> bool:
        """Create a number; False if another driver has it or a higher one, or if the holder's file changed.

        `watched` is the content of the file of the number below, which did not change; None if that lock is free.
        """
        name = _file(number)
        try:
            created = self.store.create(name, self._content()) or self._has(number)
        except Exception:
            created = self._has(number)  # the response to a creation may be lost
            if not created:
                raise
        if not created:
            return False
        others = [other for other in _numbers(self.store) if other != number]
        alive = watched is not None and self.store.find(_file(number - 1)) not in (watched, None)
        if alive or max(others, default=0) > number:
            self.store.remove(name)
            return False
        self._number = number
        with contextlib.suppress(Exception):  # remaining files of lower numbers have no effect
            for other in others:
                self.store.remove(_file(other))
        return True

    def _has(self, number: int) -> bool:
        """Whether the file of a number belongs to this driver."""
        holder = _read_holder(self.store.find(_file(number)))
        return holder is not None and holder.owner == self.owner

    def _beat(self) -> None:
        """Change the file of the lock, then check whether this driver still holds the lock.

        A driver that takes the lock over creates a number and then checks whether the file has changed, so at least
        one of the two detects the other.
        """
        with self._beating:
            started = _now()
            data = self.store.find(_file(self._number))
            holder = _read_holder(data)
            if data is not None and (holder is None or holder.owner == self.owner):  # a damaged file is rewritten
                self._write()
                if _latest(self.store) == self._number:
                    self._confirmed = started
                    return
            self.lost.set()

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS) and not self.lost.is_set():
            with contextlib.suppress(Exception):  # any error of the store: the next heartbeat retries
                self._beat()

    def _content(self, released: bool = False) -> bytes:
        """The content of the lock file at the next heartbeat."""
        self._beats += 1
        return describe_process(self.owner, self._beats, released, self._flock is not None).to_bytes()

    def _write(self, released: bool = False) -> None:
        name, data = _file(self._number), self._content(released)
        if not self.store.local:
            self.store.write(name, data)
            return
        with open(self.store.path(name), "r+b", buffering=0) as file:  # in place: a disk may be full
            file.write(data)
            file.truncate()

    def _busy(self, holder: Holder | None) -> BusyError:
        return BusyError(f"run {self.store.url} is held by {_name(holder)}; wait for it or give another run directory")


def lock_is_live(store: Store) -> bool:
    """Whether a live driver holds the run directory.

    If neither its process nor its file lock is visible on this machine, and its last heartbeat is not recent by the
    clocks, its file is watched for two heartbeats.
    """
    number = _latest(store)
    data = store.find(_file(number))
    if data is None:
        return False
    holder = _read_holder(data)
    if holder is not None:
        if _is_gone(holder):
            return False
        with contextlib.suppress(UserError):  # a read-only directory
            if holder.flock and (flock := _local_flock(store)) is not None:
                if free := _acquire(flock, store):
                    _release(flock)
                return not free
        if 0 <= time.time() - holder.heartbeat < STALE_SECONDS:
            return True
    return _changes(store, number, data, 2.5 * HEARTBEAT_SECONDS)


def describe_process(owner: str, beats: int, released: bool = False, flock: bool = False) -> Holder:
    """This process as the holder of a lock."""
    heartbeat = round(time.time(), 3)
    return Holder(owner, socket.gethostname(), os.getpid(), machine(), beats, heartbeat, released, flock)


def machine() -> str | None:
    """An identifier shared by processes that see each other's process ids: one boot and one container of a machine.

    Host names do not distinguish containers. None if there is no identifier: the heartbeat is then watched.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    return None


def _is_gone(holder: Holder) -> bool:
    """Whether the lock was released, or its process has ended as far as this machine can see."""
    if not holder.released and holder.machine is not None and holder.machine == machine():
        try:
            os.kill(holder.pid, 0)  # only checks that the process exists
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
    return holder.released


def _read_holder(data: bytes | None) -> Holder | None:
    """The content of a lock file; None if it is damaged or missing."""
    try:
        return None if data is None else _HOLDER.validate_json(data)
    except ValidationError:
        return None


def _name(holder: Holder | None) -> str:
    return "another driver" if holder is None else f"process {holder.pid} on {holder.host}"


def _local_flock(store: Store) -> FileLock | None:
    """The file lock of a run directory; None if its file system is not known to be local."""
    try:
        mounts = psutil.disk_partitions(all=True) if store.local else []
    except (OSError, psutil.Error):
        return None
    mounts = [mount for mount in mounts if Path(store.root).is_relative_to(mount.mountpoint)]
    mounts.sort(key=lambda mount: len(mount.mountpoint))  # of two mounts at one path the later one counts
    if not mounts or mounts[-1].fstype.lower() not in LOCAL_FILE_SYSTEMS:
        return None
    path = store.path(f"{FOLDER}/flock")
    return FileLock(path, _FLOCK_SECONDS, thread_local=False, poll_interval=0.02, fallback_to_soft=False)


def _acquire(flock: FileLock, store: Store) -> bool:
    """Acquire the file lock; False if another driver has it.

    Raises:
        UserError: the run directory cannot be written to.
    """
    try:
        flock.acquire()
    except Timeout:
        return False
    except OSError as error:
        raise write_error(error, f"{store.noun} {store.url}") from None
    return True


def _release(flock: FileLock | None) -> None:
    """Release the file lock and remove its file; a driver that has that file open opens the new one."""
    if flock is not None:
        with contextlib.suppress(OSError):
            os.unlink(flock.lock_file)
            flock.release()


def _changes(store: Store, number: int, data: bytes, seconds: float) -> bool:
    """Whether a lock file changes within `seconds`, not counting time in which this process is suspended."""
    pause = min(1.0, HEARTBEAT_SECONDS / 5)
    watched, last = 0.0, time.monotonic()
    while watched < seconds:
        time.sleep(pause)
        if store.find(_file(number)) != data:
            return True
        watched += min(time.monotonic() - last, 2 * pause)  # excludes time in which this process was suspended
        last = time.monotonic()
    return False


def _latest(store: Store) -> int:
    """The highest existing number; 0 if there is none."""
    return max(_numbers(store), default=0)


def _numbers(store: Store) -> list[int]:
    stems = (name.removesuffix(".json") for name in store.names(FOLDER, ".json"))
    return [int(stem) for stem in stems if stem.isdecimal()]


def _file(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _now() -> float:
    """Seconds of a monotonic clock that includes suspension of the machine, if available."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
