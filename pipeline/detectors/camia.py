"""Shape of the log-probabilities of a text, and their change in a repeated copy (CAMIA, arXiv 2409.13745)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.detectors.base import Evidence, Pass, detector
from pipeline.models.tokens import COPIES

if TYPE_CHECKING:
    from torch import Tensor

REPEATED = Pass("forward", text="repeated")
SHARED = 200  # tokens for the shares above a level
LENGTH = 8  # tokens of a pattern of approximate entropy
RADIUS = 0.8  # maximum distance of matching patterns, in standard deviations

Signal = Literal[
    "mean",
    "slope",
    "share_1",
    "share_2",
    "share_3",
    "above_running_mean",
    "phrases_3",
    "phrases_4",
    "phrases_5",
    "entropy_200",
    "entropy_300",
]


@detector(needs={REPEATED: ["log_prob"]}, signed=True)
def camia(evidence: Evidence, signal: Signal = "mean", of: Literal["first", "difference"] = "first") -> Tensor:
    """A signal of the log-probabilities of the first copy of a text, or its difference to that of the last copy.

    An input of `adadetect`; alone it need not be higher for members. A text with one token gives NaN.
    """
    values = _read_signal(evidence, signal, 0)
    if of == "difference":
        values = values - _read_signal(evidence, signal, 1)
    return evidence[REPEATED].per_document(values.tolist())


def _read_signal(evidence: Evidence, signal: Signal, place: int) -> np.ndarray:
    """The signal of the first copy of each text (place 0), or of the last (place 1): (documents,) float64."""
    key = (signal, place, evidence.draw, evidence.adapter)
    if key not in evidence.memo:
        evidence.memo[key] = np.array([_measured(copies[place], signal) for copies in _copies(evidence)])
    values: np.ndarray = evidence.memo[key]
    return values


def _copies(evidence: Evidence) -> list[tuple[np.ndarray, np.ndarray]]:
    """The log-probabilities of the first and the last copy of each text, float64, with one transfer to the CPU."""
    key = (REPEATED, evidence.draw, evidence.adapter)
    if key not in evidence.memo:
        t = evidence[REPEATED]
        pairs = []
        for row, count in zip(t.log_prob.cpu().double().numpy(), t.mask.sum(1).tolist(), strict=True):
            size = (count + 1) // COPIES  # tokens of a copy, with up to 2 special tokens before the first
            first = row[: count - (COPIES - 1) * size]
            pairs.append((first, row[count - min(size, len(first)) : count]))
        evidence.memo[key] = pairs
    copies: list[tuple[np.ndarray, np.ndarray]] = evidence.memo[key]
    return copies


def _measured(log_probs: np.ndarray, signal: Signal) -> float:
    if not len(log_probs) or not np.isfinite(log_probs).all():
        return float("nan")
    name, _, number = signal.rpartition("_")
    if name in _NUMBERED:
        return _NUMBERED[name](log_probs, int(number))
    if signal == "mean":
        return float(log_probs.mean())
    return _slope(log_probs) if signal == "slope" else _above_running_mean(log_probs)


def _slope(values: np.ndarray) -> float:
    """Slope of the least-squares line per token; 0 for a single value."""
    places = np.arange(len(values)) - (len(values) - 1) / 2
    return float(places @ values / max(0.5, places @ places))


def _above_running_mean(values: np.ndarray) -> float:
    """Share of the values from the second on that exceed the mean of the previous values; 0 for a single value."""
    before = values.cumsum()[:-1] / np.arange(1, len(values))
    return float((values[1:] > before).sum() / max(1, len(before)))


def _share(values: np.ndarray, level: int) -> float:
    """Share of the first values that are at least -level."""
    return float((values[:SHARED] >= -level).mean())


def _phrases(values: np.ndarray, bins: int) -> float:
    """Number of Lempel-Ziv (1978) phrases per value, after discretization in `bins` bins of equal width."""
    edges = np.linspace(values.min(), values.max(), bins + 1)[1:-1]
    letters = bytes(np.searchsorted(edges, values).tolist())
    phrases: set[bytes] = set()
    start = 0
    for stop in range(1, len(letters) + 1):
        if letters[start:stop] not in phrases:
            phrases.add(letters[start:stop])
            start = stop
    return len(phrases) / len(letters)


def _entropy(values: np.ndarray, most: int) -> float:
    """Approximate entropy of the first values (Pincus 1991), >= 0; 0 if there are too few for a pattern."""
    values = values[:most]
    count = len(values)
    if count <= LENGTH + 1:
        return 0.0
    close = np.abs(values[:, None] - values) <= RADIUS * values.std()
    alike = np.ones((count - LENGTH + 1,) * 2, dtype=bool)
    for step in range(LENGTH):
        alike &= close[step : step + len(alike), step : step + len(alike)]
    longer = alike[:-1, :-1] & close[LENGTH:, LENGTH:]
    shorter_phi, longer_phi = (float(np.log(some.mean(1)).mean()) for some in (alike, longer))
    return abs(shorter_phi - longer_phi)


_NUMBERED: dict[str, Callable[[np.ndarray, int], float]] = {
    "share": _share,
    "phrases": _phrases,
    "entropy": _entropy,
}
