"""Splits and samples of documents by a hash of their ids: the same on every machine, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.selection.conformal import mix

SAMPLE_SIZE = 20_000
# A split and a sample need hashes of their own: with the same ones the half of the larger hashes would hardly enter
# the sample while audit documents would, and the sample would tell the roles apart (simulated: FDR .116 for .100).
_SPLIT, _SAMPLE = 1, 2


def shuffled(id_keys: np.ndarray, seed: int, purpose: int) -> np.ndarray:
    """Hash of each id key, the seed and a purpose (splitmix64): uint64, a bijection of the keys for each of those."""
    keys = np.asarray(id_keys, dtype=np.int64).view(np.uint64)
    salt = mix(mix(np.array([seed], dtype=np.uint64)) + np.uint64(purpose))
    return mix(mix(keys ^ salt))


def halves(id_keys: np.ndarray, seed: int) -> np.ndarray:
    """Choose half of the documents by the hash of their ids.

    Guaranteed: the half depends on ids and seed only, so documents that were exchangeable with others (ids drawn
    without regard to scores) stay so, in either half, given the other half.

    Args:
        id_keys: int64, (n,), distinct.
        seed: of the selection.

    Returns:
        bool, (n,), True for floor(n / 2) documents: those of the smallest hashes.
    """
    order = np.argsort(shuffled(id_keys, seed, _SPLIT), kind="stable")
    chosen = np.zeros(order.size, dtype=bool)
    chosen[order[: order.size // 2]] = True
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The documents of the smallest hashes (other hashes than those of `halves`) among all offered, at most `size`.

    `hashes` is uint64, ascending, (k,); `rows` float64, (k, columns). Merging keeps the smallest of both, so the
    sample of a corpus does not depend on its shards. Nothing in it tells the role of a document, so it is a
    function of the set of documents, unchanged when two of them swap roles.
    """

    size: int
    hashes: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, id_keys: np.ndarray, rows: np.ndarray, seed: int, size: int = SAMPLE_SIZE) -> Sample:
        """The sample of one shard: int64 keys (documents,), rows (documents, columns)."""
        return cls._smallest(size, shuffled(id_keys, seed, _SAMPLE), np.asarray(rows, dtype=np.float64))

    def __add__(self, other: Sample) -> Sample:
        """The sample of both; commutative and associative."""
        hashes = np.concatenate([self.hashes, other.hashes])
        return Sample._smallest(min(self.size, other.size), hashes, np.concatenate([self.rows, other.rows]))

    @classmethod
    def _smallest(cls, size: int, hashes: np.ndarray, rows: np.ndarray) -> Sample:
        order = np.argsort(hashes, kind="stable")[:size]
        return cls(size, hashes[order], rows[order])
