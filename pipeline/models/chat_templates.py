"""Chat templates: conversations as a model reads them, and the places of the assistant's answers.

A conversation is rendered by a Jinja template, in the sandbox of transformers. Answers are located by a second
rendering in which unique probes stand for all contents. What stands between the probes is what the template writes
itself, so that the two renderings are aligned from left to right, position by position, and no content can pass for a
turn. Where the template changes the content of another turn, each answer is located by a rendering with a probe in its
place alone.

The span of an answer is the part of its content that the template rendered. Reasoning in `<think>` tags is a piece of
its own, which templates may remove. The token that ends the turn is scored with the answer, if it follows the answer
with nothing but white space between them, and if the template also ends a conversation with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import ASSISTANT, Conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.errors import UserError, error_line
from pipeline.models.chat_rendering import CLOCK, IsolatedTemplate, RenderingLimitError, Template
from pipeline.models.tokens import Span, Tokens, plain_ids, tokenize_rendered

RENDERING = 1
"""Version of the rendering and of the location of answers, which is in the fingerprint of scores."""

_TAG = re.compile("(</?think>)")
_EDGES = (None, "\n", "")  # characters that a template strips from an end: white space, line breaks, none
_ALONE = 256  # answers that may be located one by one
_COUNTED = 1 << 20  # characters before an answer whose tokens are counted for a message
_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the rendering of conversations depends on, besides the tokenizer."""

    templates: Mapping[str, str]  # model, "target" or "reference" -> Jinja
    file: str = ""  # name of the template's file, which is of no model; empty if each model has its own
    whole: bool = False  # whether all tokens are scored, and not only those of answers

    def fingerprint(self) -> dict[str, Any]:
        """The settings as in the fingerprint of scores."""
        digests = {
            model: sha256(template.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            for model, template in self.templates.items()
        }
        scored = {"score": "all"} if self.whole else {}
        return {"templates": digests, "date": f"{CLOCK:%Y-%m-%d}", "rendering": RENDERING, **scored}

    def open(self, model: str, tokenizer: Any) -> ChatTemplate:
        """The compiled template of a model. Raises UserError as `ChatTemplate`."""
        return ChatTemplate(self.templates[model], tokenizer, self.file, self.whole)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as rendered, and the parts of its answers in it, in order."""

    text: str
    answers: tuple[tuple[Span, ...], ...]  # of each answer that was rendered, characters
    turns: tuple[int, ...]  # index of the turn of each of these answers
    removed: int  # pieces of answers that the template left out, such as earlier reasoning


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A conversation as a model reads it."""

    tokens: Tokens
    scored: list[bool]  # of each token from the second on; at least one is
    answers: str  # the scored characters, without ends of turns
    removed: int = 0  # as in `RenderedChat`


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """The last answer that a model reads of a conversation, by token."""

    tokens: Tokens  # of the whole conversation
    question: str  # content of the last turn before it that is not of the assistant; empty if there is none
    pieces: list[str]  # parts of the rendered answer, one for each of its tokens
    places: list[int | None]  # index of the token of each piece; None: it is not scored


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a content between tags, which a probe replaces."""

    turn: int
    start: int  # character of the content
    text: str  # not blank


def check_offsets(tokenizer: Any, model: ModelConfig) -> None:
    """Check that the tokenizer of a model has offsets. Raises UserError."""
    if not tokenizer.is_fast:
        raise UserError(f"model {model.shown}: chats need a tokenizer with token offsets (tokenizer.json)")


def chat_template(tokenizer: Any, model: ModelConfig) -> str:
    """The chat template of a model's tokenizer.

    Raises:
        UserError: it has none.
    """
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if not template:
        raise UserError(
            f"model {model.shown}: its tokenizer has no chat template; chat: {{template: FILE}} names one, or take a "
            "model that was trained on chats"
        )
    return str(template)


class ChatTemplate:
    """A compiled template with its tokenizer.

    Raises:
        UserError: the template is no Jinja.
    """

    def __init__(self, template: str, tokenizer: Any, file: str = "", whole: bool = False) -> None:
        """Compile the template.

        Args:
            template: Jinja.
            tokenizer: tokenizer with offsets.
            file: name of the template's file, which is then rendered in a process of its own.
            whole: whether all tokens from the second on are scored.
        """
        variables = tokenizer.special_tokens_map
        self._template: Template | IsolatedTemplate = (
            IsolatedTemplate(template, variables, file) if file else Template(template, variables)
        )
        self._named = f"the chat template {file}" if file else "the chat template"
        self._whole = whole
        self.tokenizer = tokenizer
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special | set(tokenizer.all_special_ids)
        texts = [str(tokenizer.convert_ids_to_tokens(number)) for number in sorted(self._special)]
        self._control = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._ends = self._turn_ends()

    def close(self) -> None:
        """End the worker process of a template of a file."""
        if isinstance(self._template, IsolatedTemplate):
            self._template.close()

    @property
    def ends(self) -> frozenset[int]:
        """The id of the token that ends a turn of the assistant; none if the template has none."""
        return self._ends

    def holds_control(self, conversation: Conversation) -> bool:
        """Whether a content holds a special token of the tokenizer, which is tokenized as in a training."""
        return any(self._control.search(turn.content) for turn in conversation.turns)

    def read(self, conversations: Sequence[Conversation], max_tokens: int) -> list[ReadChat | Unreadable]:
        """The tokens of conversations, and which of them are scored; the reason where none can be."""
        made = [self.rendered(conversation) for conversation in conversations]
        texts = [one.text for one in made if isinstance(one, RenderedChat)]
        tokens = iter(tokenize_rendered(self.tokenizer, texts, max_tokens))
        return [one if isinstance(one, Unreadable) else self._read(one, next(tokens), max_tokens) for one in made]

    def rendered(self, conversation: Conversation) -> RenderedChat | Unreadable:
        """The rendered conversation, with the places of its answers."""
        try:
            text = self._template.render([turn.message() for turn in conversation.turns])
        except UserError:  # a template that is ended at every conversation
            raise
        except RenderingLimitError as error:
            return Unreadable(Reason.NOT_CHAT, f"{self._named} {error}")
        except Exception as error:  # templates raise errors of their own, and any error of an expression
            return Unreadable(Reason.NOT_CHAT, f"{self._named} raises: {error_line(error, _MESSAGE)}")
        numbers = range(len(conversation.turns))
        answers = [number for number in numbers if conversation.turns[number].role == ASSISTANT]
        answers = [number for number in answers if number >= conversation.prompt]
        places = self._aligned(conversation, text, numbers)
        if places is None and len(answers) <= _ALONE:
            each = [self._aligned(conversation, text, [number]) for number in answers]
            places = None if None in each else {piece: at for one in each if one for piece, at in one.items()}
        if places is None:
            return Unreadable(Reason.NO_SPAN, f"{self._named} renders another text than the contents of its turns")
        pieces = [list(_pieces(conversation, number)) for number in answers]
        spans = [tuple(_spans(conversation, text, some, places)) for some in pieces]
        removed = sum(piece not in places for piece in chain(*pieces))
        if not any(spans):
            return Unreadable(Reason.NO_SPAN, f"{self._named} renders no answer of the assistant")
        kept = [(some, number) for some, number in zip(spans, answers, strict=True) if some]
        return RenderedChat(text, tuple(some for some, _ in kept), tuple(number for _, number in kept), removed)

    def last_answer(self, conversation: Conversation, max_tokens: int) -> LastAnswer | Unreadable:
        """The last answer with a token among the first `max_tokens`; the reason if there is none."""
        made = self.rendered(conversation)
        if isinstance(made, Unreadable):
            return made
        (tokens,) = tokenize_rendered(self.tokenizer, [made.text], max_tokens)
        scored = [False, *self._scored(made, tokens)]
        begins = _beginnings(self.tokenizer, made.text, tokens)
        here = [place for place, keep in enumerate(scored) if keep]
        if not here:
            return Unreadable(Reason.TOO_SHORT, f"{max_tokens:,} tokens end before the first answer")
        answer = max(number for number, spans in enumerate(made.answers) if spans[0][0] <= begins[here[-1]])
        first = next(place for place in here if begins[place] >= made.answers[answer][0][0])
        at, pieces = begins[first], list[str]()
        for _, end in tokens.offsets[first : here[-1] + 1]:
            pieces.append(made.text[at : max(at, end)])
            at = max(at, end)
        before = reversed(conversation.turns[: made.turns[answer]])
        question = next((turn.content for turn in before if turn.role != ASSISTANT), "")
        places = [place if scored[place] else None for place in range(first, here[-1] + 1)]
        return LastAnswer(tokens, question, pieces, places)

    def cut_before(self, made: RenderedChat, answer: int, max_tokens: int) -> Unreadable:
        """The refusal of a conversation of which max_tokens leaves nothing of an answer, the first (0) or last (-1)."""
        start = made.answers[answer][0][0]
        number = f"token {len(plain_ids(self.tokenizer, made.text[:start])) + 1:,}"
        where = number if start < _COUNTED else f"character {start:,}"
        which = "last" if answer else "first"
        message = f"max_tokens, which is {max_tokens:,} here, ends before the {which} answer at {where}"
        return Unreadable(Reason.TOO_SHORT, message)

    def _aligned(self, conversation: Conversation, text: str, numbers: Collection[int]) -> dict[_Piece, Span] | None:
        """The places of the contents of some turns in the rendered text; None if the text does not align.

        A piece that the template left out has no place.
        """
        mark = f"s{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}n"
        pieces = [piece for number in numbers for piece in _pieces(conversation, number)]
        messages = [turn.message() for turn in conversation.turns]
        for number, content in _probed(conversation, pieces, mark).items():
            messages[number]["content"] = content
        try:
            first, *rest = re.split(f"{mark}([0-9]+)s", self._template.render(messages))
        except Exception:  # a template that refuses the probes
            return None
        order = [pieces[int(number)] for number in rest[::2]]
        if len(set(order)) < len(order) or not text.startswith(first):
            return None
        places, at = dict[_Piece, Span](), len(first)
        for piece, literal in zip(order, rest[1::2], strict=True):
            behind = (at + len(one) for one in _stripped(piece.text) if text.startswith(one + literal, at))
            end = next(behind, None)
            if end is None:
                return None
            places[piece] = (at, end)
            at = end + len(literal)
        return places if at == len(text) else None

    def _turn_ends(self) -> frozenset[int]:
        """The special token that ends a conversation of a question and an answer; none if the template has none."""
        question, answer = "What is it", "It is this"
        try:
            text = self._template.render(
                [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
            )
        except Exception:  # a template for other conversations
            return frozenset()
        behind = plain_ids(self.tokenizer, text.rpartition(answer)[2].strip()) if answer in text else []
        return frozenset(behind[:1]) & self._special

    def _read(self, made: RenderedChat, tokens: Tokens, max_tokens: int) -> ReadChat | Unreadable:
        """A rendered conversation with its tokens."""
        scored = self._scored(made, tokens)
        kept = [(start, min(stop, tokens.kept)) for start, stop in chain(*made.answers) if start < tokens.kept]
        if not any(scored):
            return self.cut_before(made, 0, max_tokens)
        answers = "\n\n".join(made.text[start:stop] for start, stop in kept)
        scored = [True] * len(scored) if self._whole else scored
        return ReadChat(Tokens(tokens.ids, tokens.truncated, tokens.kept), scored, answers, made.removed)

    def _scored(self, made: RenderedChat, tokens: Tokens) -> list[bool]:
        """Whether each token from the second on begins in an answer, or ends its turn."""
        scored, at = [False] * len(tokens.ids), 0
        begins = _beginnings(self.tokenizer, made.text, tokens)
        for spans in made.answers:
            for start, stop in spans:
                while at < len(begins) and begins[at] < start:
                    at += 1
                while at < len(begins) and begins[at] < stop:
                    scored[at] = tokens.offsets[at][1] > tokens.offsets[at][0]
                    at += 1
            end = at
            while end < len(begins) and made.text[spans[-1][1] : tokens.offsets[end][1]].isspace():
                end += 1
            if end < len(begins) and tokens.ids[end] in self._ends:
                scored[end] = not made.text[spans[-1][1] : tokens.offsets[end][0]].strip()
        return scored[1:]


def _pieces(conversation: Conversation, number: int) -> Iterator[_Piece]:
    """The pieces of the content of a turn, without tags and blank parts."""
    at = 0
    for part in _TAG.split(conversation.turns[number].content):
        if part.strip() and not _TAG.fullmatch(part):
            yield _Piece(number, at, part)
        at += len(part)


def _probed(conversation: Conversation, pieces: Sequence[_Piece], mark: str) -> dict[int, str]:
    """The contents of turns with probes in the place of pieces, by the number of the turn."""
    made: dict[int, str] = {}
    ends: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        content = conversation.turns[piece.turn].content
        between = content[ends.get(piece.turn, 0) : piece.start]
        made[piece.turn] = f"{made.get(piece.turn, '')}{between}{mark}{number}s"
        ends[piece.turn] = piece.start + len(piece.text)
    return {turn: text + conversation.turns[turn].content[ends[turn] :] for turn, text in made.items()}


def _stripped(piece: str) -> list[str]:
    """A piece as templates strip it, the longest first."""
    return list(
        dict.fromkeys(
            sorted((piece.lstrip(left).rstrip(right) for left in _EDGES for right in _EDGES), key=len, reverse=True)
        )
    )


def _spans(
    conversation: Conversation, text: str, pieces: Sequence[_Piece], places: Mapping[_Piece, Span]
) -> Iterator[Span]:
    """The rendered parts of an answer; tags between or before pieces belong to it if they are those of the content."""
    span: Span | None = None
    done = 0  # end of the last rendered piece in the content
    for piece in pieces:
        if piece not in places:
            continue
        start, stop = places[piece]
        content = conversation.turns[piece.turn].content
        begin = content.index(text[start:stop], piece.start)
        before = content[done:begin]
        if span is not None and text[span[1] : start] == before:
            span = (span[0], stop)
        else:
            if span is not None:
                yield span
            tagged = piece.start > 0 and text.endswith(before, 0, start) and _TAG.search(before)
            span = (start - len(before) if tagged else start, stop)
        done = begin + stop - start
    if span is not None:
        yield span


def _beginnings(tokenizer: Any, text: str, tokens: Tokens) -> list[int]:
    """The first character of each token; tokenizers that trim offsets leave out the blank before a word."""
    begins, last = [], 0
    for number, (begin, end) in zip(tokens.ids, tokens.offsets, strict=True):
        if last < begin < end and text[begin - 1] == " ":
            piece = tokenizer.convert_ids_to_tokens(number)
            begin -= piece[:1] in ("\u0120", "\u2581")
        begins.append(begin)
        last = max(last, end)
    return begins
