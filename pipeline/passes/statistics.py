"""The names of what a pass can measure: read when a detector is registered, before any model's library is loaded."""

from __future__ import annotations

from typing import Literal

Part = Literal["image", "instruction", "description", "instruction_description"]
PARTS: tuple[Part, ...] = ("image", "instruction", "description", "instruction_description")
"""Of what a model reads of a picture, in their order."""

RENYI_ORDERS = ("0.5", "1", "2", "inf")
MODIFIED_ORDERS = ("0.5", "2")
"""Of modified Renyi entropies; that of order 1 is `m_entropy`."""

STATISTICS = frozenset(
    {
        "log_prob",
        "mean",
        "variance",
        "m_entropy",
        *(f"renyi_{order}" for order in RENYI_ORDERS),
        *(f"mod_renyi_{order}" for order in MODIFIED_ORDERS),
    }
)
"""Of a forward pass: the fields of `forward.TokenStatistics`, and its Renyi entropies by order."""

GIVEN = frozenset({"token"})
"""What a forward pass hands on without computing it: the token itself, which no endpoint tells."""
