"""The page of a comparison: one HTML file that needs nothing else, in the style of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.compare.comparison import CHANGES_FILE, Comparison, PairedScores
from pipeline.errors import UserError
from pipeline.report.names import run_names
from pipeline.report.svg import BLUE, FigureImage, draw, label
from pipeline.report.templates import render
from pipeline.report.wording import comparison as wording
from pipeline.store.files import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_FILE = "comparison.html"

BINS = 48
FAINTEST = 0.35
"""Opacity of a cell with one document."""

TAIL = 0.001
"""Share of the documents at each end whose scores are drawn at the edge."""


def write_comparison(store: Store, comparison: Comparison, scores: Mapping[str, PairedScores]) -> str:
    """Write comparison.html; the same comparison gives the same bytes.

    Args:
        store: the folder of the comparison.
        comparison: what was compared.
        scores: of each selection, by name.

    Returns:
        the path or URL of the page.
    """
    page = render(
        f"pipeline.compare/{PAGE_FILE}",
        comparison=comparison,
        figures={name: score_figure(name, paired) for name, paired in scores.items()},
        changes_file=CHANGES_FILE,
        plain=_plain,
        folder_names=run_names(comparison.a.run, comparison.b.run),
    )
    store.write(PAGE_FILE, page.encode("utf-8", "replace"))
    return f"{store.url}/{PAGE_FILE}"


def score_figure(selection: str, paired: PairedScores) -> FigureImage | None:
    """The scores of both runs as a density of documents; None where equal scores, or none, leave nothing to draw."""
    pair = paired.pair
    if pair.spearman is None:
        return None
    spans = [_span(values) for values in (paired.a, paired.b)]
    a, b = (np.clip(values, *span) for values, span in zip((paired.a, paired.b), spans, strict=True))
    counts, _, _ = np.histogram2d(a, b, bins=BINS, range=spans)

    def paint(figure: Figure, axes: Axes) -> None:
        from matplotlib.colors import to_rgba_array

        logs = np.log(np.maximum(counts, 1))
        opacity = (FAINTEST + (1 - FAINTEST) * logs / max(float(logs.max()), 1.0)) * (counts > 0)
        extent = (*spans[0], *spans[1])
        cells = to_rgba_array([BLUE]).repeat(BINS**2, axis=0).reshape(BINS, BINS, 4)
        cells[..., 3] = opacity.T
        axes.imshow(cells, extent=extent, origin="lower", aspect="auto", interpolation="none")
        axes.set_xlabel(f"A: {label(pair.detector_a)}")
        axes.set_ylabel(f"B: {label(pair.detector_b)}")

    return draw(
        f"scores-{selection}.svg",
        wording.scores_title(pair.n_documents, pair.sampled),
        wording.scores_alt((pair.detector_a, pair.detector_b), pair.n_documents, pair.sampled, pair.spearman),
        wording.SCORES_CAPTION,
        paint,
    )


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    return (float(low), float(high)) if high > low else (float(values.min()), float(values.max()))


def _plain(value: Any) -> str:
    """A value of a configuration on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def open_output(folder: str, mark: str) -> Store:
    """A folder for the files of one command; what an earlier time of it left there is replaced.

    Args:
        folder: local path or fsspec URL; need not exist.
        mark: the JSON file that the command writes, by which a folder of its own is known.

    Raises:
        UserError: the folder holds other files.
    """
    store = Store(folder)
    names = store.names("")
    if names and mark not in names:
        raise UserError(f"{folder} holds other files ({', '.join(names[:3])}): give --output another folder")
    return store
