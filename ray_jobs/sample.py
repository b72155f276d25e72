"""The sample job: shards -> continuing actors, or an endpoint -> receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.config import AuditConfig, EndpointConfig
from pipeline.corpus import Shard
from pipeline.endpoint.samples import EndpointSampler
from pipeline.samples import SampleSet
from pipeline.sampling import Sampler
from pipeline.store import Receipt, Store
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
