"""The probe of an opened model: it is causal, and the logits of a text depend on nothing but its tokens.

BERT and similar models open as "ForCausalLM", and then predict a token that they have read. Three properties are tried
on a short text, which takes two forward passes: another last token moves no earlier logits; the text beside a longer
one, padded as in the passes, gives the logits of the text alone; and so does the text a second time. A picture model
reads the text behind a picture.

Code that ships with a model, and attention in chunks, may treat longer texts in another way: such models also read one
of `MANY` tokens. No other architecture of transformers differs there.

In float32 a difference of up to `TOLERANCE` is rounding. In half precision, and with quantized weights, each batch is
rounded in another way. These models are tried in a float32 copy with few layers (`pipeline.models.copies`), as the
three properties are those of the code and the configuration; and themselves, in wider limits, for all but the second.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError, error_line, foreign_as_errors
from pipeline.models.copies import VOCABULARY, few_layers, has_experts, is_exact
from pipeline.models.devices import check_lost, out_of_memory, quiet_panics
from pipeline.models.lengths import length_rule
from pipeline.models.opened import LanguageModel, embedding_rows
from pipeline.models.picture_prompts import padded_prompts, picture_prompt, picture_token

if TYPE_CHECKING:
    from torch import Tensor, nn

LENGTH, LONGER = 12, 16
"""Tokens of the text, and of the longer one beside it. A model that reads both directions within blocks of tokens is
recognized too, as the last of 12 tokens begins no block of another length than 11."""

MANY = 150
"""Tokens of the text for a model that may treat longer texts in another way; its last one begins no block either."""

TOLERANCE = 1e-4
"""Maximum difference of logits by rounding in float32, relative to the largest logit, or to 1."""

ROUNDING, MOST_ROUNDING = 0.02, 0.10
"""Maximum difference in half precision without a warning, and with one, in standard deviations of the logits."""

MOST_ROUTING = 0.50
"""As `MOST_ROUNDING`, for experts: rounding decides to which of two a token goes. The copy must be causal."""

PLANNED_WEIGHTS = 1 << 25
"""Maximum number of weights of a copy for a check without the model."""

TEXTS = (
    "A quiet river runs past the old stone house, while two red boats lie in green grass under tall trees.",
    "Most people who came early found warm bread, fresh fruit and strong coffee on a long table near our door.",
)
"""The second is tried if the first fails, as even float32 may round a token to another expert."""

_TELLING: dict[str, Any] = {"is_decoder": False, "is_causal": False, "causal": False, "prefix_lm": True}
"""Settings that explain why a model is not causal. Those of bidirectional attention have several values."""

_log = logging.getLogger(__name__)
_proven: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Read = Callable[[Sequence[Sequence[int]]], "Tensor"]
"""Token ids of texts -> their logits, (texts, longest, vocabulary) float32 on the CPU."""

Texts = tuple[list[int], list[int], list[int]]
"""Token ids of a text, of the same with another last token, and of a longer text."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How the probe reads texts with a model."""

    read: Read
    attempts: tuple[Texts, ...]
    before: int = 0  # positions of a picture and its instruction


def check_causal(lm: LanguageModel, shown: str) -> None:
    """Check once that a model is causal and that its logits depend on nothing but the tokens of a text.

    Args:
        lm: model; without weights, or with weights that DeepSpeed has partitioned, it is not checked.
        shown: name of the model, for the error.

    Raises:
        UserError: they do; the message states the class and the reason.
    """
    if lm.model in _proven or lm.device.type == "meta" or any(hasattr(one, "ds_id") for one in lm.model.parameters()):
        return
    name = type(lm.model).__name__
    try:
        with foreign_as_errors():
            fault = _first_fault(lm, float32_fault) if is_exact(lm.model) else _half_fault(lm, shown)
    except UserError:
        raise
    except Exception as error:  # any exception of a model's code
        check_lost(error)
        if out_of_memory(error):
            raise
        reason = error_line(error, 200) or type(error).__name__
        raise UserError(f"model {shown}: {name} cannot read a text of {LENGTH} tokens: {reason}") from error
    if fault is not None:
        raise UserError(f"model {shown}: {name} {fault}{_explained(lm.model.config)}")
    _proven.add(lm.model)


def check_code(empty: Any, tokenizer: Any, shown: str) -> None:
    """Check before weights are read that a model is causal, in a small copy; one that would be large is not tried.

    Args:
        empty: model of transformers, whose weights are not read.
        tokenizer: its tokenizer.
        shown: name of the model, for the error.

    Raises:
        UserError: it is not causal.
    """
    import torch

    small = few_layers(empty, most=PLANNED_WEIGHTS)
    if small is None:
        return
    try:
        with foreign_as_errors():
            fault = _first_fault(LanguageModel(small, tokenizer, torch.device("cpu"), None), float32_fault)
    except Exception:  # any exception of a model's code, which opening reports
        return
    if fault is not None and fault.startswith(_CHANGED):
        raise UserError(f"model {shown}: {type(empty).__name__} {fault} (random weights){_explained(empty.config)}")


