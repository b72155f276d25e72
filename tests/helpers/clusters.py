"""The cluster that the tests of a session share, and what tests of other clusters and processes need."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


def start_cluster() -> None:
    """Start a local cluster with two CPUs, whatever clusters run on the machine."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def python(code: str, *arguments: object, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which imports what this one imports."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)


def output_of(code: str, *arguments: object, seconds: float = 60, **environment: str) -> str:
    """What code prints in a process of its own, which must end well."""
    done = python(code, *arguments, seconds=seconds, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def shared_cluster(*options: str, **environment: str) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A cluster that somebody started: its address, and the processes of its head node."""
    folder, port = tempfile.mkdtemp(prefix="ss", dir="/tmp"), free_port()
    options = ("--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--num-cpus=2", f"--port={port}", *options)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
    subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)

    def processes() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(words_of(process))]

    try:
        yield f"127.0.0.1:{port}", processes()
    finally:
        for process in processes():
            with suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process of `psutil.process_iter`."""
    return process.info["cmdline"] or []


def until(condition: Callable[[], object], seconds: float = 120, pause: float = 0.02) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(pause)
