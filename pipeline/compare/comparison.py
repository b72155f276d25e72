"""Compare two runs: documents that a selection gained or lost, scores of both runs, and changed settings.

The page is one self-contained HTML file in the style of the report.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, JsonValue
from rich.table import Table
from rich.text import Text

from pipeline.compare import comparison_text as wording
from pipeline.compare.finished_runs import (
    FinishedRun,
    JoinedRuns,
    RunRecord,
    Shared,
    joined_runs,
    refuse_different,
    run_record,
    shared_selections,
)
from pipeline.config.corpus import ROLES
from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.report.contents import common_folder, run_names
from pipeline.report.tables import of_numbers
from pipeline.report.templates import BLUE, FigureImage, draw, label, render
from pipeline.results.summary import Summary
from pipeline.run.conclusion import Concluded
from pipeline.run.manifest import InputRecord
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.conformal import mix
from pipeline.store.external_sort import write_pieces
from pipeline.store.files import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPARISON_FILE = "comparison.json"
CHANGES_FILE = "changes.parquet"
LISTED = 200
"""Maximum number of gained, and of lost, documents on the page and in the JSON file; the table has all."""

MOST_POINTS = 1_000_000
"""Maximum number of documents whose scores are compared; more are sampled by a hash of their texts."""

ABSENT = "(absent)"
_PLACES = ("run", "resources", "selections")
"""Settings that never change an answer, or that are compared as last requested."""

CHANGES_SCHEMA = pa.schema(
    [
        ("selection", pa.string()),
        ("doc_id", pa.string()),
        ("change", pa.string()),
        ("p_value_a", pa.float64()),
        ("p_value_b", pa.float64()),
    ]
)

PAGE_FILE = "comparison.html"

BINS = 48
FAINTEST = 0.35
"""Opacity of a cell with one document."""

TAIL = 0.001
"""Share of the documents at each end whose scores are drawn at the edge of the figure."""


class Difference(Record):
    """One difference between two runs."""

    part: str = Field(description="configuration, selection, fingerprint, model, version or input.")
    key: str = Field(description="The differing value, as a dotted path.")
    a: JsonValue = Field(description=f"Value in run A, the first one; {ABSENT} where it has none.")
    b: JsonValue = Field(description=f"Value in run B, the second one; {ABSENT} where it has none.")


class ChangedDocument(Record):
    """A document that one run selected and the other did not."""

    doc_id: str = Field(description="Its id, without the folder of the corpus.")
    p_value_a: float = Field(description="P-value in run A, the first one; 1 in quarantine.")
    p_value_b: float = Field(description="P-value in run B, the second one; 1 in quarantine.")


class SelectionSide(Concluded):
    """A selection in one of the runs."""

    procedure: str = Field(description="The procedure of the selection.")
    alpha: float = Field(description="Largest share of the selected that may be wrong.")
    detectors: list[str] = Field(description="Score columns that it reads.")
    n_audit: int = Field(description="Audited documents of the run.")
    n_calibration: int = Field(description="Documents that its p-values were calibrated on.")
    n_selected: int = Field(description="Documents selected, shared with the other run or not.")
    n_selected_shared: int = Field(description="Of these, documents that both runs audited.")


class ScorePair(Record):
    """The scores of the same documents in both runs."""

    detector_a: str = Field(description="Score column of run A.")
    detector_b: str = Field(description="Score column of run B.")
    n_documents: int = Field(description="Documents with both scores that were compared.")
    sampled: bool = Field(description="Whether they are a sample, drawn by a hash of the texts.")
    spearman: float | None = Field(
        description="Rank correlation, in [-1, 1]; null where all scores of a run are equal."
    )


class SelectionChange(Record):
    """The changes of one selection."""

    name: str = Field(description="Name of the selection.")
    direction: Direction = Field(description="members: selects documents that were trained on; clean: that were not.")
    a: SelectionSide = Field(description="The selection in run A.")
    b: SelectionSide = Field(description="The selection in run B.")
    n_kept: int = Field(description="Shared documents that both runs selected.")
    n_gained: int = Field(description="Shared documents that only B selected.")
    n_lost: int = Field(description="Shared documents that only A selected.")
    n_neither: int = Field(description="Shared documents that neither selected.")
    gained: list[ChangedDocument] = Field(description=f"The first {LISTED} gained, by p-value in B.")
    lost: list[ChangedDocument] = Field(description=f"The first {LISTED} lost, by p-value in A.")
    scores: list[ScorePair] = Field(description="Comparison of scores, one entry per detector.")


class Comparison(VersionedRecord):
    """The comparison of two runs: `comparison.json`."""

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    a: RunRecord = Field(description="Run A, the first one that was given.")
    b: RunRecord = Field(description="Run B, the second one.")
    documents: Shared = Field(description="Number of documents that the runs share.")
    selections: list[SelectionChange] = Field(description="The selections that both runs have.")
    differences: list[Difference] = Field(description="Settings, model, data and versions that differ.")
    notices: list[str] = Field(description="Cautions, one line each.")
    caution: str = Field(wording.NO_TESTED_CHANGE, description="Limits of a difference of two lists.")

    def sides(self) -> list[str]:
        """The run of each side, A and B, one line each."""
        return [f"{side}: {run.run}, model {run.model}" for side, run in (("A", self.a), ("B", self.b))]


@dataclass(frozen=True, slots=True, eq=False)
class PairedScores:
    """Scores of shared documents in both runs, for a figure: float64, (documents,)."""

    pair: ScorePair
    a: np.ndarray
    b: np.ndarray


def compare_runs(
    a: FinishedRun, b: FinishedRun, selection: str | None, store: Store
) -> tuple[Comparison, dict[str, PairedScores]]:
    """Compare two finished runs, and write `changes.parquet` and `comparison.json`.

    Args:
        a: the first run.
        b: the second.
        selection: the only selection to compare; None: all that both runs have.
        store: the folder, from `open_output`.

    Returns:
        The comparison, and the first pair of scores of each selection.

    Raises:
        UserError: no shared selection or document, different directions, or a run with itself.
    """
    if a.store.url == b.store.url:
        raise UserError(f"{a.store.url} is compared with itself: give two runs")
    names = shared_selections([a, b]) if selection is None else [selection]
    summaries = [(a.summary(name), b.summary(name)) for name in names]
    for one, other in summaries:
        if one.direction != other.direction:
            raise UserError(
                f"selection {one.name} has direction {one.direction} in {a.store.url} and {other.direction} in "
                f"{b.store.url}: they answer different questions"
            )
    with contextlib.ExitStack() as stack:
        changes = []
        for one, other in summaries:
            common = [name for name in one.detectors if name in other.detectors]
            pairs = [(name, name) for name in common] or [(one.detectors[0], other.detectors[0])]
            rows = stack.enter_context(joined_runs([a, b], [one, other], list(zip(*pairs, strict=True))))
            changes.append(_Change(one, other, rows, pairs))
        shared = changes[0].rows.count()
        refuse_different(shared, True)
        share = min(1.0, MOST_POINTS / max(1, shared.n_shared))
        write_pieces(store, CHANGES_FILE, CHANGES_SCHEMA, (table for one in changes for table in one.tables(share)))
    scores = {one.a.name: one.paired(share < 1) for one in changes}
    comparison = Comparison(
        a=run_record(a),
        b=run_record(b),
        documents=shared,
        selections=[one.record([each.pair for each in scores[one.a.name]]) for one in changes],
        differences=differences(a, b, names),
        notices=_notices(a, b, shared, summaries),
    )
    store.write_json(COMPARISON_FILE, comparison.plain())
    return comparison, {name: pairs[0] for name, pairs in scores.items()}


def _notices(a: FinishedRun, b: FinishedRun, shared: Shared, summaries: Sequence[tuple[Summary, Summary]]) -> list[str]:
    notices = [wording.same_model("A", "B", a.fingerprint)] if a.fingerprint == b.fingerprint else []
    if not shared.alike:
        notices.append(f"{shared.sentence()}; {wording.GAINED_AMONG_SHARED}")
    for side, run in (("A", a), ("B", b)):
        if run.manifest.limit is not None:
            notices.append(f"{side} is {wording.first_of_role(run.manifest.limit)}")
    named: dict[str, list[str]] = {}
    for pair in summaries:
        for side, summary in zip("AB", pair, strict=True):
            for remark in [*summary.remarks, *([f"next: {summary.next}"] if summary.next else [])]:
                named.setdefault(remark, []).append(f"{summary.name} ({side})")
    return notices + [f"{', '.join(names)}: {remark}" for remark, names in named.items()]


class _Change:
    """One selection in both runs: counts and samples collected in one reading of its documents."""

    def __init__(self, a: Summary, b: Summary, rows: JoinedRuns, pairs: Sequence[tuple[str, str]]) -> None:
        self.a, self.b, self.rows, self.pairs = a, b, rows, pairs
        self.counts: Counter[str] = Counter()
        self.listed = {change: CHANGES_SCHEMA.empty_table() for change in ("gained", "lost")}
        self.scores: list[list[list[np.ndarray]]] = [[[np.empty(0)], [np.empty(0)]] for _ in pairs]

    def tables(self, share: float) -> Iterator[pa.Table]:
        """The gained and lost documents, by id; all documents are counted, and scores of a share of them are kept."""
        for part in self.rows.parts():
            one, other = part.shared
            before, after = (table["selected"].to_numpy() for table in (one, other))
            kinds = np.where(after, np.where(before, "kept", "gained"), np.where(before, "lost", "neither"))
            self.counts.update(kinds.tolist())
            changed = pa.array(before != after)
            ids, *p = (column.filter(changed) for column in (one["doc_id"], one["p_value"], other["p_value"]))
            kind = pa.array(kinds, pa.string()).filter(changed)
            table = pa.table([pa.array([self.a.name] * len(ids), pa.string()), ids, kind, *p], CHANGES_SCHEMA)
            for change, column in (("gained", "p_value_b"), ("lost", "p_value_a")):
                some = pa.concat_tables([self.listed[change], table.filter(pc.equal(table["change"], change))])
                ordered = some.sort_by([(column, "ascending"), ("doc_id", "ascending")])
                self.listed[change] = ordered.slice(0, LISTED).combine_chunks()
            self._keep_scores(one, other, share)
            yield table

    def _keep_scores(self, one: pa.Table, other: pa.Table, share: float) -> None:
        keep = ~(one["quarantined"].to_numpy() | other["quarantined"].to_numpy())
        if share < 1:
            keys = mix(one["text_key"].to_numpy().view(np.uint64))
            keep &= keys < np.uint64(share * 2.0**64)
        for index, sides in enumerate(self.scores):
            for values, table in zip(sides, (one, other), strict=True):
                values.append(table[f"score_{index}"].to_numpy()[keep])

    def paired(self, sampled: bool) -> list[PairedScores]:
        """The kept scores; call after `tables`."""
        paired = []
        for (detector_a, detector_b), sides in zip(self.pairs, self.scores, strict=True):
            a, b = map(np.concatenate, sides)
            pair = ScorePair(
                detector_a=detector_a,
                detector_b=detector_b,
                n_documents=a.size,
                sampled=sampled,
                spearman=rank_correlation(a, b),
            )
            paired.append(PairedScores(pair, a, b))
        return paired

    def record(self, scores: list[ScorePair]) -> SelectionChange:
        """The changes of the selection; call after `tables`."""
        kept, gained, lost, neither = (self.counts[name] for name in ("kept", "gained", "lost", "neither"))
        listed = {
            change: [ChangedDocument(**row) for row in table.drop(["selection", "change"]).to_pylist()]
            for change, table in self.listed.items()
        }
        return SelectionChange(
            name=self.a.name,
            direction=self.a.direction,
            a=_side(self.a, kept + lost),
            b=_side(self.b, kept + gained),
            n_kept=kept,
            n_gained=gained,
            n_lost=lost,
            n_neither=neither,
            gained=listed["gained"],
            lost=listed["lost"],
            scores=scores,
        )


def _side(summary: Summary, n_selected_shared: int) -> SelectionSide:
    fields = set(SelectionSide.model_fields) - {"n_selected_shared"}
    return SelectionSide(**summary.model_dump(include=fields), n_selected_shared=n_selected_shared)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation, in [-1, 1]; None for fewer than 2 documents or if all scores of a run tie."""
    from scipy.stats import rankdata

    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


