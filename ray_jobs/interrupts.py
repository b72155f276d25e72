"""Ctrl-C and termination: raised at once, and again at the next check where a library swallowed the first."""

from __future__ import annotations

import signal
from typing import Any

_stop_requested = False


def listen() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt; forget earlier ones."""
    global _stop_requested
    _stop_requested = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def check() -> None:
    """Stop a driver that was asked to stop: an exception that is raised in a callback is ignored by Python."""
    if _stop_requested:
        raise KeyboardInterrupt


def _interrupt(*_: Any) -> None:
    global _stop_requested
    _stop_requested = True
    raise KeyboardInterrupt
