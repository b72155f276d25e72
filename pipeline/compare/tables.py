"""Comparisons as tables for a terminal."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from pipeline.compare.comparison import Comparison
from pipeline.compare.joint import JointReport
from pipeline.compare.ranking import TaskRanking
from pipeline.report.tables import of_numbers
from pipeline.report.wording import comparison as wording


def joint_table(report: JointReport) -> Table:
    """The runs of a joint selection, and what each selects alone."""
    figures = of_numbers("alpha", "audited", "calibrated on", "selected alone")
    title = f"Selection {report.selection} ({report.direction})"
    table = Table("", "run", "model", "procedure", *figures, title=title)
    for number, model in enumerate(report.models, 1):
        table.add_row(
            str(number),
            Text(model.run),
            Text(model.model),
            model.procedure,
            f"{model.alpha:g}",
            f"{model.n_audit:,}",
            f"{model.n_calibration:,}",
            f"{model.n_selected:,}",
        )
    return table


def comparison_table(comparison: Comparison) -> Table:
    """What became of each selection, and how alike the scores are."""
    figures = of_numbers("selected, A", "selected, B", "kept", "gained", "lost", "rank correlation")
    table = Table("selection", *figures, title=wording.shared_title(comparison.documents.n_shared))
    for change in comparison.selections:
        numbers = (change.a.n_selected, change.b.n_selected, change.n_kept, change.n_gained, change.n_lost)
        alike = [
            f"{one.detector_a if one.detector_a == one.detector_b else f'{one.detector_a}, {one.detector_b}'} "
            + ("-" if one.spearman is None else f"{one.spearman:.3f}")
            for one in change.scores
        ]
        table.add_row(f"{change.name} ({change.direction})", *(f"{number:,}" for number in numbers), "\n".join(alike))
    return table


def differences_table(comparison: Comparison) -> Table:
    """What the runs differ in."""
    table = Table("part", "key", "A", "B", title=wording.DIFFERENCES_TITLE)
    for one in comparison.differences:
        values = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (one.a, one.b)
        ]
        table.add_row(one.part, Text(one.key), *map(Text, values))
    return table


def ranking_table_of(task: TaskRanking) -> Table:
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
