"""Windows of a long text: equal pieces of its tokens, spread from its beginning to its end.

With L tokens of a text without special ones and room for M, `most` windows at most: k = min(most, ceil(L / M)) windows
of M tokens, of which the i-th begins at token floor(i (L - M) / (k - 1)). Each begins as a document does, with the
special tokens that the tokenizer puts before a text; the last one also ends so. A text of one window is tokenized as
without windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pipeline.errors import UserError, foreign_as_errors
from pipeline.models.tokens import PROBE, Cut, Tokens, decoded_spans, plain_ids, split_into_pieces

CALL_CHARACTERS = 1 << 20
"""Characters of the texts that one call of a tokenizer reads, which limits the memory; a text is never divided."""

BEGINNING = 8
"""Characters of a token of the beginning of a text that is tokenized to count its windows."""

SPARE_TOKENS = 64
"""Tokens by which the cut of a beginning changes the number of those before it at most."""

GAP = " [...] "
"""Stands in the shown tokens for the part of a text between two windows that do not touch."""


@dataclass(frozen=True, slots=True)
class Special:
    """Ids that a tokenizer puts around every text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def room(self, max_tokens: int) -> int:
        """Tokens of a text in a window."""
        return max_tokens - len(self.before) - len(self.after)


@lru_cache(maxsize=16)
def special_tokens(tokenizer: Any) -> Special:
    """The ids that a tokenizer puts around a text.

    Raises:
        UserError: it tokenizes a text otherwise if it adds special tokens.
    """
    with foreign_as_errors():
        whole = tuple(tokenizer(PROBE, verbose=False)["input_ids"])
    bare = tuple(plain_ids(tokenizer, PROBE))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return Special(whole[:start], whole[start + len(bare) :])
    raise UserError("windows: the tokenizer does not put its special tokens around a text: leave windows out")


def check_room(tokenizer: Any, max_tokens: int) -> None:
    """Check that a window has a token with a score.

    Raises:
        UserError: it has none.
    """
    special = special_tokens(tokenizer)
    least = max(1 + len(special.before), 2) + len(special.after)
    if max_tokens < least:
        raise UserError(f"windows: max_tokens must be at least {least} with this tokenizer, got {max_tokens}")


