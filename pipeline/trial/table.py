"""The results of a trial by selection: one row each, at each point of the sweep and in each audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Column, Table

from pipeline.answers.detection import UNDEFINED
from pipeline.config.selection import SelectionConfig
from pipeline.report.tables import Row, cell, labels, of_numbers, setting_rows, shown, spread
from pipeline.results.summary import Summary
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.procedures import procedure_of
from pipeline.selection.procedures.record import estimates_share
from pipeline.trial import trial_text as wording
from pipeline.trial.repeats import by_model, contradicts, mean_estimate


def selection_rows(settings: Mapping[str, Any], selections: Sequence[SelectionConfig], repeats: pa.Table) -> list[Row]:
    """One row per selection: realised FDR and power with 95% intervals, and the target.

    For one model, intervals are over re-splits of these documents, given this model. For several models, figures are
    means over models and intervals are over models (`models_interval`; None for two); `fdr_spread` and `power_spread`
    are the standard deviation between models, None for one.

    FDR is the mean, over repeats, of the share of the selected that is false (0 where nothing is selected); power the
    mean share of the sought documents that is selected. FDR is None where no audited document was null, power where
    there was none of these. `contradicted`: the target is below the lower end of the FDR's interval, and so the
    repeats contradict the guarantee (of procedure bound: whether the target is exceeded too often). With several
    models, whether the repeats of all contradict that each model keeps the target (`mean_exceeds`). False proves
    nothing: other repeats may contradict it.

    Args:
        settings: settings of the point.
        selections: selections of the point.
        repeats: table of `repeats.ROWS_SCHEMA`, for all its models.
    """
    return [_selection_row(settings, s, repeats.filter(pc.equal(repeats["selection"], s.name))) for s in selections]


def model_rows(settings: Mapping[str, Any], selections: Sequence[SelectionConfig], repeats: pa.Table) -> list[Row]:
    """One row per selection and model, as `selection_rows` makes them for one model, with its number from 1.

    Args:
        settings: settings of the point.
        selections: selections of the point.
        repeats: as in `selection_rows`.
    """
    rows = []
    for selection in selections:
        named = repeats.filter(pc.equal(repeats["selection"], selection.name))
        for model in dict.fromkeys(named["model"].to_pylist()):
            one = named.filter(pc.equal(named["model"], model))
            rows.append({**_selection_row(settings, selection, one), "model": model + 1})
    return rows


def _selection_row(settings: Mapping[str, Any], selection: SelectionConfig, repeats: pa.Table) -> Row:
    def numbers(name: str) -> np.ndarray:
        return np.asarray(repeats[name].to_numpy(), dtype=np.float64)

    selected, sought, audited = numbers("n_selected"), numbers("n_sought"), numbers("n_audit")
    with_nulls, with_sought = sought < audited, sought > 0
    false_share = (numbers("n_false") / np.maximum(selected, 1))[with_nulls]
    model = repeats["model"].to_numpy()
    models = np.unique(model).size
    false_by_model = by_model(false_share, model[with_nulls])
    power = by_model(((selected - numbers("n_false"))[with_sought]) / sought[with_sought], model[with_sought])
    fdr = mean_estimate(false_by_model)
    contradicted = contradicts(false_by_model, selection.alpha)
    if procedure_of(selection.procedure).per_list:  # without a guarantee for the average
        exceeding = (false_share > selection.alpha).astype(np.float64)
        contradicted = contradicts(by_model(exceeding, model[with_nulls]), 1 - selection.confidence)
    null_estimate = np.clip(numbers("null_proportion"), 0, 1)
    return {
        **shown(settings),
        "selection": selection.name,
        "procedure": selection.procedure,
        "direction": selection.direction,
        "detectors": ", ".join(selection.detectors),
        "guarantee": repeats["guarantee"][0].as_py(),
        "models": models,
        "repeats": len(repeats) // models,
        "audited": float(audited.mean()),
        "calibration": float(numbers("n_calibration").mean()),
        "selected": float(selected.mean()),
        "target": selection.alpha,
        **spread("fdr", fdr),
        "fdr_spread": _between(false_by_model),
        "contradicted": contradicted,
        **spread("power", mean_estimate(power)),
        "power_spread": _between(power),
        "null_share": float(numbers("null_share").mean()),
        "unsupported": _share_unsupported(repeats),
        **spread(
            "null_estimate", mean_estimate(by_model(null_estimate, model)) if estimates_share(selection) else UNDEFINED
        ),
        **_bound_cells(selection, repeats),
    }


def _share_unsupported(repeats: pa.Table) -> float | None:
    """The share of repeats whose checks contradict the guarantee; None where no check was conclusive."""
    values = repeats["conclusion"].to_pylist()
    if all(value == ConclusionValue.INCONCLUSIVE for value in values):
        return None
    return sum(value == ConclusionValue.CONTRADICTED for value in values) / len(values)


def _between(samples: Sequence[np.ndarray]) -> float | None:
    """Standard deviation of the models' means; None for fewer than two."""
    return float(np.std([values.mean() for values in samples], ddof=1)) if len(samples) > 1 else None


def audit_row(summary: Summary, selected: Sequence[str], audited: Sequence[str], trained: set[str]) -> Row:
    """One selection of the audit itself, compared with the truth; None where a share is not defined.

    In an empty selection neither the false nor the right share is defined.
    """
    members = sum(doc_id in trained for doc_id in audited)
    right = sum((doc_id in trained) == (summary.direction == "members") for doc_id in selected)
    sought = members if summary.direction == "members" else len(audited) - members
    bound = summary.bound
    return {
        "selection": summary.name,
        "procedure": summary.procedure,
        "direction": summary.direction,
        "detectors": ", ".join(summary.detectors),
        "alpha": summary.alpha,
        "audited": len(audited),
        "trained": members,
        "selected": len(selected),
        "true": right,
        "share_false": (len(selected) - right) / len(selected) if selected and sought < len(audited) else None,
        "power": right / sought if sought else None,
        "wrong_at_most": None if bound is None else bound.wrong_at_most,
        "sought": sought,
        "sought_at_least": None if bound is None else bound.members_at_least,
    }


