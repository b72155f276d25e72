"""The device of an audit, which its run directory records, and the sizes of batches that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

from pipeline.audit.records import opened
from pipeline.config.audit import AuditConfig, ResourcesConfig
from pipeline.config.models import AnyModel, ModelConfig
from pipeline.errors import DamagedError, UserError
from pipeline.models.checkpoints import dtype_name, locate, read_model_config
from pipeline.models.devices import Device
from pipeline.models.load import count_parameters
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, Shape, budget_of, shape_of
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, sealed

DEVICE_FILE = "device.json"
_RECORDED = ("gpus", "memory", "name")

_log = logging.getLogger(__name__)


def scoring_budget(config: AuditConfig, device: Device, reference: bool) -> Budget:
    """The budget of the passes of scoring.

    Args:
        config: of the audit.
        device: of the actors.
        reference: whether they also hold the model that the audited one is compared with.

    Raises:
        UserError: the weights leave nothing of the device.
    """
    models = [config.model, config.reference_model if reference else None]
    budget = model_budget([model for model in models if model is not None], device, config.max_tokens)
    tokens = config.resources.batch_tokens
    if tokens == "auto":
        return budget
    return replace(budget, forward=tokens, gradient=min(tokens, budget.gradient) if device.gpus else tokens)


def model_budget(models: Sequence[AnyModel], device: Device, length: int) -> Budget:
    """The budget of the largest of the models that an actor holds.

    Args:
        models: of which endpoints take no memory.
        device: of the actor.
        length: tokens that documents are cut to.

    Raises:
        UserError: the weights leave nothing of the device.
    """
    local = [model for model in models if isinstance(model, ModelConfig)]
    if not device.gpus or not local:
        return CPU_BUDGET
    shapes = [model_shape(model) for model in local]
    card = Card(device.memory, device.gpus)
    budgets = [
        budget_of(shape, card, length, [*shapes[:index], *shapes[index + 1 :]]) for index, shape in enumerate(shapes)
    ]
    least = Budget(
        min(each.forward for each in budgets),
        min(each.gradient for each in budgets),
        min(each.cache for each in budgets),
    )
    if not least.forward:
        size = sum(shape.weights for shape in shapes) / 2**30
        raise UserError(
            f"model {local[0].shown}: {size:.1f} GiB of weights leave no room for a batch on {device.gpus:g} GPUs of "
            f"{device.memory / 2**30:.0f} GiB an actor; raise resources.gpus_per_actor, or quantise the model"
        )
    return Budget(least.forward, max(1, least.gradient), max(1, least.cache))


def model_shape(model: ModelConfig) -> Shape:
    """The shape of a model, from its configuration; no weights are read.

    Raises:
        UserError: a file is missing or damaged.
    """
    source = locate(model, weights=False)
    loaded = read_model_config(model, source, "any")
    return shape_of(loaded, dtype_name(model, source, loaded), count_parameters(model), model.quantization)


def with_memory(device: Device, resources: ResourcesConfig) -> Device:
    """The device with the memory that the configuration states, if it does."""
    if resources.gpu_memory == "auto" or not device.gpus:
        return device
    return replace(device, memory=int(resources.gpu_memory))


def device_on_file(store: Store, resources: ResourcesConfig) -> Device | None:
    """The device that a run was started on, with what the configuration states now; None where none is recorded.

    A damaged record is logged and counts as none: the device is then decided again.
    """
    where = f"{store.url}/{DEVICE_FILE}"
    try:
        record = store.read_json(DEVICE_FILE)
        if not record:
            return None
        if not isinstance(record, dict) or record.keys() - {DIGEST} != set(_RECORDED):
            raise DamagedError(f"{where} is damaged: its keys are not those of a device")
        if DIGEST in record:  # version 0.9.0 wrote none
            record = opened(record, where)
    except DamagedError as error:
        _log.warning("%s; it is written again", error)
        return None
    device = Device(float(record["gpus"]), int(record["memory"]), str(record["name"]))
    return with_memory(replace(device, deterministic=resources.deterministic and device.gpus > 0), resources)


def note_device(store: Store, device: Device) -> None:
    """Record the device of a run. The run's lock must be held, and its settings be those of what is there."""
    values = asdict(device)
    store.write_json(DEVICE_FILE, sealed({name: values[name] for name in _RECORDED}))
