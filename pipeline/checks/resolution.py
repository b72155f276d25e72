"""Whether there are enough calibration documents for a small selection: the check and its sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

from pydantic import Field

from pipeline.checks.check import AnswerFacts, Check, first_sentence
from pipeline.checks.diagnostic import Diagnostic
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, SelectionConfig
from pipeline.run.conclusion import SelectionResult
from pipeline.selection.bounds import fewest_in_list
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.folds import PLAIN, Basis
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures import why_whole
from pipeline.selection.procedures.adadetect import PoolQuestion, learnt_from_known
from pipeline.selection.procedures.record import Options, Procedure, Rule, applied_to, procedure_of
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.version_scores import EXPECTED
from pipeline.wording import documents


class ResolutionDiagnostic(Diagnostic):
    """Whether there are enough calibration documents for a small selection."""

    about_power: ClassVar[bool] = True

    minimum_selectable: int = Field(description="The fewest documents that can be selected at all.")
    calibration_for_1_percent: int | None = Field(
        description="Known documents of the role that calibrates which it takes to select as few as 1% of the audited "
        "ones; null where their number does not matter."
    )


def _reaches(least: int, m: int) -> Outcome:
    """Whether anything can be selected of m documents, where only the length of the shortest list is known."""
    return Outcome.PASSED if least <= m else Outcome.FAILED


def resolution(n: int, m: int, needed: int, enough: int | None, role: str, basis: Basis) -> dict[str, Any]:
    """Whether n calibration documents suffice to select some of m documents (docs/methods.md, section 3.11).

    `outcome` is failed where nothing can be selected, passed where as few as 1% can, and inconclusive in between, as
    in most audits, where the number is a fact and not a fault.

    Args:
        n: number of calibration documents.
        m: number of audited documents.
        needed: minimum number that can be selected.
        enough: number of documents of the role for a selection of 1%; None where it does not matter.
        role: role of the calibration documents.
        basis: the basis of the numbers.
    """
    fewest = max(1, m // 100)
    outcome = Outcome.FAILED if needed > m else Outcome.PASSED if needed <= fewest else Outcome.INCONCLUSIVE
    sentence = basis.sentence
    if sentence is None:
        sentence = shortest_list(ResolutionFacts(n, m, role, basis), needed, outcome, enough)
    return {
        "minimum_selectable": needed,
        "calibration_for_1_percent": enough,
        "outcome": outcome,
        "sentence": sentence,
    }


@dataclass(frozen=True, slots=True)
class ResolutionFacts:
    """The documents of a shortest possible list."""

    n: int  # calibration documents
    m: int  # audited documents
    role: str  # the calibration role
    basis: Basis

    def __str__(self) -> str:
        """The first clause of a sentence."""
        if self.basis.one_of_each:
            half = f", {'half of one document' if self.basis.halved else 'one'} of each block,"
        else:
            half = ", half of those that are known," if self.basis.halved else ""
        share = "" if self.basis.share is None else f" at an estimated null share of {self.basis.share:.3g}"
        return f"With {self.n:,} {self.role} documents to calibrate on{half} and {self.m:,} to judge{share}"

    def for_a_hundredth(self, enough: int) -> str:
        """States the number of known documents for a selection of 1% of the audited ones."""
        half = ", half of which calibrate," if self.basis.halved else ""
        group = " of one group" if self.basis.grouped else ""
        if self.basis.one_of_each:
            group += " of different blocks"
        few = "as few as 1% of the audited documents" if self.m >= 200 else "a single document"
        return f" With {enough:,} {self.role} documents{group}{half} {few} can be selected"


def shortest_list(given: ResolutionFacts, needed: int, outcome: Outcome, enough: int | None) -> str:
    """States the shortest possible list.

    Args:
        given: the documents.
        needed: number of documents of the list.
        outcome: failed where `needed` exceeds the audited documents; passed where as few as 1% can be selected.
        enough: number of known documents for a selection of 1%; None where it does not matter.
    """
    text = f"{given}, the shortest possible list has {documents(needed)}."
    if outcome == Outcome.FAILED:
        text = f"{given}, nothing can be selected: the shortest possible list would have {documents(needed)}."
    return text if outcome == Outcome.PASSED or enough is None else f"{text}{given.for_a_hundredth(enough)}."


def shortest_smoothed(given: ResolutionFacts, whole: int, share: str = "") -> str:
    """States that smoothed ranks have no shortest list, and the probability of a short one.

    If J documents are beyond all calibration documents, their p-values are U / (n + 1), and some of them are selected
    if the j-th smallest U is at most j / K for some j, K the length of the shortest list of whole ranks. That has the
    probability J / K (Simes 1986), and other documents can only add to it.

    Args:
        given: the documents.
        whole: length of the shortest list of whole ranks.
        share: the share of nulls that it is of, as a clause with a leading space; empty where `given` states it.
    """
    if whole <= 1:
        return f"{given}, a single document can be selected, with whole ranks and with smoothed ones{share}."
    few = min(given.m, whole // 2)
    chance = few / whole
    beyond = "above" if given.role == "unseen" else "below"
    has = "would have" if whole > given.m else "has"
    return (
        f"{given}, the shortest possible list of whole ranks {has} {documents(whole)}{share}; smoothed ranks have "
        f"none: if {documents(few)} {'scores' if few == 1 else 'score'} {beyond} every {given.role} document, some of "
        f"them are selected with a probability of at least {chance:.3g}."
    )


def shortest_list_by_share(given: ResolutionFacts, lengths: tuple[int, int, int], outcome: Outcome, enough: int) -> str:
    """States the shortest possible list where the procedure estimates the share of nulls.

    Args:
        given: the documents.
        lengths: lengths of the list at a share of 1, at 0.5, and at the smallest share that can be estimated.
        outcome: as in `shortest_list`, at a share of 1.
        enough: number of known documents for a selection of 1% at a share of 1.
    """
    needed, half, best = lengths
    if best > given.m:
        text = (
            f"{given}, nothing can be selected at any estimated null share: the shortest possible list would have "
            f"{best:,} documents."
        )
    else:
        text = (
            f"{given}, the length of the shortest possible list depends on the estimated null share: {needed:,} at a "
            f"share of 1, {half:,} at 0.5, never fewer than {best:,}."
        )
    if outcome == Outcome.PASSED:
        return text
    were = "were" if given.role == "unseen" else "were not"
    return f"{text}{given.for_a_hundredth(enough)}; fewer suffice if part of the audited documents {were} trained on."


def shortest_list_of_plugin(given: ResolutionFacts, needed: int, procedure: str) -> str:
    """States the shortest list for a plugin's procedure, for which only that of bh is known."""
    return (
        f"{given}, the shortest possible list of procedure bh has {documents(needed)}; that of {procedure}, a plugin's "
        "procedure, is not known."
    )


