"""The page of a trial in one file: what was verified and what was not, its tables and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from pipeline.config.models import display_name
from pipeline.report.names import model_name
from pipeline.report.svg import FigureImage
from pipeline.report.tables import PageTable, Row, cell, labels, page_table, readable
from pipeline.report.templates import render
from pipeline.selection.procedures import procedure_of
from pipeline.trial.config import TrialConfig
from pipeline.trial.intervals import LEAST_MODELS

PAGE = "trial.html"
MOST_ROWS = 12
"""Rows of the overview; the table below it holds all of them."""
UNVERIFIED = (
    "That the calibration documents of an audit resemble its audited ones. Here both are random parts of the same "
    "documents, so they are alike by construction; the promise rests on it, and only those documents can show it.",
    "Any other model, other documents, or documents that were met in another way. Here they were trained in last and "
    "on their own, as the configuration below says; what was read once in pretraining leaves weaker traces.",
    "That the guarantee holds. Repeats can refute a guarantee, not prove it.",
)
SHIFTED = (
    "That the calibration documents of an audit resemble its audited ones. Here they were made to differ, by the shift "
    "that the configuration below gives, so no promise that assumes it was made; another shift does something else.",
    *UNVERIFIED[1:],
)
NOT_PROMISED = (
    "That a procedure without a finite-sample guarantee keeps its target elsewhere: what it did here, it does not "
    "promise."
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What the repeats say of the targets, in sentences."""

    headline: str
    contradicted: list[str]  # a sentence a selection whose target the repeats contradict
    extent: str  # what this rests on
    unverified: list[str]


def verification(rows: Sequence[Row], settings: Sequence[str], models: int, shifted: bool = False) -> Verification:
    """Put the rows of the selections into sentences that claim no more than the repeats show.

    Args:
        rows: from `pipeline.trial.table.selection_rows`, of all points.
        settings: of the sweep.
        models: contaminated models of a point.
        shifted: whether calibration documents were made to differ at some point.
    """
    tested = [row for row in rows if row["contradicted"] is not None]
    failed = [row for row in readable(rows, settings) if row["contradicted"]]
    kept = len(tested) - len(failed)
    if not tested:
        headline = "Nothing: no audited document was of the kind that must not be selected, so none could be wrong."
    else:
        each = ", each at each point of the sweep" if settings else ""
        headline = f"{_consistent(kept, len(tested))}{each}."
        if failed:
            headline += (
                f" {len(failed):,} {'contradicts its target' if len(failed) == 1 else 'contradict their targets'}."
            )
    if tested and len(tested) < len(rows):
        headline += f" For {len(rows) - len(tested):,} more the share of wrong documents is not defined."
    names = dict(zip(settings, labels(settings), strict=True))
    contradicted = []
    for row in failed:
        at = "".join(f", {names[setting]} {row[setting]}" for setting in settings)
        share = f"the share of wrong documents was {cell(row, 'fdr')} on average, and its target is {row['target']:g}"
        if procedure_of(row["procedure"]).per_list:
            share = (
                f"the share of wrong documents exceeded {row['target']:g} in more repeats than its confidence allows"
            )
        contradicted.append(
            f"Selection {row['selection']} ({row['procedure']}{at}): {share}. It cannot be relied on here."
        )
    for row in readable(rows, settings):
        if row.get("bound_contradicted"):
            at = "".join(f", {names[setting]} {row[setting]}" for setting in settings)
            contradicted.append(
                f"Selection {row['selection']} ({row['procedure']}{at}): its bounds failed in a share "
                f"{cell(row, 'bound_fails')} of the repeats, more than their confidence allows. They cannot be relied "
                "on here."
            )
    repeats = sorted({row["repeats"] for row in rows})
    splits = f"{' or '.join(f'{n:,}' for n in repeats)} random splits of these documents"
    extent = (
        "A target is contradicted where it lies below the whole 95% interval of the average share of wrong documents. "
        f"The average is over {splits}, given the scores of {_counted(models, 'contaminated model')}."
    )
    bounding = any(procedure_of(row["procedure"]).per_list for row in rows)
    if models > 1:
        extent = (
            "A target is contradicted where the repeats of all models together contradict that each model keeps it. "
            f"Figures are averages over {_counted(models, 'contaminated model')}, of {splits} each. {_over(models)}"
        )
    if bounding:
        extent += " Procedure bound promises no average: its target is contradicted where too many repeats exceed it."
    proved = all(row["guarantee"] == "finite-sample" for row in rows)
    unverified = [*(SHIFTED if shifted else UNVERIFIED), *(() if proved else (NOT_PROMISED,))]
    return Verification(headline, contradicted, extent, unverified)


