"""The application of TD4Eval: whether a benchmark ranks models correctly on the items that were selected as clean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from rich.table import Table
from scipy.stats import rankdata, spearmanr

from pipeline.compare.harnesses.results_table import read_results_table
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError, nearest
from pipeline.report.tables import Row, cell, labels, of_numbers, readable, shown
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.joint import JointEvidence, joinable, joint_select
from pipeline.trial.config import Point, TrialConfig
from pipeline.trial.repeats import Pool, Repeat, mean_estimate, repeats
from pipeline.trial.trial_text import ACCURACY_TITLE, AGREEMENT_TITLE

ITEMS = ("all", "selected", "clean")
"""Sets of items: all audited, those selected as clean, and those that are truly clean."""


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Results of several models on the items of a benchmark."""

    models: list[str]
    correct: np.ndarray  # float64 in [0, 1], (models, documents of the trial); NaN without a result


def check_ranking(points: Sequence[Point], path: str) -> None:
    """Check what a ranking needs, before the documents of the trial are read.

    Args:
        points: points of the trial.
        path: as in `read_results`.

    Raises:
        UserError: a point without a selection of direction clean, or the errors of `read_results` without documents.
    """
    for point in points:
        _clean_selections(point.config)
    _read_models(path)


def _read_models(path: str) -> dict[str, dict[str, float]]:
    """The results of at least two models, by model and item."""
    results = read_results_table(path)
    if len(results) < 2:
        raise UserError(f"a ranking needs results of at least 2 models, {path} has {len(results)}")
    return results


def _clean_selections(config: TrialConfig) -> list[int]:
    """The positions of the selections of direction clean."""
    chosen = [i for i, selection in enumerate(config.selections) if selection.direction == "clean"]
    if not chosen:
        raise UserError("--ranking needs a selection with direction clean; all of this trial have direction members")
    return chosen


def read_results(path: str, ids: Sequence[str]) -> Results:
    """Read per-item results: a Parquet file with columns model, item and correct (a bool or a share).

    Args:
        path: local path or fsspec URL.
        ids: ids of the trial's documents, which are the items.

    Raises:
        UserError: no such file or column, an item that is not a document, two results of one item, a value outside
            [0, 1], or fewer than 2 models.
    """
    results = _read_models(path)
    models = list(results)
    column_values = {name: i for i, name in enumerate(ids)}
    correct = np.full((len(models), len(ids)), np.nan)
    for row, values in enumerate(results.values()):
        for item, value in values.items():
            if item not in column_values:
                raise UserError(f"item {item!r} in {path} is not a document of the trial; {nearest(item, ids)}")
            correct[row, column_values[item]] = value
    return Results(models, correct)


def ranking_rows(
    settings: Mapping[str, Any], config: TrialConfig, pools: Sequence[Pool], results: Results
) -> list[Row]:
    """Rank the models on all audited, the selected and the truly clean items, for each selection of direction clean.

    One row per selection and model: its mean accuracy over the repeats on each set of items and its rank there (1 is
    best, ties share), and Spearman's correlation with the ranking on the truly clean items, a mean over the repeats
    with its 95% interval: over re-splits for one contaminated model, over models for several (`models_interval`; none
    for two). Repeats in which nothing was selected count as a correlation of 0.

    For several contaminated models there are also rows for the items that are clean under every one of them, by e-BH at
    one error rate (`pipeline.selection.joint`), among the items that all of them audit; their interval is over
    re-splits of these models.

    Raises:
        UserError: no selection of direction clean, or an audited item without a result of a model.
    """
    chosen = _clean_selections(config)
    accuracies: dict[int, list[list[np.ndarray]]] = {i: [[] for _ in pools] for i in chosen}
    joint: dict[int, list[np.ndarray]] = {i: [] for i in chosen}
    for together in zip(*(repeats(pool, config, model) for model, pool in enumerate(pools)), strict=True):
        for model, (pool, repeat) in enumerate(zip(pools, together, strict=True)):
            _complete(results, pool, repeat.split.audit)
            for i in chosen:
                selected = repeat.audited[repeat.verdicts[i].selected]
                clean = repeat.split.audit[~pool.trained[repeat.split.audit]]
                accuracies[i][model].append(_accuracies(results, [repeat.split.audit, selected, clean]))
        for i in chosen:
            if (sets := _joint_sets(config.selections[i], i, pools, together)) is not None:
                joint[i].append(_accuracies(results, sets))
    rows: list[Row] = []
    for i in chosen:
        name = config.selections[i].name
        rows += _rows(settings, name, results.models, [np.stack(sample) for sample in accuracies[i]])
        if joint[i]:
            rows += _rows(settings, f"{name}, under all models", results.models, [np.stack(joint[i])])
    return rows


