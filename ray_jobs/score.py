"""The scoring job: shards -> scoring actors -> receipts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.config import AuditConfig
from pipeline.corpus import Shard
from pipeline.scoring import Scorer
from pipeline.store import Receipt, Store
from ray_jobs.actors import Failure, map_shards


def score(
    config: AuditConfig, fingerprint: Mapping[str, Any], shards: Sequence[Shard], store: Store, driver: str
) -> Iterator[Receipt | Failure]:
    """Score shards on the cluster; receipts and failures come in the order in which shards end.

    Raises:
        UserError: the cluster cannot hold one actor.
    """
    return map_shards(Scorer, config, fingerprint, shards, store, driver)
