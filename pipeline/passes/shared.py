"""The forward pass over texts of one beginning, which is computed once: versions of one document, or behind a prefix.

Versions of a document are computed by themselves, so that the bytes of its scores depend on these and on the model
alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.opened import LanguageModel
from pipeline.models.tail import Tail, agree
from pipeline.passes.copying import pad, to_device
from pipeline.passes.forward import (
    TokenStatistics,
    forward,
    logits_of_rows,
    restricted,
    statistics_at,
    sweep_rows,
    tail_of,
)
from pipeline.passes.key_values import cache_of

WORTHWHILE = 0.7
"""Share of the tokens of all versions, at most, for which a document is computed by itself, in smaller products."""

_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def common_beginning(ids: Sequence[Sequence[int]]) -> int:
    """Tokens that all sequences begin with and that none of them ends with; 0 where sharing them saves too little.

    Args:
        ids: token ids of each version of a document.
    """
    least = min(map(len, ids)) - 1
    common = next((place for place in range(least) if len({one[place] for one in ids}) > 1), max(0, least))
    total = sum(map(len, ids))
    return common if total - (len(ids) - 1) * common <= WORTHWHILE * total else 0


def shares_beginnings(lm: LanguageModel) -> bool:
    """Whether a model gives the same hidden states where a beginning is read once: proven on a short input.

    It needs a tail that is known, and attention to all positions in every layer.
    """
    model = lm.model
    if model not in _proven:
        _proven[model] = _prove(model)
    return _proven[model]


def _prove(model: Any) -> bool:
    tail, config = tail_of(model), model.config.get_text_config()
    windowed = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    if tail is None or windowed or getattr(config, "sliding_window", None) or config.is_encoder_decoder:
        return False
    device = model.get_input_embeddings().weight.device
    probe = torch.arange(min(8, config.vocab_size), device=device)
    probe = torch.stack([probe, torch.cat([probe[:4], probe[4:].flip(0)])])
    with torch.inference_mode():
        whole = tail.base(input_ids=probe, use_cache=False).last_hidden_state
        try:
            parts = torch.cat([part.expand(2, -1, -1) for part in _hidden(model, tail, probe[:1, :4], probe[:, 4:])], 1)
        except (TypeError, AttributeError, ValueError):  # of a model that takes no cache, or another one
            return False
    return agree(parts.float(), whole.float(), whole.dtype)


def forward_of_versions(
    lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str], common: int
) -> TokenStatistics:
    """As `forward` of the versions of one document, up to rounding; tokens that all begin with are computed once.

    Args:
        lm: the model, of which `shares_beginnings` is true.
        ids: token ids of each version.
        statistics: as of `forward`.
        common: from `common_beginning`, > 0.
    """
    tail = tail_of(lm.model)
    assert tail is not None
    whole, rest = pad(ids, lm.device), pad([one[common:] for one in ids], lm.device)
    counts = torch.tensor([len(one) - common for one in ids])  # tokens of each rest
    before = common - 1  # rows that predict tokens of the beginning, and stand once before those of all rests
    of_version = [torch.arange(start, stop) for start, stop in itertools.pairwise([0, *counts.cumsum(0).tolist()])]
    rows = torch.cat([torch.cat([torch.arange(before), before + places]) for places in of_version])
    stands = to_device(torch.arange(rest.ids.shape[1]) < counts[:, None], lm.device)
    with torch.inference_mode():
        beginning, rests = _hidden(lm.model, tail, whole.ids[:1, :common], rest.ids)
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


def forward_behind(
    lm: LanguageModel, prefix: Sequence[int], ids: Sequence[Sequence[int]], statistics: frozenset[str]
) -> TokenStatistics:
    """As `forward`, of texts that stand behind a prefix, whose keys and values are computed once.

    Where the model does not share beginnings, each text is read with the prefix.

    Args:
        lm: the model.
        prefix: token ids, at least one.
        ids: token ids of each text.
        statistics: as of `forward`.

    Returns:
        Statistics of the tokens of each text from its second on, as `forward` of the texts alone shapes them.
    """
    if not shares_beginnings(lm):
        keep = [[False] * len(prefix) + [True] * (len(one) - 1) for one in ids]
        return restricted(forward(lm, [[*prefix, *one] for one in ids], statistics), keep)
    tail, batch = tail_of(lm.model), pad(ids, lm.device)
    assert tail is not None
    with torch.inference_mode():
        hidden = _hidden(lm.model, tail, pad([prefix], lm.device).ids, batch.ids)[1].flatten(0, 1)
        rows = hidden.index_select(0, batch.positions.to(hidden.device))
        swept = sweep_rows(logits_of_rows(lm.model, tail, rows), batch.targets, statistics)
        return statistics_at(swept, batch.cells, batch.mask, statistics)


def _hidden(model: Any, tail: Tail, beginning: Tensor, rests: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of a beginning, (1, tokens, hidden), and of what follows it in each version.

    Args:
        model: of transformers.
        tail: of it.
        beginning: (1, tokens) ids.
        rests: (versions, tokens) ids, padded on the right: behind a causal mask no token sees the padding.
    """
    held = cache_of(model, beginning.shape[1] + rests.shape[1])
    first = tail.base(input_ids=beginning, past_key_values=held, use_cache=True).last_hidden_state
    held.reorder_cache(torch.zeros(len(rests), dtype=torch.int64, device=beginning.device))
    return first, tail.base(input_ids=rests, past_key_values=held, use_cache=True).last_hidden_state
