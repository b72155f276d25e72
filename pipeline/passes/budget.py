"""Batch sizes of passes on a GPU, computed only from the shape of a model and the memory of the GPU.

Currently free memory is not used: the same model and the same GPU give the same batches. Tests compare the formulas
with what models need on torch's `meta` device (tests/unit/test_budget.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.passes.forward import HEAD_ELEMENTS
from pipeline.passes.generate import CACHE_POSITIONS

Attention = Literal["fused", "quadratic"]
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
WEIGHT_WIDTHS = {"8bit": 1.1, "4bit": 0.65}
"""Approximate bytes of a quantized weight including scales; embeddings and the head keep the model's dtype."""

USABLE = 0.85
"""Usable share of a GPU's memory: the rest is for the CUDA context, fragmentation and what the formulas omit."""

HEAD_BYTES = 16 * HEAD_ELEMENTS["cuda"]
"""Bytes of the logits in memory, including the copies for a sweep or a gradient."""

MOST_TOKENS = 1 << 16
"""Maximum tokens of a batch: fewer keep a GPU busy, and more would only add padding."""

_PIXEL_BYTES = 3 * 16 * 16 * 2 * 4
"""Bytes of a patch: three colours in float32, twice for models that read a picture as two frames of a film."""

_PLAIN = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi"}
"""Model types whose feed-forward layers have no gate."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a causal model that determine its memory use."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int  # sum over the experts of a token, if there are several
    vocabulary: int
    width: int  # bytes per number in the model's dtype
    weights: int  # bytes of all weights
    attention: Attention = "fused"
    gated: bool = True  # whether the feed-forward layers have a gate
    tower: Shape | None = None  # vision tower
    patches: int = 1  # patches of a picture per token


def read_shape(config: Any, dtype: str, parameters: int | None = None, quantization: str | None = None) -> Shape:
    """The shape of a model.

    Args:
        config: transformers configuration.
        dtype: dtype of computations; an unknown one counts as float32.
        parameters: number of parameters; None: derived from the shape, which counts one expert of several.
        quantization: "8bit", "4bit" or None.
    """
    text = config.get_text_config()
    heads = _first(text, "num_attention_heads", "n_head", "num_heads", default=1)
    hidden = _first(text, "hidden_size", "n_embd", "d_model", default=1)
    if getattr(text, "multi_query", False):
        shared = 1
    else:
        shared = _first(text, "num_key_value_heads", "num_kv_heads", default=heads)
    intermediate = _first(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    experts = _first(text, "num_experts_per_tok", default=1)
    if experts > 1:
        intermediate = experts * _first(text, "moe_intermediate_size", default=intermediate)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    width = WIDTHS.get(dtype, 4)
    shape = Shape(
        hidden=hidden,
        layers=_first(text, "num_hidden_layers", "n_layer", "num_layers", default=1),
        heads=heads,
        key_value_heads=shared,
        head_size=_first(text, "head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocabulary=text.vocab_size,
        width=width,
        weights=0,
        attention="quadratic" if capped else "fused",
        gated=text.model_type not in _PLAIN,
    )
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        shape = replace(shape, tower=_tower(vision, shape), patches=_patches(config))
    tied = bool(getattr(text, "tie_word_embeddings", False))
    return _weighed(shape, parameters, tied, quantization)


def _tower(vision: Any, text: Shape) -> Shape:
    """The shape of the layers that read a picture's patches, with attention between all patches."""
    hidden = _first(vision, "embed_dim", "hidden_size", default=1)
    heads = _first(vision, "num_attention_heads", "num_heads", default=1)
    ratio = _first(vision, "mlp_ratio", default=4)
    return replace(
        text,
        hidden=hidden,
        layers=_first(vision, "num_hidden_layers", "depth", default=1),
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        intermediate=_first(vision, "intermediate_size", default=ratio * hidden),
        attention="fused",
    )


def _patches(config: Any) -> int:
    """Number of patches of a picture per token."""
    merged = _first(config.vision_config, "spatial_merge_size", default=1)
    return int((merged * _first(config, "scale_factor", default=1)) ** 2)


def _weighed(shape: Shape, parameters: int | None, tied: bool, quantization: str | None) -> Shape:
    tables = (1 if tied else 2) * shape.vocabulary * shape.hidden
    count = tables + layer_parameters(shape) * shape.layers if parameters is None else parameters
    inner = WEIGHT_WIDTHS.get(quantization or "", float(shape.width))
    return replace(shape, weights=int(min(tables, count) * shape.width + max(0, count - tables) * inner))


def _first(config: Any, *names: str, default: int) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), default)


