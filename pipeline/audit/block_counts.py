"""How many audited documents, or blocks of documents that depend on each other, were trained on at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.audit.collection import Collection, depends
from pipeline.audit.conclusion import conclude, supported_of
from pipeline.audit.history import answered_selections
from pipeline.audit.status import made_answer
from pipeline.audit.summary import Summary
from pipeline.audit.verdict import CountUnit, MemberCount
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.selection import SelectionConfig
from pipeline.selection.bounds import Bound
from pipeline.selection.collection import DrawnBlocks
from pipeline.selection.in_memory import Scores, answer_all
from pipeline.selection.procedures import why_unbounded
from pipeline.store.files import Store


def summaries_of(store: Store, config: AuditConfig) -> list[tuple[SelectionConfig, Summary]]:
    """The selections of a run that seek members, as they were asked for last, with their answers."""
    seeking = [one for one in answered_selections(store, config) if one.direction == "members"]
    answered = [(selection, made_answer(store, selection.name, held=True)) for selection in seeking]
    return [(selection, summary) for selection, summary in answered if summary is not None]


def count_of(
    selection: SelectionConfig, summary: Summary, collection: Collection, blind: bool | None, seed: int
) -> MemberCount | None:
    """The count of one selection, whether it may be stated or not; None where no theorem covers it.

    No theorem covers documents that depend on each other and are not counted by the blocks in which they do.

    Documents are counted by the selection's own bound where few of them depend on each other, and blocks otherwise.

    Args:
        selection: of direction members.
        summary: its answer.
        collection: the documents that are compared.
        blind: whether the blind test of the verdict passed; None where it is inconclusive.
        seed: of the run.
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
            supported=supported_of(conclude([blind, summary.supported])),
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
        supported=supported_of(conclude([blind, not other_failures(summary)])),
        **common,
    )


def bound_of_blocks(selection: SelectionConfig, blocks: DrawnBlocks, seed: int) -> Bound | None:
    """The bound of a selection that ranks blocks in the place of documents; None where no theorem covers it.

    Args:
        selection: of direction members.
        blocks: with the columns of the selection, in its order.
        seed: of the selection.
    """
    positions = np.arange(blocks.audited.size)
    roles: dict[Role, np.ndarray] = {"audit": positions[blocks.audited], "unseen": positions[~blocks.audited]}
    columns = dict(zip(selection.detectors, blocks.scores.T, strict=True))
    (made,) = answer_all([selection], Scores(columns, blocks.keys), roles, blocks.n_smaller, seed)
    return made.answer.bound


def other_failures(summary: Summary) -> list[str]:
    """The failed checks of a selection that the verdict rests on and does not make itself, a sentence each.

    The verdict has a blind test of its own, and counts and permutes near-duplicates as blocks.
    """
    return [
        check.sentence
        for name, check in summary.diagnostics.by_name().items()
        if check.ok is False and not check.about_power and name not in _OF_SELECTION
    ]


_OF_SELECTION = ("blind", "near_copies", "groups", "sign_symmetry", "weighting")
