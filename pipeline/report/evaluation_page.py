"""Write an evaluation: its figures as JSON, the ROC curves, and one HTML page that needs nothing else."""

from __future__ import annotations

from pipeline.audit.evaluation import Evaluated, Evaluation, is_blind
from pipeline.audit.manifest import read_run
from pipeline.config.models import display_name
from pipeline.report.names import model_name
from pipeline.report.roc import roc_figures
from pipeline.report.tables import PageTable, evaluation_table, page_table
from pipeline.report.templates import render
from pipeline.store.files import Store

FOLDER = "evaluation"


def write_evaluation(store: Store, evaluated: Evaluated) -> str:
    """Write evaluation.json, roc.svg, roc-small.svg and evaluation.html into the folder evaluation/ of a run directory.

    No text of a document is written. The same scores and seed give the same bytes.

    Args:
        store: the run directory.
        evaluated: from `pipeline.audit.evaluation.evaluate_scores`.

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
    store.remove(f"{FOLDER}/roc.png")  # of an earlier version
    store.write(f"{FOLDER}/evaluation.html", page.encode("utf-8", "replace"))
    store.write_json(f"{FOLDER}/evaluation.json", evaluation.plain())
    return f"{store.url}/{FOLDER}/evaluation.html"


def headline(evaluation: Evaluation) -> str:
    """The detector with the highest AUC over all documents, with its interval."""
    rows = [row for row in evaluation.rows if row.group is None and not is_blind(row.detector)]
    defined = [(row.auc.value, row) for row in rows if row.auc.value is not None]
    if not defined:
        return "No figure is defined: documents of one kind alone are compared."
    value, row = max(defined, key=lambda pair: pair[0])
    interval = "" if row.auc.low is None else f", 95% interval {row.auc.low:.3f} to {row.auc.high:.3f}"
    of = f"{len(rows):,} detector{'' if len(rows) == 1 else 's'}"
    return f"The highest AUC of {of}: {row.detector} {value:.3f}{interval}."


def _table(evaluation: Evaluation, of_groups: bool) -> PageTable:
    rows = [row for row in evaluation.rows if (row.group is not None) == of_groups]
    return page_table(evaluation_table(evaluation.model_copy(update={"rows": rows})))
