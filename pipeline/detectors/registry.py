"""The registered detectors, and the requirements of a choice of them.

A new family of detectors is a new module, imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.kinds import Capability, InputKind
from pipeline.detectors import (
    camia,
    column,
    continuations,
    deviation,
    gradient,
    knockoff,
    likelihood,
    pairs,
    prefix,
    samia,
)
from pipeline.detectors.base import (
    Continued,
    Detector,
    Pass,
    Prefix,
    detector_modules,
    detector_names,
    is_detector,
    parse,
    plan_passes,
)
from pipeline.detectors.plugins import Plugin, check_reaches_workers, fingerprint_of_plugins, imported, load_installed
from pipeline.errors import UserError

FAMILIES = (likelihood, pairs, gradient, knockoff, deviation, prefix, samia, continuations, camia, column)


def parse_detectors(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The detectors in a configuration; a list of values gives one column per value.

    Entry points of other packages are loaded only if a name is not registered.

    Args:
        entries: names, or {name: {argument: value or list of values}}.

    Raises:
        UserError: an unknown name or argument, a value outside its limits, or the same column twice.
    """
    if not all(map(is_detector, _names_in(list(entries)))):
        load_installed()
    return parse(entries)


@dataclass(frozen=True, slots=True)
class DetectorChoice:
    """The detectors of a configuration in the form that is sent to workers."""

    entries: tuple[str | dict[str, dict[str, Any]], ...]

    def parse(self) -> tuple[Detector, ...]:
        """The detectors. Raises UserError as `parse_detectors`."""
        return parse_detectors(self.entries)

    def fingerprint(self) -> list[str]:
        """The columns, which identify detectors independent of their notation, and columns with changed sign."""
        return [f"{'-' * (one.arguments.get('higher') == 'nonmember')}{one.column}" for one in self.parse()]


def _names_in(entry: Any) -> Iterator[str]:
    """Possible detector names in an entry, including base detectors."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for one in entry:
            yield from _names_in(one)
    elif isinstance(entry, dict):
        for name, arguments in entry.items():
            yield str(name)
            yield from _names_in((arguments or {}).get("base") if isinstance(arguments, dict) else None)


@dataclass(frozen=True, slots=True)
class PluginCode:
    """External code and files that scores depend on; a worker loads them before it parses the detectors."""

    plugins: tuple[Plugin, ...]  # imported by the configuration
    digests: Mapping[str, str]  # by file or package, including entry points

    def fingerprint(self) -> dict[str, str]:
        """The digests."""
        return dict(self.digests)


def plugin_code(entries: Sequence[str], detectors: Sequence[Detector]) -> PluginCode | None:
    """External code and files that scores of these detectors depend on; None if there are none.

    Args:
        entries: setting `import`.
        detectors: detectors of the configuration.
    """
    plugins = imported(entries)
    digests = fingerprint_of_plugins(plugins, detector_modules(detectors).values())
    return PluginCode(plugins, digests) if digests else None


def check_workers_know(entries: Sequence[str], detectors: Sequence[Detector]) -> None:
    """Check that workers load every detector.

    Raises:
        UserError: a detector is defined in a notebook or script.
    """
    plugins = imported(entries)
    for name, module in detector_modules(detectors).items():
        check_reaches_workers(f"detector {name}", module, plugins)


def count_draws(detectors: Sequence[Detector]) -> int:
    """Number of paraphrases per document that the detectors read; 0 for none."""
    return max((needed.draw for needed in plan_passes(detectors)), default=0)


def needed_adapters(detectors: Sequence[Detector]) -> list[str]:
    """The names of the adapters that the detectors need, sorted."""
    return sorted({needed.adapter for needed in plan_passes(detectors)} - {""})


def needed_prefixes(detectors: Sequence[Detector]) -> list[Prefix]:
    """The prefixes that the detectors need, sorted."""
    return sorted({needed.prefix for needed in plan_passes(detectors) if needed.prefix is not None}, key=str)


def needed_continuations(detectors: Sequence[Detector]) -> dict[Continued, int]:
    """The continuations that the detectors need -> maximum number of draws."""
    planned = plan_passes(detectors).items()
    return {needed.continued: max(map(int, draws)) for needed, draws in planned if needed.continued}


def needed_capabilities(detector: Detector, model: str | None = None) -> frozenset[Capability]:
    """What a detector needs of the documents and of the models, by its passes.

    Args:
        detector: the detector.
        model: only passes of this model, `target` or `reference`; default: of both.
    """
    needs = {Capability.PAIR} if detector.same_tokens else set()
    if not detector.windows:
        needs.add(Capability.WHOLE)
    for needed, statistics in detector.needs.items():
        if model in (None, needed.model):
            needs |= _pass_capabilities(needed, statistics)
    return frozenset(needs)


def _pass_capabilities(needed: Pass, statistics: frozenset[str]) -> set[Capability]:
    forward = needed.kind == "forward"
    stated = {
        Capability.FORWARD: forward and not needed.part,
        Capability.PART: bool(needed.part),
        Capability.CAPTION: bool(needed.part) and needed.caption == "given",
        Capability.DISTRIBUTION: forward and bool(statistics - {"log_prob"}),
        Capability.GRADIENT: needed.kind == "gradient",
        Capability.REPEATED: needed.text == "repeated",
        Capability.CHANGED: needed.text not in ("plain", "repeated"),
        Capability.PARAPHRASED: needed.draw > 0,
        Capability.CONTINUED: needed.kind == "generate" or needed.continued is not None,
        Capability.SPLIT: needed.continued is not None and needed.continued.prefix_ratio != Continued().prefix_ratio,
        Capability.TRAINED: bool(needed.adapter),
        Capability.PRECEDED: needed.kind == "count" or needed.prefix is not None,
    }
    return {capability for capability, needs in stated.items() if needs}


_MOST_NAMED = 12
"""Detectors in a message."""


def detectors_for(kind: InputKind, first: str = "") -> str:
    """The registered detectors that score documents, or ask models, of a kind, as a phrase; empty if there are none.

    Args:
        kind: kind of the documents or of a model.
        first: name of the detector to begin with, if it is one of them.
    """
    whole: list[str] = []
    parted: list[str] = []
    for name in sorted(detector_names(), key=lambda name: name != first):
        for names, entry in ((whole, name), (parted, {name: {"part": "description"}})):
            try:
                (detector,) = parse([entry])
            except UserError:  # no such argument, or needs that the function of a plugin refuses
                continue
            if detector.needs and needed_capabilities(detector) <= kind.offers:
                names.append(name)
    names = whole or parted
    if not names:
        return ""
    shown = ", ".join(names[:_MOST_NAMED]) + (f" or {more} more" if (more := len(names) - _MOST_NAMED) > 0 else "")
    if whole:
        return f"take {shown}"
    return f"take {{{names[0]}: {{part: description}}}}, or another of {shown} with part"
