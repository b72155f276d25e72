"""The conclusions from the repeats of a trial, and their limits, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.answers.detection import LEAST_MODELS
from pipeline.answers.evaluation_text import too_few_untrained
from pipeline.answers.verdict import LEVEL
from pipeline.report.tables import Row, cell, labels, readable
from pipeline.selection.procedures import procedure_of

NAMED = 12
"""Number of rows in the text alternative of a figure; the table has all of them."""
UNVERIFIED = (
    "That the calibration documents of an audit resemble its audited ones. Here both are random parts of the same "
    "documents, so they are alike by construction. The guarantee needs this; only the audit's documents can show it.",
    "Any other model, other documents, or documents that were seen in another way. Here they were trained in last and "
    "separately, as the configuration below states; text that was read once in pretraining leaves weaker traces.",
    "That the guarantee holds. Repeats can refute a guarantee, not prove it.",
)
SHIFTED = (
    "That the calibration documents of an audit resemble its audited ones. Here they were made to differ, by the shift "
    "that the configuration below gives, so no guarantee that assumes it applies; another shift has other effects.",
    *UNVERIFIED[1:],
)
NOT_GUARANTEED = (
    "That a procedure without a finite-sample guarantee keeps its target elsewhere: its results here are no guarantee."
)
OVERVIEW_TITLE = "The selections compared with the truth, with 95% intervals"
AUDITS_TITLE = "The audits compared with the truth"
SELECTIONS_TITLE = "Selections compared with the truth"
BY_MODEL_TITLE = "The same by model"
COLLECTIONS_TITLE = "Was the collection trained on?"
MARKED = "! the repeats contradict the target, or the confidence of the bound"
ACCURACY_TITLE = "Mean accuracy (and rank) of the models"
AGREEMENT_TITLE = "Spearman's correlation with the ranking on the truly clean items"
TEST_SHOWS = f"test shows it (p <= {LEVEL:g})"
FDR_TITLE = "Wrong documents among the selected, and the target"
FDR_CAPTION = "A target below the whole interval is contradicted by the repeats."
POWER_CAPTION = "The share of the members (clean: of the others) that was selected, on average over the repeats."
AUC_CAPTION = "How well each detector tells trained from untrained documents; the dotted line is chance."


@dataclass(frozen=True, slots=True)
class Verification:
    """The conclusions of the repeats about the targets, in sentences."""

    headline: str
    contradicted: list[str]  # one sentence per selection whose target the repeats contradict
    extent: str  # the data behind the conclusions
    unverified: list[str]


def verification(rows: Sequence[Row], settings: Sequence[str], models: int, shifted: bool = False) -> Verification:
    """State the rows of the selections in sentences that claim no more than the repeats show.

    Args:
        rows: rows of the selections at all points of the sweep, from `pipeline.trial`.
        settings: settings of the sweep.
        models: number of contaminated models per point.
        shifted: whether calibration documents were made to differ at some point.
    """
    proved = all(row["guarantee"] == "finite-sample" for row in rows)
    return Verification(
        _headline(rows, settings),
        _contradicted(readable(rows, settings), settings),
        _extent(rows, models),
        [*(SHIFTED if shifted else UNVERIFIED), *(() if proved else (NOT_GUARANTEED,))],
    )


def _headline(rows: Sequence[Row], settings: Sequence[str]) -> str:
    tested = [row for row in rows if row["contradicted"] is not None]
    failed = sum(row["contradicted"] for row in tested)
    if not tested:
        return "Nothing: no audited document was of the kind that must not be selected, so none could be wrong."
    each = ", each at each point of the sweep" if settings else ""
    text = f"{_consistent(len(tested) - failed, len(tested))}{each}."
    if failed:
        text += f" {failed:,} {'contradicts its target' if failed == 1 else 'contradict their targets'}."
    if len(tested) < len(rows):
        text += f" For {len(rows) - len(tested):,} more the share of wrong documents is not defined."
    return text


def _contradicted(rows: Sequence[Row], settings: Sequence[str]) -> list[str]:
    """A sentence for each target, then for each bound, that the repeats contradict; rows as `readable` gives them."""
    targets, bounds = [], []
    for row in rows:
        which = f"Selection {row['selection']} ({row['procedure']}{_place(row, settings)})"
        if row["contradicted"] and procedure_of(row["procedure"]).per_list:
            targets.append(
                f"{which}: the share of wrong documents exceeded {row['target']:g} in more repeats than its confidence "
                "allows. It cannot be relied on here."
            )
        elif row["contradicted"]:
            targets.append(
                f"{which}: the share of wrong documents was {cell(row, 'fdr')} on average, and its target is "
                f"{row['target']:g}. It cannot be relied on here."
            )
        if row.get("bound_contradicted"):
            bounds.append(
                f"{which}: its bounds failed in a share {cell(row, 'bound_fails')} of the repeats, more than their "
                "confidence allows. They cannot be relied on here."
            )
    return targets + bounds


def _place(row: Row, settings: Sequence[str]) -> str:
    """The point of the sweep of a row."""
    return "".join(f", {name} {row[setting]}" for name, setting in zip(labels(settings), settings, strict=True))


def _extent(rows: Sequence[Row], models: int) -> str:
    repeats = sorted({row["repeats"] for row in rows})
    splits = f"{' or '.join(f'{n:,}' for n in repeats)} random splits of these documents"
    scored = f"{models:,} contaminated model{'' if models == 1 else 's'}"
    extent = (
        "A target is contradicted where it is below the whole 95% interval of the average share of wrong documents. "
        f"The average is over {splits}, given the scores of {scored}."
    )
    if models > 1:
        extent = (
            "A target is contradicted where the repeats of all models together contradict that each model keeps it. "
            f"Figures are averages over {scored}, of {splits} each. {_over(models)}"
        )
    if any(procedure_of(row["procedure"]).per_list for row in rows):
        extent += " Procedure bound guarantees no average: its target is contradicted where too many repeats exceed it."
    return extent


def _over(models: int) -> str:
    """States the assumption of the intervals over several models."""
    if models < LEAST_MODELS:
        return f"Of fewer than {LEAST_MODELS} models there is no interval over models: each model has one of its own."
    return (
        "Their intervals are over models, and assume that the models' figures scatter about normally; each model has "
        "one of its own too, over its splits."
    )


def _consistent(kept: int, tested: int) -> str:
    """States how many of the selections are consistent with their target."""
    if tested == 1:
        return f"The selection is {'not ' * (kept == 0)}consistent with its target"
    if kept == tested:
        return f"All {tested:,} selections are consistent with their target"
    verb, whose = ("is", "its") if kept == 1 else ("are", "their")
    return f"{kept:,} of {tested:,} selections {verb} consistent with {whose} target"


def outcome(row: Row) -> str:
    """The conclusion of the repeats for one selection, a clause that follows "the repeats"."""
    of_target = {None: "do not test the target", True: "contradict the target", False: "are consistent with the target"}
    return of_target[row["contradicted"]] + (" and contradict the bound" if row.get("bound_contradicted") else "")


def overview_caption(shown: int, rows: int) -> str:
    """States which rows an incomplete overview shows."""
    return f"{shown} of {rows:,} rows, contradicted ones first; all are in section 3."


# --- the units of intervals


def interval_scope(rows: Sequence[Row]) -> str:
    """States the units of the intervals of rows."""
    repeats = ", ".join(map(str, sorted({row["repeats"] for row in rows})))
    models = sorted({row["models"] for row in rows})
    if models in ([], [1]):
        return f"{repeats} repeats, 95% intervals over re-splits of these documents, this model"
    names = " or ".join(map(str, models))
    if max(models) < LEAST_MODELS:
        return f"{names} models of {repeats} repeats; of fewer than {LEAST_MODELS} models there is no interval"
    freedom = " or ".join(str(count - 1) for count in models)
    return f"{names} models of {repeats} repeats, 95% intervals over models (Student's t, {freedom} degrees of freedom)"


def detector_title(rows: Sequence[Row]) -> str:
    """Title of the detectors' table, with the units of its intervals."""
    models = sorted({row["models"] for row in rows})
    given = "this model" if models == [1] else f"these {' or '.join(map(str, models))} models"
    return f"Trained against untrained documents, 95% intervals over documents, {given}"


