"""Tables of figures, for a terminal, a text file or a page: one row per detector, sweep settings first."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pipeline.answers.detection import RATES, Detection, Estimate
from pipeline.answers.evaluation import Evaluation
from pipeline.errors import visible

Row = dict[str, Any]


def detector_rows(settings: Mapping[str, Any], detections: Mapping[str, Detection], models: int) -> list[Row]:
    """A row for each detector: AUC and TPR at small FPR with their intervals; None where not defined.

    `untrained` is the number of independent untrained documents of the model with the fewest.
    """
    return [
        {
            **shown(settings),
            "detector": column,
            "models": models,
            "untrained": one.n_untrained,
            **_figures(one.auc, {f"{rate:g}": estimate for rate, estimate in one.tpr.items()}),
        }
        for column, one in detections.items()
    ]


def evaluation_table(evaluation: Evaluation) -> Table:
    """The figures of an evaluation for a terminal; the group "all" has all documents."""
    rows = [
        {
            "group": "all" if row.group is None else row.group,
            "detector": row.detector,
            "seen": row.n_seen,
            "unseen": row.n_unseen,
            **_figures(row.auc, row.tpr),
        }
        for row in evaluation.rows
    ]
    settings = ["group"] if any(row.group is not None for row in evaluation.rows) else []
    title = f"Seen against unseen documents, {evaluation.confidence:.0%} intervals over documents, this model"
    return detector_table(rows, settings, title, ("seen", "unseen"))


def _figures(auc: Estimate, tpr: Mapping[str, Estimate]) -> Row:
    row = spread("auc", auc)
    for rate, estimate in tpr.items():
        row.update(spread(f"tpr_at_{rate}", estimate))
    return row


def spread(name: str, estimate: Estimate) -> Row:
    """A number and the ends of its interval as cells."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def shown(settings: Mapping[str, Any]) -> Row:
    """Sweep settings as cells: numbers stay numbers, lists and mappings become text."""
    return {k: v if isinstance(v, (int, float, str)) or v is None else _text(v) for k, v in settings.items()}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def labels(settings: Sequence[str]) -> list[str]:
    """Labels of the paths of a sweep: `selections.0.alpha` is alpha, if that is unique."""
    short = [path.split(".", 2)[-1] if path.startswith("selections.") else path for path in settings]
    return [one if short.count(one) == 1 else path for one, path in zip(short, settings, strict=True)]


def readable(rows: Sequence[Row], settings: Sequence[str]) -> list[Row]:
    """The rows with their sweep settings as readable text; for paths in one folder, only the differing parts."""
    shorter: dict[str, dict[Any, str]] = {}
    for setting in settings:
        values = list(dict.fromkeys(row[setting] for row in rows))
        paths = [value for value in values if isinstance(value, str) and os.sep in value]
        alike = len(values) > 1 and len(paths) == len(values) and len(set(map(os.path.isabs, paths))) == 1
        folder = os.path.commonpath(paths) + os.sep if alike else ""
        shorter[setting] = {value: plain(value).removeprefix(folder) for value in values}
    return [{**row, **{s: shorter[s][row[s]] for s in settings}} for row in rows]


def setting_rows(table: Table, rows: Sequence[Row], settings: Sequence[str]) -> Iterator[tuple[list[Text], Row]]:
    """Each row and the cells of its settings; settings shared by several rows are printed once, with a rule."""
    before: list[str] | None = None
    keys = [[row[s] for s in settings] for row in readable(rows, settings)]
    shared = len({tuple(key) for key in keys}) < len(keys)
    for key, row in zip(keys, rows, strict=True):
        if shared and before is not None and key != before:
            table.add_section()
        yield [Text(visible(name) if key != before else "") for name in key], row
        before = key


def of_numbers(*names: str) -> list[Column]:
    """Columns of numbers, aligned to the right."""
    return [Column(name, justify="right") for name in names]


def detector_table(rows: Sequence[Row], settings: Sequence[str], title: str, counts: Sequence[str] = ()) -> Table:
    """The table of the detectors' rows for a terminal.

    Args:
        rows: rows with the settings, `detector`, the counts, and AUC and TPR with their intervals.
        settings: keys of the rows for the first columns.
        title: title of the table.
        counts: keys of numbers of documents.
    """
    figures = of_numbers(*counts, "AUC", *(f"TPR at {rate:.0%} FPR" for rate in RATES))
    table = Table(*labels(settings), "detector", *figures, title=title)
    for head, row in setting_rows(table, rows, settings):
        cells = [cell(row, name) for name in ("auc", *(f"tpr_at_{rate:g}" for rate in RATES))]
        table.add_row(*head, Text(row["detector"]), *(f"{row[name]:,}" for name in counts), *cells)
    return table


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table for a page, in plain text."""

    title: str
    header: list[tuple[str, bool]]  # name of a column, and whether it holds numbers
    rows: list[list[str]]
    caption: str


def page_table(table: Table) -> PageTable:
    """Convert a table for a terminal."""
    columns = [[_plain_text(cell) for cell in column.cells] for column in table.columns]
    return PageTable(
        title=_plain_text(table.title or ""),
        header=[(_plain_text(column.header), column.justify == "right") for column in table.columns],
        rows=[list(cells) for cells in zip(*columns, strict=True)],
        caption=_plain_text(table.caption or ""),
    )


def _plain_text(content: Any) -> str:
    return content.plain if isinstance(content, Text) else str(content)


def as_text(tables: Sequence[Table]) -> str:
    """Tables as plain text, wide enough that nothing is cut off."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=260, color_system=None)
    for table in tables:
        console.print(table)
    text = buffer.getvalue()
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def cell(row: Row, name: str) -> str:
    """A number with its interval."""
    if row[name] is None:
        return "not defined" if name != "null_estimate" else "-"
    if row[f"{name}_low"] is None:
        return f"{row[name]:.3f} (no interval)"
    return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"


def plain(value: Any) -> str:
    """A cell for a terminal."""
    return f"{value:g}" if isinstance(value, float) else str(value)
