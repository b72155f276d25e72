"""Which shard a worker takes next: the longest first, and at the end a second attempt at what would hold up all others.

Nothing here changes a row. Of two attempts at a shard one files the receipt, and both would have filed the same rows.
A shard that has not ended waits, or a worker that was heard of lately is at it.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.9
"""A second attempt is begun if it should end within this share of the time that the first one still takes."""

LEAST_SECONDS = 3.0
"""What a first attempt must still take at least: less is not worth a second one."""

SILENT_SECONDS = 20.0
"""A worker that was not heard of for so long is lost, as far as anybody can tell."""

DEAF_SECONDS = SILENT_SECONDS / 2
"""A line to which nobody spoke for so long stood still itself: that says nothing of the workers."""

LOOK_SECONDS = 0.2
"""How long the estimate of what each shard still takes is good for."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker does next."""

    attempt: int  # its number, by which the worker tells of it
    shard: int  # its number
    second: bool = False  # whether another worker is at it


@dataclass(slots=True)
class _Attempt:
    """A worker's attempt at a shard."""

    shard: int
    caller: str
    worker: str
    begun: float  # seconds
    second: bool
    lost: bool = False  # whether its worker is; it counts all the same if that comes back with a result


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
        self.attempts: dict[int, _Attempt] = {}
        self.deadly: set[int] = set()  # shards at which a worker was lost: a second attempt could cost another one
        self.heard: dict[str, float] = {}  # seconds, when each worker was heard of last
        self._again: set[int] = set()  # of those that wait, shards that were taken before
        self._held: dict[str, int] = {}  # by caller, its attempt
        self._paces: dict[str, _Pace] = {}  # by worker
        self._numbers = itertools.count()
        self._listened = float("inf")  # seconds, when anybody spoke to it last
        self._seen = -LOOK_SECONDS  # seconds, when what each shard still takes was estimated
        self._left: list[tuple[int, float]] = []

    def take(self, caller: str, worker: str, now: float) -> Order | None:
        """The next shard of a caller; None if there is none for it now.

        Args:
            caller: one line of work of a worker, which finishes one shard after the other. If it comes while it has
                a shard, its worker died: it goes on with that shard.
            worker: a process.
            now: seconds, on any clock that never goes back.
        """
        self.hear(worker, now)
        died = self._remove(self._held.get(caller))
        if died is not None and not died.lost and died.shard in self.remaining:
            self.deadly.add(died.shard)
            if not died.second:
                self._stop_seconds(died.shard)
                return self._begin(died.shard, caller, worker, False, now)
            self._wait_again(died.shard)
        crew = sum(attempt.worker == worker for attempt in self.attempts.values())
        if self.waiting:
            if crew and len(self.waiting) < len(self.heard):
                return None  # none is read ahead that another worker may soon begin at once
            shard = self.waiting.popleft()
            self._again.discard(shard)
            return self._begin(shard, caller, worker, False, now)
        if crew or (slowest := self._worth_a_second(worker, now)) is None:
            return None
        return self._begin(slowest, caller, worker, True, now)

    def hear(self, worker: str, now: float) -> None:
        """Note that a worker lives."""
        self._listen(now)
        self.heard[worker] = now

    def go_on(self, number: int, now: float) -> None:
        """Note that an attempt goes on. If its worker was thought lost, and its shard waits, it has that again."""
        attempt = self.attempts.get(number)
        if attempt is not None and attempt.lost and attempt.shard in self._again:
            self.hear(attempt.worker, now)
            attempt.lost = False
            self._wait_no_more(attempt.shard)

    def lose_the_silent(self, now: float) -> None:
        """Hand what lost workers were at to others: nobody may ever say that they are gone."""
        self._listen(now)
        silent = {worker for worker, heard in self.heard.items() if now - heard > SILENT_SECONDS}
        for worker in silent:
            del self.heard[worker]
        for attempt in self.attempts.values():
            if attempt.worker in silent and not attempt.lost and attempt.shard in self.remaining:
                attempt.lost = True
                self.deadly.add(attempt.shard)
                self._wait_again(attempt.shard)

    def end(self, number: int, now: float) -> bool:
        """Note that an attempt has ended; whether it is the first of its shard to end."""
        if (attempt := self._remove(number)) is None:
            return False
        pace = self._paces[attempt.worker]
        pace.last = now
        pace.size += self.sizes[attempt.shard]
        if attempt.shard not in self.remaining:
            return False
        self.remaining.remove(attempt.shard)
        self._wait_no_more(attempt.shard)
        return True

    def give_up(self, number: int) -> None:
        """Note that an attempt ended without a result."""
        if (attempt := self._remove(number)) is not None:
            self._wait_again(attempt.shard)

    def is_second(self, number: int) -> bool:
        """Whether an attempt is one beside another."""
        return number in self.attempts and self.attempts[number].second

    def in_vain(self, number: int) -> bool:
        """Whether an attempt need not go on: its shard has ended elsewhere, or is that of another attempt alone."""
        return number not in self.attempts or self.attempts[number].shard not in self.remaining

    def has_another(self, number: int) -> bool:
        """Whether the shard of an attempt does not depend on it: it has ended, waits, or another worker is at it."""
        if self.in_vain(number):
            return True
        mine = self.attempts[number]
        return self._crowd()[mine.shard] > (not mine.lost) or mine.shard in self._again

    def _begin(self, shard: int, caller: str, worker: str, second: bool, now: float) -> Order:
        self._paces.setdefault(worker, _Pace(now))
        order = Order(next(self._numbers), shard, second)
        self.attempts[order.attempt] = _Attempt(shard, caller, worker, now, second)
        self._held[caller] = order.attempt
        return order

    def _remove(self, number: int | None) -> _Attempt | None:
        """Take an attempt out; None if it is not there."""
        if number is None or (attempt := self.attempts.pop(number, None)) is None:
            return None
        del self._held[attempt.caller]
        return attempt

    def _stop_seconds(self, shard: int) -> None:
        """End second attempts at a shard at which a worker died.

        Only a first attempt knows by its journal what a document that kills its worker came to: the rows of another
        could differ.
        """
        for number in [number for number, attempt in self.attempts.items() if attempt.shard == shard]:
            self._remove(number)

    def _wait_again(self, shard: int) -> None:
        """Put a shard that nobody is at before all others, once."""
        if shard in self.remaining and shard not in self._again and not self._crowd()[shard]:
            self._again.add(shard)
            self.waiting.appendleft(shard)

    def _wait_no_more(self, shard: int) -> None:
        """Take a shard out that was taken before and waits again."""
        if shard in self._again:
            self._again.remove(shard)
            self.waiting.remove(shard)

    def _listen(self, now: float) -> None:
        if now - self._listened > DEAF_SECONDS:
            self.heard = dict.fromkeys(self.heard, now)
        self._listened = now

    def _crowd(self) -> Counter[int]:
        """How many attempts there are at each shard, of workers that are not lost."""
        return Counter(attempt.shard for attempt in self.attempts.values() if not attempt.lost)

    def _worth_a_second(self, worker: str, now: float) -> int | None:
        """The shard, of those that one worker is at, that will end last, if this worker would end it sooner."""
        usual = [rate for each in self._paces if (rate := self._rate(each))]
        if not usual:
            return None
        median = statistics.median(usual)
        rate = self._rate(worker) or median
        if now - self._seen >= LOOK_SECONDS:
            self._seen, self._left = now, self._alone(now, median)
        for place, (shard, seconds) in enumerate(self._left):
            if seconds <= self.least_seconds:
                return None
            open_to_it = shard in self.remaining and shard not in self.deadly
            if open_to_it and self.sizes[shard] / rate < GAIN * seconds:
                del self._left[place]
                return shard
        return None

    def _alone(self, now: float, median: float) -> list[tuple[int, float]]:
        """The shards that one worker is at, and what each still takes, in seconds, the longest first."""
        crowd = self._crowd()
        left = self._seconds_left(now, median).items()
        alone = [(shard, seconds) for shard, seconds in left if crowd[shard] == 1 and shard not in self.deadly]
        return sorted(alone, key=lambda each: (-each[1], each[0]))

    def _seconds_left(self, now: float, median: float) -> dict[int, float]:
        """What each shard still takes, where every worker goes on as fast as it was."""
        ends: dict[str, float] = {}
        left: dict[int, float] = {}
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.begun):
            if attempt.lost or attempt.shard not in self.remaining:
                continue
            pace = self._paces[attempt.worker]
            whole = self.sizes[attempt.shard] / (self._rate(attempt.worker) or median)
            begun = max(attempt.begun, pace.last)
            earlier = ends.get(attempt.worker)
            end = begun + whole if earlier is None else earlier + whole  # the one that is read ahead waits
            if end < now:  # it is slower than it was, or gone: the longer it is overdue, the longer it may take
                end = now + (now - begun)
            ends[attempt.worker] = end
            left[attempt.shard] = end - now
        return left

    def _rate(self, worker: str) -> float:
        """Size a second of what a worker has ended; 0 where it has ended nothing."""
        pace = self._paces.get(worker)
        return pace.size / max(pace.last - pace.since, 1e-9) if pace and pace.size else 0.0
