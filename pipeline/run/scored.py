"""The finished score shards of a run: the rows that count, repeated ids, and texts shared by two roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import NEAR_SHARE, ROLES
from pipeline.corpus.keys import KEY_COLUMNS, Keys
from pipeline.corpus.known_texts import KnownTexts, repeated_ids
from pipeline.corpus.near_duplicates import SKETCH_TYPE, stack_sketches
from pipeline.corpus.notes import Notes
from pipeline.corpus.reasons import BY_RULE, Reason
from pipeline.corpus.shard import SHARD_FIELDS, Shard
from pipeline.errors import IncompleteError, UserError, one_line
from pipeline.run.records import DUPLICATES, KEYS_FILE
from pipeline.run.remedies import REPEATED_ID
from pipeline.selection.folds import RoleScores
from pipeline.stages import SCORING
from pipeline.stages.events import QUARANTINE_SCHEMA, kind_of_message
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipts

KEYS_SCHEMA = pa.schema([("adapter", pa.string()), ("text_key", pa.int64()), ("sketch", SKETCH_TYPE)])
"""Columns of `KEYS_FILE`; `sketch` identifies near-duplicates (`pipeline.corpus.near_duplicates`)."""

HISTOGRAM_BINS = 60
_SHOWN = 300  # characters of a document's message in an error


def check_budget(config: AuditConfig, scored: Scored) -> None:
    """Check that not too many documents were quarantined.

    Raises:
        IncompleteError: too many were; the run ends before any selection, and its scores are kept.
    """
    total = sum(receipt.n_new for receipt in scored.receipts)
    reasons = Counter[str]()
    for role in ROLES:
        reasons.update(scored.quarantined(role))
    for reason in BY_RULE:
        del reasons[reason]
    if reasons.total() > config.error_budget * total:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        raise IncompleteError(
            f"{reasons.total()} of {total} documents were quarantined ({counts}), more than error_budget "
            f"{config.error_budget:g} allows{_commonest_message(scored)}; see quarantine/ or raise it and run the "
            "command again"
        )


def _commonest_message(scored: Scored) -> str:
    """The message of most documents in quarantine, as the end of a sentence; empty where there is none."""
    kinds, first = Counter[str](), dict[str, str]()
    for receipt in scored.receipts:
        if receipt.quarantine is not None:
            messages = read_filed(scored.store, receipt, ["message"], receipt.quarantine)["message"].to_pylist()
            for message in filter(None, messages):
                kinds[kind := kind_of_message(message)] += 1
                first.setdefault(kind, message)
    if not kinds:
        return ""
    kind, count = kinds.most_common(1)[0]
    return f"; {count} of them: {one_line(first[kind])[:_SHOWN]}"


ShardMap = Callable[[Sequence[Receipt], Callable[[Receipt], Any]], Iterator[Any]]
"""Applies a function to every score shard, in any order: in this process or on a cluster."""


def each_in_turn(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    """The results of a function for every shard, computed in this process, in order."""
    return map(function, receipts)


def in_order(each: ShardMap, receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> list[Any]:
    """The results of a function for every shard, in the order of the shards."""
    results = dict(each(receipts, lambda receipt: (receipt.shard, function(receipt))))
    return [results[receipt.shard] for receipt in receipts]


def doubtful_inputs(receipts: Iterable[Receipt], shards: Mapping[str, Shard]) -> list[str]:
    """What readers of the inputs doubt, one sentence for each input and kind.

    Args:
        receipts: receipts of scored shards.
        shards: shards by id.
    """
    notes: dict[str, Notes] = {}
    for receipt in receipts:
        if receipt.notes and receipt.shard in shards:
            notes.setdefault(shards[receipt.shard].name, Notes()).include(receipt.notes)
    return [line for name, one in sorted(notes.items()) for line in one.sentences(name, doubts=True)]


@dataclass(frozen=True, slots=True)
class Scored:
    """The finished score shards of a run: receipts, the shard of each, and the rows that are left out."""

    store: Store
    receipts: tuple[Receipt, ...]
    shards: dict[str, Shard]
    duplicates: dict[str, np.ndarray]  # shard -> positions in its score file of rows that repeat an id
    finetuned: dict[str, np.ndarray]  # shard of a known role -> positions of documents that adapters were trained on

    def of(self, role: str) -> list[Receipt]:
        """The receipts of one role, in order."""
        return [receipt for receipt in self.receipts if receipt.role == role]

    def table(self, receipt: Receipt, columns: Sequence[str], finetuned: bool = False) -> pa.Table:
        """A score shard without repeated ids; with training documents only if `finetuned`."""
        table, dropped = read_filed(self.store, receipt, columns), self._dropped(receipt, finetuned)
        return table if not dropped.size else table.filter(pa.array(~np.isin(np.arange(len(table)), dropped)))

    def count(self, receipt: Receipt, finetuned: bool = False) -> int:
        """The number of documents of `table`."""
        return receipt.n_scored - self._dropped(receipt, finetuned).size

    def _dropped(self, receipt: Receipt, finetuned: bool) -> np.ndarray:
        kinds = (self.duplicates, {} if finetuned else self.finetuned)
        rows = [kind[receipt.shard] for kind in kinds if receipt.shard in kind]
        return np.unique(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)

    def keys(self, receipt: Receipt, finetuned: bool = False) -> Keys:
        """The keys of the documents of `table`."""
        return Keys.of_table(self.table(receipt, KEY_COLUMNS, finetuned))

    def n_judged(self) -> int:
        """The number of audit documents that are left out because an earlier run has already audited them."""
        return sum(receipt.n_judged for receipt in self.of("audit"))

    def has_news(self) -> bool:
        """Whether there is an audit document that no earlier run has audited; True where none was left out."""
        return not self.n_judged() or any(receipt.n_new for receipt in self.of("audit"))

    def n_finetuned(self, role: str) -> int:
        """The number of scored documents of a role that adapters were trained on, and near-duplicates of these."""
        return sum(self.finetuned[receipt.shard].size for receipt in self.of(role) if receipt.shard in self.finetuned)

    def batches(self, role: str, columns: Sequence[str], groups: bool) -> RoleScores:
        """The scores of a whole role; empty where there are none."""
        wanted = [*columns, "id_key", *(["group"] if groups else [])]
        parts = [role_scores(self.table(r, wanted), columns, groups, r.data) for r in self.of(role)]
        matrix = np.concatenate([np.empty((0, len(columns))), *(part.matrix for part in parts)])
        keys = np.concatenate([np.empty(0, dtype=np.int64), *(part.keys for part in parts)])
        chunks = [chunk for part in parts if part.groups is not None for chunk in part.groups.chunks]
        return RoleScores(matrix, pa.chunked_array(chunks, pa.string()) if groups and parts else None, keys)

    def check_quarantine(self, receipt: Receipt) -> None:
        """Check the documents of a shard that have no scores.

        Raises:
            DamagedError: their file is missing or changed.
        """
        read_filed(self.store, receipt, ["doc_id"], receipt.quarantine)

    def quarantined(self, role: str) -> Counter[str]:
        """Quarantined documents of a role by reason, repeated ids of different shards included."""
        reasons: Counter[str] = Counter()
        for receipt in self.of(role):
            reasons.update(receipt.reasons)
            if receipt.shard in self.duplicates:
                reasons[Reason.DUPLICATE_ID] += len(self.duplicates[receipt.shard])
        return reasons


PLACES = pa.schema([("doc_id", pa.string()), ("source", pa.string()), ("row", pa.int64())])
"""The places of documents in the inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class RoleRows:
    """The scored documents of a role by position, in the order of its shards."""

    scored: Scored
    role: str
    finetuned: bool = False  # whether training documents are included

    def ids(self, places: Sequence[int] | np.ndarray) -> list[str]:
        """The ids of documents at ascending positions."""
        return [str(doc_id) for doc_id in self.of(np.asarray(places, dtype=np.int64))["doc_id"].to_pylist()]

    def of(self, places: np.ndarray) -> pa.Table:
        """The columns of `PLACES` of documents at ascending positions."""
        receipts = self.scored.of(self.role)
        ends = np.cumsum([0, *(self.scored.count(receipt, self.finetuned) for receipt in receipts)])
        shard = np.searchsorted(ends, places, side="right") - 1
        tables = [PLACES.empty_table()]
        for number in np.unique(shard).tolist():
            chosen = places[shard == number] - ends[number]
            table = self.scored.table(receipts[number], ["doc_id", "row"], self.finetuned).take(pa.array(chosen))
            source = pa.array([self.scored.shards[receipts[number].shard].name] * len(table), pa.string())
            tables.append(table.append_column("source", source).select(PLACES.names))
        return pa.concat_tables(tables)


