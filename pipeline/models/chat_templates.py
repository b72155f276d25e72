"""Chat templates: conversations as a model reads them, and the places of the assistant's answers.

A conversation is rendered by a Jinja template, in the sandbox of transformers. Answers are located by a second
rendering in which unique probes stand for all contents. What stands between the probes is what the template writes
itself, so that the two renderings are aligned from left to right, position by position, and no content can pass for a
turn. Where the template changes the content of another turn, each answer is located by a rendering with a probe in its
place alone.

The span of an answer is the part of its content that the template rendered. Contents are split at tags, which are
`<think>` and those that the template's own text names: what stands between them are pieces, such as reasoning, which
templates may remove. The token that ends the turn is scored with the answer, if it follows the answer with nothing but
white space between them. Tokens that end a turn are found by a conversation of two questions: a template ends it with
them, or writes them behind the first answer, but not before the first question as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, product
from typing import Any

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import ASSISTANT, Conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.errors import UserError, error_line
from pipeline.models.chat_rendering import CLOCK, IsolatedTemplate, RenderingLimitError, Template
from pipeline.models.tokens import Span, Tokens, plain_ids, tokenize_rendered

RENDERING = 2
"""Version of the rendering and of the location of answers, which is in the fingerprint of scores."""

_THINK = ("<think>", "</think>")
_TAGS = re.compile(r"<[^<>\n]{1,64}>|\[[^\[\]\n]{1,64}\]")
_SURROGATE = re.compile("[\ud800-\udfff]")
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


_Part = tuple[int, int, int]
"""A part of a content that is rendered: its first character in the content and in the text, and its length."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as rendered, and the parts of its answers in it, in order."""

    text: str
    answers: tuple[tuple[Span, ...], ...]  # of each answer that was rendered, characters
    turns: tuple[int, ...]  # index of the turn of each of these answers
    removed: int  # pieces of answers that the template left out, such as earlier reasoning
    located: Mapping[int, Sequence[_Part]]  # index of a turn whose content was found -> its pieces, in order
    tags: int = 0  # answers of tags alone, which have nothing to score

    @property
    def places(self) -> dict[int, Span]:
        """The place of the content of each turn that was found, of answers with their tags."""
        others = {turn: (parts[0][1], parts[-1][1] + parts[-1][2]) for turn, parts in self.located.items()}
        answers = zip(self.turns, self.answers, strict=True)
        return {**others, **{turn: (spans[0][0], spans[-1][1]) for turn, spans in answers}}

    def until(self, stop: int) -> RenderedChat:
        """The first characters of the rendered conversation."""
        clipped = [tuple((start, min(end, stop)) for start, end in one if start < stop) for one in self.answers]
        kept = [(spans, turn) for spans, turn in zip(clipped, self.turns, strict=True) if spans]
        answers, turns = tuple(spans for spans, _ in kept), tuple(turn for _, turn in kept)
        return replace(self, text=self.text[:stop], answers=answers, turns=turns)


