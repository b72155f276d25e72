"""Trained adapters: check that one belongs to a base model, and load it over that model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import DamagedError, UserError
from pipeline.models.fit import refuse_misfit
from pipeline.models.libraries import BUILDING
from pipeline.models.opened import LanguageModel
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


class Adapters:
    """The adapters of one model. Inside `with adapters.on(name)` one of them is on, elsewhere none.

    Each adapter is a set of layers that hold the adapter's weights and share the model's. Adapters of different kinds
    and targets can be mixed. With none on, the model is exactly the base model.
    """

    def __init__(self, lm: LanguageModel | None, folders: Mapping[str, Path], base: str, model_path: str) -> None:
        """Load the adapters.

        Args:
            lm: the model, which stays as it is; None, without adapters, where nothing reads its weights.
            folders: name -> folder of an adapter that belongs to the model.
            base: SHA-256 of the model's weights, as `fingerprint_model` gives it.
            model_path: of the model, for errors.

        Raises:
            UserError: an adapter for another base model, or one that is damaged.
        """
        self._model: Any = lm.model if lm is not None else None
        self._plain: dict[str, nn.Module] = dict(lm.model.named_modules()) if lm is not None else {}
        self._layers: dict[str, dict[str, nn.Module]] = {}
        for name, folder in folders.items():
            check_adapter(folder)
            check_base(folder, base, model_path)
            self._layers[name] = self._load(folder, model_path)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Switch an adapter on for the length of the block; "" switches none on."""
        layers = self._layers[name] if name else {}
        self._replace_layers(layers)
        try:
            yield
        finally:
            self._replace_layers({place: self._plain[place] for place in layers})

    def _load(self, folder: Path, model_path: str) -> dict[str, nn.Module]:
        """The layers by which an adapter replaces the model's. The model's own layers are restored."""
        try:
            load_adapter(self._model, folder, model_path).eval().requires_grad_(False)
        finally:
            modules = dict(self._model.named_modules())
            layers = {
                place: _low_rank(modules[place])
                for place, plain in self._plain.items()
                if modules.get(place, plain) is not plain
            }
            self._replace_layers({place: self._plain[place] for place in layers})
            if hasattr(self._model, "peft_config"):  # peft's mark of a model that it has changed
                del self._model.peft_config
        return layers

    def _replace_layers(self, layers: Mapping[str, nn.Module]) -> None:
        for place, layer in layers.items():
            parent, _, child = place.rpartition(".")
            setattr(self._plain[parent], child, layer)


class LowRank(nn.Module):
    """A linear layer with a LoRA update added in place: x W' + (x A') B', which peft computes in several passes."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor) -> None:
        """Share the layer.

        Args:
            base: the model's layer.
            down: A, (rank, inputs).
            up: B with its scale, (outputs, rank).
        """
        super().__init__()
        self.base = base
        self.down = nn.Parameter(down.to(base.weight.dtype), requires_grad=False)
        self.up = nn.Parameter(up.to(base.weight.dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., outputs)."""
        out: Tensor = self.base(x)
        low = torch.mm(x.reshape(-1, x.shape[-1]), self.down.t())
        return out.view(-1, out.shape[-1]).addmm_(low, self.up.t()).view_as(out)


def _low_rank(layer: nn.Module) -> nn.Module:
    """A plain LoRA layer of peft as `LowRank`; a layer of another kind is returned unchanged."""
    from peft.tuners.lora import Linear as LoraLinear

    if type(layer) is not LoraLinear or type(layer.get_base_layer()) is not nn.Linear:
        return layer
    adapted: Any = layer
    (name,) = adapted.active_adapters
    down, up = adapted.lora_A[name].weight, adapted.lora_B[name].weight
    return LowRank(adapted.get_base_layer(), down.detach(), up.detach() * adapted.scaling[name])
