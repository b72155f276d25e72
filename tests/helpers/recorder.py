"""A stage of tests that notes in which order a worker reads and works, here or in an actor on a cluster."""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.corpus.documents import Document
from pipeline.corpus.shard import Shard
from pipeline.models.unchanged import ModelDigests
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.stages.base import BatchSize, Entry, Output, Placement, Stage, Window, rows_schema
from pipeline.store.files import Store

SECONDS = 20.0
"""Waited for what must come; a test that waits so long has failed."""


@dataclass(frozen=True)
class Settings:
    """Of the stage of these tests."""

    together: int = 0  # letters of all texts: work on each but the last waits until another is read
    deadly_at: str = ""  # a file that says that another letter was worked on when the deadly document was read
    window: int = 4
    notes: str = ""  # a file for what is noted, one line each, also by processes that are killed


class Recorder:
    """Notes in which order windows are prepared and batches worked on; its rows depend on what shares a batch."""

    def __init__(self, stage: Stage, placement: Placement) -> None:
        made.append(self)
        self.settings: Settings = stage.settings
        self.placement = placement
        self.window = Window(self.settings.window)
        self.batch_size: BatchSize | None = BatchSize(40)
        self.notes: list[tuple[str, str]] = []
        self.missed = False  # what should have come while it was waited for
        self.deadly = False  # whether the deadly document is read
        self.inside: dict[str, int] = {"prepare": 0, "work": 0}
        self.most: dict[str, int] = {"prepare": 0, "work": 0}
        self.letters: dict[str, set[str]] = {"prepare": set(), "work": set()}
        self.counting = threading.Condition()

    def open(self, shard: Shard, store: Store, output: Output) -> None:
        pass

    def enter(self, kind: str, text: str) -> None:
        with self.counting:
            self.note(kind, text)
            self.inside[kind] += 1
            self.most[kind] = max(self.most[kind], self.inside[kind])
            self.letters[kind].add(text[0])
            self.counting.notify_all()

    def leave(self, kind: str, text: str) -> None:
        with self.counting:
            self.note(f"{kind} ended", text)
            self.inside[kind] -= 1

    def note(self, event: str, text: str) -> None:
        self.notes.append((event, text))
        if self.settings.notes:
            with Path(self.settings.notes).open("a") as file:
                file.write(f"{os.getpid()}\t{event}\t{text}\n")

    def prepare(self, documents: list[Document], inputs: None, output: Output) -> list[Entry]:
        if self.settings.deadly_at and any("deadly to tokenise" in document.text for document in documents):
            self.deadly = True
            self.enter("prepare", documents[0].text)
            flag, end = Path(self.settings.deadly_at), time.monotonic() + 5
            while not flag.exists() and time.monotonic() < end:
                time.sleep(0.005)
            os._exit(1)
        self.enter("prepare", documents[0].text)
        time.sleep(0.005)
        self.leave("prepare", documents[0].text)
        if any("wrong to tokenise" in document.text for document in documents):
            raise ValueError("no tokens")
        return [Entry(document, len(document.text), document.text) for document in documents]

    def work(self, batch: list[Entry], output: Output) -> None:
        self.enter("work", batch[0].work)
        time.sleep(0.005)
        self.wait_for_another()
        for entry in batch:
            output.keep(entry.document, length=sum(len(other.work) for other in batch))
        self.leave("work", batch[0].work)

    def wait_for_another(self) -> None:
        """Wait until a letter more is read than is worked on, if there is one; be killed if it is the deadly one."""
        flag = Path(self.settings.deadly_at)
        if not self.settings.together or (self.settings.deadly_at and flag.exists()):
            return
        with self.counting:
            sought = min(self.settings.together, len(self.letters["work"]) + 1)
            here = self.counting.wait_for(
                lambda: self.missed or len(self.letters["prepare"]) >= sought, 0 if self.missed else SECONDS
            )
            self.missed = self.missed or not here
        assert not self.missed, "nothing else is read while this is worked on"
        if self.deadly:
            flag.touch()
            time.sleep(SECONDS)  # its process is killed by what is read ahead


made: list[Recorder] = []


def make(stage: Stage, placement: Placement) -> Recorder:
    return Recorder(stage, placement)


def stage_of(**settings: Any) -> Stage:
    schema = rows_schema(("length", pa.int64()))
    return Stage("turns", "turns", schema, Settings(**settings), None, 0, make, ModelDigests())


def shards_of(folder: Path, *texts: list[Any], **settings: Any) -> tuple[list[Shard], Store]:
    """A shard of each list of texts, or of lines of JSON as they are, and a store; with settings of an audit."""
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{number}.jsonl") for number in range(len(texts))]
    for path, some in zip(paths, texts, strict=True):
        rows = [line if isinstance(line, bytes) else json.dumps({"text": line}).encode() for line in some]
        Path(path).write_bytes(b"".join(row + b"\n" for row in rows))
    corpus = {"audit": {"path": paths}}
    described = {"run": str(folder / "run"), "model": {"path": "none"}, "corpus": corpus}
    config = build_config({**described, "resources": {"shard_bytes": 1 << 30}, **settings})
    shards = make_plan(config).shards
    assert len(shards) == len(texts)
    return list(shards), Store(config.run)


def letters(letter: str, count: int) -> list[str]:
    return [letter * (1 + number % 7) for number in range(count)]
