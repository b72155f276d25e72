"""The summary of an answer: its checks, its numbers, its next step, and a bound where its documents allow one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from pipeline.checks.check import AnswerFacts
from pipeline.checks.registry import Conclusion, make_checks, next_step
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import SOUGHT_ROLE, SeriesConfig
from pipeline.results.summary import SeriesPlace, Summary
from pipeline.run.conclusion import SmoothedRanks
from pipeline.run.conclusion_text import GROUPED, elsewhere_assumption
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.adadetect import PoolQuestion, learnt_from_known
from pipeline.selection.schedule import Slot
from pipeline.wording import listed


def make_summary(
    facts: AnswerFacts,
    n_selected: int,
    n_quarantined: int,
    limit: int | None = None,
    stated: Conclusion | None = None,
) -> Summary:
    """Make the typed result of a selection.

    Args:
        facts: the question, the decision, and what is known of the documents.
        n_selected: number of selected documents, all of which have scores.
        n_quarantined: number of audited documents without scores.
        limit: the most documents of each role that were read; None when all were.
        stated: checks that a bundle states, of which those are made again that its content determines.
    """
    selection, answer = facts.selection, facts.answer
    diagnostics = make_checks(facts, stated)
    scored = answer.m - n_quarantined  # maximum length of a list: a strict answer may reach p = 1
    fewest, smoothed = answer.resolution(answer.m)[0], None
    if answer.smoothing is not None:  # a single document can have any p-value
        fewest, smoothed = 1, SmoothedRanks(n_whole=answer.smoothing.n_whole, others=answer.smoothing.others)
    made = Summary(
        name=selection.name,
        procedure=selection.procedure,
        direction=selection.direction,
        alpha=selection.alpha,
        detectors=selection.detectors,
        calibration=selection.calibration,
        n_audit=answer.m,
        n_calibration=answer.n_calibration,
        n_quarantined=n_quarantined,
        n_selected=n_selected,
        threshold=answer.threshold,
        null_proportion=answer.null_proportion,
        factor=answer.factor,
        groups=answer.groups,
        weights=answer.weights,
        learn="pool" if selection.learn == "pool" and "known_members" not in answer.details else None,
        guarantee=answer.guarantee,
        assumption=answer.assumption,
        promise=answer.promise,
        conclusion=diagnostics.value,
        reasons=diagnostics.failures(),
        next=next_step(diagnostics, facts.role),
        minimum_selectable=fewest,
        strict=replace(answer.strict, n_selected=min(answer.strict.n_selected, scored)),
        details=answer.details,
        smoothed=smoothed,
        diagnostics=diagnostics,
        limit=limit,
        bound=answer.bound,
    )
    return made if facts.bounded else made.without_bound(GROUPED)


def summary_in_run(made: Summary, config: AuditConfig, slot: Slot | None) -> Summary:
    """A summary with what only a run states: its place in a schedule, and the assumption on scores from elsewhere.

    Args:
        made: result of `make_summary`.
        config: configuration of the run.
        slot: place of a scan in its schedule; None: the run is no scan.
    """
    if slot is not None and config.series is not None:
        made = made.model_copy(update={"series": series_place(slot, config.series)})
    if config.corpus.scores is not None:
        made = made.model_copy(update={"assumption": elsewhere_assumption(made.assumption)})
    return made


def learnt_sentences(summary: Summary) -> list[str]:
    """What a score was learnt from, if that was the pool or known documents; empty for other answers."""
    if procedure_of(summary.procedure).learns and "known_members" in summary.details:
        return [learnt_from_known(round(summary.details["known_members"]), SOUGHT_ROLE[summary.direction])]
    if summary.learn is None:
        return []
    step_up = "storey" if "lambda" in summary.details else "bh"
    numbers = summary.n_calibration, summary.n_audit, tuple(summary.detectors), Fraction(repr(summary.alpha)), step_up
    note = PoolQuestion(*numbers).note()
    sentences = [] if note is None else [note]
    if summary.weights:
        pairs = zip(summary.detectors, summary.weights, strict=True)
        weights = listed([f"{name} {weight:.2g}" for name, weight in pairs])
        sentences.append(
            f"The weights of the detectors ({weights}) were found without knowing which documents are which: in the "
            "unordered pool of calibration and audited documents."
        )
    return sentences


def series_place(slot: Slot, series: SeriesConfig) -> SeriesPlace:
    """The place of a scan, as its summaries state it."""
    return SeriesPlace(
        ledger=series.ledger,
        slot=slot.number,
        horizon=series.horizon,
        alpha=float(slot.alpha),
        level=float(slot.level),
    )
