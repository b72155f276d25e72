"""An answer in sentences of one line each, and its diagnostics as checks: shorter than the report, with equal caution.

The title of a check names its subject, and a sentence gives the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeline.answers.stated_bounds import bound_clause, known_claim, sentence, sureness, wrong_claim
from pipeline.answers.summarise import learnt_sentences
from pipeline.checks.diagnostic import BlindDiagnostic, Diagnostic, ShareDiagnostic
from pipeline.checks.registry import CHECK_NAMED
from pipeline.checks.resolution import shortest
from pipeline.report.contents import AnswerText, BriefAnswer, CheckVerdict, Light, SelectionReport, ShownCheck
from pipeline.results.summary import SeriesPlace, Summary
from pipeline.run.conclusion_text import CONTRADICTED
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.selection.procedures import procedure_of
from pipeline.wording import percent

Result = TypeVar("Result", Light, ShownCheck)

MARKS = {"red": "✗", "amber": "△", "grey": "\N{EN DASH}", "green": "✓"}
_ORDER = list(MARKS)


def n_versions(summary: Summary) -> int | None:
    """Maximum number of versions of a document for an answer by ranks of published versions; None for others."""
    versions = summary.details.get("versions")
    return None if versions is None else int(versions)


def checks(summary: Summary) -> list[ShownCheck]:
    """The diagnostics of a selection; failed ones first."""
    shown = [
        ShownCheck(name=name, title=_title(name, summary), verdict=_verdict(diagnostic), sentence=diagnostic.sentence)
        for name, diagnostic in summary.diagnostics.by_name().items()
    ]
    return sorted(shown, key=lambda check: check.verdict != "failed")


def _title(name: str, summary: Summary) -> str:
    """The subject of a check."""
    check = CHECK_NAMED[name]
    return check.title if n_versions(summary) is None else check.title_of_versions or check.title


def _verdict(diagnostic: Diagnostic) -> CheckVerdict:
    if isinstance(diagnostic, ShareDiagnostic) and diagnostic.share:
        return "limited"
    if diagnostic.outcome == Outcome.INCONCLUSIVE:
        return "inconclusive" if diagnostic.decides else "noted"
    if isinstance(diagnostic, BlindDiagnostic) and not diagnostic.tested:
        return "noted"  # not needed
    if diagnostic.outcome == Outcome.PASSED:
        return "passed"
    return "limited" if diagnostic.about_power else "failed"


# --- what several selections have in common


def common_lights(selections: Sequence[SelectionReport]) -> list[tuple[tuple[str, ...], list[Light]]]:
    """The notes that several selections share, and the checks that all passed; failed checks stay with each selection.

    A check that only some selections passed is not included: a card lists these in one line.
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


def common_checks(selections: Sequence[SelectionReport]) -> list[tuple[tuple[str, ...], list[ShownCheck]]]:
    """The complete checks that several selections share; failed ones stay with each selection."""
    return _shared(
        {
            selection.summary.name: [check for check in selection.checks if check.verdict != "failed"]
            for selection in selections
        }
    )


def _shared(shown: Mapping[str, Sequence[Result]]) -> list[tuple[tuple[str, ...], list[Result]]]:
    """The results that at least two selections share, by the names of these selections."""
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
    """The notes on the run or on several selections, each once, with the names of these selections.

    Args:
        selections: selections of the run.
        remarks: notes on the run, which come first.
    """
    named: dict[str, list[str]] = {remark: [] for remark in remarks}
    for selection in selections:
        for caution in selection.answer.cautions:
            if not on_card(caution, selection.brief):
                named.setdefault(caution, []).append(selection.summary.name)
    return {text: names for text, names in named.items() if text in remarks or len(names) > 1}


def on_card(caution: str, brief: BriefAnswer) -> bool:
    """Whether a caution is among the sentences of the first screen."""
    return any(caution in shown for shown in (brief.drawn, brief.weights) if shown is not None)


def brief_answer(summary: Summary, answer: AnswerText, model: str) -> BriefAnswer:
    """The answer of a selection for the first screen.

    Args:
        summary: the summary of the selection.
        answer: sentences of the complete answer.
        model: name of the model, which the page shows elsewhere and the answer omits.
    """
    shown = lights(summary)
    place = "" if summary.series is None else f", {summary.series.clause()}"
    return BriefAnswer(
        question=f"{'trained on' if summary.direction == 'members' else 'not trained on'}, by "
        f"{', '.join(summary.detectors)} ({summary.procedure}{place})",
        selected=f"{summary.n_selected:,} of {summary.n_audit:,}",
        bound=_bound_cell(summary),
        conclusion=summary.conclusion,
        reason=_reason(summary, shown),
        claim=answer.headline.removesuffix(f"{bound_clause(summary)}.").replace(f" of {model}", "") + ".",
        condition=_condition(summary),
        average=_average(summary),
        this_list=_this_list(summary),
        collection=_collection(summary),
        drawn=None if summary.smoothed is None else summary.smoothed.sentence(summary.n_selected),
        weights=" ".join(filter(None, [*learnt_sentences(summary), summary.weighting])) or None,
        lights=shown,
    )


def assumptions(summaries: Iterable[Summary]) -> dict[str, list[str]]:
    """Each assumption once, with the names of the selections that make it."""
    named: dict[str, list[str]] = {}
    for summary in summaries:
        named.setdefault(summary.assumption, []).append(summary.name)
    return named