def role_scores(table: pa.Table, columns: Sequence[str], groups: bool, name: str) -> RoleScores:
    """A score shard's scores, and its groups where `groups`, for a selection.

    Raises:
        UserError: a detector was never scored, or a score is not a finite number.
    """
    matrix = np.stack([finite_scores(table, column, name) for column in columns], axis=1)
    return RoleScores(matrix, table["group"] if groups else None, table["id_key"].to_numpy())


def read_scored(store: Store, shards: Sequence[Shard], near_copies: float = NEAR_SHARE) -> Scored:
    """Collect the finished shards and find ids that repeat across them; repeated ones go to quarantine.

    Args:
        store: the run directory.
        shards: shards of the run.
        near_copies: minimum share of common runs of near-duplicates of training documents.

    Raises:
        IncompleteError: a shard has no receipt.
        UserError: score shards of two fingerprints.
    """
    by_id = {shard.id: shard for shard in shards}
    receipts = tuple(receipt for receipt in read_receipts(store, SCORING) if receipt.shard in by_id)
    missing = sorted(by_id.keys() - {receipt.shard for receipt in receipts})
    if missing:
        raise IncompleteError(
            f"run {store.url}: {len(missing)} of {len(by_id)} shards are not scored "
            f"(first: {missing[0]}, {by_id[missing[0]].name}); run the command again"
        )
    _one_fingerprint(receipts)
    store.fetch({receipt.data: receipt.files[receipt.data].size for receipt in receipts})
    scored = Scored(store, receipts, by_id, {}, _finetuned(store, receipts, near_copies))
    duplicates = {}
    for role in ROLES:
        duplicates.update(_duplicates(store, scored.of(role)))
    scored = replace(scored, duplicates=duplicates)
    _write_duplicates(scored)
    return scored


