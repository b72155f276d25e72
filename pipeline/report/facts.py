"""What a report says, read from a run directory: no model, no score shard, only summaries and receipts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.corpus import ROLES
from pipeline.errors import UserError
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts

LISTED = 50
DUPLICATES = "quarantine/duplicate_id.parquet"  # ids that repeat across shards: found after scoring
EXAMPLES = 20
_REQUIRED = (
    "name",
    "procedure",
    "direction",
    "alpha",
    "detectors",
    "n_audit",
    "n_calibration",
    "n_quarantined",
    "n_selected",
    "threshold",
    "null_proportion",
    "guarantee",
    "assumption",
    "minimum_selectable",
)
_NOT_SCORES = {"doc_id", "p_value", "source", "row", "group", "role", "selected"}


@dataclass(frozen=True, slots=True)
class Listed:
    """One selected document."""

    doc_id: str
    p_value: float
    scores: dict[str, float | None]  # None: not finite
    source: str
    row: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many audit documents have each rank; ranks ascending in 1..n + 1, counts > 0, both int64."""

    rank: np.ndarray
    count: np.ndarray


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Histograms of one score column: `edges` has one entry more than each role's counts."""

    column: str
    edges: np.ndarray
    roles: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Selection:
    """One selection as the run directory holds it."""

    name: str
    summary: dict[str, Any]
    ranks: Ranks | None
    scores: ScoreCounts | None
    listed: tuple[Listed, ...]  # the first LISTED, by p-value
    n_rows: int  # selected documents that have a score; fewer than n_selected if quarantined ones are selected