# --- other differences of the runs


def differences(a: FinishedRun, b: FinishedRun, selections: list[str]) -> list[Difference]:
    """The differences of two runs, part by part, in the order of the keys.

    Args:
        a: the first run.
        b: the second.
        selections: selections whose settings, as last requested, are compared.
    """
    parts = [
        ("configuration", _settings(a), _settings(b)),
        ("selection", _questions(a, selections), _questions(b, selections)),
        ("fingerprint", a.manifest.fingerprint, b.manifest.fingerprint),
        ("model", a.manifest.model.plain(), b.manifest.model.plain()),
        ("version", a.manifest.versions, b.manifest.versions),
        ("input", _inputs(a), _inputs(b)),
    ]
    return [
        Difference(part=part, key=key, a=one, b=other) for part, x, y in parts for key, one, other in _differing(x, y)
    ]


def _settings(run: FinishedRun) -> dict[str, Any]:
    plain = run.manifest.config.model_dump(mode="json", by_alias=True)
    kept = {key: value for key, value in plain.items() if key not in _PLACES}
    return {**kept, "limit": run.manifest.limit}


def _questions(run: FinishedRun, selections: list[str]) -> dict[str, Any]:
    return {name: run.settings(name) for name in selections}


def _inputs(run: FinishedRun) -> dict[str, Any]:
    """The input files by role and name within the role's folder, with the fields that reveal a change of content."""
    files: dict[str, Any] = {}
    for role in ROLES:
        entries = [entry for entry in run.manifest.inputs if entry.role == role]
        folder = common_folder([entry.name for entry in entries])
        files.update({f"{role}: {entry.name.removeprefix(folder)}": _content(entry) for entry in entries})
    return files


