"""Whether the weights of a file are those that a model or an adapter has."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.errors import UserError

NAMED = 3
"""Weights of a kind that an error names."""


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
