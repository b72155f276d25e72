"""Random parts of a corpus that keep families of near copies together."""

from __future__ import annotations

import numpy as np


def draw_families(
    pool: np.ndarray, family: np.ndarray, count: int, rng: np.random.Generator, lean: np.ndarray | None = None
) -> np.ndarray:
    """Draw at most `count` documents at random, whole families at a time, as many as the families allow.

    A family that no longer fits is passed over. Where every family is one document, exactly min(count, pool) are
    drawn, each set of that size with the same probability.

    Args:
        pool: bool, (documents,), those to draw from; a family lies wholly inside or wholly outside.
        family: int64, (documents,), from `near_families`.
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
