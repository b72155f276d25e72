"""ROC curves of several detectors in one figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from pipeline.report.figures import INK, SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito
LEAST_RATE = 1e-3


def roc_figure(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    areas: Mapping[str, float | None],
    kinds: tuple[str, str],
    dashed: str | None = None,
) -> bytes:
    """ROC curves of detectors, on plain axes and, for small false positive rates, on logarithmic ones: a PNG.

    Args:
        curves: detector -> FPR and TPR, each (thresholds + 1,); none where there are documents of one kind alone.
        areas: AUC of the same detectors.
        kinds: what the documents to be told apart are called, members first.
        dashed: the detector that is drawn so, if any.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 4.8), layout="constrained", facecolor="white")
        plain, small = figure.subplots(1, 2)
        for (name, (fpr, tpr)), colour in zip(curves.items(), cycle(COLOURS)):
            style = "--" if name == dashed else "-"
            label = f"{name} {areas[name]:.3f}"
            plain.plot(fpr, tpr, style, color=colour, label=label, drawstyle="steps-post")
            small.plot(fpr, tpr, style, color=colour, drawstyle="steps-post")
        chance = np.geomspace(LEAST_RATE, 1, 50)
        for axes, line in ((plain, np.array([0.0, 1.0])), (small, chance)):
            axes.plot(line, line, color=INK, linewidth=0.8, linestyle=":")
            axes.set_xlabel(f"FPR: {kinds[1]} documents at or above a threshold")
        plain.set_ylabel(f"TPR: {kinds[0]} documents there")
        small.set(xscale="log", yscale="log", xlim=(LEAST_RATE, 1), ylim=(LEAST_RATE, 1.1))
        for axis in (small.xaxis, small.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        if curves:
            figure.legend(loc="outside upper left", ncols=3, alignment="left", title="AUC")
        else:
            plain.set_title(f"not defined: there are no {kinds[0]} documents, or no {kinds[1]} ones")
        return rendered(figure)


def rendered(figure: Figure) -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
