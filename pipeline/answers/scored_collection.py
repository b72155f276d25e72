"""A run's audited and unseen documents as one collection each: scores, and blocks (docs/methods.md, section 3.13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pipeline.answers.verdict import BlockKind, CountUnit, MemberCount
from pipeline.checks.dependent_documents import DEPENDENCE
from pipeline.checks.registry import CHECK_NAMED
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.keys import KEY_COLUMNS, Keys
from pipeline.corpus.near_duplicates import SKETCH, near_families
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.results.history import answered_selections
from pipeline.results.status import made_answer
from pipeline.results.summary import Summary
from pipeline.run.conclusion import conclude, weakest
from pipeline.run.scored import Scored, ShardMap, finite_scores, in_order, trained_texts
from pipeline.selection.bounds import Bound
from pipeline.selection.collection import Blocks, DrawnBlocks, draw_blocks, joined_blocks, make_blocks
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures import why_unbounded
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt

MOST_DOCUMENTS = 200_000
"""Approximate maximum of audited documents to read; of more, groups and families are sampled by their keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """The compared documents: audited, then unseen ones, each in the order of their shards."""

    columns: list[str]
    kind: BlockKind
    scores: np.ndarray  # float64, (documents, columns)
    audited: np.ndarray  # bool, (documents,)
    block: np.ndarray  # int64, (documents,)
    keys: np.ndarray  # int64, (documents,), hashes of the ids
    ungrouped: bool  # whether documents have groups that the blocks ignore, so that blocks may depend on each other

    def blocks(self, seed: int) -> Blocks:
        """The blocks that can be moved."""
        return make_blocks(self.scores, self.block, self.audited, seed)

    def drawn(self, columns: Sequence[str], seed: int) -> DrawnBlocks:
        """The blocks with the mean scores of equally many of their documents, for the given columns."""
        chosen = self.scores[:, [self.columns.index(column) for column in columns]]
        return draw_blocks(chosen, self.block, self.audited, self.keys, seed)


_Part = tuple[Keys, np.ndarray]
"""The documents of one score shard, and their scores: float64, (documents, columns)."""


def block_kind(name: str | None) -> BlockKind | None:
    """The kind of blocks of this name; None for the default.

    Raises:
        UserError: there is none of this name.
    """
    if name not in (None, "group", "family"):
        raise UserError(f"blocks must be group or family, got {name!r}")
    return cast("BlockKind | None", name)


def read_collection(config: AuditConfig, scored: Scored, each: ShardMap, kind: BlockKind | None = None) -> Collection:
    """Read the scores of all detectors and the blocks of dependent documents.

    Known documents that an adapter was trained on, and their audited near-duplicates, are left out.

    Args:
        config: configuration of the run.
        scored: its finished score shards.
        each: reads the shards.
        kind: kind of the blocks, which always keep near-duplicates together; by default groups where there are any.

    Raises:
        UserError: no audited or unseen documents, no group where groups are requested, or damaged scores.
    """
    if not scored.of("unseen"):
        raise UserError(
            f"seenset verdict compares the audited documents with unseen ones, and {scored.store.url} has none: add "
            "corpus.unseen, documents like the audited ones that the model cannot have seen, and a new run directory, "
            "and run seenset run"
        )
    columns = [detector.column for detector in parse_detectors(config.detectors)]
    parts = {role: _read(scored, role, columns, each, config.near_copies) for role in ("audit", "unseen")}
    for role, read in parts.items():
        if not sum(len(keys) for keys, _ in read):
            raise UserError(f"no {role} document of {scored.store.url} has scores that can be compared")
    every = [*parts["audit"], *parts["unseen"]]
    keys = Keys.joined(keys for keys, _ in every)
    grouped = keys.grouped
    if kind == "group" and not grouped.any():
        raise UserError("blocks by group need a column group, which no document of this run has: use --blocks family")
    kind = kind or ("group" if grouped.any() else "family")
    family, group = near_families(keys.sketch, config.near_copies), keys.group_numbers()
    audited = np.arange(family.size) < sum(len(keys) for keys, _ in parts["audit"])
    together = joined_blocks(np.arange(family.size), group)
    return Collection(
        columns=columns,
        kind=kind,
        scores=np.concatenate([scores for _, scores in every]),
        audited=audited,
        block=joined_blocks(family, group if kind == "group" else np.full_like(group, -1)),
        keys=keys.id,
        ungrouped=kind == "family" and depends(together, audited),
    )


def depends(block: np.ndarray, audited: np.ndarray) -> bool:
    """Whether documents of a role share blocks so often that counts vary more than a bound of documents allows.

    Args:
        block: int64, (documents,).
        audited: bool, (documents,).
    """
    for role in (audited, ~audited):
        sizes = np.bincount(block[role])
        if (sizes**2).sum() > DEPENDENCE * sizes.sum():
            return True
    return False