def next_steps(summaries: Iterable[Summary]) -> dict[str, list[str]]:
    """Each next step once, with the names of the selections that it is of."""
    named: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.next is not None:
            named.setdefault(summary.next, []).append(summary.name)
    return named


def guarantee_on_page(guarantee: str, assumption: str, stated: Mapping[str, Sequence[str]]) -> str:
    """The guarantee of an answer with a reference to its assumption, which the page states once."""
    if not assumption:
        return guarantee
    place = f" of {', '.join(stated[assumption])}" if len(stated) > 1 else ""
    return guarantee.replace(assumption, f"the assumption{place} in section 2.")


def _bound_cell(summary: Summary) -> str:
    bound = summary.bound
    if summary.conclusion == ConclusionValue.CONTRADICTED:
        return "not stated"
    if not summary.n_selected:
        return "none selected"
    if bound is None:
        return "not bounded"
    if bound.wrong_at_most >= summary.n_selected:
        return "possibly all"
    return f"at most {bound.wrong_at_most:,} ({sureness(bound).removesuffix(' confidence')})"


def _reason(summary: Summary, shown: Sequence[Light]) -> str | None:
    """The lights that contradict a guarantee or leave it open."""
    if summary.conclusion == ConclusionValue.INCONCLUSIVE:
        return next(light.label for light in shown if light.name == "blind").lower()
    failed = [light.label.lower() for light in shown if light.colour == "red"]
    return None if summary.conclusion == ConclusionValue.SUPPORTED or not failed else f"failed: {', '.join(failed)}"


# --- the three sentences and their condition


def _condition(summary: Summary) -> str:
    if summary.condition is None:
        return "Nothing is guaranteed: a check contradicts the assumption."
    if not summary.condition:
        return "If the assumption holds, which no check contradicts:"
    return f"{summary.condition[0].upper()}{summary.condition[1:]}:"


def _average(summary: Summary) -> str:
    alpha = percent(summary.alpha)
    trained = "was not" if summary.direction == "members" else "was"
    if summary.conclusion == ConclusionValue.CONTRADICTED:
        return "The share of wrong documents can be anything."
    if not summary.n_selected:
        return f"An empty list is no evidence that the model {trained} trained on them."
    if summary.guarantee == "finite-sample" and procedure_of(summary.procedure).per_list:
        return "No average is stated: procedure bound bounds the errors of this one list."
    if summary.guarantee == "finite-sample" and calibration_of(summary.calibration).conditional:
        return f"At most {alpha} of such a list is wrong, with the probability stated below."
    if summary.guarantee == "finite-sample" and summary.series is not None:
        return _average_of_series(summary, summary.series)
    if summary.guarantee == "finite-sample":
        return f"At most {alpha} of such a list is wrong, over repeated audits."
    if summary.guarantee == "asymptotic":
        return f"At most about {alpha} of such a list is wrong, not guaranteed at this size."
    return f"No guarantee is proved: the target is {alpha} wrong, and the share can be higher."


def _average_of_series(summary: Summary, place: SeriesPlace) -> str:
    """The guarantee of a scan and of its schedule."""
    whole = f"At most {percent(place.alpha)} of all that the schedule's scans select is wrong, over repeated schedules"
    return f"{whole}; of this list at most {percent(summary.alpha)}."


def _this_list(summary: Summary) -> str:
    bound = summary.bound
    if summary.condition is None:
        return CONTRADICTED
    if not summary.n_selected:
        return f"It is empty; {shortest(summary)}." if summary.minimum_selectable > 1 else "It is empty."
    if bound is None:
        dependent = ": documents depend on each other" if summary.bound_withheld else ""
        return f"How many of these {summary.n_selected:,} are wrong is not bounded{dependent}."
    return f"{sentence(wrong_claim(summary, bound))}."


def _collection(summary: Summary) -> str:
    bound = summary.bound
    if summary.conclusion == ConclusionValue.CONTRADICTED:
        return f"Nothing is stated of the {summary.n_audit:,} audited documents."
    if bound is None:
        kind = "trained on" if summary.direction == "members" else "not trained on"
        counted = summary.bound_withheld and summary.direction == "members"
        where = " by this selection; seenset verdict counts blocks" if counted else ""
        return f"How many of all {summary.n_audit:,} were {kind} is not bounded{where}."
    return f"{sentence(known_claim(summary, bound)).replace(' audited documents', ' audited')}."


# --- the lights


def lights(summary: Summary) -> list[Light]:
    """The diagnostics in short: failed ones first, those that passed last."""
    diagnostics = summary.diagnostics.by_name()
    shown = [_light(summary, check, diagnostics[check.name]) for check in checks(summary)]
    return sorted(shown, key=lambda light: _ORDER.index(light.colour))


def _light(summary: Summary, check: ShownCheck, diagnostic: Diagnostic) -> Light:
    name, label = check.name, check.title
    if check.verdict == "passed":
        return Light(name=name, label=label, colour="green", reason=None)
    if check.verdict == "failed":
        return Light(name=name, label=label, colour="red", reason=diagnostic.sentence)
    colour = {"inconclusive": "amber", "limited": "amber"}.get(check.verdict, "grey")
    return Light(name=name, label=label, colour=colour, reason=CHECK_NAMED[name].brief(diagnostic, summary))