def _finetuned(store: Store, receipts: Sequence[Receipt], near_copies: float) -> dict[str, np.ndarray]:
    """Positions, by shard, of known documents that an adapter was trained on or that are near-duplicates of one."""
    if not store.exists(KEYS_FILE):
        return {}
    texts, positions = trained_texts(store, near_copies), {}
    for receipt in receipts:
        if receipt.role != "audit":
            trained = texts.near(Keys.of_table(read_filed(store, receipt, KEY_COLUMNS)))
            if trained.any():
                positions[receipt.shard] = np.flatnonzero(trained)
    return positions


def trained_texts(store: Store, near_copies: float, needed: bool = False) -> KnownTexts:
    """The texts that the adapters of a run were trained on; empty where it has no adapter.

    Calibration documents must not resemble training documents: training lowers the deviation of a text and of its
    edited versions, so the calibration would be too low and null documents would exceed it.

    Args:
        store: the run directory.
        near_copies: minimum share of common runs of near-duplicates.
        needed: whether the run has adapters.

    Raises:
        UserError: the file of their keys is damaged, or missing where it is needed.
    """
    table = store.read_table(KEYS_FILE) if needed or store.exists(KEYS_FILE) else KEYS_SCHEMA.empty_table()
    return KnownTexts.of(table["text_key"].to_numpy(), stack_sketches(table["sketch"].to_pylist()), near_copies)


