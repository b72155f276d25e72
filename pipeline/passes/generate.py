"""Sample continuations of many prompts; each prompt is read once, for any number of draws.

A batch of prompts goes through the model (or the encoder) once; its cache is then repeated for the draws. Finished
draws are removed from the batch, which saves computation. Every draw has a separate random stream.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.corpus.scripts import count_units
from pipeline.errors import UserError
from pipeline.models.copies import few_layers, is_exact
from pipeline.models.lengths import LengthRule, length_rule
from pipeline.models.opened import LanguageModel, Seq2SeqModel, agree, embedding_rows
from pipeline.passes.parts import PassSizes
from pipeline.passes.shared import make_cache

CACHE_POSITIONS = 1 << 13  # default for positions in the cache: draws times (prompt + new tokens)
COMPACT = 0.25  # share of finished rows at which they are removed from the batch
CHARACTERS = 4  # of scripts without blanks; few tokens have more
End = Literal["eos", "words", "tokens", "non_finite"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and the draws to make.

    The random stream of a draw depends only on the seed of the run, `key` and the draw's number: draw 7 is the same
    whether or not draws 0 to 6 are made.
    """

    key: tuple[int, ...]  # identifies the text: a document, or a piece of one
    ids: Sequence[int]  # token ids, at least one
    draws: Sequence[int]  # numbers of the draws
    words: int | None = None  # a draw ends after this many whole words; None: no such limit
    max_new_tokens: int | None = None  # a lower limit for this prompt
    characters: bool = False  # whether characters of scripts without blanks count as words
    ends: frozenset[int] = frozenset()  # token ids that end a draw, besides those of the model


@dataclass(frozen=True, slots=True)
class Continuation:
    """The result of one draw, without the prompt and without special tokens."""

    text: str  # may extend past the last requested word: the caller cuts it
    ids: tuple[int, ...]  # new tokens, without the EOS
    end: End  # why it ended; "tokens": the limit, "non_finite": NaN from the model


def continuations(
    lm: LanguageModel | Seq2SeqModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    *,
    batch_tokens: int | None = None,
    parts: PassSizes | None = None,
) -> list[list[Continuation]]:
    """Draw continuations of prompts; from a sequence-to-sequence model, answers to them.

    Args:
        lm: model.
        prompts: prompts to continue. Batches contain only these, grouped by similar length.
        sampling: sampling of tokens.
        seed: seed of the run.
        batch_tokens: maximum positions in the cache, draws times (prompt and new tokens); the minimum is one prompt
            with its draws on a CPU, one draw on a GPU. None: `CACHE_POSITIONS`.
        parts: batch sizes that fit into memory in earlier calls; a batch that does not fit is drawn in halves.

    Returns:
        For each prompt the continuations in the order of its draws. The same prompts and batch_tokens give exactly the
        same tokens. In other batches a model's logits may differ in their last bits; a token can then differ if its
        random number is that close to the boundary between two tokens.

    Raises:
        UserError: a prompt fills all positions of the model, or the model has no cache.
    """
    budget = batch_tokens or CACHE_POSITIONS
    parts = PassSizes() if parts is None else parts
    limits = [_limit(lm, prompt, sampling) for prompt in prompts]
    results: list[list[Continuation]] = [[] for _ in prompts]
    with torch.inference_mode():
        for group in _batches(lm, prompts, limits, budget):
            pairs = [(i, number) for i in group for number in prompts[i].draws]
            sizes = [len(prompts[i].ids) + limits[i] for i, _ in pairs]
            most = budget if len(group) == 1 and lm.device.type != "cpu" else None
            for drawn in parts.run(lambda some: _drawn(lm, prompts, some, limits, sampling, seed), pairs, sizes, most):
                for i, draw in drawn:
                    results[i].append(draw)
    return results


def _drawn(
    lm: LanguageModel | Seq2SeqModel,
    prompts: Sequence[Prompt],
    pairs: Sequence[tuple[int, int]],
    limits: Sequence[int],
    sampling: Sampling,
    seed: int,
) -> list[tuple[int, Continuation]]:
    """Draws of one batch, given as (index of the prompt, number of the draw), with the index of the prompt."""
    group = list(dict.fromkeys(i for i, _ in pairs))
    owners = {i: owner for owner, i in enumerate(group)}
    rows = [_Draw(seed, prompts[i], number, limits[i], owners[i]) for i, number in pairs]
    with length_rule(lm.model).alone():
        _run(lm, [prompts[i].ids for i in group], rows, sampling)
    return [
        (group[row.owner], Continuation(_decode(lm.tokenizer, row.ids), tuple(row.ids), row.end or "tokens"))
        for row in rows
    ]


