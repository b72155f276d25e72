"""Bounds beside the truth in a trial: what they say, how often they fail, and what is made of that."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.selection import SelectionConfig
from pipeline.report.tables import as_text
from pipeline.trial.config import build_trial
from pipeline.trial.repeats import ROWS_SCHEMA, measure
from pipeline.trial.table import selection_rows, selection_table
from pipeline.trial.trial_text import verification
from tests.helpers.trials import pool, trial


def rows_of(selections: list[dict[str, Any]], repeats: int = 30) -> tuple[list[dict[str, Any]], pa.Table]:
    chosen = [{"detectors": ["loss"], **selection} for selection in selections]
    config, _ = build_trial(trial(split={"unseen": 120}, repeats=repeats, selections=chosen))
    table = measure(pool(500, share=0.5), config, 0)
    return selection_rows({}, config.selections, table), table


def test_the_bounds_of_a_trial_stand_beside_the_truth() -> None:
    (bh, bound, ties), table = rows_of(
        [
            {"name": "plain", "procedure": "bh"},
            {"name": "bounded", "procedure": "bound", "alpha": 0.2},
            {"name": "without", "procedure": "bh", "ties": "random"},
        ]
    )
    assert bh["fdr"] < bh["bound"] < 0.5
    assert bound["bound"] <= 0.2
    assert 0 < bh["sought_at_least"] <= bh["sought"] == pytest.approx(table["n_sought"].to_numpy()[0])
    assert bh["bound_fails"] <= 0.05
    assert bh["bound_contradicted"] is False
    assert bound["contradicted"] is False
    assert {ties[name] for name in ("bound", "sought_at_least", "bound_fails", "bound_contradicted")} == {None}
    text = as_text([selection_table([bh, bound, ties], [])])
    assert f"{bh['sought_at_least']:.1f} of {bh['sought']:.1f}" in text
    assert "members, at least" in text


def broken(table: pa.Table, **columns: int) -> pa.Table:
    for name, value in columns.items():
        table = table.set_column(ROWS_SCHEMA.names.index(name), name, pa.array(np.full(len(table), value), pa.int64()))
    return table


@pytest.mark.parametrize("columns", [{"wrong_at_most": 0, "n_false": 9}, {"sought_at_least": 370, "n_sought": 300}])
def test_bounds_that_fail_too_often_are_contradicted_and_named(columns: dict[str, int]) -> None:
    rows, table = rows_of([{"name": "plain", "procedure": "bh"}])
    assert verification(rows, [], 1).contradicted == []
    selection = SelectionConfig(name="plain", detectors=["loss"])
    (row,) = selection_rows({}, [selection], broken(table, **columns))
    assert row["bound_fails"] == 1
    assert row["bound_contradicted"] is True
    assert any("its bounds failed in a share 1.000" in sentence for sentence in verification([row], [], 1).contradicted)
    assert "!" in as_text([selection_table([row], [])])


def test_of_procedure_bound_only_lists_with_more_than_alpha_wrong_contradict() -> None:
    """Its share of wrong documents may exceed alpha in one list of twenty, by any amount: the average says nothing."""
    _, table = rows_of([{"name": "one", "procedure": "bound", "alpha": 0.2}], repeats=60)
    selection = SelectionConfig(name="one", detectors=["loss"], procedure="bound", alpha=0.2)
    (kept,) = selection_rows({}, [selection], broken(table, n_selected=100, n_false=20))
    assert kept["fdr"] == pytest.approx(0.2)
    assert kept["contradicted"] is False
    (failed,) = selection_rows({}, [selection], broken(table, n_selected=100, n_false=21))
    assert failed["contradicted"] is True
    verified = verification([failed], [], 1)
    assert "bound guarantees no average: its target is contradicted where too many repeats exceed it" in verified.extent
    (sentence,) = (s for s in verified.contradicted if "target" in s or "exceeded" in s)
    assert "exceeded 0.2 in more repeats than its confidence allows" in sentence
