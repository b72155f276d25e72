"""One set of weights for several threads and adapters: each has separate layers over the same tensors."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pipeline.config.models import ModelConfig
from pipeline.models.devices import import_package
from pipeline.models.lengths import share_rule
from pipeline.models.load import LanguageModel, Seq2SeqModel, check_adapter_digests, check_base, load_adapter
from pipeline.models.merging import refuse_layers_of_adapter
from pipeline.models.unchanged import Marks, is_a_path, model_marks

Opened = TypeVar("Opened", bound=LanguageModel | Seq2SeqModel)


class SharedModels:
    """Loads each model once for all threads.

    A thread may hook or replace its layers (gradient norms and adapters do); the weights are never changed.
    """

    def __init__(self, alone: bool = False) -> None:
        """Create an empty collection.

        Args:
            alone: whether only one thread at a time uses models; it gets the models without copies.
        """
        self.alone = alone
        self._lock = threading.Lock()
        self._opened: dict[str, Any] = {}
        self._marks: dict[str, Marks] = {}  # of local files, before they were opened

    def begin(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> None:
        """Start to load a model in a background thread; arguments as in `copy_model`, which waits for it."""

        def work() -> None:
            with contextlib.suppress(Exception), self._lock:  # raised again by `copy_model`
                self._open(opener, config, gpus)

        import_package()
        threading.Thread(target=work, name="seenset-model", daemon=True).start()

    def copy_model(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> Opened:
        """A model with separate layers over the shared weights, or the model itself if `alone`.

        Args:
            opener: `open_model` or `open_paraphraser`.
            config: configuration of the model.
            gpus: as in the opener.

        Raises:
            UserError: as the opener.
        """
        with self._lock:  # copies are made in turn: the first thread works while the second waits
            opened = self._open(opener, config, gpus)
            return opened if self.alone else own_layers(opened)

    def _open(self, opener: Callable[..., Opened], config: ModelConfig, gpus: float) -> Opened:
        key = f"{opener.__name__} {config.model_dump_json()}"
        marks = model_marks(config) if is_a_path(config) else {}
        if key not in self._opened or self._marks[key] != marks:
            self._opened[key] = opener(config, gpus=gpus)
            self._marks[key] = marks
        return cast(Opened, self._opened[key])


def own_layers(lm: Opened) -> Opened:
    """The same model with separate modules, parameters and tokenizer over the same storage.

    Parameters are separate because a backward pass stores gradients in them.
    """
    copies: dict[int, Any] = {id(buffer): buffer for buffer in lm.model.buffers()}
    for parameter in lm.model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    model = copy.deepcopy(lm.model, copies)
    share_rule(lm.model, model)
    if isinstance(lm, LanguageModel) and lm.processor is not None:
        processor = copy.deepcopy(lm.processor)
        return replace(lm, model=model, tokenizer=processor.tokenizer, processor=processor)
    return replace(lm, model=model, tokenizer=copy.deepcopy(lm.tokenizer))


class Adapters:
    """The adapters of one model. Inside `with adapters.on(name)` one of them is active, elsewhere none.

    Each adapter is a set of layers that hold the adapter's weights and share the model's. Adapters of different methods
    and targets can be combined. Without an active adapter, the model is exactly the base model.
    """

    def __init__(self, lm: LanguageModel | None, folders: Mapping[str, Path], base: str, model_path: str) -> None:
        """Load the adapters.

        Args:
            lm: the model, which is not changed; None if there are no adapters and its weights are not used.
            folders: name -> folder of an adapter of the model.
            base: SHA-256 of the model's weights, from `fingerprint_model`.
            model_path: path of the model, for errors.

        Raises:
            UserError: an adapter for another base model, or one that is damaged; or one stays beside the weights of the
                model already.
        """
        self._model: Any = lm.model if lm is not None else None
        self._plain: dict[str, nn.Module] = dict(lm.model.named_modules()) if lm is not None else {}
        self._layers: dict[str, dict[str, nn.Module]] = {}
        if folders and lm is not None:
            refuse_layers_of_adapter(lm.model, "a detector with an adapter")
        for name, folder in folders.items():
            check_adapter_digests(folder)
            check_base(folder, base, model_path)
            self._layers[name] = self._load(folder, model_path)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Activate an adapter for the length of the block; "" activates none."""
        layers = self._layers[name] if name else {}
        self._replace_layers(layers)
        try:
            yield
        finally:
            self._replace_layers({place: self._plain[place] for place in layers})

    def _load(self, folder: Path, model_path: str) -> dict[str, nn.Module]:
        """The layers with which an adapter replaces layers of the model. The model's layers are restored."""
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
    """A linear layer with a LoRA update added in place: x W' + (x A') B'; peft needs several passes for it."""

    def __init__(self, base: nn.Linear, down: Tensor, up: Tensor) -> None:
        """Share the weights of a layer.

        Args:
            base: layer of the model.
            down: A, (rank, inputs).
            up: B including its scale, (outputs, rank).
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
    """A plain LoRA layer of peft as `LowRank`; other layers are returned unchanged."""
    from peft.tuners.lora import Linear as LoraLinear

    if type(layer) is not LoraLinear or type(layer.get_base_layer()) is not nn.Linear:
        return layer
    adapted: Any = layer
    (name,) = adapted.active_adapters
    if name in adapted.lora_variant or adapted.lora_bias[name]:  # such as DoRA
        return layer
    down, up = adapted.lora_A[name].weight, adapted.lora_B[name].weight
    return LowRank(adapted.get_base_layer(), down.detach(), up.detach() * adapted.scaling[name])
