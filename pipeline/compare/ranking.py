"""A benchmark's ranking on all items and on those selected as clean: changed places, and the items that cause them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field
from rich.table import Table
from rich.text import Text
from scipy.stats import rankdata

from pipeline.compare import comparison_text as wording
from pipeline.compare.finished_runs import FinishedRun
from pipeline.compare.harnesses.base import ItemResults
from pipeline.compare.items import CleanItems, Item, match_items
from pipeline.errors import UserError
from pipeline.report.tables import of_numbers
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.shares import CONFIDENCE_OF_SHARES, difference_to_all, paired_difference, share_interval
from pipeline.store.external_sort import write_pieces
from pipeline.store.files import Store

RANKING_FILE = "ranking.json"
ITEMS_FILE = "items.parquet"
LISTED_ITEMS = 20

ITEMS_SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("item", pa.string()),
        ("clean", pa.bool_()),
        ("model", pa.string()),
        ("correct", pa.float64()),
    ]
)

PairedDifferences = dict[tuple[int, int], tuple[float, float, float]]
"""By places of two models: accuracy of the first minus that of the second, with the ends of its interval."""


class RankedModel(Record):
    """One model on one task; numbers of the clean items are null where nothing was selected."""

    model: str = Field(description="The model, by its name in the results.")
    accuracy_all: float = Field(description="Mean result over all audited items, in [0, 1].")
    accuracy_all_low: float = Field(description="Lower end of its interval.")
    accuracy_all_high: float = Field(description="Upper end of its interval.")
    rank_all: float = Field(description="Rank on all items; 1 is best, ties share.")
    rank_all_low: int = Field(description="Best rank in its interval.")
    rank_all_high: int = Field(description="Worst rank in its interval.")
    accuracy_clean: float | None = Field(description="Mean result over the items selected as clean.")
    accuracy_clean_low: float | None = Field(description="Lower end of its interval.")
    accuracy_clean_high: float | None = Field(description="Upper end of its interval.")
    rank_clean: float | None = Field(description="Rank on the clean items.")
    rank_clean_low: int | None = Field(description="Best rank in its interval.")
    rank_clean_high: int | None = Field(description="Worst rank in its interval.")
    difference: float | None = Field(description="Accuracy on the clean items minus that on all.")
    difference_low: float | None = Field(description="Lower end of its interval.")
    difference_high: float | None = Field(description="Upper end of its interval.")


class RankChange(Record):
    """Two models that change places: the first is ahead on all items, the second on the clean ones."""

    first: str = Field(description="The model that is ahead on all items.")
    second: str = Field(description="The model that is ahead on the clean items.")
    difference_all: float = Field(description="Accuracy of the first minus that of the second on all items, above 0.")
    difference_clean: float = Field(
        description="Accuracy of the second minus that of the first on clean items, above 0."
    )
    low: float = Field(description="Lower end of the paired interval of difference_clean, for all pairs together.")
    high: float = Field(description="Upper end of it.")
    shown: bool = Field(description="Whether that interval is above 0; otherwise chance explains the difference.")
    n_for: int = Field(description="Items that were not selected as clean and on which the first does better.")
    n_against: int = Field(description="Items that were not selected as clean and on which the second does better.")
    items: list[str] = Field(
        description=f"The first {LISTED_ITEMS} items on which the first does better, by the difference."
    )

    def sentence(self) -> str:
        """The change in one line."""
        clean = (self.difference_clean, self.low, self.high)
        return wording.places_changed(
            (self.first, self.second), self.difference_all, clean, self.shown, (self.n_for, self.n_against)
        )


class TaskRanking(Record):
    """The models on one task."""

    task: str = Field(description="The task, by its name in the results.")
    metric: str = Field(description="The metric of the results, in [0, 1].")
    filter: str | None = Field(description="The filter of the answers, if the results have one.")
    n_items: int = Field(description="Audited items.")
    n_clean: int = Field(description="Of these, items selected as clean.")
    models: list[RankedModel] = Field(description="The models, best on all items first.")
    changes: list[RankChange] = Field(description="Pairs of models that change places.")


class RankingReport(VersionedRecord):
    """A benchmark's ranking on all items and on the clean ones: `ranking.json`."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    clean: CleanItems = Field(description="The items that were selected as clean, and the guarantee.")
    tasks: list[TaskRanking] = Field(description="The tasks, in the order of the results.")
    intervals: str = Field(wording.RANKING_INTERVALS, description="Explanation of the intervals.")
    notices: list[str] = Field(description="Further cautions, one line each.")


