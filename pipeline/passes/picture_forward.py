"""Vision-language passes: descriptions of pictures, and statistics of picture, instruction and description.

One forward pass reads the picture, an instruction and a description (arXiv 2411.02902). The head is applied only to the
positions of requested parts, a few hundred at a time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.models.lengths import length_rule
from pipeline.models.opened import LanguageModel
from pipeline.models.picture_prompts import PicturePrompt, padded_prompts, picture_token
from pipeline.passes.forward import (
    OWN_BEST,
    TokenStatistics,
    find_tail,
    joined_statistics,
    logits_of_rows,
    statistics_at,
    sweep_rows,
    to_device,
)
from pipeline.passes.parts import PassSizes

DESCRIPTION_TOKENS = 32


def describe(lm: LanguageModel, prompts: Sequence[PicturePrompt], tokens: int = DESCRIPTION_TOKENS) -> list[list[int]]:
    """Greedy continuation of each prompt, without the EOS token.

    The picture token is never generated, because the model would expect another picture. Prompts of the same length
    share a batch, so that none is padded.

    Args:
        lm: model from `open_picture_model`.
        prompts: prompts of pictures.
        tokens: maximum tokens of a description.
    """
    from transformers import GenerationConfig

    model: Any = lm.model
    ends = _ends(lm)
    results: list[list[int]] = [[] for _ in prompts]
    likeliest = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, num_beams=1, use_cache=True,
        eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0),
        suppress_tokens=[picture_token(model.config)],
    )  # fmt: skip
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        groups[len(prompt.ids), *(tuple(value.shape) for value in prompt.numbers.values())].append(index)
    for group in groups.values():
        with torch.inference_mode(), length_rule(model).alone(), _generating(model, likeliest):
            inputs, mask = padded_prompts(lm, [prompts[index] for index in group], [[]] * len(group))
            written = model.generate(**inputs, attention_mask=mask)
        for index, row in zip(group, written[:, mask.shape[1] :].tolist(), strict=True):
            stop = next((place for place, token in enumerate(row) if token in ends), len(row))
            results[index] = row[:stop]
    return results


@contextlib.contextmanager
def _generating(model: Any, settings: Any) -> Iterator[None]:
    """Use these generation settings for a block: those of the checkpoint may penalize repetition."""
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before


def _ends(lm: LanguageModel) -> frozenset[int]:
    model: Any = lm.model
    values = [getattr(model.generation_config, "eos_token_id", None), lm.tokenizer.eos_token_id]
    return frozenset(
        int(token) for value in values if value is not None for token in (value if isinstance(value, list) else [value])
    )


def token_positions(prompt: PicturePrompt, described: int, part: str, token: int) -> list[int]:
    """The positions of the tokens of a part, ascending.

    The positions of the picture are those of the picture token, wherever the processor puts it. The instruction is the
    part of the prompt after the last of these.

    Args:
        prompt: prompt of the picture.
        described: number of tokens of the description.
        part: one of `PARTS`.
        token: picture token.
    """
    picture = [place for place, one in enumerate(prompt.ids) if one == token]
    end = len(prompt.ids)
    return {
        "image": picture,
        "instruction": list(range(picture[-1] + 1, end)),
        "description": list(range(end, end + described)),
        "instruction_description": list(range(picture[-1] + 1, end + described)),
    }[part]


def forward_pictures(
    lm: LanguageModel,
    prompts: Sequence[PicturePrompt],
    descriptions: Sequence[Sequence[int]],
    wanted: Mapping[str, frozenset[str]],
) -> dict[str, TokenStatistics]:
    """Run a batch of pictures with their descriptions through the model once.

    Row i of the logits predicts token i + 1, so a part of n tokens has n - 1 rows: those before its second and later
    tokens. For rows of the picture that predict no word, the likeliest token is used.

    Args:
        lm: model from `open_picture_model`.
        prompts: prompts of the pictures.
        descriptions: token ids of the description of each picture.
        wanted: part (of `PARTS`) -> names of its statistics.

    Returns:
        Part -> its statistics, column t for the part's token t + 2. Up to rounding, they do not depend on the other
        pictures of the batch.
    """
    pairs = list(zip(prompts, descriptions, strict=True))
    results = length_rule(lm.model).apply(
        lambda some: _forward_pictures(lm, [p for p, _ in some], [d for _, d in some], wanted),
        pairs,
        [len(p.ids) + len(d) for p, d in pairs],
    )
    return {part: joined_statistics([result[part] for result in results]) for part in wanted}


def _forward_pictures(
    lm: LanguageModel,
    prompts: Sequence[PicturePrompt],
    descriptions: Sequence[Sequence[int]],
    wanted: Mapping[str, frozenset[str]],
) -> dict[str, TokenStatistics]:
    token = picture_token(lm.model.config)
    assert token is not None
    lengths = [len(p.ids) + len(d) for p, d in zip(prompts, descriptions, strict=True)]
    longest = max(lengths)
    at: dict[str, list[list[int]]] = {
        part: [
            [place - 1 for place in token_positions(p, len(d), part, token)[1:]]
            for p, d in zip(prompts, descriptions, strict=True)
        ]
        for part in wanted
    }
    inputs, mask = padded_prompts(lm, prompts, descriptions)
    ids = [[*p.ids, *d] for p, d in zip(prompts, descriptions, strict=True)]
    with torch.inference_mode():
        rows = sorted(
            {number * longest + row for parts in at.values() for number, some in enumerate(parts) for row in some}
        )
        following = [ids[row // longest][row % longest + 1] for row in rows]
        targets = torch.tensor([-1 if one == token else one for one in following], dtype=torch.long)
        targets = to_device(targets, lm.device)
        statistics = frozenset().union(*wanted.values(), {OWN_BEST})
        swept = sweep_rows(_logits(lm, inputs, mask, torch.tensor(rows, dtype=torch.long)), targets, statistics)
        place = {row: number for number, row in enumerate(rows)}
        return {part: _table(swept, at[part], longest, place, wanted[part], lm.device) for part in wanted}


def _logits(lm: LanguageModel, inputs: Mapping[str, Tensor], mask: Tensor, rows: Tensor) -> Any:
    """Logits of some rows of a batch, (rows,) as indices into the padded batch, in chunks as in `logits_of_rows`."""
    model: Any = lm.model
    tail = find_tail(model)
    if tail is None:
        logits = model(**inputs, attention_mask=mask, use_cache=False).logits
        return iter([(logits.flatten(0, 1).index_select(0, to_device(rows, logits.device)), None)])
    hidden = tail.base(**inputs, attention_mask=mask, use_cache=False).last_hidden_state
    return logits_of_rows(model, tail, hidden.flatten(0, 1).index_select(0, to_device(rows, hidden.device)))


def _table(
    swept: Mapping[str, Tensor],
    at: Sequence[Sequence[int]],
    longest: int,
    place: Mapping[int, int],
    statistics: frozenset[str],
    device: torch.device,
) -> TokenStatistics:
    """The statistics of one part, from those of all rows."""
    width = max([1, *map(len, at)])
    mask = torch.arange(width) < torch.tensor([len(some) for some in at])[:, None]
    cells = mask.flatten().nonzero().squeeze(1)  # on the CPU, to avoid synchronization with the device
    taken = torch.tensor([place[number * longest + row] for number, some in enumerate(at) for row in some]).long()
    some = to_device(taken, device)
    values = {name: column.index_select(0, some) for name, column in swept.items()}
    return statistics_at(values, to_device(cells, device), to_device(mask, device), statistics)


def pictures_in_parts(
    lm: LanguageModel,
    prompts: Sequence[PicturePrompt],
    descriptions: Sequence[Sequence[int]],
    wanted: Mapping[str, frozenset[str]],
    parts: PassSizes,
) -> dict[str, TokenStatistics]:
    """`forward_pictures`, in halves if out of memory.

    Args:
        lm: The model.
        prompts: Of the pictures.
        descriptions: Token ids of what is written of each.
        wanted: As of `forward_pictures`.
        parts: Of such passes of this model.
    """
    pairs = list(zip(prompts, descriptions, strict=True))
    results = parts.run(
        lambda some: forward_pictures(lm, [p for p, _ in some], [d for _, d in some], wanted),
        pairs,
        [len(p.ids) + len(d) for p, d in pairs],
    )
    return {part: joined_statistics([result[part] for result in results]) for part in wanted}
