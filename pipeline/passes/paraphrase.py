"""Paraphrase documents of any length: split at sentences, rewrite the pieces, join and check them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

from pipeline.corpus.scripts import has_unspaced, word_pattern
from pipeline.errors import UserError
from pipeline.models.opened import LanguageModel, Seq2SeqModel, embedding_rows, unknown_id
from pipeline.passes.generate import Continuation, Prompt, Sampling, continuations

PREFIX = "paraphrase: "
INSTRUCTION = (
    "Paraphrase the text below: say the same in other words and other sentences, in the same language and at about "
    "the same length. Answer with the paraphrase alone."
)

LEAST_PIECE = 8  # tokens; a model with fewer positions for a text is refused
SPARE = 32  # additional tokens of an answer beyond `longest` times those of its text
_MARK = "\ue000\ue001\ue000"  # placeholder of the text in a chat template; private-use characters, so in no template
Reason = Literal["blank", "empty", "unfinished", "verbatim", "non_finite", "unknown_id"]
MESSAGES: dict[Reason, str] = {
    "blank": "the document has no word to paraphrase",
    "empty": "a paraphrase is empty",
    "unfinished": "a paraphrase does not end within its limit of tokens",
    "verbatim": "a paraphrase repeats the document",
    "non_finite": "the paraphraser gave NaN",
    "unknown_id": "the paraphraser's tokenizer gave an id that its model has no embedding of",
}


@dataclass(frozen=True, slots=True)
class ParaphraseSettings:
    """Settings of paraphrases; the defaults are those of KTD (Hu et al. 2025).

    Raises:
        UserError: a value outside its limits.
    """

    sampling: Sampling
    instruction: str | None = None  # None: `PREFIX` for an encoder-decoder model, `INSTRUCTION` for a causal one
    piece_tokens: int = 256  # longest piece; less if the model has fewer positions
    longest: float = 2.0  # maximum tokens of an answer as a multiple of its text's, plus `SPARE`
    redraws: int = 3  # of an invalid draw before the document fails

    def __post_init__(self) -> None:
        if self.piece_tokens < LEAST_PIECE:
            raise UserError(f"piece_tokens must be at least {LEAST_PIECE}, got {self.piece_tokens}")
        if not 1 <= self.longest < float("inf"):
            raise UserError(f"longest must be at least 1, got {self.longest}")
        if self.redraws < 0:
            raise UserError(f"redraws must be at least 0, got {self.redraws}")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a document: what is paraphrased, or stays as it is."""

    text: str
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Draws:
    """The checked paraphrases of one document."""

    key: int
    parts: tuple[tuple[str, ...], ...]  # by draw and part of the document
    redrawn: int  # number of pieces that were drawn again

    @property
    def texts(self) -> tuple[str, ...]:
        """The paraphrases, their parts joined."""
        return tuple("".join(parts) for parts in self.parts)


@dataclass(frozen=True, slots=True)
class ParaphraseFailure:
    """A document without paraphrases, because its draws were still invalid after all redraws."""

    key: int
    reason: Reason
    message: str


def draw_paraphrases(
    lm: LanguageModel | Seq2SeqModel,
    texts: Sequence[tuple[int, str | Sequence[TextPart]]],
    draws: int,
    settings: ParaphraseSettings,
    seed: int,
    draw: Callable[..., list[list[Continuation]]] = continuations,
) -> list[Draws | ParaphraseFailure]:
    """Draw paraphrases of documents.

    Args:
        lm: paraphraser: an encoder-decoder model, or an instruction-tuned causal model.
        texts: documents as (key, text), or of several parts, each paraphrased alone; random streams depend on the seed
            and the key.
        draws: number of paraphrases per document.
        settings: settings of paraphrases.
        seed: seed of the run.
        draw: `continuations`, perhaps with the sizes of its batches.

    Returns:
        For each document its paraphrases, or why there are none. A draw is invalid if a piece of it is empty or does
        not end within its limit, or if it repeats the document; it is then redrawn with other random numbers.

    Raises:
        UserError: the model has no chat template, or no room for a text beside its prompt.
    """
    encode, limit, rows = _encoder(lm, settings), piece_limit(lm, settings), embedding_rows(lm.model)
    bare = _token_counter(lm.tokenizer)
    split = partial(split_text, length=bare, limit=limit)
    documents = [
        _Document(key, [TextPart(text)] if isinstance(text, str) else text, split, draws, settings.redraws)
        for key, text in texts
    ]
    for attempt in range(settings.redraws + 1):
        missing = [(document, piece, numbers) for document in documents for piece, numbers in document.missing()]
        if not missing:
            break
        requests, prompts = [], []
        for document, piece, numbers in missing:
            source = document.pieces[piece].strip()
            max_tokens = int(settings.longest * bare(source)) + SPARE
            key, ids = (document.key, piece, attempt), encode(source)
            if unknown_id(ids, rows) is not None:  # the device must not see it
                document.reason = "unknown_id"
                continue
            requests.append((document, piece, numbers))
            prompts.append(Prompt(key, ids, numbers, max_new_tokens=max_tokens))
        results = draw(lm, prompts, settings.sampling, seed)
        for (document, piece, numbers), answers in zip(requests, results, strict=True):
            document.redrawn += len(numbers) if attempt else 0
            for number, answer in zip(numbers, answers, strict=True):
                document.take(piece, number, answer)
        for document in documents:
            document.drop_verbatim()
    return [document.result() for document in documents]


