"""Two shards of one worker at a time: the next one is read while this one is on the device.

Each shard has a thread of its own, which waits for its turn: one reads at a time, and one works. A shard that killed a
worker before is alone in its process, so that a death can be laid at its door.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

SHARDS_AT_A_TIME = 2
"""Of a worker: one that is worked on, one that is read ahead."""


class Turns:
    """What the shards of one worker wait for. They work in the order in which they read."""

    def __init__(self) -> None:
        """Nobody reads or works yet."""
        self.reading = threading.Lock()
        self.working = threading.Lock()
        self.idle_since = 0.0  # monotonic seconds, when the last shard was worked on

    @contextmanager
    def take(self) -> Iterator[Turn]:
        """Wait until no other shard is read; the turn ends with the block, if it has not ended before."""
        turn = Turn(self)
        try:
            yield turn
        finally:
            turn.end_reading()
            turn.end()


class Turn:
    """The turn of one shard: it reads from the start."""

    def __init__(self, turns: Turns) -> None:
        """Wait until no other shard is read."""
        self._turns = turns
        self._works = False
        self.attempted = False  # whether its shard had to be worked on: it had no receipt
        self.waited = 0.0  # seconds, with something to work on
        self.starved = 0.0  # seconds in which nothing was worked on, for want of a window of this shard
        self._received = 0.0  # monotonic seconds, when its first window came
        self._idle_before = 0.0
        self._ended = 0.0
        turns.reading.acquire()
        self._reads = True

    def end_reading(self) -> None:
        """Let the next shard be read; this is called by the thread that reads."""
        if self._reads:
            self._reads = False
            self._turns.reading.release()

    def work(self) -> None:
        """Wait until no other shard is worked on."""
        if not self._works:
            began = time.monotonic()
            self._turns.working.acquire()
            self._works = True
            self.waited += time.monotonic() - began

    def awaited(self, windows: Iterator[Item]) -> Iterator[Item]:
        """The windows of the shard as they come; how long the worker had nothing to do until then is added up."""
        while True:
            began = time.monotonic()
            try:
                window = next(windows)
            except StopIteration:
                self._starve(began)
                return
            self._starve(began)
            if not self._received:
                self._received, self._idle_before = time.monotonic(), self.starved + self.waited
            yield window

    @property
    def worked(self) -> float:
        """Seconds in which the shard was worked on."""
        if not self._received:
            return 0.0
        now = self._ended or time.monotonic()
        return now - self._received - (self.starved + self.waited - self._idle_before)

    def _starve(self, began: float) -> None:
        """Note a wait that ends now; no shard starves while another one is worked on."""
        if not self._works:
            if self._turns.working.locked():
                return
            began = max(began, self._turns.idle_since)
        self.starved += time.monotonic() - began

    def end(self) -> None:
        """Let the next shard be worked on."""
        if self._works:
            self._works = False
            self._turns.idle_since = self._ended = time.monotonic()
            self._turns.working.release()
