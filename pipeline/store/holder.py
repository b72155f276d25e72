"""Who holds a run directory: a process of one machine, as its lock file describes it."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from pipeline.store.files import to_json

PADDED_BYTES = 768
"""Size of a lock file: a later beat is written over an earlier one, which takes no space on a full disk."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A lock file: who took the lock, and how often its heart has beaten."""

    owner: str  # random, of one `RunLock`
    host: str
    pid: int
    machine: str | None  # processes with the same value see each other's process ids; None: not known
    process_started: float  # in a unit of the machine; tells a process from a later one with its id
    beats: int
    heartbeat: float  # seconds since 1970 by the holder's clock, which may be wrong
    released: bool = False

    def to_bytes(self) -> bytes:
        """As the lock file holds it, padded with spaces."""
        return to_json(asdict(self)).rstrip().ljust(PADDED_BYTES - 1) + b"\n"


_HOLDER = TypeAdapter(Holder)


def describe_process(owner: str, beats: int, released: bool = False) -> Holder:
    """This process as the holder of a lock."""
    pid = os.getpid()
    state = _process_state(pid)
    return Holder(
        owner=owner,
        host=socket.gethostname(),
        pid=pid,
        machine=None if state is None else machine(),
        process_started=0.0 if state is None else state[1],
        beats=beats,
        heartbeat=round(time.time(), 3),
        released=released,
    )


def read_holder(data: bytes) -> Holder | None:
    """The content of a lock file; None where it is none."""
    try:
        return _HOLDER.validate_json(data)
    except ValidationError:
        return None


def is_alive(holder: Holder) -> bool | None:
    """Whether the process of a holder lives; None where that cannot be seen from here."""
    if holder.machine is None or holder.machine != machine() or holder.pid < 1:
        return None
    if not psutil.pid_exists(holder.pid):
        return False
    state = _process_state(holder.pid)
    if state is None:
        return None
    status, started = state
    return started == holder.process_started and status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def machine() -> str | None:
    """A name for all processes that see each other's process ids: one start of a machine, one container of it.

    Host names do not tell containers apart, and the clock by which a process started may be set while it runs.
    """
    if sys.platform != "linux":
        return f"{socket.gethostname()} {uuid.getnode():x}"
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None  # the files of /proc are those of another container
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return None


def _process_state(pid: int) -> tuple[str, float] | None:
    """The status of a process as psutil names it and when it started; None where either cannot be read."""
    try:
        process = psutil.Process(pid)
        status = str(process.status())
        if sys.platform != "linux":
            return status, process.create_time()
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return status, float(fields[19])  # ticks since the machine started: setting its clock does not change them
    except (psutil.Error, OSError, ValueError, IndexError):
        return None