def audit_table(rows: Sequence[Row]) -> Table:
    """The table of the audits' own selections for a terminal."""
    names = ("alpha", "audited", "trained in", "selected", "right", "share false", "power", "wrong at most")
    figures = of_numbers(*names, _bound_headers(rows)[-1])
    table = Table("audit", "selection", "procedure", _detectors(), *figures, title=wording.AUDITS_TITLE)
    for row in rows:
        shares = ["not defined" if row[name] is None else f"{row[name]:.3f}" for name in ("share_false", "power")]
        counts = [str(row[name]) for name in ("audited", "trained", "selected", "true")]
        wrong = row["wrong_at_most"]
        bounds = ["-", "-"] if wrong is None else [str(wrong), f"{row['sought_at_least']} of {row['sought']}"]
        table.add_row(
            *(row[name] for name in ("audit", "selection", "procedure", "detectors")),
            f"{row['alpha']:g}",
            *counts,
            *shares,
            *bounds,
        )
    return table


def to_arrow(rows: Sequence[Row]) -> pa.Table:
    """The rows as a table; a sweep setting with both numbers and text becomes text."""
    columns: dict[str, pa.Array] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1:
            values = [None if value is None else str(value) for value in values]
        columns[name] = pa.array(values) if kinds else pa.array(values, pa.float64())
    return pa.table(columns)


def selection_table(rows: Sequence[Row], settings: Sequence[str]) -> Table:
    """The table of the selections' rows for a terminal."""
    several = max((row["models"] for row in rows), default=1) > 1
    title = f"{wording.SELECTIONS_TITLE}, {wording.interval_scope(rows)}"
    spreads = ("FDR between models", "power between models") if several else ()
    counts = ("selected", "audited", "null share", "its estimate")
    checked = any(row["unsupported"] is not None for row in rows)
    called = ("called contradicted",) if checked else ()
    names = ("target", "FDR", "power", *spreads, *counts, *_bound_headers(rows), *called)
    figures = of_numbers(*names)
    table = Table(*labels(settings), "selection", "procedure", _detectors(), "guarantee", *figures, title=title)
    for head, row in setting_rows(table, rows, settings):
        table.add_row(
            *head,
            row["selection"],
            row["procedure"],
            row["detectors"],
            row["guarantee"],
            f"{row['target']:g}",
            cell(row, "fdr") + (" !" if row["contradicted"] else ""),
            cell(row, "power"),
            *("-" if one is None else f"sd {one:.3f}" for one in (row["fdr_spread"], row["power_spread"]) if several),
            f"{row['selected']:.1f}",
            f"{row['audited']:.1f}",
            f"{row['null_share']:.3f}",
            cell(row, "null_estimate"),
            *_shown_bounds(row),
            *(("" if row["unsupported"] is None else f"{row['unsupported']:.0%}",) if checked else ()),
        )
    if any(row["contradicted"] or row["bound_contradicted"] for row in rows):
        table.caption = wording.MARKED
    return table


def model_table(rows: Sequence[Row], settings: Sequence[str]) -> Table:
    """The table of `model_rows` for a terminal."""
    title = f"{wording.BY_MODEL_TITLE}, {wording.interval_scope([{**row, 'models': 1} for row in rows])}"
    figures = of_numbers("target", "FDR", "power", "selected")
    table = Table(*labels(settings), "selection", "model", *figures, title=title)
    for head, row in setting_rows(table, rows, [*settings, "selection"]):
        mark = " !" if row["contradicted"] else ""
        cells = (f"{row['target']:g}", cell(row, "fdr") + mark, cell(row, "power"), f"{row['selected']:.1f}")
        table.add_row(*head, str(row["model"]), *cells)
    return table


def _detectors() -> Column:
    """A column with one line per selection, however many detectors it reads."""
    return Column("detectors", no_wrap=True, overflow="ellipsis", max_width=28)


# --- bounds


def _bound_headers(rows: Sequence[Row]) -> tuple[str, str, str]:
    """The headers of `_shown_bounds`; the last one names the kind of document of the rows' selections."""
    kinds = dict.fromkeys("members" if row["direction"] == "members" else "clean" for row in rows)
    return "bound", "bound fails", f"{' or '.join(kinds) or 'members'}, at least"


def _bound_cells(selection: SelectionConfig, repeats: pa.Table) -> Row:
    """The mean bounds of one selection over repeats, and the share of repeats in which they fail.

    A bound fails where more of the selected are wrong than stated, or fewer of the audited are members (clean).
    `bound` is the mean of its share of the selected, 0 where none are, as for the wrong share; all None for a
    selection without bounds. `bound_contradicted`: the bounds fail more often than their confidence allows.
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
        **spread("bound_fails", mean_estimate(failing)),
        "bound_contradicted": contradicts(failing, 1 - selection.confidence),
    }


def _shown_bounds(row: Row) -> list[str]:
    """The cells of a row for a terminal, under `_bound_headers`."""
    if row["bound"] is None:
        return ["-", "-", "-"]
    fails = cell(row, "bound_fails") + (" !" if row["bound_contradicted"] else "")
    return [f"{row['bound']:.3f}", fails, f"{row['sought_at_least']:.1f} of {row['sought']:.1f}"]
