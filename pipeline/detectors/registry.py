"""The detectors that a configuration can name, and what a choice of them needs.

A new family of detectors is one more file, imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.detectors import deviation, gradient, knockoff, likelihood, samia
from pipeline.detectors.base import Continued, Detector, Pass, parse

FAMILIES = (likelihood, gradient, knockoff, deviation, samia)


def parse_detectors(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The detectors that a config names; a list of values gives a column each.

    Args:
        entries: Names, or {name: {argument: value or list of values}}.

    Raises:
        UserError: an unknown name or argument, a value outside its limits, or the same column twice.
    """
    return parse(entries)


@dataclass(frozen=True, slots=True)
class DetectorChoice:
    """The detectors of a configuration, as it names them: what a worker on another machine is told."""

    entries: tuple[str | dict[str, dict[str, Any]], ...]

    def parse(self) -> tuple[Detector, ...]:
        """The detectors. Raises UserError as `parse_detectors`."""
        return parse_detectors(self.entries)

    def fingerprint(self) -> list[str]:
        """The columns, which tell detectors apart however a configuration writes them."""
        return [detector.column for detector in self.parse()]


def plan_passes(detectors: Sequence[Detector]) -> dict[Pass, frozenset[str]]:
    """The passes to run, each once, with the union of the statistics that the detectors read of it."""
    planned: dict[Pass, frozenset[str]] = {}
    for needs in (detector.needs for detector in detectors):
        for needed, statistics in needs.items():
            planned[needed] = planned.get(needed, frozenset()) | statistics
    return planned


def draws_of(detectors: Sequence[Detector]) -> int:
    """How many paraphrases of each document the detectors read; 0 when none."""
    return max((needed.draw for needed in plan_passes(detectors)), default=0)


def adapters_of(detectors: Sequence[Detector]) -> list[str]:
    """The names of the adapters that the detectors need, sorted."""
    return sorted({needed.adapter for needed in plan_passes(detectors)} - {""})


def sampled_of(detectors: Sequence[Detector]) -> dict[Continued, int]:
    """How documents are continued for the detectors, and how many draws of each kind they read at most."""
    found = {needed.continued: draws for needed, draws in plan_passes(detectors).items() if needed.continued}
    return {continued: max(map(int, draws)) for continued, draws in found.items()}