def _first_fault(lm: LanguageModel, find: Callable[[Reader], str | None]) -> str | None:
    """The fault of a model in a short text, or else in a long one if it may treat that in another way."""
    fault = find(choose_reader(lm))
    if fault is not None or not _may_switch(lm.model) or (lm.max_tokens or MANY) <= LONGER:
        return fault
    try:
        fault = find(choose_reader(lm, MANY))
    except Exception as error:  # a model may read no text as long, or the device's memory not hold it
        check_lost(error)
        return None
    return None if fault is None else f"{fault} (in a text of up to {MANY} tokens)"


def _may_switch(model: Any) -> bool:
    """Whether a model may read longer texts in another way: code from elsewhere, or attention in chunks as Reformer."""
    known = type(model).__module__.startswith("transformers.models.")
    return not known or any(name.endswith("attn_chunk_length") for name in vars(model.config.get_text_config()))


def _explained(config: Any) -> str:
    """The settings of a configuration that explain why a model is not causal."""
    text = config.get_text_config()
    telling = {name: value for name, value in _TELLING.items() if getattr(text, name, None) is value}
    bidirectional = {name: value for name, value in vars(text).items() if "bidirectional" in name and value}
    stated = [f"{name}: {str(value).lower()}" for name, value in {**telling, **bidirectional}.items()]
    return f"; its config.json states {', '.join(stated)}" if stated else ""


# --- texts and their logits


def choose_reader(lm: LanguageModel, length: int = LENGTH) -> Reader:
    """The reader of a model: of texts alone, or behind a picture for a model with a processor.

    Args:
        lm: model.
        length: tokens of the text.
    """
    rows = embedding_rows(lm.model)
    if lm.processor is None:
        return Reader(_by_frequencies(lm, partial(text_logits, lm)), tuple(_attempts(lm, rows, None, length)))
    from PIL import Image

    prompt = picture_prompt(lm, Image.new("RGB", (64, 64), (90, 140, 60)))

    def read(ids: Sequence[Sequence[int]]) -> Tensor:
        inputs, mask = padded_prompts(lm, [prompt] * len(ids), ids)
        return _logits(lm.model, {**inputs, "attention_mask": mask})

    before = len(prompt.ids)
    attempts = tuple(_attempts(lm, rows, picture_token(lm.model.config), length))
    return Reader(_by_frequencies(lm, read, before), attempts, before)


def _by_frequencies(lm: LanguageModel, read: Read, before: int = 0) -> Read:
    """`read` by texts that may share a batch (`pipeline.models.lengths`); `before` is what stands before each."""
    import torch

    rule = length_rule(lm.model)

    def read_groups(ids: Sequence[Sequence[int]]) -> Tensor:
        if rule.are_alike([before + len(row) for row in ids]):
            return read(ids)
        longest = max(map(len, ids))
        rows = [torch.nn.functional.pad(read([row])[0], (0, 0, 0, longest - len(row))) for row in ids]
        return torch.stack(rows)

    return read_groups


def _attempts(lm: LanguageModel, rows: int, picture: int | None, most: int = LENGTH) -> Iterator[Texts]:
    """The texts of each attempt, of at most so many tokens, without special tokens and the picture token."""
    left_out = {*getattr(lm.tokenizer, "all_special_ids", ()), picture}
    longest = most + LONGER - LENGTH
    longer = longest if lm.max_tokens is None or picture is not None else max(2, min(longest, lm.max_tokens))
    length = max(2, longer - (LONGER - LENGTH))
    for number, text in enumerate(TEXTS):
        read: Sequence[int] = ()  # for a tokenizer that knows no English, as of proteins
        with suppress(Exception), foreign_as_errors(), quiet_panics():
            read = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        others = [(number + 7 * step) % rows for step in range(8 * longest)]
        ids = [one for one in dict.fromkeys([*read, *others]) if one < rows and one not in left_out]
        ids = (ids or [0]) * (longest + 1)  # of a tiny vocabulary
        yield ids[:length], [*ids[: length - 1], ids[length]], ids[1 : longer + 1]


def probe_logits(lm: LanguageModel, more: Sequence[int] = (), decodes: bool = False) -> Tensor:
    """Logits of the text of the probe: (1, tokens, vocabulary) float32 on the CPU.

    Args:
        lm: model.
        more: further token ids, of which as many are read as the model has positions.
        decodes: whether the model is an encoder-decoder model, which then reads the text on both sides.
    """
    import torch

    ids = next(_attempts(lm, embedding_rows(lm.model), None))[0]
    tokens = torch.tensor([[*ids, *more][: lm.max_tokens]], device=lm.device)
    return _logits(lm.model, {"input_ids": tokens, **({"decoder_input_ids": tokens} if decodes else {})})


def text_logits(lm: LanguageModel, ids: Sequence[Sequence[int]]) -> Tensor:
    """Logits of texts, padded as in a forward pass: (texts, longest, vocabulary) float32 on the CPU.

    Raises:
        ValueError: the model gives logits of other positions.
    """
    import torch

    longest = max(map(len, ids))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], device=lm.device)
    return _logits(lm.model, {"input_ids": padded})


