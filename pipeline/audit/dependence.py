"""Near copies among scored documents, and which promises they take: those that count documents as independent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.audit.copies import DEPENDENCE, NearCopies, counted, near_copies_among
from pipeline.audit.group_sizes import NO_GROUPS, GroupSizes
from pipeline.audit.scored import Each, Scored
from pipeline.audit.summary import NearCopiesDiagnostic
from pipeline.corpus.near_copies import SKETCH, Sketches, sketches_of
from pipeline.corpus.sketch_file import SketchFile
from pipeline.selection.digits import beside
from pipeline.selection.procedures import procedure_of
from pipeline.store.receipts import Receipt

MOST = 1 << 22
"""Documents of a role that are compared with one another, about; of more, a sample that keeps near copies together."""

EXCESS = 1 / 240
"""Of 1 / independent documents over 1 / documents: the most that leaves `storey` within 5% of its error rate.

Simulated: the FDR of `storey` grows by about twelve times this, as a share of alpha
(`tests/statistical/test_copies_validity.py`).
"""

INFLATION = 1.1
"""The most that the p-values may be too small by, as a factor, before the promise counts as contradicted."""

_FAMILIES = pa.schema([("doc_id", pa.string()), ("source", pa.string()), ("row", pa.int64()), ("family", pa.int64())])


def copies_file(role: str) -> str:
    """Where a run directory lists the near copies among the documents of a role."""
    return f"diagnostics/near-copies-{role}.parquet"


@contextmanager
def finding_beside() -> Iterator[Executor]:
    """A thread in which near copies are looked for while shards are read; where the block fails, it begins no more."""
    with ThreadPoolExecutor(1, "seenset-copies") as beside:
        try:
            yield beside
        except BaseException:
            beside.shutdown(wait=False, cancel_futures=True)
            raise


def read_sketches(scored: Scored, role: str, each: Each, keep: np.ndarray | None = None, most: int = MOST) -> Sketched:
    """Read the sketches of the scored documents of a role.

    Args:
        scored: the score shards.
        role: whose documents are compared, without those that adapters were trained on.
        each: reads the shards.
        keep: bool, (documents,), those that are compared; None: all.
        most: documents that are compared, about; of more, a sample is.
    """
    receipts = scored.of(role)
    total = sum(receipt.n_scored for receipt in receipts)
    below = 256 if total <= most else max(1, 256 * most // total)

    def of_shard(receipt: Receipt) -> tuple[str, np.ndarray, np.ndarray, int, GroupSizes]:
        table = scored.table(receipt, ["sketch", "group"])
        sketches = sketches_of(table["sketch"])
        places = np.flatnonzero(sketches[:, SKETCH - 1] < below).astype(
            np.int32
        )  # equal for two documents as often as they are alike
        return receipt.shard, places, sketches[places], len(sketches), GroupSizes.of(table["group"])

    file = SketchFile()
    read, groups = {}, NO_GROUPS
    for shard, some, sketches, size, sizes in each(receipts, of_shard):
        read[shard] = (some, file.append(sketches), size)
        groups += sizes
    shards, places, filed, first = [], [], [], 0
    for number, receipt in enumerate(receipts):  # in their order, whatever order they were read in
        inside, begin, size = read.pop(receipt.shard)
        kept = np.ones(inside.size, dtype=bool) if keep is None else keep[first + inside]
        first += size
        shards.append(np.full(int(kept.sum()), number, dtype=np.int32))
        places.append(inside[kept])
        filed.append((begin + np.flatnonzero(kept)).astype(np.int32))
    where = _Places(scored, receipts, _joined(shards), _joined(places))
    return Sketched(role, file.arranged(_joined(filed)), below == 256, where, groups)


@dataclass(frozen=True, slots=True, eq=False)
class Sketched:
    """The documents of a role, to be compared by their sketches."""

    role: str
    sketches: Sketches
    whole: bool  # whether these are all
    where: _Places
    groups: GroupSizes  # of all documents of the role

    def find_copies(self, near_copies: float) -> NearCopies:
        """Find near copies among the documents, and list them in `copies_file`.

        Args:
            near_copies: the share of common runs from which documents are near copies.
        """
        record, family = near_copies_among(self.sketches, near_copies, self.whole, self.where.ids)
        _write_families(self.where.scored, self.role, self.where, family)
        return record


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where the compared documents stand, in the order of the shards."""

    scored: Scored
    receipts: Sequence[Receipt]
    shard: np.ndarray  # int32, (documents,): number of the receipt
    place: np.ndarray  # int32, (documents,): in its score shard

    def ids(self, documents: Sequence[int]) -> list[str]:
        """The ids of documents, by their numbers, ascending."""
        return [str(doc_id) for doc_id in self.rows(np.asarray(documents, dtype=np.int64))["doc_id"].to_pylist()]

    def rows(self, documents: np.ndarray) -> pa.Table:
        """Columns doc_id, source and row of documents, by their numbers, ascending."""
        tables = [_FAMILIES.empty_table().drop_columns("family")]
        for number in np.unique(self.shard[documents]):
            receipt = self.receipts[number]
            chosen = self.place[documents[self.shard[documents] == number]]
            table = self.scored.table(receipt, ["doc_id", "row"]).take(pa.array(chosen))
            source = pa.array([self.scored.shards[receipt.shard].name] * len(table), pa.string())
            tables.append(table.append_column("source", source).select(["doc_id", "source", "row"]))
        return pa.concat_tables(tables)


