"""The board under random deaths, silences and lost answers: every shard ends once, and one worker is enough."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from pipeline.stages.base import Placement
from pipeline.stages.events import Failure, Tick
from pipeline.stages.line import SILENT_SECONDS
from ray_jobs.actors import ShardActor, _events
from ray_jobs.board import Board, News, Portion

SHARDS, IN_BUNDLE, WORKERS = 23, 4, 5
STORM = 150.0
"""Seconds in which everything happens; then one worker is left."""


class Clock:
    """A clock that a test sets, in the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@dataclass
class Work:
    """What a caller is at."""

    portion: Portion
    ends: float


@dataclass
class Process:
    """A process of a worker: its callers, and until when nobody hears it."""

    name: str
    callers: dict[str, Work | None]
    silent: float = 0.0
    asks: dict[str, float] = field(default_factory=dict)  # by caller, when it asks again


class Cluster:
    """Workers that go through a board as `ray_jobs.actors.ShardActor` does."""

    def __init__(self, board: Board, clock: Clock, rng: random.Random) -> None:
        self.board = board
        self.clock = clock
        self.rng = rng
        self.sizes = [rng.uniform(0.5, 12) for _ in range(SHARDS)]
        self.receipts: set[int] = set()
        self.news: list[tuple[str, str]] = []
        self.requests = 0
        self.generations = 0
        self.processes = [self.begun([f"{worker}/{index}" for index in range(2)]) for worker in range(WORKERS)]
        self.down: list[tuple[float, list[str]]] = []  # when what callers begins again

    def begun(self, callers: list[str]) -> Process:
        """A new process for callers."""
        self.generations += 1
        return Process(f"process {self.generations}", dict.fromkeys(callers))

    def shard(self, portion: Portion) -> int:
        """The number of a shard."""
        return int(portion.bundle) * IN_BUNDLE + portion.index

    def answer(self, method: str, *arguments: object) -> object:
        """What the board answers, which may be lost, and is then asked for again."""
        value = getattr(self.board, method)(*arguments)
        while self.rng.random() < 0.2:
            self.hear_news()
            value = getattr(self.board, method)(*arguments)
        return value

    def hear_news(self) -> None:
        """What the driver hears, maybe at its second try."""
        self.requests += 1
        news = self.board.news(self.requests)
        if self.rng.random() < 0.2:
            news = self.board.news(self.requests)
        self.news += news.ended

    def disturb(self) -> None:
        """Let one thing happen to a worker."""
        now, kind = self.clock.now, self.rng.random()
        victims = [process for process in self.processes if process.silent <= now]
        if not victims:
            return
        victim = self.rng.choice(victims)
        if kind < 0.04:
            self.processes.remove(victim)
            self.down.append((now + self.rng.choice([0, 3, 60, 1e9]), list(victim.callers)))
        elif kind < 0.08:
            victim.silent = now + self.rng.uniform(1, 4 * SILENT_SECONDS)
        elif kind < 0.09:
            self.clock.now += 2 * SILENT_SECONDS  # all stand still

    def go_on(self, process: Process) -> None:
        """Let a process do what it does now."""
        now = self.clock.now
        if process.silent > now:
            return
        self.board.hear(process.name)
        for caller, work in process.callers.items():
            if work is not None:
                shard, attempt = self.shard(work.portion), work.portion.attempt
                if shard in self.receipts or (now >= work.ends and self.rng.random() < 0.8):
                    self.receipts.add(shard)
                    if self.rng.random() < 0.05:
                        continue  # it dies, or is not heard, before it says so
                    self.answer("end", attempt, "receipt", str(shard))
                elif now >= work.ends:
                    self.answer("end", attempt, "failure", str(shard))
                elif self.answer("advance", attempt, str(shard), 1, 1):
                    self.answer("give_up", attempt)
                else:
                    continue
                process.callers[caller] = None
            if now >= process.asks.get(caller, 0.0):
                self.requests += 1
                answer = self.answer("take", caller, process.name, str(self.requests))
                if isinstance(answer, Portion):
                    process.callers[caller] = Work(answer, now + self.sizes[self.shard(answer)])
                elif isinstance(answer, float):
                    process.asks[caller] = now + answer

    def second(self, seconds: float) -> None:
        """Let time go on."""
        self.clock.now += seconds
        for back, callers in [each for each in self.down if each[0] <= self.clock.now]:
            self.down.remove((back, callers))
            self.processes.append(self.begun(callers))
        for process in self.rng.sample(self.processes, len(self.processes)):
            self.go_on(process)
        self.hear_news()
        line = self.board.line
        assert len(line.waiting) == len(set(line.waiting)), "no shard waits twice"
        working = {attempt.shard for attempt in line.attempts.values() if not attempt.lost}
        assert line.remaining <= working | set(line.waiting), "somebody is at it, or it waits"
        assert not working & set(line.waiting), "nobody is at what waits"


@pytest.mark.parametrize("seed", range(60))
def test_every_shard_ends_once_whatever_happens_while_one_worker_lives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rng = Clock(), random.Random(seed)
    monkeypatch.setattr("ray_jobs.board.time", clock)
    bundles = [str(number).encode() for number in range(-(-SHARDS // IN_BUNDLE))]
    board = Board(bundles, IN_BUNDLE, [1.0] * SHARDS)
    board.line.least_seconds = 0.0
    cluster = Cluster(board, clock, rng)
    end = clock.now + STORM
    while clock.now < end:
        cluster.second(rng.uniform(0.2, 2))
        cluster.disturb()
    survivor = cluster.begun(["survivor/0", "survivor/1"])
    cluster.processes = [survivor]
    cluster.down = []
    end = clock.now + SILENT_SECONDS + 4 * sum(cluster.sizes) + 60
    while board.line.remaining and clock.now < end:
        cluster.second(1.0)
    assert sorted(int(shard) for _, shard in cluster.news) == list(range(SHARDS))
    assert board.take("anybody", "anybody", "last") is None
    assert board.news().ended == []


def test_an_actor_that_is_started_again_is_another_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it was at waits until the new process has loaded its models, of which the board hears all the time."""
    monkeypatch.setattr(ShardActor, "_tell_of_life", lambda _: None)
    stage: Any = SimpleNamespace(name="score", make=lambda *_: object())
    board = SimpleNamespace(ready=SimpleNamespace(remote=int))
    before, after = (ShardActor(stage, Placement(), str(tmp_path), "driver", board) for _ in range(2))
    assert before.name != after.name


def test_news_whose_answer_is_lost_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board([b""], 1, [1.0])
    portion = board.take("one", "one", "1")
    assert isinstance(portion, Portion)
    board.end(portion.attempt, "failure", json.dumps({"shard": "audit-000000", "message": "its disk is full"}))
    answers: list[News] = []

    def get(answer: News) -> News:
        answers.append(answer)
        if len(answers) == 1:
            raise ActorUnavailableError("the network", None)
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    handle, stage = SimpleNamespace(news=SimpleNamespace(remote=board.news)), cast(Any, SimpleNamespace(name="score"))
    events = [event for event in _events(stage, handle, 1, lambda: None) if not isinstance(event, Tick)]
    assert events == [Failure("audit-000000", "its disk is full")]
