"""Log-probabilities of a prompt's tokens in the answers of endpoints, and the checks that they have to pass.

Servers differ in what they list: with or without a BOS, with a value or null for the first token, with generated tokens
behind the prompt, with several candidates for a token, with tokens as text, as marks of a vocabulary or as numbers. Two
probes of different length show the form of an endpoint's answers (`form_of_answers`); every other answer is then read
by this form and refused where it does not fit (`read_log_probs`).
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.corpus.reasons import Reason
from pipeline.endpoint.client import MOST_COUNTED, Fault, Refusal, reported_usage
from pipeline.endpoint.token_texts import (
    REPLACED,
    Piece,
    are_marks,
    bare,
    fold,
    folded_pieces,
    ordered_parts,
    token_piece,
    token_pieces,
    unmarked,
)

Way = Literal["prompt_logprobs", "echo"]
WAYS: tuple[Way, ...] = ("prompt_logprobs", "echo")

HIGHEST = 1e-3
"""Largest log-probability that rounding explains; values above 0 are read as 0."""

LOWEST = -1000.0
"""Lowest believed log-probability: servers write -9999 or the lowest number of a type in the place of -inf."""

COVERED, COVERED_OTHERS = 0.9, 0.5
"""Smallest share of a text's ASCII characters in the tokens of an answer, and of all characters where most are others,
which some servers leave out where a token holds a part of one. The rest allows for normalisation."""

IN_ORDER = 0.7
"""Smallest part of these shares that stands in the order of the text; of another text it is at most a half."""

BEGINNING = 40
"""Characters of a text that its echo has to begin with."""

FIRST = 24
"""Most characters of a first token whose text an answer does not have."""

LEAST_TOKENS = 20
"""Smallest number of tokens of the shorter probe."""

CHANCE = 4
"""Most places at which values seem to belong to other tokens by chance."""

LOWER_AGAIN = 3.0
"""Standard errors by which log-probabilities of a text that is read again may be lower than at first, by chance."""

MOST_SPECIAL = 2
"""Most special tokens before a prompt without a chat template, such as [gMASK] and <sop>; one may stand behind it."""

_START = "A clerk in the harbour office of Vellmark wrote 17 short notes about ropes, tar, salted fish and late boats"
_REST = (
    "the third note was lost behind a cupboard for years",
    "nobody asked why the lamps on the pier burned blue in spring",
    "a boy named Orrin counted 264 barrels and forgot the last nine",
    "her answer came by mule, wrapped in brown paper and string",
    "two masons argued whether the wall leaned east or merely looked tired",
    "rain filled the copper bowl before anyone thought of closing the hatch",
    "he sold the map for eleven coins and a promise of plums",
    "the ferry bell rang twice, then the fog took every sound away",
)
PROBES = (f"{_START}.", f"{_START}; {'; '.join(_REST)}; {_START}.")
"""Texts of two lengths that no model knows by heart, in ASCII, which every tokenizer can give back. The second ends as
the first: a language model predicts a text that it reads again."""

_CHAT_WORDS = re.compile(r"user|assistant|system|human|inst\b|role|turn|header|message|channel", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """What an answer lists: tokens of the prompt, and behind an echo generated ones."""

    texts: tuple[str | bytes | None, ...]  # of each token; None where the answer has none
    values: tuple[Any, ...]  # of each token: a number, or null
    counted: int | None  # tokens of the prompt by the endpoint's own count
    generated: int | None  # generated tokens by its own count
    whole: str | None  # text of an echo
    likeliest: tuple[Mapping[str, float], ...] = ()  # of each token of an echo, texts and values; () where none are


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers of an endpoint are read, from its answers to `PROBES`."""

    way: Way
    unlisted: int | None  # tokens of its count that it does not list, 0 or 1 (a BOS); None: it has no count
    behind: int  # most tokens behind those of the prompt
    texts: bool  # whether the tokens gave the text of the probes; otherwise only their number was compared
    marks: bool = False  # whether they are in the characters of a byte-level vocabulary, such as `Ġ` for a blank


# --- the tokens of an answer


def answer_in(value: Mapping[str, Any], way: Way, prompt: str) -> PromptAnswer:
    """The tokens of a JSON answer.

    Args:
        value: the answer.
        way: how it was requested.
        prompt: the text that was sent.

    Raises:
        Fault: the answer has no choices.
        Refusal: it has no log-probabilities of a prompt, or lists of different lengths.
    """
    choice = _choice(value)
    listed = (_of_prompt if way == "prompt_logprobs" else _of_echo)(value, choice, prompt)
    likeliest = listed.likeliest if len(listed.likeliest) == len(listed.values) else ()
    return PromptAnswer(
        tuple(listed.texts), tuple(listed.values), *reported_usage(value), listed.whole, tuple(likeliest)
    )


