"""Made-up pages of a run, a trial and an evaluation, where every name and text that a user can choose runs a script."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.answers.detection import Estimate
from pipeline.answers.evaluation import BLIND, ComparedDocuments, DetectorEvaluation, Evaluated, Evaluation
from pipeline.answers.selected import AlphaCurve, GroupCounts
from pipeline.config.models import ModelConfig
from pipeline.report.evaluation_page import roc_figures, write_evaluation
from pipeline.run.manifest import read_run, write_manifest
from pipeline.store.files import Store
from pipeline.trial.table import selection_table
from pipeline.trial.trial_page import selection_figures, trial_page
from tests.helpers.report_run import build_run
from tests.helpers.signed import sign
from tests.helpers.trials import facts_of, swept_rows

CALL = "document.documentElement.dataset.ran='{}';alert('{}')"
CURVE = (np.linspace(0, 1, 101), np.linspace(0, 1, 101) ** 0.5)


def script(place: str) -> str:
    """Markup that runs a script in three ways, were it ever read as markup."""
    call = CALL.format(place, place)
    return f'</script><script>{call}</script><img src=x onerror="{call}"><svg onload="{call}"></svg>{{{{7*7}}}} {place}'


def hostile_run(folder: Path) -> Store:
    """A run whose model, inputs, ids, texts and groups are markup."""
    folder.mkdir(parents=True)
    store = build_run(folder, selections=({}, {"name": "wide", "alpha": 0.3}))
    manifest, _ = read_run(store)
    model = ModelConfig(path=f"models/{script('model')}")
    inputs = [entry.model_copy(update={"name": f"{entry.name}{script('input')}"}) for entry in manifest.inputs]
    config = manifest.config.model_copy(update={"model": model})
    write_manifest(store, manifest.model_copy(update={"config": config, "inputs": inputs}))
    for name in ("members", "wide"):
        table = store.read_table(f"selection/{name}/selected.parquet")
        rows = len(table)
        columns = {
            "doc_id": [f"{script('id')} {row}" for row in range(rows)],
            "source": [f"folder/{script('file')}"] * rows,
        }
        for column, values in columns.items():
            table = table.set_column(table.schema.get_field_index(column), column, pa.array(values))
        texts = pa.array([f"{script('text')} number {row}" for row in range(rows)], pa.string())
        store.write_table(f"selection/{name}/selected.parquet", table.append_column("excerpt", texts))
        groups = GroupCounts(n_scored={script("group"): 120, "news": 116}, n_selected={script("group"): 60, "news": 50})
        store.write_json(f"selection/{name}/groups.json", groups.plain())
        counts = {"n_selected": [90, 110, 140], "right_at_least": [80, 90, 85]}
        curve = AlphaCurve(alphas=[0.05, 0.1, 0.3], confidence=0.95, **counts)
        store.write_json(f"selection/{name}/alphas.json", curve.plain())
    return sign(store)


def write_trial_page(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config, rows, settings = swept_rows()
    changes = {"model": ModelConfig(path=f"models/{script('model')}")}
    changes["documents"] = config.documents.model_copy(update={"path": f"{script('file')}.jsonl"})
    config = config.model_copy(update=changes)
    facts = facts_of(rows, config, script("model"))
    curves = roc_figures({"loss": CURVE}, {"loss": 2 / 3}, ("trained", "untrained"))
    images = [*selection_figures(rows, settings), *curves]
    page = trial_page(config, facts, settings, [selection_table(rows, settings)], images, [script("report")])
    path = folder / "trial.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_evaluation_page(folder: Path) -> Path:
    store = hostile_run(folder)
    rows = [
        DetectorEvaluation(
            detector=detector,
            group=group,
            n_seen=60,
            n_unseen=60,
            auc=Estimate(0.5 + at / 10, 0.4 + at / 10, 0.6 + at / 10),
            tpr={rate: Estimate(0.1, 0.05, 0.2) for rate in ("0.01", "0.05", "0.1")},
        )
        for group in (None, script("group"), "news")
        for at, detector in enumerate((BLIND, "loss", "min_k(k=0.1)"))
    ]
    counts = {"n_in": 62, "n_compared": 60, "n_quarantined": 2, "n_finetuned": 0, "n_truncated": 3}
    documents = [ComparedDocuments(role=role, reasons={"empty": 2}, **counts) for role in ("seen", "unseen")]
    evaluation = Evaluation(
        run=store.url,
        model=script("model"),
        limit=None,
        seed=0,
        confidence=0.95,
        documents=documents,
        n_shared=0,
        notices=[f"A notice that quotes {script('notice')}."],
        rows=rows,
    )
    curves = dict.fromkeys((BLIND, "loss", "min_k(k=0.1)"), CURVE)
    return Path(write_evaluation(store, Evaluated(evaluation, curves, {"seen": 60, "unseen": 60}, 60, True, 0)))