def rank_models(
    clean: CleanItems,
    items: Sequence[Item],
    results: Sequence[ItemResults],
    runs: Sequence[FinishedRun],
    inputs: Mapping[str, str],
    store: Store,
) -> RankingReport:
    """Rank models on all items and on the clean ones, and write `items.parquet` and `ranking.json`.

    Args:
        clean: clean items, from `clean_items`.
        items: the audited documents.
        results: results of all models and tasks.
        runs: runs that audited the items.
        inputs: task -> input, for tasks with another name than their input.
        store: the folder, from `open_output`.

    Raises:
        UserError: results of other items, or models with different items, tasks or metrics.
    """
    tasks: dict[str, list[ItemResults]] = {}
    for one in results:
        tasks.setdefault(one.task, []).append(one)
    _check_tasks(tasks)
    rankings, tables = [], []
    for task, of_task in tasks.items():
        placed = [match_items(one, items, runs[0], inputs) for one in of_task]
        _check_alike(of_task)
        ordered = placed[0]
        keys = [item.doc_id if of_task[0].by_id else str(item.row) for item in ordered]
        values = np.array([[one.values[key] for key in keys] for one in of_task])
        rankings.append(_task(task, of_task, ordered, values))
        tables += [_table(task, one.model, ordered, row) for one, row in zip(of_task, values, strict=True)]
    write_pieces(store, ITEMS_FILE, ITEMS_SCHEMA, tables)
    ranking = RankingReport(clean=clean, tasks=rankings, notices=wording.other_models([run.model for run in runs]))
    store.write_json(RANKING_FILE, ranking.plain())
    return ranking


def _check_tasks(tasks: Mapping[str, Sequence[ItemResults]]) -> None:
    models = list(dict.fromkeys(one.model for of_task in tasks.values() for one in of_task))
    for task, of_task in tasks.items():
        present = {one.model for one in of_task}
        for model in models:
            if model not in present:
                raise UserError(f"model {model!r} has no results of task {task!r}; others have: give all or none")


def _check_alike(of_task: Sequence[ItemResults]) -> None:
    """Refuse models with different prompts or different scoring."""
    first = of_task[0]
    for other in of_task[1:]:
        if (first.metric, first.filter) != (other.metric, other.filter):
            raise UserError(
                f"{first.path} has metric {first.metric} (filter {first.filter}), and {other.path} has {other.metric} "
                f"(filter {other.filter}): --metric and --filter name those of all"
            )
        for item, value in first.hashes.items():
            if other.hashes.get(item, value) != value:
                raise UserError(
                    f"item {item!r} of task {first.task!r} is not the same in {first.path} and {other.path}: the "
                    "models were given different versions of the task"
                )


def _task(task: str, of_task: Sequence[ItemResults], items: Sequence[Item], values: np.ndarray) -> TaskRanking:
    clean = np.array([item.clean for item in items])
    pairs_clean = paired_differences(values[:, clean]) if clean.any() else None
    on_all, on_clean = (
        _ranked("all", values, paired_differences(values)),
        _ranked("clean", values[:, clean], pairs_clean),
    )
    models = []
    for index in np.lexsort((np.arange(len(of_task)), -values.mean(axis=1))).tolist():
        difference = difference_to_all(values[index, clean], values[index, ~clean]) or (None, None, None)
        ends = dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
        models.append(RankedModel(model=of_task[index].model, **on_all[index], **on_clean[index], **ends))
    return TaskRanking(
        task=task,
        metric=of_task[0].metric,
        filter=of_task[0].filter,
        n_items=len(items),
        n_clean=int(clean.sum()),
        models=models,
        changes=[] if pairs_clean is None else _changes(of_task, items, values, clean, pairs_clean),
    )