def _choice(value: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault("answer has no choices")
    return choices[0]


@dataclass(frozen=True, slots=True)
class _Listed:
    """The lists of an answer."""

    texts: Sequence[Any]
    values: Sequence[Any]
    whole: str | None = None
    likeliest: Sequence[Mapping[str, float]] = ()


def _of_prompt(value: Mapping[str, Any], choice: Mapping[str, Any], prompt: str) -> _Listed:
    """The form of vLLM: for each token null, a number, or a mapping from token ids to values, of which one is its own.

    Entries have `logprob`, and perhaps `decoded_token` and `rank`.
    """
    entries = choice.get("prompt_logprobs") or value.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise Refusal("no prompt_logprobs in the answer")
    candidates = [_candidates(entry) for entry in entries]
    tokens = _tokens_among(candidates, prompt)
    return _Listed([token.text for token in tokens], [token.value for token in tokens])


def _of_echo(value: Mapping[str, Any], choice: Mapping[str, Any], prompt: str) -> _Listed:
    """OpenAI's echo: the tokens of the prompt, followed by generated ones; or the prompt echoed the choices."""
    echoed = value.get("prompt")
    if isinstance(echoed, list) and echoed and isinstance(echoed[0], dict) and echoed[0].get("logprobs"):
        choice = echoed[0]
    log_probs, whole = choice.get("logprobs"), choice.get("text")
    listed = log_probs if isinstance(log_probs, dict) else {}
    if isinstance(listed.get("token_logprobs"), list):
        values, texts = listed["token_logprobs"], listed.get("tokens")
        tops = listed.get("top_logprobs")
    elif isinstance(listed.get("content"), list):
        tokens = [_token(entry) for entry in listed["content"]]
        values, texts = [token.value for token in tokens], [token.text for token in tokens]
        tops = [entry.get("top_logprobs") if isinstance(entry, dict) else None for entry in listed["content"]]
    else:
        raise Refusal("no log-probabilities of the prompt in the answer")
    if not isinstance(texts, list):
        texts = [None] * len(values)
    if len(texts) != len(values):
        raise Refusal(f"the answer has {len(texts)} tokens and {len(values)} log-probabilities")
    texts = [text if isinstance(text, (str, bytes)) else None for text in texts]
    likeliest = [_likeliest(top) for top in tops] if isinstance(tops, list) else []
    return _Listed(texts, values, whole if isinstance(whole, str) else None, likeliest)


def _likeliest(top: Any) -> dict[str, float]:
    """The candidates of a place by text: a mapping from texts to values, or a list of entries with both."""
    if isinstance(top, list):
        entries = [entry for entry in top if isinstance(entry, dict) and isinstance(entry.get("token"), str)]
        top = {entry["token"]: entry.get("logprob") for entry in entries}
    pairs = top.items() if isinstance(top, dict) else ()
    return {text: value for text, value in pairs if isinstance(text, str) and _is_number(value)}


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class _Token:
    text: Any  # a text, bytes, or None
    value: Any
    rank: int | None = None


def _token(entry: Any) -> _Token:
    """An entry with a log-probability, or a number alone."""
    if not isinstance(entry, dict):
        return _Token(None, entry)
    text, rank = entry.get("decoded_token", entry.get("token")), entry.get("rank")
    data = entry.get("bytes")
    if isinstance(data, list) and data and all(type(byte) is int and 0 <= byte < 256 for byte in data):
        text = bytes(data)
    rank = rank if type(rank) is int and 0 < rank < MOST_COUNTED else None
    return _Token(text if isinstance(text, (str, bytes)) else None, entry.get("logprob"), rank)


def _candidates(entry: Any) -> list[_Token]:
    """The candidates for one token of a prompt, of which one is the token."""
    if not isinstance(entry, dict) or "logprob" in entry:
        return [_token(entry)]
    return [_token(candidate) for candidate in entry.values()] or [_Token(None, None)]


def _tokens_among(candidates: Sequence[Sequence[_Token]], prompt: str) -> list[_Token]:
    """The tokens of a prompt among their candidates: by rank, and else those whose texts give the prompt.

    A server that lists k candidates and the token has k + 1 entries where the token is none of the k likeliest; it then
    has the highest rank.

    Raises:
        Refusal: neither names them.
    """
    most = max(map(len, candidates), default=0)
    if most <= 1:
        return [some[0] for some in candidates]
    listed = [some for some in candidates if len(some) > 1 or some[0].value is not None]
    fewest = min(map(len, listed))
    ranks = [token.rank or 0 for some in listed for token in some]
    if fewest == most and max(ranks) > most:
        fewest = most - 1
    left = [_highest_rank(some) if len(some) > max(1, fewest) else some for some in candidates]
    if all(len(some) == 1 for some in left):
        return [some[0] for some in left]
    path = _path_through(left, fold(prompt))
    if path is None:
        raise Refusal(f"the answer has up to {most} candidates for a token and does not name the prompt's own")
    return path


def _highest_rank(candidates: Sequence[_Token]) -> Sequence[_Token]:
    if any(token.rank is None for token in candidates):
        return candidates
    return [max(candidates, key=lambda token: token.rank or 0)]


def _path_through(candidates: Sequence[Sequence[_Token]], target: str) -> list[_Token] | None:
    """One candidate of each place such that their texts give the target; None where there are none."""
    reached: list[dict[int, tuple[int, _Token]]] = []  # by place: end in the target -> start and token
    ends = {*range(FIRST + 1)} if candidates[0][0].text is None else {0}
    for some in candidates:
        steps: dict[int, tuple[int, _Token]] = {}
        for start in sorted(ends):
            for token in some:
                for end in _token_ends(token, target, start):
                    steps.setdefault(end, (start, token))
        reached.append(steps)
        ends = set(steps)
    if len(target) not in ends:
        return None
    path, end = list[_Token](), len(target)
    for steps in reversed(reached):
        end, token = steps[end]
        path.append(token)
    return path[::-1]


def _token_ends(token: _Token, target: str, start: int) -> Iterator[int]:
    """The places in a folded text at which a token that starts at a place can end."""
    piece = token_piece(token.text)
    if piece is None or piece.special:
        yield start
        if piece is not None and target.startswith(marked := fold(piece.special), start):  # such as <b> in a text
            yield start + len(marked)
        return
    text = piece.data.decode("utf-8", "replace")
    folded = fold(unmarked(text))
    if target.startswith(folded, start):
        yield start + len(folded)
    if REPLACED in text:  # part of a character
        yield from (start, start + 1)


# --- the form of the answers of an endpoint


class FormError(Exception):
    """The answers of an endpoint to the probes are no log-probabilities of their tokens."""


def form_of_answers(way: Way, answers: Sequence[PromptAnswer]) -> AnswerForm:
    """The form of the answers of an endpoint.

    Args:
        way: how they were requested.
        answers: one to each of `PROBES`.

    Raises:
        FormError: they are no log-probabilities of the tokens of the probes.
    """
    forms = [_probe_form(way, answer, probe) for answer, probe in zip(answers, PROBES, strict=True)]
    short, long = forms
    if short.unlisted != long.unlisted:
        raise FormError(f"{_counts(answers[0])}, and in another answer {_counts(answers[1])}")
    texts, marks = short.texts and long.texts, short.marks and long.marks
    form = AnswerForm(way, short.unlisted, max(short.behind, long.behind), texts, marks)
    lists = []
    for answer, probe in zip(answers, PROBES, strict=True):
        try:
            values = read_log_probs(answer, probe, form)
        except Refusal as error:
            raise FormError(str(error)) from None
        if len(set(values)) < 2:
            raise FormError(f"all log-probabilities of a probe are {values[0]:g}" if values else "no values")
        if values == sorted(values, reverse=True):
            raise FormError("its log-probabilities fall from token to token: they are sums over all tokens before")
        _check_places(answer)
        lists.append(values)
    lengths = [len(values) for values in lists]
    if lengths[0] < LEAST_TOKENS - 1:
        raise FormError(f"{lengths[0]} values for a text of {len(PROBES[0].split())} words")
    if lengths[1] < lengths[0] * len(PROBES[1]) / len(PROBES[0]) / 2:
        raise FormError(
            f"{lengths[0]} values for a text of {len(PROBES[0].split())} words, and {lengths[1]} for one of "
            f"{len(PROBES[1].split())}: the endpoint cuts prompts"
        )
    _check_read_again(*lists)
    return form


def _check_read_again(first: Sequence[float], again: Sequence[float]) -> None:
    """Check that the text of the first probe is not less likely at the end of the second, which repeats it.

    A language model predicts what it has read before. A server that takes the value of a token from the prediction of
    the next one reports how likely the token is to stand there twice: in a text that is read again, even less likely.

    Raises:
        FormError: it is less likely by more than chance.
    """
    number = len(first) - 2  # the first tokens may be others behind a blank
    gains = [after - before for before, after in zip(first[-number:], again[-number:], strict=True)]
    gain = statistics.fmean(gains)
    if gain < -max(HIGHEST, LOWER_AGAIN * statistics.stdev(gains) / math.sqrt(number)):
        raise FormError(
            f"a text that it reads again is less likely by {-gain:.1f} a token: its log-probabilities are not those of "
            "the tokens beside them"
        )


def _check_places(answer: PromptAnswer) -> None:
    """Check that each value is that of the token beside it, where the likeliest tokens of each place are listed too.

    Raises:
        FormError: values are those of the next tokens, or not those of the same tokens among the likeliest.
    """
    agreeing = following = other = places = 0
    for place, top in enumerate(answer.likeliest):
        value, text = answer.values[place], answer.texts[place]
        if not top or not _is_number(value):
            continue
        places += 1
        after = answer.texts[place + 1] if place + 1 < len(answer.texts) else None
        agrees, is_likelier = _agrees(top, text, value), value > max(top.values()) + HIGHEST
        agreeing += agrees is True
        following += after != text and _agrees(top, after, value) is True
        other += is_likelier or agrees is False
    if following > max(CHANCE, agreeing):
        raise FormError("its log-probabilities are those of the next tokens: the list is shifted by one")
    if other > max(CHANCE, agreeing, places / 10):
        raise FormError(f"{other} of its log-probabilities are not those of the likeliest tokens beside them")


def _agrees(top: Mapping[str, float], text: Any, value: float) -> bool | None:
    """Whether a token has this value among candidates; None if it is none of them."""
    return abs(top[text] - value) <= HIGHEST if text in top else None


def _counts(answer: PromptAnswer) -> str:
    """What an endpoint counts and what its answer has, in words."""
    count = "no tokens" if answer.counted is None else f"{answer.counted} tokens"
    return f"the endpoint counts {count} in the prompt, and its answer lists {len(answer.values)}"


def _probe_form(way: Way, answer: PromptAnswer, probe: str) -> AnswerForm:
    """The form of the answer to one probe. Raises FormError."""
    listed, counted = len(answer.values), answer.counted
    pieces = token_pieces(answer.texts)
    if pieces is not None:
        most = counted if counted is not None else listed if way == "prompt_logprobs" else 0
        number = _tokens_of_probe(pieces, probe, min(most, listed))
    elif counted is None and way == "echo" and fold(answer.whole or "") != fold(probe):
        raise FormError("the answer has neither texts nor a number of the prompt's tokens, and more than the prompt")
    else:
        number = listed if counted is None else min(counted, listed)
    unlisted, behind = None if counted is None else counted - number, listed - number
    if unlisted not in (None, 0, 1):
        raise FormError(_counts(answer))
    explained = answer.generated is None or pieces is not None or behind <= max(1, answer.generated)
    if behind and (way == "prompt_logprobs" or not explained):
        raise FormError(_counts(answer))
    marks = pieces is not None and are_marks(answer.texts, pieces)
    return AnswerForm(way, unlisted, behind, pieces is not None, marks)


def _tokens_of_probe(pieces: Sequence[Piece], probe: str, most: int) -> int:
    """The number of tokens whose texts give a probe, with a special one behind it up to `most`. Raises FormError."""
    target, joined = fold(probe), list(itertools.accumulate(folded_pieces(pieces)))
    starts = range(FIRST + 1 if pieces[0].missing else 1)
    number = next((joined.index(target[start:]) + 1 for start in starts if target[start:] in joined), 0)
    if not number:
        start = b"".join(piece.data for piece in pieces)[:60].decode("utf-8", "replace")
        raise FormError(f"the tokens of the answer do not give the text that was sent, but {start!r}")
    first = next(place for place, piece in enumerate(pieces) if piece.data.strip())
    added = [piece.special for piece in pieces[:number] if piece.special]
    inside = any(piece.special for piece in pieces[first:number])
    behind = [piece.special for piece in pieces[number:most] if piece.special]
    if len(added) > MOST_SPECIAL or inside or any(map(_CHAT_WORDS.search, [*added, *behind])):
        raise FormError(f"the endpoint adds {', '.join([*added, *behind])} to a prompt, as a chat template does")
    return min(most, number + 1) if behind else number


# --- the values of a document


def read_log_probs(answer: PromptAnswer, text: str, form: AnswerForm) -> list[float]:
    """Natural log-probabilities of the tokens of a text except the first, in order, <= 0.

    Args:
        answer: answer to the text.
        text: the text that was sent.
        form: form of the endpoint's answers.

    Raises:
        Refusal: the number of values is not that of the prompt's tokens (`model_error`), or a value is no
            log-probability (`non_finite_score`).
    """
    number = _number_of_tokens(answer, text, form)
    values = answer.values[:number]
    if values and values[0] is not None and None in answer.values[number:]:
        raise Refusal(
            "its first log-probability is given and its last is not: the list is shifted by one",
            Reason.NON_FINITE_SCORE,
        )
    if values and (values[0] is None or not form.unlisted):
        values = values[1:]
    return [_checked(value, place, len(values)) for place, value in enumerate(values, 1)]


def _number_of_tokens(answer: PromptAnswer, text: str, form: AnswerForm) -> int:
    """The number of listed tokens that belong to the prompt. Raises Refusal."""
    listed, pieces = len(answer.values), token_pieces(answer.texts, form.marks) if form.texts else None
    folded = None if pieces is None else folded_pieces(pieces)
    if form.unlisted is not None and answer.counted is not None:
        number = answer.counted - form.unlisted
    elif not form.behind:
        number = listed
    else:
        number = _covering(folded or [], text)
    if not 0 <= listed - number <= form.behind:
        raise Refusal(_counts(answer))
    if pieces is not None and folded is not None:
        _check_covered(pieces[:number], folded[:number], text)
    elif answer.whole is not None and not _repeats(answer.whole, text):
        raise Refusal("the echo of the endpoint is not the text that was sent")
    return number


def _repeats(whole: str, text: str) -> bool:
    """Whether an echo holds the beginning of a text, and most of its length."""
    echoed, target = fold(whole), fold(text)
    return target[:BEGINNING] in echoed and len(echoed) >= COVERED_OTHERS * len(target)


def _covering(folded: Sequence[str], text: str) -> int:
    """The number of tokens whose texts give a text. Raises Refusal."""
    target, joined = fold(text), ""
    for number, part in enumerate(folded, 1):
        joined += part
        if joined == target:
            return number
    raise Refusal("the answer does not count the tokens of the prompt, and generated ones stand behind them")


def _check_covered(pieces: Sequence[Piece], folded: Sequence[str], text: str) -> None:
    """Check that tokens give a text in its order, unless some stand for unknown characters. Raises Refusal."""
    if any(piece.partial for piece in pieces[1:-1]) or (pieces[-1].partial and pieces[-1].special):
        return
    parts = [bare(part or fold(piece.special)) for part, piece in zip(folded, pieces, strict=True)]
    target, least = bare(fold(text)), COVERED_OTHERS
    sizes = [target, "".join(map(bare, folded)), "".join(parts), ordered_parts(parts, target, FIRST)]
    if 2 * sum(map(str.isascii, target)) >= len(target):
        sizes, least = ["".join(filter(str.isascii, one)) for one in sizes], COVERED
    whole, given, held, ordered = map(len, sizes)
    first = FIRST if pieces[0].missing else 0
    if least * given > whole + FIRST:
        raise Refusal(
            f"the {len(pieces)} tokens of the answer have {given:,} characters, and the text {whole:,}: the endpoint "
            "adds to prompts"
        )
    if held + first < least * whole:
        raise Refusal(
            f"the {len(pieces)} tokens of the answer hold {held:,} of {whole:,} characters of the text: the endpoint "
            "cuts prompts"
        )
    if ordered + first < IN_ORDER * least * whole:
        raise Refusal(
            f"the {len(pieces)} tokens of the answer give {ordered:,} of {whole:,} characters of the text in its "
            "order: the endpoint answers to another text"
        )


def _checked(value: Any, place: int, number: int) -> float:
    where = f"log-probability {place} of {number}"
    if value is None:
        raise Refusal(f"{where} is missing", Reason.NON_FINITE_SCORE)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refusal(f"{where} is no number: {str(value)[:40]!r}", Reason.NON_FINITE_SCORE)
    try:
        number_read = float(value)
    except OverflowError:
        number_read = math.inf if value > 0 else -math.inf
    if not LOWEST < number_read <= HIGHEST:
        raise Refusal(f"{where} is {number_read:g}, outside ({LOWEST:g}, 0]", Reason.NON_FINITE_SCORE)
    return min(0.0, number_read)