def trial_page(
    config: TrialConfig,
    facts: Mapping[str, Any],
    settings: Sequence[str],
    tables: Sequence[Table],
    images: Sequence[FigureImage],
    reports: Sequence[str],
) -> str:
    """The page as HTML; every text is escaped, and nothing is loaded from anywhere.

    Args:
        config: the trial as written.
        facts: of `TrialOutcome`.
        settings: of the sweep.
        tables: as the command prints them.
        images: the figures.
        reports: addresses of the audits' reports.
    """
    shifted = config.split.shift is not None or any(path.startswith("split.shift") for path in settings)
    return render(
        "trial.html",
        model=model_name(config.model),
        path=display_name(config.model),
        overview=overview(facts["selections"], settings),
        verification=verification(facts["selections"], settings, config.models, shifted),
        tables=[page_table(table) for table in tables],
        figures=images,
        facts=facts,
        left_out=", ".join(f"{why.replace('_', ' ')} {n:,}" for why, n in sorted(facts["left_out"].items())),
        reports=reports,
    )


def overview(rows: Sequence[Row], settings: Sequence[str]) -> PageTable:
    """The selections at a glance; of more than MOST_ROWS those that the repeats contradict come first."""
    shown = list(readable(rows, settings))
    short = len(shown) > MOST_ROWS
    if short:
        shown.sort(key=lambda row: not (row["contradicted"] or row.get("bound_contradicted")))
    header = [*((name, False) for name in (*labels(settings), "selection", "procedure"))]
    header += [*((name, True) for name in ("target", "FDR", "power")), ("the repeats", False)]
    return PageTable(
        title="The selections held against the truth, with 95% intervals",
        header=header,
        rows=[
            [
                *(str(row[setting]) for setting in settings),
                row["selection"],
                row["procedure"],
                f"{row['target']:g}",
                cell(row, "fdr"),
                cell(row, "power"),
                _outcome(row),
            ]
            for row in shown[:MOST_ROWS]
        ],
        caption=f"{MOST_ROWS} of {len(shown):,} rows, contradicted ones first; all are in section 3." if short else "",
    )


def _outcome(row: Row) -> str:
    outcome = {None: "do not test the target", True: "contradict the target", False: "are consistent with the target"}
    bound = " and contradict the bound" if row.get("bound_contradicted") else ""
    return outcome[row["contradicted"]] + bound


def _over(models: int) -> str:
    """What the intervals over several models assume."""
    if models < LEAST_MODELS:
        return f"Of fewer than {LEAST_MODELS} models there is no interval over models: each model has one of its own."
    return (
        "Their intervals are over models, and take it that the models' figures scatter about normally; each model has "
        "one of its own too, over its splits."
    )


def _consistent(kept: int, tested: int) -> str:
    """How many of the selections are consistent with their target."""
    if tested == 1:
        return f"The selection is {'not ' * (kept == 0)}consistent with its target"
    if kept == tested:
        return f"All {tested:,} selections are consistent with their target"
    verb, whose = ("is", "its") if kept == 1 else ("are", "their")
    return f"{kept:,} of {tested:,} selections {verb} consistent with {whose} target"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