@dataclass(frozen=True, slots=True)
class ChatEnd:
    """Where a model stops reading a conversation, stated by the content of a turn, so that it has a place in others."""

    turn: int  # index of the last turn whose content is read
    kept: int  # characters of its content that are read
    behind: int | None  # characters read behind its rendered content, negative inside; None: all that follows


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A conversation as a model reads it."""

    tokens: Tokens
    scored: list[bool]  # of each token from the second on; at least one is
    answers: str  # the scored characters, without ends of turns
    end: ChatEnd
    removed: int = 0  # this and the next as in `RenderedChat`
    tags: int = 0


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
        self._whole, self._in_parts = whole, False
        self.tokenizer = tokenizer
        self._tags = _tag_pattern(template)
        self._pairs = _tag_pairs(template)
        self._names_tools = re.search(r"\btools\b", template) is not None
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
        """The ids of the tokens that end a turn of the assistant; none if the template has none."""
        return self._ends

    def holds_control(self, conversation: Conversation) -> bool:
        """Whether a content holds a special token of the tokenizer, which is tokenized as in a training."""
        return any(self._control.search(turn.content) for turn in conversation.turns)

    def wrapped(self, content: str) -> list[Span]:
        """The parts of a content between an opening and its closing tag, with both: reasoning, and calls of tools.

        What stands before a closing tag without an opening one, or behind an opening one without a closing one, is such
        a part too.
        """
        spans, at, closing = list[Span](), 0, ""
        for tag in self._tags.finditer(content):
            if closing:
                if tag.group() == closing:
                    spans[-1], at, closing = (spans[-1][0], tag.end()), tag.end(), ""
            elif tag.group() in self._pairs:
                spans.append((tag.start(), len(content)))
                closing = self._pairs[tag.group()]
            elif tag.group() in self._pairs.values():
                spans.append((at, tag.end()))
                at = tag.end()
        return spans

    def ignores_tools(self, conversation: Conversation) -> bool:
        """Whether a conversation has tools, and the template does not name them."""
        return bool(conversation.tools) and not self._names_tools

    def read(
        self, conversations: Sequence[Conversation], max_tokens: int, ends: Sequence[ChatEnd] = ()
    ) -> list[ReadChat | Unreadable]:
        """The tokens of conversations, and which of them are scored; the reason where none can be.

        Args:
            conversations: conversations, each with an answer.
            max_tokens: maximum number of tokens of each.
            ends: where the reading of each stops before that; default: nowhere.
        """
        made = [self.rendered(conversation) for conversation in conversations]
        if ends:
            made = [self._ended(one, end) for one, end in zip(made, ends, strict=True)]
        texts = [one.text for one in made if isinstance(one, RenderedChat)]
        tokens = iter(tokenize_rendered(self.tokenizer, texts, max_tokens))
        return [one if isinstance(one, Unreadable) else self._read(one, next(tokens), max_tokens) for one in made]

    def rendered(self, conversation: Conversation) -> RenderedChat | Unreadable:
        """The rendered conversation, with the places of its answers."""
        try:
            text = self._render([turn.message() for turn in conversation.turns], conversation.tools)
        except UserError:  # a template that is ended at every conversation
            raise
        except RenderingLimitError as error:
            return Unreadable(Reason.NOT_CHAT, f"{self._named} {error}")
        except Exception as error:  # templates raise errors of their own, and any error of an expression
            return Unreadable(Reason.NOT_CHAT, f"{self._named} raises: {error_line(error, _MESSAGE)}")
        if not text.isascii() and (broken := _SURROGATE.search(text)):  # of a field other than the content
            return Unreadable(Reason.NOT_CHAT, f"{self._named} renders {broken[0]!r}, which is not valid Unicode text")
        answers = conversation.answers
        places = self._aligned(conversation, text, range(len(conversation.turns)))
        if places is None and len(answers) <= _ALONE:
            each = [self._aligned(conversation, text, [number]) for number in answers]
            places = None if None in each else {piece: at for one in each if one for piece, at in one.items()}
        if places is None:
            return Unreadable(Reason.NO_SPAN, f"{self._named} renders another text than the contents of its turns")
        pieces = [list(_pieces(conversation, number, self._tags)) for number in answers]
        contents = [conversation.turns[number].content for number in answers]
        located = _located(conversation, places, text)
        parts = [located.get(number, ()) for number in answers]
        spans = [_spans(content, text, some, self._tags) for some, content in zip(parts, contents, strict=True)]
        removed = sum(piece not in places for piece in chain(*pieces))
        tags = sum(not some and bool(content.strip()) for content, some in zip(contents, pieces, strict=True))
        if not any(spans):
            lacking = "no answer has a word beside its tags" if tags and not removed else ""
            return Unreadable(Reason.NO_SPAN, lacking or f"{self._named} renders no answer of the assistant")
        kept = [(some, number) for some, number in zip(spans, answers, strict=True) if some]
        rendered = tuple(some for some, _ in kept)
        return RenderedChat(text, rendered, tuple(number for _, number in kept), removed, located, tags)

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

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of some messages, their contents in the form that the template takes, with schemas of functions."""
        if self._in_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        return self._template.render(messages, tools)

    def _aligned(self, conversation: Conversation, text: str, numbers: Collection[int]) -> dict[_Piece, Span] | None:
        """The places of the contents of some turns in the rendered text; None if the text does not align.

        A piece that the template left out has no place.
        """
        mark = f"s{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}n"
        pieces = [piece for number in numbers for piece in _pieces(conversation, number, self._tags)]
        messages = [turn.message() for turn in conversation.turns]
        for number, content in _probed(conversation, pieces, mark).items():
            messages[number]["content"] = content
        try:
            first, *rest = re.split(f"{mark}([0-9]+)s", self._render(messages, conversation.tools))
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
        """The tokens that end a turn; none if the template has none. Also finds the form of contents that it takes."""
        contents = ("What is it", "It is this", "And what else", "Also that")
        roles = ("user", ASSISTANT) * 2
        for self._in_parts, turns in product((False, True), (4, 2)):
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            try:
                text = self._render(messages[:turns])
            except RenderingLimitError:
                break
            except Exception:  # a template for other conversations
                continue
            between = re.split("|".join(contents[:turns]), text)
            if len(between) == turns + 1:
                return self._ends_between(between)
        self._in_parts = False
        return frozenset()

    def _ends_between(self, between: Sequence[str]) -> frozenset[int]:
        """The tokens that end a turn, given what a template writes before, between and behind questions and answers."""
        first = [frozenset(plain_ids(self.tokenizer, text.strip())[:1]) for text in between]
        begins = len(between) > 3 and between[0].endswith(between[2].lstrip())  # a question, also the first one
        behind = frozenset() if begins and first[1] != first[2] else first[2]
        return (first[-1] | behind) & (self._special | set(self.tokenizer.added_tokens_decoder))

    def _read(self, made: RenderedChat, tokens: Tokens, max_tokens: int) -> ReadChat | Unreadable:
        """A rendered conversation with its tokens."""
        scored = self._scored(made, tokens)
        kept = [(start, min(stop, tokens.kept)) for start, stop in chain(*made.answers) if start < tokens.kept]
        if not any(scored):
            start = made.answers[0][0][0]
            if start < tokens.kept:
                message = (
                    f"no token begins in an answer; that of the first one begins before it, at character {start:,}"
                )
                return Unreadable(Reason.TOO_SHORT, message)
            return self.cut_before(made, 0, max_tokens)
        answers = "\n\n".join(made.text[start:stop] for start, stop in kept)
        scored = [True] * len(scored) if self._whole else scored
        end = self._find_end(made, tokens)
        return ReadChat(
            Tokens(tokens.ids, tokens.truncated, tokens.kept), scored, answers, end, made.removed, made.tags
        )

    def _find_end(self, made: RenderedChat, tokens: Tokens) -> ChatEnd:
        """Where some tokens of a rendered conversation, of which one is scored, end."""
        places = made.places
        turn = max(number for number in (places if self._whole else made.turns) if places[number][0] < tokens.kept)
        behind = tokens.kept - places[turn][1]
        last = [part for part in made.located[turn] if behind >= 0 or part[1] < tokens.kept][-1:]
        kept = [begin + min(length, tokens.kept - start) for begin, start, length in last]
        return ChatEnd(turn, sum(kept), behind if tokens.truncated else None)

    def _ended(self, made: RenderedChat | Unreadable, end: ChatEnd) -> RenderedChat | Unreadable:
        """A rendered conversation that is read to an end."""
        if isinstance(made, Unreadable) or end.behind is None:
            return made
        place = made.places.get(end.turn)
        if place is None:
            return Unreadable(Reason.NO_SPAN, f"{self._named} renders another text than the contents of its turns")
        return made.until(place[1] + end.behind)

    def _scored(self, made: RenderedChat, tokens: Tokens) -> list[bool]:
        """Whether each token from the second on begins in an answer, or ends its turn."""
        scored, at = [False] * len(tokens.ids), 0
        begins = _beginnings(self.tokenizer, made.text, tokens)
        for spans in made.answers:
            for start, stop in spans:
                while at < len(begins) and begins[at] < start:
                    at += 1
                while at < len(begins) and begins[at] < stop:
                    scored[at] = tokens.offsets[at][1] > begins[at]
                    at += 1
            end = at
            while end < len(begins) and made.text[spans[-1][1] : tokens.offsets[end][1]].isspace():
                end += 1
            if end < len(begins) and tokens.ids[end] in self._ends:
                scored[end] = not made.text[spans[-1][1] : tokens.offsets[end][0]].strip()
        return scored[1:]