def layer_parameters(shape: Shape) -> int:
    """Number of parameters of one layer, without norms and biases."""
    queries, keys = shape.heads * shape.head_size, shape.key_value_heads * shape.head_size
    return shape.hidden * (2 * queries + 2 * keys + (3 if shape.gated else 2) * shape.intermediate)


def kept_bytes(shape: Shape, length: int) -> float:
    """Bytes per token that a gradient pass keeps from its forward half for the backward half.

    A layer keeps the inputs of its norms, also in float32, the inputs of its matrices, and the intermediate values of
    attention and activation.

    Args:
        shape: of the model.
        length: tokens of a document, which quadratic attention needs to know.
    """
    wide = 4 if shape.width < 4 else 0  # float32 copies of the norms
    norms = 2 * (2 * shape.width + wide) * shape.hidden
    queries, keys = _widths(shape)
    attention = shape.width * (2 * queries + 2 * keys) + 4 * shape.heads
    if shape.attention == "quadratic":
        attention += shape.heads * length * (4 + 2 * shape.width)
    feed_forward = (4 if shape.gated else 2) * shape.width * shape.intermediate
    ends = (4 * shape.width + wide) * shape.hidden
    return shape.layers * (norms + attention + feed_forward) + ends


def _widths(shape: Shape) -> tuple[int, int]:
    """Features per token of its queries, and of its keys as read by attention.

    Grouped heads share their keys only in 16-bit kernels; otherwise each head has a copy.
    """
    queries = shape.heads * shape.head_size
    shared = shape.width < 4 and shape.attention == "fused"
    return queries, shape.key_value_heads * shape.head_size if shared else queries


def gradient_bytes(shape: Shape, length: int) -> float:
    """Peak bytes per token of a gradient pass: kept activations, gradients of one layer, and Gram matrices."""
    gradients = shape.width * (3 * shape.intermediate + 2 * shape.hidden) + 12 * shape.hidden
    return kept_bytes(shape, length) + gradients + 12 * length


def forward_bytes(shape: Shape, length: int) -> float:
    """Peak bytes per token of a forward pass, in one layer: other layers keep nothing.

    Args:
        shape: of the model.
        length: tokens of a document, which quadratic attention needs to know.
    """
    stream = shape.width * shape.hidden
    queries, keys = _widths(shape)
    feed_forward = 4 * stream + (3 if shape.gated else 2) * shape.width * shape.intermediate
    norm = 4 * stream + 8 * shape.hidden
    attention = 4 * stream + shape.width * (4 * queries + 2 * keys)
    if shape.attention == "quadratic":
        attention += shape.heads * length * (8 + shape.width)
    tower = 0.0 if shape.tower is None else shape.patches * (forward_bytes(shape.tower, length) + _PIXEL_BYTES)
    return max(feed_forward, norm, attention, tower)


def cache_bytes(shape: Shape) -> int:
    """Bytes of the keys and values of one position in all layers."""
    return 2 * shape.layers * shape.key_value_heads * shape.head_size * shape.width


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU memory of a worker: a part of a GPU, one GPU or several."""

    memory: int  # bytes per GPU, from `nominal_memory`
    gpus: float = 1.0  # below 1: a part of one GPU

    @property
    def each(self) -> float:
        """Bytes per GPU that the worker may use."""
        return USABLE * self.memory * min(1.0, self.gpus)


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum size of a batch for each kind of pass."""

    forward: int  # padded tokens
    gradient: int  # padded tokens
    cache: int  # positions of keys and values: draws times (prompt and new tokens)


CPU_BUDGET = Budget(forward=2048, gradient=2048, cache=CACHE_POSITIONS)
"""Batches on a CPU, sized for its caches, independent of its memory."""


def pass_budget(shape: Shape, card: Card, length: int, others: Sequence[Shape] = ()) -> Budget:
    """The budgets of a model on a GPU; 0 if the weights leave no memory.

    Args:
        shape: shape of the model.
        card: GPU memory of the worker.
        length: maximum tokens of a document.
        others: other models on the same GPU.
    """
    cards = max(1.0, card.gpus)
    weights = sum(each.weights for each in (shape, *others)) / cards
    free = card.each - weights - HEAD_BYTES
    return Budget(
        forward=rounded(min(free / forward_bytes(shape, length), MOST_TOKENS)),
        gradient=rounded(min(free / (gradient_bytes(shape, length) / cards), MOST_TOKENS)),
        # the cache is allocated once; the other half is for reading the prompts, and for copies of a layer's keys for
        # grouped heads or when draws end
        cache=rounded(free / 2 / (cache_bytes(shape) / cards)),
    )


def rounded(tokens: float) -> int:
    """Round down to three binary digits, so that small differences in memory give the same budget."""
    whole = max(0, int(tokens))
    unit = 1 << max(0, whole.bit_length() - 3)
    return whole // unit * unit
