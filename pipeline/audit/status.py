"""How far a run is: the counts of status.json, and what storage alone says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.audit.manifest import read_run
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from pipeline.store.lock import lock_is_live
from pipeline.store.receipts import Receipt, read_receipts


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


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


STATUS_SECONDS = 5.0


def run_status(run: str) -> dict[str, Any]:
    """How far a run is, from storage alone: status.json, the receipts and the summaries.

    Raises:
        UserError: not a run directory.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    value = store.read_json("status.json") or {"state": "running", "exit_code": None, "message": None}
    counts = Counts(len(shards))
    for receipt in read_receipts(store, STAGE):
        counts.add(receipt, fresh=False)
    rates = ("documents_per_s", "tokens_per_s", "eta_s", "failures")
    fresh = {key: entry for key, entry in counts.to_dict().items() if key not in rates or key not in value}
    if value["state"] == "running" and not lock_is_live(store):
        value = {**value, "state": "incomplete", "message": "its driver is gone; the same command resumes"}
    names = [selection["name"] for selection in manifest["config"]["selections"]]
    summaries = [store.read_json(f"selection/{name}/summary.json") for name in names]
    return {**value, **fresh, "selections": [summary for summary in summaries if summary is not None]}


class StatusFile:
    """Keeps status.json, not more often than every few seconds while shards come in."""

    def __init__(self, store: Store, counts: Counts) -> None:
        self.store = store
        self.counts = counts
        self._last = 0.0

    def tick(self) -> None:
        """Write the counts if the last time is long enough ago."""
        if time.monotonic() - self._last >= STATUS_SECONDS:
            self.write("running", None)

    def write(self, state: str, code: int | None, message: str | None = None) -> None:
        """Write the state, the exit code and the counts."""
        self._last = time.monotonic()
        value = {"state": state, "exit_code": None if code is None else int(code), "message": message}
        self.store.write_json("status.json", {**value, **self.counts.to_dict()})
