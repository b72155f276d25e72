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
from ray_jobs import supervisor
from ray_jobs.neighbours import start_private_cluster

CONNECT_SECONDS = 10
STARTS = 3
REASON_CHARACTERS = 200

HEAD_VARIABLE, HEAD_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
HEAD_MARGIN = 20.0
"""Seconds before Ray gives up a head node at which it counts as lost."""

NODE_SECONDS = 2.0
"""Of silence after which the node of this process counts as lost."""


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

    _keep_output()
    global _private
    if ray.is_initialized():
        _note_cluster()
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
            supervisor.listen_again()
            _note_cluster()
            return
        except UserError:
            raise
        except SystemExit:  # Ray takes SIGTERM itself while it starts
            raise KeyboardInterrupt from None
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


def _note_cluster() -> None:
    """Note the nodes on which this process depends: the head node, and its own, which does not come back."""
    import ray

    if ray.util.client.ray.is_connected():
        return
    address = str(ray.get_runtime_context().gcs_address)
    nodes = {address: max(HEAD_MARGIN, _patience()) - HEAD_MARGIN}
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            nodes[f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"] = NODE_SECONDS
    supervisor.note_cluster(address, nodes)


def _patience() -> float:
    """Seconds for which Ray waits for a head node, which may come back in that time."""
    try:
        return float(os.environ.get(HEAD_VARIABLE, HEAD_SECONDS))
    except ValueError:
        return HEAD_SECONDS


def _keep_output() -> None:
    """Never print what a raylet says of a dead worker: Ray would, on the standard output, where the answer stands."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *lines, **settings: None
