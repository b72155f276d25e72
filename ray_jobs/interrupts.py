"""Ctrl-C and termination raise KeyboardInterrupt at once, and again at the next `check` if a library swallowed it."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

ONCE_SECONDS = 1.0
"""In which signals count as one: of Ctrl-C a process may get its own and that of the parent that guards it."""

_stop_requested = False
_listening = False
_last = -ONCE_SECONDS


def listen() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt from now on."""
    global _stop_requested, _listening
    _stop_requested, _listening = False, True
    _register()


def is_listening() -> bool:
    """Whether this process is a command, which a signal ends, and not a notebook."""
    return _listening


def renew() -> None:
    """Listen again where this process did: Ray's start puts a handler in place that dumps its stack on SIGTERM."""
    if _listening and threading.current_thread() is threading.main_thread():
        _register()


def _register() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if a signal has come: Python ignores an exception raised inside a callback."""
    if _stop_requested:
        raise KeyboardInterrupt


def _interrupt(*_: Any) -> None:
    global _stop_requested, _last
    again = _stop_requested and time.monotonic() - _last < ONCE_SECONDS
    _stop_requested, _last = True, time.monotonic()
    if not again:
        raise KeyboardInterrupt
