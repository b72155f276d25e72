"""What a report draws of a selection beyond its ranks and scores: other values of alpha, and the groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.audit.records import Record
from pipeline.config.selection import SelectionConfig
from pipeline.selection.bounds import bounds_of_lists
from pipeline.selection.passes import Answer
from pipeline.selection.procedures import procedure_of

ALPHAS = tuple(Fraction(k, 100) for k in (*range(1, 51), *range(55, 100, 5)))
MOST_GROUPS = 1000
"""More groups than this are no longer counted: no figure could show them."""


class AlphaCurve(Record):
    """What the same p-values give for other values of alpha: `selection/<name>/alphas.json`."""

    alphas: list[float] = Field(description="Values of alpha, ascending; the one that was asked for is among them.")
    n_selected: list[int] = Field(description="Documents selected at each, by the procedure of the selection.")
    right_at_least: list[int] | None = Field(
        description="Of these, the members (with direction clean, non-members), at least; true of all of them at once "
        "with the confidence of the bound. Null where no theorem covers the selection."
    )
    confidence: float | None = Field(description="Of `right_at_least`; null without it.")


class GroupCounts(Record):
    """How the selected are spread over the groups: `selection/<name>/groups.json`."""

    n_scored: dict[str, int] = Field(description="Audited documents with a score, by group.")
    n_selected: dict[str, int] = Field(description="Selected documents, by group.")


def alpha_curve(selection: SelectionConfig, answer: Answer, n_selected: int, quarantined: int) -> AlphaCurve | None:
    """The curve of an answer; None where p-values do not decide, or themselves depend on alpha.

    Args:
        selection: the question.
        answer: its answer; its bound is None where no bound is to be drawn.
        n_selected: documents selected at the alpha that was asked for.
        quarantined: audited documents without a score, which are never selected.
    """
    counts = answer.counts
    if counts is None:
        return None
    bounds = None if answer.bound is None else bounds_of_lists(counts, selection.exact_confidence)
    procedure = procedure_of(selection.procedure)
    last = None if procedure.curve is None else procedure.curve(procedure, selection, answer)
    if last is None:
        return None
    alphas = sorted({*ALPHAS, selection.exact_alpha})
    ranks = [answer.rank if alpha == selection.exact_alpha else last(alpha) for alpha in alphas]
    unlisted = [quarantined if rank == counts.grid.size else 0 for rank in ranks]
    selected = [counts.at_most(rank) - without for rank, without in zip(ranks, unlisted, strict=True)]
    selected[alphas.index(selection.exact_alpha)] = n_selected
    right = None
    if bounds is not None:
        right = [max(0, size - bounds.wrong_at(rank)) for size, rank in zip(selected, ranks, strict=True)]
    return AlphaCurve(
        alphas=[float(alpha) for alpha in alphas],
        n_selected=selected,
        right_at_least=right,
        confidence=None if right is None else selection.confidence,
    )


@dataclass(frozen=True, slots=True)
class GroupTally:
    """Documents by group of the shards so far; of more than MOST_GROUPS groups so many are known, and not all."""

    scored: Counter[str] = field(default_factory=Counter)
    selected: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, groups: pa.ChunkedArray, selected: np.ndarray) -> GroupTally:
        """Count one shard: the groups of its documents, null for none, and bool (documents,)."""
        kinds = (groups, groups.filter(pa.array(selected)))
        return cls(*(Counter(some.drop_null().to_pylist()) for some in kinds))

    def __add__(self, other: GroupTally) -> GroupTally:
        """The counts of both."""
        if len(self.scored) > MOST_GROUPS:
            return self
        return GroupTally(self.scored + other.scored, self.selected + other.selected)

    def record(self) -> GroupCounts | None:
        """The counts by name of the group; None where there are no groups, or too many."""
        if not 0 < len(self.scored) <= MOST_GROUPS:
            return None
        scored, selected = ({name: kind[name] for name in sorted(self.scored)} for kind in (self.scored, self.selected))
        return GroupCounts(n_scored=scored, n_selected=selected)
