"""Tokenizers: loading, truncated tokenization, and splitting of texts into the pieces of their tokens.

Of a text that is much longer than `max_tokens` only a prefix is tokenized, if no continuation of the prefix can change
the tokens that are kept. There are two proofs.

- White space. No entry of the vocabulary contains a letter followed by a blank. No token then spans a boundary between
  a letter and a blank, so both sides are tokenized independently: text after a few such boundaries does not change the
  tokens before them. This holds for byte-pair encoding, unigram and word-piece models with any rule that splits texts
  into words by runs of characters of one class and the following character.
- Agreement. Let L be the length of the longest entry of the vocabulary. Among any L consecutive positions there is one
  at which a token of the whole text ends, and up to it the tokens are those of the text cut there. If the text cut at
  each of these L positions has the same kept tokens, the whole text has them too. This covers texts without blanks,
  for byte-pair encoding and unigram models that cover every character: else a token may be longer than any entry.

If neither proof holds, a longer prefix is tried, and finally the whole text.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.models import ModelConfig
from pipeline.corpus.scripts import unit_spans
from pipeline.errors import UserError, foreign_as_errors
from pipeline.models.checkpoints import Checkpoint, in_one_line, locate, locate_adapter, read_model_config
from pipeline.models.devices import quieten
from pipeline.models.gguf_cache import unpacked_settings
from pipeline.models.model_files import adapter_files, linked

PROBE = "Été 2024: two models, one text."
"""Text for the comparison of two tokenizers: the vocabulary does not show a BOS or a splitting rule."""

SPARE_IDS = 1 << 20
"""Ids without a token that a tokenizer may have; the memory of a copy grows with the largest id."""

COPIES = 3
"""Number of copies of a repeated text."""

Span = tuple[int, int]

_CUT = "\ufffd"  # decoded bytes of an incomplete character
_LONGEST = 4  # maximum bytes of a character


def open_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of a model, without its weights.

    Raises:
        UserError: a file is missing or damaged.
    """
    quieten()
    source = locate(config, weights=False)
    return load_tokenizer(config, unpacked_settings(source) if source.gguf else source)


def tokenize(tokenizer: Any, texts: list[str], max_tokens: int) -> list[Tokens]:
    """Token ids of texts, truncated to max_tokens. A BOS or EOS appears only if the tokenizer adds it by default.

    Of a long text only a prefix is tokenized, if it determines the kept ids by one of the two proofs above.

    Args:
        tokenizer: tokenizer of a transformers model.
        texts: texts to tokenize.
        max_tokens: maximum number of ids per text, >= 1.

    Raises:
        PanicError: the tokenizer panics at a text. It may raise other exceptions.
    """
    return _kept_tokens(partial(_encode, tokenizer, max_tokens), tokenizer, texts, max_tokens)


def _kept_tokens(
    encode: Callable[[list[str]], list[Tokens]], tokenizer: Any, texts: list[str], max_tokens: int
) -> list[Tokens]:
    """The kept tokens of texts, from a prefix of each that determines them."""
    length = first_length(max_tokens)
    with foreign_as_errors():
        tokens = encode([text[:length] for text in texts])
        for index, text in enumerate(texts):
            if len(text) > length:
                tokens[index] = _checked_tokens(encode, describe_vocabulary(tokenizer), text, tokens[index], max_tokens)
    return tokens


def tokenize_rendered(tokenizer: Any, texts: list[str], max_tokens: int) -> list[Tokens]:
    """`tokenize` of texts that a chat template has rendered: without special tokens of its own, and with offsets.

    Arguments and errors are those of `tokenize`; the tokenizer has offsets.
    """
    encode = partial(_encode, tokenizer, max_tokens, rendered=True)
    return _kept_tokens(encode, tokenizer, texts, max_tokens)


def tokenize_each(tokenizer: Any, texts: list[str], max_tokens: int) -> list[Tokens]:
    """`tokenize`, with no token for a text at which the tokenizer raises an error or panics. Arguments are the same."""
    try:
        return tokenize(tokenizer, texts, max_tokens)
    except Exception:  # a tokenizer raises any exception of its parts
        if len(texts) == 1:
            return [Tokens([], True, 0)]
        half = len(texts) // 2
        return [entry for some in (texts[:half], texts[half:]) for entry in tokenize_each(tokenizer, some, max_tokens)]


