"""What actors do, as metrics of Ray: every node of a cluster exports those of its actors for Prometheus.

They are for watching. Counters count work: a shard that is begun again after its worker died counts again.
"""

from __future__ import annotations

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


def run_label(url: str) -> str:
    """The name of a run among the metrics: the last two parts of its directory's path, in ASCII, as Ray wants it."""
    parts = [part for part in url.split("/") if part]
    return one_line("/".join(parts[-2:])).encode("ascii", "backslashreplace").decode("ascii")


class Metrics:
    """The metrics of one actor."""

    def __init__(self, url: str, stage: str) -> None:
        """Make them.

        Args:
            url: of the run directory.
            stage: of the actor.
        """
        from ray.util.metrics import Counter, Gauge

        labels = dict(zip(LABELS, (run_label(url), stage), strict=True))
        self._workers = Gauge(WORKERS, WORKERS_SENTENCE, LABELS).set_default_tags(labels)
        self._counters = {
            name: Counter(name, sentence, LABELS).set_default_tags(labels) for name, sentence in COUNTERS.items()
        }
        self._counted: dict[str, tuple[object, float]] = {}  # by counter: of which shard or stream, and how much

    def advance(self, shard: str, documents: int, tokens: int, stream: ShardStream) -> None:
        """Bring the counters up to what a shard has come to, and note that this actor is at work.

        Args:
            shard: its id.
            documents: of it that are finished.
            tokens: of these documents.
            stream: of the shards of this call of the actor.
        """
        self._workers.set(1)  # Ray forgets it unless it is set again
        self._count("seenset_documents", shard, documents)
        self._count("seenset_tokens", shard, tokens)
        self._count("seenset_working_seconds", stream, stream.worked)
        self._count("seenset_waiting_seconds", stream, stream.waited)

    def finish(self, receipt: Receipt, stream: ShardStream) -> None:
        """Bring the counters up to the receipt of a shard."""
        self.advance(receipt.shard, receipt.n_new, receipt.tokens, stream)
        if receipt.n_quarantined:
            self._counters["seenset_quarantined"].inc(receipt.n_quarantined)

    def _count(self, name: str, of: object, total: float) -> None:
        counted_of, counted = self._counted.get(name, (of, 0.0))
        counted = counted if counted_of == of else 0.0
        if total > counted:
            self._counters[name].inc(total - counted)
        self._counted[name] = of, max(total, counted)