def before_pass(sentence: str, at_most: bool) -> str:
    """Adapt a sentence on the shortest list to documents that are not read yet.

    Args:
        sentence: a sentence that starts with "With".
        at_most: whether adapters take documents of a group, which may be fewer.
    """
    return sentence.replace("With ", "With at most ", 1) if at_most else sentence


def applied_in(summary: SelectionResult) -> tuple[Procedure, bool]:
    """The procedure that finally decided on ranks, and whether only half of the known documents calibrated."""
    options = Options(
        "storey" if "lambda" in summary.details else "bh",
        summary.guarantee == "finite-sample",
        len(summary.detectors),
        "known_members" in summary.details,
        summary.learn or "split",
    )
    return procedure_of(summary.procedure).applied(options)


def null_share(summary: SelectionResult) -> tuple[float, bool]:
    """The null share that the procedure used, and whether it was estimated; uncapped where the rule has no cap."""
    procedure, _ = applied_in(summary)
    if procedure.factor.uncapped and summary.factor is not None:
        return summary.factor, True
    share = summary.null_proportion
    return share, share != 1 or procedure.estimates  # nothing else determines it for a plugin's procedure


def shortest(summary: SelectionResult) -> str:
    """The minimum length of a list, or that none was possible: a clause shared by all lengths of an answer."""
    share, estimated = null_share(summary)
    none, kind = ("none", "not trained on") if summary.direction == "members" else ("each", "trained on")
    of = f"{share:.1%} of the audited documents were {kind}" if share < 1 else f"{none} of them was trained on"
    at = f" (as estimated, {of})" if estimated else ""
    if summary.minimum_selectable > summary.n_audit:
        return f"nothing could have been selected{at}" if at else "nothing could ever have been selected"
    return f"the shortest possible list has {documents(summary.minimum_selectable)}{at}"


# --- before scoring, from numbers of documents alone

HALF = Fraction(1, 2)
AT_EQUAL_WEIGHTS = (
    " This is at equal weights of the groups: those with more high scores get larger ones, and can have shorter lists."
)


