"""The request of an export: one selection of a finished run, the documents to keep, and the form.

The verdicts of a shard state which rows were selected and which could not be scored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, UserError, nearest
from pipeline.results.history import answer_names
from pipeline.results.summary import Summary, read_summary
from pipeline.run.conclusion_text import WARNING
from pipeline.run.digests import VerdictTables
from pipeline.run.manifest import Manifest, read_run
from pipeline.selection.guarantees import ConclusionValue
from pipeline.stages import SCORING
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts

Keep = Literal["selected", "rest"]
Form = Literal["files", "list", "samples", "huggingface"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A request of a user."""

    run: str  # a run directory
    out: str | None = None  # a folder, local or an fsspec URL; None: one in the working directory
    selection: str | None = None  # None: the only one
    keep: Keep | None = None  # None: by direction
    form: Form = "files"
    task: str | None = None  # task of samples; None: the group column names tasks
    quarantined: bool = True  # whether the rest includes quarantined documents
    unsupported_too: bool = False  # whether a selection that a check contradicts may be exported


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A request that a run can fulfil."""

    store: Store
    manifest: Manifest
    shards: tuple[Shard, ...]  # shards of the audited documents
    summary: Summary
    out: str
    keep: Keep
    form: Form
    task: str | None
    quarantined: bool

    @property
    def keeps_selected(self) -> bool:
        """Whether the selected documents are exported."""
        return self.keep == "selected"

    @property
    def keeps_quarantined(self) -> bool:
        """Whether documents that could not be scored, and so were never selected, are exported."""
        return not self.keeps_selected and self.quarantined

    @property
    def run_digest(self) -> str:
        """A digest that identifies the run without its location: 16 hexadecimal digits."""
        return _digest(self.store.url)

    @property
    def fingerprint_digest(self) -> str:
        """A digest of all values that could change a score of the run: 16 hexadecimal digits."""
        return _digest(json.dumps(self.manifest.fingerprint, sort_keys=True))


def choose_form(chosen: Mapping[Form, bool]) -> Form:
    """The chosen form; by default files.

    Raises:
        UserError: several forms are chosen.
    """
    forms = [form for form, is_chosen in chosen.items() if is_chosen]
    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude one another: export twice, into two folders")
    return forms[0] if forms else "files"


def resolve_request(request: ExportRequest) -> ExportPlan:
    """Resolve a request against a run.

    Raises:
        UserError: not a run directory, one of another version or without answers; no such selection, or several and
            none named; a selection that a check contradicts; or incompatible options.
    """
    store = Store(request.run)
    manifest, shards = read_run(store)
    summary = _summary(store, manifest, request)
    if request.task is not None and request.form != "samples":
        raise UserError("--task names the task of --samples: give both")
    if summary.conclusion == ConclusionValue.CONTRADICTED and not request.unsupported_too:
        raise UserError(
            f"selection {summary.name} is {WARNING}: {' '.join(summary.reasons)} "
            "To export it nevertheless, marked so: --unsupported-too"
        )
    default: Keep = "selected" if summary.direction == "clean" or request.form == "list" else "rest"
    keep = request.keep or default
    if summary.limit is not None and keep == "rest":
        raise UserError(
            f"the run audited only the first {summary.limit:,} documents (--limit), so nothing is known of the others: "
            "run it without --limit, or export with --keep selected"
        )
    if not request.quarantined and keep == "selected":
        raise UserError("--without-quarantined goes with --keep rest: a quarantined document is never selected")
    audited = tuple(shard for shard in shards if shard.role == "audit")
    if request.form == "samples" and request.task is None and audited[0].group_column is None:
        raise UserError("--samples needs the name of the task: --task NAME, as corpus.audit names no group column")
    out = request.out or _default_folder(store, summary, request.form)
    return ExportPlan(store, manifest, audited, summary, out, keep, request.form, request.task, request.quarantined)


def _summary(store: Store, manifest: Manifest, request: ExportRequest) -> Summary:
    if manifest.config.corpus.audit is None:
        raise UserError(f"{store.url} compares documents of known membership: nothing was selected, nothing to export")
    names = answer_names(store, manifest.config)
    name = request.selection
    if name is None:
        if not names:
            raise UserError(f"{store.url} has no selections: make one with seenset select")
        if len(names) > 1:
            raise UserError(f"{store.url} has several selections, choose one: --selection {', '.join(names)}")
        name = names[0]
    if name not in names:
        raise UserError(f"no selection {name!r} in {store.url}; {nearest(name, names, 'selections')}")
    summary = read_summary(store, name)
    if summary is None:
        raise IncompleteError(f"selection {name} of {store.url} is not made yet: run the audit to its end")
    return summary


def _default_folder(store: Store, summary: Summary, form: Form) -> str:
    base = os.path.basename(store.root) or "run"
    return f"{base}-{summary.name}" + ("" if form == "files" else f"-{form}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class ShardVerdicts:
    """The verdicts on the documents of a shard, in the order of their rows."""

    ids: pa.Array  # strings, (documents,)
    rows: np.ndarray  # int64, (documents,): rows of the input, ascending
    selected: np.ndarray  # bool, (documents,)
    scored: np.ndarray  # bool, (documents,)

    @classmethod
    def parse(cls, table: pa.Table) -> ShardVerdicts:
        """The verdicts in the table of a file of verdicts."""
        table = table.sort_by("row").combine_chunks()
        scored = pc.is_valid(table.column(3))  # the first detector's scores
        columns = (table["row"], table["selected"], scored)
        return cls(table["doc_id"], *(column.to_numpy() for column in columns))

    def kept(self, plan: ExportPlan) -> np.ndarray:
        """Whether an export keeps each document, bool, (documents,)."""
        if plan.keeps_selected:
            return self.selected
        return ~self.selected if plan.keeps_quarantined else ~self.selected & self.scored


@dataclass(frozen=True, slots=True)
class AnsweredRun:
    """The receipts of a finished run's audited shards, by shard, and the verdicts on their documents."""

    plan: ExportPlan
    receipts: dict[str, Receipt]
    tables: VerdictTables

    def verdicts(self, shard: Shard) -> ShardVerdicts:
        """The verdicts on the documents of a shard.

        Raises:
            DamagedError: their file is missing or was changed.
        """
        return ShardVerdicts.parse(self.tables.read(shard.id))

    def runs(self, shards: Iterable[Shard]) -> Iterator[np.ndarray]:
        """The rows for copying: the kept rows, or the left-out rows where the rest is kept."""
        for shard in shards:
            verdicts = self.verdicts(shard)
            kept = verdicts.kept(self.plan)
            yield verdicts.rows[kept if self.plan.keeps_selected else ~kept]


