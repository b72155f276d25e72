"""Models that compute with other position embeddings for a long batch, and what this means for batches and threads.

Two scalings of rotary position embeddings read the length of the whole batch, including padding, in the forward pass:

- LongRoPE (Phi-3, Phi-4-mini) has one set of frequencies up to `original_max_position_embeddings` and another above.
- Dynamic NTK scaling recomputes the frequencies for each length above `max_position_embeddings`, and keeps them for
  later shorter texts.

Both write the frequencies into the model. A text must have the frequencies of its own length, whatever stands beside
it, was read before it or is read by another thread. `LengthRule` holds such a model to this: texts share a batch only
if their lengths have the same frequencies, and one thread at a time uses the weights, after the frequencies have been
reset. Every pass and the training apply the rule; for other models it changes nothing.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

Item = TypeVar("Item")
Measured = TypeVar("Measured", bound=Sized)
Result = TypeVar("Result")

_SETTINGS = ("rope_parameters", "rope_scaling")
_TWO_SETS = ("longrope", "su")  # su: its name in the first Phi-3 checkpoints
_ROTARY = re.compile(r"rotary|rope", re.IGNORECASE)
_UNKNOWN = 2048  # positions of a model whose configuration does not state them
_CACHED, _FIRST_CACHED = "max_seq_len_cached", "original_max_seq_len"  # of dynamic scaling in transformers
_COPIED = 1 << 18  # maximum elements of a tensor that is copied, for code that overwrites it


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Which texts a model may read in one batch."""

    two_sets: frozenset[int] = frozenset()  # lengths above which a model has a second set of frequencies
    recomputed: frozenset[int] = frozenset()  # lengths above which each length has frequencies of its own
    states: tuple[_State, ...] = ()  # the modules that hold them
    turn: threading.RLock = field(default_factory=threading.RLock)  # of the weights, shared by all copies of a model

    @property
    def any_length(self) -> bool:
        """Whether the frequencies depend on no length."""
        return not self.two_sets and not self.recomputed

    def frequencies(self, length: int) -> tuple[int, ...]:
        """What the frequencies of a text of this length depend on: equal for lengths with the same frequencies."""
        above = (int(length > most) for most in sorted(self.two_sets))
        return (*above, *(max(length, most) for most in sorted(self.recomputed)))

    def are_alike(self, lengths: Sequence[int]) -> bool:
        """Whether texts of these lengths have the same frequencies."""
        return self.any_length or len(set(map(self.frequencies, lengths))) <= 1

    def cuts(self, lengths: Sequence[int]) -> list[slice]:
        """A batch in runs of texts that have the same frequencies, in order; one run for most models and batches."""
        if self.are_alike(lengths):
            return [slice(0, len(lengths))]
        kinds = list(map(self.frequencies, lengths))
        starts = [place for place in range(len(kinds)) if place == 0 or kinds[place] != kinds[place - 1]]
        return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(kinds)], strict=True)]

    def groups(self, items: Sequence[Measured]) -> list[list[Measured]]:
        """Items, whose length is a number of tokens, by their frequencies; the order is kept within each group."""
        groups: dict[tuple[int, ...], list[Measured]] = {}
        for item in items:
            groups.setdefault(self.frequencies(len(item)), []).append(item)
        return [groups[kind] for kind in sorted(groups)]

    def apply(
        self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], lengths: Sequence[int]
    ) -> list[Result]:
        """The results of a pass over each run of `cuts`, in order.

        Args:
            work: pass to run.
            items: texts of a batch.
            lengths: number of tokens of each, with everything that is read before it.
        """
        results = []
        for cut in self.cuts(lengths):
            with self.alone():
                results.append(work(items[cut]))
        return results

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the model while no other thread does, with the frequencies that it had when it was opened."""
        if self.any_length:
            yield
            return
        with self.turn:
            for state in self.states:
                state.restore()
            yield


@dataclass(frozen=True, slots=True)
class _State:
    """A module whose forward pass changes buffers and attributes, and their first values."""

    module: nn.Module
    buffers: Mapping[str, Any]
    attributes: Mapping[str, Any]

    @classmethod
    def capture(cls, module: Any) -> _State:
        """The first state of a module; its forward passes may have changed the present one already."""
        held = {name: value for name, value in module._buffers.items() if value is not None}
        buffers = {name: (value, _small_copy(_first_frequencies(module, name, value))) for name, value in held.items()}
        plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        if _CACHED in vars(module):
            plain[_CACHED] = getattr(module, _FIRST_CACHED, getattr(module, _CACHED))
        return cls(module, buffers, plain)

    def restore(self) -> None:
        """Give the module its first buffers and attributes."""
        module: Any = self.module
        for name, (value, copy) in self.buffers.items():
            present = module._buffers.get(name)
            if copy is None:
                module._buffers[name] = value
            elif value.is_inference() or (present is not None and present.device != value.device):  # or was moved
                module._buffers[name] = copy.clone() if present is None else copy.to(present.device, copy=True)
            else:
                module._buffers[name] = value
                value.copy_(copy)
        for name in [name for name, value in vars(module).items() if name not in self.attributes and _is_number(value)]:
            delattr(module, name)  # the largest length so far of one type of layer
        for name, value in self.attributes.items():
            setattr(module, name, value)


def _first_frequencies(module: Any, name: str, value: Tensor) -> Tensor:
    """The frequencies that transformers keeps beside those of the last pass; `value` for another buffer."""
    if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return value
    first = getattr(module, f"{name.removesuffix('inv_freq')}original_inv_freq", None)
    return value if first is None or first.shape != value.shape else first.to(value.device)


def _small_copy(value: Tensor) -> Tensor | None:
    """A copy that is no inference tensor; None for a large one."""
    import torch

    with torch.inference_mode(False):
        return value.clone() if value.numel() <= _COPIED else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (hasattr(value, "ndim") and value.ndim == 0)


_rules: weakref.WeakKeyDictionary[nn.Module, LengthRule] = weakref.WeakKeyDictionary()
_finding = threading.Lock()


def length_rule(model: Any) -> LengthRule:
    """The rule of a model of transformers, inside of a peft adapter and a DeepSpeed engine, if any."""
    model = getattr(model, "module", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    with _finding:
        if model not in _rules:
            _rules[model] = _find_rule(model)
        return _rules[model]


def share_rule(model: Any, copy: Any) -> None:
    """Let a copy of a model with the same weights follow its rule: one of them is used at a time."""
    rule = length_rule(model)
    twins = dict(zip(model.modules(), copy.modules(), strict=True))
    with _finding:  # the first state is the model's: its present one depends on what it has read
        _rules[copy] = replace(rule, states=tuple(replace(one, module=twins[one.module]) for one in rule.states))


def _find_rule(model: Any) -> LengthRule:
    config = getattr(model, "config", None)
    if config is None:
        return LengthRule()
    two_sets: set[int] = set()
    recomputed: set[int] = set()
    for settings in configurations(config.to_dict()):
        most = settings.get("max_position_embeddings")
        for scaling in _scalings(settings):
            kind = str(scaling.get("rope_type") or scaling.get("type"))
            first = scaling.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
            if kind in _TWO_SETS:
                two_sets.add(first or most or _UNKNOWN)
            elif "dynamic" in kind:
                recomputed.add(min((value for value in (first, most) if value), default=_UNKNOWN))
        if settings.get("use_dynamic_ntk"):  # of Qwen's first code
            recomputed.add(settings.get("seq_length") or most or 0)
    if not two_sets | recomputed:
        return LengthRule()
    return LengthRule(frozenset(two_sets), frozenset(recomputed), _states(model))


def _states(model: Any) -> tuple[_State, ...]:
    return tuple(_State.capture(module) for module in model.modules() if _ROTARY.search(type(module).__name__))


def _scalings(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The scalings of rotary position embeddings in a configuration: one, or one per type of layer."""
    for name in _SETTINGS:
        value = settings.get(name)
        if isinstance(value, Mapping):
            yield value
            yield from (inner for inner in value.values() if isinstance(inner, Mapping))


def configurations(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration as a dictionary, and those of its parts, such as a vision tower."""
    yield settings
    for name, value in settings.items():
        if isinstance(value, Mapping) and name not in _SETTINGS:
            yield from configurations(value)
