"""Trained adapters: check that one belongs to a base model, and load it over that model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import DamagedError, UserError
from pipeline.models.fit import refuse_misfit
from pipeline.models.libraries import BUILDING
from pipeline.store.receipts import DIGEST, is_sealed, sealed

RECORD = "training.json"
"""File beside an adapter's weights: settings, versions, base model, loss of every step."""


def adapter_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an adapter that was just trained, with digests of its files and of itself."""
    return sealed({**json.loads(json.dumps(record)), "files": _digests(folder)})


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that is not as it was trained, where its record has digests: other software writes none.

    Raises:
        DamagedError: names the file.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        raise DamagedError(f"adapter {folder} is damaged: {RECORD} is not JSON") from None
    if not isinstance(record, dict) or not {"files", DIGEST} & record.keys():
        return
    if not is_sealed(record):
        raise DamagedError(f"adapter {folder} is damaged: {RECORD} is not what was written")
    digests = _digests(folder)
    for name, digest in record["files"].items():
        if digests.get(name) != digest:
            raise DamagedError(
                f"adapter {folder} is damaged: {name} is {'not what was trained' if name in digests else 'gone'}"
            )


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of an adapter beside its record, by name."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != RECORD:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def check_base(folder: Path, base: str, model_path: str) -> None:
    """Refuse an adapter that was trained on another base model, where its record says on which.

    Args:
        folder: of the adapter.
        base: SHA-256 of the base model that it is to be used with, as `fingerprint_model` gives it.
        model_path: of that model, for the error.

    Raises:
        UserError: the adapter was trained on another one.
    """
    try:
        base_record = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("base") or {}
    except (OSError, ValueError, AttributeError):
        return  # written by other software: a misfit shows when it is loaded
    trained_on = base_record.get("model", base)
    if trained_on != base:
        raise UserError(
            f"adapter {folder} is for another base model: trained on weights {trained_on[:12]}, "
            f"model {model_path} has {base[:12]}"
        )


def load_adapter(model: Any, folder: Path, model_path: str) -> Any:
    """The model with an adapter over it: the weights of the file are those that its settings give it, one for one.

    Raises:
        UserError: the adapter is for another base model, or its file lacks weights or has others.
    """
    import peft

    problem = f"adapter {folder} is for another base model than {model_path}"
    try:
        with BUILDING:
            # Its device is said: peft would open a GPU wherever torch sees one, also for a model on the CPU.
            adapted = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "size mismatch" in str(error) or "not found in the base model" in str(error):
            raise UserError(f"{problem}: {lines[-1]}") from None
        raise
    written = peft.load_peft_weights(str(folder), device="cpu").keys()
    # Never "auto", which would ask the hub whether the vocabulary has grown.
    least, most = (
        peft.get_peft_model_state_dict(adapted, save_embedding_layers=with_embedding).keys()
        for with_embedding in (False, True)
    )
    refuse_misfit(f"{problem}, or is not whole", least - written, written - most)
    return adapted