class _Document:
    """A document whose paraphrases are being drawn."""

    def __init__(
        self, key: int, parts: Sequence[TextPart], split: Callable[[str], list[str]], draws: int, redraws: int
    ) -> None:
        """Split the parts that are paraphrased."""
        self.key, self._draws, self._redraws = key, draws, redraws
        self.text = "".join(part.text for part in parts)
        of_parts = [[part.text] if part.stays else split(part.text) for part in parts]
        self._ends = list(accumulate(map(len, of_parts)))
        self.pieces = list(chain.from_iterable(of_parts))
        stays = [part.stays for part, pieces in zip(parts, of_parts, strict=True) for _ in pieces]
        self._first = [
            piece if kept or piece.isspace() else None for piece, kept in zip(self.pieces, stays, strict=True)
        ]
        self.answers = [[*self._first] for _ in range(draws)]  # by draw and piece; None: to be drawn
        self.redrawn = 0
        self.reason: Reason = "blank"

    def missing(self) -> list[tuple[int, list[int]]]:
        """Pieces that are still to be drawn, with the numbers of the draws; empty for a refused document."""
        if self.reason == "unknown_id":
            return []
        lacking = [[d for d in range(self._draws) if self.answers[d][p] is None] for p in range(len(self.pieces))]
        return [(piece, numbers) for piece, numbers in enumerate(lacking) if numbers]

    def take(self, piece: int, number: int, answer: Continuation) -> None:
        """Keep a valid answer; otherwise record the reason."""
        source = self.pieces[piece]
        text = clean(answer.text, source)
        if answer.end in ("tokens", "non_finite"):
            self.reason = "unfinished" if answer.end == "tokens" else "non_finite"
        elif not text:
            self.reason = "empty"
        else:
            start, end = len(source) - len(source.lstrip()), len(source.rstrip())
            self.answers[number][piece] = source[:start] + text + source[end:]

    def drop_verbatim(self) -> None:
        """Discard the complete draws that repeat the document."""
        for number, answer in enumerate(self.answers):
            if None not in answer and is_verbatim("".join(map(str, answer)), self.text):
                self.reason = "verbatim"
                self.answers[number] = [*self._first]

    def result(self) -> Draws | ParaphraseFailure:
        """The paraphrases if all of them are complete, otherwise a failure."""
        if None not in self._first:
            return ParaphraseFailure(self.key, "blank", MESSAGES["blank"])
        if self.reason == "unknown_id":
            return ParaphraseFailure(self.key, self.reason, MESSAGES[self.reason])
        if self.missing():
            return ParaphraseFailure(self.key, self.reason, f"{MESSAGES[self.reason]}, after {self._redraws} redraws")
        return Draws(self.key, tuple(self._by_part(list(map(str, answer))) for answer in self.answers), self.redrawn)

    def _by_part(self, pieces: Sequence[str]) -> tuple[str, ...]:
        """The pieces of each part, joined."""
        return tuple("".join(pieces[start:end]) for start, end in pairwise([0, *self._ends]))


def is_verbatim(paraphrased: str, text: str) -> bool:
    """Whether two texts are equal except for case, punctuation and whitespace."""

    def normal(value: str) -> list[str]:
        folded = value.casefold()
        return word_pattern(has_unspaced(folded)).findall(folded) or value.split()

    return normal(paraphrased) == normal(text)


_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_LABEL = re.compile(
    r"\A(?:(?:sure|certainly|of course|here(?:'s|\u2019s| is)|below is)\b[^\n]{0,100}:\s*\n|"
    r"\**(?:paraphrase|paraphrased (?:text|version)|rewritten text)\**:\**)\s*",
    re.IGNORECASE,
)

_QUOTES = {'"': '"', "'": "'", "“": "”", "\u2018": "\u2019", "«": "»", "`": "`"}


def clean(answer: str, source: str) -> str:
    """Remove parts of a model's answer that are not the paraphrase: reasoning, a preamble, a label, enclosing quotes.

    Parts that the source also has are kept. Quotes are removed only as a pair around the whole answer.
    """
    answer = _THOUGHT.sub("", answer).strip()
    source = source.strip()
    label = _LABEL.match(answer)
    if label and not _LABEL.match(source):
        answer = answer[label.end() :].strip()
    closing = _QUOTES.get(answer[:1])
    if closing and len(answer) > 1 and answer.endswith(closing) and source[:1] != answer[0]:
        inner = answer[1:-1]
        if answer[0] not in inner and closing not in inner:
            answer = inner.strip()
    return answer