def _limit(lm: LanguageModel | Seq2SeqModel, prompt: Prompt, sampling: Sampling) -> int:
    """Maximum number of new tokens of a prompt's draws."""
    limit = min(sampling.max_new_tokens, prompt.max_new_tokens or sampling.max_new_tokens)
    if not len(prompt.ids):
        raise UserError(f"prompt {prompt.key} has no token; a model continues at least 1")
    if lm.max_tokens is None:
        return limit
    room = lm.max_tokens - (0 if isinstance(lm, Seq2SeqModel) else len(prompt.ids))
    if len(prompt.ids) > lm.max_tokens or room < 1:
        raise UserError(f"a prompt of {len(prompt.ids)} tokens leaves no room in a model of {lm.max_tokens} positions")
    return min(limit, room)


def _batches(
    lm: LanguageModel | Seq2SeqModel, prompts: Sequence[Prompt], limits: Sequence[int], budget: int
) -> Iterator[list[int]]:
    """Batches of indices of prompts of similar length, within the budget.

    Prompts share a batch only if the model reads padding, and if all have the same position embeddings at every step.
    """
    group: list[int] = []
    rows = limit = 0
    rule = length_rule(lm.model)
    lengths = [len(prompt.ids) for prompt in prompts]
    equal = len(set(lengths)) > 1 and not _reads_padding(lm)

    def kind(index: int) -> tuple[Any, ...]:
        first, last = rule.frequencies(lengths[index]), rule.frequencies(lengths[index] + limits[index])
        return (first,) if first == last and not equal else (first, last, lengths[index])

    for index in sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), limits[i])):
        wider = max(limit, limits[index])
        more = rows + len(prompts[index].draws)
        if group and (more * (len(prompts[index].ids) + wider) > budget or kind(index) != kind(group[-1])):
            yield group
            group, more, wider = [], len(prompts[index].draws), limits[index]
        group.append(index)
        rows, limit = more, wider
    if group:
        yield group


_padding_read: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def _reads_padding(lm: LanguageModel | Seq2SeqModel) -> bool:
    """Whether a model gives the next token of a prompt the same logits with padding on its left; tried once.

    A model whose positions cannot be stated counts the padding. Half precision is tried in a float32 copy, if there is
    one, as its rounding differs with the batch.
    """
    if isinstance(lm, Seq2SeqModel):  # encoders read a mask
        return True
    if lm.model not in _padding_read:
        with length_rule(lm.model).alone():
            small = None if is_exact(lm.model) else few_layers(lm.model)
            tried = lm if small is None else replace(lm, model=small, device=torch.device("cpu"))
            tokens = [token % embedding_rows(tried.model) for token in range(3, 11)]
            alone = _Continuations(tried, [tokens[3:]], 1).first().float()
            padded = _Continuations(tried, [tokens[3:], tokens], 1).first()[:1].float()
            _padding_read[lm.model] = agree(padded, alone, next(tried.model.parameters()).dtype)
    return _padding_read[lm.model]


class _Draw:
    """The state of one draw: its tokens, its random numbers, and whether it has ended."""

    __slots__ = ("characters", "due", "end", "ends", "ids", "limit", "owner", "uniforms", "words")

    def __init__(self, seed: int, prompt: Prompt, number: int, limit: int, owner: int) -> None:
        self.ids: list[int] = []
        self.limit = limit
        self.owner = owner  # index of its prompt in the batch
        self.words = prompt.words
        self.characters = prompt.characters
        self.ends = prompt.ends
        self.due = 0 if prompt.words is None else 1 + self.tokens(prompt.words)  # when words are counted next
        self.end: End | None = None
        name = repr((seed, tuple(map(int, prompt.key)), int(number)))
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        self.uniforms = np.random.Generator(np.random.Philox(key=key)).random(limit)

    def take(self, token: int, tokenizer: Any, eos: frozenset[int]) -> None:
        """Add a token, and end the draw if it was the last."""
        if token < 0:
            self.end = "non_finite"
        elif token in eos or token in self.ends:
            self.end = "eos"
        else:
            self.ids.append(token)
            if self.words is not None and len(self.ids) >= self.due:
                missing = self.words - whole_words(_decode(tokenizer, self.ids), self.characters)
                if missing <= 0:
                    self.end = "words"
                self.due = len(self.ids) + max(1, self.tokens(missing))
            if self.end is None and len(self.ids) >= self.limit:
                self.end = "tokens"

    def tokens(self, words: int) -> int:
        """The fewest tokens that usually end this many words: a token rarely ends two, but has several characters."""
        return words // CHARACTERS if self.characters else words


