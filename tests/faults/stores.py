"""An object store that can fail, and processes that hold a run directory elsewhere."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from fsspec import AbstractFileSystem

from pipeline.store.files import Store

ROOT = Path(__file__).parents[2]
Fault = Literal["refused", "lost"] | None  # not done; done, and the answer does not come


RUBBISH = {
    "nothing": b"",
    "half": b'{"state": "run',
    "list": b"[1]",
    "null": b"null",
    "bytes": b"\xff\x00",
    "types": b'{"schema": 1, "state": 3, "owner": 3, "pid": "many", "driver": [], "starts": "9", "deaths": 1, "at": 0}',
    "deaths": b'{"driver": "local", "starts": 1, "deaths": {"0+1": "two"}, "at": null}',
    "brackets": b"[" * 20_000,
    "digits": b'{"starts": ' + b"9" * 5_000 + b"}",
    "version": b'{"schema": 99}',
}
"""What may stand in a JSON file of a run directory in place of its content."""


class ObjectStore(AbstractFileSystem):
    """Objects in memory, each request whole: creations only where the name is absent, listings that miss nothing."""

    protocol = "objects"
    cachable = False

    def __init__(self, fault: Callable[[str, str], Fault] = lambda operation, path: None) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.fault = fault
        self.turn = threading.RLock()

    def answer(self, operation: str, path: str, work: Callable[[], Any]) -> Any:
        """Do a request, or not, and answer, or not."""
        fault = self.fault(operation, path)
        if fault == "refused":
            raise OSError(f"503 Slow Down: {operation} {path}")
        with self.turn:
            result = work()
        if fault == "lost":
            raise TimeoutError(f"no answer: {operation} {path}")
        return result

    def exists(self, path: str, **_: Any) -> bool:
        return bool(self.answer("exists", path, lambda: self._listed(path) != [] or path in self.files))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = self.answer("ls", path, lambda: self._listed(path))
        if not names:
            raise FileNotFoundError(path)
        return [{"name": name} for name in names] if detail else names

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        def work() -> bytes:
            if path not in self.files:
                raise FileNotFoundError(path)
            return self.files[path][start:end]

        return bytes(self.answer("cat_file", path, work))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        def work() -> None:
            if mode == "create" and path in self.files:
                raise FileExistsError(path)
            self.files[path] = bytes(value)

        self.answer(mode, path, work)

    def rm_file(self, path: str) -> None:
        self.answer("rm_file", path, lambda: self.files.pop(path, None))

    def _listed(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return sorted({start + name[len(start) :].split("/")[0] for name in self.files if name.startswith(start)})


def object_store(fault: Callable[[str, str], Fault] = lambda operation, path: None) -> Store:
    """An empty run directory on an `ObjectStore` of its own."""
    store = Store("memory://run")
    store.fs = ObjectStore(fault)
    return store


HOLD = """
import sys, time
shift = float(sys.argv[2])
clock = time.time
time.time = lambda: clock() + shift
from pipeline.store import lock
lock.HEARTBEAT_SECONDS = 0.1
with lock.RunLock(lock.Store(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
"""Holds a run directory, with a clock that is wrong by so many seconds."""


def in_another_container() -> list[str]:
    """The command that starts a process with process ids of its own, as a container on this host has them."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user may not start a process with process ids of its own (unshare --pid)")
    return command


@contextmanager
def process(code: str, *arguments: object, prefix: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line."""
    command = [*(prefix or []), sys.executable, "-c", code, *map(str, arguments)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started
    finally:
        started.kill()
        started.wait()
        if started.stdout is not None:
            started.stdout.close()