def _write_families(scored: Scored, role: str, where: _Places, family: np.ndarray) -> None:
    """List the documents that have near copies, family by family in the order of their first documents."""
    repeated = np.flatnonzero((np.bincount(family) > 1)[family])
    if not repeated.size:
        scored.store.remove(copies_file(role))
        return
    number = np.unique(family[repeated], return_inverse=True)[1].astype(np.int64)
    table = where.rows(repeated).append_column("family", pa.array(number))
    order = np.argsort(number, kind="stable")
    scored.store.write_table(copies_file(role), table.take(pa.array(order)).cast(_FAMILIES))


def near_copies_diagnostic(
    procedure: str, n_bh: int | None, role: str, audit: NearCopies, calibration: NearCopies, alone: bool = True
) -> NearCopiesDiagnostic:
    """What near copies take from a selection's promise.

    Clusters of near copies among the audited documents make an estimate of the share of nulls noisier than its
    procedure assumes. Clusters among those that calibrate make p-values too small: n documents of N families give
    P(p <= t) <= t (n + 1) / (N + 1), and near that at t = 1 / (n + 1).

    Args:
        procedure: of the selection.
        n_bh: documents that bh selects; None where the procedure does not estimate the share of nulls.
        role: whose documents calibrate.
        audit: near copies among the audited documents.
        calibration: near copies among those that calibrate.
        alone: whether no other check contradicts the selection; bh is no remedy where one does.
    """
    unsafe = n_bh is not None and is_unsafe(audit)
    factor = inflation(calibration)
    sentences = [counted(audit, "audited documents")]
    if unsafe:
        sentences.append(
            f"They count as about {audit.effective:,.0f} independent documents, too few for {procedure}: it estimates "
            "the share of nulls from them, and its share of wrong documents can be larger than alpha."
        )
    if unsafe and alone and factor <= INFLATION:
        sentences.append(
            f"The guarantee of bh holds with near copies among the audited documents; bh selects {n_bh:,}."
        )
    sentences.append(counted(calibration, f"{role} documents that calibrate"))
    if calibration.n_copies:
        sentences.append(
            f"They rank as {calibration.n_distinct:,} distinct documents, so the p-values of every procedure can be "
            f"too small by a factor of up to {beside(factor, INFLATION)}; to fix it, keep one document of each family."
        )
    unbounded = breaks_bounds(audit, calibration)
    if unbounded:
        sentences.append("A bound assumes independent documents, so none is stated.")
    failed = unsafe or factor > INFLATION or (procedure_of(procedure).per_list and unbounded)
    return NearCopiesDiagnostic(
        ok=False if failed else None if audit.n_copies or calibration.n_copies else True,
        sentence=" ".join(sentences),
        audit=audit,
        calibration=calibration,
        n_selected_by_bh=n_bh if unsafe else None,
        bh_stands=factor <= INFLATION,
    )


def is_unsafe(audit: NearCopies) -> bool:
    """Whether near copies leave too few independent documents for an estimate of the share of nulls."""
    return audit.n_documents > 0 and 1 / audit.effective - 1 / audit.n_documents > EXCESS


def breaks_bounds(*roles: NearCopies) -> bool:
    """Whether near copies within any of these roles spread counts wider than a bound of independent documents allows.

    Near copies that calibrate do it too: the ranks of all audited documents move with theirs.
    """
    return any(copies.n_documents > DEPENDENCE * copies.effective for copies in roles)


def inflation(calibration: NearCopies) -> float:
    """The most that p-values can be too small by for near copies among the documents that calibrate, as a factor."""
    return (calibration.n_documents + 1) / (calibration.n_distinct + 1)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