_BOUNDARY = re.compile(r"[.!?…]+[\"'”\u2019»)\]]*\s+|[。\uff01\uff1f]+[”\u2019」』]*\s*|\n\s*")


def split_text(text: str, length: Callable[[str], int], limit: int) -> list[str]:
    """Split a text at the ends of sentences into pieces that fit; joined they are the text.

    Args:
        text: text to split.
        length: returns the length of a piece; it is called without the whitespace around the piece.
        limit: maximum length of a piece. A longer sentence is split between words, and a longer word between
            characters; the minimum is a piece of one character, of any length.
    """
    ends = [match.end() for match in _BOUNDARY.finditer(text)]
    pieces: list[str] = []
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        sentence = text[begin:end]
        if not sentence:
            continue
        if pieces and length((pieces[-1] + sentence).strip()) <= limit:
            pieces[-1] += sentence
        elif length(sentence.strip()) <= limit:
            pieces.append(sentence)
        else:
            pieces += _split_sentence(sentence, length, limit)
    return pieces


def _split_sentence(sentence: str, length: Callable[[str], int], limit: int) -> list[str]:
    """Split a sentence that is too long between words, and words that are too long between characters."""
    words = re.findall(r"\S+\s*|\s+", sentence)
    pieces: list[str] = []
    while words:
        count = _longest_fit(words, length, limit)
        if count:
            pieces.append("".join(words[:count]))
            del words[:count]
            continue
        characters = list(words.pop(0))
        while characters:
            count = _longest_fit(characters, length, limit) or 1
            pieces.append("".join(characters[:count]))
            del characters[:count]
    return pieces


def _longest_fit(units: list[str], length: Callable[[str], int], limit: int) -> int:
    """Number of the first units that fit together, by bisection; the returned number has been checked."""
    fits, fails = 0, 1
    while fails <= len(units) and length("".join(units[:fails]).strip()) <= limit:
        fits, fails = fails, 2 * fails
    fails = min(fails, len(units) + 1)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if length("".join(units[:middle]).strip()) <= limit:
            fits = middle
        else:
            fails = middle
    return fits


def piece_limit(lm: LanguageModel | Seq2SeqModel, settings: ParaphraseSettings) -> int:
    """Maximum tokens of a piece with which its prompt and its answer fit into the model.

    Raises:
        UserError: the model has no chat template, or no room for a text beside its prompt.
    """
    positions, prompt_tokens = lm.max_tokens, len(_encoder(lm, settings)(""))
    if isinstance(lm, Seq2SeqModel):
        if positions is None:
            stated_limit = lm.tokenizer.model_max_length
            positions = stated_limit if stated_limit < 1 << 20 else 512
        room = min(positions - prompt_tokens, int((positions - SPARE) / settings.longest))
    elif positions is not None:
        room = int((positions - prompt_tokens - SPARE) / (1 + settings.longest))
    else:
        room = settings.piece_tokens
    if room < LEAST_PIECE:
        raise UserError(
            f"the paraphraser has {positions} positions: beside its prompt of {prompt_tokens} tokens and an answer "
            f"they leave {max(room, 0)} for a text, at least {LEAST_PIECE} are needed"
        )
    return min(settings.piece_tokens, room)


def _token_counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _encoder(lm: LanguageModel | Seq2SeqModel, settings: ParaphraseSettings) -> Callable[[str], list[int]]:
    """A function from a piece to the token ids of the prompt for its paraphrase.

    Special tokens that a text spells out are encoded as plain characters, so a text cannot end its own message.
    """
    tokenizer = lm.tokenizer

    def ids(text: str, *, special: bool) -> list[int]:
        encoding = tokenizer(text, add_special_tokens=special, split_special_tokens=True, verbose=False)
        return list(encoding["input_ids"])

    if isinstance(lm, Seq2SeqModel):
        prefix = PREFIX if settings.instruction is None else settings.instruction
        return lambda text: ids(prefix + text, special=True)
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the paraphraser has no chat template: use an instruction-tuned model, or one such as T5")
    instruction = INSTRUCTION if settings.instruction is None else settings.instruction
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{instruction}\n\n{_MARK}"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # for templates of reasoning models
        date_string="1 January 2025",  # for templates that insert the date, so that the prompt is constant
    )
    parts = rendered.split(_MARK)
    if len(parts) != 2:
        raise UserError(f"the paraphraser's chat template repeats a message {len(parts) - 1} times; it must be 1")
    before, after = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
    return lambda text: [*before, *ids(text, special=False), *after]
