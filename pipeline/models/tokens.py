"""Tokenizers: open them, turn texts into token ids of bounded number, and cut texts into the pieces of their tokens.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import Any

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import Checkpoint, in_one_line, locate
from pipeline.models.devices import quieten
from pipeline.models.unpacked import unpacked_settings

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "tekken.json", "chat_template.*",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip

_WORD = re.compile(r"\S+")

PROBE = "Été 2024: two models, one text."
"""What two tokenizers are compared on: a BOS or a rule of splitting shows in no vocabulary."""

COPIES = 3
"""Of a text that is repeated, one behind the other."""

Span = tuple[int, int]

_CUT = "\ufffd"  # what stands for the bytes of a character that is not whole
_LONGEST = 4  # bytes of a character


def open_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of a model, without its weights.

    Raises:
        UserError: a file is missing or damaged.
    """
    quieten()
    source = locate(config, weights=False)
    return load_tokenizer(config, unpacked_settings(source) if source.gguf else source)


def tokenize(tokenizer: Any, texts: list[str], max_tokens: int) -> list[Tokens]:
    """Token ids of texts, cut to max_tokens. A BOS or EOS appears only if the tokenizer adds one by itself.

    Of a long text only a beginning is tokenised, if that decides the ids that are kept, by one of the two proofs above.

    Args:
        tokenizer: Of a model of transformers.
        texts: The texts.
        max_tokens: Most ids a text, >= 1.
    """
    encode = partial(_encode, tokenizer, max_tokens)
    length = first_length(max_tokens)
    tokens = encode([text[:length] for text in texts])
    for index, text in enumerate(texts):
        if len(text) > length:
            tokens[index] = _checked_tokens(encode, vocabulary_of(tokenizer), text, tokens[index], max_tokens)
    return tokens


def _encode(tokenizer: Any, max_tokens: int, texts: list[str]) -> list[Tokens]:
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [_encode_slowly(tokenizer, max_tokens, text) for text in texts]
    encoded = tokenizer(
        texts, add_special_tokens=True, return_attention_mask=False, return_offsets_mapping=True, verbose=False
    )
    tokens = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if len(ids) <= max_tokens:
            tokens.append(Tokens(ids, False, len(text)))
        else:
            tokens.append(Tokens(ids[:max_tokens], True, max(end for _, end in offsets[:max_tokens])))
    return tokens


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without any that the tokenizer adds."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def check_same_tokens(first: Any, second: Any, models: tuple[str, str], reader: str, token_ids: bool = False) -> None:
    """Make sure that two tokenizers have one vocabulary, with the same ids.

    Args:
        first: a tokenizer of a model of transformers.
        second: the other model's.
        models: names of the two, for the error.
        reader: the detector that gives both the same tokens.
        token_ids: whether the documents are token ids, so that no text is tokenised.

    Raises:
        UserError: the vocabularies, or what they make of a sentence, differ.
    """
    differs = difference_of(first, second, token_ids)
    if differs is None:
        return
    use = "gives" if token_ids else "compares"
    how, remedy = (
        (" the same ids", "text in the place of tokens") if token_ids else (" token by token", "detector reference")
    )
    raise UserError(
        f"detector {reader} {use} model {models[0]} and reference_model {models[1]}{how}, and their "
        f"tokenizers differ: {differs}; take a reference_model of the same family, or {remedy}"
    )


def difference_of(first: Any, second: Any, token_ids: bool = False) -> str | None:
    """In what two tokenizers differ; None where they agree. The arguments are those of `check_same_tokens`."""
    one, two = first.get_vocab(), second.get_vocab()
    if one != two:
        ids = {token: (one.get(token, "none"), two.get(token, "none")) for token in one.keys() | two.keys()}
        token = min(token for token, (here, there) in ids.items() if here != there)
        return f"of {len(one)} and {len(two)} tokens, {token!r} has id {ids[token][0]} and {ids[token][1]}"
    probes = [[] if token_ids else tokenizer(PROBE, verbose=False)["input_ids"] for tokenizer in (first, second)]
    return f"of {PROBE!r} they make ids {probes[0]} and {probes[1]}" if probes[0] != probes[1] else None


def count_words(texts: Sequence[str], max_tokens: int) -> list[Tokens]:
    """`tokenize` for a model without a tokenizer at hand: each word counts as one token, and all ids are 0."""
    tokens = []
    for text in texts:
        ends = [word.end() for word in islice(_WORD.finditer(text), max_tokens + 1)]
        cut = len(ends) > max_tokens
        tokens.append(Tokens([0] * min(len(ends), max_tokens), cut, ends[max_tokens - 1] if cut else len(text)))
    return tokens


def _encode_slowly(tokenizer: Any, max_tokens: int, text: str) -> Tokens:
    """`_encode` for a tokenizer without offsets: `kept` is the length of the decoded ids."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) <= max_tokens:
        return Tokens(ids, False, len(text))
    decoded = tokenizer.decode(ids[:max_tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Tokens(ids[:max_tokens], True, min(len(text), len(decoded)))


def repeated(ids: Sequence[int], max_tokens: int, beginning: int | None) -> list[int]:
    """The ids of a text `COPIES` times over, of its first tokens where all copies would be more than `max_tokens`.

    Args:
        ids: of the text.
        max_tokens: most ids of all copies together.
        beginning: the id that marks the beginning of a text, kept before the first copy alone; None: there is none.
    """
    mark = int(bool(ids) and ids[0] == beginning)
    return [*ids[:mark], *list(ids[mark : mark + max(1, (max_tokens - mark) // COPIES)]) * COPIES]


def load_tokenizer(config: ModelConfig, source: Checkpoint) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        UserError: a file is missing or damaged.
    """
    from transformers import AutoTokenizer

    with in_one_line(config, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=config.trust_remote_code, **source.gguf_argument
        )


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
        length = _next_length(text, length)
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


def _next_length(text: str, length: int) -> int:
    """Characters that a text is cut to next, where the beginning of this length proves nothing."""
    return length * _LONGER if len(text) > WHOLE_CHARACTERS else len(text)


def _checked_tokens(
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
        length = _next_length(text, length)
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
