"""Write an evaluation: its figures as JSON, the ROC curves, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from pipeline.answers.detection import tpr_at
from pipeline.answers.evaluation import Evaluated, Evaluation, is_blind
from pipeline.config.models import display_name
from pipeline.report.contents import model_name
from pipeline.report.figures import plain_logs
from pipeline.report.tables import PageTable, evaluation_table, page_table
from pipeline.report.templates import COLOURS, INK, FigureImage, draw, label, put_legend, render
from pipeline.run.manifest import read_run
from pipeline.store.files import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "evaluation"

LEAST_RATE = 1e-3
SMALL_RATE = 0.01
ALL_POINTS = 1200
NAMED = 12
"""Maximum number of drawn detectors; the table has all of them."""

Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]


DASHED = ", the dashed curve the classifier that never saw the model"


def write_evaluation(store: Store, evaluated: Evaluated) -> str:
    """Write evaluation.json, roc.svg, roc-small.svg and evaluation.html into the folder evaluation/ of a run directory.

    No text of a document is written. The same scores and seed give the same bytes.

    Args:
        store: the run directory.
        evaluated: result of `pipeline.answers.evaluation.evaluate_scores`.

    Returns:
        the path or URL of evaluation.html.

    Raises:
        UserError: not a run directory, or a damaged manifest.
    """
    evaluation = evaluated.evaluation
    manifest, _ = read_run(store)
    areas = {row.detector: row.auc.value for row in evaluation.rows if row.group is None}
    figures = roc_figures(
        evaluated.curves, areas, ("seen", "unseen"), dashed=next(filter(is_blind, evaluated.curves), None)
    )
    grouped = any(row.group is not None for row in evaluation.rows)
    page = render(
        "evaluation.html",
        evaluation=evaluation,
        model=model_name(manifest.config.model),
        path=display_name(manifest.config.model),
        headline=headline(evaluation),
        table=_table(evaluation, of_groups=False),
        groups=_table(evaluation, of_groups=True) if grouped else None,
        figures=figures,
        provenance=manifest,
    )
    for figure in figures:
        store.write(f"{FOLDER}/{figure.file}", figure.svg)
    store.write(f"{FOLDER}/evaluation.html", page.encode("utf-8", "replace"))
    store.write_json(f"{FOLDER}/evaluation.json", evaluation.plain())
    return f"{store.url}/{FOLDER}/evaluation.html"


def headline(evaluation: Evaluation) -> str:
    """The detector with the highest AUC over all documents, with its interval."""
    rows = [row for row in evaluation.rows if row.group is None and not is_blind(row.detector)]
    defined = [(row.auc.value, row) for row in rows if row.auc.value is not None]
    if not defined:
        return "No figure is defined: only documents of one kind are compared."
    value, row = max(defined, key=lambda pair: pair[0])
    interval = "" if row.auc.low is None else f", 95% interval {row.auc.low:.3f} to {row.auc.high:.3f}"
    of = f"{len(rows):,} detector{'' if len(rows) == 1 else 's'}"
    return f"The highest AUC of {of}: {row.detector} {value:.3f}{interval}."


def _table(evaluation: Evaluation, of_groups: bool) -> PageTable:
    rows = [row for row in evaluation.rows if (row.group is not None) == of_groups]
    return page_table(evaluation_table(evaluation.model_copy(update={"rows": rows})))


def roc_figures(
    curves: Curves, areas: Mapping[str, float | None], kinds: tuple[str, str], dashed: str | None = None
) -> list[FigureImage]:
    """The ROC curves of detectors, whole and at small false positive rates.

    Args:
        curves: detector -> FPR and TPR, each (thresholds + 1,); empty where all documents are of one kind.
        areas: AUC of the same detectors.
        kinds: names of the two kinds of documents, members first.
        dashed: the detector that is drawn dashed, if any.
    """
    members, others = kinds
    undefined = f"not defined: there are no {members} documents, or no {others} ones"
    best = sorted(curves, key=lambda name: (name != dashed, -(areas[name] or 0)))[:NAMED]
    left = f", and of {len(curves) - NAMED} more" if len(curves) > NAMED else ""
    curves = {name: curve for name, curve in curves.items() if name in best}
    whole = ", ".join(f"{label(name)} {areas[name]:.3f}" for name in curves) + left
    small = ", ".join(f"{label(name)} {tpr_at(*curve, SMALL_RATE):.3f}" for name, curve in curves.items()) + left
    chance = f"The dotted line is chance{'' if dashed is None else DASHED}."
    if left:
        chance += f" The {NAMED} detectors with the largest AUC are drawn; the table has all of them."

    def paint(figure: Figure, axes: Axes, logarithmic: bool) -> None:
        points = ALL_POINTS // max(1, len(curves))
        for (name, curve), colour in zip(curves.items(), cycle(COLOURS)):
            fpr, tpr = _thinned(*curve, points, logarithmic)
            shown = f"{label(name)} {areas[name]:.3f}"
            style = "--" if name == dashed else "-"
            axes.plot(fpr, tpr, style, color=colour, label=shown, drawstyle="steps-post", linewidth=1.5)
        line = np.geomspace(LEAST_RATE, 1, 50) if logarithmic else np.array([0.0, 1.0])
        axes.plot(line, line, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"FPR: {others} documents at or above a threshold")
        axes.set_ylabel(f"TPR: {members} documents there")
        if logarithmic:
            axes.set(xscale="log", yscale="log", xlim=(LEAST_RATE, 1), ylim=(LEAST_RATE, 1.1))
            plain_logs(axes)
        if curves:
            put_legend(figure, "AUC")
        else:
            axes.set_title(undefined, fontsize=9)

    return [
        draw(
            "roc.svg",
            "ROC curves",
            f"Share of {members} documents at or above each threshold over that of {others} ones; "
            f"{f'AUC: {whole}' if curves else undefined}.",
            f"All documents. {chance}",
            lambda figure, axes: paint(figure, axes, False),
        ),
        draw(
            "roc-small.svg",
            "ROC curves at small false positive rates",
            f"The same on logarithmic axes; {f'TPR at {SMALL_RATE:.0%} FPR: {small}' if curves else undefined}.",
            f"Logarithmic axes, on which small false positive rates show. {chance}",
            lambda figure, axes: paint(figure, axes, True),
        ),
    ]


def _thinned(fpr: np.ndarray, tpr: np.ndarray, points: int, logarithmic: bool) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points of a curve, about equally spaced on the axes of the figure."""
    if fpr.size <= points:
        return fpr, tpr
    x, y = (np.log(np.maximum(rate, LEAST_RATE)) if logarithmic else rate for rate in (fpr, tpr))
    way = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    keep = np.unique(np.searchsorted(way, np.linspace(0, way[-1], points - 1)))
    keep = np.unique(np.append(np.clip(keep, 0, fpr.size - 1), [0, fpr.size - 1]))
    return fpr[keep], tpr[keep]
