"""Calibration: from scores to conformal ranks and p-values."""

from __future__ import annotations

import numpy as np

from pipeline.config import Direction
from pipeline.errors import UserError


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
    _refuse_nan(values, "calibration")
    values.sort()
    return values


def ranks(scores: np.ndarray, calibration_sorted: np.ndarray, direction: Direction) -> np.ndarray:
    """Conformal rank k = (n + 1) p of each audit document; ties count against selection.

    With calibration scores s_1..s_n and an audit score s, direction `members` (the null is "unseen", a high
    score is evidence against it) has k = 1 + #{s_i >= s}, and direction `clean` (the null is "seen", a low
    score is evidence against it) has k = 1 + #{s_i <= s}. TD4Eval's eq. 4 has neither the +1, without which
    the FDR can reach 1, nor this direction: read literally it selects the contaminated.

    Guaranteed: for a null document whose score is exchangeable with the n calibration scores,
    P(k <= j) <= j / (n + 1) for every j, with equality without ties (Vovk, Gammerman & Shafer 2005).

    Args:
        scores: shape (documents,), finite or infinite.
        calibration_sorted: shape (n,), from `calibrate`.
        direction: `members` or `clean`.

    Returns:
        int64, shape (documents,), in 1..n + 1.

    Raises:
        UserError: a NaN among the scores.
        ValueError: an unknown direction.
    """
    values = np.asarray(scores, dtype=np.float64)
    _refuse_nan(values, "audit")
    if direction == "members":
        as_extreme = calibration_sorted.size - np.searchsorted(calibration_sorted, values, side="left")
    elif direction == "clean":
        as_extreme = np.searchsorted(calibration_sorted, values, side="right")
    else:
        raise ValueError(f"direction must be 'members' or 'clean', got {direction!r}")
    return as_extreme.astype(np.int64) + 1


def p_values(ranks: np.ndarray, n: int) -> np.ndarray:
    """Conformal p-values k / (n + 1) for n calibration documents: float64 in (0, 1], shape as `ranks`."""
    return np.asarray(ranks, dtype=np.float64) / (n + 1)


def _refuse_nan(values: np.ndarray, what: str) -> None:
    missing = int(np.isnan(values).sum())
    if missing:
        raise UserError(f"{missing} of {values.size} {what} scores are NaN: quarantine those documents first")