def _ranked(on: str, values: np.ndarray, pairs: PairedDifferences | None) -> list[dict[str, Any]]:
    """Accuracy and rank of each model on some items, with their intervals, as fields of `RankedModel`.

    Args:
        on: the items, all or clean.
        values: results, (models, items).
        pairs: paired differences of the models on these items; None: there are no items.
    """
    names = [f"{what}_{on}{end}" for what in ("accuracy", "rank") for end in ("", "_low", "_high")]
    if pairs is None:
        return [dict.fromkeys(names)] * len(values)
    accuracy = values.mean(axis=1)
    ranks = rankdata(-accuracy)
    return [
        dict(zip(names, (mean, *share_interval(row), rank, *rank_interval(pairs, index, len(values))), strict=True))
        for index, (mean, row, rank) in enumerate(zip(accuracy.tolist(), values, ranks.tolist(), strict=True))
    ]


def paired_differences(values: np.ndarray) -> PairedDifferences:
    """The differences of all ordered pairs of models, with simultaneous intervals for all pairs."""
    pairs = list(combinations(range(len(values)), 2))
    confidence = 1 - (1 - CONFIDENCE_OF_SHARES) / max(1, len(pairs))
    differences: PairedDifferences = {}
    for first, second in pairs:
        mean, low, high = paired_difference(values[first], values[second], confidence)
        differences[first, second], differences[second, first] = (mean, low, high), (-mean, -high, -low)
    return differences


def rank_interval(differences: PairedDifferences, index: int, models: int) -> tuple[int, int]:
    """The best and the worst rank of a model: after all models shown to lead it, before all shown to trail it."""
    of_model = [interval for (first, _), interval in differences.items() if first == index]
    return 1 + sum(high < 0 for _, _, high in of_model), models - sum(low > 0 for _, low, _ in of_model)


def _changes(
    of_task: Sequence[ItemResults],
    items: Sequence[Item],
    values: np.ndarray,
    clean: np.ndarray,
    on_clean: PairedDifferences,
) -> list[RankChange]:
    """Pairs of models that change places; ties do not count."""
    changes = []
    for pair in combinations(range(len(of_task)), 2):
        lead = values[pair[0]].mean() - values[pair[1]].mean()
        first, second = pair if lead > 0 else pair[::-1]
        difference, low, high = on_clean[second, first]
        if lead == 0 or difference <= 0:
            continue
        others = np.where(clean, 0.0, values[first] - values[second])
        order = [i for i in np.argsort(-others, kind="stable").tolist() if others[i] > 0]
        changes.append(
            RankChange(
                first=of_task[first].model,
                second=of_task[second].model,
                difference_all=float(abs(lead)),
                difference_clean=difference,
                low=low,
                high=high,
                shown=low > 0,
                n_for=len(order),
                n_against=int((others < 0).sum()),
                items=[items[i].doc_id for i in order[:LISTED_ITEMS]],
            )
        )
    return changes


def _table(task: str, model: str, items: Sequence[Item], values: np.ndarray) -> pa.Table:
    columns = [
        pa.array([task] * len(items)),
        pa.array([item.doc_id for item in items]),
        pa.array([item.clean for item in items]),
        pa.array([model] * len(items)),
        pa.array(values),
    ]
    return pa.table(columns, schema=ITEMS_SCHEMA)


def ranking_table(task: TaskRanking) -> Table:
    """The models on one task: accuracy with its interval and rank, on all items and on the clean ones."""
    figures = of_numbers("all items", "rank", "clean items", "rank", "clean less all")
    title = wording.ranking_title(task.task, task.metric, task.n_items, task.n_clean)
    table = Table("model", *figures, title=title)
    for one in task.models:
        table.add_row(
            Text(one.model),
            _with_ends(one.accuracy_all, one.accuracy_all_low, one.accuracy_all_high),
            _with_ranks(one.rank_all, one.rank_all_low, one.rank_all_high),
            _with_ends(one.accuracy_clean, one.accuracy_clean_low, one.accuracy_clean_high),
            _with_ranks(one.rank_clean, one.rank_clean_low, one.rank_clean_high),
            _with_ends(one.difference, one.difference_low, one.difference_high),
        )
    return table


def _with_ends(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None or low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _with_ranks(rank: float | None, low: int | None, high: int | None) -> str:
    return "-" if rank is None else f"{rank:g} [{low}, {high}]"
