"""Scores of one run against those of another: how many documents stand where, as inline SVG with a text alternative."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.compare.comparison import PairedScores
from pipeline.report.wording import comparison as wording

BINS = 48
SIZE = 480  # of the square, in units of the drawing
FAINTEST = 0.35  # opacity of a cell with one document
_TAIL = 0.001  # share of the documents at each end whose scores are drawn at the edge


@dataclass(frozen=True, slots=True)
class Cell:
    """A square of the figure: its corner from the top left, how dark it is, and how many documents it stands for."""

    x: float
    y: float
    opacity: float
    count: int


@dataclass(frozen=True, slots=True)
class DensityFigure:
    """A figure of cells, and what it says in words."""

    title: str
    alt: str
    cells: list[Cell]
    size: int
    cell: float  # side of a cell
    x_ticks: list[tuple[float, str]]  # place from the left, and the score there
    y_ticks: list[tuple[float, str]]  # place from the top
    x_label: str
    y_label: str


def density_figure(paired: PairedScores) -> DensityFigure | None:
    """The scores of both runs as a figure; None where equal scores, or none, leave nothing to draw."""
    pair = paired.pair
    if pair.spearman is None:
        return None
    spans = [_span(values) for values in (paired.a, paired.b)]
    places = [
        np.clip(((values - low) / (high - low) * BINS).astype(np.int64), 0, BINS - 1)
        for values, (low, high) in zip((paired.a, paired.b), spans, strict=True)
    ]
    counts = np.zeros((BINS, BINS), dtype=np.int64)
    np.add.at(counts, (places[0], places[1]), 1)
    darkness = FAINTEST + (1 - FAINTEST) * np.log1p(counts - 1.0, where=counts > 0, out=np.zeros(counts.shape)) / max(
        np.log(counts.max()), 1.0
    )
    side = SIZE / BINS
    cells = [
        Cell(round(i * side, 2), round(SIZE - (j + 1) * side, 2), round(float(darkness[i, j]), 3), int(counts[i, j]))
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]
    return DensityFigure(
        title=wording.scores_title(pair.n_documents, pair.sampled),
        alt=wording.scores_alt((pair.detector_a, pair.detector_b), pair.n_documents, pair.sampled, pair.spearman),
        cells=cells,
        size=SIZE,
        cell=round(side, 2),
        x_ticks=_ticks(*spans[0]),
        y_ticks=[(round(SIZE - place, 1), text) for place, text in _ticks(*spans[1])],
        x_label=f"A: {pair.detector_a}",
        y_label=f"B: {pair.detector_b}",
    )


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [_TAIL, 1 - _TAIL])
    if high <= low:
        low, high = values.min(), values.max()
    return float(low), float(high)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Four places along an axis, and the score at each."""
    return [(round(SIZE * share, 1), f"{low + share * (high - low):.3g}") for share in (0.0, 1 / 3, 2 / 3, 1.0)]