def _logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    import torch

    with length_rule(model).alone(), torch.inference_mode():
        logits: Tensor = model(**inputs, use_cache=False).logits
    shape = tuple(inputs["input_ids"].shape)
    if tuple(logits.shape[:2]) != shape:
        raise ValueError(f"its logits have the shape {tuple(logits.shape)}, and the ids {shape}")
    return logits.float().cpu()


# --- comparison


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference of two tensors of logits; two NaNs and two equal infinities are equal."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf")).max())


def rounding_error(logits: Tensor) -> float:
    """Largest difference of such logits by rounding in float32."""
    finite = logits[logits.isfinite()]
    return TOLERANCE * max(1.0, float(finite.abs().max()) if len(finite) else 0.0)


@dataclass(frozen=True, slots=True)
class _Differences:
    """Largest differences of logits in one attempt."""

    changed: float  # of the tokens before one that is another
    again: float  # the first and the second time
    batched: float  # alone and beside a longer text
    limit: float  # by rounding in float32
    deviation: float  # standard deviation of the logits, > 0
    nan: bool  # whether a logit is NaN


_CHANGED = "is no causal language model: another last token moves the logits of the tokens before it"
_AGAIN = "gives the same text other logits the second time: they move"
_NAN = "gives logits that are NaN"
_BATCHED = "gives a text other logits beside a longer one: they move"


def _differences(reader: Reader, texts: Texts, repeated: bool) -> _Differences:
    """The differences of one attempt.

    A text that differs in the batch is read again, and alone with another last token, to find the reason: padding may
    change the attention.
    """
    ids, other, longer = texts
    end = reader.before + len(ids)
    alone = reader.read([ids])[0]
    batch = reader.read([ids, other, longer])
    limit, finite = rounding_error(alone), alone[alone.isfinite()]
    batched, again = largest_difference(batch[0, :end], alone), 0.0
    changed = largest_difference(batch[0, : end - 1], batch[1, : end - 1])
    if repeated or batched > limit:
        again = largest_difference(reader.read([ids])[0], alone)
    if batched > limit and not repeated:
        changed = max(changed, largest_difference(reader.read([other])[0, : end - 1], alone[: end - 1]))
    deviation = float(finite.std()) if len(finite) > 1 else 0.0
    nan = bool(alone.isnan().any() or batch.isnan().any())
    return _Differences(changed, again, batched, limit, max(deviation, limit), nan)


def float32_fault(reader: Reader) -> str | None:
    """The property that a model in float32 lacks, as the predicate of a sentence; None if it has all."""
    fault = None
    for texts in reader.attempts:
        moved = _differences(reader, texts, repeated=False)
        kinds = {_AGAIN: moved.again, _CHANGED: moved.changed, _BATCHED: moved.batched}
        fault = next((kind for kind, value in kinds.items() if value > moved.limit), None)
        if fault is None:
            return None
        if moved.nan:
            return _NAN
        fault = f"{fault} by {kinds[fault]:.2g}, and rounding by at most {moved.limit:.1g}"
    return fault


def _half_fault(lm: LanguageModel, shown: str) -> str | None:
    """As `float32_fault`, for logits rounded to half precision, or of quantized weights."""
    import torch

    small = few_layers(lm.model, VOCABULARY if lm.processor is None else None)
    if small is not None:
        fault = _first_fault(replace(lm, model=small, device=torch.device("cpu")), float32_fault)
        if fault is not None:
            layers = small.config.get_text_config().num_hidden_layers
            return f"{fault} (measured in float32 with {layers} layers)"
    routed = small is not None and has_experts(lm.model.config)
    most = MOST_ROUTING if routed else MOST_ROUNDING
    rounded: list[str] = []

    def find(reader: Reader) -> str | None:
        fault, share = _largest_share(reader)
        if share <= ROUNDING or fault is _NAN:
            return fault if fault is _NAN else None
        fault = f"{fault} by {share:.1%} of their standard deviation, and rounding by at most {MOST_ROUNDING:.0%}"
        if share > most:
            return fault
        rounded.append(fault)
        return None

    fault = _first_fault(lm, find)
    if fault is None and rounded:
        warning = "model %s: %s %s: take dtype float32 if that is too much"
        _log.warning(warning, shown, type(lm.model).__name__, rounded[0])
    return fault


def _largest_share(reader: Reader) -> tuple[str, float]:
    """What a model in half precision does, and the difference of its logits in their standard deviations.

    Of several attempts it is the one with the smallest difference; one without a difference ends them.
    """
    fault, share = "", float("inf")
    for texts in reader.attempts:
        moved = _differences(reader, texts, repeated=True)
        kind, value = max(((_CHANGED, moved.changed), (_AGAIN, moved.again)), key=lambda pair: pair[1])
        if moved.nan and value > moved.limit:
            return _NAN, float("inf")
        if value / moved.deviation < share:
            fault, share = kind, value / moved.deviation
        if share <= ROUNDING:
            break
    return fault, share
