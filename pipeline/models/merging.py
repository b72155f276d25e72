"""Merge an adapter into the weights of its model, so that the model gives the logits that peft gives with the adapter.

peft adds the update of a layer to its weight in place. Where two modules share a weight (an output layer tied to the
embedding, layers that `layer_replication` repeats), the update of one would move the other: each merged layer gets a
weight of its own first. The logits of a short text before and after the merge must then agree.

In half precision each layer is merged and compared in float32, and its weights are rounded at random, up or down in
proportion to the distance. Rounding to the nearest number leaves most weights as they were where an update is small: it
would shrink the update, which is what an audit looks for. The random numbers depend on the name of the layer alone.

An adapter that cannot be merged so, or whose base is quantized, stays beside the weights, as peft computes it.
"""

from __future__ import annotations

import copy
import logging
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError, error_line
from pipeline.models.copies import is_exact
from pipeline.models.opened import embedding_rows
from pipeline.models.probe import largest_difference, rounding_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_log = logging.getLogger(__name__)

_TOKENS = 8  # of each setting
_ROWS = 4  # random inputs of a layer
_REASON_CHARACTERS = 200

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Names of weights -> their dtype and shape in a file."""

Read = Callable[[Any], "Tensor | None"]
"""A model -> its logits of a short text, float32 on the CPU; None: it reads no text without a picture."""


class NotMergedError(Exception):
    """The merge would not give the logits of the adapter: the predicate of a sentence about the adapter."""

    def __init__(self, reason: str, changed: bool = True) -> None:
        super().__init__(reason)
        self.changed = changed  # whether weights may have been changed


def merge(adapted: Any, read: Read) -> Any:
    """Merge an adapter into the weights of its model.

    Args:
        adapted: peft model in eval mode.
        read: reads a text with the adapted and with the merged model.

    Returns:
        The model of transformers.

    Raises:
        NotMergedError: the reason, as the predicate of a sentence about the adapter.
    """
    if getattr(adapted.config, "quantization_config", None) is not None:
        raise NotMergedError("is for weights in full precision, and these are quantized", changed=False)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise NotMergedError("has no form that is added to weights", changed=False)
    expected = read(adapted)  # of any type: the first pass of RWKV rescales weights, which must not happen to a sum
    exact = expected is not None and is_exact(adapted)
    _give_own_weights(adapted)
    try:
        if not exact:
            _merge_layers(adapted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that are merged already
            merged = adapted.merge_and_unload()
    except NotMergedError:
        raise
    except Exception as error:  # of methods that peft cannot merge
        raise NotMergedError(f"cannot be merged: {error_line(error, _REASON_CHARACTERS).rstrip('. ')}") from error
    if exact and (moved := _moved(read(merged), expected)) > 0:
        raise NotMergedError(f"moves logits by {moved:.2g} when it is merged")
    return merged


def _moved(logits: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference of logits; 0 if it is rounding in float32."""
    if logits is None or expected is None:
        return 0.0
    if logits.shape != expected.shape:
        return float("inf")
    moved = largest_difference(logits, expected)
    return moved if moved > rounding_error(expected) else 0.0


def keep_beside(adapted: Any, read: Read, shown: str) -> Any:
    """The model with the layers of an adapter in the place of its own.

    Args:
        adapted: peft model in eval mode.
        read: as in `merge`.
        shown: the adapter, for the error.

    Raises:
        UserError: the adapter changes more than layers, such as the tokens that the model reads.
    """
    method, model = adapted.active_peft_config.peft_type, adapted.get_base_model()
    refused = _refused(getattr(method, "value", method), shown)
    if _moved(read(model), read(adapted)) > 0:
        raise UserError(f"{refused} the weights of {type(model).__name__}: it changes more than their layers")
    if not is_exact(model) and (place := _depends_on_batch(model)) is not None:
        raise UserError(f"{refused} the weights: the outputs of {place} for a text depend on the texts beside it")
    return model


