"""The sample job: shards -> continuing actors, or an endpoint -> receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.corpus.shard import Shard
from pipeline.stages.ask_samples import EndpointSampler
from pipeline.stages.continuations import SampleSet
from pipeline.stages.sample import Sampler
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import Failure, map_shards
from ray_jobs.ask import ask_shards
from ray_jobs.progress import Answered


def sample(
    asked: SampleSet,
    config: AuditConfig,
    fingerprint: Mapping[str, Any],
    shards: Sequence[Shard],
    store: Store,
    driver: str,
) -> Iterator[Receipt | Failure | Answered]:
    """Continue documents, on the cluster or by an endpoint; receipts and failures come as shards end.

    Raises:
        UserError: the cluster cannot hold one actor, or the endpoint answers nobody.
    """
    if isinstance(config.model, EndpointConfig):
        return ask_shards(partial(EndpointSampler, asked), config.model, config, fingerprint, shards, store)
    return map_shards(partial(Sampler, asked), config, fingerprint, shards, store, driver)
