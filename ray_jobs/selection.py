"""Score shards -> selections: summaries folded over the shards, then the driver's decision.

Counts add, so the order and the grouping of the shards cannot change an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config import NULL_ROLE, AuditConfig, SelectionConfig
from pipeline.corpus import Shard
from pipeline.errors import IncompleteError, UserError
from pipeline.plan import resolution
from pipeline.scoring import QUARANTINE_SCHEMA, STAGE
from pipeline.selection import (
    Decision,
    RankCounts,
    calibrate,
    calibration_needed,
    decide,
    minimum_selectable,
    strict,
)
from pipeline.selection.shards import (
    DOCUMENTS_SCHEMA,
    Keys,
    Span,
    count_shard,
    documents_of,
    histogram,
    overlapping,
    repeated,
    scores_of,
    span_of,
)
from pipeline.store import Receipt, Store, read_receipts

KEYS_AT_ONCE = 1 << 24
DUPLICATES = "quarantine/duplicate_id.parquet"


@dataclass(frozen=True, slots=True)
class Scored:
    """The finished score shards of a run: receipts, what each reads, and the rows that repeat an id."""

    store: Store
    receipts: tuple[Receipt, ...]
    shards: dict[str, Shard]
    duplicates: dict[str, np.ndarray]  # shard -> positions in its score file

    def of(self, role: str) -> list[Receipt]:
        """The receipts of one role, in order."""
        return [receipt for receipt in self.receipts if receipt.role == role]

    def table(self, receipt: Receipt, columns: Sequence[str]) -> pa.Table:
        """A score shard without the rows that repeat an id."""
        try:
            table = self.store.read_table(receipt.data, columns)
        except KeyError as error:
            raise UserError(f"{receipt.data}: {error}") from None
        repeats = self.duplicates.get(receipt.shard)
        if repeats is None:
            return table
        keep = np.ones(len(table), dtype=bool)
        keep[repeats] = False
        return table.filter(pa.array(keep))

    def quarantined(self, role: str) -> Counter[str]:
        """Quarantined documents of a role by reason, repeated ids of different shards included."""
        reasons: Counter[str] = Counter()
        for receipt in self.of(role):
            reasons.update(receipt.reasons)
            if receipt.shard in self.duplicates:
                reasons["duplicate_id"] += len(self.duplicates[receipt.shard])
        return reasons


def read_scored(store: Store, shards: Sequence[Shard]) -> Scored:
    """Gather the finished shards and find ids that repeat across them; those go to quarantine.

    Raises:
        IncompleteError: a shard has no receipt.
        UserError: score shards of two fingerprints.
    """
    by_id = {shard.id: shard for shard in shards}
    receipts = tuple(receipt for receipt in read_receipts(store, STAGE) if receipt.shard in by_id)
    missing = sorted(by_id.keys() - {receipt.shard for receipt in receipts})
    if missing:
        raise IncompleteError(
            f"run {store.url}: {len(missing)} of {len(by_id)} shards are not scored "
            f"(first: {missing[0]}, {by_id[missing[0]].name}); run it again"
        )
    _one_fingerprint(receipts)
    scored = Scored(store, receipts, by_id, {})
    duplicates = {}
    for role in ("audit", "unseen", "seen"):
        duplicates.update(_duplicates(store, scored.of(role)))
    scored = replace(scored, duplicates=duplicates)
    _write_duplicates(scored)
    return scored


def _one_fingerprint(receipts: Sequence[Receipt]) -> None:
    first = {key: value for key, value in receipts[0].fingerprint.items() if key not in ("rows", "columns")}
    for receipt in receipts[1:]:
        for key, value in first.items():
            other = receipt.fingerprint.get(key)
            if other != value:
                raise UserError(f"score shards differ in {key}: {receipts[0].shard} {value}, {receipt.shard} {other}")


def _duplicates(store: Store, receipts: Sequence[Receipt]) -> dict[str, np.ndarray]:
    """Positions, by shard, of documents whose id stands in an earlier shard of the role."""
    total = sum(receipt.n_scored for receipt in receipts)
    parts = -(-total // KEYS_AT_ONCE)
    found: dict[str, list[np.ndarray]] = {}
    for part in range(parts):
        keys, shard_of, position = [], [], []
        for index, receipt in enumerate(receipts):
            own = store.read_table(receipt.data, ["id_key"])["id_key"].to_numpy()
            chosen = np.flatnonzero(own % parts == part)
            keys.append(own[chosen])
            shard_of.append(np.full(chosen.size, index, dtype=np.int32))
            position.append(chosen)
        repeats = repeated(np.concatenate(keys))
        shards, positions = np.concatenate(shard_of)[repeats], np.concatenate(position)[repeats]
        for index in np.unique(shards):
            found.setdefault(receipts[index].shard, []).append(positions[shards == index])
    return {shard: np.sort(np.concatenate(arrays)) for shard, arrays in found.items()}


def _write_duplicates(scored: Scored) -> None:
    if not scored.duplicates:
        scored.store.remove(DUPLICATES)
        return
    tables = []
    for receipt in scored.receipts:
        if receipt.shard in scored.duplicates:
            table = scored.store.read_table(receipt.data, ["doc_id", "role", "row", "id_key"])
            table = table.take(pa.array(scored.duplicates[receipt.shard]))
            fixed = {
                "source": scored.shards[receipt.shard].name,
                "stage": STAGE,
                "reason": "duplicate_id",
                "message": "the id stands in an earlier shard",
            }
            columns = {
                f.name: table[f.name] if f.name not in fixed else pa.array([fixed[f.name]] * len(table))
                for f in QUARANTINE_SCHEMA
            }
            tables.append(pa.table(columns, schema=QUARANTINE_SCHEMA))
    scored.store.write_table(DUPLICATES, pa.concat_tables(tables))


# --- one selection


@dataclass(frozen=True, slots=True)
class Overlap:
    """Calibration documents that are audited too."""

    n_calibration: int
    n_audit: int
    keep: np.ndarray  # bool over the calibration documents


def select_all(config: AuditConfig, scored: Scored, limit: int | None) -> list[dict[str, Any]]:
    """Answer every configured selection and write it; the summaries, in order.

    Raises:
        UserError: no calibration or audit documents, shared documents without `overlap: drop`, damaged scores.
    """
    columns = sorted({column for selection in config.selections for column in selection.detectors})
    if not columns:
        return []
    span = Span({}, {})
    for role in ("audit", *{NULL_ROLE[s.direction] for s in config.selections}):
        for receipt in scored.of(role):
            span = span + span_of(scored.table(receipt, columns), columns, receipt.data)
    overlaps: dict[str, Overlap] = {}
    summaries = []
    for selection in config.selections:
        role = NULL_ROLE[selection.direction]
        if role not in overlaps:
            overlaps[role] = _overlap(scored, role, config)
        summaries.append(_select(config, selection, scored, overlaps[role], span, limit))
    stale = {s.name for s in config.selections}
    for name in scored.store.names("selection"):
        if name not in stale:
            scored.store.remove_folder(f"selection/{name}")
    return summaries


def _overlap(scored: Scored, role: str, config: AuditConfig) -> Overlap:
    wanted = ["text_key", "prefix_key"]
    keys = Keys.of([scored.table(receipt, wanted) for receipt in scored.of(role)])
    hits = np.zeros(keys.text.size, dtype=bool)
    ours = 0
    for receipt in scored.of("audit"):
        found, count = overlapping(scored.table(receipt, wanted), keys)
        hits |= found
        ours += count
    shared = int(np.count_nonzero(hits))
    if shared and config.overlap == "error":
        raise UserError(
            f"{shared} of {hits.size} {role} documents are audit documents too (same text, or same first 8 words; "
            f"{ours} audit documents); remove them or set overlap: drop to leave them out of calibration"
        )
    return Overlap(shared, ours, ~hits)


def _select(
    config: AuditConfig,
    selection: SelectionConfig,
    scored: Scored,
    overlap: Overlap,
    span: Span,
    limit: int | None,
) -> dict[str, Any]:
    column = selection.detectors[0]
    role = NULL_ROLE[selection.direction]
    known = [scores_of(scored.table(r, [column]), column, r.data) for r in scored.of(role)]
    calibration = calibrate(np.concatenate([*known, np.empty(0)])[overlap.keep])
    edges = span.edges(column)
    shown: dict[str, np.ndarray] = {
        role: histogram(calibration, edges),
        "audit": np.zeros(edges.size - 1, dtype=np.int64),
    }
    counts = RankCounts.empty(calibration.size)
    for receipt in scored.of("audit"):
        scores = scores_of(scored.table(receipt, [column]), column, receipt.data)
        counts = counts + count_shard(scores, calibration, selection.direction)
        shown["audit"] += histogram(scores, edges)
    quarantined = sum(scored.quarantined("audit").values())
    counts = counts.with_quarantined(quarantined)
    decision = decide(selection.procedure, counts, selection.exact_alpha)
    writer = _Writer(scored, selection, config)
    writer.clear()
    n_selected = writer.documents(calibration, decision)
    writer.figures(counts, column, edges, shown)
    summary = _summary(selection, scored, counts, decision, overlap, n_selected, quarantined)
    if limit is not None:
        summary["limit"] = limit
    scored.store.write_json(f"{writer.folder}/summary.json", summary)
    return summary


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes one selection's files; the summary comes last, so a selection with one is whole."""

    scored: Scored
    selection: SelectionConfig
    config: AuditConfig

    @property
    def folder(self) -> str:
        return f"selection/{self.selection.name}"

    def clear(self) -> None:
        self.scored.store.remove(f"{self.folder}/summary.json")
        self.scored.store.remove_folder(self.folder)

    def documents(self, calibration: np.ndarray, decision: Decision) -> int:
        """Write every audit document's verdict and the table of the selected; the number selected."""
        column = self.selection.detectors[0]
        selected: list[pa.Table] = []
        for receipt in self.scored.of("audit"):
            table = self.scored.table(receipt, ["doc_id", "row", *self.selection.detectors])
            scores = scores_of(table, column, receipt.data)
            verdicts = documents_of(table, scores, calibration, self.selection.direction, decision.rank)
            chosen = verdicts["selected"]
            part = table.append_column("p_value", verdicts["p_value"]).filter(chosen)
            source = pa.array([self.scored.shards[receipt.shard].name] * len(part), pa.string())
            selected.append(part.append_column("source", source))
            everything = pa.concat_tables([verdicts, self._unscored(receipt)])
            self.scored.store.write_table(f"{self.folder}/documents/{receipt.shard}.parquet", everything)
        order = ["doc_id", "p_value", *self.selection.detectors, "source", "row"]
        joined = pa.concat_tables(selected).select(order)
        keys = [("p_value", "ascending"), ("source", "ascending"), ("row", "ascending")]
        self.scored.store.write_table(f"{self.folder}/selected.parquet", joined.sort_by(keys))
        return len(joined)

    def _unscored(self, receipt: Receipt) -> pa.Table:
        """Quarantined documents of a shard: p = 1, never selected."""
        names = [self.scored.store.read_table(receipt.quarantine, ["doc_id"])["doc_id"]] if receipt.quarantine else []
        if receipt.shard in self.scored.duplicates:
            table = self.scored.store.read_table(receipt.data, ["doc_id"])
            names.append(table["doc_id"].take(pa.array(self.scored.duplicates[receipt.shard])))
        ids = [name.as_py() for chunk in names for name in chunk]
        columns = {"doc_id": ids, "p_value": [1.0] * len(ids), "selected": [False] * len(ids)}
        return pa.table(columns, schema=DOCUMENTS_SCHEMA)

    def figures(self, counts: RankCounts, column: str, edges: np.ndarray, shown: dict[str, np.ndarray]) -> None:
        """Write what the report draws: rank counts and histograms of the scores by role."""
        filled = np.flatnonzero(counts.counts)
        ranks = pa.table({"rank": filled + 1, "count": counts.counts[filled]})
        self.scored.store.write_table(f"{self.folder}/ranks.parquet", ranks)
        roles = {role: values.tolist() for role, values in shown.items()}
        value = {"column": column, "edges": edges.tolist(), "roles": roles}
        self.scored.store.write_json(f"{self.folder}/scores.json", value)


