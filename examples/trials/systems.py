"""Several systems on one contaminated model: one trial for each selection of a file, with its detectors alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import yaml
from rich.table import Table

from examples.demo.demo import seenset
from pipeline.answers.detection import DetectorScores, detection
from pipeline.config.selection import SelectionConfig
from pipeline.config.yaml import read_mapping
from pipeline.detectors.registry import parse_detectors
from pipeline.report.tables import as_text
from pipeline.trial.config import TrialConfig, load_trial
from pipeline.trial.trial import contaminate, plan_contamination
from pipeline.trial.trial_documents import read_documents


def run_systems(path: Path, models: Sequence[str]) -> int:
    """Contaminate, run each system's trial and print the table; the exit code of the first that fails, or 0.

    Args:
        path: of a trial whose selections are the systems, by name.
        models: `--set a.b=c` arguments that say where its models are.

    Raises:
        UserError: the trial's configuration is wrong, or it has too few documents.
    """
    config, _ = load_trial(str(path), models[1::2])
    seconds = {"training": _timed(lambda: _contaminate(config))}
    for selection in config.selections:
        trial_file = read_mapping(str(path), TrialConfig)
        columns = set(selection.detectors)
        changes = {
            "run": f"{config.run}/{selection.name}",
            "detectors": [entry for entry in config.detectors if columns & object_columns(entry)],
            "selections": [entry for entry in trial_file["selections"] if entry["name"] == selection.name],
        }
        trial = Path(config.run) / f"{selection.name}.yaml"
        trial.write_text(yaml.safe_dump({**trial_file, **changes}, sort_keys=False), encoding="utf-8")
        code = 0

        def run(trial: Path = trial) -> None:
            nonlocal code
            code = seenset("trial", str(trial), *models)

        seconds[selection.name] = _timed(run)
        if code:
            return code
    shown = as_text([_table(config, seconds)])
    (Path(config.run) / "tables.txt").write_text(shown, encoding="utf-8")
    print(shown, end="")
    print(f"training: {seconds['training']:.0f} s", flush=True)
    return 0


def _timed(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _contaminate(config: TrialConfig) -> None:
    """Train the model that all systems audit before they are timed."""
    documents = read_documents(config)
    Path(config.run).mkdir(parents=True, exist_ok=True)
    contaminate(config, plan_contamination(config, config, documents, 0), documents, 0)


def object_columns(entry: Any) -> set[str]:
    """The score columns of an entry of `detectors`."""
    return {detector.column for detector in parse_detectors([entry])}


def _table(config: TrialConfig, seconds: dict[str, float]) -> Table:
    scope = "95% intervals over re-splits of these documents, this model (AUC: over documents)"
    title = f"{len(config.selections)} systems on one contaminated model, {config.repeats} repeats, {scope}"
    table = Table("system", "procedure", title=title)
    for name in ("AUC", "target", "FDR", "power", "seconds"):
        table.add_column(name, justify="right")
    for selection in config.selections:
        folder = Path(config.run) / selection.name
        (row,) = json.loads((folder / "selections.json").read_text(encoding="utf-8"))
        figures = [_shown(*(row[f"{name}{end}"] for end in ("", "_low", "_high"))) for name in ("fdr", "power")]
        auc = _shown(*_auc(config, selection, folder))
        cells = [auc, f"{row['target']:g}", *figures, f"{seconds[selection.name]:.0f}"]
        table.add_row(selection.name, selection.procedure, *cells)
    return table


def _auc(config: TrialConfig, selection: SelectionConfig, folder: Path) -> tuple[float | None, ...]:
    """AUC and interval: of one detector over all documents, of several by their joint p-value over audited ones."""
    if len(selection.detectors) == 1:
        rows = json.loads((folder / "detectors.json").read_text(encoding="utf-8"))
        (row,) = [row for row in rows if row["detector"] == selection.detectors[0]]
        return row["auc"], row["auc_low"], row["auc_high"]
    (audit,) = [model["audit"] for model in json.loads((folder / "trial.json").read_text(encoding="utf-8"))["models"]]
    answer = Path(config.work_folder) / "audits" / audit / "run" / "selection" / selection.name / "documents"
    p_values = ds.dataset(answer).to_table(["doc_id", "p_value"])
    truth = ds.dataset(folder / "truth" / f"{audit}.parquet").to_table()
    trained = dict(zip(truth["doc_id"].to_pylist(), truth["trained"].to_pylist(), strict=True))
    is_in = np.array([trained[doc_id] for doc_id in p_values["doc_id"].to_pylist()])
    score = -np.asarray(p_values["p_value"])
    auc = detection([DetectorScores(score[is_in], score[~is_in])]).auc
    return auc.value, auc.low, auc.high


def _shown(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "not defined"
    return f"{value:.3f} (no interval)" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
