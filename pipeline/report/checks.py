"""The diagnostics of a selection as checks: a title names the subject, a sentence gives the result."""

from __future__ import annotations

from collections.abc import Sequence

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
    "fine_tuned": "Adapter training",
    "sign_symmetry": "Symmetry of signs",
    "weighting": "Weights",
    "tail": "Tail check",
    "families": "Families of near-duplicates",
}
"""The subject of each diagnostic; its result is in its colour and its sentence."""


def checks(summary: Summary) -> list[Check]:
    """The diagnostics of a selection; failed ones first."""
    shown = [
        Check(name=name, title=TITLES[name], verdict=_verdict(diagnostic), sentence=diagnostic.sentence)
        for name, diagnostic in summary.diagnostics.by_name().items()
    ]
    return sorted(shown, key=lambda check: check.verdict != "failed")


def _verdict(diagnostic: Diagnostic) -> CheckVerdict:
    if isinstance(diagnostic, ShareDiagnostic) and diagnostic.share:
        return "limited"
    if diagnostic.ok is None:
        return "inconclusive" if isinstance(diagnostic, BlindDiagnostic) else "noted"
    if diagnostic.ok:
        return "passed"
    return "limited" if diagnostic.about_power else "failed"


# --- what several selections have in common


def common_lights(selections: Sequence[SelectionReport]) -> list[Light]:
    """The lights that all of several selections have in common; failed checks stand with each selection."""
    first = selections[0].brief.lights if len(selections) > 1 else []
    shown = [light for light in first if light.colour != "red"]
    return [light for light in shown if all(light in other.brief.lights for other in selections)]


def common_checks(selections: Sequence[SelectionReport]) -> list[Check]:
    """As `common_lights`, of the checks in full."""
    first = selections[0].checks if len(selections) > 1 else []
    shown = [check for check in first if check.verdict != "failed"]
    return [check for check in shown if all(check in other.checks for other in selections)]


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
