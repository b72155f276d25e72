"""The progress of a run, from status.json and from storage alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError, ExitCode, UserError
from pipeline.results.history import answer_names
from pipeline.results.summary import Summary, read_summary, unsupported
from pipeline.run.digests import no_digests
from pipeline.run.manifest import read_run, refused_parameters
from pipeline.run.records import VersionedRecord, read_record, sealed_values
from pipeline.run.remedies import DRIVER_GONE, REWRITTEN
from pipeline.stages import SCORING, is_scoring
from pipeline.stages.events import Advance, Failure
from pipeline.store.files import Store
from pipeline.store.lock import lock_is_live
from pipeline.store.receipts import Receipt, read_receipts, receipt_name

STATUS_FILE = "status.json"
STATUS_SECONDS = 5.0
ETA_SECONDS = 3.0
ETA_SHARE = 0.02
"""Minimum of finished work for an estimate of the remaining time."""
LISTED_FAILURES = 20

RunState = Literal["running", "complete", "incomplete", "failed"]
_PROGRESS_FIELDS = {"documents_per_s", "tokens_per_s", "eta_s", "failures", "under_way"}


class Status(VersionedRecord):
    """The progress or the end of a run: `status.json`."""

    sealed = True

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    state: RunState = Field(
        description="running; complete; incomplete: the same command resumes it; failed: see the message."
    )
    exit_code: int | None = Field(description="Exit code of the command; null while it runs.")
    message: str | None = Field(description="Why the run is incomplete or failed, in one line.")
    stage: str = Field(description="The stage of these counts.")
    shards: int = Field(description="Shards of the run.")
    shards_done: int = Field(description="Shards that the stage has finished.")
    documents: int = Field(description="Documents of the finished shards.")
    under_way: int = Field(0, description="Finished documents of unfinished shards.")
    scored: int = Field(description="Documents that the stage could read; with stage score, that have scores.")
    quarantined: int = Field(description="Documents that the stage could not read or score.")
    judged: int = Field(0, description="Documents left out because earlier runs have audited them (`against`).")
    tokens: int = Field(description="Tokens of the finished shards.")
    documents_per_s: float = Field(description="Documents per second of the last driver.")
    tokens_per_s: float = Field(description="Tokens per second of the last driver.")
    eta_s: float | None = Field(description="Seconds until the stage is finished; null where not known.")
    failures: list[str] = Field(description=f"Errors of failed shards, the first {LISTED_FAILURES}.")
    selections: list[Summary] = Field(
        [], description="The existing answers, as printed by seenset status; not kept in status.json."
    )
    unsupported: list[str] = Field(
        [], description="Those whose guarantee a check contradicts: do not act on them. Not in status.json."
    )

    parameters: list[str] = Field(
        [], description="Parameters of requests that an endpoint refuses, with the effect. Not in status.json."
    )

    def answered(self, selections: Sequence[Summary]) -> Status:
        """The same status with the existing answers."""
        return self.model_copy(update={"selections": list(selections), "unsupported": unsupported(selections)})


def final_state(error: BaseException) -> tuple[RunState, int, str | None]:
    """The state, the exit code and the message of a command that an error ends."""
    if isinstance(error, KeyboardInterrupt):
        return "incomplete", ExitCode.INTERRUPTED, None
    if isinstance(error, UserError):
        return "incomplete" if error.exit_code == ExitCode.INCOMPLETE else "failed", error.exit_code, str(error)
    return "failed", 1, f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class Counts:
    """Counts of documents and shards; rates cover the work of this driver since its workers were ready."""

    shards: int
    stage: str = SCORING
    sizes: Mapping[str, float] = field(default_factory=dict)  # estimated tokens, by shard
    shards_done: int = 0
    documents: int = 0
    scored: int = 0
    quarantined: int = 0
    judged: int = 0
    tokens: int = 0
    answers: int = 0  # answers of an endpoint
    failures: list[str] = field(default_factory=list)
    under_way: dict[str, Advance] = field(default_factory=dict)  # by shard
    fresh_documents: int = 0
    fresh_tokens: int = 0
    size_done: float = 0.0  # estimated tokens of the finished shards
    began: float = field(default_factory=time.monotonic)
    size: float = field(init=False)  # estimated tokens of all shards

    def __post_init__(self) -> None:
        """Add up the sizes, once."""
        self.size = sum(self.sizes.values())

    def add(self, receipt: Receipt, fresh: bool) -> None:
        """Count a finished shard; a fresh one was finished by this driver."""
        self.under_way.pop(receipt.shard, None)
        self.shards_done += 1
        self.documents += receipt.n_in
        self.scored += receipt.n_scored
        self.quarantined += receipt.n_quarantined
        self.judged += receipt.n_judged
        self.tokens += receipt.tokens
        self.size_done += self.sizes.get(receipt.shard, 0.0)
        if fresh:
            self.fresh_documents += receipt.n_new
            self.fresh_tokens += receipt.tokens

    def advance(self, advance: Advance) -> None:
        """Record the progress of a shard."""
        self.under_way[advance.shard] = advance

    def fail(self, failure: Failure) -> None:
        """Record a failed shard."""
        self.under_way.pop(failure.shard, None)
        self.failures.append(failure.message)

    def status(self, state: RunState = "running", exit_code: int | None = None, message: str | None = None) -> Status:
        """The current counts and rates, in a state."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        under_way = sum(advance.documents for advance in self.under_way.values())
        tokens = self.fresh_tokens + sum(advance.tokens for advance in self.under_way.values())
        return Status(
            state=state,
            exit_code=exit_code,
            message=message,
            stage=self.stage,
            shards=self.shards,
            shards_done=self.shards_done,
            documents=self.documents,
            under_way=under_way,
            scored=self.scored,
            quarantined=self.quarantined,
            judged=self.judged,
            tokens=self.tokens,
            documents_per_s=round((self.fresh_documents + under_way) / seconds, 2),
            tokens_per_s=round(tokens / seconds, 1),
            eta_s=self._eta(seconds, tokens),
            failures=self.failures[:LISTED_FAILURES],
        )

    def _eta(self, seconds: float, tokens: int) -> float | None:
        """Seconds until the stage is finished; None while too little of it is done for an estimate."""
        if not tokens or seconds < ETA_SECONDS:
            return None
        ratio = self.tokens / self.size_done if self.tokens and self.size_done else 1.0
        remaining = max(0.0, (self.size - self.size_done) * ratio - (tokens - self.fresh_tokens))
        if tokens < ETA_SHARE * (tokens + remaining):
            return None
        return round(remaining * seconds / tokens, 1)

    @property
    def share(self) -> float:
        """The finished share of the stage, by estimated tokens, in [0, 1]."""
        if not self.size:
            return self.shards_done / self.shards if self.shards else 1.0
        under_way = sum(min(advance.tokens, self.sizes.get(shard, 0.0)) for shard, advance in self.under_way.items())
        return min(1.0, (self.size_done + under_way) / self.size)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def read_status(store: Store) -> Status | None:
    """Read status.json; None where no driver has written it.

    Raises:
        UserError: a damaged file, or one of another version.
    """
    return read_record(store, STATUS_FILE, Status, REWRITTEN, REWRITTEN)


