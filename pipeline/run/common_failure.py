"""Stop a stage of which every document so far failed with one message, before it has read the whole corpus.

The cause is then code, settings, a model or an endpoint, and not a document: a plugin's detector that raises an error,
weights that give no number. Documents that are refused for their content (empty, too short) count neither way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.config.audit import AuditConfig
from pipeline.corpus.reasons import FAULTS
from pipeline.corpus.shard import Shard
from pipeline.errors import ExitCode, StopError, one_line
from pipeline.run.repair import withdraw_shard
from pipeline.stages.base import Stage
from pipeline.stages.events import Advance, kind_of_message
from pipeline.stages.process import filed_rows
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipts

LEAST = 32
"""Documents that fail alike, and none that does not, after which a stage stops; fewer only if there are no others."""


class CommonFailureError(StopError):
    """Every document of a stage so far failed with one message."""


@dataclass(slots=True)
class CommonFailure:
    """The failures of a stage while no document of it has succeeded."""

    stage: Stage
    store: Store
    allowed: bool = False  # whether all documents may fail
    over: bool = False  # whether a document has succeeded, or two have failed in different ways
    kind: str | None = None  # of the messages
    message: str = ""  # the first
    failed: int = 0  # documents of finished shards
    under_way: dict[str, int] = field(default_factory=dict)  # shard -> its documents that failed so far

    @classmethod
    def watch(cls, stage: Stage, store: Store, config: AuditConfig) -> CommonFailure:
        """The failures of a stage, of which no shard has ended yet; an error budget of 1 allows all."""
        return cls(stage, store, config.error_budget >= 1)

    def add(self, receipt: Receipt) -> None:
        """Add a finished shard."""
        self.under_way.pop(receipt.shard, None)
        if self.allowed or self.over:
            return
        if receipt.n_scored:
            self.over = True
        elif _has_faults(receipt):
            for message in self._messages(receipt):
                self._note(message)
                self.failed += 1

    def advance(self, advance: Advance) -> None:
        """Note the progress of a shard."""
        if self.allowed or self.over:
            return
        if advance.scored:
            self.over = True
        for message, count in advance.failed.items():
            self._note(message)
            self.under_way[advance.shard] = count

    def check(self, *, ended: bool = False) -> None:
        """Stop the stage if all documents so far failed with one message.

        Args:
            ended: whether all shards have ended.

        Raises:
            CommonFailureError: they did; the message is the first of them.
        """
        count = self.failed + sum(self.under_way.values())
        least = 1 if ended and self.stage.quarantines else LEAST  # scoring follows the other stages, and states it too
        if self.allowed or self.over or count < least:
            return
        so_far = "" if ended else " so far"
        documents = "the only document" if count == 1 else f"all {count:,} documents"
        elsewhere = any(one.endpoint is not None for one in (self.stage, *self.stage.reads))
        raise CommonFailureError(
            f"{documents} of stage {self.stage.name}{so_far} failed with one message: {self.message}; correct the "
            "cause and run the command again (error_budget: 1 lets a run go on)",
            ExitCode.INCOMPLETE if elsewhere else ExitCode.USER_ERROR,
        )

    def withdraw(self, shards: Mapping[str, Shard]) -> None:
        """Withdraw the receipts of failed shards, so that a corrected detector or model may take their place.

        They include those of other workers that ended a shard since. The stage must have ended.

        Args:
            shards: shards of the run by id.
        """
        for stage in (self.stage, *self.stage.reads):  # a document fails in scoring if it has failed before
            for receipt in list(read_receipts(self.store, stage.name)):
                if not receipt.n_scored and _has_faults(receipt):
                    withdraw_shard(stage, shards[receipt.shard], self.store)

    def _note(self, message: str) -> None:
        kind = kind_of_message(message)
        if self.kind is None:
            self.kind, self.message = kind, one_line(message)
        self.over = self.over or kind != self.kind

    def _messages(self, receipt: Receipt) -> Iterator[str]:
        """The messages of the documents of a shard that failed for another cause than their content."""
        if receipt.quarantine is not None:
            columns = ["reason", "message"]
            rows = read_filed(self.store, receipt, columns, receipt.quarantine).to_pylist()
        else:
            rows = [
                {"reason": row["reason"], "message": row["problem"]} for row in filed_rows(self.store, receipt).values()
            ]
        return (str(row["message"]) for row in rows if row["reason"] in FAULTS)


def _has_faults(receipt: Receipt) -> bool:
    return any(receipt.reasons.get(reason) for reason in FAULTS)
