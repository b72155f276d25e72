"""What actors do, as metrics of Ray: every node of a cluster exports those of its actors for Prometheus.

They are for watching. Counters count work: a shard that is begun again after its worker died counts again.
"""

from __future__ import annotations

import logging
from typing import Any

from pipeline.errors import one_line
from pipeline.stages.worker import ShardStream
from pipeline.store.receipts import Receipt

LABELS = ("run", "stage")
COUNTERS = {
    "seenset_documents": "Documents that actors are done with.",
    "seenset_tokens": "Tokens of these documents.",
    "seenset_quarantined": "Documents of finished shards that are in quarantine.",
    "seenset_working_seconds": "Seconds in which an actor worked on documents.",
    "seenset_waiting_seconds": "Seconds in which it had nothing to work on, for want of documents that are read.",
}
"""Ray exports them as ray_NAME_total."""

WORKERS = "seenset_workers"
WORKERS_SENTENCE = "1 for every actor at work; gone some 20 seconds after its last batch."

_log = logging.getLogger(__name__)


def run_label(url: str) -> str:
    """The name of a run among the metrics: the last two parts of its directory's path, in ASCII, as Ray wants it."""
    parts = [part for part in url.split("/") if part]
    return one_line("/".join(parts[-2:])).encode("ascii", "backslashreplace").decode("ascii")


class Metrics:
    """The metrics of one actor. Where Ray cannot make or take one, there are none: they are worth no failure."""

    def __init__(self, url: str, stage: str) -> None:
        """Make them.

        Args:
            url: of the run directory.
            stage: of the actor.
        """
        self._labels = dict(zip(LABELS, (run_label(url), stage), strict=True))
        self._counters: dict[str, Any] = {}
        try:
            from ray.util.metrics import Counter, Gauge

            self._workers = Gauge(WORKERS, WORKERS_SENTENCE, LABELS)
            self._counters = {name: Counter(name, sentence, LABELS) for name, sentence in COUNTERS.items()}
        except Exception as error:
            self._give_up(error)

    @property
    def are_taken(self) -> bool:
        """Whether Ray takes them."""
        return bool(self._counters)

    def add(self, name: str, value: float) -> None:
        """Add to a counter; what is not above 0 changes nothing."""
        if value <= 0 or not self.are_taken:
            return
        try:
            self._counters[name].inc(value, self._labels)
        except Exception as error:
            self._give_up(error)

    def work(self) -> None:
        """Note that this actor is at work; Ray forgets it unless it is noted again."""
        if self.are_taken:
            try:
                self._workers.set(1, self._labels)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._counters = {}
        _log.warning("no metrics of this actor: %s", error)


class StreamMetrics:
    """How much of the shards of a stream the metrics of its actor hold."""

    def __init__(self, metrics: Metrics, stream: ShardStream) -> None:
        """Hold nothing yet.

        Args:
            metrics: of the actor.
            stream: of its shards.
        """
        self._metrics = metrics
        self._stream = stream
        self._shard = ""
        self._counted = dict.fromkeys(COUNTERS, 0.0)

    def advance(self, shard: str, documents: int, tokens: int) -> None:
        """Bring the metrics up to what a shard has come to, in documents and tokens so far."""
        if shard != self._shard:
            self._shard = shard
            self._counted |= {"seenset_documents": 0.0, "seenset_tokens": 0.0}
        self._metrics.work()
        self._count("seenset_documents", documents)
        self._count("seenset_tokens", tokens)
        self._count("seenset_working_seconds", self._stream.worked)
        self._count("seenset_waiting_seconds", self._stream.waited)

    def finish(self, receipt: Receipt) -> None:
        """Bring the metrics up to the receipt of a shard."""
        self.advance(receipt.shard, receipt.n_new, receipt.tokens)
        self._metrics.add("seenset_quarantined", receipt.n_quarantined)

    def _count(self, name: str, total: float) -> None:
        self._metrics.add(name, total - self._counted[name])
        self._counted[name] = max(self._counted[name], total)
