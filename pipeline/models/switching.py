"""Adapters over one set of base weights: switched by exchanging layers, so that none is loaded twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pipeline.models.adapters import check_base, load_adapter
from pipeline.models.load import LanguageModel


class Adapters:
    """The adapters of one model, of which none is on outside `on`.

    Each adapter is a set of layers that hold its own weights and share the model's. Adapters of different kinds and
    targets go together, and with none on the model is exactly what it was.
    """

    def __init__(self, lm: LanguageModel | None, folders: Mapping[str, Path], base: str, shown: str) -> None:
        """Load the adapters.

        Args:
            lm: the model, which stays as it is; None, without adapters, where nothing reads its weights.
            folders: name -> folder of an adapter that belongs to the model.
            base: SHA-256 of the model's weights, as `models.fingerprint_model` gives it.
            shown: the path of the model.

        Raises:
            UserError: an adapter for another base model.
        """
        self._model: Any = lm.model if lm is not None else None
        self._plain: dict[str, nn.Module] = dict(lm.model.named_modules()) if lm is not None else {}
        self._layers: dict[str, dict[str, nn.Module]] = {}
        for name, folder in folders.items():
            check_base(folder, base, shown)
            self._layers[name] = self._load(folder, shown)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Switch an adapter on for a while; "" is none."""
        layers = self._layers[name] if name else {}
        self._replace_layers(layers)
        try:
            yield
        finally:
            self._replace_layers({place: self._plain[place] for place in layers})

    def _load(self, folder: Path, shown: str) -> dict[str, nn.Module]:
        """The layers that an adapter puts in the place of the model's, which come back."""
        try:
            load_adapter(self._model, folder, shown).eval().requires_grad_(False)
        finally:
            modules = dict(self._model.named_modules())
            layers = {
                place: _lean(modules[place])
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


def _lean(layer: nn.Module) -> nn.Module:
    """A layer of peft's in its fastest form; one without a lean form is kept."""
    if type(layer) is not LoraLinear or type(layer.get_base_layer()) is not nn.Linear:
        return layer
    adapted: Any = layer
    (name,) = adapted.active_adapters
    down, up = adapted.lora_A[name].weight, adapted.lora_B[name].weight
    return LowRank(adapted.get_base_layer(), down.detach(), up.detach() * adapted.scaling[name])
