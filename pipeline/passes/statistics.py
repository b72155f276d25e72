"""The names of what a pass can measure: read when a detector is registered, before any model's library is loaded."""

from __future__ import annotations

RENYI_ORDERS = ("0.5", "1", "2", "inf")
STATISTICS = frozenset({"log_prob", "mean", "variance", "m_entropy", *(f"renyi_{order}" for order in RENYI_ORDERS)})
"""Of a forward pass: the fields of `forward.TokenStatistics`, and its Renyi entropies by order."""