def read_answered(plan: ExportPlan) -> AnsweredRun:
    """The receipts of a run whose audit documents were all audited by itself.

    Raises:
        IncompleteError: a shard is not scored.
        UserError: a damaged receipt, or an answer from other scores.
    """
    wanted = {shard.id for shard in plan.shards}
    receipts = {r.shard: r for r in read_receipts(plan.store, SCORING) if r.shard in wanted}
    if missing := sorted(wanted - receipts.keys()):
        raise IncompleteError(f"run {plan.store.url}: {len(missing)} shards are not scored, first {missing[0]}")
    already_audited = sum(receipt.n_judged for receipt in receipts.values())
    if already_audited and not plan.keeps_selected:
        raise UserError(
            f"{already_audited:,} documents of run {plan.store.url} are already audited by earlier runs "
            "(against), and only those runs know which of them are kept: export those runs, or what this run selected"
        )
    tables = VerdictTables.open(plan.store, plan.summary.name, receipts.values())
    return AnsweredRun(plan, receipts, tables)


class RowMarks:
    """Marks of the kept rows of an input, read once in order; memory holds the rows of one shard."""

    def __init__(self, runs: Iterable[np.ndarray], keeps: bool) -> None:
        """Start at the first row.

        Args:
            runs: rows, int64, ascending within a run and over all of them.
            keeps: whether these rows are kept, or left out.
        """
        self._runs = iter(runs)
        self._rows = np.empty(0, dtype=np.int64)
        self._keeps = keeps
        self._next = 0

    def following(self, count: int) -> np.ndarray:
        """Whether each of the next rows is kept, bool, (count,)."""
        start, stop = self._next, self._next + count
        self._next = stop
        flags = np.full(count, not self._keeps)
        while True:
            met = int(np.searchsorted(self._rows, stop))
            flags[self._rows[:met] - start] = self._keeps
            self._rows = self._rows[met:]
            if self._rows.size:
                return flags
            run = next(self._runs, None)
            if run is None:
                return flags
            self._rows = run

    def unmet(self) -> bool:
        """Whether marked rows remain that the input does not have."""
        return bool(self._rows.size) or any(run.size for run in self._runs)
