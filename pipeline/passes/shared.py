"""The forward pass over texts with a common beginning, computed once: versions of a document, texts after a prefix.

Versions of a document are computed in a separate batch, so that the bytes of its scores depend only on these and on the
model.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.lengths import length_rule
from pipeline.models.opened import LanguageModel, Tail, agree
from pipeline.passes.forward import (
    TokenStatistics,
    find_tail,
    forward,
    logits_of_rows,
    pad,
    restricted,
    statistics_at,
    sweep_rows,
    to_device,
)
from pipeline.passes.statistics import HELD

WORTHWHILE = 0.7
"""Maximum share of the tokens of all versions for which a document is computed separately, in smaller products."""

_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def common_beginning(ids: Sequence[Sequence[int]]) -> int:
    """Number of tokens that all sequences start with and none ends with; 0 if sharing them saves too little.

    Args:
        ids: token ids of each version of a document.
    """
    least = min(map(len, ids)) - 1
    common = next((place for place in range(least) if len({one[place] for one in ids}) > 1), max(0, least))
    total = sum(map(len, ids))
    return common if total - (len(ids) - 1) * common <= WORTHWHILE * total else 0


def shares_beginnings(lm: LanguageModel) -> bool:
    """Whether a model gives the same hidden states if a beginning is computed once; verified on a short input.

    It requires a known tail, and attention to all positions in every layer.
    """
    model = lm.model
    if model not in _proven:
        with length_rule(model).alone():
            _proven[model] = _prove(model)
    return _proven[model]


def _prove(model: Any) -> bool:
    tail, config = find_tail(model), model.config.get_text_config()
    windowed = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    if tail is None or windowed or getattr(config, "sliding_window", None) or config.is_encoder_decoder:
        return False
    device = model.get_input_embeddings().weight.device
    probe = torch.arange(min(8, config.vocab_size), device=device)
    probe = torch.stack([probe, torch.cat([probe[:4], probe[4:].flip(0)])])
    with torch.inference_mode():
        whole = tail.base(input_ids=probe, use_cache=False).last_hidden_state
        try:
            beginning, held = _begun(model, tail, probe[:1, :4])
            rests = _followed(tail, held, probe[:, 4:])
            parts = torch.cat([part.expand(2, -1, -1) for part in (beginning, rests)], 1)
        except (TypeError, AttributeError, ValueError):  # the model supports no cache, or another one
            return False
    return agree(parts.float(), whole.float(), whole.dtype)


def forward_of_versions(
    lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str], common: int
) -> TokenStatistics:
    """As `forward` for the versions of one document, up to rounding; common first tokens are computed once.

    Args:
        lm: model for which `shares_beginnings` is true.
        ids: token ids of each version.
        statistics: as in `forward`.
        common: result of `common_beginning`, > 0.
    """
    rule = length_rule(lm.model)
    if not rule.are_alike([common, *map(len, ids)]):
        return forward(lm, ids, statistics)
    with rule.alone():
        return _forward_of_versions(lm, ids, statistics, common)


def _forward_of_versions(
    lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str], common: int
) -> TokenStatistics:
    tail = find_tail(lm.model)
    assert tail is not None
    whole, rest = pad(ids, lm.device), pad([one[common:] for one in ids], lm.device)
    counts = torch.tensor([len(one) - common for one in ids])  # number of tokens of each rest
    before = common - 1  # rows that predict tokens of the beginning, once, before those of all rests
    of_version = [torch.arange(start, stop) for start, stop in itertools.pairwise([0, *counts.cumsum(0).tolist()])]
    rows = torch.cat([torch.cat([torch.arange(before), before + places]) for places in of_version])
    stands = to_device(torch.arange(rest.ids.shape[1]) < counts[:, None], lm.device)
    with torch.inference_mode():
        beginning, held = _begun(lm.model, tail, whole.ids[:1, :common])
        rests = _followed(tail, held, rest.ids)
        predicting = torch.cat([beginning[:, -1:].expand(len(ids), -1, -1), rests[:, :-1]], 1)
        hidden = torch.cat([beginning[0, :-1], predicting[stands.to(predicting.device)]])
        targets = torch.cat([whole.ids[0, 1:common], rest.ids[stands]])
        swept = sweep_rows(logits_of_rows(lm.model, tail, hidden), targets, statistics)
        places = to_device(rows, lm.device)
        return statistics_at(
            {name: values.index_select(0, places) for name, values in swept.items()},
            whole.cells,
            whole.mask,
            statistics,
        )


class HeldPrefixes:
    """Keys and values of prefixes, computed once by a worker for one model with one adapter."""

    def __init__(self) -> None:
        """Create an empty collection."""
        self._held: dict[tuple[int, ...], Any] = {}

    def cache(self, lm: LanguageModel, tail: Tail, prefix: Sequence[int]) -> Any:
        """The cache, with one row, of a prefix of at least one token."""
        key = tuple(prefix)
        if key not in self._held:
            if sum(map(len, self._held)) + len(key) > HELD:
                self._held.clear()
            self._held[key] = _begun(lm.model, tail, pad([key], lm.device).ids)[1]
        return self._held[key]


def forward_behind(
    lm: LanguageModel,
    prefix: Sequence[int],
    ids: Sequence[Sequence[int]],
    statistics: frozenset[str],
    held: HeldPrefixes | None = None,
) -> TokenStatistics:
    """As `forward`, for texts after a prefix whose keys and values are computed once.

    If the model does not support shared beginnings, or not at these lengths, each text is read with the prefix.

    Args:
        lm: model.
        prefix: token ids, at least one.
        ids: token ids of each text.
        statistics: as in `forward`.
        held: prefixes of earlier calls with this model; None: the prefix is computed.

    Returns:
        Statistics of the tokens of each text from its second on, with the shape of `forward` of the texts alone.
    """
    rule, lengths = length_rule(lm.model), [len(prefix) + len(one) for one in ids]
    if not shares_beginnings(lm) or not rule.are_alike([len(prefix), *lengths]):
        keep = [[False] * len(prefix) + [True] * (len(one) - 1) for one in ids]
        return restricted(forward(lm, [[*prefix, *one] for one in ids], statistics), keep)
    tail, batch = find_tail(lm.model), pad(ids, lm.device)
    assert tail is not None
    with rule.alone(), torch.inference_mode():
        cache = (held or HeldPrefixes()).cache(lm, tail, prefix)
        hidden = _followed(tail, cache, batch.ids).flatten(0, 1)
        rows = hidden.index_select(0, batch.positions.to(hidden.device))
        swept = sweep_rows(logits_of_rows(lm.model, tail, rows), batch.targets, statistics)
        return statistics_at(swept, batch.cells, batch.mask, statistics)


def _begun(model: Any, tail: Tail, beginning: Tensor) -> tuple[Tensor, Any]:
    """Hidden states of a beginning, (1, tokens, hidden), and its keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    return tail.base(input_ids=beginning, past_key_values=cache, use_cache=True).last_hidden_state, cache


