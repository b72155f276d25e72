"""The order in which workers take shards, tried on actors of unlike speed by a simulation of their events."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest

from pipeline.stages.line import SILENT_SECONDS, Line, Order, longest_shards_first
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
    lost = dead or {}
    count = itertools.count()
    events: list[tuple[float, int, str, Actor, Order | None]] = []
    for actor, index in itertools.product(actors, range(SHARDS_AT_A_TIME)):
        heapq.heappush(events, (actor.free, next(count), f"{actor.name}/{index}", actor, None))
    ended: list[tuple[float, int]] = []
    while line.remaining:
        now, _, caller, actor, done = heapq.heappop(events)
        for other in actors:
            if now < lost.get(other.name, float("inf")):
                line.hear(other.name, now)
        line.lose_the_silent(now)
        if now >= lost.get(actor.name, float("inf")):
            continue
        if done is not None and line.end(done.attempt, now):
            ended.append((now, done.shard))
        order = line.take(caller, actor.name, now)
        if order is None:
            heapq.heappush(events, (now + POLL, next(count), caller, actor, None))
            continue
        actor.free = max(actor.free, now) + sizes[order.shard] / actor.speed
        heapq.heappush(events, (actor.free, next(count), caller, actor, order))
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


def shard_of(order: Order | None) -> int | None:
    return None if order is None else order.shard


def test_the_longest_go_first_and_a_caller_whose_worker_died_goes_on_with_its_shard() -> None:
    assert longest_shards_first([2, 7, 7, 1]) == [1, 2, 0, 3]
    line = Line([2, 7, 7, 1], least_seconds=0)
    first = line.take("a", "one", 0)
    assert first == Order(0, 1)
    assert line.take("b", "two", 0) == Order(1, 2)
    assert line.take("a", "one", 1) == Order(2, 1), "the worker of a died"
    assert not line.end(0, 8), "what it may have said before it died"
    assert line.end(2, 8)
    assert line.take("a", "one", 8) == Order(3, 0)
    assert line.end(1, 9)
    assert line.take("b", "two", 9) == Order(4, 3)
    assert line.end(4, 10)
    assert line.take("b", "two", 50) == Order(5, 0, second=True)


def test_a_shard_at_which_a_worker_died_has_no_second_attempt() -> None:
    line = Line([1, 1, 1], least_seconds=0)
    line.take("a", "one", 0)
    line.take("b", "two", 0)
    line.end(1, 1)
    assert line.take("a", "one", 2) == Order(2, 0), "its worker died"
    line.take("b", "two", 2)
    line.end(3, 3)
    line.hear("one", 50)
    assert line.take("b", "two", 50) is None


def test_a_second_attempt_goes_to_an_idle_worker_alone_and_only_where_it_pays() -> None:
    line = Line([10, 10, 10], least_seconds=1)
    for caller in "ab":
        line.take(caller, caller, 0)
    assert line.end(0, 10)
    assert line.take("a", "a", 10) == Order(2, 2)
    assert line.end(2, 20)
    assert line.take("a2", "a", 20) == Order(3, 1, second=True), "b has had twice the time"
    assert line.take("a3", "a", 20) is None, "it is at one already"
    assert line.take("c", "c", 20) is None, "two are at it"
    assert line.take("a2", "a", 50) is None, "a second attempt that died is not made again"
    assert line.end(1, 52)
    assert not line.remaining


def beside() -> Line:
    """`a` and `b` have ended a shard each; b is at the last, attempt 2, and a begins beside it, attempt 3."""
    line = Line([10, 10, 10], least_seconds=1)
    line.take("a", "a", 0)
    line.take("b", "b", 0)
    line.end(0, 5)
    line.end(1, 10)
    assert line.take("b", "b", 10) == Order(2, 2)
    assert line.take("a", "a", 21) == Order(3, 2, second=True)
    return line


def test_of_two_attempts_the_first_to_end_counts() -> None:
    line = beside()
    assert line.is_second(3)
    assert line.has_another(2)
    assert not line.in_vain(2)
    assert line.end(3, 25)
    assert line.in_vain(2)
    assert not line.end(2, 26)


def test_a_worker_that_died_at_a_shard_ends_the_second_attempt_beside_it() -> None:
    line = beside()
    assert line.take("b", "b", 22) == Order(4, 2)
    assert line.in_vain(3), "its rows could be others than those of an attempt that knows of the death"
    assert not line.end(3, 23)
    assert line.end(4, 24)


def test_a_shard_whose_workers_are_all_lost_is_given_to_another_as_a_first_attempt() -> None:
    """The node of the first was lost, then that of the second; nobody says so."""
    line = beside()
    for now in range(22, 120):
        line.hear("c", now)
        line.lose_the_silent(now)
    assert line.take("c", "c", 120) == Order(4, 2)
    assert not line.has_another(4)
    assert line.end(4, 130)
    assert line.in_vain(2)
    assert line.in_vain(3)


def test_a_second_attempt_goes_on_where_the_first_is_lost_and_its_death_is_not_the_end() -> None:
    line = beside()
    for now in range(22, 120):
        line.hear("a", now)
        line.lose_the_silent(now)
    assert not line.in_vain(3)
    assert not line.has_another(3)
    assert line.take("a", "a", 120) == Order(4, 2), "it died: nobody is at the shard, which needs a first attempt"


def test_a_shard_that_a_dead_worker_had_is_given_to_another_when_its_next_worker_is_lost() -> None:
    line = Line([1, 1], least_seconds=0)
    line.take("a", "one", 0)
    assert line.take("a", "one", 2) == Order(1, 0), "its worker died"
    line.take("b", "two", 2)
    line.end(2, 3)
    for now in range(3, 100):
        line.hear("two", now)
        line.lose_the_silent(now)
    assert shard_of(line.take("b", "two", 100)) == 0


def be_silent(line: Line, end: float) -> None:
    """Let time go on to `end` for a line to which nobody but its driver speaks."""
    for back in range(int(2 * SILENT_SECONDS), -1, -1):
        if end - back >= max([0.0, *line.heard.values()]):
            line.lose_the_silent(end - back)


def test_a_worker_that_is_lost_and_comes_back_counts_with_its_result() -> None:
    """So one that is slow to answer each time does not lose its work each time."""
    line = Line([1, 1])
    line.take("a", "one", 0)
    be_silent(line, SILENT_SECONDS + 1)
    assert not line.in_vain(0)
    assert line.has_another(0), "its shard waits"
    assert line.end(0, SILENT_SECONDS + 2)
    assert shard_of(line.take("b", "two", SILENT_SECONDS + 3)) == 1
    be_silent(line, 2 * SILENT_SECONDS + 4)
    assert line.take("a", "one", 2 * SILENT_SECONDS + 5) == Order(2, 1)
    assert line.has_another(1), "another worker is at its shard"
    assert not line.has_another(2)
    assert line.take("b", "two", 2 * SILENT_SECONDS + 6) is None, "its process died: the shard is that of another now"
    assert line.end(2, 2 * SILENT_SECONDS + 7)
    assert not line.remaining


def test_a_shard_whose_lost_worker_comes_back_and_gives_it_up_waits_once() -> None:
    """Else two would begin it as if each were alone, and a failure of one could be told beside the other's receipt."""
    line = Line([1, 1, 1])
    line.take("a", "one", 0)
    be_silent(line, SILENT_SECONDS + 1)
    assert line.has_another(0)
    line.give_up(0)
    assert sorted(line.waiting) == [0, 1, 2]


