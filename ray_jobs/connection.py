"""Connecting to the cluster that RAY_ADDRESS names, or to one that is started on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator

from pipeline.errors import IncompleteError, UserError
from ray_jobs import interrupts
from ray_jobs.head import keep_output, watch_head
from ray_jobs.neighbours import start_private_cluster

CONNECT_SECONDS = 10
STARTS = 3
REASON_CHARACTERS = 200


def cluster_is_named() -> bool:
    """Whether RAY_ADDRESS names a cluster, or this process is connected to one."""
    # Whoever has not imported Ray to its end, as a thread may be doing now, is not connected.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return bool(os.environ.get("RAY_ADDRESS")) or (is_initialized is not None and is_initialized())


_private = False


def is_private() -> bool:
    """Whether this process is connected to a cluster that it started itself, to which nobody adds nodes."""
    return _private


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine.

    Raises:
        UserError: no cluster answers at RAY_ADDRESS.
        IncompleteError: Ray did not start, several times.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a thread that lost the cluster would start another
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    keep_output()
    global _private
    if ray.is_initialized():
        watch_head()
        return
    _private = False
    check_cluster()
    address = os.environ.get("RAY_ADDRESS", "")
    private = address in ("", "local")
    for attempt in range(1, STARTS + 1):
        try:
            with _quiet():
                if private:
                    start_private_cluster()
                    _private = True
                else:
                    ray.init(log_to_driver=False, logging_level=logging.ERROR)
            interrupts.renew()
            watch_head()
            return
        except UserError:
            raise
        except Exception as error:  # of many kinds: a port, a time limit, a process that died
            ray.shutdown()
            reason = " ".join(str(error).split()) or type(error).__name__
        if not private:
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS {address} ({reason[:REASON_CHARACTERS]}); start it, or unset "
                "RAY_ADDRESS to use this machine alone"
            )
        if attempt < STARTS:
            time.sleep(attempt)
    raise IncompleteError(
        f"Ray did not start on this machine in {STARTS} attempts ({reason[:REASON_CHARACTERS]}); free memory and space "
        "in /tmp and run again, or set resources.cluster: local"
    )


def check_cluster() -> None:
    """Check that somebody listens where RAY_ADDRESS says: Ray itself would wait for minutes.

    Raises:
        UserError: nobody does.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", "local" or none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS {address} ({error}); start it, or unset RAY_ADDRESS to use this "
            "machine alone"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray's C++ side writes to standard error while it starts, and show it only if it fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            messages.seek(0)
            sys.stderr.write(messages.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
