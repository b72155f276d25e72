"""How much of a long text decides its first tokens: the rest is cut off before it is tokenised.

A text that is much longer than `max_tokens` is cut to a beginning, and the tokens that are kept of it are used only if
no text that could follow it would change them. There are two proofs.

- White space. No entry of the vocabulary holds a letter and then a blank. No token then lies across the place between
  a letter and a blank, so both sides are tokenised alone: what comes after a few such places changes nothing before
  them. This holds for byte-pair encoding, unigram and word-piece models with any rule that splits texts into words by
  looking at a run of like characters and the one behind it.
- Agreement. The tokens of the whole text end somewhere among any L characters in a row, where L is the length of the
  longest entry of the vocabulary, and up to there they are the tokens of the text cut at that place. Where the text
  cut at each of these L places has the same kept tokens, the whole text has them too. It serves texts without blanks,
  with byte-pair encoding and unigram models that know every character: else a token may be longer than any entry.

Where neither holds, a longer beginning is tried, and at last the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

CHARACTERS_A_TOKEN = 16
"""Of the first beginning, for each of max_tokens; shorter texts are tokenised whole."""

WHOLE_CHARACTERS = 1 << 20
"""Of a text that is tokenised whole where white space proves nothing."""

_LONGER = 8  # times as long is the next beginning
_PLACES = 4  # between letters and blanks, behind the kept tokens; one would do
_LETTER_BLANK = re.compile("[A-Za-z][ \u0120\u2581]")  # as texts, byte-level and SentencePiece vocabularies write it
_BETWEEN_WORDS = re.compile("[A-Za-z] (?=[A-Za-z])")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one document."""

    ids: list[int]
    truncated: bool
    kept: int  # characters of the text that the ids cover


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known of the entries of a tokenizer."""

    longest: int  # characters
    splits_at_blanks: bool  # no entry holds a letter and then a blank
    bounds_tokens: bool  # no token is longer than the longest entry


@lru_cache(maxsize=16)
def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """What is known of the entries of a tokenizer of transformers, those that were added to it among them."""
    entries = tokenizer.get_vocab()
    longest = max(map(len, entries), default=1)
    return Vocabulary(longest, not any(map(_LETTER_BLANK.search, entries)), _knows_all(tokenizer))


def _knows_all(tokenizer: Any) -> bool:
    """Whether a model is known to have no token for runs of characters or words that no entry covers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    whole = model.get("byte_fallback") or (model.get("type") == "BPE" and not model.get("unk_token"))
    return model.get("type") in ("BPE", "Unigram") and bool(whole)


def first_length(max_tokens: int) -> int:
    """Characters that a text is cut to at first."""
    return CHARACTERS_A_TOKEN * max_tokens


def next_length(text: str, length: int) -> int:
    """Characters that a text is cut to next, where the beginning of this length proves nothing."""
    return length * _LONGER if len(text) > WHOLE_CHARACTERS else len(text)


def settled(
    encode: Callable[[list[str]], list[Tokens]], vocabulary: Vocabulary, text: str, tokens: Tokens, max_tokens: int
) -> Tokens:
    """The kept tokens of a long text.

    Args:
        encode: texts -> their kept tokens, each by itself.
        vocabulary: of the tokenizer.
        text: of more than `first_length` characters.
        tokens: of its first so many.
        max_tokens: that are kept.
    """
    length = first_length(max_tokens)
    while length < len(text):
        if tokens.truncated:
            if vocabulary.splits_at_blanks and _words_end(text, tokens.kept, length):
                return tokens
            agreement = vocabulary.bounds_tokens and len(text) > WHOLE_CHARACTERS
            if agreement and _all_agree(encode, vocabulary.longest, text, tokens, length):
                return tokens
        length = next_length(text, length)
        (tokens,) = encode([text[:length]])
    return tokens


def _words_end(text: str, start: int, stop: int) -> bool:
    """Whether enough words end between two places."""
    places = _BETWEEN_WORDS.finditer(text, start, stop)
    return sum(1 for _, _ in zip(range(_PLACES), places, strict=False)) == _PLACES


def _all_agree(
    encode: Callable[[list[str]], list[Tokens]], longest: int, text: str, tokens: Tokens, length: int
) -> bool:
    """Whether the text cut at each of `longest` places in a row, behind the kept tokens, has the same kept tokens."""
    last = min(length, tokens.kept + _PLACES * longest)
    places = range(last - longest + 1, last + 1)
    return places[0] > tokens.kept and all(encode([text[:place]])[0] == tokens for place in places)
