"""What stands before documents in the passes of a prefix: token ids of known documents, which no document changes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from pipeline.corpus.near_duplicates import NearDuplicateIndex
from pipeline.detectors.base import Prefix
from pipeline.errors import UserError
from pipeline.passes.statistics import HELD

LEAST_TOKENS = 64
"""Of a prefix that is cut: with less room, none is read."""

_CHOICE = 8  # the stream of random numbers that one of several documents is chosen from


@dataclass(frozen=True, slots=True, eq=False)
class Shots:
    """The documents of one prefix."""

    ids: tuple[list[int], ...]  # token ids: one sequence where they are joined, else one a document; all are counted
    sketches: np.ndarray  # uint8, (documents, 128)
    near_copies: float  # the share of common runs from which documents are near-duplicates

    def places(self, seed: int, id_keys: Sequence[int], sketches: np.ndarray) -> list[int | None]:
        """Which of `ids` stands before each of some documents; None: all are near-duplicates of it.

        It follows from the seed, the document's id and these documents alone, whatever else is scored.

        Args:
            seed: of the run.
            id_keys: of the documents.
            sketches: uint8, (documents, 128), of them.
        """
        if len(self.ids) == 1:
            return [0] * len(id_keys)
        near = np.stack([NearDuplicateIndex.of(one[None], self.near_copies).matches(sketches) for one in self.sketches])
        chosen: list[int | None] = []
        for place, key in enumerate(id_keys):
            order = np.random.default_rng([seed, _CHOICE, key % (1 << 64)]).permutation(len(self.ids))
            chosen.append(next((int(at) for at in order if not near[at, place]), None))
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """All prefixes of a run. A fingerprint holds their digests."""

    shots: Mapping[Prefix, Shots]

    def fingerprint(self) -> dict[str, str]:
        """A digest of the token ids of each prefix, and of what keeps near-duplicates from preceding each other."""
        digests = {}
        for prefix, one in self.shots.items():
            read = one.ids if prefix.joined else (one.ids, one.sketches.tolist(), one.near_copies)
            digests[str(prefix)] = sha256(json.dumps(read).encode()).hexdigest()[:16]
        return digests


def room_for(max_tokens: int, positions: int | None) -> int:
    """Tokens that a prefix keeps at most, of its end: as many as a text or 64, and no more than fit beside the longest.

    It is the same before every text, so that one cache of keys and values serves all.

    Args:
        max_tokens: kept of a document.
        positions: of the model; None: unknown.
    """
    most = max(max_tokens, LEAST_TOKENS)
    return most if positions is None else min(most, positions - min(max_tokens, positions))


def prefix_cost(prefix: Prefix, average: float, length: float, batch: int, room: int) -> dict[str, float]:
    """About how much is read before documents: for an entry of `Plan.passes`.

    A worker reads a prefix once. Only of single documents that are longer than `HELD` together it reads each again
    for every batch.

    Args:
        prefix: what stands before them.
        average: tokens of a document.
        length: tokens that are scored of a document, on average.
        batch: padded tokens of a batch.
        room: tokens that are kept of the prefix, at most.

    Returns:
        Tokens, and the cost for a document in forward passes over it.
    """
    if prefix.counted:
        return {}
    tokens = min(average * (prefix.shots if prefix.joined else 1), room)
    if prefix.joined or prefix.shots * tokens <= HELD:
        return {"prefix_tokens": round(tokens), "prefix_cost": 0.0}
    length = max(1.0, length)
    passes = min(prefix.shots, batch / length)  # of the prefixes that the documents of a batch choose
    return {"prefix_tokens": round(tokens), "prefix_cost": passes * tokens / batch}


def cut_to_room(ids: list[int], max_tokens: int, positions: int | None) -> list[int]:
    """The end of a prefix that fits beside a text.

    Raises:
        UserError: less than `LEAST_TOKENS` of it would.
    """
    room = room_for(max_tokens, positions)
    if room < min(len(ids), LEAST_TOKENS):
        assert positions is not None
        most = positions - LEAST_TOKENS
        remedy = f"at most {most}" if most >= 2 else "less, but the model is too small"
        raise UserError(
            f"a prefix of {len(ids)} tokens does not fit: the model has {positions} positions, of which max_tokens "
            f"{max_tokens} leaves {room}, and at least {LEAST_TOKENS} are needed; set max_tokens to {remedy}"
        )
    return ids[-room:]


def joined_ids(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Token ids of documents that stand one behind the other with a blank between (the published code of ReCaLL)."""
    return list(tokenizer(" ".join(texts), add_special_tokens=True, verbose=False)["input_ids"])


def given_ids(texts: Sequence[str], beginning: int | None, joined: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of documents that are given as such, and the same without the mark of the beginning.

    Args:
        texts: of the numbers of each document's ids, as `pipeline.corpus.documents.ids_text` writes them.
        beginning: the id of that mark; None: there is none.
        joined: whether they stand one behind the other in one sequence, which keeps the mark of the first.
    """
    ids = [list(map(int, text.split())) for text in texts]
    bare = [one[1:] if one[:1] == [beginning] else one for one in ids]
    return ([[*ids[0], *itertools.chain(*bare[1:])]] if joined else ids), bare


def rarity_of(sequences: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """ln(1 / f) of each token id in known documents, f = (count + 1) / (tokens + vocabulary): float64, > 0.

    Args:
        sequences: token ids of the documents.
        vocabulary: token ids that the model has.
    """
    counts = np.bincount(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]), minlength=vocabulary)
    return np.log(counts.sum() + len(counts)) - np.log(counts + 1)