def _summary(
    selection: SelectionConfig,
    scored: Scored,
    counts: RankCounts,
    decision: Decision,
    overlap: Overlap,
    n_selected: int,
    quarantined: int,
) -> dict[str, Any]:
    held = strict(decision, counts)
    needed = minimum_selectable(counts.n, counts.m, selection.exact_alpha, decision.factor)
    return {
        "name": selection.name,
        "procedure": selection.procedure,
        "direction": selection.direction,
        "alpha": selection.alpha,
        "detectors": selection.detectors,
        "n_audit": counts.m,
        "n_calibration": counts.n,
        "n_quarantined": quarantined,
        "n_selected": n_selected,
        "threshold": decision.threshold,
        "null_proportion": decision.null_proportion,
        "weights": None,
        "guarantee": decision.guarantee,
        "assumption": decision.assumption,
        "minimum_selectable": needed,
        "strict": {
            "procedure": held.procedure,
            "n_selected": min(held.n_selected, counts.m - quarantined),
            "threshold": held.threshold,
            "guarantee": held.guarantee,
        },
        "details": decision.details,
        "diagnostics": _diagnostics(selection, scored, counts, decision, overlap, needed),
    }


def _diagnostics(
    selection: SelectionConfig, scored: Scored, counts: RankCounts, decision: Decision, overlap: Overlap, needed: int
) -> dict[str, Any]:
    role = NULL_ROLE[selection.direction]
    hundredth = max(1, counts.m // 100)
    enough = calibration_needed(counts.m, selection.exact_alpha, hundredth, decision.factor)
    return {
        "resolution": resolution(counts.n, counts.m, needed, enough, role),
        "overlap": {
            "n_calibration": overlap.n_calibration,
            "n_audit": overlap.n_audit,
            "ok": True,
            "sentence": f"{overlap.n_calibration} {role} documents are audit documents too"
            + (" and were left out of calibration." if overlap.n_calibration else "."),
        },
        "duplicates": _duplicates_diagnostic(scored),
        "truncated": _truncated_diagnostic(scored),
    }


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
