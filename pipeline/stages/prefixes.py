"""Prefixes of documents: token ids of known documents, independent of the document that follows."""

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
"""Minimum tokens of a truncated prefix: with fewer, the run is refused."""

_CHOICE = 8  # random stream for the choice among several documents


@dataclass(frozen=True, slots=True, eq=False)
class Shots:
    """The documents of one prefix."""

    ids: tuple[list[int], ...]  # token ids: one sequence if joined, else one per document; all are counted
    sketches: np.ndarray  # uint8, (documents, 128)
    near_copies: float  # minimum share of common runs of near-duplicates

    def places(self, seed: int, id_keys: Sequence[int], sketches: np.ndarray) -> list[int | None]:
        """Index in `ids` of the prefix of each document; None: all are near-duplicates of it.

        It depends only on the seed, the document's id and these documents.

        Args:
            seed: seed of the run.
            id_keys: keys of the documents' ids.
            sketches: uint8, (documents, 128), of the documents.
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
    """All prefixes of a run."""

    shots: Mapping[Prefix, Shots]

    def fingerprint(self) -> dict[str, str]:
        """A digest of the token ids of each prefix, and of the data that excludes near-duplicates."""
        digests = {}
        for prefix, one in self.shots.items():
            read = one.ids if prefix.joined else (one.ids, one.sketches.tolist(), one.near_copies)
            digests[str(prefix)] = sha256(json.dumps(read).encode()).hexdigest()[:16]
        return digests


def room_for(max_tokens: int, positions: int | None) -> int:
    """Maximum tokens kept of the end of a prefix: the larger of max_tokens and 64, within the model's positions.

    It is the same for every text, so that one cache of keys and values is sufficient.

    Args:
        max_tokens: maximum tokens of a document.
        positions: positions of the model; None: unknown.
    """
    most = max(max_tokens, LEAST_TOKENS)
    return most if positions is None else min(most, positions - min(max_tokens, positions))


def prefix_cost(prefix: Prefix, average: float, length: float, batch: int, room: int) -> dict[str, float]:
    """Approximate cost of reading a prefix, for an entry of `Plan.passes`.

    A worker reads a prefix once, except separate documents that together exceed `HELD`: these are read for every batch.

    Args:
        prefix: the prefix.
        average: mean tokens of a document.
        length: mean scored tokens of a document.
        batch: padded tokens of a batch.
        room: maximum tokens kept of the prefix.

    Returns:
        Tokens, and the cost per document in forward passes over it.
    """
    if prefix.counted:
        return {}
    tokens = min(average * (prefix.shots if prefix.joined else 1), room)
    if prefix.joined or prefix.shots * tokens <= HELD:
        return {"prefix_tokens": round(tokens), "prefix_cost": 0.0}
    length = max(1.0, length)
    passes = min(prefix.shots, batch / length)  # number of different prefixes in a batch
    return {"prefix_tokens": round(tokens), "prefix_cost": passes * tokens / batch}


def cut_to_room(ids: list[int], max_tokens: int, positions: int | None) -> list[int]:
    """The end of a prefix that fits with a text.

    Raises:
        UserError: fewer than `LEAST_TOKENS` would fit.
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
    """Token ids of documents joined with blanks (ReCaLL's published program joins them without)."""
    return list(tokenizer(" ".join(texts), add_special_tokens=True, verbose=False)["input_ids"])


def given_ids(texts: Sequence[str], beginning: int | None, joined: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of documents given as ids, and the same without the BOS token.

    Args:
        texts: each document's ids as a text, from `pipeline.corpus.documents.ids_text`.
        beginning: id of the BOS token; None if there is none.
        joined: whether to join them to one sequence, which keeps the BOS token of the first.
    """
    ids = [list(map(int, text.split())) for text in texts]
    bare = [one[1:] if one[:1] == [beginning] else one for one in ids]
    return ([[*ids[0], *itertools.chain(*bare[1:])]] if joined else ids), bare


def token_rarity(sequences: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """ln(1 / f) of each token id in known documents, f = (count + 1) / (tokens + vocabulary): float64, > 0.

    Args:
        sequences: token ids of the documents.
        vocabulary: number of token ids of the model.
    """
    counts = np.bincount(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]), minlength=vocabulary)
    return np.log(counts.sum() + len(counts)) - np.log(counts + 1)
