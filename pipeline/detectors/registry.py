"""The detectors that a configuration can name, and what a choice of them needs.

A new family of detectors is one more file, imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.detectors import (
    camia,
    column,
    deviation,
    draws,
    gradient,
    knockoff,
    learnt,
    likelihood,
    pairs,
    prefix,
    samia,
)
from pipeline.detectors.base import Continued, Detector, Prefix, is_detector, modules_of, parse, plan_passes
from pipeline.detectors.learnt import learnt_fingerprints, with_contents
from pipeline.detectors.plugins import Plugin, check_reaches_workers, fingerprint_of_plugins, imported, load_installed

FAMILIES = (likelihood, pairs, gradient, knockoff, deviation, prefix, samia, draws, camia, learnt, column)


def parse_detectors(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The detectors that a config names; a list of values gives a column each.

    A name that is not registered may be one of another package: only then are entry points loaded.

    Args:
        entries: Names, or {name: {argument: value or list of values}}.

    Raises:
        UserError: an unknown name or argument, a value outside its limits, or the same column twice.
    """
    if not all(map(is_detector, _names_in(list(entries)))):
        load_installed()
    return parse(entries)


@dataclass(frozen=True, slots=True)
class DetectorChoice:
    """The detectors of a configuration, as it names them: what a worker on another machine is told."""

    entries: tuple[str | dict[str, dict[str, Any]], ...]

    @classmethod
    def of(cls, entries: Sequence[str | dict[str, dict[str, Any]]]) -> DetectorChoice:
        """The choice that a configuration states, with the files that it names. Raises ValueError: one is gone."""
        return cls(tuple(with_contents(list(entries))))

    def parse(self) -> tuple[Detector, ...]:
        """The detectors. Raises UserError as `parse_detectors`."""
        return parse_detectors(self.entries)

    def fingerprint(self) -> list[str]:
        """The columns, which tell detectors apart however a configuration writes them, and whose sign is changed."""
        return [f"{'-' * (one.arguments.get('higher') == 'nonmember')}{one.column}" for one in self.parse()]


def _names_in(entry: Any) -> Iterator[str]:
    """All that may be the name of a detector in an entry, also of one that another builds on."""
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
    """What is outside this program and scores depend on: what a worker loads before it knows the detectors."""

    plugins: tuple[Plugin, ...]  # that the configuration imports
    digests: Mapping[str, str]  # by file or package, also of packages without an import and of files of `learnt`

    def fingerprint(self) -> dict[str, str]:
        """The digests."""
        return dict(self.digests)


def plugin_code(entries: Sequence[str], detectors: Sequence[Detector]) -> PluginCode | None:
    """What scores of these detectors depend on outside this program; None where that is nothing.

    Args:
        entries: `import` of the configuration.
        detectors: that it scores.
    """
    plugins = imported(entries)
    digests = {**fingerprint_of_plugins(plugins, modules_of(detectors).values()), **learnt_fingerprints(detectors)}
    return PluginCode(plugins, digests) if digests else None


def check_workers_know(entries: Sequence[str], detectors: Sequence[Detector]) -> None:
    """Make sure that workers load every detector.

    Raises:
        UserError: one that was defined in a notebook or script.
    """
    plugins = imported(entries)
    for name, module in modules_of(detectors).items():
        check_reaches_workers(f"detector {name}", module, plugins)


def draws_of(detectors: Sequence[Detector]) -> int:
    """How many paraphrases of each document the detectors read; 0 when none."""
    return max((needed.draw for needed in plan_passes(detectors)), default=0)


def adapters_of(detectors: Sequence[Detector]) -> list[str]:
    """The names of the adapters that the detectors need, sorted."""
    return sorted({needed.adapter for needed in plan_passes(detectors)} - {""})


def prefixes_of(detectors: Sequence[Detector]) -> list[Prefix]:
    """What stands before documents for the detectors, sorted."""
    return sorted({needed.prefix for needed in plan_passes(detectors) if needed.prefix is not None}, key=str)


def sampled_of(detectors: Sequence[Detector]) -> dict[Continued, int]:
    """How documents are continued for the detectors, and how many draws of each kind they read at most."""
    planned = plan_passes(detectors).items()
    return {needed.continued: max(map(int, draws)) for needed, draws in planned if needed.continued}
