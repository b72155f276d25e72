"""Families of documents that begin alike, and random parts of a corpus that keep each family together."""

from __future__ import annotations

import numpy as np

HEADER_TEXTS = 8


def common_beginnings(text_keys: np.ndarray, prefix_keys: np.ndarray) -> np.ndarray:
    """The beginnings that more than HEADER_TEXTS different texts share: a licence, a title of a series, a form.

    A document that is cut to several lengths, or edited, gives a few texts that begin alike. What many texts begin
    with says nothing of which of them are one document.

    Args:
        text_keys: int64, (documents,), of the texts (`documents.text_keys`).
        prefix_keys: int64, (documents,), of their first 8 words.

    Returns:
        int64, (beginnings,), ascending.
    """
    pairs = np.unique(np.stack([prefix_keys, text_keys], axis=1).astype(np.int64), axis=0)
    beginnings, texts = np.unique(pairs[:, 0], return_counts=True)
    return beginnings[texts > HEADER_TEXTS]


def family_keys(text_keys: np.ndarray, prefix_keys: np.ndarray, header: np.ndarray) -> np.ndarray:
    """What the documents of a family have in common: their first 8 words, or their text where these are a header.

    Args:
        text_keys: int64, (documents,).
        prefix_keys: int64, (documents,).
        header: bool, (documents,): those with one of the `common_beginnings`.

    Returns:
        int64, (documents,), for `families`.
    """
    return np.where(header, text_keys, prefix_keys).astype(np.int64)


def families(keys: np.ndarray) -> np.ndarray:
    """Number the families of documents.

    Args:
        keys: int64, (documents,), from `family_keys`.

    Returns:
        int64, (documents,), in 0..families - 1.
    """
    return np.unique(np.asarray(keys, dtype=np.int64), return_inverse=True)[1].astype(np.int64)


def draw_families(
    pool: np.ndarray, family: np.ndarray, count: int, rng: np.random.Generator, lean: np.ndarray | None = None
) -> np.ndarray:
    """Draw at most `count` documents at random, whole families at a time, as many as the families allow.

    A family that no longer fits is passed over. Where every family is one document, exactly min(count, pool) are
    drawn, each set of that size with the same probability.

    Args:
        pool: bool, (documents,), those to draw from; a family lies wholly inside or wholly outside.
        family: int64, (documents,), from `families`.
        count: how many, >= 0.
        rng: source of randomness.
        lean: float, (documents,): documents are then drawn one after another with odds of exp(lean), a family with
            the mean of its own; without it each with the same.

    Returns:
        bool, (documents,), a subset of the pool.
    """
    members = np.flatnonzero(pool)
    names, sizes = np.unique(family[members], return_counts=True)
    order = rng.permutation(names.size) if lean is None else _leaning_order(family[members], lean[members], rng)
    totals = np.cumsum(sizes[order])
    fit = int(np.searchsorted(totals, count, side="right"))
    taken = list(order[:fit])
    remaining = count - (int(totals[fit - 1]) if fit else 0)
    for index in order[fit:]:
        if remaining == 0:
            break
        if sizes[index] <= remaining:
            taken.append(index)
            remaining -= int(sizes[index])
    chosen = np.zeros(pool.size, dtype=bool)
    chosen[members[np.isin(family[members], names[np.asarray(taken, dtype=np.int64)])]] = True
    return chosen


def _leaning_order(family: np.ndarray, lean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The families, by name, in the order in which they are drawn: the largest of lean plus Gumbel noise first."""
    codes, sizes = np.unique(family, return_inverse=True, return_counts=True)[1:]
    means = np.bincount(codes, weights=lean) / sizes
    return np.argsort(-(means + rng.gumbel(size=means.size)), kind="stable")