def _tag_pattern(template: str) -> re.Pattern[str]:
    """Tags at which contents are split, in a group: those of reasoning, and those in the text of a template."""
    tags = sorted({*_THINK, *_TAGS.findall(template)}, key=lambda tag: (-len(tag), tag))
    return re.compile(f"({'|'.join(map(re.escape, tags))})")


def _tag_pairs(template: str) -> dict[str, str]:
    """The opening tags of a template with a closing one, such as `<think>` -> `</think>`."""
    tags = {*_THINK, *_TAGS.findall(template)}
    return {tag: closing for tag in tags if (closing := f"{tag[0]}/{tag[1:]}") in tags}


def _pieces(conversation: Conversation, number: int, tags: re.Pattern[str]) -> Iterator[_Piece]:
    """The pieces of the content of a turn, without tags and blank parts; a content of other tags alone is one piece."""
    at, content = 0, conversation.turns[number].content
    parts = tags.split(content)
    if not any(map(str.strip, parts[::2])) and not any(tag in content for tag in _THINK):
        parts = [content]
    for place, part in enumerate(parts):
        if place % 2 == 0 and part.strip():
            yield _Piece(number, at, part)
        at += len(part)


def _probed(conversation: Conversation, pieces: Sequence[_Piece], mark: str) -> dict[int, str]:
    """The contents of turns with probes in the place of pieces, by the number of the turn."""
    made: dict[int, list[str]] = {}
    ends: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        between = conversation.turns[piece.turn].content[ends.get(piece.turn, 0) : piece.start]
        made.setdefault(piece.turn, []).append(f"{between}{mark}{number}s")
        ends[piece.turn] = piece.start + len(piece.text)
    return {turn: "".join((*some, conversation.turns[turn].content[ends[turn] :])) for turn, some in made.items()}