def _joint_sets(
    selection: SelectionConfig, index: int, pools: Sequence[Pool], together: Sequence[Repeat]
) -> list[np.ndarray] | None:
    """Positions of the items that all models audit, of those selected as clean under all, and of the truly clean ones.

    None for one model, where no item is audited by all, or where the selection's p-values have no e-values.
    """
    shared = reduce(np.intersect1d, [repeat.split.audit for repeat in together])
    if len(pools) < 2 or not shared.size or not joinable(selection):
        return None
    evidence, p = [], np.ones((len(pools), pools[0].trained.size))
    for row, repeat in zip(p, together, strict=True):
        verdict = repeat.verdicts[index]
        row[repeat.audited] = verdict.p
        grouped = calibration_of(selection.calibration).grouped
        evidence.append(JointEvidence.of(verdict.answer.n_calibration, shared.size, selection.exact_alpha, grouped))
    trained = np.any([pool.trained[shared] for pool in pools], axis=0)
    return [shared, shared[joint_select(evidence, p[:, shared])], shared[~trained]]


def _complete(results: Results, pool: Pool, items: np.ndarray) -> None:
    missing = np.isnan(results.correct[:, items])
    if missing.any():
        model = int(np.flatnonzero(missing.any(axis=1))[0])
        item = pool.ids[items[np.flatnonzero(missing[model])[0]]]
        count = int(missing[model].sum())
        raise UserError(f"model {results.models[model]!r} has no result for {count} audited items, first {item!r}")


def _accuracies(results: Results, sets: Sequence[np.ndarray]) -> np.ndarray:
    """Mean result of each model on each set of items, float64, (sets, models); NaN for an empty set."""
    nothing = np.full(len(results.models), np.nan)
    return np.stack([results.correct[:, items].mean(axis=1) if items.size else nothing for items in sets])


def _rows(
    settings: Mapping[str, Any], selection: str, models: Sequence[str], samples: Sequence[np.ndarray]
) -> list[Row]:
    """Rows of one selection from float64 arrays (repeats, sets, models), one per contaminated model."""
    accuracies = np.concatenate(samples)
    correlations = {
        name: [np.array([_spearman(a[s], a[2]) for a in sample]) for sample in samples]
        for s, name in enumerate(ITEMS[:2])
    }
    means = np.nanmean(np.where(np.isnan(accuracies).all(axis=0), 0, accuracies), axis=0)
    rows = []
    for m, model in enumerate(models):
        row: Row = {**shown(settings), "selection": selection, "model": model, "repeats": len(accuracies)}
        for s, name in enumerate(ITEMS):
            row[f"accuracy_{name}"] = float(means[s, m])
            row[f"rank_{name}"] = float(rankdata(-means[s])[m])
        for name, values in correlations.items():
            shares = [(one + 1) / 2 for one in values]
            estimate = mean_estimate(shares)
            low, high = (None if end is None else 2 * end - 1 for end in (estimate.low, estimate.high))
            row.update({f"spearman_{name}": float(np.mean([one.mean() for one in values]))})
            row.update({f"spearman_{name}_low": low, f"spearman_{name}_high": high})
        rows.append(row)
    return rows


def _spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation; 0 where a ranking is empty or all models tie."""
    if np.isnan(one).any() or np.isnan(other).any() or np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(spearmanr(one, other).statistic)


def ranking_tables(rows: Sequence[Row], settings: Sequence[str]) -> list[Table]:
    """The tables of the rankings for a terminal; empty without rows."""
    if not rows:
        return []
    sets = ("all items", "selected as clean", "truly clean")
    table = Table(*labels(settings), "selection", "model", *of_numbers(*sets), title=ACCURACY_TITLE)
    agreement = Table(*labels(settings), "selection", *of_numbers(*sets[:2]), title=AGREEMENT_TITLE)
    before: tuple[Any, ...] | None = None
    for row in readable(rows, settings):
        head = [*(row[s] for s in settings), row["selection"]]
        table.add_row(*head, row["model"], *(f"{row[f'accuracy_{s}']:.3f} ({row[f'rank_{s}']:g})" for s in ITEMS))
        if tuple(head) != before:
            agreement.add_row(*head, *(cell(row, f"spearman_{s}") for s in ITEMS[:2]))
            before = tuple(head)
    return [table, agreement]