def planned_by_versions(selection: SelectionConfig, m: int) -> dict[str, Any]:
    """The smallest possible selection of m documents with versions, and its expected size."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    by = procedure_of(selection.procedure).versions
    assert by is not None
    least, sentence = by.fewest(selection.exact_alpha, m, None)
    expected = [asdict(one) for one in EXPECTED]
    return {
        **facts,
        "minimum_selectable": least,
        "outcome": _reaches(least, m),
        "sentence": sentence,
        "expected": expected,
    }


FEW_TO_CALIBRATE = 300
"""Calibration documents below which `plan` recommends smoothed ranks."""


def smoothing_advice(selection: SelectionConfig, n: int, needed: int) -> str | None:
    """Recommends smoothed ranks for a selection by whole ranks; None where they gain or prove nothing.

    Args:
        selection: the selection.
        n: number of calibration documents.
        needed: length of the shortest list.
    """
    few = n < FEW_TO_CALIBRATE and needed > 1
    if selection.ranks != "whole" or not few or why_whole(selection) is not None:
        return None
    return (
        "With ranks: smoothed there is no shortest list, at the same guarantee: recommended below "
        f"{FEW_TO_CALIBRATE} calibration documents."
    )


def planned_resolution(
    selection: SelectionConfig, m: int, calibration: Mapping[str, int], at_most: bool, series: bool = False
) -> dict[str, Any]:
    """The smallest possible selection of m documents, for a share of nulls of 1; `series`: it is of a scan."""
    facts = {key: getattr(selection, key) for key in ("name", "procedure", "direction", "alpha")}
    alpha, hundredth = selection.exact_alpha, max(1, m // 100)
    chosen, calibrated = procedure_of(selection.procedure), calibration_of(selection.calibration)
    if chosen.fewest is not None:
        least, sentence = chosen.fewest(selection.detectors, alpha, m)
        return {**facts, "minimum_selectable": least, "outcome": _reaches(least, m), "sentence": sentence}
    role = NULL_ROLE[selection.direction]
    sought = SOUGHT_ROLE[selection.direction]
    procedure, halved = applied_to(selection, known_members=calibration.get(sought, 0) > 0)
    rule = Rule(procedure, alpha, calibrated.delta(selection), halved, selection.exact_lambda)
    known = calibration[role]
    n = rule.calibrating(known)
    if chosen.per_list:
        figures = resolution(known, m, fewest_in_list(known, m, alpha, selection.exact_confidence), None, role, PLAIN)
    else:
        needed = fewest_selectable(rule, known, m)
        enough = known_needed(rule, m, hundredth)
        basis = Basis(rule.halved, grouped=calibrated.grouped, one_of_each=selection.calibrate != "all")
        figures = resolution(n, m, needed, enough, role, basis)
        if selection.ranks != "whole":
            share = " at a null share of 1" if rule.procedure.estimates else ""
            sentence = shortest_smoothed(ResolutionFacts(n, m, role, basis), needed, share)
            figures |= {"sentence": sentence, "outcome": Outcome.PASSED, "minimum_selectable": 1}
            figures["calibration_for_1_percent"] = None
        elif rule.procedure.estimates:
            figures |= _by_share(rule, known, m, figures, role, basis)
        elif not chosen.built_in:
            given = ResolutionFacts(n, m, role, PLAIN)
            sentence = shortest_list_of_plugin(given, needed, selection.procedure)
            figures |= {"sentence": sentence, "outcome": Outcome.INCONCLUSIVE}
    advice = None if series else smoothing_advice(selection, n, figures["minimum_selectable"])
    sentence = before_pass(figures["sentence"], at_most) + ("" if selection.boost is None else AT_EQUAL_WEIGHTS)
    if selection.learn == "pool" and not calibration.get(sought, 0):
        note = PoolQuestion.of(selection, n, m).note()
        sentence = sentence if note is None else f"{sentence} {note}"
    elif chosen.learns and calibration.get(sought, 0):
        sentence = f"{sentence} {learnt_from_known(calibration[sought], sought)}"
    return {**facts, **figures, "sentence": sentence, **({} if advice is None else {"advice": advice})}


def _by_share(rule: Rule, known: int, m: int, figures: Mapping[str, Any], role: str, basis: Basis) -> dict[str, Any]:
    """The changes where the procedure estimates the share of nulls: the figures hold at a share of 1."""
    needed, best = figures["minimum_selectable"], fewest_at_best(rule, known, m)
    half = max(best, fewest_selectable(rule, known, m, factor_at(rule, m, HALF)))
    sentence = shortest_list_by_share(
        ResolutionFacts(rule.calibrating(known), m, role, basis),
        (needed, half, best),
        figures["outcome"],
        figures["calibration_for_1_percent"],
    )
    outcome = Outcome.PASSED if figures["outcome"] == Outcome.PASSED else Outcome.INCONCLUSIVE
    return {"sentence": sentence, "outcome": Outcome.FAILED if best > m else outcome, "minimum_at_best": best}


# --- the check


def resolution_diagnostic(facts: AnswerFacts) -> ResolutionDiagnostic:
    """The shortest possible list of an answer."""
    answer = facts.answer
    fewest, enough = answer.resolution(answer.m)
    if answer.smoothing is not None:
        given = ResolutionFacts(answer.n_calibration, answer.m, facts.role, answer.basis)
        return ResolutionDiagnostic(
            minimum_selectable=1,
            calibration_for_1_percent=None,
            outcome=Outcome.PASSED,
            sentence=shortest_smoothed(given, fewest),
        )
    needed = None if answer.basis.sentence else enough
    return ResolutionDiagnostic(**resolution(answer.n_calibration, answer.m, fewest, needed, facts.role, answer.basis))


def _brief(diagnostic: ResolutionDiagnostic, summary: SelectionResult) -> str:
    signed = procedure_of(summary.procedure).fewest is not None
    if summary.smoothed is not None or "versions" in summary.details or signed:
        return first_sentence(diagnostic, summary)
    return f"With {documents(summary.n_calibration)} for calibration {shortest(summary)}."


CHECK = Check(
    name="resolution",
    title="Number of calibration documents",
    record=ResolutionDiagnostic,
    description="Whether there are enough calibration documents for a small selection.",
    absent="never",
    place=2,
    title_of_versions="Shortest possible list",
    on_scores=resolution_diagnostic,
    brief=_brief,
    from_counts=True,
    finding=resolution,
    recomputed=True,
)
