"""The device of an audit, which its run directory records, and the sizes of batches that follow from it."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

from pipeline.audit.records import opened
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import DamagedError
from pipeline.models.devices import Device
from pipeline.report.wording.files import written_again
from pipeline.store.files import Store
from pipeline.store.receipts import DIGEST, sealed

DEVICE_FILE = "device.json"
_RECORDED = ("gpus", "memory", "name")

_log = logging.getLogger(__name__)


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
        _log.warning(written_again(error))
        return None
    device = Device(float(record["gpus"]), int(record["memory"]), str(record["name"]))
    return with_memory(replace(device, deterministic=resources.deterministic and device.gpus > 0), resources)


def note_device(store: Store, device: Device) -> None:
    """Record the device of a run. The run's lock must be held, and its settings be those of what is there."""
    values = asdict(device)
    store.write_json(DEVICE_FILE, sealed({name: values[name] for name in _RECORDED}))
