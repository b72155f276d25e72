"""Write an evaluation: its figures as JSON, the ROC curves, and one HTML page that needs nothing else."""

from __future__ import annotations

from pipeline.audit.evaluation import BLIND, Evaluated
from pipeline.audit.manifest import read_run
from pipeline.report.figures import FigureImage
from pipeline.report.roc import roc_figure
from pipeline.report.tables import evaluation_table, page_table
from pipeline.report.templates import data_uri, render
from pipeline.report.wording import model_name
from pipeline.store.files import Store

FOLDER = "evaluation"


def write_evaluation(store: Store, evaluated: Evaluated) -> str:
    """Write evaluation/evaluation.json, evaluation/roc.png and evaluation/evaluation.html into a run directory.

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
    names = ", ".join(f"{name} {area:.3f}" for name, area in areas.items() if area is not None)
    figure = FigureImage(
        file="roc.png",
        title="ROC curves",
        alt=f"Share of seen documents at or above each threshold, over that of unseen ones; AUC: {names}.",
        caption="All documents; on the right the same with logarithmic axes, where small false positive rates show. "
        "The dotted line is chance, the dashed curve the classifier on the words.",
        png=roc_figure(evaluated.curves, areas, ("seen", "unseen"), dashed=BLIND),
    )
    page = render(
        "evaluation.html",
        evaluation=evaluation,
        model=model_name(manifest.config.model),
        table=page_table(evaluation_table(evaluation)),
        figure=figure,
        uri=data_uri(figure.png),
        provenance=manifest,
    )
    store.write(f"{FOLDER}/{figure.file}", figure.png)
    store.write(f"{FOLDER}/evaluation.html", page.encode("utf-8", "replace"))
    store.write_json(f"{FOLDER}/evaluation.json", evaluation.plain())
    return f"{store.url}/{FOLDER}/evaluation.html"