def whole_words(text: str, characters: bool = False) -> int:
    """Number of complete words of an unfinished text: words (`units`) that are followed by another or by whitespace."""
    words = count_units(text, characters)
    return words if not words or text[-1].isspace() else words - 1


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


def _run(
    lm: LanguageModel | Seq2SeqModel, ids: Sequence[Sequence[int]], rows: Sequence[_Draw], sampling: Sampling
) -> None:
    """Sample all tokens of a batch of draws."""
    if not rows:
        return
    eos = _eos(lm)
    longest = max(row.limit for row in rows)
    batch = _Answers(lm, ids, longest) if isinstance(lm, Seq2SeqModel) else _Continuations(lm, ids, longest)
    logits = batch.first()
    owners = torch.tensor([row.owner for row in rows], device=lm.device)
    batch.keep(owners)
    logits = logits[owners.to(logits.device)]
    uniforms = torch.from_numpy(np.stack([np.pad(row.uniforms, (0, longest - row.limit)) for row in rows]))
    uniforms = uniforms.to(logits.device)
    live = list(rows)
    compact = COMPACT if length_rule(lm.model).any_length else 0.0  # a finished row must not be read any further
    for step in range(longest):
        tokens = sample_tokens(logits, sampling, uniforms[:, step])
        for row, token in zip(live, tokens.tolist(), strict=True):
            if row.end is None:
                row.take(token, lm.tokenizer, eos)
        unfinished = [place for place, row in enumerate(live) if row.end is None]
        if not unfinished:
            return
        if len(live) - len(unfinished) >= max(1.0, compact * len(live)):
            live = [live[place] for place in unfinished]
            kept = torch.tensor(unfinished, device=lm.device)
            batch.keep(kept)
            kept = kept.to(tokens.device)
            tokens, uniforms = tokens[kept], uniforms[kept]
        logits = batch.next(tokens.clamp_min(0).to(lm.device))


