"""The tail check and the family check of a selection: does its list depend on documents that calibration lacks?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.checks import document_text as wording
from pipeline.checks.blind import TAIL_LEVEL, BlindTest, TailTest
from pipeline.checks.dependence import LARGE, near_duplicates_file
from pipeline.checks.document_text import NAMED, short_id
from pipeline.checks.overlap import Overlap
from pipeline.config.corpus import Role
from pipeline.corpus.keys import Keys
from pipeline.corpus.known_texts import KnownTexts
from pipeline.run.records import KEYS_FILE
from pipeline.run.scored import Scored
from pipeline.run.summary import FamiliesDiagnostic, NearDuplicates, TailDiagnostic
from pipeline.selection.guarantees import Outcome
from pipeline.store.external_sort import SortedRows

LEAST_SELECTED = 2
"""Minimum number of selected documents in a tail that contradicts a list."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """The selected documents of one selection, and the run that they belong to."""

    scored: Scored
    overlap: Overlap  # overlap of the calibration role with the audited documents
    role: Role  # the calibration role
    selected: SortedRows  # columns doc_id, source and row
    alpha: float
    near_copies: float  # minimum share of common runs of near-duplicates

    def among(self, places: Collection[tuple[str, int]]) -> list[tuple[str, int, str]]:
        """Source, row and id of the selected documents at the given places (source and row)."""
        sources, rows = (pa.array({place[side] for place in places}) for side in (0, 1))
        listed = []
        for piece in self.selected.pieces() if places else ():
            near = piece.filter(pc.and_(pc.is_in(piece["source"], sources), pc.is_in(piece["row"], rows)))
            named = zip(*(near[name].to_pylist() for name in ("source", "row", "doc_id")), strict=True)
            listed += [one for one in named if one[:2] in places]
        return listed


def tail_diagnostic(test: BlindTest, listed: Listed) -> TailDiagnostic | None:
    """The tail check of a selection; None where the blind test was not made.

    Args:
        test: blind test of the calibration role.
        listed: the selected documents.
    """
    tail = test.tail
    if tail is None:
        return None
    if not test.looked and not tail.significant:
        unseen = wording.unseen_tail(listed.role, test.by)
        return TailDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=unseen, p_value=tail.p_value)
    if not tail.significant or tail.share is None:
        sentence = wording.no_tail(listed.role, test.by, tail.p_value)
        return TailDiagnostic(outcome=Outcome.PASSED, sentence=sentence, p_value=tail.p_value)
    n_compared, inside = _selected_in(tail, listed)
    contradicted = len(inside) >= LEAST_SELECTED and len(inside) / n_compared - tail.share > listed.alpha / 2
    names = [doc_id for _, doc_id in inside[:NAMED]] if inside else _audited_names(tail, listed.scored)
    sentence = wording.tail(listed.role, test.by, tail.p_value, tail.share)
    sentence += wording.selected_in_tail(n_compared, len(inside), len(listed.selected))
    sentence += wording.highest([*map(short_id, names)], selected=bool(inside))
    sentence += wording.tail_outcome(listed.role, contradicted, len(listed.selected))
    return TailDiagnostic(
        outcome=Outcome.FAILED if contradicted else Outcome.INCONCLUSIVE,
        sentence=sentence,
        p_value=tail.p_value,
        share=tail.share,
        n_compared=n_compared,
        n_selected=len(inside),
        documents=names,
    )


def _selected_in(tail: TailTest, listed: Listed) -> tuple[int, list[tuple[float, str]]]:
    """The number of selected documents that were compared; rank and id of those in the tail, the highest first."""
    shards = listed.scored.shards
    ranks = {(shards[name].name, shards[name].first_row + row): rank for name, row, rank in tail.documents}
    compared = {
        (shards[name].name, shards[name].first_row + row) for name, rows in tail.compared.items() for row in range(rows)
    }
    selected = listed.among(compared)
    inside = [(ranks[source, row], str(name)) for source, row, name in selected if (source, row) in ranks]
    return len(selected), sorted(inside, key=lambda place: (-place[0], place[1]))


def _audited_names(tail: TailTest, scored: Scored) -> list[str]:
    """The ids of the highest audited documents of the tail that have scores, at most ten."""
    receipts = {receipt.shard: receipt for receipt in scored.of("audit")}
    names = []
    for shard, row, _ in tail.documents[:NAMED]:
        table = scored.table(receipts[shard], ["doc_id", "row"])
        rows = table.filter(pc.equal(table["row"], scored.shards[shard].first_row + row))
        names += rows["doc_id"].to_pylist()
    return names


def families_diagnostic(duplicates: Mapping[Role, NearDuplicates], listed: Listed) -> FamiliesDiagnostic | None:
    """The family check of a selection: is the largest family of near-duplicates in one role by chance?

    Args:
        duplicates: near-duplicates among the audited and among the calibration documents.
        listed: the selected documents.

    Returns:
        None where documents have groups, or adapters took whole families of calibration documents.
    """
    scored, role = listed.scored, listed.role
    shards = [shard for shard in scored.shards.values() if shard.role in ("audit", role)]
    if any(shard.group_column is not None for shard in shards) or scored.store.exists(KEYS_FILE):
        return None
    counts = duplicates["audit"].n_documents, duplicates[role].n_documents
    families = duplicates["audit"].n_large + duplicates[role].n_large
    largest = max(duplicates["audit"].largest, duplicates[role].largest)
    p_value = one_role_p(largest, *counts, families) if largest >= LARGE else None
    if p_value is not None and p_value <= TAIL_LEVEL:
        candidate = _largest_of_one_role(listed)
        p_value = None if candidate is None else one_role_p(len(candidate[1]), *counts, families)
        if candidate is not None and p_value is not None and p_value <= TAIL_LEVEL:
            return _found_family(*candidate, p_value, listed)
    sentence = wording.no_family(role, p_value)
    return FamiliesDiagnostic(outcome=Outcome.PASSED, sentence=sentence, p_value=p_value)


def one_role_p(size: int, n_audit: int, n_calibration: int, families: int) -> float:
    """The probability that all documents of a family are in one role, times the number of families; at most 1.

    Args:
        size: documents of the family.
        n_audit: number of compared audited documents.
        n_calibration: number of compared calibration documents.
        families: number of families of at least LARGE documents.
    """
    total = _log_choices(n_audit + n_calibration, size)
    chances = [math.exp(_log_choices(n, size) - total) for n in (n_audit, n_calibration) if n >= size]
    return min(1.0, families * sum(chances))


def _largest_of_one_role(listed: Listed) -> tuple[Role, pa.Table] | None:
    """The largest family of at least LARGE documents in one role only: its role, and doc_id, source and row of each."""
    store, families = listed.scored.store, []
    roles: tuple[Role, ...] = ("audit", listed.role)
    for kind in roles:
        if store.exists(near_duplicates_file(kind)):
            table = store.read_table(near_duplicates_file(kind))
            number = table["family"].to_numpy()
            for family in np.flatnonzero(np.bincount(number) >= LARGE):
                families.append((kind, table.filter(pa.array(number == family))))
    for kind, rows in sorted(families, key=lambda family: -len(family[1])):
        if kind != "audit" or not _is_shared(rows, listed):
            return kind, rows
    return None


def _is_shared(rows: pa.Table, listed: Listed) -> bool:
    """Whether a family of audited documents has a near-duplicate among documents left out of calibration."""
    scored = listed.scored
    if listed.overlap.keep.all():
        return False
    known = Keys.joined(scored.keys(receipt) for receipt in scored.of(listed.role)).take(~listed.overlap.keep)
    dropped = KnownTexts.of(known.text, known.sketch, listed.near_copies)
    wanted = set(zip(rows["source"].to_pylist(), rows["row"].to_pylist(), strict=True))
    for receipt in scored.of("audit"):
        name = scored.shards[receipt.shard].name
        rows_here = scored.table(receipt, ["row"])["row"].to_pylist()
        inside = np.array([(name, row) in wanted for row in rows_here], dtype=bool)
        if inside.any() and dropped.near(scored.keys(receipt).take(inside)).any():
            return True
    return False


def _found_family(kind: Role, rows: pa.Table, p_value: float, listed: Listed) -> FamiliesDiagnostic:
    """The diagnostic of a family that is in one role only, contrary to chance."""
    names = [str(name) for name in rows["doc_id"].to_pylist()]
    places = set(zip(rows["source"].to_pylist(), rows["row"].to_pylist(), strict=True))
    n_selected = len(listed.among(places)) if kind == "audit" else 0
    contradicted = n_selected >= max(1, listed.alpha / 2 * len(listed.selected))
    known = "audited" if kind == "audit" else kind
    others = listed.role if kind == "audit" else "audited"
    sentence = wording.family([*map(short_id, names[:NAMED])], len(names), known, others, p_value)
    if kind == "audit" and len(listed.selected):
        sentence += wording.selected_in_family(n_selected, len(listed.selected))
    if contradicted:
        sentence += wording.family_outcome(listed.role)
    return FamiliesDiagnostic(
        outcome=Outcome.FAILED if contradicted else Outcome.INCONCLUSIVE,
        sentence=sentence,
        p_value=p_value,
        role=kind,
        size=len(names),
        n_selected=n_selected,
        documents=names[:NAMED],
    )


def _log_choices(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
