"""How many tokens of a pass fit a GPU: arithmetic from the shape of a model and the memory of the card alone.

Nothing here asks how much memory is free at a moment: the same model and the same card give the same batches. The
arithmetic is held to what models keep and need on torch's `meta` device (tests/unit/test_budget.py).
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
"""Bytes of a quantised weight with its scales, about; embeddings and the head keep the model's dtype."""

USABLE = 0.85
"""Of a card: the rest is for the context of CUDA, for fragments and for what this arithmetic leaves out."""

HEAD_BYTES = 16 * HEAD_ELEMENTS["cuda"]
"""Logits that exist at a time, and the copies of them that a sweep or a gradient makes."""

MOST_TOKENS = 1 << 16
"""Of a batch: a GPU is busy with fewer, and more would only be padding."""

_PIXEL_BYTES = 3 * 16 * 16 * 2 * 4
"""Of a patch: three colours, twice where a picture is two frames of a film, in float32."""

_PLAIN = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi"}
"""Model types whose feed-forward layers have no gate."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a causal model's memory follows from."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int  # of the experts that a token goes through together, where there are several
    vocabulary: int
    width: int  # bytes of a number in the model's dtype
    weights: int  # bytes of all weights
    attention: Attention = "fused"
    gated: bool = True  # whether the feed-forward layers have a gate
    tower: Shape | None = None  # of what reads pictures
    patches: int = 1  # of a picture that become one token


def shape_of(config: Any, dtype: str, parameters: int | None = None, quantization: str | None = None) -> Shape:
    """The shape of a model.

    Args:
        config: of transformers.
        dtype: of its computation; an unknown one counts as float32.
        parameters: of the model; None: counted by the shape, which takes a model of experts for one of a single one.
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
    """The shape of the layers that read a picture's patches, each of which attends to all the others."""
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
    """Patches of a picture that become one token."""
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
    """Parameters of one layer, without the few of norms and biases."""
    queries, keys = shape.heads * shape.head_size, shape.key_value_heads * shape.head_size
    return shape.hidden * (2 * queries + 2 * keys + (3 if shape.gated else 2) * shape.intermediate)


def kept_bytes(shape: Shape, length: int) -> float:
    """Bytes a token that a gradient pass keeps of its forward half, until the gradients come back.

    A layer keeps the inputs of its norms, in float32 too, those of its matrices, and what attention and the activation
    need of their own.

    Args:
        shape: of the model.
        length: tokens of a document, which quadratic attention needs to know.
    """
    wide = 4 if shape.width < 4 else 0  # the norms' copies in float32
    norms = 2 * (2 * shape.width + wide) * shape.hidden
    queries, keys = _widths(shape)
    attention = shape.width * (2 * queries + 2 * keys) + 4 * shape.heads
    if shape.attention == "quadratic":
        attention += shape.heads * length * (4 + 2 * shape.width)
    feed_forward = (4 if shape.gated else 2) * shape.width * shape.intermediate
    ends = (4 * shape.width + wide) * shape.hidden
    return shape.layers * (norms + attention + feed_forward) + ends


def _widths(shape: Shape) -> tuple[int, int]:
    """Numbers of a token in its queries, and in its keys as attention reads them.

    Grouped heads share their keys only in the kernels for 16 bits; elsewhere each head has a copy.
    """
    queries = shape.heads * shape.head_size
    shared = shape.width < 4 and shape.attention == "fused"
    return queries, shape.key_value_heads * shape.head_size if shared else queries


def gradient_bytes(shape: Shape, length: int) -> float:
    """Bytes a token that a gradient pass needs at its peak: what it keeps, one layer's gradients, the Gram matrices."""
    gradients = shape.width * (3 * shape.intermediate + 2 * shape.hidden) + 12 * shape.hidden
    return kept_bytes(shape, length) + gradients + 12 * length


def forward_bytes(shape: Shape, length: int) -> float:
    """Bytes a token that a forward pass needs at its peak, in one layer: nothing of the others is kept.

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
    """Bytes of keys and values of one position of one text, in all layers."""
    return 2 * shape.layers * shape.key_value_heads * shape.head_size * shape.width


@dataclass(frozen=True, slots=True)
class Card:
    """The memory that a worker has: of one card, or a part of it, or several."""

    memory: int  # bytes of one, as `nominal_memory` gives them
    gpus: float = 1.0  # below 1: a part of one

    @property
    def each(self) -> float:
        """Bytes of each that the worker may use."""
        return USABLE * self.memory * min(1.0, self.gpus)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a batch of each kind of pass holds at most."""

    forward: int  # padded tokens
    gradient: int  # padded tokens
    cache: int  # positions of keys and values, draws times (prompt and new tokens)


CPU_BUDGET = Budget(forward=2048, gradient=2048, cache=CACHE_POSITIONS)
"""On a CPU batches are as large as its caches like, whatever its memory."""


def budget_of(shape: Shape, card: Card, length: int, others: Sequence[Shape] = ()) -> Budget:
    """The budgets of a model on a card; 0 where the weights alone leave nothing.

    Args:
        shape: of the model.
        card: that the worker has.
        length: tokens that documents are cut to.
        others: models on the same card.
    """
    cards = max(1.0, card.gpus)
    weights = sum(each.weights for each in (shape, *others)) / cards
    free = card.each - weights - HEAD_BYTES
    return Budget(
        forward=rounded(min(free / forward_bytes(shape, length), MOST_TOKENS)),
        gradient=rounded(min(free / (gradient_bytes(shape, length) / cards), MOST_TOKENS)),
        # its room is taken once; the other half is for reading the prompts, and for a layer's keys where heads share
        # them or draws leave
        cache=rounded(free / 2 / (cache_bytes(shape) / cards)),
    )


def rounded(tokens: float) -> int:
    """Down to three binary digits: a little more or less memory gives the same budget."""
    whole = max(0, int(tokens))
    unit = 1 << max(0, whole.bit_length() - 3)
    return whole // unit * unit
