"""The members of a bundle: their names, and the columns of its tables. docs/evidence.md defines each."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.audit.records import MANIFEST_FILE, VERDICT_FILE
from pipeline.bundle.container import BundleIndex, RefutedError
from pipeline.bundle.versions import FIELDS, TEXTS
from pipeline.config.corpus import ROLES, Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.weighted import LEVELS
from pipeline.stages.events import VERSIONS

DOCUMENTS = "documents.parquet"
VERDICTS = pa.schema([("id", pa.string()), ("p_value", pa.float64()), ("selected", pa.bool_())])
"""Columns of the answer of a selection for each audited document, in the order of `DOCUMENTS`."""

NAMES = pa.dictionary(pa.int32(), pa.string())
_ALWAYS = pa.schema(
    [
        ("role", NAMES),
        ("source", NAMES),
        ("row", pa.int64()),
        ("id", pa.string()),
        ("reason", NAMES),  # why it has no scores; null where it has
        ("calibrates", pa.bool_()),
    ]
)


def summary_member(selection: str) -> str:
    """Name of the summary of a selection."""
    return f"answers/{selection}.json"


def verdicts_member(selection: str) -> str:
    """Name of the answer of a selection for each document."""
    return f"answers/{selection}.parquet"


def member_names(index: BundleIndex, verdict: bool) -> list[str]:
    """The members behind `bundle.json`, in order."""
    answers = [name(one.name) for one in index.selections for name in (summary_member, verdicts_member)]
    return [MANIFEST_FILE, DOCUMENTS, *answers, *([VERDICT_FILE] if verdict else [])]


def score_column(detector: str) -> str:
    """Column with the scores of a detector."""
    return f"score:{detector}"


def weight_column(role: Role) -> str:
    """Column with the density-ratio weights towards a calibrating role."""
    return f"weight:{role}"


def bundled_schema(
    selections: Sequence[SelectionConfig], columns: Sequence[str], texts: bool, versions: bool = False
) -> pa.Schema:
    """Columns of `documents.parquet`.

    Args:
        selections: whose answers the bundle holds.
        columns: score columns that the verdict reads; empty without one.
        texts: whether it holds texts.
        versions: whether documents have versions.
    """
    if versions:
        return pa.schema([*_ALWAYS, *FIELDS, *([TEXTS] if texts else [])])
    calibrations = [(calibration_of(one.calibration), NULL_ROLE[one.direction]) for one in selections]
    weighted = sorted({weight_column(role) for calibration, role in calibrations if calibration.weighted})
    grouped = bool(columns) or any(calibration.grouped for calibration, _ in calibrations)
    scores = sorted({*columns, *(column for one in selections for column in one.detectors)})
    fields = [
        *(_ALWAYS.field(name) for name in _ALWAYS.names),
        *([pa.field("group", pa.string())] if grouped else []),
        *([pa.field("block", pa.int64())] if columns else []),
        *(pa.field(name, pa.int64()) for name in weighted),
        *(pa.field(score_column(name), pa.float64()) for name in scores),
        *([pa.field("text", pa.string())] if texts else []),
    ]
    return pa.schema(fields)


def check_values(table: pa.Table) -> None:
    """Check the values of `documents.parquet`, whose columns are as they must be.

    Raises:
        RefutedError: a document without role, id or score, or a value outside its range.
    """
    scored, role = pc.is_null(table["reason"]), table["role"].cast(pa.string())
    conditions = {
        "role": pc.is_in(role, value_set=pa.array(ROLES)),
        "id": pc.is_valid(table["id"]),
        "reason": pc.or_(scored, pc.equal(role, "audit")),
        "calibrates": pc.is_valid(table["calibrates"]),
    }
    for name in table.column_names:
        if name.startswith("score:"):
            conditions[name] = pc.equal(pc.fill_null(pc.is_finite(table[name]), False), scored)
        elif name.startswith("weight:"):
            inside = pc.and_(pc.greater_equal(table[name], 1), pc.less_equal(table[name], LEVELS))
            read = pc.and_(scored, pc.is_in(role, value_set=pa.array(["audit", name.removeprefix("weight:")])))
            conditions[name] = pc.or_(pc.fill_null(inside, False), pc.invert(read))
        elif name == VERSIONS:
            conditions[name] = pc.equal(pc.is_valid(table[name]), scored)
        elif name == "block":
            inside = pc.and_(pc.greater_equal(table[name], 0), pc.less(table[name], len(table)))
            conditions[name] = pc.fill_null(inside, True)
    for name, holds in conditions.items():
        if not pc.all(holds, min_count=0).as_py():
            raise RefutedError(f"{DOCUMENTS}: column {name} holds a value that it cannot hold")
