"""Score shards -> selections: functions folded over the shards, then the driver's decision.

Few shards are read in this process, many by Ray Data on the cluster. Counts add, so neither changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from pipeline.config import NULL_ROLE, AuditConfig, SelectionConfig
from pipeline.errors import UserError
from pipeline.plan import resolution
from pipeline.scored import Overlap, Scored, find_overlap
from pipeline.selection.diagnostics import blind, blind_sentence, sample_texts
from pipeline.selection.methods import Answer, Batch, answer
from pipeline.selection.shards import DOCUMENTS_SCHEMA, Span, histogram, span_of
from pipeline.store import Receipt

MANY_SHARDS = 512


def select_all(config: AuditConfig, scored: Scored, limit: int | None) -> list[dict[str, Any]]:
    """Answer every configured selection and write it; the summaries, in order.

    Raises:
        UserError: no calibration or audit documents, shared documents without `overlap: drop`, damaged scores.
    """
    columns = sorted({column for selection in config.selections for column in selection.detectors})
    if not columns:
        return []
    roles = dict.fromkeys(["audit", *(NULL_ROLE[s.direction] for s in config.selections)])
    span = Span({}, {})
    for part in each(
        [receipt for role in roles for receipt in scored.of(role)],
        lambda receipt: span_of(scored.table(receipt, columns), columns, receipt.data),
    ):
        span = span + part
    overlaps: dict[str, Overlap] = {role: find_overlap(scored, role, config) for role in roles if role != "audit"}
    blinds: dict[str, dict[str, Any]] = {role: _blind(scored, role, config.seed) for role in overlaps}
    summaries = []
    for selection in config.selections:
        role = NULL_ROLE[selection.direction]
        question = _Question(config, selection, scored, overlaps[role], span)
        summaries.append(question.answer({"blind": blinds[role]}, limit))
    wanted = {selection.name for selection in config.selections}
    for name in scored.store.names("selection"):
        if name not in wanted:
            scored.store.remove_folder(f"selection/{name}")
    return summaries


def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The function of every shard, in any order: here for a few shards, on the cluster for many."""
    if len(receipts) < MANY_SHARDS:
        yield from map(function, receipts)
        return
    import ray

    from ray_jobs.score import connect

    connect()
    rows = ray.data.from_items([{"index": index} for index in range(len(receipts))])
    mapped = rows.map(lambda row: {"result": cloudpickle.dumps(function(receipts[row["index"]]))})
    for row in mapped.iter_rows():
        yield cloudpickle.loads(row["result"])


def _blind(scored: Scored, role: str, seed: int) -> dict[str, Any]:
    """The blind diagnostic of a role; computed once a run, because the texts may be gone when it is read again."""
    name = f"diagnostics/blind-{role}.json"
    found: dict[str, Any] | None = scored.store.read_json(name)
    if found is not None:
        return found
    shards = {r: [scored.shards[receipt.shard] for receipt in scored.of(r)] for r in (role, "audit")}
    try:
        found = blind_sentence(blind(sample_texts(shards[role]), sample_texts(shards["audit"]), seed), role)
    except UserError as error:
        return {
            "ok": None,
            "sentence": f"Whether the words of {role} and audited documents differ was not tested: {error}.",
        }
    scored.store.write_json(name, found)
    return found