def _eos(lm: LanguageModel | Seq2SeqModel) -> frozenset[int]:
    """Token ids that end a text, from the configurations of the model and the tokenizer."""
    model: Any = lm.model
    settings = [getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
    settings += [getattr(model.config, "eos_token_id", None), getattr(lm.tokenizer, "eos_token_id", None)]
    return frozenset(
        int(token)
        for value in settings
        if value is not None
        for token in (value if isinstance(value, list) else [value])
    )


@dataclass(slots=True)
class _Continuations:
    """A batch of prompts in a causal model, with the cache of the tokens read so far."""

    lm: LanguageModel
    ids: Sequence[Sequence[int]]
    limit: int  # of new tokens
    cache: Any = field(init=False)
    mask: Tensor | None = field(init=False, default=None)  # None if no prompt is padded, which saves work
    parameters: frozenset[str] = field(init=False)
    rule: LengthRule = field(init=False)
    read: Tensor | None = field(init=False, default=None)  # all tokens of each row; None if no length needs them again

    def __post_init__(self) -> None:
        self.parameters = _forward_parameters(self.lm.model)
        self.rule = length_rule(self.lm.model)
        self._empty_cache()

    def _empty_cache(self) -> None:
        self.cache = make_cache(self.lm.model, max(map(len, self.ids)) + self.limit)

    def first(self) -> Tensor:
        """Read the prompts, padded on the left; logits of the next token, (prompts, vocabulary)."""
        longest = max(map(len, self.ids))
        padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in self.ids], device=self.lm.device)
        lengths = torch.tensor([len(ids) for ids in self.ids], device=self.lm.device)
        if (lengths < longest).any():
            self.mask = (torch.arange(longest, device=self.lm.device) >= longest - lengths[:, None]).long()
        elif not self.rule.are_alike([longest, longest + self.limit]):  # then no prompt of the batch is padded
            self.read = padded
        return self._ask(padded)

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only; a row may be repeated."""
        self.cache.reorder_cache(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        self.read = None if self.read is None else self.read[rows]

    def next(self, tokens: Tensor) -> Tensor:
        """Read a token a row, (rows,); logits of what comes next, (rows, vocabulary).

        Where a longer text has other position embeddings, the rows are read again from the start.
        """
        if self.read is not None:
            self.read = torch.cat([self.read, tokens[:, None]], 1)
            length = self.read.shape[1]
            if not self.rule.are_alike([length - 1, length]):
                self._empty_cache()
                return self._ask(self.read)
        if self.mask is not None:
            self.mask = functional.pad(self.mask, (0, 1), value=1)
        return self._ask(tokens[:, None])

    def _ask(self, ids: Tensor) -> Tensor:
        settings: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in self.parameters else {}
        if self.mask is not None:
            settings["attention_mask"] = self.mask
            if "position_ids" in self.parameters:
                settings["position_ids"] = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = self.lm.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **settings)
        return output.logits[:, -1]


@dataclass(slots=True)
class _Answers:
    """A batch of texts in a sequence-to-sequence model: encoded once, then decoded token by token."""

    lm: Seq2SeqModel
    ids: Sequence[Sequence[int]]
    limit: int  # of new tokens
    cache: Any = field(init=False)
    mask: Tensor = field(init=False)
    encoded: Tensor = field(init=False)

    def __post_init__(self) -> None:
        _forward_parameters(self.lm.model)
        self.cache = make_cache(self.lm.model, self.limit)  # the first position is the decoder start token

    def first(self) -> Tensor:
        """Encode the texts, padded on the right; logits of the first token, (texts, vocabulary)."""
        model: Any = self.lm.model
        longest = max(map(len, self.ids))
        padded = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in self.ids], device=self.lm.device)
        lengths = torch.tensor([len(ids) for ids in self.ids], device=self.lm.device)
        self.mask = (torch.arange(longest, device=self.lm.device) < lengths[:, None]).long()
        self.encoded = model.get_encoder()(input_ids=padded, attention_mask=self.mask).last_hidden_state
        start = torch.tensor([_decoder_start(model)], device=self.lm.device)
        return self._ask(start.expand(len(self.ids), -1))

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only; a row may be repeated."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.encoded = self.encoded[rows.to(self.encoded.device)]

    def next(self, tokens: Tensor) -> Tensor:
        """Read a token a row, (rows,); logits of what comes next, (rows, vocabulary)."""
        return self._ask(tokens[:, None])

    def _ask(self, ids: Tensor) -> Tensor:
        output = self.lm.model(
            decoder_input_ids=ids,
            encoder_outputs=(self.encoded,),
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]


def _forward_parameters(model: Any) -> frozenset[str]:
    """Parameter names of a model's forward method.

    Raises:
        UserError: it has no cache parameter.
    """
    names = frozenset(inspect.signature(model.forward).parameters)
    if "past_key_values" not in names:
        raise UserError(f"{type(model).__name__} cannot be sampled from: it takes no past_key_values")
    return names


def _decoder_start(model: Any) -> list[int]:
    """The first ids of the decoder: its start token and, in some models, a forced second one."""
    configs = (model.generation_config, model.config)

    def token_named(name: str) -> int | None:
        return next((v for v in (getattr(source, name, None) for source in configs) if isinstance(v, int)), None)

    starts = map(token_named, ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((token for token in starts if token is not None), 0)
    forced = token_named("forced_bos_token_id")
    return [start] if forced is None else [start, forced]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of the next token: temperature, then top k, then top p of these.

    Raises:
        UserError: a value outside its limits.
    """

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # the k likeliest tokens; None: all
    top_p: float = 1.0  # the likeliest of these that together have this share of their probability
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, or null for no limit, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


def sample_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the distribution function, in the order of the token ids.

    Args:
        logits: (rows, vocabulary), any floating dtype.
        sampling: temperature, top k, top p: applied in this order in float32, as in transformers. Of tokens that tie
            for rank k, some are used.
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        Token ids, (rows,); -1 if the logits are not finite. Rounding does not change the order of the ids, unlike that
        of the probabilities, so only a uniform number at the boundary of a token can give another token.
    """
    values = logits.float()
    if sampling.temperature == 0:
        best, tokens = values.max(1)
        return tokens.masked_fill(~best.isfinite(), -1)
    values = values / sampling.temperature
    ids: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < values.shape[1]:
        values, ids = values.topk(sampling.top_k, dim=1)
    elif sampling.top_p < 1:
        values, ids = values.sort(dim=1, descending=True)
    p = values.softmax(1)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(1) - p >= sampling.top_p, 0.0)  # keeps the first, and NaN
    if ids is not None:
        ids, order = ids.sort(dim=1)
        p = p.gather(1, order)
    below = p.double().cumsum(1)
    total = below[:, -1:]
    sought = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(below, sought, right=True).clamp_max(p.shape[1] - 1)
    tokens = (place if ids is None else ids.gather(1, place)).squeeze(1)
    return tokens.masked_fill(~total.squeeze(1).isfinite(), -1)
