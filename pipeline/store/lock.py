"""The run lock: only one driver works in a run directory at a time."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any

import psutil

from pipeline.errors import BusyError, UserError
from pipeline.store.files import Store

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 90.0


class RunLock:
    """Only one driver works in a run directory: a lock file with a heartbeat.

    A lock is stale when its process is gone (same host) or its heartbeat is older than 90 s (another host).
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.owner = uuid.uuid4().hex
        self.lost = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        """Take the lock.

        Raises:
            BusyError: another live driver holds it.
        """
        if not self.store.create_json("lock.json", self._content()):
            record = self.store.read_json("lock.json") or {}
            if _is_live(record):
                raise BusyError(
                    f"run {self.store.url} is held by process {record.get('pid')} on {record.get('host')}; "
                    "wait for it or give another run directory"
                )
            self.store.remove("lock.json")
            if not self.store.create_json("lock.json", self._content()):
                raise BusyError(f"run {self.store.url} was just taken by another driver")
        self._thread = threading.Thread(target=self._renew, name="seenset-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back, unless another driver has taken it over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_owner():
            self.store.remove("lock.json")

    def check(self) -> None:
        """Stop this driver if another one took its lock over, which happens if it was suspended for over 90 s.

        Raises:
            BusyError: another driver holds the lock.
        """
        if self.lost.is_set():
            raise BusyError(f"run {self.store.url} was taken over by another driver")

    def _content(self) -> dict[str, Any]:
        process = psutil.Process()
        return {
            "owner": self.owner,
            "host": socket.gethostname(),
            "pid": process.pid,
            "process_started": process.create_time(),
            "heartbeat": time.time(),
        }

    def _is_owner(self) -> bool:
        try:
            record = self.store.read_json("lock.json")
        except UserError:
            return False
        return bool(record) and record.get("owner") == self.owner

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if not self._is_owner():
                    self.lost.set()
                    return
                self.store.write_json("lock.json", self._content())
            except OSError:
                continue  # a passing fault of the store: the next beat tries again, long before the lock is stale


def lock_is_live(store: Store) -> bool:
    """Whether a live driver holds the run directory."""
    record = store.read_json("lock.json")
    return record is not None and _is_live(record)


def _is_live(record: dict[str, Any]) -> bool:
    if record.get("host") == socket.gethostname() and "pid" in record:
        try:
            return abs(psutil.Process(record["pid"]).create_time() - record["process_started"]) < 1.0
        except psutil.NoSuchProcess:
            return False
    return time.time() - float(record.get("heartbeat", 0)) < STALE_SECONDS
