"""The scoring job: shards -> scoring actors -> receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.corpus.shard import Shard
from pipeline.stages.score import Scorer
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.actors import Failure, map_shards


def score(
    config: AuditConfig, fingerprint: Mapping[str, Any], shards: Sequence[Shard], store: Store, driver: str
) -> Iterator[Receipt | Failure]:
    """Score shards on the cluster; receipts and failures come in the order in which shards end.

    Raises:
        UserError: the cluster cannot hold one actor.
    """
    return map_shards(Scorer, config, fingerprint, shards, store, driver)