@dataclass(frozen=True, slots=True)
class _Question:
    """One selection of a run: decides it and writes its files, the summary last, so a selection with one is whole."""

    config: AuditConfig
    selection: SelectionConfig
    scored: Scored
    overlap: Overlap
    span: Span

    @property
    def folder(self) -> str:
        return f"selection/{self.selection.name}"

    def answer(self, diagnostics: dict[str, Any], limit: int | None) -> dict[str, Any]:
        columns, role = self.selection.detectors, NULL_ROLE[self.selection.direction]
        grouped = self.selection.calibration == "by_group"
        known = _kept(self.scored.batches(role, columns, grouped), self.overlap.keep)
        others = self.scored.batches("seen" if role == "unseen" else "unseen", columns, grouped)
        quarantined = sum(self.scored.quarantined("audit").values())
        audit = self.scored.of("audit")

        def fold(function: Callable[[Batch], Any]) -> Iterator[Any]:
            return each(audit, lambda receipt: function(self.scored.batch(receipt, columns, grouped)))

        found = answer(self.selection, self.config.seed, known, others, fold, quarantined)
        self.scored.store.remove(f"{self.folder}/summary.json")
        self.scored.store.remove_folder(self.folder)
        n_selected = self.write(found, known, grouped, quarantined)
        summary = self.summary(found, n_selected, quarantined, diagnostics)
        if limit is not None:
            summary["limit"] = limit
        self.scored.store.write_json(f"{self.folder}/summary.json", summary)
        return summary

    def write(self, found: Answer, known: Batch, grouped: bool, quarantined: int) -> int:
        """Write every audit document's verdict, the selected, and what the report draws; the number selected."""
        column, edges = self.selection.detectors[0], self.span.edges(self.selection.detectors[0])
        n = found.n_calibration
        shown = {
            NULL_ROLE[self.selection.direction]: histogram(known.first, edges),
            "audit": np.zeros(edges.size - 1, dtype=np.int64),
        }
        counts = np.zeros(n + 1, dtype=np.int64)
        selected: list[pa.Table] = []
        for receipt, part in each(self.scored.of("audit"), lambda r: (r, self.judged(r, found, grouped, edges))):
            shown["audit"] += part.histogram
            counts += part.ranks
            source = pa.array([self.scored.shards[receipt.shard].name] * len(part.selected), pa.string())
            selected.append(part.selected.append_column("source", source))
        counts[-1] += quarantined
        order = ["doc_id", "p_value", *self.selection.detectors, "source", "row"]
        joined = pa.concat_tables(selected).select(order)
        keys = [("p_value", "ascending"), ("source", "ascending"), ("row", "ascending")]
        joined = joined.sort_by(keys)
        self.scored.store.write_table(f"{self.folder}/selected.parquet", joined)
        if self.selection.direction == "clean":
            self.scored.store.write_table(f"{self.folder}/clean.parquet", joined)
            self.scored.store.write_json(f"{self.folder}/clean_ids.json", self.clean_ids(joined))
        filled = np.flatnonzero(counts)
        ranks = pa.table({"rank": filled + 1, "count": counts[filled]})
        self.scored.store.write_table(f"{self.folder}/ranks.parquet", ranks)
        roles = {role: values.tolist() for role, values in shown.items()}
        value = {"column": column, "edges": edges.tolist(), "roles": roles}
        self.scored.store.write_json(f"{self.folder}/scores.json", value)
        return len(joined)

    def judged(self, receipt: Receipt, found: Answer, grouped: bool, edges: np.ndarray) -> _Judged:
        """Judge one shard and write its verdicts."""
        batch = self.scored.batch(receipt, self.selection.detectors, grouped)
        p, chosen = found.judge(batch)
        table = self.scored.table(receipt, ["doc_id", "row", *self.selection.detectors])
        verdicts = {"doc_id": table["doc_id"], "p_value": p, "selected": chosen}
        everything = pa.concat_tables([pa.table(verdicts, schema=DOCUMENTS_SCHEMA), self.unscored(receipt)])
        self.scored.store.write_table(f"{self.folder}/documents/{receipt.shard}.parquet", everything)
        size = found.n_calibration + 1
        # p-values off the uniform grid (by group, conditional, fused) are drawn at the next place on it
        places = np.clip(np.ceil(p * size - 1e-6).astype(np.int64), 1, size)
        part = table.append_column("p_value", pa.array(p)).filter(pa.array(chosen))
        return _Judged(part, np.bincount(places - 1, minlength=size), histogram(batch.first, edges))

    def unscored(self, receipt: Receipt) -> pa.Table:
        """Quarantined documents of a shard: p = 1, never selected."""
        names = [self.scored.store.read_table(receipt.quarantine, ["doc_id"])["doc_id"]] if receipt.quarantine else []
        if receipt.shard in self.scored.duplicates:
            table = self.scored.store.read_table(receipt.data, ["doc_id"])
            names.append(table["doc_id"].take(pa.array(self.scored.duplicates[receipt.shard])))
        ids = [name.as_py() for chunk in names for name in chunk]
        columns = {"doc_id": ids, "p_value": [1.0] * len(ids), "selected": [False] * len(ids)}
        return pa.table(columns, schema=DOCUMENTS_SCHEMA)

    def clean_ids(self, selected: pa.Table) -> dict[str, list[int]]:
        """The selected as `{"task": [indices]}`, which lm-evaluation-harness takes for --samples.

        A task is an input file, by its name without endings; an index is a row of it.
        """
        tasks: dict[str, list[int]] = {}
        for source, row in zip(selected["source"].to_pylist(), selected["row"].to_pylist(), strict=True):
            tasks.setdefault(PurePath(source).name.split(".")[0], []).append(row)
        return {task: sorted(rows) for task, rows in sorted(tasks.items())}

    def summary(self, found: Answer, n_selected: int, quarantined: int, diagnostics: dict[str, Any]) -> dict[str, Any]:
        selection = self.selection
        needed, enough = found.resolution(found.m)
        role = NULL_ROLE[selection.direction]
        held = {**found.strict, "n_selected": min(found.strict["n_selected"], found.m - quarantined)}
        own = {
            **diagnostics,
            "resolution": resolution(found.n_calibration, found.m, needed, enough, role),
            "overlap": _overlap_diagnostic(self.overlap, role),
            "duplicates": _duplicates_diagnostic(self.scored),
            "truncated": _truncated_diagnostic(self.scored),
            **found.diagnostics,
        }
        return {
            "name": selection.name,
            "procedure": selection.procedure,
            "direction": selection.direction,
            "alpha": selection.alpha,
            "detectors": selection.detectors,
            "calibration": selection.calibration,
            "n_audit": found.m,
            "n_calibration": found.n_calibration,
            "n_quarantined": quarantined,
            "n_selected": n_selected,
            "threshold": found.threshold,
            "null_proportion": found.null_proportion,
            "factor": found.factor,
            "weights": found.weights,
            "guarantee": found.guarantee,
            "assumption": found.assumption,
            "promise": found.promise,
            "supported": diagnostics["blind"]["ok"] is not False,
            "minimum_selectable": needed,
            "strict": held,
            "details": found.details,
            "diagnostics": own,
        }


