"""Comparisons as tables for a terminal."""

from __future__ import annotations

import json

from rich.table import Table
from rich.text import Text

from pipeline.compare.comparison import Comparison
from pipeline.compare.joint import JointReport


def joint_table(report: JointReport) -> Table:
    """The runs of a joint selection, and what each selects alone."""
    table = Table("", "run", "model", "procedure", title=f"Selection {report.selection} ({report.direction})")
    for name in ("alpha", "audited", "calibrated on", "selected alone"):
        table.add_column(name, justify="right")
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
    title = f"{comparison.documents.n_shared:,} documents that both runs audited"
    table = Table("selection", title=title)
    for name in ("selected, A", "selected, B", "kept", "gained", "lost", "rank correlation"):
        table.add_column(name, justify="right")
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
    table = Table("part", "key", "A", "B", title="What differs between the runs")
    for one in comparison.differences:
        values = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (one.a, one.b)
        ]
        table.add_row(one.part, Text(one.key), *map(Text, values))
    return table