def _one_fingerprint(receipts: Sequence[Receipt]) -> None:
    first = {key: value for key, value in receipts[0].fingerprint.items() if key not in SHARD_FIELDS}
    for receipt in receipts[1:]:
        for key, value in first.items():
            other = receipt.fingerprint.get(key)
            if other != value:
                raise UserError(f"score shards differ in {key}: {receipts[0].shard} {value}, {receipt.shard} {other}")


def _duplicates(store: Store, receipts: Sequence[Receipt]) -> dict[str, np.ndarray]:
    """Positions, by shard, of documents whose id occurs in an earlier shard of the role."""
    numbered = enumerate(read_filed(store, receipt, ["id_key"])["id_key"].to_numpy() for receipt in receipts)
    repeats = repeated_ids(numbered, sum(receipt.n_scored for receipt in receipts))
    return {receipts[number].shard: positions for number, positions in sorted(repeats.items())}


def _write_duplicates(scored: Scored) -> None:
    if not scored.duplicates:
        scored.store.remove(DUPLICATES)
        return
    tables = []
    for receipt in scored.receipts:
        if receipt.shard in scored.duplicates:
            table = read_filed(scored.store, receipt, ["doc_id", "role", "row", "id_key"])
            table = table.take(pa.array(scored.duplicates[receipt.shard]))
            fixed = {
                "source": scored.shards[receipt.shard].name,
                "stage": SCORING,
                "reason": Reason.DUPLICATE_ID,
                "message": REPEATED_ID,
            }
            columns = {
                f.name: table[f.name] if f.name not in fixed else pa.array([fixed[f.name]] * len(table))
                for f in QUARANTINE_SCHEMA
            }
            tables.append(pa.table(columns, schema=QUARANTINE_SCHEMA))
    scored.store.keeping().write_table(DUPLICATES, pa.concat_tables(tables))


def find_span(scored: Scored, roles: Iterable[str], columns: Sequence[str], each: ShardMap) -> Span:
    """The smallest and largest scores of some roles in each column.

    Raises:
        UserError: damaged scores.
    """
    receipts = [receipt for role in roles for receipt in scored.of(role)]
    span = Span({}, {})
    for part in each(receipts, lambda receipt: score_span(scored.table(receipt, columns), columns, receipt.data)):
        span = span + part
    return span


@dataclass(frozen=True, slots=True)
class Span:
    """Smallest and largest score of each detector column; empty columns are absent. Spans can be added."""

    low: dict[str, float]
    high: dict[str, float]

    def __add__(self, other: Span) -> Span:
        """The union of both spans."""
        low = {c: min(self.low.get(c, np.inf), other.low.get(c, np.inf)) for c in {*self.low, *other.low}}
        high = {c: max(self.high.get(c, -np.inf), other.high.get(c, -np.inf)) for c in {*self.high, *other.high}}
        return Span(low, high)

    def edges(self, column: str) -> np.ndarray:
        """Edges of equal bins over the column's span, float64, HISTOGRAM_BINS + 1."""
        low, high = self.low.get(column, 0.0), self.high.get(column, 1.0)
        if high <= low:
            low, high = low - 0.5, high + 0.5
        return np.linspace(low, high, HISTOGRAM_BINS + 1)


def finite_scores(table: pa.Table, column: str, name: str) -> np.ndarray:
    """One detector's scores, float64, (documents,).

    Raises:
        UserError: the column has a value that is not a finite number.
    """
    values = table[column].to_numpy()
    if values.size and not np.isfinite(values).all():
        raise UserError(
            f"{name}: column {column!r} holds {np.count_nonzero(~np.isfinite(values))} scores that are not finite"
        )
    return np.asarray(values, dtype=np.float64)


def score_span(table: pa.Table, columns: Iterable[str], name: str) -> Span:
    """The span of a shard's scores."""
    values = {column: finite_scores(table, column, name) for column in columns}
    filled = {column: v for column, v in values.items() if v.size}
    return Span({c: float(v.min()) for c, v in filled.items()}, {c: float(v.max()) for c, v in filled.items()})
