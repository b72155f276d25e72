"""A trial of the verdict on a collection: over repeats, how often it is shown as trained on, rightly or wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table

from pipeline.answers.detection import UNDEFINED
from pipeline.answers.scored_collection import Collection, bound_of_blocks, depends
from pipeline.answers.verdict import LEVEL
from pipeline.report.tables import Row, cell, labels, of_numbers, setting_rows, shown, spread
from pipeline.selection.collection import joined_blocks, permutation_test
from pipeline.selection.engine import answer_all
from pipeline.trial.config import TrialConfig
from pipeline.trial.repeats import Pool, by_model, mean_estimate, repeats
from pipeline.trial.trial_text import COLLECTIONS_TITLE, TEST_SHOWS, interval_scope

COLLECTIONS = ("audited", "never trained on")
"""The audited documents; and only those that the model was not trained on, for which every result is wrong."""

COLLECTIONS_SCHEMA = pa.schema(
    [
        ("model", pa.int64()),
        ("repeat", pa.int64()),
        ("collection", pa.string()),
        ("n_audit", pa.int64()),
        ("n_members", pa.int64()),
        ("selection", pa.string()),
        ("n_selected", pa.int64()),
        ("at_least", pa.int64()),
        ("p_value", pa.float64()),
    ]
)


def measure_collections(pool: Pool, config: TrialConfig, model: int) -> pa.Table:
    """The verdicts on each collection of every repeat over one model's scores (`COLLECTIONS_SCHEMA`).

    `at_least` is the count of the first selection of direction members, of blocks where documents depend on each other;
    null where it has no bound. The permutation test
    reads all detectors; it permutes groups where the trial's documents have some, otherwise families.

    Raises:
        UserError: too few documents for the permutation test; the message states the required number.
    """
    seeking = next(selection for selection in config.selections if selection.direction == "members")
    names = sorted(pool.scores.columns)
    columns = np.stack([pool.scores.columns[column] for column in names], axis=1)
    block = joined_blocks(pool.family, pool.scores.group_numbers)
    rows = []
    for repeat in repeats(pool, config, model):
        unseen = repeat.split.unseen[pool.scored[repeat.split.unseen]]
        untrained = repeat.audited[~pool.trained[repeat.audited]]
        for collection, audited in zip(COLLECTIONS, (repeat.audited, untrained), strict=True):
            quarantined = repeat.quarantined if collection == COLLECTIONS[0] else 0
            seed = config.seed + repeat.number
            roles = {"audit": audited, "unseen": unseen, "seen": repeat.split.seen}
            (verdict,) = answer_all([seeking], pool.scores, roles, quarantined, seed)  # type: ignore[arg-type]
            at, kinds = np.concatenate([audited, unseen]), np.repeat([True, False], [audited.size, unseen.size])
            numbers = np.unique(block[at], return_inverse=True)[1]
            compared = Collection(names, "group", columns[at], kinds, numbers, pool.scores.keys[at], ungrouped=False)
            bound, test = verdict.answer.bound, permutation_test(compared.blocks(seed), seed)
            if bound is not None and depends(numbers, kinds):
                bound = bound_of_blocks(seeking, compared.drawn(seeking.detectors, seed), seed)
            rows.append(
                {
                    "model": model,
                    "repeat": repeat.number,
                    "collection": collection,
                    "n_audit": int(audited.size) + quarantined,
                    "n_members": int(pool.trained[audited].sum()),
                    "selection": seeking.name,
                    "n_selected": int(verdict.selected.sum()),
                    "at_least": None if bound is None else bound.members_at_least,
                    "p_value": None if test is None else test.p_value,
                }
            )
    return pa.Table.from_pylist(rows, schema=COLLECTIONS_SCHEMA)


def collection_rows(settings: Mapping[str, Any], measured: pa.Table) -> list[Row]:
    """One row per collection: how often the count and the test show that it was trained on.

    Args:
        settings: settings of the point.
        measured: table of `COLLECTIONS_SCHEMA`, for all its models.
    """
    return [
        _row(settings, name, measured.filter(pc.equal(measured["collection"], name)))
        for name in dict.fromkeys(measured["collection"].to_pylist())
    ]


def _row(settings: Mapping[str, Any], name: str, measured: pa.Table) -> Row:
    model = measured["model"].to_numpy()
    counted = measured["at_least"].null_count == 0
    at_least = measured["at_least"].to_numpy() if counted else np.zeros(len(measured))
    by_count = mean_estimate(by_model((at_least > 0).astype(np.float64), model)) if counted else UNDEFINED
    p_values = measured["p_value"].fill_null(1.0).to_numpy()  # a repeat without a test counts as not shown
    models = np.unique(model).size
    return {
        **shown(settings),
        "collection": name,
        "models": models,
        "repeats": len(measured) // models,
        "audited": float(pc.mean(measured["n_audit"]).as_py()),
        "trained": float(pc.mean(measured["n_members"]).as_py()),
        "selection": measured["selection"][0].as_py(),
        "selected": float(pc.mean(measured["n_selected"]).as_py()),
        "selecting_nothing": float(np.mean(measured["n_selected"].to_numpy() == 0)),
        "at_least": float(at_least.mean()) if counted else None,
        **spread("by_count", by_count),
        "p_median": float(np.median(p_values)),
        **spread("by_test", mean_estimate(by_model((p_values <= LEVEL).astype(np.float64), model))),
    }


def collection_table(rows: Sequence[Row], settings: Sequence[str]) -> Table:
    """The table of `collection_rows` for a terminal."""
    names = ("audited", "trained in", "selected", "repeats without any", "at least (count)", "count shows it")
    figures = of_numbers(*names, "median p", TEST_SHOWS)
    table = Table(*labels(settings), "collection", *figures, title=f"{COLLECTIONS_TITLE} {interval_scope(rows)}")
    for head, row in setting_rows(table, rows, settings):
        table.add_row(
            *head,
            row["collection"],
            f"{row['audited']:.1f}",
            f"{row['trained']:.1f}",
            f"{row['selected']:.1f} ({row['selection']})",
            f"{row['selecting_nothing']:.2f}",
            "-" if row["at_least"] is None else f"{row['at_least']:.1f}",
            "-" if row["by_count"] is None else cell(row, "by_count"),
            f"{row['p_median']:.2g}",
            cell(row, "by_test"),
        )
    return table