def test_nobody_is_lost_while_the_line_itself_stood_still() -> None:
    """As where a scheduler stops all processes of a job for a while, and lets them go on."""
    line = Line([1, 1])
    line.take("a", "one", 0)
    line.lose_the_silent(1)
    line.lose_the_silent(3600)
    assert not line.has_another(0)
    be_silent(line, 3600 + SILENT_SECONDS + 1)
    assert line.has_another(0), "the others went on, and it did not"


def test_a_lost_worker_that_goes_on_before_another_took_its_shard_has_it_again() -> None:
    line = Line([2, 1])
    line.take("a", "one", 0)
    be_silent(line, SILENT_SECONDS + 1)
    line.go_on(0, SILENT_SECONDS + 2)
    assert shard_of(line.take("b", "two", SILENT_SECONDS + 3)) == 1
    assert not line.has_another(0)
    assert line.end(0, SILENT_SECONDS + 4)


@pytest.mark.parametrize("seed", range(20))
def test_every_shard_ends_while_one_worker_lives(seed: int) -> None:
    """Workers die and come again, die for good, and fall silent for a while, at any time."""
    rng = random.Random(seed)
    sizes = [rng.uniform(0.5, 20) for _ in range(30)]
    line = Line(sizes, least_seconds=0)
    workers = [f"worker {number}" for number in range(6)]
    at: dict[str, Order | None] = {f"{worker}/{index}": None for worker in workers for index in range(2)}
    until: dict[str, float] = {}
    gone: set[str] = set()
    ended: list[int] = []
    for now in range(6000):
        for worker in workers:
            if worker not in gone:
                line.hear(worker, now)
        if now % 40 == 20 and rng.random() < 0.5:
            gone.add(rng.choice(workers[1:]))
        if now % 200 == 190 and gone:
            gone.remove(rng.choice(sorted(gone)))
        line.lose_the_silent(now)
        for caller in at:
            worker = caller.partition("/")[0]
            if worker in gone:
                continue
            order = at[caller]
            if order is not None and rng.random() < 0.01:
                order = None  # its worker died and is started again
            elif order is not None and line.in_vain(order.attempt):
                line.give_up(order.attempt)
                order = None
            elif order is not None and now >= until[caller]:
                if line.end(order.attempt, now):
                    ended.append(order.shard)
                order = None
            elif order is not None:
                continue
            at[caller] = line.take(caller, worker, now)
            if (order := at[caller]) is not None:
                until[caller] = now + sizes[order.shard]
        if not line.remaining:
            break
    assert sorted(ended) == list(range(30))
