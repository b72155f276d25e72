"""Notice that the cluster is lost before Ray ends this process without a word.

Ray does so 60 seconds after the head node fell silent, and some 15 seconds after the node of this process did.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.errors import ExitCode, IncompleteError, UserError
from ray_jobs import ending, interrupts
from ray_jobs.guard import note_cluster

PATIENCE_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
PATIENCE = 60.0
"""Seconds for which Ray waits for a head node, where the variable does not say: it may come back in that time."""

MARGIN = 20.0
"""Seconds before that at which a head node counts as lost."""

NODE_SECONDS = 2.0
"""Of silence after which the node of this process counts as lost: it does not come back."""

GRACE = 4.0
"""Seconds later a command that still waits for Ray is ended."""

PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class _Place:
    """Something of the cluster that must answer."""

    name: str
    address: str
    patience: float  # seconds


_lost: str | None = None  # the message
_watched = ""  # address of the head node
_places: tuple[_Place, ...] = ()


def watch_head() -> None:
    """Watch the cluster that this process is connected to, from now on."""
    global _lost, _watched, _places
    import ray

    address = _address_of_head()
    if not address or (address == _watched and _lost is None):
        return
    _lost, _watched = None, address
    note_cluster(address)
    places = [_Place("its head node", address, max(MARGIN, _patience()) - MARGIN)]
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            at = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            places.append(_Place("the node of this process", at, NODE_SECONDS))
    _places = tuple(place for place in places if _answers(place.address))
    threading.Thread(target=_watch, args=(address,), name="seenset-head", daemon=True).start()


def forget_head() -> None:
    """Watch no more: the cluster is about to be ended."""
    global _watched
    _watched = ""


def check_head() -> None:
    """Stop the driver of a cluster that is lost.

    Raises:
        IncompleteError: it is.
    """
    if _lost is not None:
        raise IncompleteError(_lost)


@contextmanager
def head_watched() -> Iterator[None]:
    """Say of an error that came of the loss of the cluster that it did.

    Raises:
        IncompleteError: the cluster is lost, whatever the block raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception:
        while _watched and _lost is None and not all(_answers(place.address) for place in _places):
            time.sleep(PAUSE)
        check_head()
        raise


def _watch(address: str) -> None:
    global _lost
    answered = {place: time.monotonic() for place in _places}
    end = None
    while address == _watched == _address_of_head():
        time.sleep(PAUSE)
        for place in answered:
            if _answers(place.address):
                answered[place] = time.monotonic()
            elif _lost is None and (silence := time.monotonic() - answered[place]) > place.patience:
                end = time.monotonic() + GRACE
                _lost = (
                    f"the cluster at {address} is lost: {place.name} has not answered for {silence:.0f} s; what is "
                    "finished is kept: run the same command to go on, on this cluster when it is back or on another"
                )
                ending.hurry()
        if end is not None and time.monotonic() > end and interrupts.is_listening():
            ending.leave_at_once(str(_lost), int(ExitCode.INCOMPLETE))


def _address_of_head() -> str:
    """Of the cluster that this process is connected to; empty without one, or where it is reached through a client."""
    import ray

    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().gcs_address)


def _patience() -> float:
    try:
        return float(os.environ.get(PATIENCE_VARIABLE, PATIENCE))
    except ValueError:
        return PATIENCE


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PAUSE).close()
    except (OSError, ValueError):
        return False
    return True


def keep_output() -> None:
    """Never print what a raylet says of a dead worker: Ray would, on the standard output, where the answer stands."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *lines, **settings: None
