"""What differs between the versions of a text, aligned by words: the tokens that tell which version was learnt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.errors import UserError

_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


def differing_spans(texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Places of each text that are not common to all, as (start, end) in characters, each at least one long.

    The texts are aligned with the first one, whose place does not depend on which of them was published. Every text
    has a span wherever one differs: where nothing stands there, the character that follows.

    Args:
        texts: at least two, distinct.
    """
    pieces = [_PIECE.findall(text) for text in texts]
    matched = [_matched(pieces[0], other) for other in pieces]
    common = sorted(set.intersection(*(set(places) for places in matched)))
    ends = [[0] for _ in texts]
    for places, words in zip(ends, pieces, strict=True):
        for piece in words:
            places.append(places[-1] + len(piece))
    spans: list[list[tuple[int, int]]] = [[] for _ in texts]
    for before, after in zip([-1, *common], [*common, len(pieces[0])], strict=True):
        starts = [places[before] + 1 if before >= 0 else 0 for places in matched]
        stops = [
            places[after] if after in places else len(words) for places, words in zip(matched, pieces, strict=True)
        ]
        if any(start < stop for start, stop in zip(starts, stops, strict=True)):
            for several, places, start, stop in zip(spans, ends, starts, stops, strict=True):
                first = min(places[start], places[-1] - 1)
                several.append((first, max(places[stop], first + 1)))
    return spans


def _matched(first: Sequence[str], other: Sequence[str]) -> dict[int, int]:
    """Places in the first text -> places in the other of the same pieces, in order."""
    blocks = difflib.SequenceMatcher(None, first, other, autojunk=False).get_matching_blocks()
    return {block.a + step: block.b + step for block in blocks for step in range(block.size)}


def tokens_in(tokenizer: Any, text: str, spans: Iterable[tuple[int, int]], number: int) -> list[bool]:
    """Whether each of the tokens of a text from the second on reaches into a span.

    Args:
        tokenizer: of the model.
        text: as it is put through the model.
        spans: as `differing_spans` finds them.
        number: tokens that are kept of the text.

    Raises:
        UserError: a tokenizer that does not state where tokens stand.
    """
    if not tokenizer.is_fast:
        raise UserError("versions.differing needs a tokenizer that states where tokens stand (tokenizer.json)")
    offsets = tokenizer(text, add_special_tokens=True, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    spans = list(spans)
    return [any(begin < stop and start < end for start, stop in spans) for begin, end in offsets[1:number]]
