"""Several selections at once: one pass over the audit shards serves all that still need one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.selection.engine import Answer, Ask, Asking


def together(
    asking: Sequence[Asking[Answer]], run_pass: Callable[[Sequence[tuple[int, Ask]]], dict[int, Any]]
) -> list[Answer]:
    """Decide several selections at once: each pass over the shards serves all that still need one.

    Args:
        asking: from `answer`.
        run_pass: given (index of the selection, ask) of this pass, returns the merged result of each; an index
            without any shard is absent.
    """
    answers: dict[int, Answer] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(asking)))
    while len(answers) < len(asking):
        asks: list[tuple[int, Ask]] = []
        for index, generator in enumerate(asking):
            if index not in answers:
                try:
                    asks.append((index, generator.send(results.get(index))))
                except StopIteration as done:
                    answers[index] = done.value
        results = run_pass(asks) if asks else {}
    return [answers[index] for index in range(len(asking))]
