"""What actors and the driver share: the line of shards, how far each is, and what they came to.

It is one process on the driver's node, which ends when the driver does: no other node that is lost takes it along.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import IncompleteError
from pipeline.stages.line import Line

MOST_ASKS = 500.0
"""A second, of all workers that wait for a shard together."""

LEAST_WAIT = 0.2
"""Seconds until a worker that waits for a shard asks again."""

ANSWER_SECONDS = 5.0
"""How long a board that may be lost is waited for."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A shard that is taken from the line."""

    attempt: int  # its number
    bundle: bytes  # in which it is
    index: int  # in the bundle
    second: bool  # whether another worker is at it


@dataclass(slots=True)
class News:
    """What is new since the last time."""

    ended: list[tuple[str, str]] = field(default_factory=list)  # receipt or failure, and the JSON of it
    advances: dict[str, tuple[int, int]] = field(default_factory=dict)  # shard -> documents, tokens
    ready: bool = False  # whether a worker has loaded its models
    broken: str = ""  # why a worker cannot load them
    remarks: list[str] = field(default_factory=list)  # on workers, a line each


class Board:
    """The line of a stage, and what its driver has not been told yet."""

    def __init__(self, bundles: Sequence[bytes], in_bundle: int, sizes: Sequence[float]) -> None:
        """Hold the shards.

        Args:
            bundles: of shards, `packed`.
            in_bundle: shards in each but the last.
            sizes: of the shards, in their order, in any unit.
        """
        self.bundles = bundles
        self.in_bundle = in_bundle
        self.line = Line(sizes)
        self.fresh = News()
        self.last_news = 0, News()  # the number of the last request of news, and what it got
        self.answers: dict[str, tuple[str, Portion | float | None]] = {}  # by caller, its last request and our answer

    def take(self, caller: str, worker: str, request: str) -> Portion | float | None:
        """What the caller finishes next, or the seconds after which it shall ask again; None: nothing, ever.

        Args:
            caller: of `Line.take`.
            worker: of `Line.take`.
            request: its name. One that comes again, because its answer was lost, gets the same answer.
        """
        last, answer = self.answers.get(caller, ("", None))
        if last != request:
            answer = self._next(caller, worker)
            self.answers[caller] = request, answer
        return answer

    def _next(self, caller: str, worker: str) -> Portion | float | None:
        if not self.line.remaining:
            return None
        order = self.line.take(caller, worker, time.monotonic())
        if order is None:
            return max(LEAST_WAIT, 2 * len(self.line.heard) / MOST_ASKS)
        bundle, index = divmod(order.shard, self.in_bundle)
        return Portion(order.attempt, self.bundles[bundle], index, order.second)

    def hear(self, worker: str) -> None:
        """Note that a worker lives."""
        self.line.hear(worker, time.monotonic())

    def advance(self, attempt: int, shard: str, documents: int, tokens: int) -> bool:
        """Note how far a shard is; whether this attempt at it can stop."""
        if self.line.in_vain(attempt):
            return True
        self.line.go_on(attempt, time.monotonic())
        if not self.line.is_second(attempt):
            self.fresh.advances[shard] = documents, tokens
        return False

    def end(self, attempt: int, kind: str, text: str) -> None:
        """Note what an attempt came to: the first receipt of a shard counts, and a failure if nobody else is at it."""
        if kind == "failure" and self.line.has_another(attempt):
            self.line.give_up(attempt)
        elif self.line.end(attempt, time.monotonic()):
            self.fresh.ended.append((kind, text))

    def give_up(self, attempt: int) -> None:
        """Note that an attempt has stopped, because another one was quicker."""
        self.line.give_up(attempt)

    def ready(self) -> None:
        """Note that a worker has loaded its models."""
        self.fresh.ready = True

    def remark(self, line: str) -> None:
        """Note what the user should know of a worker."""
        self.fresh.remarks.append(line)

    def broken(self, reason: str) -> None:
        """Note why a worker cannot load its models."""
        self.fresh.broken = self.fresh.broken or reason

    def news(self, request: int = 0) -> News:
        """What is new since the last request; workers that nobody heard of since long are lost.

        Args:
            request: its number. One that comes again, because its answer was lost, gets the same; 0 never does.
        """
        self.line.lose_the_silent(time.monotonic())
        if not request or request != self.last_news[0]:
            self.last_news = request, self.fresh
            self.fresh = News()
        return self.last_news[1]


def start_board(bundles: Sequence[bytes], in_bundle: int, sizes: Sequence[float]) -> Any:
    """A board on the node of this process; it ends with its last handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board: Any = ray.remote(num_cpus=0)(Board)
    return board.options(scheduling_strategy=here).remote(bundles, in_bundle, sizes)


@contextmanager
def losses_told(board: Any) -> Iterator[None]:
    """Tell in one line that the board is lost, whoever came upon it: this process, or an actor.

    Raises:
        IncompleteError: it is.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError

    try:
        yield
    except RayError as error:
        try:
            ray.get(board.news.remote(), timeout=ANSWER_SECONDS)
        except (RayActorError, GetTimeoutError):
            raise IncompleteError(
                "the process that hands out the shards is lost, with its node or for want of memory; what is finished "
                "is kept: run the same command again to go on"
            ) from error
        raise
