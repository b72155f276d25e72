"""The guarantee of a schedule of scans and its limits, the results of its scans, and the cost of a place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

from pipeline.run.conclusion_text import WARNING
from pipeline.selection.guarantees import ConclusionValue
from pipeline.wording import percentage

Doubt = Literal["asked before", "contradicted", "heuristic", "asymptotic", "share", "level"]
"""Why a schedule guarantees nothing for a list."""

SCANS_NAMED = 200
"""Maximum number of scans that a sentence names."""
SPOKEN = 12
"""Number of the latest scans in the text alternative of the figure."""

ASKED_BEFORE = "its run had answered before it took its place, so what was asked may have been picked by an answer"
NOT_GUARANTEED = f"nothing is guaranteed for this scan: {ASKED_BEFORE}"
SAMPLE = "a sample is a scan too, and spends its level: use other documents for trials than those of a scan"
NO_RATE = "No error rate is guaranteed over these scans."
MIXED = "scans of this name selected members and others clean documents: a guarantee covers one kind"
AVERAGE = (
    "the error rate is an average over repetitions of the whole schedule: the list of one scan, or of some scans "
    "picked by what they show, may be wrong more often"
)
FIGURE_TITLE = "Documents selected by each scan"
FIGURE_CAPTION = "Scans are in the order of their places, independent of clocks."


# --- the guarantee over all scans


def doubt(why: Doubt, procedure: str, level: float) -> str:
    """Why the schedule guarantees nothing for a list, a clause that follows "because".

    Args:
        why: kind of the reason.
        procedure: procedure of the list.
        level: level at which the list was selected.
    """
    return {
        "asked before": ASKED_BEFORE,
        "contradicted": "a check contradicts the assumption of its guarantee",
        "heuristic": f"no error rate is proved for {procedure} as it was used",
        "asymptotic": f"the error rate of {procedure} as it was used is proved only as numbers grow",
        "share": "it claimed more than its part of alpha",
        "level": f"it selected at level {level:g}, above the level of its place",
    }[why]


def not_guaranteed(slot: int, why: str) -> str:
    """States the scan for which nothing is guaranteed, and why."""
    return f"scan {slot}: not guaranteed, because {why}"


def rate_over_scans(alpha: float, alone: Sequence[int], unfiled: bool, untested: Sequence[int]) -> str:
    """States the error rate over the scans.

    Args:
        alpha: alpha of the schedule.
        alone: the scans that the rate is guaranteed for; empty: all with a result.
        unfiled: whether a scan has no result.
        untested: scans whose blind test was inconclusive or was not made.
    """
    share = percentage(Fraction(repr(alpha)))
    text = f"Of all that the scans{' with a result' * unfiled} select together, at most {share} is wrong"
    if alone:
        text = (
            f"No error rate is guaranteed over all of these scans. Of what {_named(alone)} selected together alone, at "
            f"most {share} is wrong"
        )
    text += ", on average over repetitions of the schedule"
    return f"{text}{_provided(untested) or ', if the assumption of each list holds; no check contradicts it'}."


def lists_bound(lists: int, confidence: Fraction, clause: str, untested: Sequence[int], without: int) -> str:
    """States the bound on all lists together; a bound that excludes nothing is stated by `all_may_be_wrong`.

    Args:
        lists: number of lists.
        confidence: its confidence, as stated.
        clause: how many are wrong, from `wrong_clause`.
        untested: scans whose blind test was inconclusive or was not made.
        without: number of selected documents on lists without a bound.
    """
    text = f"For {_lists(lists)}, with {percentage(confidence)} confidence: {clause}{_provided(untested)}"
    return (
        text + (f"; {without:,} are on lists without a bound, and all of those may be wrong" if without else "") + "."
    )


def wrong_share_clause(selected: int, wrong: int, right: int) -> str:
    """At most how many of the selected are wrong, and at least how many are right."""
    if not wrong:
        return f"none of the {selected:,} selected is wrong"
    return (
        f"at most {wrong:,} of the {selected:,} selected {'is' if wrong == 1 else 'are'} wrong, and at least {right:,} "
        f"{'is' if right == 1 else 'are'} right"
    )


def all_may_be_wrong(lists: int, selected: int) -> str:
    """States a bound that excludes nothing, without confidence and condition."""
    every = "the one selected document" if selected == 1 else f"all of the {selected:,} selected"
    return f"For {_lists(lists)}: {every} may be wrong."


def unfiled_note(slot: int) -> str:
    """States the effect of a scan without a result on the sums."""
    return (
        f"scan {slot} has claimed its place and filed no result: it is running or was stopped; its level is spent, "
        "and nothing that it may have selected is in these sums"
    )


def several_names(names: Sequence[str]) -> str:
    """States that no guarantee covers several selections of the scans together."""
    return f"each of the selections {', '.join(names)} has its own guarantee; none covers all of them together"


def clock_note(later: int, later_at: str, earlier: int, earlier_at: str) -> str:
    """States that a scan is dated before its predecessor; scans are ordered by number."""
    return (
        f"scan {later} is dated {later_at}, and scan {earlier} {earlier_at}: a clock was wrong; scans are ordered by "
        "their places"
    )


def _lists(count: int) -> str:
    return "this list" if count == 1 else f"all {count:,} lists together"


def _named(slots: Sequence[int]) -> str:
    """Scans, listed by number."""
    text = ", ".join(f"{slot}" for slot in slots[:SCANS_NAMED]) + (" and others" if len(slots) > SCANS_NAMED else "")
    return f"scan{'s' * (len(slots) > 1)} {text}"


def _provided(untested: Sequence[int]) -> str:
    """The condition that no test confirmed, with the scans that need it."""
    if not untested:
        return ""
    return f", provided both groups of {_named(untested)} are alike; the test could not confirm this"


# --- what is new, and the figure


def new_on_list(slot: int, selected: int, new: int | None, contradicted: bool) -> str:
    """States how many documents of a list are new; `new` is None where that is not known."""
    text = f"{f'{WARNING}: ' * contradicted}scan {slot} selected {selected:,}"
    if new is None:
        return f"{text}; how many of them are new is not known, so all count as new"
    return f"{text}, {new:,} of them new"


def unread_list(slot: int, why: str) -> str:
    """States the consequence of a latest list that cannot be read."""
    return f"scan {slot}: {why}, so all documents that scan {slot} selected count as new"


def unread_earlier(earlier: int, why: str, slot: int) -> str:
    """States the consequence of an earlier list that cannot be read."""
    return (
        f"scan {earlier}: {why}, so documents that only scan {earlier} had selected count as new if scan {slot} "
        "selected them"
    )


def figure_alt(points: Mapping[str, Sequence[tuple[int, int, ConclusionValue]]], unfiled: Sequence[int]) -> str:
    """The text alternative of the figure.

    Args:
        points: by selection name: scan, number of selected documents, and the conclusion of its checks.
        unfiled: scans without a result.
    """
    parts = []
    for name, of_name in points.items():
        counts = ", ".join(
            f"{count:,} by scan {slot:,}{' (contradicted)' if conclusion == ConclusionValue.CONTRADICTED else ''}"
            for slot, count, conclusion in of_name[-SPOKEN:]
        )
        total = sum(count for _, count, _ in of_name)
        of = f"{total:,} in all by {len(of_name):,} scans; the latest: " if len(of_name) > SPOKEN else ""
        parts.append(f"{name}: {of}{counts}")
    without = ", ".join(f"{slot:,}" for slot in unfiled[-SPOKEN:])
    ended = f" No result is filed by scan {without}." if without else ""
    return f"Documents selected, {'; '.join(parts)}.{ended}"


# --- a place in the schedule, before and when it is taken


def next_scan(place: str, level: float, alpha: float) -> str:
    """The place that a scan would take."""
    return f"this would be scan {place}, at level {level:.3g} of alpha {alpha:g}"


def new_ledger(url: str) -> str:
    """States that a scan would be the first one."""
    return f"it would open ledger {url}"


def places_taken(url: str, taken: str, unfiled: int) -> str:
    """States how many places of a ledger are taken."""
    return f"ledger {url}: {taken} places are taken{f', {unfiled:,} without a result' if unfiled else ''}"


def place_of_run(places: Sequence[int]) -> str:
    """States the places that a run already has."""
    return f"this run has place {_numbers(places)} already, and keeps it for the same scores and questions"


def claimed(place: str, level: float) -> str:
    """The place that a scan took."""
    return f"scan {place}, at level {level:.3g}"


def kept(place: str, claimed_by: str | None) -> str:
    """States that a scan keeps its place, which another run directory may have claimed."""
    return f"this scan has place {place} already{f', claimed from {claimed_by}' if claimed_by else ''}, and keeps it"


def other_places(places: Sequence[int]) -> str:
    """States the other places of a run."""
    return f"this run has place {_numbers(places)} too, for other questions or other scores: each has spent its level"


def filed_before(slot: int) -> str:
    """States that a result differs from that in the ledger."""
    return f"scan {slot} had filed another answer before, which the ledger keeps"


def _numbers(places: Sequence[int]) -> str:
    return ", ".join(f"{place}" for place in places)


# --- documents that earlier runs audited


def already_audited_phrase(against: str, count: int) -> str:
    """States how many texts a run leaves out because an earlier run audited them."""
    return f"against {against}: {count:,} texts are already audited and left out"


def left_out_later(against: str, runs: int) -> str:
    """States the documents that a plan counts although the run will leave them out."""
    return (
        f"audit documents that {against} ({runs:,} {'run' if runs == 1 else 'runs'}) already audited are left out; "
        "this plan still counts them, because the run itself determines which these are"
    )
