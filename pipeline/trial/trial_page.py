"""The page of a trial, and its figures over the sweep: FDR and power, and AUC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from pipeline.config.models import display_name
from pipeline.report.contents import model_name
from pipeline.report.tables import (
    PageTable,
    Row,
    cell,
    labels,
    of_numbers,
    page_table,
    readable,
)
from pipeline.report.templates import COLOURS, INK, FigureImage, draw, label, put_legend, render
from pipeline.trial import trial_text as wording
from pipeline.trial.config import TrialConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Ticks = tuple[str, list[str]]

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOST_LEVEL = 5
"""Maximum number of names side by side under an axis; more of them are rotated."""

MOST_ROWS = 12
"""Maximum number of rows in the overview; the table below it has all."""


def selection_figures(rows: Sequence[Row], settings: Sequence[str]) -> list[FigureImage]:
    """FDR, with its target, and power of each selection over the first setting of the sweep.

    Without a sweep the selections are side by side. Further settings make further lines.

    Args:
        rows: rows of the selections.
        settings: settings of the sweep.
    """
    axis = settings[0] if settings else "selection"
    lines = _lines(rows, settings, [*settings[1:], *(["selection"] if settings else [])])
    ticks = _ticks(rows, settings, axis)

    def paint_fdr(figure: Figure, axes: Axes) -> None:
        _draw(axes, lines, axis, ticks, "fdr", "realised FDR (95% interval)")
        _draw_targets(axes, rows, axis)
        put_legend(figure)

    def paint_power(figure: Figure, axes: Axes) -> None:
        _draw(axes, lines, axis, ticks, "power", "power (95% interval)")
        axes.set_ylim(-0.03, 1.03)
        if settings:
            put_legend(figure)

    return [
        draw(
            "fdr.svg",
            wording.FDR_TITLE,
            wording.selections_alt(rows, settings, "fdr"),
            wording.FDR_CAPTION,
            paint_fdr,
        ),
        draw(
            "power.svg",
            "Power",
            wording.selections_alt(rows, settings, "power"),
            wording.POWER_CAPTION,
            paint_power,
        ),
    ]


def detector_figure(rows: Sequence[Row], settings: Sequence[str]) -> FigureImage:
    """AUC of each detector over the first setting of the sweep."""
    lines = _lines(rows, settings, [*settings[1:], "detector"])

    def paint(figure: Figure, axes: Axes) -> None:
        _draw(axes, lines, settings[0], _ticks(rows, settings, settings[0]), "auc", "AUC (95% interval)")
        axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=":")
        put_legend(figure)

    return draw(
        "detectors.svg",
        wording.auc_title(settings),
        wording.auc_alt(rows, settings),
        wording.AUC_CAPTION,
        paint,
    )


def _lines(rows: Sequence[Row], settings: Sequence[str], by: Sequence[str]) -> dict[str, list[Row]]:
    names = {**dict(zip(settings, labels(settings), strict=True)), "selection": "", "detector": ""}
    lines: dict[str, list[Row]] = {}
    for row, cells in zip(rows, readable(rows, settings), strict=True):
        name = ", ".join(f"{names[key]} {cells[key]}".strip() for key in by)
        lines.setdefault(name, []).append(row)
    return lines


def _ticks(rows: Sequence[Row], settings: Sequence[str], axis: str) -> _Ticks:
    """Label of the axis of a sweep, and the names of its values, in order."""
    name = dict(zip(settings, labels(settings), strict=True)).get(axis, axis)
    return name, list(dict.fromkeys(str(row[axis]) for row in readable(rows, settings)))


def _places(rows: Sequence[Row], axis: str) -> dict[Any, float]:
    """Position of each value of a setting on the axis: numbers at their value, text values side by side."""
    values = list(dict.fromkeys(row[axis] for row in rows))
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return {value: float(value) for value in values}
    return {value: float(place) for place, value in enumerate(values)}


def _draw(axes: Axes, lines: Mapping[str, Sequence[Row]], axis: str, ticks: _Ticks, figure: str, name_y: str) -> None:
    places = _places([row for rows in lines.values() for row in rows], axis)
    numeric = all(value == place for value, place in places.items())
    width = (max(places.values()) - min(places.values())) / 25 if numeric else 0.4
    # A little apart, so that no interval hides another.
    offsets = np.linspace(-width / 2, width / 2, len(lines)) / (2 if numeric else 1) if len(lines) > 1 else [0.0]
    for (name, rows), offset, colour, marker in zip(lines.items(), offsets, cycle(COLOURS), cycle(MARKERS)):
        defined = [row for row in rows if row[figure] is not None]
        x = np.array([places[row[axis]] for row in defined]) + offset
        y = np.array([row[figure] for row in defined])
        ends = (
            [row[figure] if row[f"{figure}_{end}"] is None else row[f"{figure}_{end}"] for row in defined]
            for end in ("low", "high")
        )
        low, high = (np.array(end) for end in ends)
        spread = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
        style = "-" if numeric else "none"
        axes.errorbar(
            x,
            y,
            spread,
            color=colour,
            marker=marker,
            markersize=4,
            linestyle=style,
            elinewidth=0.9,
            capsize=2,
            label=label(name) or None,
        )
    if not numeric:
        crowded = len(places) > MOST_LEVEL
        rotation: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axes.set_xticks(list(places.values()), [label(name) for name in ticks[1]], **rotation)
        axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(ticks[0])
    axes.set_ylabel(name_y)


def _draw_targets(axes: Axes, rows: Sequence[Row], axis: str) -> None:
    places = _places(rows, axis)
    points = sorted({(places[row[axis]], row["target"]) for row in rows})
    x, y = zip(*points, strict=True)
    if len(set(y)) == 1:
        axes.axhline(y[0], color=INK, linewidth=1, linestyle="--", label="target")
    elif len(set(x)) == len(x):
        axes.plot(x, y, color=INK, linewidth=1, linestyle="--", label="target")
    else:
        axes.plot(x, y, color=INK, marker="_", markersize=14, linestyle="none", label="target")


def trial_page(
    config: TrialConfig,
    facts: Mapping[str, Any],
    settings: Sequence[str],
    tables: Sequence[Table],
    images: Sequence[FigureImage],
    reports: Sequence[str],
) -> str:
    """The page as HTML; all text is escaped, and no external resource is loaded.

    Args:
        config: the trial as written.
        facts: facts of `TrialOutcome`.
        settings: settings of the sweep.
        tables: the tables that the command prints.
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
    """The overview of the selections; if there are more than MOST_ROWS, contradicted ones come first."""
    shown = list(readable(rows, settings))
    short = len(shown) > MOST_ROWS
    if short:
        shown.sort(key=lambda row: not (row["contradicted"] or row.get("bound_contradicted")))
    caption = wording.overview_caption(MOST_ROWS, len(shown)) if short else None
    figures, title = of_numbers("target", "FDR", "power"), wording.OVERVIEW_TITLE
    columns = [*labels(settings), "selection", "procedure"]
    table = Table(*columns, *figures, "the repeats", title=title, caption=caption)
    for row in shown[:MOST_ROWS]:
        cells = f"{row['target']:g}", cell(row, "fdr"), cell(row, "power"), wording.outcome(row)
        table.add_row(*(str(row[setting]) for setting in settings), row["selection"], row["procedure"], *cells)
    return page_table(table)