@dataclass(frozen=True, slots=True)
class RoleCount:
    """How many documents of one role were read, scored and quarantined."""

    role: str
    n_in: int
    n_scored: int
    n_quarantined: int
    n_truncated: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Documents that could not be scored: counts by reason and role, and a few examples of every reason."""

    reasons: dict[str, dict[str, int]]
    examples: tuple[dict[str, Any], ...]  # doc_id, role, source, row, stage, reason, message


@dataclass(frozen=True, slots=True)
class Run:
    """All that the report says of a run."""

    url: str
    manifest: dict[str, Any]
    shards: tuple[dict[str, Any], ...]
    n_receipts: int
    state: str | None
    selections: tuple[Selection, ...]
    missing: tuple[str, ...]  # selections that the config names and nobody has made
    roles: tuple[RoleCount, ...]
    quarantine: Quarantine

    @property
    def limit(self) -> int | None:
        """The most documents of each role that were read; None when all were."""
        limit = self.manifest.get("limit")
        return None if limit is None else int(limit)


def read_run(store: Store) -> Run:
    """Read the facts of a run, whole or half done.

    Raises:
        UserError: not a run directory, or a damaged file in it.
    """
    manifest = store.read_json("manifest.json")
    if manifest is None:
        raise UserError(f"{store.url} is not a run directory: it has no manifest.json")
    receipts = list(read_receipts(store, "score"))
    repeated = _repeated(store)
    configured = [str(entry["name"]) for entry in manifest.get("config", {}).get("selections", [])]
    found = [name for name in store.names("selection") if store.exists(f"selection/{name}/summary.json")]
    order = [name for name in configured if name in found] + [name for name in found if name not in configured]
    return Run(
        url=store.url,
        manifest=manifest,
        shards=tuple(store.read_json("shards.json") or ()),
        n_receipts=len(receipts),
        state=(store.read_json("status.json") or {}).get("state"),
        selections=tuple(_selection(store, name) for name in order),
        missing=tuple(name for name in configured if name not in found),
        roles=tuple(_role_counts(receipts, repeated)),
        quarantine=_quarantine(store, receipts, repeated),
    )


def _selection(store: Store, name: str) -> Selection:
    folder = f"selection/{name}"
    summary = store.read_json(f"{folder}/summary.json")
    absent = [key for key in _REQUIRED if key not in summary]
    if absent:
        raise UserError(f"{store.url}/{folder}/summary.json is damaged: no {', '.join(absent)}")
    listed, n_rows = _listed(store, f"{folder}/selected.parquet")
    return Selection(
        name=name,
        summary=summary,
        ranks=_ranks(store, f"{folder}/ranks.parquet"),
        scores=_scores(store, f"{folder}/scores.json"),
        listed=listed,
        n_rows=n_rows,
    )


def _ranks(store: Store, name: str) -> Ranks | None:
    if not store.exists(name):
        return None
    table = store.read_table(name, ["rank", "count"])
    rank = np.asarray(table.column("rank").to_numpy(), dtype=np.int64)
    count = np.asarray(table.column("count").to_numpy(), dtype=np.int64)
    order = np.argsort(rank, kind="stable")
    return Ranks(rank[order], count[order]) if rank.size else None


def _scores(store: Store, name: str) -> ScoreCounts | None:
    value = store.read_json(name)
    if value is None:
        return None
    edges = np.asarray(value["edges"], dtype=np.float64)
    roles = {role: np.asarray(counts, dtype=np.int64) for role, counts in value["roles"].items()}
    for role, counts in roles.items():
        if counts.size + 1 != edges.size:
            raise UserError(f"{store.url}/{name} is damaged: {counts.size} counts of {role}, {edges.size} edges")
    return ScoreCounts(str(value["column"]), edges, roles)


def _listed(store: Store, name: str) -> tuple[tuple[Listed, ...], int]:
    """The first rows of a table of any length, and its length."""
    if not store.exists(name):
        return (), 0
    try:
        with store.fs.open(store.path(name), "rb") as file:
            parquet = pq.ParquetFile(file)
            batch = next(parquet.iter_batches(LISTED), None)
            rows = batch.to_pylist() if batch is not None else []
            return tuple(_document(row) for row in rows), int(parquet.metadata.num_rows)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"cannot read {store.url}/{name}: {' '.join(str(error).split())}") from None


def _document(row: dict[str, Any]) -> Listed:
    scores = {name: value for name, value in row.items() if name not in _NOT_SCORES}
    return Listed(
        doc_id=str(row["doc_id"]),
        p_value=float(row["p_value"]),
        scores={name: finite(value) for name, value in scores.items()},
        source=str(row["source"]),
        row=int(row["row"]),
    )


def finite(value: float | None) -> float | None:
    """The value, or None for one that JSON cannot hold."""
    return float(value) if value is not None and math.isfinite(value) else None


def _repeated(store: Store) -> Counter[str]:
    """By role, documents that were scored and then quarantined because their id stands in an earlier shard."""
    if not store.exists(DUPLICATES):
        return Counter()
    return Counter(store.read_table(DUPLICATES, ["role"]).column("role").to_pylist())


def _role_counts(receipts: Sequence[Receipt], repeated: Counter[str]) -> Iterable[RoleCount]:
    for role in ROLES:
        own = [receipt for receipt in receipts if receipt.role == role]
        if own:
            yield RoleCount(
                role=role,
                n_in=sum(receipt.n_in for receipt in own),
                n_scored=sum(receipt.n_scored for receipt in own) - repeated[role],
                n_quarantined=sum(receipt.n_quarantined for receipt in own) + repeated[role],
                n_truncated=sum(receipt.n_truncated for receipt in own),
                tokens=sum(receipt.tokens for receipt in own),
            )


def _quarantine(store: Store, receipts: Sequence[Receipt], repeated: Counter[str]) -> Quarantine:
    reasons: dict[str, dict[str, int]] = {}
    for receipt in receipts:
        for reason, count in receipt.reasons.items():
            by_role = reasons.setdefault(reason, {})
            by_role[receipt.role] = by_role.get(receipt.role, 0) + count
    for role, count in repeated.items():
        by_role = reasons.setdefault("duplicate_id", {})
        by_role[role] = by_role.get(role, 0) + count
    frequent = sorted(reasons, key=lambda reason: (-sum(reasons[reason].values()), reason))
    return Quarantine(
        reasons={reason: reasons[reason] for reason in frequent},
        examples=tuple(_examples(store, receipts, frequent, bool(repeated))),
    )


def _examples(
    store: Store, receipts: Sequence[Receipt], reasons: Sequence[str], repeated: bool
) -> list[dict[str, Any]]:
    """The first documents of each reason, about equally many, opening only the files that hold them."""
    left = dict.fromkeys(reasons, max(1, EXAMPLES // max(1, len(reasons))))
    examples: list[dict[str, Any]] = []
    files = [(receipt.quarantine, list(receipt.reasons)) for receipt in receipts]
    if repeated:
        files.append((DUPLICATES, ["duplicate_id"]))
    for name, held in files:
        if name is None or not any(left.get(reason, 0) for reason in held):
            continue
        for row in store.read_table(name).to_pylist():
            if left.get(row["reason"], 0):
                left[row["reason"]] -= 1
                examples.append(row)
    return examples[:EXAMPLES]
