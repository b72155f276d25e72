"""The overlap of finished runs, the joint selection of several models, and the results of a repaired ranking."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.selection.joint import JointResolution
from pipeline.selection.shares import CONFIDENCE_OF_SHARES

NO_TESTED_CHANGE = (
    "A gained or lost document is not a tested claim of change. Each list limits its wrong share only on average; "
    "other calibration documents can add or remove documents near its threshold, and the difference of two lists has "
    "no error rate."
)
"""Limits of a difference of two lists."""

RANKING_INTERVALS = (
    f"Intervals have {CONFIDENCE_OF_SHARES:.0%} confidence over items that are drawn one by one. Those of accuracies "
    "and of differences between clean and all items hold one at a time; those of ranks and of changes of places hold "
    "for all pairs of models of a task together. They ignore how the clean items were chosen, and are too short if "
    "items depend on one another, such as questions on one passage."
)
"""Explanation of the intervals of a ranking."""

NOTHING_CLEAN = "nothing is selected as clean, so there is no accuracy on clean items"
TOO_FEW_CALIBRATED = "nothing can be selected at this alpha with so few calibration documents"

GAINED_AMONG_SHARED = "documents are gained and lost among the shared ones alone"
SHARED_ONLY = "only those are tested"
"""Consequences where runs audited different documents; follow `shared_documents`."""

DIFFERENCES_TITLE = "What differs between the runs"


SCORES_CAPTION = "Higher scores look more like training data."


# --- the documents and the models of several runs


def shared_documents(audited: Sequence[int], shared: int, other_text: int) -> str:
    """States how many documents the runs share.

    Args:
        audited: number of documents of each run.
        shared: number of documents that all runs audited.
        other_text: number of ids that all runs audited with different texts.
    """
    each = " and ".join(f"{count:,}" for count in audited)
    other = f"; {other_text:,} more have the same id and another text" if other_text else ""
    return f"the runs audited {each} documents and share {shared:,}{other}"


def shared_title(shared: int) -> str:
    """Title of a table of the shared documents of two lists."""
    return f"{shared:,} documents that both runs audited"


def same_model(first: str, second: str, fingerprint: str) -> str:
    """States that two runs audited the same model."""
    return f"same model twice: {first} and {second} have the fingerprint {fingerprint}"


def first_of_role(limit: int) -> str:
    """States that a run read only the first documents of each role."""
    return f"a sample: the first {limit:,} documents of a role"


def scores_title(documents: int, sampled: bool) -> str:
    """Title of the figure of the scores in both runs."""
    return f"Scores of {documents:,} documents{_some(sampled)} in both runs; darker: more documents"


def scores_alt(detectors: tuple[str, str], documents: int, sampled: bool, correlation: float) -> str:
    """Text alternative of the figure of the scores."""
    return (
        f"{detectors[0]} in A against {detectors[1]} in B, {documents:,} documents{_some(sampled)}; "
        f"rank correlation {correlation:.3f}."
    )


def _some(sampled: bool) -> str:
    return " (a sample)" if sampled else ""


# --- joint selections


def jointly_selected(selected: int, audited: int, direction: str, models: int, alpha: float) -> str:
    """States how many documents several models select together, of those that all runs audited."""
    kind = "clean under" if direction == "clean" else "trained on by"
    return (
        f"{selected:,} of {audited:,} documents are selected as {kind} every one of {models} models at alpha {alpha:g}"
    )


def largest_p_answer(selected: int, guarantee: str, promise: str) -> str:
    """States how many documents the largest p-value selects, without proof."""
    return f"{selected:,} have a small largest p-value (BH, {guarantee}): {promise}"


def joint_shortest(small: JointResolution, audited: int, alpha: float, grouped: bool) -> str:
    """States the minimum length of a joint list, and the number of calibration documents for a shorter one.

    Args:
        small: the least numbers.
        audited: number of documents that all runs audited.
        alpha: alpha of the joint selection.
        grouped: whether a run calibrates by group.
    """
    where = "in every group of every run" if grouped else "in every run"
    if small.fewest > audited:
        return (
            f"Nothing can be selected at alpha {alpha:g}, whatever the scores: that takes alpha of at least "
            f"{small.smallest_alpha:.4g}, or {small.needed_for_any:,} calibration documents {where}; a list of 1% "
            f"takes {small.needed_for_1_percent:,}."
        )
    return (
        f"The shortest possible list has {small.fewest:,} documents; one as short as 1% of the documents takes "
        f"{small.needed_for_1_percent:,} calibration documents {where}."
    )


# --- rankings


def other_models(names: Sequence[str]) -> list[str]:
    """Limits of the runs: models that they did not audit."""
    each = "the audited model" if len(names) == 1 else "every audited model"
    shown = ", ".join(dict.fromkeys(names))
    return [
        "an item that was not selected as clean is not shown to be contaminated",
        f"clean means clean under {each} ({shown}): not shown is whether another model was trained on an item",
    ]


def ranking_title(task: str, metric: str, items: int, clean: int) -> str:
    """Title of the table of a task."""
    return f"{task}: {metric} on {items:,} items, {clean:,} of them selected as clean"


def places_changed(
    models: tuple[str, str],
    lead: float,
    lead_on_clean: tuple[float, float, float],
    shown: bool,
    items: tuple[int, int],
) -> str:
    """States that two models change places.

    Args:
        models: the model that leads on all items, and the model that leads on the clean items.
        lead: difference of their accuracies on all items.
        lead_on_clean: the opposite difference on the clean items, with the ends of its interval.
        shown: whether the interval is above 0.
        items: numbers of items not selected as clean on which the first, and the second, model does better.
    """
    first, second = models
    difference, low, high = lead_on_clean
    chance = "" if shown else ", which may be chance"
    return (
        f"{first} is ahead of {second} by {lead:.3f} on all items; {second} is ahead by {difference:.3f} [{low:.3f}, "
        f"{high:.3f}] on the clean items{chance}. Of the items that were not selected as clean {items[0]:,} favour "
        f"{first} and {items[1]:,} favour {second}."
    )


# --- what to do next


def after_a_ranking(runs: Sequence[str], n_clean: int, contradicted: bool) -> list[str]:
    """What to do with a ranking on clean items.

    Args:
        runs: run directories of the audits.
        n_clean: number of items selected as clean.
        contradicted: whether a check contradicts the guarantee.
    """
    if contradicted:
        return [f"Do not use the ranking on clean items: see the checks in the report of {', '.join(runs)}."]
    if not n_clean:
        return [
            "No item is shown to be clean, so only the ranking on all items is known. More seen documents, or a larger "
            "alpha, may select some: seenset plan states how many a selection needs."
        ]
    return [
        "Report accuracies on the clean items with their intervals, and name the audited models: items are clean under "
        "these alone.",
        f"To evaluate further models on the clean items: seenset export {runs[0]} FOLDER --samples.",
    ]


def after_a_joint_selection(direction: str, n_selected: int, contradicted: bool) -> list[str]:
    """What to do with a joint selection.

    Args:
        direction: clean or members.
        n_selected: number of documents of the proved list.
        contradicted: whether a check contradicts the guarantee.
    """
    if contradicted:
        return ["Do not act on the lists: see the checks in the reports of the runs."]
    if not n_selected:
        return ["Nothing is selected. The answer below states how many calibration documents a list takes."]
    if direction == "clean":
        return ["Evaluate these models on the selected items; seenset rank repairs a ranking with them."]
    return ["At most a share alpha of the list is wrong on average; audit further models before you name one document."]
