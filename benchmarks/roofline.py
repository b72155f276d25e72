"""Arithmetic, no measurement: what a sweep over the vocabulary would cost on an H100 beside a bare forward pass.

`python -m benchmarks.roofline` prints the table of docs/speed.md. A kernel is taken to last as long as its operations
at the rate below or its bytes at the bandwidth below, and nothing overlaps. `python -m benchmarks.gpu` measures.
"""

from __future__ import annotations

from typing import Any

from benchmarks.device import SHAPES, flops

FLOPS_A_SECOND = 600e12
"""Assumed of matrix products in bfloat16 on an H100."""

BYTES_A_SECOND = 3.0e12
"""Assumed of its memory."""

LENGTH = 1024
"""Tokens of a document."""

MODELS: dict[str, dict[str, Any]] = {
    "135M, 49k words": SHAPES["135m"],
    "1B, 128k words": SHAPES["1b"],
    "8B, 128k words": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}

SWEEPS = {"all, in torch": 138, "four, in torch": 70, "two readings": 4, "one reading": 2}
"""Bytes that a sweep moves for each logit: torch's operations on float32, counted one by one; readings of bfloat16."""


def other_bytes(config: dict[str, Any]) -> float:
    """Bytes a token that a Llama's layers move outside matrix products and attention, operation by operation.

    In bfloat16, each operation of torch by itself: two norms (36 bytes a feature each) and two sums (6 each), the
    rotation of queries and keys (20), and the gated activation (10 a feature of the inner layer).
    """
    hidden = config["hidden_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 84 * hidden + 20 * (hidden + keys) + 10 * config["intermediate_size"]
    return float(config["num_hidden_layers"] * layer)


def bare_seconds(config: dict[str, Any]) -> float:
    """Seconds a token of a bare forward pass."""
    return flops(config, [LENGTH]) / LENGTH / FLOPS_A_SECOND + other_bytes(config) / BYTES_A_SECOND


def ratio(config: dict[str, Any], bytes_a_logit: float) -> float:
    """Tokens/s with a sweep over those of the bare pass: 1 where the sweep costs nothing."""
    bare = bare_seconds(config)
    return bare / (bare + bytes_a_logit * config["vocab_size"] / BYTES_A_SECOND)


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    heads = [f"{name} ({count} bytes)" for name, count in SWEEPS.items()]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, config in MODELS.items():
        lines.append(f"| {name} | {' | '.join(f'{ratio(config, count):.2f}' for count in SWEEPS.values())} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
