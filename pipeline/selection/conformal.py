"""Calibration: from scores to conformal ranks and p-values."""

from __future__ import annotations

import numpy as np

from pipeline.config.selection import Direction
from pipeline.errors import UserError
from pipeline.selection.grid import Grid


def calibrate(scores: np.ndarray) -> np.ndarray:
    """Sort the scores of the null role's documents, once, for `ranks`.

    Args:
        scores: shape (n,), n >= 1, any order; `unseen` documents for direction `members`, `seen` for `clean`.

    Returns:
        float64, shape (n,), ascending.

    Raises:
        UserError: no calibration documents, or a NaN among their scores.
    """
    values = np.array(scores, dtype=np.float64).ravel()
    if values.size == 0:
        raise UserError("no calibration documents: without documents of known membership there is no p-value")
    refuse_nan(values, "calibration")
    values.sort()
    return values


def ranks(
    scores: np.ndarray,
    calibration_sorted: np.ndarray,
    direction: Direction,
    draws: np.ndarray | None = None,
) -> np.ndarray:
    """Conformal rank k = (n + 1) p of each audit document; without draws ties count against selection.

    With calibration scores s_1..s_n and an audit score s, direction `members` (the null is "unseen", a high
    score is evidence against it) has k = 1 + #{s_i >= s}, and direction `clean` (the null is "seen", a low
    score is evidence against it) has k = 1 + #{s_i <= s}. TD4Eval's eq. 4 has neither the +1, without which
    the FDR can reach 1, nor this direction: read literally it selects the contaminated.

    Guaranteed: for a null document whose score is exchangeable with the n calibration scores,
    P(k <= j) <= j / (n + 1) for every j, with equality without ties (Vovk, Gammerman & Shafer 2005).

    With draws, k = 1 + #{more extreme} + floor(U (1 + #{ties})), U = draw / 2^32. Then the equality holds with ties
    too, because k is uniform on the places that the tied share, up to 2^-32 and as far as the hash of `tie_draws` is
    random. BH keeps its guarantee: with U given, the other documents' ranks still do not fall as this one's grows.

    Args:
        scores: shape (documents,), finite or infinite.
        calibration_sorted: shape (n,), from `calibrate`; n < 2^31.
        direction: `members` or `clean`.
        draws: shape (documents,), from `tie_draws`; None: ties count against selection.

    Returns:
        int64, shape (documents,), in 1..n + 1.

    Raises:
        UserError: a NaN among the scores.
        ValueError: an unknown direction.
    """
    values = np.asarray(scores, dtype=np.float64)
    refuse_nan(values, "audit")
    left = np.searchsorted(calibration_sorted, values, side="left").astype(np.int64)
    right = np.searchsorted(calibration_sorted, values, side="right").astype(np.int64)
    if direction == "members":
        more_extreme, as_extreme = calibration_sorted.size - right, calibration_sorted.size - left
    elif direction == "clean":
        more_extreme, as_extreme = left, right
    else:
        raise ValueError(f"direction must be 'members' or 'clean', got {direction!r}")
    if draws is None:
        return as_extreme + 1
    places = (as_extreme - more_extreme + 1).astype(np.uint64)
    return more_extreme + 1 + (draws * places >> np.uint64(32)).astype(np.int64)


def tie_draws(keys: np.ndarray, seed: int) -> np.ndarray:
    """A number of each document by which `ranks` orders equal scores: uint64, (documents,), in [0, 2^32).

    An answer depends on the seed, so the seed is to be chosen once, before scores are read.

    Args:
        keys: int64, (documents,), a hash of each document's id.
        seed: >= 0.
    """
    return hash_keys(keys, seed) >> np.uint64(32)


def p_values(ranks: np.ndarray, against: int | Grid) -> np.ndarray:
    """The p-values of ranks against n calibration documents, k / (n + 1), or over a grid: float64 in (0, 1]."""
    positions = np.asarray(ranks)
    return against.values[positions - 1] if isinstance(against, Grid) else positions.astype(np.float64) / (against + 1)


def mix(values: np.ndarray) -> np.ndarray:
    """A step of SplitMix64 (Steele, Lea & Flood 2014): uint64 to uint64, modulo 2^64, one to one."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_keys(keys: np.ndarray, seed: int) -> np.ndarray:
    """A hash of each key, int64, and the seed: uint64, (keys,), a bijection of the keys."""
    return mix(np.asarray(keys, dtype=np.int64).view(np.uint64) ^ mix(np.array([seed], dtype=np.uint64)))


def refuse_nan(values: np.ndarray, role: str) -> None:
    """Refuse scores of a role among which there is a NaN.

    Raises:
        UserError: with their number.
    """
    missing = int(np.isnan(values).sum())
    if missing:
        raise UserError(f"{missing} of {values.size} {role} scores are NaN: quarantine those documents first")
