"""The cluster that the tests of a session share, and what tests of other clusters and processes wait for."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def start_cluster() -> None:
    """Start a local cluster with two CPUs, whatever clusters run on the machine."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(condition: Callable[[], object], seconds: float = 120, pause: float = 0.02) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(pause)
