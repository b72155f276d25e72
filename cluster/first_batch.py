"""Time to a first batch: what an actor does before its first row, without a row."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from cluster.inspection import Inspection, Measurement
from pipeline.audit.plan import describe_model
from pipeline.config.audit import AuditConfig, DetectorEntry
from pipeline.config.models import AnyModel, EndpointConfig
from pipeline.corpus.documents import read_shard
from pipeline.detectors.plugins import load_plugins
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError, one_line
from pipeline.models.devices import CPU, Device, gpus_in_sight
from pipeline.models.libraries import cap_memory
from pipeline.stages.base import Output, Placement
from pipeline.stages.registry import served_before_scoring, stages_of
from pipeline.stages.worker import longest_first
from pipeline.store.files import Store

DOCUMENTS = 64
NO_CONTENT = {"model": "unread", "tokenizer": "unread", "dtype": "unread", "quantization": "unread"}
"""In the place of a fingerprint, which would read all weights: nothing is filed under it."""


def first_batch(inspection: Inspection, gpus: float, threads: int) -> Measurement:
    """Load the models as an actor does and score the fullest batch of the first documents; nothing is written.

    Args:
        inspection: of all nodes.
        gpus: of an actor.
        threads: of an actor.
    """
    try:
        return Measurement(_facts(inspection, gpus, threads))
    except Exception as error:  # of many kinds: a model's code, a device
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Measurement({}, one_line(f"{kind}{error}")[:300])


def _facts(inspection: Inspection, gpus: float, threads: int) -> dict[str, Any]:
    cap_memory(gpus)
    load_plugins(inspection.plugins)
    config, shard = inspection.config, inspection.shard
    if isinstance(config.model, EndpointConfig):
        describe_model(config.model, config.corpus.has_pictures)
        return {"endpoint": config.model.endpoint}
    if shard is None:
        raise UserError("no documents to make a batch of")
    begin = time.perf_counter()
    detectors = scored_alone(config)
    plain = config.model_copy(update={"detectors": detectors, "paraphraser": None})
    stage = stages_of(plain, {}, _unread, _device(plain, gpus))[-1]
    worker = stage.make(stage, Placement(gpus, threads))
    loaded = time.perf_counter()
    output = Output()
    rows = worker.open(shard, Store(config.run), output)
    readable = (document for document in read_shard(shard) if document.problem is None)
    entries = worker.prepare(list(itertools.islice(readable, DOCUMENTS)), rows, output)
    if not entries:
        raise UserError(f"none of the first {DOCUMENTS} documents of {shard.name} can be scored")
    batch = max(longest_first(entries, worker.batch_size), key=lambda entries: sum(entry.tokens for entry in entries))
    worker.work(batch, output)
    if gpus:
        torch.cuda.synchronize()
    end = time.perf_counter()
    return {
        "load": loaded - begin,
        "batch": end - loaded,
        "documents": len(batch),
        "tokens": sum(entry.tokens for entry in batch),
        "peak": torch.cuda.max_memory_allocated() if gpus else 0,
    }


def scored_alone(config: AuditConfig) -> list[DetectorEntry]:
    """The detectors that read nothing but passes of the models as they are; where there is none, one that does."""
    any_of_kind: DetectorEntry = (
        {"renyi": {"part": "image", "caption": "given"}} if config.corpus.has_pictures else "loss"
    )
    return [entry for entry in config.detectors if _reads_passes_alone([entry], config)] or [any_of_kind]


def _reads_passes_alone(entries: Sequence[DetectorEntry], config: AuditConfig) -> bool:
    needs = [needed for detector in parse_detectors(list(entries)) for needed in detector.needs]
    return not any(needed.adapter or served_before_scoring(needed, config) for needed in needs)


def _device(config: AuditConfig, gpus: float) -> Device:
    if not gpus:
        return CPU
    stated = config.resources.gpu_memory
    memory, name = gpus_in_sight()
    fixed = config.resources.deterministic
    return Device(gpus, memory if stated == "auto" else int(stated), name if fixed else "", fixed)


def _unread(_: AnyModel) -> dict[str, str]:
    return NO_CONTENT
