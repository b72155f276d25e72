"""The page of a trial in one file: what was verified and what was not, its tables and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from pipeline.config.models import display_name
from pipeline.report.names import model_name
from pipeline.report.svg import FigureImage
from pipeline.report.tables import PageTable, Row, cell, labels, page_table, readable
from pipeline.report.templates import render
from pipeline.report.wording import trial as wording
from pipeline.trial.config import TrialConfig

PAGE = "trial.html"
MOST_ROWS = 12
"""Rows of the overview; the table below it holds all of them."""


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
        verification=wording.verification(facts["selections"], settings, config.models, shifted),
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
        title=wording.OVERVIEW_TITLE,
        header=header,
        rows=[
            [
                *(str(row[setting]) for setting in settings),
                row["selection"],
                row["procedure"],
                f"{row['target']:g}",
                cell(row, "fdr"),
                cell(row, "power"),
                wording.outcome(row),
            ]
            for row in shown[:MOST_ROWS]
        ],
        caption=wording.overview_caption(MOST_ROWS, len(shown)) if short else "",
    )
