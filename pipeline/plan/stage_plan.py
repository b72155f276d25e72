"""The computation of an audit: its stages, the adapters that they need, its device, and the sizes of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import EndpointConfig, ModelConfig, as_model_config
from pipeline.corpus.shard import Shard
from pipeline.endpoint.parameters import Adjustments
from pipeline.errors import DamagedError
from pipeline.models.devices import CPU, Device
from pipeline.models.unchanged import ModelDigests
from pipeline.passes.budget import Shape
from pipeline.plan.allocation import Parts, allocate
from pipeline.run.dtypes import MODELS
from pipeline.run.manifest import RecordedModel
from pipeline.run.records import opened
from pipeline.run.remedies import written_again
from pipeline.stages.audited_texts import AuditedTexts
from pipeline.stages.base import Stage, StagePlan, model_shape
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, sealed
from pipeline.training.adapter import adapter_key

DEVICE_FILE = "device.json"
_RECORDED = ("gpus", "memory", "name")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltStages:
    """The stages of an audit, scoring last, and the adapters that they need."""

    stages: tuple[Stage, ...]
    parts: Parts
    keys: dict[str, str]  # adapter name -> digest, the name of its folder under adapters/
    base: Mapping[str, str]  # fingerprint of the model under the adapters; empty without adapters
    models: Mapping[str, RecordedModel]  # the opened models, by key of the configuration


Parameters = Callable[[Sequence[Stage]], Mapping[str, Adjustments]]
"""Maps the stages to the changes of their requests to endpoints, by folder."""

AlreadyAudited = Callable[[Mapping[str, Any]], AuditedTexts | None]
"""Maps the fingerprint of scores to the texts that earlier runs have already audited."""


def build_stages(
    config: AuditConfig,
    shards: Sequence[Shard],
    device: Device = CPU,
    audited: AlreadyAudited = lambda scores: None,
    recorded: Mapping[str, RecordedModel] | None = None,
    parameters: Parameters = lambda stages: {},
) -> BuiltStages:
    """The stages and adapters of an audit; reads the weights of its models once, for their digests.

    Args:
        config: the audit's configuration.
        shards: shards of its inputs.
        device: device of its actors.
        audited: returns the texts that are left out.
        recorded: models whose files are missing, by key of the configuration.
        parameters: returns the changes of requests to endpoints.

    Raises:
        UserError: the errors of `allocate`, `fingerprint_model`, `plan_stages`, `parameters` and `audited`.
    """
    parts = allocate(config, shards)
    before = {getattr(config, key): model for key, model in (recorded or {}).items()}
    digest = ModelDigests({model: one.fingerprint for model, one in before.items()})
    shapes = {
        model: TypeAdapter(Shape).validate_python(one.shape) for model, one in before.items() if one.shape is not None
    }

    def shape(model: ModelConfig) -> Shape:
        if model not in shapes:
            shapes[model] = model_shape(model)
        return shapes[model]

    base = digest(as_model_config(config.model)) if parts.adapters else {}
    keys = {name: adapter_key(base, part.training, part.documents) for name, part in parts.adapters.items()}
    wanted = StagePlan(config, device, digest, keys or None, prefixes=parts.prefixes(), shape=shape)
    stages = plan_stages(wanted)
    if changes := parameters(stages):
        wanted = replace(wanted, parameters=changes)
        stages = plan_stages(wanted)
    if (texts := audited(stages[-1].fingerprint)) is not None:
        stages = plan_stages(replace(wanted, already_audited=texts))
    models = {}
    for key in MODELS:
        model = getattr(config, key)
        if isinstance(model, ModelConfig) and (fingerprint := digest.known(model)) is not None:
            dimensions = asdict(shapes[model]) if model in shapes else None
            models[key] = RecordedModel(fingerprint=dict(fingerprint), shape=dimensions)
        elif isinstance(model, EndpointConfig):
            folders = {stage.folder for stage in stages if stage.endpoint == model} & changes.keys()
            values = {folder: changes[folder].fingerprint() for folder in sorted(folders)}
            models[key] = RecordedModel(fingerprint=dict(digest(model)), parameters=values)
    return BuiltStages(stages, parts, keys, base, models)


def with_memory(device: Device, resources: ResourcesConfig) -> Device:
    """The device with the configured memory, if one is configured."""
    if resources.gpu_memory == "auto" or not device.gpus:
        return device
    return replace(device, memory=int(resources.gpu_memory))


def device_on_file(store: Store, resources: ResourcesConfig) -> Device | None:
    """The device that a run was started on, with the current configuration; None where none is recorded.

    A damaged record is logged and ignored: the device is then decided again.
    """
    where = f"{store.url}/{DEVICE_FILE}"
    try:
        record = store.read_json(DEVICE_FILE)
        if not record:
            return None
        if not isinstance(record, dict) or record.keys() - {DIGEST} != set(_RECORDED):
            raise DamagedError(where, "is damaged: its keys are not those of a device")
        record = opened(record, where)
    except DamagedError as error:
        _log.warning(written_again(error))
        return None
    device = Device(float(record["gpus"]), int(record["memory"]), str(record["name"]))
    return with_memory(replace(device, deterministic=resources.deterministic and device.gpus > 0), resources)


def note_device(store: Store, device: Device) -> None:
    """Record the device of a run. The run's lock must be held, and its settings must be those of the existing files."""
    values = asdict(device)
    store.keeping().write_json(DEVICE_FILE, sealed({name: values[name] for name in _RECORDED}))