def _stripped(piece: str) -> list[str]:
    """A piece as templates strip it, the longest first."""
    return list(
        dict.fromkeys(
            sorted((piece.lstrip(left).rstrip(right) for left in _EDGES for right in _EDGES), key=len, reverse=True)
        )
    )


def _located(conversation: Conversation, places: Mapping[_Piece, Span], text: str) -> dict[int, list[_Part]]:
    """The rendered pieces of each turn that has any."""
    made: dict[int, list[_Part]] = {}
    for piece, (start, stop) in places.items():
        content = conversation.turns[piece.turn].content
        part = content.index(text[start:stop], piece.start), start, stop - start
        made.setdefault(piece.turn, []).append(part)
    return {turn: sorted(made[turn]) for turn in sorted(made)}


def _spans(content: str, text: str, pieces: Iterable[_Part], tags: re.Pattern[str]) -> tuple[Span, ...]:
    """The rendered parts of an answer: its pieces, and those of its tags that are rendered between and beside them."""
    parts, done, last = list[_Part](), 0, -1
    for begin, start, length in pieces:
        some = [(tag.start(), tag.group()) for tag in tags.finditer(content, done, begin)]
        parts += _tags_before(text, start, some) if last < 0 else _tags_between(text, last, start, some)
        parts.append((begin, start, length))
        done, last = begin + length, start + length
    if not parts:
        return ()
    following = list(_tags_behind(text, last, [(tag.start(), tag.group()) for tag in tags.finditer(content, done)]))
    parts += following
    spans, done = list[Span](), 0
    for begin, start, length in parts:
        meets = spans and text[spans[-1][1] : start] == content[done:begin]
        spans.append((spans.pop()[0] if meets else start, start + length))
        done = begin + length
    behind = content[done:]
    start, stop = spans[-1]
    if following and behind.isspace() and text.startswith(behind, stop):
        spans[-1] = start, stop + len(behind)
    return tuple(spans)


def _tags_before(text: str, start: int, tags: Sequence[tuple[int, str]]) -> list[_Part]:
    """Those of some tags of a content that end at a place of the text, with blanks between them."""
    parts = list[_Part]()
    for begin, tag in reversed(tags):
        while text[start - 1 : start].isspace():
            start -= 1
        if not text.endswith(tag, 0, start):
            break
        start -= len(tag)
        parts.insert(0, (begin, start, len(tag)))
    return parts


def _tags_between(text: str, start: int, stop: int, tags: Sequence[tuple[int, str]]) -> Iterator[_Part]:
    """Those of some tags of a content that stand between two places of the text."""
    for begin, tag in tags:
        at = text.find(tag, start, stop)
        if at >= 0:
            yield begin, at, len(tag)
            start = at + len(tag)


def _tags_behind(text: str, start: int, tags: Sequence[tuple[int, str]]) -> Iterator[_Part]:
    """Those of some tags of a content that begin at a place of the text, with blanks between them."""
    for begin, tag in tags:
        while text[start : start + 1].isspace():
            start += 1
        if not text.startswith(tag, start):
            return
        yield begin, start, len(tag)
        start += len(tag)


def _beginnings(tokenizer: Any, text: str, tokens: Tokens) -> list[int]:
    """The first character of each token.

    Tokenizers that trim offsets leave out the blank before a word, and where they have added it, the first character.
    """
    begins, last = [], 0
    for number, (begin, end) in zip(tokens.ids, tokens.offsets, strict=True):
        if last < begin and (begin < end if text[begin - 1] == " " else not text[begin - 1].isspace()):
            piece = tokenizer.convert_ids_to_tokens(number)
            begin -= piece[:1] in ("\u0120", "\u2581")
        begins.append(begin)
        last = max(last, end)
    return begins