def detector_caption(rows: Sequence[Row]) -> str | None:
    """States the figures of the detectors' table without an interval, and why; None where all have one."""
    if not rows:
        return None
    count, models = min(row["untrained"] for row in rows), max(row["models"] for row in rows)
    return " ".join(too_few_untrained(count, "untrained documents", models)) or None


# --- figures


def selections_alt(rows: Sequence[Row], settings: Sequence[str], figure: str) -> str:
    """Text alternative of the figure of `fdr` or `power` of each selection."""
    what = {"fdr": "Realised FDR", "power": "Power"}[figure]
    over = f" over {labels(settings)[0]}" if settings else ""
    numbers = _numbers(rows, settings, "selection", figure)
    return f"{what} of each selection{over}, {interval_scope(rows)}: {numbers}."


def auc_title(settings: Sequence[str]) -> str:
    """The title of the figure of the detectors over a sweep."""
    return f"AUC of the detectors over {labels(settings)[0]}"


def auc_alt(rows: Sequence[Row], settings: Sequence[str]) -> str:
    """Text alternative of the figure of the detectors over a sweep."""
    return f"{auc_title(settings)}: {_numbers(rows, settings, 'detector', 'auc')}."


def _numbers(rows: Sequence[Row], settings: Sequence[str], name: str, figure: str) -> str:
    """The figures of the first rows, each with its interval, and its target if there is one."""
    shown = []
    for row in readable(rows[:NAMED], settings):
        target = f" (target {row['target']:g})" if figure == "fdr" else ""
        shown.append(f"{row[name]}{_place(row, settings)} {cell(row, figure)}{target}")
    return "; ".join(shown) + (f"; and {len(rows) - NAMED} more in the table" if len(rows) > NAMED else "")


def training_line(number: int, models: int, documents: int) -> str:
    """States the contaminated model in training."""
    return f"contaminated model {number} of {models}: training {documents} documents in"