def _followed(tail: Tail, begun: Any, rests: Tensor) -> Tensor:
    """Hidden states of texts after a beginning, (texts, tokens, hidden); the cache of the beginning is not changed.

    Args:
        tail: tail of the model.
        begun: cache of the beginning, with one row.
        rests: (texts, tokens) ids, padded on the right: with a causal mask no token attends to the padding.
    """
    cache = copy.copy(begun)
    cache.layers = [copy.copy(layer) for layer in begun.layers]
    for layer in cache.layers:  # views, which layers copy when they append
        layer.keys, layer.values = (states.expand(len(rests), -1, -1, -1) for states in (layer.keys, layer.values))
    hidden: Tensor = tail.base(input_ids=rests, past_key_values=cache, use_cache=True).last_hidden_state
    return hidden


def make_cache(model: Any, positions: int) -> Any:
    """An empty cache of keys and values, whose rows can be selected and repeated.

    Its memory is allocated when rows are first selected: before, it holds each prompt once. Sliding-window layers and
    layers without positions use the cache of transformers.

    Args:
        model: model of transformers.
        positions: maximum positions of a row, >= 1.
    """
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.cache_utils import DynamicLayer

    held = DynamicCache(config=model.config)
    held.layers = [_reserved_layer()(positions) if type(layer) is DynamicLayer else layer for layer in held.layers]
    return EncoderDecoderCache(held, DynamicCache()) if model.config.is_encoder_decoder else held


@cache
def _reserved_layer() -> Any:
    """The class of a layer with preallocated memory; defined here because importing transformers takes seconds."""
    from transformers.cache_utils import DynamicLayer

    class ReservedLayer(DynamicLayer):
        """Keys and values (rows, heads, positions, features), as views of the first positions of a buffer."""

        def __init__(self, positions: int) -> None:
            super().__init__()
            self.positions = positions
            self.room: list[Tensor] = []  # buffers of keys and values; empty before rows are selected

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Continue with these rows, in a new buffer."""
            if self.get_seq_length() == 0:
                return
            held = self.get_seq_length()
            for place, name in enumerate(("keys", "values")):
                states: Tensor = getattr(self, name)
                rows = beam_idx.to(states.device)
                room = states.new_empty(len(rows), states.shape[1], max(held, self.positions), states.shape[3])
                room[:, :, :held] = states.index_select(0, rows)
                setattr(self, name, room[:, :, :held])
                self.room[place : place + 1] = [room]

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **settings: Any) -> tuple[Any, Any]:
            """Append positions and return all keys and values."""
            held, new = self.get_seq_length(), key_states.shape[-2]
            if not self.room or held + new > self.room[0].shape[2]:
                self.room = []
                return super().update(key_states, value_states, *args, **settings)
            for room, states in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, held : held + new] = states
            self.keys, self.values = (room[:, :, : held + new] for room in self.room)
            return self.keys, self.values

    return ReservedLayer
