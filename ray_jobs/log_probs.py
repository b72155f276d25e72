"""The job that asks an endpoint for log-probabilities: shards -> answers -> receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Pass
from pipeline.stages.ask_log_probs import EndpointReader, model_of
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import Failure
from ray_jobs.ask import ask_shards
from ray_jobs.progress import Answered


def read_log_probs(
    needed: Pass,
    config: AuditConfig,
    fingerprint: Mapping[str, Any],
    shards: Sequence[Shard],
    store: Store,
    driver: str,
) -> Iterator[Receipt | Failure | Answered]:
    """Ask for the log-probabilities of a pass; receipts and failures come in the order in which shards end.

    Raises:
        StopError: the endpoint does not tell them, or answers nobody.
    """
    return ask_shards(partial(EndpointReader, needed), model_of(config, needed), config, fingerprint, shards, store)