def check_receipts(store: Store, status: Status | None, shards: Sequence[Shard], finished: Collection[str]) -> None:
    """Check that every shard of a complete run without a driver has its receipt.

    Args:
        store: the run directory.
        status: content of status.json.
        shards: shards of the run.
        finished: ids of the shards with a receipt.

    Raises:
        DamagedError: a receipt is missing.
    """
    if status is None or status.state != "complete":
        return
    missing = next((shard.id for shard in shards if shard.id not in finished), None)
    if missing is not None and not lock_is_live(store):
        raise DamagedError(f"{store.url}/{receipt_name(SCORING, missing)}", "is missing", REWRITTEN)


def made_answer(store: Store, name: str, held: bool = False) -> Summary | None:
    """The answer of a selection of a run, finished or not; None where it is still to be made.

    An answer of an incomplete run, or of a run with an active driver, may be about to be made again: there a changed
    answer counts as missing.

    Args:
        store: the run directory.
        name: name of the selection.
        held: whether this command holds the run's lock.

    Raises:
        DamagedError: the run is complete, and the answer is missing or changed.
        UserError: the run is complete, and another version made the answer.
    """
    try:
        summary = read_summary(store, name)
        if summary is not None:
            return summary
        problem: UserError = no_digests(store, name)
    except UserError as error:
        problem = error
    status = read_status(store)
    if status is not None and status.state == "complete" and (held or not lock_is_live(store)):
        raise problem
    return None


def run_status(run: str) -> Status:
    """The progress of a run, from storage alone: status.json, the receipts and the summaries.

    The counts are those of scoring, or, while an active driver is at another stage, those of that stage, as it wrote
    them. A stopped run with an active driver is running again.

    Raises:
        UserError: not a run directory, a damaged file in it, or one of another version.
    """
    store = Store(run)
    manifest, shards = read_run(store)
    counts, finished = Counts(len(shards)), set[str]()
    for receipt in read_receipts(store, SCORING):
        counts.add(receipt, fresh=False)
        finished.add(receipt.shard)
    status = counts.status()
    written = read_status(store)
    check_receipts(store, written, shards, finished)
    if written is not None:
        of_driver = written.model_dump(include={"state", "exit_code", "message", *_PROGRESS_FIELDS})
        if is_scoring(written.stage) and written.shards_done < status.shards_done:
            of_driver["under_way"] = 0  # documents under way then may be finished by now
        status = status.model_copy(update=of_driver)
    live = status.state != "complete" and lock_is_live(store)
    if live and status.state != "running":
        status = status.model_copy(update={"state": "running", "exit_code": None, "message": None, "eta_s": None})
    elif live and written is not None and not is_scoring(written.stage):
        status = written
    elif status.state == "running" and not live:
        update = {"state": "incomplete", "message": DRIVER_GONE}
        status = status.model_copy(update=update)
    made = (made_answer(store, name) for name in answer_names(store, manifest.config))
    answered = status.answered([summary for summary in made if summary is not None])
    return answered.model_copy(update={"parameters": refused_parameters(manifest.models)})


class StatusFile:
    """Writes status.json, at most every few seconds while shards finish."""

    def __init__(self, store: Store, counts: Counts) -> None:
        self.store = store
        self.counts = counts
        self._last = 0.0

    def tick(self) -> None:
        """Write the counts if the last write is long enough ago."""
        if time.monotonic() - self._last >= STATUS_SECONDS:
            self.write("running", None)

    def end(self, state: RunState, code: int, message: str | None = None) -> None:
        """Write why a run stopped; a directory that cannot be written to is ignored in favour of the error itself."""
        with contextlib.suppress(Exception):
            self.write(state, code, message)

    def write(
        self, state: RunState, code: int | None, message: str | None = None, selections: Sequence[Summary] = ()
    ) -> Status:
        """Write the state, the exit code and the counts; returns them with the selections."""
        self._last = time.monotonic()
        status = self.counts.status(state, None if code is None else int(code), message)
        kept = status.model_dump(mode="json", by_alias=True, exclude={"selections", "unsupported", "parameters"})
        self.store.write_json(STATUS_FILE, sealed_values(kept))
        return status.answered(selections)
