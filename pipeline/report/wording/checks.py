"""The diagnostics of a selection as checks: a title names the subject, a sentence gives the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pipeline.audit.summary import BlindDiagnostic, Diagnostic, ShareDiagnostic, Summary
from pipeline.report.contents import Check, CheckVerdict, Light, SelectionReport

TITLES = {
    "blind": "Blind test",
    "resolution": "Number of calibration documents",
    "overlap": "Overlap between roles",
    "near_copies": "Near-duplicates",
    "groups": "Dependence within groups",
    "duplicates": "Repeated ids",
    "truncated": "Truncation",
    "fine_tuned": "Documents of adapters and prefixes",
    "sign_symmetry": "Symmetry of signs",
    "weighting": "Weights",
    "tail": "Tail check",
    "families": "Families of near-duplicates",
}
"""The subject of each diagnostic; its result is in its colour and its sentence."""

TITLES_OF_VERSIONS = {**TITLES, "blind": "Unseen documents", "resolution": "Shortest possible list"}
"""The same where the published versions of documents are ranked among their other versions."""

Result = TypeVar("Result", Light, Check)


def n_versions(summary: Summary) -> int | None:
    """Versions of a document, at most, of an answer by the ranks of published versions; None of every other."""
    versions = summary.details.get("versions")
    return None if versions is None else int(versions)


def checks(summary: Summary) -> list[Check]:
    """The diagnostics of a selection; failed ones first."""
    titles = TITLES if n_versions(summary) is None else TITLES_OF_VERSIONS
    shown = [
        Check(name=name, title=titles[name], verdict=_verdict(diagnostic), sentence=diagnostic.sentence)
        for name, diagnostic in summary.diagnostics.by_name().items()
    ]
    return sorted(shown, key=lambda check: check.verdict != "failed")


def _verdict(diagnostic: Diagnostic) -> CheckVerdict:
    if isinstance(diagnostic, ShareDiagnostic) and diagnostic.share:
        return "limited"
    if diagnostic.ok is None:
        return "inconclusive" if isinstance(diagnostic, BlindDiagnostic) else "noted"
    if isinstance(diagnostic, BlindDiagnostic) and diagnostic.outcome == "not tested":
        return "noted"  # not needed
    if diagnostic.ok:
        return "passed"
    return "limited" if diagnostic.about_power else "failed"


# --- what several selections have in common


def common_lights(selections: Sequence[SelectionReport]) -> list[tuple[tuple[str, ...], list[Light]]]:
    """The notes that several selections share, and what all passed; failed checks stand with each selection.

    A check that some selections alone passed is none of them: a card lists these in one line.
    """
    shared = _shared(
        {
            selection.summary.name: [light for light in selection.brief.lights if light.colour != "red"]
            for selection in selections
        }
    )
    every = len(selections)
    noted = ((names, [light for light in lights if len(names) == every or light.reason]) for names, lights in shared)
    return [(names, lights) for names, lights in noted if lights]


def common_checks(selections: Sequence[SelectionReport]) -> list[tuple[tuple[str, ...], list[Check]]]:
    """The checks in full that several selections have in common; failed ones stand with each selection."""
    return _shared(
        {
            selection.summary.name: [check for check in selection.checks if check.verdict != "failed"]
            for selection in selections
        }
    )


def _shared(shown: Mapping[str, Sequence[Result]]) -> list[tuple[tuple[str, ...], list[Result]]]:
    """The results of at least two selections, by the names of the selections that have them."""
    named: dict[Result, list[str]] = {}
    for name, results in shown.items():
        for result in results:
            named.setdefault(result, []).append(name)
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result, names in named.items():
        if len(names) > 1:
            groups.setdefault(tuple(names), []).append(result)
    return list(groups.items())


def common_notes(selections: Sequence[SelectionReport], remarks: Sequence[str]) -> dict[str, list[str]]:
    """What is to be noted of the run or of several selections, each once, with the names of these selections.

    Args:
        selections: of the run.
        remarks: of the run, which come first.
    """
    named: dict[str, list[str]] = {remark: [] for remark in remarks}
    for selection in selections:
        for caution in selection.answer.cautions:
            named.setdefault(caution, []).append(selection.summary.name)
    return {text: names for text, names in named.items() if text in remarks or len(names) > 1}