def _content(entry: InputRecord) -> dict[str, Any]:
    return {"content": entry.content, "size": entry.size, "rows": entry.rows, "format": entry.format}


def _differing(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted paths of differing values; a mapping that only one side has is one value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            inner = f"{path}.{key}" if path else str(key)
            yield from _differing(a.get(key, ABSENT), b.get(key, ABSENT), inner)
    elif a != b:
        yield path, a, b


def write_comparison(store: Store, comparison: Comparison, scores: Mapping[str, PairedScores]) -> str:
    """Write comparison.html; the same comparison gives the same bytes.

    Args:
        store: the folder of the comparison.
        comparison: the comparison.
        scores: paired scores of each selection, by name.

    Returns:
        the path or URL of the page.
    """
    page = render(
        f"pipeline.compare/{PAGE_FILE}",
        comparison=comparison,
        figures={name: score_figure(name, paired) for name, paired in scores.items()},
        changes_file=CHANGES_FILE,
        plain=_plain,
        folder_names=run_names(comparison.a.run, comparison.b.run),
    )
    store.write(PAGE_FILE, page.encode("utf-8", "replace"))
    return f"{store.url}/{PAGE_FILE}"


def score_figure(selection: str, paired: PairedScores) -> FigureImage | None:
    """The scores of both runs as a density of documents; None where there are no scores or all are equal."""
    pair = paired.pair
    if pair.spearman is None:
        return None
    spans = [_span(values) for values in (paired.a, paired.b)]
    a, b = (np.clip(values, *span) for values, span in zip((paired.a, paired.b), spans, strict=True))
    counts, _, _ = np.histogram2d(a, b, bins=BINS, range=spans)

    def paint(figure: Figure, axes: Axes) -> None:
        from matplotlib.colors import to_rgba_array

        logs = np.log(np.maximum(counts, 1))
        opacity = (FAINTEST + (1 - FAINTEST) * logs / max(float(logs.max()), 1.0)) * (counts > 0)
        extent = (*spans[0], *spans[1])
        cells = to_rgba_array([BLUE]).repeat(BINS**2, axis=0).reshape(BINS, BINS, 4)
        cells[..., 3] = opacity.T
        axes.imshow(cells, extent=extent, origin="lower", aspect="auto", interpolation="none")
        axes.set_xlabel(f"A: {label(pair.detector_a)}")
        axes.set_ylabel(f"B: {label(pair.detector_b)}")

    return draw(
        f"scores-{selection}.svg",
        wording.scores_title(pair.n_documents, pair.sampled),
        wording.scores_alt((pair.detector_a, pair.detector_b), pair.n_documents, pair.sampled, pair.spearman),
        wording.SCORES_CAPTION,
        paint,
    )


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    return (float(low), float(high)) if high > low else (float(values.min()), float(values.max()))


def _plain(value: Any) -> str:
    """A configuration value on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def comparison_table(comparison: Comparison) -> Table:
    """The changes of each selection, with the correlation of the scores."""
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
    """The differences of the runs."""
    table = Table("part", "key", "A", "B", title=wording.DIFFERENCES_TITLE)
    for one in comparison.differences:
        values = [
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (one.a, one.b)
        ]
        table.add_row(one.part, Text(one.key), *map(Text, values))
    return table
