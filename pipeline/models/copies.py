"""Small copies of a model for checks of its code: few layers, random weights, float32, on the CPU.

A copy has the class and the configuration of the model. What follows from these alone, such as the direction of its
attention, shows in the copy without the rounding of half precision.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

from pipeline.models.devices import BUILDING
from pipeline.models.lengths import configurations

if TYPE_CHECKING:
    from torch import nn

LAYERS = 2
"""Layers of a copy of a model whose layers are alike."""

MOST_LAYERS = 12
"""Maximum layers of a copy that has a layer of each kind."""

VOCABULARY = 512

WIDE_WEIGHTS, MOST_WEIGHTS = 1 << 26, 1 << 28
"""Maximum number of weights of a copy with whole feed-forward layers, and of one with narrow ones."""

NARROW = 256
"""Maximum width of narrow feed-forward layers."""

_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim")
_DEPTHS = ("decoder_layers", "num_decoder_layers", "depth")
_KINDS = ("attention_type", "layer_type", "is_sliding", "sliding_window", "block_type")
"""Attributes by which layers of one class differ."""


def few_layers(model: Any, vocabulary: int | None = VOCABULARY, most: int = MOST_WEIGHTS) -> Any | None:
    """A float32 copy of a model on the CPU with few layers and random weights, in eval mode.

    Args:
        model: model of transformers; its weights are not read.
        vocabulary: rows of its embedding; None: as many as those of the model, whose token ids it can then read.
        most: maximum number of weights.

    Returns:
        None if the class cannot be built with fewer layers, or only with too many weights.
    """
    sizes = [None] if vocabulary is None else [vocabulary, None]
    each = _layers_of_each_kind(model)
    layers = dict.fromkeys((each, LAYERS, 2 * each))  # the last for kinds that share their weights
    for narrow, count, size in itertools.product((False, True), layers, sizes):
        try:
            config = _cut_config(model.config, count, size, narrow)
            copy = _built(type(model), config, most if narrow else min(most, WIDE_WEIGHTS))
            if copy is not None:
                return copy
        except Exception:  # any exception of a model's code, for a configuration that it does not allow
            continue
    return None


def _built(kind: type, config: Any, most: int) -> Any | None:
    """A model with random weights; None if it would have more than `most`."""
    import torch

    with BUILDING:
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in kind(config).parameters()) > most:
                return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            copy = kind(config).float().eval().requires_grad_(False)
    for module in copy.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):  # initial weights hardly move any logits
            deviation = float(module.weight.std())
            module.weight.data *= module.weight.shape[-1] ** -0.5 / deviation if deviation > 0 else 1.0
    return copy


def _layers_of_each_kind(model: Any) -> int:
    """Number of first layers among which each kind of layer occurs, between 2 and `MOST_LAYERS`."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    most = LAYERS
    for module in model.modules():
        if type(module).__name__ == "ModuleList" and len(module) == count:
            kinds = list(map(_kind, module))
            first = [kinds.index(kind) + 1 for kind in set(kinds)]
            most = max([most, *first])
    return min(most, MOST_LAYERS)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """The classes of the modules of a layer, and what else tells its kind."""
    modules = (
        (type(module).__name__, *(str(getattr(module, name, None)) for name in _KINDS)) for module in layer.modules()
    )
    return tuple(sorted(modules))


def _cut_config(config: Any, layers: int, vocabulary: int | None, narrow: bool) -> Any:
    """A configuration with fewer layers, another vocabulary and perhaps narrow feed-forward layers."""
    settings = config.to_dict()
    text = config.get_text_config()
    parts = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    inner = next((name for name in parts if getattr(config, name) is text), None)
    for name in parts:
        if name != inner:
            _cut(settings[name], _depth_names(getattr(config, name)), LAYERS, narrow)
    whole = settings if inner is None else settings[inner]
    _cut(whole, _depth_names(text), layers, narrow)
    if vocabulary is not None and whole.get("vocab_size", 0) > vocabulary:
        whole["vocab_size"] = vocabulary
        for name, value in whole.items():
            if name.endswith("token_id") and isinstance(value, int) and value >= vocabulary:
                whole[name] = vocabulary - 1
    for name in ("quantization_config", "dtype", "torch_dtype"):
        for part in configurations(settings):
            cast(dict[str, Any], part).pop(name, None)
    small = type(config).from_dict(settings)
    if config._attn_implementation in ("eager", "sdpa"):  # others are for half precision or a GPU
        small._attn_implementation = config._attn_implementation
    return small


def _depth_names(config: Any) -> list[str]:
    """Settings that hold a number of layers."""
    return [type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers"), *_DEPTHS]


def _cut(settings: dict[str, Any], depths: list[str], layers: int, narrow: bool) -> None:
    """Cut a configuration, as a dictionary, to a number of layers, with the lists that have one entry per layer."""
    counts = {settings[name] for name in depths if isinstance(settings.get(name), int)}
    for name, value in settings.items():
        if name in depths and isinstance(value, int):
            settings[name] = min(value, layers)
        elif isinstance(value, (list, tuple)) and len(value) in counts:
            settings[name] = list(value[:layers])
        elif narrow and isinstance(value, int) and (name in _WIDTHS or name.endswith("intermediate_size")):
            settings[name] = min(value, NARROW)


def has_experts(config: Any) -> bool:
    """Whether a configuration states several experts per layer."""
    settings = config.get_text_config().to_dict()
    return any(name.endswith("experts") and isinstance(value, int) and value > 1 for name, value in settings.items())


def is_exact(model: Any) -> bool:
    """Whether a model computes in float32 or float64, with weights that are not quantized."""
    import torch

    kinds = {parameter.dtype for parameter in model.parameters()}
    quantized = getattr(model.config, "quantization_config", None) is not None
    return not quantized and not kinds - {torch.float32, torch.float64}
