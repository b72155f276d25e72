"""Documents of known membership that an evaluation compares: scores, blocks, and what words alone tell of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.audit.blind import Shown, dependent_blocks, hold_out, sample_documents, shown_of
from pipeline.audit.detection import Area, Estimate, area_interval, effective_blocks
from pipeline.audit.halvings import LEAST, Compared
from pipeline.audit.score_shards import scores_of
from pipeline.audit.scored import Scored
from pipeline.config.corpus import Role
from pipeline.corpus.keys import KEY_COLUMNS, Keys
from pipeline.errors import UserError

COMPARED: tuple[Role, Role] = ("seen", "unseen")


@dataclass(frozen=True, slots=True, eq=False)
class KnownDocuments:
    """The compared documents of one role, in the order of their shards."""

    scores: dict[str, np.ndarray]  # by column; float64, (documents,); NaN where the classifier was not asked
    groups: np.ndarray  # str or None, (documents,)
    keys: Keys
    row: np.ndarray  # int64, (documents,), ascending within a shard
    spans: dict[str, tuple[int, int]]  # shard -> positions of its documents: first, and one beyond the last

    def place(self, shard: str, row: int) -> int | None:
        """Position of a row of a shard; None where it is not compared."""
        start, stop = self.spans[shard]
        place = start + int(np.searchsorted(self.row[start:stop], row))
        return place if place < stop and self.row[place] == row else None

    def of(self, column: str, group: str | None) -> np.ndarray:
        """A column's scores of all documents or of one group, of those that have one."""
        values = self.scores[column] if group is None else self.scores[column][self.groups == group]
        return values[~np.isnan(values)]


ByRole = dict[Role, KnownDocuments]
Numbers = dict[Role, np.ndarray]
"""Of each role, a number for each document: int64, (documents,)."""


def known_documents(scored: Scored, role: Role, columns: Sequence[str]) -> KnownDocuments:
    """The scored documents of a role.

    Raises:
        UserError: there are none, or scores are damaged.
    """
    receipts = scored.of(role)
    tables = [scored.table(receipt, ["row", *KEY_COLUMNS, *columns]) for receipt in receipts]
    ends = np.cumsum([0, *(len(table) for table in tables)]).tolist()
    if not ends[-1]:
        raise UserError(f"evaluate compares seen with unseen documents, and no {role} document has a score")
    scores = {
        column: np.concatenate([scores_of(t, column, r.data) for r, t in zip(receipts, tables, strict=True)])
        for column in columns
    }
    keys = Keys.joined(map(Keys.of_table, tables))
    return KnownDocuments(
        scores=scores,
        groups=np.array(keys.group.to_pylist(), dtype=object),
        keys=keys,
        row=np.concatenate([table["row"].to_numpy() for table in tables]),
        spans={receipt.shard: span for receipt, span in zip(receipts, itertools.pairwise(ends), strict=True)},
    )


@dataclass(frozen=True, slots=True, eq=False)
class WordsAlone:
    """What the classifier on the words found."""

    scores: dict[Role, np.ndarray]  # mean percentile of each document in the halves that tested it; NaN: not asked
    auc: Estimate


def words_alone(scored: Scored, kinds: ByRole, blocks: Numbers, seed: int) -> WordsAlone | None:
    """What a classifier on the words finds, trained on one half of the documents and tested on the other, ten times.

    Args:
        scored: score shards of the run.
        kinds: the compared documents.
        blocks: from `blocks_of_roles`.
        seed: of the halves.

    Returns:
        None with fewer than `LEAST` documents or `halvings.LEAST_BLOCKS` blocks of a role, or without texts.
    """
    if not all(shard.has_text for shard in scored.shards.values()):
        return None
    places: dict[Role, list[int]] = {}
    texts: dict[Role, list[Shown]] = {}
    for role, kind in kinds.items():
        shards = [scored.shards[receipt.shard] for receipt in scored.of(role)]
        sample = [(kind.place(shard.id, one.row), shown_of(one)) for shard, one in sample_documents(shards)]
        places[role] = [place for place, _ in sample if place is not None]
        texts[role] = [text for place, text in sample if place is not None]
    if min(len(of_role) for of_role in texts.values()) < LEAST:
        return None
    block = np.concatenate([blocks[role][places[role]] for role in COMPARED])
    compared = Compared.of(np.arange(block.size) < len(texts["seen"]), block)
    held = hold_out([*texts["seen"], *texts["unseen"]], compared, seed)
    if held is None:
        return None
    from scipy.stats import rankdata  # costs half a second, and no run without labels needs it

    percentiles = np.zeros(block.size)
    for inside, values in held.halves():
        percentiles[inside] += rankdata(values) / values.size / len(held.scores)
    scores = {role: np.full(kind.groups.size, np.nan) for role, kind in kinds.items()}
    for role, values in zip(COMPARED, np.split(percentiles, [len(texts["seen"])]), strict=True):
        scores[role][places[role]] = values
    value, error = held.auc()
    blocks_of_half = effective_blocks(compared) / 2
    return WordsAlone(scores, Estimate(value, *area_interval([Area(value, error, blocks_of_half, 1.0)])))


def blocks_of_roles(kinds: ByRole, near_copies: float) -> Numbers:
    """The number of each document's block, of dependent documents: int64, (documents,)."""
    keys, n_seen = Keys.joined(kinds[role].keys for role in COMPARED), len(kinds["seen"].keys)
    block = dependent_blocks(keys, np.arange(len(keys)) < n_seen, near_copies)
    return dict(zip(COMPARED, np.split(block, [n_seen]), strict=True))