def _read(scored: Scored, role: str, columns: Sequence[str], each: ShardMap, near_copies: float) -> list[_Part]:
    """The documents of a role; of the audited ones about MOST_DOCUMENTS at most."""
    receipts = scored.of(role)
    total = sum(receipt.n_scored for receipt in receipts)
    share = min(1.0, MOST_DOCUMENTS / total) if role == "audit" and total else 1.0
    trained = trained_texts(scored.store, near_copies) if role == "audit" else None

    def read_scores(receipt: Receipt) -> _Part:
        table = scored.table(receipt, [*KEY_COLUMNS, *columns])
        keys = Keys.of_table(table)
        keep = np.ones(len(keys), dtype=bool) if trained is None else ~trained.near(keys)
        if share < 1:  # whole groups; near-duplicates together with the probability of their similarity
            by_group = keys.group_keys().view(np.uint64) < np.uint64(share * 2**64)
            keep &= np.where(keys.grouped, by_group, keys.sketch[:, SKETCH - 1] < max(1, int(256 * share)))
        matrix = np.stack([finite_scores(table, column, receipt.data) for column in columns], axis=1)
        return keys.take(keep), matrix[keep]

    return in_order(each, receipts, read_scores)


def member_summaries(store: Store, config: AuditConfig) -> list[tuple[SelectionConfig, Summary]]:
    """The selections of direction members of a run, as last requested, with their answers."""
    seeking = [one for one in answered_selections(store, config) if one.direction == "members"]
    answered = [(selection, made_answer(store, selection.name, held=True)) for selection in seeking]
    return [(selection, summary) for selection, summary in answered if summary is not None]


def count_members(
    selection: SelectionConfig, summary: Summary, collection: Collection, blind: Outcome, seed: int
) -> MemberCount | None:
    """The count of one selection, whether it may be stated or not; None where no theorem covers it.

    No theorem covers documents that depend on each other and are not counted in blocks.

    Documents are counted by the selection's own bound where few of them depend on each other, and blocks otherwise.

    Args:
        selection: a selection of direction members.
        summary: its answer.
        collection: the compared documents.
        blind: outcome of the blind test of the verdict.
        seed: seed of the run.
    """
    if (
        collection.ungrouped
        or why_unbounded(selection) is not None
        or not set(selection.detectors) <= set(collection.columns)
    ):
        return None
    common: dict[str, Any] = {
        "selection": selection.name,
        "detectors": selection.detectors,
        "n_audit": summary.n_audit,
    }
    if summary.bound is not None and not depends(collection.block, collection.audited):
        return MemberCount(
            confidence=summary.bound.confidence,
            at_least=summary.bound.members_at_least,
            n_units=summary.n_audit,
            conclusion=weakest([conclude([blind]), summary.conclusion]),
            **common,
        )
    blocks = collection.drawn(selection.detectors, seed)
    if (bound := bound_of_blocks(selection, blocks, seed)) is None:
        return None
    single = bool((np.bincount(collection.block[collection.audited]) <= 1).all())
    unit: CountUnit = "document" if single else collection.kind
    return MemberCount(
        confidence=bound.confidence,
        unit=unit,
        at_least=bound.members_at_least,
        n_units=blocks.n_audited,
        documents_of_each=blocks.each,
        n_mixed=blocks.n_mixed,
        conclusion=conclude([blind, Outcome.FAILED if other_failures(summary) else Outcome.PASSED]),
        **common,
    )


def bound_of_blocks(selection: SelectionConfig, blocks: DrawnBlocks, seed: int) -> Bound | None:
    """The bound of a selection that ranks blocks in place of documents; None where no theorem covers it.

    Args:
        selection: a selection of direction members.
        blocks: blocks with the columns of the selection, in its order.
        seed: seed of the selection.
    """
    positions = np.arange(blocks.audited.size)
    roles: dict[Role, np.ndarray] = {"audit": positions[blocks.audited], "unseen": positions[~blocks.audited]}
    columns = dict(zip(selection.detectors, blocks.scores.T, strict=True))
    (made,) = answer_all([selection], Scores(columns, blocks.keys), roles, blocks.n_smaller, seed)
    return made.answer.bound


def other_failures(summary: Summary) -> list[str]:
    """One sentence for each failed check that the verdict relies on and does not make itself.

    The verdict has a blind test of its own, and counts and permutes near-duplicates as blocks.
    """
    return [
        check.sentence
        for name, check in summary.diagnostics.by_name().items()
        if check.contradicts and not CHECK_NAMED[name].of_answer
    ]
