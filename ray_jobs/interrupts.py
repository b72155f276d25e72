"""Ctrl-C and termination raise KeyboardInterrupt at once, and again at the next `check` if a library swallowed it."""

from __future__ import annotations

import signal
from typing import Any

_stop_requested = False


def listen() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt from now on."""
    global _stop_requested
    _stop_requested = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if a signal has come: Python ignores an exception raised inside a callback."""
    if _stop_requested:
        raise KeyboardInterrupt


def _interrupt(*_: Any) -> None:
    global _stop_requested
    _stop_requested = True
    raise KeyboardInterrupt