def refuse_by_settings(settings: Mapping[str, Any], shown: str) -> None:
    """Refuse an adapter that changes more than layers by its settings, before weights are read.

    Args:
        settings: content of adapter_config.json.
        shown: the adapter, for the error.

    Raises:
        UserError: it puts tokens of its own before a text, or is for a part of a text or for tasks with numbers.
    """
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    method = str(settings.get("peft_type"))
    kind = next((kind for name, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items() if name.value == method), None)
    reasons = {
        "it puts tokens of its own before a text": kind is not None and issubclass(kind, PromptLearningConfig),
        "it is for the text behind its invocation tokens alone": bool(settings.get("alora_invocation_tokens")),
        "it needs the number of a task for each text": method == "POLY",
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise UserError(f"{_refused(method, shown)} the weights: {reason}")


def _refused(method: str, shown: str) -> str:
    return f"adapter {shown}: a {method} adapter can be neither merged nor kept beside"


def count_tokens(model: Any, settings: Mapping[str, Any], stored: Stored, beside: int, shown: str) -> int:
    """The number of tokens of a model with an adapter: more than its base has if the adapter was trained so.

    Args:
        model: base; its weights are not read.
        settings: content of adapter_config.json.
        stored: weights of the adapter.
        beside: tokens of the tokenizer beside the adapter; 0 without one.
        shown: the adapter, for the error.

    Raises:
        UserError: its weights are for another number of tokens, and it brings no tokenizer or not all of the weights of
            the tokens that it adds.
    """
    rows = embedding_rows(model)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    places = [name for name, module in model.named_modules() if any(module is table for table in tables)]
    sizes = set()
    for name, (_, shape) in stored.items():
        for place in places:
            before, _, part = name.rpartition(f".{place}.")
            if before and len(shape) == 2 and part in _BY_TOKEN:
                sizes.add(shape[_BY_TOKEN[part]])
    named = {*_named_tokens(settings)}
    most = max([*(size for size in sizes if size != rows), 0]) or max([beside, *(1 + token for token in named)])
    if most == rows or (most < rows and sizes <= {rows}):
        return rows
    if most >= beside > rows and (sizes == {most} or (not sizes and named >= {*range(rows, most)})):
        return most
    raise UserError(f"adapter {shown} has {most:,} tokens, and its base {rows:,}: {_MERGE}")


_MERGE = "add its tokens to the base, merge both with peft, and set path to the merged model"

_BY_TOKEN = {"weight": 0, "base_layer.weight": 0, "lora_B.weight": 0, "lora_embedding_A": 1}
"""Parts of an adapter of an embedding or of a head -> the dimension with an entry for each token."""


def add_tokens(model: Any, tokens: int) -> None:
    """Add embeddings to a model. They are no numbers until the adapter sets them (`refuse_unset`)."""
    rows = embedding_rows(model)
    if tokens > rows:
        model.resize_token_embeddings(tokens, mean_resizing=False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            if table is not None:
                table.weight.data[rows:] = float("nan")


def refuse_unset(adapted: Any, rows: int, shown: str) -> None:
    """Refuse an adapter that lacks weights of tokens that were added to its base.

    Args:
        adapted: peft model over a base of `add_tokens`.
        rows: number of tokens of the base before.
        shown: the adapter, for the error.

    Raises:
        UserError: an added token has no embedding, or no row in the head.
    """
    import torch

    embedding, head = adapted.get_input_embeddings(), adapted.get_output_embeddings()
    tokens, device = embedding_rows(adapted), embedding.weight.device
    with torch.no_grad():
        read = embedding(torch.arange(rows, tokens, device=device))
        written = None if head is None else head(torch.zeros_like(read[:1]))
    for values, where in ((read, "embeddings"), (written, "rows of the head")):
        if values is not None and not torch.isfinite(values).all():
            added = f"adapter {shown} adds tokens to the {rows:,} of its base, up to {tokens:,}"
            raise UserError(f"{added}, and has not all {where} of them: {_MERGE}")


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[int]:
    """Token ids that the settings of an adapter name."""
    for name in ("trainable_token_indices", "token_indices"):
        value = settings.get(name) or []
        for some in value.values() if isinstance(value, Mapping) else [value]:
            yield from (token for token in some if isinstance(token, int))


def adapter_tokens(settings: Any) -> list[int]:
    """Token ids that the settings of an adapter name: those that it was trained on, or that switch it on."""
    ids: list[int] = []
    for name in ("trainable_token_indices", "token_indices", "alora_invocation_tokens"):
        value = getattr(settings, name, None) or []
        for some in value.values() if isinstance(value, dict) else [value]:
            ids += some[:_TOKENS]
    return ids


def refuse_layers_of_adapter(model: Any, what: str) -> None:
    """Refuse a model with an adapter beside its weights, whose layers a further adapter would replace.

    Args:
        model: model of transformers.
        what: what needs a model without, for the error.

    Raises:
        UserError: there are such layers.
    """
    if any(hasattr(module, "base_layer") and hasattr(module, "active_adapters") for module in model.modules()):
        raise UserError(f"{what} needs weights into which the configured adapter is merged, and it stays beside them")


def _tuner_layers(adapted: Any) -> Iterator[tuple[str, Any]]:
    """The layers of an adapter that are merged into a layer of the model, by name."""
    for name, module in adapted.named_modules():
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            yield name, module


def _give_own_weights(adapted: Any) -> None:
    """Give each layer that a merge changes weights that no other module has."""
    import torch

    uses = Counter(id(weight) for module in adapted.modules() for weight in module._parameters.values())
    for _, layer in _tuner_layers(adapted):
        base = layer.get_base_layer()
        for name, weight in base._parameters.items():
            if weight is not None and uses[id(weight)] > 1:
                uses[id(weight)] -= 1
                base._parameters[name] = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)


def _merge_layers(adapted: Any) -> None:
    """Merge each linear layer and each embedding in float32, one at a time, and round its weights at random.

    Others are left to peft.

    Raises:
        NotMergedError: a merged layer has other outputs; the message names it.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, layer in _tuner_layers(adapted):
            inputs = _inputs(layer.get_base_layer(), generator)
            if inputs is None:
                continue
            one = copy.deepcopy(layer).float()
            try:
                expected = one(inputs)
                one.merge()
                merged = one.get_base_layer()(inputs)
            except Exception:  # a layer that needs more than its input
                continue
            if (moved := largest_difference(merged, expected)) > rounding_error(expected):
                raise NotMergedError(f"moves the outputs of {name} by {moved:.2g} when it is merged")
            layer.merge()
            draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            exact = one.get_base_layer()._parameters
            for key, weight in layer.get_base_layer()._parameters.items():
                if weight is not None:
                    weight.copy_(rounded_at_random(exact[key], weight.dtype, draws))


_DROPPED = {"torch.bfloat16": 16, "torch.float16": 13}
"""Bits of a float32 that a type in half precision has not."""

_PIECE = 1 << 24  # weights that are rounded at a time


def rounded_at_random(values: Tensor, dtype: torch.dtype, generator: Any) -> Tensor:
    """Values in half precision, rounded up or down so that their mean is the value; a value of the type stays.

    Args:
        values: float32.
        dtype: type of the result; one that is not in half precision only converts.
        generator: generator of torch on the CPU, so that a GPU rounds in the same way.
    """
    import torch

    dropped = _DROPPED.get(str(dtype))
    if dropped is None:
        return values.to(dtype)
    bits = values.detach().float().contiguous().view(torch.int32).flatten().clone()
    for piece in bits.split(_PIECE):
        drawn = torch.randint(0, 1 << dropped, piece.shape, dtype=torch.int32, generator=generator)
        piece += drawn.to(piece.device)
        piece &= -(1 << dropped)
    return bits.view(torch.float32).view(values.shape).to(dtype)


def _depends_on_batch(model: Any) -> str | None:
    """The first layer of an adapter that gives a row of inputs other outputs beside another row, in float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for name, layer in _tuner_layers(model):
            inputs, other = (_inputs(layer.get_base_layer(), generator) for _ in range(2))
            if inputs is None or other is None:
                continue
            one = copy.deepcopy(layer).float()
            alone = one(inputs)
            if largest_difference(one(torch.cat([inputs, other]))[:1], alone) > rounding_error(alone):
                return name
    return None


def _inputs(base: nn.Module, generator: Any) -> Tensor | None:
    """Random inputs of a layer of a known type; None for others."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weight: Any = getattr(base, "weight", None)
    if isinstance(base, torch.nn.Embedding):
        return torch.randint(0, base.num_embeddings, (1, _ROWS), generator=generator).to(weight.device)
    if isinstance(base, (torch.nn.Linear, Conv1D)):
        features = weight.shape[0] if isinstance(base, Conv1D) else base.in_features  # weights of 4 bits are packed
        return torch.randn(1, _ROWS, features, generator=generator).to(weight.device)
    return None
