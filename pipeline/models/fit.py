"""Whether the weights of a file are those that a model or an adapter has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pipeline.errors import UserError

TYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the types of weights: in a safetensors file, and in torch."""

NAMED = 3
"""Weights of a kind that an error names."""


def stored_weights(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type, such as BF16, and shape of every weight in the safetensors files of a folder, by name; no weight is read.

    A damaged file is left out: the loader states what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    weights: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a dict
                weights |= {key: (str(part.get_dtype()), tuple(part.get_shape())) for key, part in slices.items()}
        except (OSError, SafetensorError):
            continue
    return weights


def refuse_integers(what: str, folder: Path) -> None:
    """Refuse a checkpoint without quantization whose weights are integers: their scales are unknown.

    Args:
        what: the model, with which the error starts.
        folder: of the safetensors files.

    Raises:
        UserError: a weight is an integer; the first three are named.
    """
    stored = stored_weights(folder)
    integers = [name for name, (kind, _) in stored.items() if name.endswith(".weight") and kind[0] in "IU"]
    if integers:
        raise UserError(
            f"{what}: {len(integers)} of its weights are integers of type {stored[integers[0]][0]} "
            f"({_named(integers)}), and its config.json states no quantization; take the checkpoint in float32"
        )


def other_shapes(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of the weights in the safetensors files of a folder whose shape is another than expected."""
    stored = stored_weights(folder)
    return [name for name, shape in expected.items() if name in stored and stored[name][1] != shape]


def refuse_misfit(
    what: str, missing: Collection[str], unexpected: Collection[str], mismatched: Collection[str] = ()
) -> None:
    """Refuse weights that do not fit: a missing or mismatched one would have random values.

    Args:
        what: the file and the model, with which the error starts.
        missing: weights that the model has and the file lacks, without those that are tied to others or that the
            architecture is known to make itself.
        unexpected: weights that the file has and the model lacks, without those that the architecture is known to
            ignore.
        mismatched: weights of another shape.

    Raises:
        UserError: there is one; the first three of each kind are named.
    """
    kinds = (
        ("missing from the file", missing),
        ("unknown to the model", unexpected),
        ("of another shape", mismatched),
    )
    problems = [f"{len(names)} {kind} ({_named(names)})" for kind, names in kinds if names]
    if problems:
        raise UserError(f"{what}: {'; '.join(problems)}")


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:NAMED]) + (", ..." if len(names) > NAMED else "")
