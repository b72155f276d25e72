"""What an audit computes: its stages, and the adapters that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.audit.allocation import Parts, allocate
from pipeline.config.audit import AuditConfig
from pipeline.config.models import weights_of
from pipeline.corpus.shard import Shard
from pipeline.models.devices import CPU, Device
from pipeline.stages.base import Stage, model_digests
from pipeline.stages.judged import JudgedTexts
from pipeline.stages.registry import stages_of
from pipeline.training.adapter import adapter_key


@dataclass(frozen=True, slots=True)
class Work:
    """The stages of an audit, scoring last, and the adapters that they need."""

    stages: tuple[Stage, ...]
    parts: Parts
    keys: dict[str, str]  # of an adapter's folder under adapters/, a digest, by its name
    base: Mapping[str, str]  # fingerprint of the model that adapters are trained over; empty without any


Judging = Callable[[Mapping[str, Any]], JudgedTexts | None]
"""From the fingerprint of scores to the texts that are left out, because earlier runs have judged them."""


def work_of(
    config: AuditConfig, shards: Sequence[Shard], device: Device = CPU, judging: Judging = lambda fingerprint: None
) -> Work:
    """What an audit of these shards computes; reads the weights of its models once, for their digests.

    Args:
        config: of the audit.
        shards: of its inputs.
        device: that its actors compute on.
        judging: tells which documents are left out.

    Raises:
        UserError: as `allocate`, `fingerprint_model`, `stages_of` and `judging`.
    """
    parts = allocate(config, shards)
    digest = model_digests()
    base = digest(weights_of(config.model)) if parts.adapters else {}
    keys = {name: adapter_key(base, part.training, part.texts) for name, part in parts.adapters.items()}
    prefixes = parts.prefixes()
    stages = stages_of(config, keys or None, digest, device, prefixes=prefixes)
    if (judged := judging(stages[-1].fingerprint)) is not None:
        stages = stages_of(config, keys or None, digest, device, judged, prefixes)
    return Work(stages, parts, keys, base)