def window_starts(tokens: int, room: int, most: int) -> list[int]:
    """The first token of each window.

    Args:
        tokens: tokens of the text without special ones.
        room: tokens of a window.
        most: maximum number of windows.
    """
    count = min(most, -(-tokens // room))
    return [0] if count <= 1 else [i * (tokens - room) // (count - 1) for i in range(count)]


def count_windows(tokenizer: Any, texts: Sequence[str], max_tokens: int, most: int) -> list[int]:
    """The number of windows of each text.

    Of a long text the beginning is tokenized, if it has clearly more tokens than `most` - 1 windows hold.

    Args:
        tokenizer: tokenizer of a transformers model.
        texts: the texts.
        max_tokens: as in `tokenize_windows`.
        most: as in `tokenize_windows`.
    """
    special = special_tokens(tokenizer)
    outside, room = len(special.before) + len(special.after), special.room(max_tokens)
    enough, characters = (most - 1) * room + SPARE_TOKENS, BEGINNING * most * max_tokens

    def counted(some: Sequence[str]) -> list[int]:
        return [len(encoded.ids) - outside for _, encoded in _encode(tokenizer, some)]

    counts = counted([text[:characters] for text in texts])
    unclear = [i for i, text in enumerate(texts) if len(text) > characters and counts[i] < enough]
    for place, count in zip(unclear, counted([texts[i] for i in unclear]), strict=True):
        counts[place] = count
    return [len(window_starts(count, room, most)) for count in counts]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The tokens of a text."""

    ids: Sequence[int]  # with special tokens
    end: Callable[[int], int] | None  # place in `ids` -> end of its characters; None: a tokenizer without offsets


def tokenize_windows(
    tokenizer: Any, texts: Sequence[str], max_tokens: int, most: int
) -> tuple[list[Tokens], list[str]]:
    """Token ids of the windows of texts, one after the other, and the parts of the texts that they cover, joined.

    A text is tokenized once, as a whole. A part that two windows share counts once.

    Args:
        tokenizer: tokenizer of a transformers model.
        texts: texts to tokenize.
        max_tokens: maximum number of ids of a window.
        most: maximum number of windows of a text.

    Raises:
        PanicError: the tokenizer panics at a text. It may raise other exceptions.
    """
    special = special_tokens(tokenizer)
    tokens: list[Tokens] = []
    kept: list[str] = []
    for text, encoded in _encode(tokenizer, texts):
        if len(encoded.ids) <= max_tokens:
            tokens.append(Tokens(list(encoded.ids), False, len(text)))
            kept.append(text)
            continue
        windows = _cut(encoded.ids, special, max_tokens, most)
        tokens.append(windows)
        kept.append("".join(_covered(tokenizer, text, encoded, special, windows)))
    return tokens, kept


def window_pieces(tokenizer: Any, text: str, max_tokens: int, most: int) -> tuple[Tokens, list[str]]:
    """The token ids of a text's windows, and a piece of the text for every token that has its place in the scores.

    That is the first token of the first window, and each token after it that no earlier window has. Between windows
    that do not touch stands a further piece, `GAP`.

    Args:
        tokenizer: tokenizer of a transformers model.
        text: the text.
        max_tokens: as in `tokenize_windows`.
        most: as in `tokenize_windows`.

    Raises:
        ValueError: a tokenizer without offsets does not decode to the text.
    """
    special = special_tokens(tokenizer)
    ((_, encoded),) = _encode(tokenizer, [text])
    if len(encoded.ids) <= max_tokens:
        ids = list(encoded.ids)
        return Tokens(ids, False, len(text)), split_into_pieces(tokenizer, text, ids, len(text))
    windows = _cut(encoded.ids, special, max_tokens, most)
    pieces = [""] * len(special.before)
    stop = 0
    for cut in windows.cuts:
        if cut.start > stop:
            pieces.append(GAP)
        pieces += _pieces(tokenizer, text, encoded, special, range(max(cut.start, stop), cut.stop))
        stop = cut.stop
    return windows, pieces + [""] * len(special.after)


def window_values(cuts: Sequence[Cut], values: Sequence[float]) -> list[float | None]:
    """The value of each piece of `window_pieces`; None where the model gives none.

    Args:
        cuts: the windows of a document; empty: it is one piece.
        values: one per token from the second on; between two windows stands one that is not used.
    """
    shown: list[float | None] = [None]
    place = stop = 0
    for cut in cuts:
        scored = cut.length - 1 - cut.skipped
        if place and cut.start > stop:
            shown.append(None)
        if place and scored < cut.stop - max(cut.start, stop):
            shown.append(None)
        shown += values[place : place + scored]
        place, stop = place + scored + 1, cut.stop
    return shown if cuts else [None, *values]


def _encode(tokenizer: Any, texts: Sequence[str]) -> Iterator[tuple[str, _Encoded]]:
    """Each text with its tokens, some texts at a time."""
    some: list[str] = []
    for number, text in enumerate(texts, 1):
        some.append(text)
        if number == len(texts) or sum(map(len, some)) >= CALL_CHARACTERS:
            with foreign_as_errors():
                encoded = tokenizer(some, return_attention_mask=False, verbose=False)
            for index, one in enumerate(some):
                end = partial(_end, encoded, index) if tokenizer.is_fast else None
                yield one, _Encoded(encoded["input_ids"][index], end)
            some = []


def _end(encoded: Any, index: int, token: int) -> int:
    """The end of a token in its text."""
    return int(encoded.token_to_chars(index, token).end)


def _cut(ids: Sequence[int], special: Special, max_tokens: int, most: int) -> Tokens:
    """The windows of a text that has more than `max_tokens` ids."""
    before, after = len(special.before), len(special.after)
    length, room = len(ids) - before - after, special.room(max_tokens)
    read: list[int] = []
    cuts: list[Cut] = []
    stop = 0
    for start in window_starts(length, room, most):
        end = min(start + room, length)
        last = end == length
        window = [*special.before, *ids[before + start : before + end], *(special.after if last else ())]
        first = 0 if not cuts else max(1, before + max(0, stop - start))  # place of the first token with a score
        cuts.append(Cut(start, end, len(window), max(0, first - 1)))
        read += window
        stop = end
    return Tokens(read, room * len(cuts) < length, 0, cuts=tuple(cuts))


def _covered(tokenizer: Any, text: str, encoded: _Encoded, special: Special, windows: Tokens) -> Iterator[str]:
    """The part of a text in each window that is in no earlier one."""
    before, stop = len(special.before), 0
    for cut in windows.cuts:
        start = max(cut.start, stop)
        if encoded.end is None:
            yield decode(tokenizer, encoded.ids[before + start : before + cut.stop])
        else:
            length = len(encoded.ids) - before - len(special.after)
            last = len(text) if cut.stop == length else encoded.end(before + cut.stop - 1)
            yield text[encoded.end(before + start - 1) if start else 0 : last]
        stop = cut.stop


def _pieces(tokenizer: Any, text: str, encoded: _Encoded, special: Special, tokens: range) -> list[str]:
    """The pieces of some tokens of a text; a character that two tokens share belongs to the first."""
    before = len(special.before)
    if encoded.end is None:
        ids = encoded.ids[before + tokens.start : before + tokens.stop]
        kept = decode(tokenizer, ids)
        return [kept[begin:end] for begin, end in decoded_spans(tokenizer, kept, ids)]
    last = encoded.end(before + tokens.start - 1) if tokens.start else 0
    whole = tokens.stop == len(encoded.ids) - before - len(special.after)
    pieces = []
    for token in tokens:
        end = len(text) if whole and token == tokens.stop - 1 else max(last, encoded.end(before + token))
        pieces.append(text[last:end])
        last = end
    return pieces


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of some ids, without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
