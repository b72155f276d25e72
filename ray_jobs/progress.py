"""How far a run is: a live bar on a terminal, plain lines otherwise, and the counts of status.json."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.store.receipts import Receipt

LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answered:
    """How many requests an endpoint has answered in a stage, while its shards are under way."""

    requests: int


@dataclass(slots=True)
class Counts:
    """Documents and shards so far; rates are of this driver's own work."""

    shards: int
    stage: str = "score"
    shards_done: int = 0
    documents: int = 0
    scored: int = 0
    quarantined: int = 0
    tokens: int = 0
    answers: int = 0  # of an endpoint
    failures: list[str] = field(default_factory=list)
    fresh_documents: int = 0
    fresh_tokens: int = 0
    fresh_shards: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, receipt: Receipt, fresh: bool) -> None:
        """Count a finished shard; a fresh one was finished by this driver."""
        self.shards_done += 1
        self.documents += receipt.n_in
        self.scored += receipt.n_scored
        self.quarantined += receipt.n_quarantined
        self.tokens += receipt.tokens
        if fresh:
            self.fresh_shards += 1
            self.fresh_documents += receipt.n_in
            self.fresh_tokens += receipt.tokens

    def to_dict(self) -> dict[str, Any]:
        """What status.json says."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        left = self.shards - self.shards_done
        eta = round(seconds / self.fresh_shards * left, 1) if self.fresh_shards else None
        return {
            "stage": self.stage,
            "shards": self.shards,
            "shards_done": self.shards_done,
            "documents": self.documents,
            "scored": self.scored,
            "quarantined": self.quarantined,
            "tokens": self.tokens,
            "documents_per_s": round(self.fresh_documents / seconds, 2),
            "tokens_per_s": round(self.fresh_tokens / seconds, 1),
            "eta_s": eta,
            "failures": self.failures[:20],
        }

    def line(self) -> str:
        """One line for a person."""
        d = self.to_dict()
        eta = "-" if d["eta_s"] is None else duration(d["eta_s"])
        stage = "" if self.stage == "score" else f"{self.stage}: "
        answers = f"answers {self.answers:,}  " if self.answers else ""
        return (
            f"{stage}shards {self.shards_done}/{self.shards}  documents {self.documents:,}  "
            f"{d['documents_per_s']:,.1f} documents/s  {d['tokens_per_s']:,.0f} tokens/s  "
            f"ETA {eta}  {answers}quarantined {self.quarantined:,}"
        )


class Reporter:
    """Says what happens: a bar where somebody watches, a line every ten seconds where nobody does."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        """`quiet` says nothing at all (for --json)."""
        self.console = console
        self.quiet = quiet
        self._bar: Progress | None = None
        self._last = 0.0

    def say(self, text: str) -> None:
        """One plain line."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def pace(self, text: str) -> None:
        """One plain line, unless there was one in the last ten seconds."""
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self.say(text)

    def __enter__(self) -> Reporter:
        """Begin the scoring phase."""
        if self.console.is_terminal and not self.quiet:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self.console, transient=True)
            self._bar.add_task("starting", total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; the bar goes."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, counts: Counts, last: bool = False) -> None:
        """Show the counts."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, total=counts.shards, completed=counts.shards_done, description=counts.line())
        elif last or time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self.say(counts.line())


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
