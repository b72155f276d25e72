"""Bounds beside the truth: over repeats of an audit, what was said of each list and how often it was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.audit.detection import UNDEFINED
from pipeline.audit.summary import Summary
from pipeline.config.selection import SelectionConfig
from pipeline.report.tables import Row, cell, spread
from pipeline.trial.intervals import by_model, contradicts, estimate_of


def bound_headers(rows: Sequence[Row]) -> tuple[str, str, str]:
    """The headers of `shown_bounds`; the last one names the kind of document that the rows' selections seek."""
    kinds = dict.fromkeys("members" if row["direction"] == "members" else "clean" for row in rows)
    return "bound", "bound fails", f"{' or '.join(kinds) or 'members'}, at least"


def bound_cells(selection: SelectionConfig, repeats: pa.Table) -> Row:
    """What the bounds of one selection said, on average over repeats, and the share of repeats in which they fail.

    A bound fails where more of the selected are wrong than it says, or fewer of the audited are members (clean).
    `bound` is the mean of its share of the selected, 0 where none are, as for the share that is wrong; all None for a
    selection without bounds. `bound_contradicted` says that the bounds fail more often than their confidence allows.
    """
    names = ("n_selected", "n_false", "n_sought", "wrong_at_most", "sought_at_least")
    if repeats["wrong_at_most"].null_count:
        cells = {"bound": None, "sought": None, "sought_at_least": None, **spread("bound_fails", UNDEFINED)}
        return {**cells, "bound_contradicted": None}
    selected, false, sought, wrong, least = (np.asarray(repeats[name].to_numpy(), dtype=np.float64) for name in names)
    fails = ((false > wrong) | (sought < least)).astype(np.float64)
    failing = by_model(fails, repeats["model"].to_numpy())
    return {
        "bound": float((wrong / np.maximum(selected, 1)).mean()),
        "sought": float(sought.mean()),
        "sought_at_least": float(least.mean()),
        **spread("bound_fails", estimate_of(failing)),
        "bound_contradicted": contradicts(failing, 1 - selection.confidence),
    }


def shown_bounds(row: Row) -> list[str]:
    """The cells of a row for a terminal, below `bound_headers`."""
    if row["bound"] is None:
        return ["-", "-", "-"]
    fails = cell(row, "bound_fails") + (" !" if row["bound_contradicted"] else "")
    return [f"{row['bound']:.3f}", fails, f"{row['sought_at_least']:.1f} of {row['sought']:.1f}"]


def audit_bounds(summary: Summary, sought: int) -> dict[str, Any]:
    """The bounds of one audit's selection, beside the number of members (of clean documents); None without bounds."""
    bound = summary.bound
    wrong, least = (None, None) if bound is None else (bound.wrong_at_most, bound.members_at_least)
    return {"wrong_at_most": wrong, "sought": sought, "sought_at_least": least}


def shown_audit_bounds(row: Row) -> list[str]:
    """The cells of an audit's row for a terminal: wrong at most, and sought at least of how many there are."""
    if row["wrong_at_most"] is None:
        return ["-", "-"]
    return [str(row["wrong_at_most"]), f"{row['sought_at_least']} of {row['sought']}"]
