"""The facts of a report, read from the summaries and receipts of a run directory, without a model or a score shard."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.answers.selected import SMOOTHED, AlphaCurve, GroupCounts, ScoreHistogram
from pipeline.answers.verdict import CollectionVerdict, read_verdict
from pipeline.config.corpus import ROLES
from pipeline.config.selection import HISTORY
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, error_line
from pipeline.report.contents import QuarantinedDocument, QuarantineReport, RoleCount, SelectedDocument
from pipeline.results.history import HistoryEntry, answer_names, read_history
from pipeline.results.status import RunState, check_receipts, made_answer, read_status
from pipeline.results.summary import Summary
from pipeline.run.manifest import Manifest, read_run
from pipeline.run.records import DUPLICATES, Record, parse_part
from pipeline.run.scored import doubtful_inputs
from pipeline.stages import SCORING
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipts

R = TypeVar("R", bound=Record)
LISTED = 50
CHUNK = 500  # rows that are read, and parsed by the browser, at a time
EXAMPLES = 20
NOT_SCORES = {"doc_id", "p_value", "source", "row", "text_key", "group", "role", "selected", "excerpt", *SMOOTHED}


@dataclass(frozen=True, slots=True)
class RankHistogram:
    """The number of audit documents of each rank; ranks ascending in 1..n + 1, counts > 0, both int64."""

    rank: np.ndarray
    count: np.ndarray


@dataclass(frozen=True, slots=True)
class SelectionFacts:
    """One selection, as in the run directory."""

    name: str
    summary: Summary
    ranks: RankHistogram | None
    scores: ScoreHistogram | None
    documents: tuple[SelectedDocument, ...]  # the first LISTED, by p-value
    alphas: AlphaCurve | None = None
    groups: GroupCounts | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """All facts of a run for the report."""

    url: str
    manifest: Manifest
    shards: tuple[Shard, ...]
    n_receipts: int
    state: RunState | None
    message: str | None  # why it is incomplete or failed
    selections: tuple[SelectionFacts, ...]
    verdict: CollectionVerdict | None  # verdict on the whole collection
    missing: tuple[str, ...]  # requested selections without an answer
    history: tuple[HistoryEntry, ...]
    roles: tuple[RoleCount, ...]
    quarantine: QuarantineReport
    doubts: tuple[str, ...] = ()  # what readers of the inputs doubt


def read_facts(store: Store) -> RunFacts:
    """Read the facts of a run, complete or not.

    Raises:
        UserError: not a run directory, a damaged file in it, or one of another version.
    """
    manifest, shards = read_run(store)
    status = read_status(store)
    receipts = list(read_receipts(store, SCORING))
    check_receipts(store, status, shards, {receipt.shard for receipt in receipts})
    names = answer_names(store, manifest.config)
    others = [name for name in store.names("selection") if name not in (*names, HISTORY)]
    selections = [_selection(store, name) for name in (*names, *others)]
    made = tuple(selection for selection in selections if selection is not None)
    duplicates = _duplicates(store)  # after the check of the answers, which list that file
    if status is not None and status.state != "complete":  # a resumed run may have other selections
        names += [selection.name for selection in manifest.config.selections if selection.name not in names]
    return RunFacts(
        url=store.url,
        manifest=manifest,
        shards=tuple(shards),
        n_receipts=len(receipts),
        state=None if status is None else status.state,
        message=None if status is None else status.message,
        selections=made,
        verdict=read_verdict(store),
        missing=tuple(name for name in names if name not in {selection.name for selection in made}),
        history=tuple(read_history(store)),
        roles=tuple(_role_counts(receipts, duplicates, Counter(shard.role for shard in shards))),
        quarantine=_quarantine(store, receipts, duplicates),
        doubts=tuple(doubtful_inputs(receipts, {shard.id: shard for shard in shards})),
    )


def _selection(store: Store, name: str) -> SelectionFacts | None:
    summary = made_answer(store, name)
    if summary is None:
        return None
    folder = f"selection/{name}"
    return SelectionFacts(
        name=name,
        summary=summary,
        ranks=_ranks(store, f"{folder}/ranks.parquet"),
        scores=_scores(store, f"{folder}/scores.json"),
        documents=tuple(_document(row) for batch in first_selected(store, name, LISTED) for row in batch.to_pylist()),
        alphas=_record(store, AlphaCurve, f"{folder}/alphas.json"),
        groups=_record(store, GroupCounts, f"{folder}/groups.json"),
    )


def _record(store: Store, kind: type[R], name: str) -> R | None:
    value = store.read_json(name)
    return None if value is None else parse_part(kind, value, f"{store.url}/{name}")


def _ranks(store: Store, name: str) -> RankHistogram | None:
    if not store.exists(name):
        return None
    table = store.read_table(name, ["rank", "count"])
    rank = np.asarray(table.column("rank").to_numpy(), dtype=np.int64)
    count = np.asarray(table.column("count").to_numpy(), dtype=np.int64)
    order = np.argsort(rank, kind="stable")
    return RankHistogram(rank[order], count[order]) if rank.size else None


def _scores(store: Store, name: str) -> ScoreHistogram | None:
    value = store.read_json(name)
    if value is None:
        return None
    where = f"{store.url}/{name}"
    scores = parse_part(ScoreHistogram, value, where)
    for role, counts in scores.roles.items():
        if len(counts) + 1 != len(scores.edges):
            raise UserError(f"{where} is damaged: {len(counts)} counts of {role}, {len(scores.edges)} edges")
    return scores


def first_selected(store: Store, selection: str, limit: int, texts: bool = True) -> Iterator[pa.RecordBatch]:
    """The first selected documents of a selection, in batches of some hundred.

    Args:
        store: the run directory.
        selection: its name.
        limit: maximum number of documents.
        texts: whether excerpts are read.

    Raises:
        UserError: their list cannot be read.
    """
    name = f"selection/{selection}/selected.parquet"
    try:
        with store.fs.open(store.path(name), "rb") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            columns = [column for column in parquet.schema_arrow.names if texts or column != "excerpt"]
            for batch in parquet.iter_batches(CHUNK, columns=columns) if limit else ():
                yield batch.slice(0, limit)
                limit -= min(limit, len(batch))
                if not limit:
                    return
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"cannot read {store.url}/{name}: {error_line(error)}") from None


def _document(row: dict[str, Any]) -> SelectedDocument:
    scores = {name: value for name, value in row.items() if name not in NOT_SCORES}
    return SelectedDocument(
        doc_id=str(row["doc_id"]),
        p_value=float(row["p_value"]),
        conformal_rank=row.get("conformal_rank"),
        smoothed_p=row.get("smoothed_p"),
        scores={name: finite(value) for name, value in scores.items()},
        source=str(row["source"]),
        row=int(row["row"]),
        excerpt=row.get("excerpt"),
    )


def finite(value: float | None) -> float | None:
    """The value, or None for a value that JSON cannot represent."""
    return float(value) if value is not None and math.isfinite(value) else None


def _duplicates(store: Store) -> Counter[str]:
    """By role, the number of scored documents that are quarantined because their id occurs in an earlier shard."""
    if not store.exists(DUPLICATES):
        return Counter()
    return Counter(store.read_table(DUPLICATES, ["role"]).column("role").to_pylist())


def _role_counts(receipts: Sequence[Receipt], duplicates: Counter[str], planned: Counter[str]) -> Iterable[RoleCount]:
    for role in ROLES:
        shards = [receipt for receipt in receipts if receipt.role == role]
        if shards:
            yield RoleCount(
                role=role,
                n_in=sum(receipt.n_in for receipt in shards),
                n_scored=sum(receipt.n_scored for receipt in shards) - duplicates[role],
                n_quarantined=sum(receipt.n_quarantined for receipt in shards) + duplicates[role],
                n_judged=sum(receipt.n_judged for receipt in shards),
                n_truncated=sum(receipt.n_truncated for receipt in shards),
                tokens=sum(receipt.tokens for receipt in shards),
                digest=_documents_digest(shards) if len(shards) == planned[role] else None,
            )


def _documents_digest(receipts: Sequence[Receipt]) -> str:
    """One digest of the documents of all given shards."""
    digests = [receipt.documents for receipt in sorted(receipts, key=lambda receipt: receipt.shard)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _quarantine(store: Store, receipts: Sequence[Receipt], duplicates: Counter[str]) -> QuarantineReport:
    reasons: dict[str, Counter[str]] = {}
    for receipt in receipts:
        for reason, count in receipt.reasons.items():
            reasons.setdefault(reason, Counter())[receipt.role] += count
    if duplicates:
        reasons.setdefault(Reason.DUPLICATE_ID, Counter()).update(duplicates)
    frequent = sorted(reasons, key=lambda reason: (-reasons[reason].total(), reason))
    return QuarantineReport(
        reasons={reason: dict(reasons[reason]) for reason in frequent},
        examples=_examples(store, receipts, frequent, bool(duplicates)),
    )


def _examples(
    store: Store, receipts: Sequence[Receipt], reasons: Sequence[str], duplicates: bool
) -> list[QuarantinedDocument]:
    """The first documents of each reason, in about equal numbers, opening only the files that contain them."""
    wanted = dict.fromkeys(reasons, max(1, EXAMPLES // max(1, len(reasons))))
    examples: list[QuarantinedDocument] = []
    columns = list(QuarantinedDocument.model_fields)
    files: list[tuple[Iterable[str], Callable[[], pa.Table]]] = [
        (receipt.reasons, partial(read_filed, store, receipt, columns, receipt.quarantine))
        for receipt in receipts
        if receipt.quarantine is not None
    ]
    if duplicates:
        files.append(([Reason.DUPLICATE_ID], partial(store.read_table, DUPLICATES, columns)))
    for file_reasons, read in files:
        if not any(wanted.get(reason, 0) for reason in file_reasons):
            continue
        for row in read().to_pylist():
            if wanted.get(row["reason"], 0):
                wanted[row["reason"]] -= 1
                examples.append(QuarantinedDocument(**row))
    return examples[:EXAMPLES]
