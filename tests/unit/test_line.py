"""The order in which workers take shards, tried on actors of unlike speed by a simulation of their events."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest

from pipeline.stages.line import Line, Order, longest_shards_first
from pipeline.stages.turns import SHARDS_AT_A_TIME

POLL = 0.01  # of the time that an actor of speed 1 takes for a shard of size 1


class Actor:
    """An actor of the simulation: each of its callers takes a shard, and one shard is worked on at a time."""

    def __init__(self, name: str, speed: float, begin: float = 0.0) -> None:
        self.name = name
        self.speed = speed
        self.free = begin


def simulated(
    sizes: Sequence[float], actors: Sequence[Actor], dead: dict[str, float] | None = None, seconds: bool = True
) -> list[tuple[float, int]]:
    """When each shard ended: the callers of all actors go through a `Line`, as those of a cluster do.

    An actor that dies says nothing any more, as on a node that is lost.
    """
    line = Line(sizes, least_seconds=0.0 if seconds else float("inf"))
    count = itertools.count()
    events: list[tuple[float, int, str, Actor, int]] = []
    for actor, index in itertools.product(actors, range(SHARDS_AT_A_TIME)):
        heapq.heappush(events, (actor.free, next(count), f"{actor.name}/{index}", actor, -1))
    ended: list[tuple[float, int]] = []
    while line.remaining:
        now, _, caller, actor, number = heapq.heappop(events)
        if dead and now >= dead.get(actor.name, float("inf")):
            continue
        if number >= 0 and line.end(caller, now):
            ended.append((now, number))
        order = line.take(caller, actor.name, now)
        if order is None:
            heapq.heappush(events, (now + POLL, next(count), caller, actor, -1))
            continue
        actor.free = max(actor.free, now) + sizes[order.number] / actor.speed
        heapq.heappush(events, (actor.free, next(count), caller, actor, order.number))
    return ended


def share_of_last(ended: list[tuple[float, int]], sizes: Sequence[float], share: float = 0.05) -> float:
    """The share of a run's time that the last of its work takes."""
    done, whole = 0.0, sum(sizes)
    for at, number in ended:
        done += sizes[number]
        if done >= (1 - share) * whole:
            return 1 - at / ended[-1][0]
    raise AssertionError


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["equal", "unlike"])
def test_the_last_twentieth_of_a_run_takes_at_most_7_percent_of_its_time(kind: str, seed: int) -> None:
    """Sixteen actors of one to four times a speed, 40 shards each."""
    rng = random.Random(seed)
    actors = [Actor(f"actor {number}", rng.uniform(1, 4)) for number in range(14)] + [Actor("s", 1), Actor("f", 4)]
    sizes = [1.0 if kind == "equal" else rng.uniform(0.1, 2) for _ in range(40 * len(actors))]
    ended = simulated(sizes, actors)
    assert sorted(number for _, number in ended) == list(range(len(sizes)))
    assert share_of_last(ended, sizes) <= 0.07
    without = simulated(sizes, [Actor(actor.name, actor.speed) for actor in actors], seconds=False)
    assert ended[-1][0] <= without[-1][0]


def test_what_a_lost_node_had_is_done_by_others_within_two_shards() -> None:
    """The slowest actor is lost with two shards in hand, and nobody says so."""
    actors = [Actor(f"actor {number}", speed) for number, speed in enumerate((1, 2, 3, 4))]
    sizes = [1.0] * 160
    whole = simulated(sizes, [Actor(actor.name, actor.speed) for actor in actors])[-1][0]
    ended = simulated(sizes, actors, dead={"actor 0": whole - 1.2})
    assert len(ended) == len(sizes)
    assert ended[-1][0] <= whole + 2


def test_an_actor_that_comes_late_is_given_its_part() -> None:
    sizes = [1.0] * 80
    late = [Actor("first", 1), Actor("late", 4, begin=10)]
    assert simulated(sizes, late)[-1][0] == pytest.approx(10 + 70 / 5, rel=0.05)


def test_the_longest_go_first_and_a_caller_whose_worker_died_goes_on_with_its_shard() -> None:
    assert longest_shards_first([2, 7, 7, 1]) == [1, 2, 0, 3]
    line = Line([2, 7, 7, 1], least_seconds=0)
    assert line.take("a", "one", 0) == Order(1)
    assert line.take("b", "two", 0) == Order(2)
    assert line.take("a", "one", 1) == Order(1), "the worker of a died"
    assert line.end("a", 8)
    assert line.take("a", "one", 8) == Order(0)
    assert line.end("b", 9)
    assert line.take("b", "two", 9) == Order(3)
    assert line.end("b", 10)
    assert line.take("b", "two", 99) == Order(0, second=True)


def test_a_shard_at_which_a_worker_died_has_no_second_attempt() -> None:
    line = Line([1, 1, 1], least_seconds=0)
    line.take("a", "one", 0)
    line.take("b", "two", 0)
    line.end("b", 1)
    assert line.take("a", "one", 2) == Order(0), "its worker died"
    line.take("b", "two", 2)
    line.end("b", 3)
    assert line.take("b", "two", 99) is None


def test_a_second_attempt_goes_to_an_idle_worker_alone_and_only_where_it_pays() -> None:
    line = Line([10, 10, 10], least_seconds=1)
    for caller in "ab":
        line.take(caller, caller, 0)
    assert line.end("a", 10)
    assert line.take("a", "a", 10) == Order(2)
    assert line.end("a", 20)
    assert line.take("a2", "a", 20) == Order(1, second=True), "b has had twice the time"
    assert line.take("a3", "a", 20) is None, "it is at one already"
    assert line.take("c", "c", 20) is None, "two are at it"
    assert line.take("a2", "a", 50) is None, "a second attempt that died is not made again"
    assert line.end("b", 22)
    assert not line.remaining


def test_of_two_attempts_the_first_to_end_counts() -> None:
    line = Line([10, 10, 10], least_seconds=1)
    line.take("a", "a", 0)
    line.take("b", "b", 0)
    line.end("a", 5)
    line.take("a", "a", 5)
    line.end("a", 10)
    assert line.take("a", "a", 20) == Order(1, second=True)
    assert line.is_second("a")
    assert not line.beaten("b")
    assert line.end("a", 25)
    assert line.beaten("b")
    assert not line.end("b", 26)