def _encode(tokenizer: Any, max_tokens: int, texts: list[str], rendered: bool = False) -> list[Tokens]:
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [_encode_slowly(tokenizer, max_tokens, text) for text in texts]
    encoded = tokenizer(
        texts,
        add_special_tokens=not rendered,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    tokens = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        given = tuple(offsets[:max_tokens]) if rendered else ()
        if len(ids) <= max_tokens:
            tokens.append(Tokens(ids, False, len(text), given))
        else:
            tokens.append(Tokens(ids[:max_tokens], True, max(end for _, end in offsets[:max_tokens]), given))
    return tokens


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without special tokens."""
    with foreign_as_errors():
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Why two models read the same tokens, for a message."""

    use: str  # verb of a detector, of which the models are the objects
    how: str
    remedy: str
    ids: bool = False  # whether the documents are token ids, so that no text is tokenized


_COMPARED = SharedTokens("compares", " token by token", "detector reference")
_GIVEN = SharedTokens("gives", " the same ids", "text in the place of tokens", ids=True)
_IN_WINDOWS = SharedTokens("compares", " in the same windows", "windows: 1")


def shared_tokens(token_ids: bool, windows: int | None) -> SharedTokens:
    """Why two models read the same tokens.

    Args:
        token_ids: whether the documents are token ids.
        windows: maximum windows of a document; None: 1.
    """
    if token_ids:
        return _GIVEN
    return _IN_WINDOWS if windows is not None and windows > 1 else _COMPARED


def check_same_tokens(first: Any, second: Any, models: tuple[str, str], reader: str, shared: SharedTokens) -> None:
    """Check that two tokenizers have the same vocabulary with the same ids.

    Args:
        first: tokenizer of a transformers model.
        second: tokenizer of the other model.
        models: names of both models, for the error.
        reader: detector that gives both models the same tokens.
        shared: why it does.

    Raises:
        UserError: the vocabularies, or the token ids of a sentence, differ.
    """
    differs = tokenizer_difference(first, second, shared.ids)
    if differs is None:
        return
    raise UserError(
        f"detector {reader} {shared.use} model {models[0]} and reference_model {models[1]}{shared.how}, and their "
        f"tokenizers differ: {differs}; take a reference_model of the same family, or {shared.remedy}"
    )


def tokenizer_difference(first: Any, second: Any, token_ids: bool = False) -> str | None:
    """The difference between two tokenizers; None if they agree.

    Args:
        first: tokenizer of a transformers model.
        second: tokenizer of the other model.
        token_ids: whether the documents are token ids, so that no text is tokenized.
    """
    one, two = first.get_vocab(), second.get_vocab()
    if one != two:
        ids = {token: (one.get(token, "none"), two.get(token, "none")) for token in one.keys() | two.keys()}
        token = min(token for token, (here, there) in ids.items() if here != there)
        return f"of {len(one)} and {len(two)} tokens, {token!r} has id {ids[token][0]} and {ids[token][1]}"
    probes = [[] if token_ids else tokenizer(PROBE, verbose=False)["input_ids"] for tokenizer in (first, second)]
    return f"of {PROBE!r} they make ids {probes[0]} and {probes[1]}" if probes[0] != probes[1] else None


def count_words(texts: Sequence[str], max_tokens: int) -> list[Tokens]:
    """`tokenize` without a tokenizer: each word, or character of a script without blanks, is a token of id 0."""
    tokens = []
    for text in texts:
        ends = [end for _, end in islice(unit_spans(text), max_tokens + 1)]
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
    """The ids of a text repeated `COPIES` times; of its first tokens if the copies would exceed `max_tokens`.

    Args:
        ids: ids of the text.
        max_tokens: maximum number of ids of all copies together.
        beginning: id of the BOS token, kept only before the first copy; None if there is none.
    """
    mark = int(bool(ids) and ids[0] == beginning)
    return [*ids[:mark], *list(ids[mark : mark + max(1, (max_tokens - mark) // COPIES)]) * COPIES]


def adds_tokens(config: ModelConfig, source: Checkpoint) -> bool:
    """Whether the tokenizer beside the configured adapter has more tokens than the model has embeddings.

    Raises:
        UserError: a file is missing or damaged.
    """
    if config.adapter is None or (tokens := tokens_beside(locate_adapter(config))) == 0:
        return False
    return tokens > int(read_model_config(config, source, "any").get_text_config().vocab_size)


def tokens_beside(folder: Path) -> int:
    """Number of tokens of the tokenizer in the folder of an adapter; 0 without one, or where it cannot be read."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [int(token["id"]) + 1 for token in content["added_tokens"]]
        return max([len(content["model"]["vocab"]), *added])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0


def load_tokenizer(config: ModelConfig, source: Checkpoint) -> Any:
    """Load the tokenizer of a checkpoint, or that of its adapter if it has more tokens.

    Raises:
        UserError: a file is missing or damaged.
    """
    from transformers import AutoTokenizer

    folder, argument = source.folder, source.gguf_argument
    if adds_tokens(config, source):
        folder, argument = linked(adapter_files(locate_adapter(config), config.adapter_shown)), {}
    with in_one_line(config, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code, **argument)
        model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(model, "dropout", None):  # of a training: it would draw other tokens at every call
            model.dropout = None
        _check_ids(tokenizer)
        with suppress(Exception):  # a text may be refused, but no tokenizer panics at every one
            tokenizer(PROBE, verbose=False)
        return tokenizer


def _check_ids(tokenizer: Any) -> None:
    """Check that a tokenizer can be copied for other threads: its library writes out every id up to the largest.

    Raises:
        ValueError: an id is far beyond the number of tokens. Other exceptions: the copy of repeated ids fails.
    """
    ids = tokenizer.get_vocab().values()
    if (largest := max(ids, default=0)) > 2 * len(ids) + SPARE_IDS:
        raise ValueError(f"token id {largest} of {len(ids):,} tokens")
    if len(set(ids)) < len(ids):
        copy.deepcopy(tokenizer)


def split_into_pieces(tokenizer: Any, text: str, ids: Sequence[int], kept: int) -> list[str]:
    """Split the kept part of a text into the pieces of its tokens.

    A character that several tokens share (mostly its bytes) belongs to the first one; the others get "", as do special
    tokens.
    Characters that no token covers (blanks, if a tokenizer drops them) belong to the next token, or to the last one.

    Args:
        tokenizer: tokenizer of transformers.
        text: whole text.
        ids: ids that `tokenize` kept, at least one.
        kept: number of characters of the text that they cover.

    Returns:
        One piece per token; joined they are the kept part.

    Raises:
        ValueError: the tokenizer now gives other ids, or a tokenizer without offsets does not decode to the text.
    """
    with foreign_as_errors():
        spans = _offsets(tokenizer, text, ids) if tokenizer.is_fast else decoded_spans(tokenizer, text[:kept], ids)
    ends, last, covering = [], 0, len(spans) - 1
    for index, (begin, end) in enumerate(spans):
        last = max(last, min(end, kept))
        ends.append(last)
        covering = index if end > begin else covering
    ends[covering:] = [kept] * (len(ends) - covering)
    return [text[begin:end] for begin, end in pairwise([0, *ends])]


def _offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Span]:
    """The span of each token in a text, from the shortest prefix that gives these ids.

    Raises:
        ValueError: no prefix does.
    """
    for beginning in _beginnings(text, len(ids)):
        encoded = tokenizer(beginning, return_attention_mask=False, return_offsets_mapping=True, verbose=False)
        if list(encoded["input_ids"][: len(ids)]) == list(ids):
            return list(encoded["offset_mapping"][: len(ids)])
    raise ValueError("its tokens have changed")


def _beginnings(text: str, tokens: int) -> Iterator[str]:
    """The prefixes of a text that `tokenize` tries, by ascending length."""
    length = min(len(text), first_length(tokens))
    yield text[:length]
    while length < len(text):
        length = _next_length(text, length)
        yield text[:length]


def decoded_spans(tokenizer: Any, kept: str, ids: Sequence[int]) -> list[Span]:
    """The spans of tokens in the kept part of a text by decoding, for a tokenizer without offsets.

    Raises:
        ValueError: the tokens do not decode to the kept part.
    """

    def decode(count: int) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids[:count]), **options)).rstrip(_CUT)

    whole = decode(len(ids))
    if not kept.startswith(whole) or len(kept) - len(whole) > _LONGEST:
        raise ValueError("its tokens do not decode to it")
    return list(pairwise(len(decode(count)) for count in range(len(ids) + 1)))


CHARACTERS_A_TOKEN = 16
"""Characters of the first prefix per token of max_tokens; shorter texts are tokenized whole."""

WHOLE_CHARACTERS = 1 << 20
"""Characters of a text up to which it is tokenized whole if the white-space proof does not apply."""

_LONGER = 8  # factor between the lengths of prefixes
_PLACES = 4  # boundaries between letters and blanks required after the kept tokens; one would be enough
_LETTER_BLANK = re.compile("[A-Za-z][ \u0120\u2581]")  # in texts, byte-level and SentencePiece vocabularies
_BETWEEN_WORDS = re.compile("[A-Za-z] (?=[A-Za-z])")


class Cut(NamedTuple):
    """One window of a document."""

    start: int  # its first token, among those of the text without special ones
    stop: int  # the token after its last one
    length: int  # number of its ids, with special tokens
    skipped: int  # of its ids from the second on, those at the beginning without a score: an earlier window has them


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one document."""

    ids: list[int]  # of its windows, one after the other
    truncated: bool
    kept: int  # characters of the text that the ids cover; of several windows 0
    offsets: tuple[Span, ...] = ()  # of each token, in characters; only of `tokenize_rendered`
    cuts: tuple[Cut, ...] = ()  # its windows; empty: the ids are one


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Properties of the vocabulary of a tokenizer."""

    longest: int  # characters
    splits_at_blanks: bool  # no entry contains a letter followed by a blank
    bounds_tokens: bool  # no token is longer than the longest entry


@lru_cache(maxsize=16)
def describe_vocabulary(tokenizer: Any) -> Vocabulary:
    """Properties of the vocabulary of a transformers tokenizer, including added tokens."""
    entries = tokenizer.get_vocab()
    longest = max(map(len, entries), default=1)
    return Vocabulary(longest, not any(map(_LETTER_BLANK.search, entries)), _knows_all(tokenizer))


def _knows_all(tokenizer: Any) -> bool:
    """Whether a model is known to have no unknown token for characters or words outside of the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    whole = model.get("byte_fallback") or (model.get("type") == "BPE" and not model.get("unk_token"))
    return model.get("type") in ("BPE", "Unigram") and bool(whole)


def first_length(max_tokens: int) -> int:
    """Length of the first prefix in characters."""
    return CHARACTERS_A_TOKEN * max_tokens


def _next_length(text: str, length: int) -> int:
    """Length of the next prefix, if a prefix of this length proves nothing."""
    return length * _LONGER if len(text) > WHOLE_CHARACTERS else len(text)


def _checked_tokens(
    encode: Callable[[list[str]], list[Tokens]], vocabulary: Vocabulary, text: str, tokens: Tokens, max_tokens: int
) -> Tokens:
    """The kept tokens of a long text.

    Args:
        encode: texts -> their kept tokens, independently.
        vocabulary: vocabulary of the tokenizer.
        text: text of more than `first_length` characters.
        tokens: tokens of the prefix of `first_length` characters.
        max_tokens: maximum number of kept tokens.
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
    """Whether enough words end between two positions."""
    places = _BETWEEN_WORDS.finditer(text, start, stop)
    return sum(1 for _, _ in zip(range(_PLACES), places, strict=False)) == _PLACES


def _all_agree(
    encode: Callable[[list[str]], list[Tokens]], longest: int, text: str, tokens: Tokens, length: int
) -> bool:
    """Whether the text cut at each of `longest` positions after the kept tokens has the same kept tokens."""
    last = min(length, tokens.kept + _PLACES * longest)
    places = range(last - longest + 1, last + 1)
    return places[0] > tokens.kept and all(encode([text[:place]])[0] == tokens for place in places)
