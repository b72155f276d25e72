"""A text cut into the pieces that its tokens stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pipeline.models.beginnings import first_length, next_length

Span = tuple[int, int]

_CUT = "\ufffd"  # what stands for the bytes of a character that is not whole
_LONGEST = 4  # bytes of a character


def pieces_of(tokenizer: Any, text: str, ids: Sequence[int], kept: int) -> list[str]:
    """Cut the kept part of a text into its tokens.

    Of a character that several tokens share (its bytes, mostly) the first has all; the others have "", as special
    tokens do.
    What no token covers (blanks, where a tokenizer drops them) stands before the next one, or behind the last.

    Args:
        tokenizer: of transformers.
        text: whole.
        ids: that `tokenize` keeps of it, at least one.
        kept: characters of the text that they cover.

    Returns:
        One piece a token; joined they are the kept part.

    Raises:
        ValueError: the tokenizer gives other ids now, or one without offsets does not give back the text.
    """
    spans = _offsets(tokenizer, text, ids) if tokenizer.is_fast else _decoded(tokenizer, text[:kept], ids)
    ends, last, covering = [], 0, len(spans) - 1
    for index, (begin, end) in enumerate(spans):
        last = max(last, min(end, kept))
        ends.append(last)
        covering = index if end > begin else covering
    ends[covering:] = [kept] * (len(ends) - covering)
    return [text[begin:end] for begin, end in pairwise([0, *ends])]


def _offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Span]:
    """Where each token stands in a text, from the shortest of its beginnings that gives these ids.

    Raises:
        ValueError: none does.
    """
    for beginning in _beginnings(text, len(ids)):
        encoded = tokenizer(beginning, return_attention_mask=False, return_offsets_mapping=True, verbose=False)
        if list(encoded["input_ids"][: len(ids)]) == list(ids):
            return list(encoded["offset_mapping"][: len(ids)])
    raise ValueError("its tokens are others now")


def _beginnings(text: str, tokens: int) -> Iterator[str]:
    """A text cut as `tokenize` cuts it, the longer ones last."""
    length = min(len(text), first_length(tokens))
    yield text[:length]
    while length < len(text):
        length = next_length(text, length)
        yield text[:length]


def _decoded(tokenizer: Any, kept: str, ids: Sequence[int]) -> list[Span]:
    """Where tokens stand in the kept part of a text by what they decode to, for a tokenizer that knows no offsets.

    Raises:
        ValueError: all of them do not decode to it.
    """

    def decode(count: int) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids[:count]), **options)).rstrip(_CUT)

    whole = decode(len(ids))
    if not kept.startswith(whole) or len(kept) - len(whole) > _LONGEST:
        raise ValueError("its tokens do not decode to it")
    return list(pairwise(len(decode(count)) for count in range(len(ids) + 1)))