@dataclass(frozen=True, slots=True)
class _Judged:
    """What judging one shard gives back to the driver."""

    selected: pa.Table
    ranks: np.ndarray
    histogram: np.ndarray


def _kept(batch: Batch, keep: np.ndarray) -> Batch:
    groups = batch.groups.filter(pa.array(keep)) if batch.groups is not None else None
    return Batch(batch.matrix[keep], groups, batch.keys[keep])


def _overlap_diagnostic(overlap: Overlap, role: str) -> dict[str, Any]:
    tail = " and were left out of calibration." if overlap.n_calibration else "."
    sentence = f"{overlap.n_calibration} {role} documents are audit documents too{tail}"
    return {"n_calibration": overlap.n_calibration, "n_audit": overlap.n_audit, "ok": True, "sentence": sentence}


def _duplicates_diagnostic(scored: Scored) -> dict[str, Any]:
    count = sum(scored.quarantined(role)["duplicate_id"] for role in ("audit", "unseen", "seen"))
    return {
        "count": count,
        "ok": count == 0,
        "sentence": f"{count} documents repeat an id and were quarantined.",
    }


def _truncated_diagnostic(scored: Scored) -> dict[str, Any]:
    total = sum(receipt.n_scored for receipt in scored.receipts)
    cut = sum(receipt.n_truncated for receipt in scored.receipts)
    share = cut / total if total else 0.0
    sentence = f"{cut} of {total} scored documents ({share:.1%}) were judged by their first max_tokens tokens only."
    return {"share": share, "ok": None, "sentence": sentence}
