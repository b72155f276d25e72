"""Which shard a worker takes next: the longest first, and at the end a second attempt at what would hold up all others.

Nothing here changes a row. Of two attempts at a shard one files the receipt, and both would have filed the same rows.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.9
"""A second attempt is begun if it should end within this share of the time that the first one still takes."""

LEAST_SECONDS = 3.0
"""What a first attempt must still take at least: less is not worth a second one."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker does next."""

    number: int  # of the shard
    second: bool = False  # whether another worker is at it


@dataclass(slots=True)
class _Attempt:
    """A worker's attempt at a shard."""

    number: int
    worker: str
    begun: float  # seconds
    second: bool


@dataclass(slots=True)
class _Pace:
    """How fast a worker is."""

    since: float  # seconds, when it took its first shard
    last: float = 0.0  # when it ended one
    size: float = 0.0  # of all that it ended


def longest_shards_first(sizes: Sequence[float]) -> list[int]:
    """The numbers of shards, the longest first; those of one size in their order."""
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


class Line:
    """The shards of a stage, those who wait for one, and those who are at one. Time is told to it: it has no clock."""

    def __init__(self, sizes: Sequence[float], least_seconds: float = LEAST_SECONDS) -> None:
        """Begin.

        Args:
            sizes: of the shards, > 0, in any unit.
            least_seconds: that a first attempt must still take for a second one to be worth it.
        """
        self.sizes = sizes
        self.least_seconds = least_seconds
        self.waiting = deque(longest_shards_first(sizes))
        self.remaining = set(self.waiting)  # shards that have not ended
        self.attempts: dict[str, _Attempt] = {}  # by caller
        self.paces: dict[str, _Pace] = {}  # by worker
        self.workers: set[str] = set()
        self.deadly: set[int] = set()  # shards at which a worker died: a second attempt could cost another one

    def take(self, caller: str, worker: str, now: float) -> Order | None:
        """The next shard of a caller; None if there is none for it now.

        Args:
            caller: one line of work of a worker, which finishes one shard after the other. If it comes while it has
                a shard, its worker died: it goes on with that shard.
            worker: that takes the place of itself when it died.
            now: seconds, on any clock that never goes back.
        """
        self.workers.add(worker)
        if (held := self.attempts.pop(caller, None)) is not None and held.number in self.remaining:
            self.deadly.add(held.number)
            if not held.second:  # a second attempt that died is not made again
                return self._begin(caller, worker, Order(held.number), now)
        crew = sum(attempt.worker == worker for attempt in self.attempts.values())
        if self.waiting:
            if crew and len(self.waiting) < len(self.workers):
                return None  # none is read ahead that another worker may soon begin at once
            return self._begin(caller, worker, Order(self.waiting.popleft()), now)
        if crew or (slowest := self._worth_a_second(worker, now)) is None:
            return None
        return self._begin(caller, worker, Order(slowest, second=True), now)

    def end(self, caller: str, now: float) -> bool:
        """Note that the caller's attempt has ended; whether it is the first of its shard to end."""
        attempt = self.attempts.pop(caller, None)
        if attempt is None:
            return False
        pace = self.paces[attempt.worker]
        pace.last = now
        pace.size += self.sizes[attempt.number]
        first = attempt.number in self.remaining
        self.remaining.discard(attempt.number)
        return first

    def give_up(self, caller: str) -> None:
        """Note that the caller's attempt ended without a result: another was quicker, or a second attempt failed."""
        self.attempts.pop(caller, None)

    def is_second(self, caller: str) -> bool:
        """Whether the caller is at a second attempt."""
        return caller in self.attempts and self.attempts[caller].second

    def beaten(self, caller: str) -> bool:
        """Whether the shard that a caller is at has ended elsewhere."""
        return caller in self.attempts and self.attempts[caller].number not in self.remaining

    def _begin(self, caller: str, worker: str, order: Order, now: float) -> Order:
        self.paces.setdefault(worker, _Pace(now))
        self.attempts[caller] = _Attempt(order.number, worker, now, order.second)
        return order

    def _worth_a_second(self, worker: str, now: float) -> int | None:
        """The shard, of those that one worker is at, that will end last, if this worker would end it sooner."""
        usual = [rate for each in self.paces if (rate := self._rate(each))]
        if not usual:
            return None
        median = statistics.median(usual)
        attempts = Counter(attempt.number for attempt in self.attempts.values())
        rate = self._rate(worker) or median
        best, longest = None, self.least_seconds
        for number, seconds in self._seconds_left(now, median).items():
            alone = attempts[number] == 1 and number in self.remaining - self.deadly
            if alone and seconds > longest and self.sizes[number] / rate < GAIN * seconds:
                best, longest = number, seconds
        return best

    def _seconds_left(self, now: float, median: float) -> dict[int, float]:
        """What each shard still takes, where every worker goes on as fast as it was."""
        ends: dict[str, float] = {}
        left: dict[int, float] = {}
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.begun):
            pace = self.paces.get(attempt.worker)
            whole = self.sizes[attempt.number] / (self._rate(attempt.worker) or median)
            begun = max(attempt.begun, pace.last if pace else 0.0)
            earlier = ends.get(attempt.worker)
            end = begun + whole if earlier is None else earlier + whole  # the one that is read ahead waits
            if end < now:  # it is slower than it was, or gone: the longer it is overdue, the longer it may take
                end = now + (now - begun)
            ends[attempt.worker] = end
            left[attempt.number] = end - now
        return left

    def _rate(self, worker: str) -> float:
        """Size a second of what a worker has ended; 0 where it has ended nothing."""
        pace = self.paces.get(worker)
        return pace.size / max(pace.last - pace.since, 1e-9) if pace and pace.size else 0.0
