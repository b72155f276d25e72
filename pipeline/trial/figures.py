"""The figures of a trial: FDR and power over the sweep, AUC over the sweep or ROC curves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.report.figures import INK, SETTINGS
from pipeline.trial.table import Row

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def sweep_figure(rows: Sequence[Row], settings: Sequence[str]) -> bytes:
    """FDR, with its target, and power of each selection over the first setting of the sweep: a PNG.

    Without a sweep the selections stand side by side. Further settings make further lines.
    """
    axis = settings[0] if settings else "selection"
    lines = _lines(rows, axis, [*settings[1:], *(["selection"] if settings else [])])
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(10.8, 4.2), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        _draw(left, lines, axis, "fdr", "realised FDR (95% interval)")
        _draw_targets(left, rows, axis)
        _draw(right, lines, axis, "power", "power (95% interval)")
        right.set_ylim(-0.03, 1.03)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, alignment="left")
        return _png(figure)


def detector_figure(rows: Sequence[Row], settings: Sequence[str]) -> bytes:
    """AUC of each detector over the first setting of the sweep: a PNG."""
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.6, 4.2), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        _draw(axes, _lines(rows, settings[0], [*settings[1:], "detector"]), settings[0], "auc", "AUC (95% interval)")
        axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=":")
        figure.legend(loc="outside upper left", ncols=3, alignment="left")
        return _png(figure)


def roc_figure(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], rows: Sequence[Row]) -> bytes:
    """ROC curves of the detectors on one contaminated model: a PNG.

    Args:
        curves: detector -> FPR and TPR, each (thresholds + 1,).
        rows: of the same detectors, for the AUC.
    """
    areas = {row["detector"]: row["auc"] for row in rows}
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.6, 4.6), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for (name, (fpr, tpr)), colour in zip(curves.items(), cycle(COLOURS)):
            axes.plot(fpr, tpr, color=colour, label=f"{name} {areas[name]:.3f}", drawstyle="steps-post")
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("share of untrained documents at or above the threshold (FPR)")
        axes.set_ylabel("share of trained ones (TPR)")
        figure.legend(loc="outside upper left", ncols=3, alignment="left", title="AUC")
        return _png(figure)


def _lines(rows: Sequence[Row], axis: str, by: Sequence[str]) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) if key in ("selection", "detector") else f"{key}={row[key]}" for key in by)
        lines.setdefault(name, []).append(row)
    return lines


def _places(rows: Sequence[Row], axis: str) -> dict[Any, float]:
    """Where each value of a setting stands: numbers at their value, words side by side."""
    values = list(dict.fromkeys(row[axis] for row in rows))
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return {value: float(value) for value in values}
    return {value: float(place) for place, value in enumerate(values)}


def _draw(axes: Axes, lines: Mapping[str, Sequence[Row]], axis: str, figure: str, label: str) -> None:
    everything = [row for rows in lines.values() for row in rows]
    places = _places(everything, axis)
    numeric = all(value == place for value, place in places.items())
    for (name, rows), colour, marker in zip(lines.items(), cycle(COLOURS), cycle(MARKERS)):
        defined = [row for row in rows if row[figure] is not None]
        x = [places[row[axis]] for row in defined]
        y = np.array([row[figure] for row in defined])
        low, high = (np.array([row[f"{figure}_{end}"] for row in defined]) for end in ("low", "high"))
        spread = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
        style = "-" if numeric else "none"
        axes.errorbar(
            x, y, spread, color=colour, marker=marker, markersize=4, linestyle=style, capsize=2, label=name or None
        )
    if not numeric:
        axes.set_xticks(list(places.values()), [str(value) for value in places], rotation=20, ha="right")
        axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(axis)
    axes.set_ylabel(label)


def _draw_targets(axes: Axes, rows: Sequence[Row], axis: str) -> None:
    places = _places(rows, axis)
    found = sorted({(places[row[axis]], row["target"]) for row in rows})
    x, y = zip(*found, strict=True)
    if len(set(y)) == 1:
        axes.axhline(y[0], color=INK, linewidth=1, linestyle="--", label="target")
    elif len(set(x)) == len(x):
        axes.plot(x, y, color=INK, linewidth=1, linestyle="--", label="target")
    else:
        axes.plot(x, y, color=INK, marker="_", markersize=14, linestyle="none", label="target")


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
