"""The page of a schedule of scans: one self-contained HTML file in the style of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.compare.output_places import PagePlace
from pipeline.report.templates import (
    BLUE,
    COLOURS,
    INK,
    ORANGE,
    FigureImage,
    count_axis,
    draw,
    label,
    put_legend,
    render,
)
from pipeline.selection.guarantees import ConclusionValue
from pipeline.series import series_text as wording
from pipeline.series.summary import LISTED, SeriesSummary, series_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES_PAGE, SERIES_FILE = "series.html", "series.json"


def write_series_page(place: PagePlace, summary: SeriesSummary) -> str:
    """Write the page; the same summary gives the same bytes.

    Args:
        place: place of the page.
        summary: summary of the schedule.

    Returns:
        the path or URL of the page.
    """
    page = render(
        f"pipeline.series/{SERIES_PAGE}",
        summary=summary,
        rows=list(series_rows(summary)),
        figure=series_figure(summary) if summary.latest is not None else None,
        listed=LISTED,
    )
    return place.write(page, summary.plain())


def series_figure(summary: SeriesSummary) -> FigureImage:
    """Documents selected by each scan, one line per selection; crosses where a check contradicts the guarantee."""
    from matplotlib.ticker import MaxNLocator

    lines = {
        one.name: [
            (scan.slot, a.n_selected, a.conclusion)
            for scan in summary.scans
            for a in scan.answers
            if a.name == one.name
        ]
        for one in summary.selections
    }

    def paint(figure: Figure, axes: Axes) -> None:
        for index, (name, points) in enumerate(lines.items()):
            x, y = [slot for slot, _, _ in points], [count for _, count, _ in points]
            axes.plot(x, y, color=COLOURS[index % len(COLOURS)] if index else BLUE, marker="o", label=label(name))
            void = [(slot, count) for slot, count, one in points if one == ConclusionValue.CONTRADICTED]
            if void:
                axes.plot(*zip(*void, strict=True), "x", color=ORANGE, markersize=11, label="contradicted")
        if summary.unfiled:
            axes.plot(summary.unfiled, [0] * len(summary.unfiled), "|", color=INK, markersize=11, label="no result")
        axes.set_xlabel("scan")
        axes.set_ylabel("documents selected")
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        count_axis(axes)
        put_legend(figure)

    return draw(
        "series-course.svg",
        wording.FIGURE_TITLE,
        wording.figure_alt({label(name): points for name, points in lines.items()}, summary.unfiled),
        wording.FIGURE_CAPTION,
        paint,
    )
