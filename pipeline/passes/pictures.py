"""Pictures with text: a description of a picture, and statistics of the parts of picture, instruction and description.

One forward pass reads the picture, an instruction and a description (arXiv 2411.02902). The head is applied only at the
positions of the parts that are read, a few hundred at a time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.models.opened import LanguageModel
from pipeline.models.pictures import PicturePrompt, padded_prompts, picture_token
from pipeline.passes.forward import (
    OWN_BEST,
    TokenStatistics,
    logits_of_rows,
    statistics_at,
    sweep_rows,
    tail_of,
    to_device,
)
from pipeline.passes.parts import PassSizes, joined_statistics

DESCRIPTION_TOKENS = 32


def describe(lm: LanguageModel, prompts: Sequence[PicturePrompt], tokens: int = DESCRIPTION_TOKENS) -> list[list[int]]:
    """The likeliest continuation of each prompt, token by token, without the token that ends a text.

    The token that stands for a picture is never written: the model would look for one more picture. Prompts of one
    length share a batch, so that none is padded.

    Args:
        lm: From `open_picture_model`.
        prompts: Of pictures.
        tokens: Most of a description.
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
    with torch.inference_mode(), _generating(model, likeliest):
        for group in groups.values():
            inputs, mask = padded_prompts(lm, [prompts[index] for index in group], [[]] * len(group))
            written = model.generate(**inputs, attention_mask=mask)
            for index, row in zip(group, written[:, mask.shape[1] :].tolist(), strict=True):
                stop = next((place for place, token in enumerate(row) if token in ends), len(row))
                results[index] = row[:stop]
    return results


@contextlib.contextmanager
def _generating(model: Any, settings: Any) -> Iterator[None]:
    """A block in which these settings are a model's own: its checkpoint's may punish what it has written before."""
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


def positions_of(prompt: PicturePrompt, described: int, part: str, token: int) -> list[int]:
    """The positions of the tokens of a part, ascending.

    The picture's are those of the token that stands for it, wherever its processor put them. The instruction is what
    follows the last of these in the prompt.

    Args:
        prompt: of the picture.
        described: tokens of the description.
        part: one of `PARTS`.
        token: that stands for a part of a picture.
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

    Row i of the logits predicts token i + 1, so a part of n tokens has n - 1 rows: those before its second token and
    the following ones. Where a row of the picture has no word to predict, its token is the likeliest one.

    Args:
        lm: From `open_picture_model`.
        prompts: Of the pictures.
        descriptions: Token ids of what is written of each.
        wanted: Part, of `PARTS`, -> which statistics of it.

    Returns:
        Part -> its statistics, column t for the part's token t + 2. They do not depend on what else is in the batch, up
        to rounding.
    """
    token = picture_token(lm.model.config)
    assert token is not None
    lengths = [len(p.ids) + len(d) for p, d in zip(prompts, descriptions, strict=True)]
    longest = max(lengths)
    at: dict[str, list[list[int]]] = {
        part: [
            [place - 1 for place in positions_of(p, len(d), part, token)[1:]]
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
    """Logits of some rows of a batch, (rows,) numbered through the padded batch, in chunks as `logits_of_rows`."""
    model: Any = lm.model
    tail = tail_of(model)
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
    """The statistics of one part, of all that was swept."""
    width = max([1, *map(len, at)])
    mask = torch.arange(width) < torch.tensor([len(some) for some in at])[:, None]
    cells = mask.flatten().nonzero().squeeze(1)  # on the CPU, which would else wait for the device
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
    """`forward_pictures`, in halves where memory ends.

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
