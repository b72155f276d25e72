"""Replies of an endpoint: which of them continue a text, and which are no answer.

A reply is no answer if it has no text, if all of it is reasoning, if a filter stopped it, or if it is a refusal: one
that a server marks or, of the chat interface, where a model is instructed, one in words (`pipeline.endpoint.refusals`).
Reasoning that ends is cut from the beginning of a reply. The decision depends on the reply and its document only, so it
is one rule for the documents of every role.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pipeline.corpus.notes import CUT_REASONING, LEFT_OUT_DRAWS, Notes
from pipeline.corpus.reasons import Reason
from pipeline.endpoint.client import Fault, Refusal
from pipeline.endpoint.error_answers import OUTPUT_LIMIT, has_filter_error
from pipeline.endpoint.refusals import VERSION, is_refusal
from pipeline.errors import ExitCode, StopError, one_line

RULES = f"4.{VERSION}"
"""Version of the rules for replies and refusals; it is part of the fingerprint of draws."""

FIRST = 5
"""Documents without an answer, before any has one, after which a run stops."""

SHOWN = 200
"""Characters of a refusal that are kept."""

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "reasoning_text")
_TEXT_PARTS = ("text", "output_text", None)
_FILTERS = (  # how ends by a filter begin
    *("content_filter", "content-filter", "safety", "recitation", "prohibited_content", "blocklist", "blocked"),
    *("sensitive", "spii", "error_toxic", "guardrail", "image_safety"),
)
_BROKEN = frozenset(  # ends of a server that failed
    {
        "error",
        "abort",
        "aborted",
        "insufficient_system_resource",
        "network_error",
        "engine_error",
        "timeout",
        "cancelled",
    }
)
_CALLS = frozenset({"tool_calls", "function_call", "tool_use", "malformed_function_call"})  # by a call of a tool
_LIMITS = frozenset({"length", "max_tokens"})  # ends by the limit of tokens
_OTHER_PLACES = {  # api -> where the other interface has a text, and what an error states then
    "completions": ("message", " where api: completions has it, but a message, as of api: chat"),
    "chat": ("text", " where api: chat has it, but one as of api: completions"),
}
_NAME = r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning|scratchpad)"
_ATTRIBUTE = r"""[\w:.-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s<>"']+)"""
_PAIRS = tuple(  # what opens and what closes reasoning; a closing one may refer to the name of the opening one
    (re.compile(begin, flags), end)
    for begin, end, flags in (
        (rf"<\s*({_NAME})(?:\s+{_ATTRIBUTE})*\s*>", r"<\s*/\s*{0}\s*>", re.IGNORECASE),
        (r"\[(THINK)\]", r"\[/{0}\]", 0),
        (r"<\|?(?:begin_of_|start_)(thought|thinking)\|?>", r"<\|?end_(?:of_)?{0}\|?>", re.IGNORECASE),
        (r"<\|(think|thinking)\|>", r"<\|/{0}\|>", re.IGNORECASE),
        (r"\u25c1(think)\u25b7", r"\u25c1/{0}\u25b7", 0),
        (
            r"(?:<\|start\|>assistant)?<\|channel\|>\s*(?:analysis|commentary)\b",
            r"<\|channel\|>\s*final[^<]*<\|message\|>",
            0,
        ),
        (r"(?:analysis|commentary)(?=[A-Z].*?assistantfinal)", r"assistantfinal", re.DOTALL),  # without special tokens
    )
)
_END = (
    r"(?:<\s*/\s*(?:\w+:)?(?:think|thinking|reasoning)\s*>|\[/THINK\]|\u25c1/think\u25b7|"
    r"<\|?end_(?:of_)?(?:thought|thinking)\|?>)"
)
_CLOSING = re.compile(rf"^[ \t]*(?P<begins>{_END})|(?P<ends>{_END})[ \t]*$", re.IGNORECASE | re.MULTILINE)
"""What closes reasoning that the template of a model has opened: at the beginning or the end of a line."""

_FENCE = "```"
_BLANK = re.compile(r"\s+")

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>\s*final[^<]*<\|message\|>|<\|?(?:begin_of_solution|start_response)\|?>",
    re.IGNORECASE,
)
_TRAILER = re.compile(r"(?:<\|(?:return|end|end_of_solution)\|>|<\|END_RESPONSE\|>)\s*$", re.IGNORECASE)


class ReplyKind(StrEnum):
    """A kind of reply, as in files of a run."""

    ANSWER = "answer"
    CUT = "reasoning_cut"
    REASONING = "reasoning"
    REFUSAL = "refusal"
    FILTERED = "filtered"
    EMPTY = "empty"

    @property
    def answers(self) -> bool:
        """Whether such a reply continues the text."""
        return self in (ReplyKind.ANSWER, ReplyKind.CUT)


_WORDS = {
    ReplyKind.ANSWER: ("answer", "answers"),
    ReplyKind.CUT: ("answer behind reasoning", "answers behind reasoning"),
    ReplyKind.REASONING: ("reasoning without an answer", "reasoning without an answer"),
    ReplyKind.REFUSAL: ("refusal", "refusals"),
    ReplyKind.FILTERED: ("stopped by a filter", "stopped by a filter"),
    ReplyKind.EMPTY: ("without text", "without text"),
}


def counted_kinds(counts: Mapping[str, int]) -> str:
    """Numbers of replies by kind, in words; the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {_WORDS[ReplyKind(kind)][count != 1]}" for kind, count in ordered)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: the text to compare, or why there is none."""

    kind: ReplyKind
    text: str  # to compare; of a refusal its beginning

    @property
    def answer(self) -> str | None:
        """The text to compare; None if the reply is no answer."""
        return self.text if self.kind.answers else None


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a choice of a response holds."""

    text: str
    finish: str
    refused: str  # the field of a refusal
    reasoned: bool  # whether reasoning stands beside the text


def read_replies(
    value: Mapping[str, Any], api: Literal["completions", "chat"], prefix: str, reference: str
) -> list[Reply]:
    """The replies of a response, at least one.

    Args:
        value: the response.
        api: the interface.
        prefix: the beginning of the document, which the model was given.
        reference: the rest, with which a reply is compared.

    Raises:
        Fault: the response has no choice with a text or a reason for its end, or the server failed in all of them.
    """
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise Fault("answer has no choices")
    sound = [choice for choice in _ordered(choices) if isinstance(choice, dict) and _failure(choice) is None]
    if not sound:
        raise Fault(next(filter(None, map(_failure, choices)), "answer has no text"))
    reasoned = _reasoning_tokens(value) > 0
    usable = [one for choice in sound if (one := _read_choice(choice, api, reasoned)) is not None]
    if not usable:
        other = _OTHER_PLACES[api]
        raise Fault(f"answer has no text{other[1] if any(choice.get(other[0]) for choice in sound) else ''}")
    return [_judged(one, api, prefix, reference) for one in usable]


def unanswered(error: Exception) -> ReplyKind | None:
    """The kind of the replies that an error is in the place of; None if it is an error."""
    if isinstance(error, Refusal) and OUTPUT_LIMIT in error.words:
        return ReplyKind.REASONING
    return ReplyKind.FILTERED if getattr(error, "reason", None) == Reason.NO_ANSWER else None


def _ordered(choices: list[Any]) -> list[Any]:
    """Choices in the order of their indices, if each has one."""
    indices = [choice.get("index") if isinstance(choice, dict) else None for choice in choices]
    numbers = [index for index in indices if isinstance(index, int) and not isinstance(index, bool)]
    if len(numbers) < len(choices):
        return choices
    return [choices[place] for place in sorted(range(len(choices)), key=numbers.__getitem__)]


def _failure(choice: Any) -> str | None:
    """How a server failed in a choice, of which any text is half a reply; None if it did not."""
    if not isinstance(choice, dict):
        return None
    error, finish = choice.get("error"), choice.get("finish_reason")
    if error and not has_filter_error({"error": error}):
        message = error.get("message") or error.get("code") if isinstance(error, dict) else error
        return f"answer has an error: {one_line(str(message or error))[:SHOWN]}"
    broken = isinstance(finish, str) and finish.casefold() in _BROKEN
    return f"answer ended by {finish}" if broken else None


def _read_choice(choice: Mapping[str, Any], api: str, reasoned: bool) -> _Choice | None:
    """The parts of a choice; None if it has neither a text nor a reason for its end."""
    message = choice if api == "completions" else choice.get("message")
    holder = message if isinstance(message, dict) else {}
    content = holder.get("text" if api == "completions" else "content")
    content = [content] if isinstance(content, dict) else content
    finish = _finish(choice)
    refused = holder.get("refusal")
    elsewhere = content is None and bool(choice.get(_OTHER_PLACES[api][0]))
    if elsewhere or not (isinstance(content, (str, list)) or finish or isinstance(refused, str)):
        return None
    text, thought, declined = _joined(content) if isinstance(content, list) else (content or "", False, "")
    beside = any(holder.get(name) for name in _REASONING_FIELDS)
    return _Choice(
        text.encode("utf-8", "replace").decode() if isinstance(text, str) else "",
        finish,
        refused if isinstance(refused, str) else declined,
        reasoned or beside or thought,
    )


def _finish(choice: Mapping[str, Any]) -> str:
    """Why a choice ended, in lower case; a filter may be stated by an error, or by the server behind another one."""
    if has_filter_error({"error": choice.get("error")}):
        return _FILTERS[0]
    ends = [choice.get(name) for name in ("finish_reason", "native_finish_reason")]
    finish, native = (end.casefold() if isinstance(end, str) else "" for end in ends)
    return native if native.startswith(_FILTERS) else finish


def _joined(parts: Sequence[Any]) -> tuple[str, bool, str]:
    """The text of a content in parts, whether some are reasoning, and the text of a refusal."""
    text, thought, refused = "", False, ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif isinstance(part, dict):
            kind = part.get("type")
            if isinstance(part.get("refusal"), str):
                refused += part["refusal"]
            elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                text += part["text"]
            else:
                thought = thought or (isinstance(kind, str) and ("think" in kind or "reason" in kind))
    return text, thought, refused


def _reasoning_tokens(value: Mapping[str, Any]) -> int:
    """Tokens of reasoning that a response counts, >= 0."""
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return 0
    holders = [usage, *(usage.get(f"{name}_tokens_details") for name in ("completion", "output"))]
    counts = [holder.get("reasoning_tokens") for holder in holders if isinstance(holder, dict)]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _judged(choice: _Choice, api: str, prefix: str, reference: str) -> Reply:
    if choice.finish.startswith(_FILTERS):
        return Reply(ReplyKind.FILTERED, "")
    if choice.refused.strip() or choice.finish == "refusal":
        return Reply(ReplyKind.REFUSAL, one_line(choice.refused or choice.text)[:SHOWN])
    if choice.finish in _CALLS:
        return Reply(ReplyKind.EMPTY, "")
    text, cut = cut_reasoning(choice.text, f"{prefix}\n{reference}")
    if not text.strip():
        spent = cut or choice.reasoned or choice.finish in _LIMITS
        return Reply(ReplyKind.REASONING if spent else ReplyKind.EMPTY, "")
    if api == "chat" and is_refusal(text, reference):
        return Reply(ReplyKind.REFUSAL, one_line(text.strip())[:SHOWN])
    return Reply(ReplyKind.CUT if cut else ReplyKind.ANSWER, text)


def cut_reasoning(text: str, document: str) -> tuple[str, bool]:
    """A reply without reasoning at its beginning, and whether it had some; nothing remains where it does not end.

    Tags that the document has too are text, and stay. Takes time linear in the number of characters.
    """
    folded, start = document.casefold(), 0
    while (behind := _reasoning_end(text, start, folded)) is not None:
        start = behind
    cut = start > 0
    if not cut:
        closing = _first_closing(text)
        if closing is not None and (closing["begins"] or closing["ends"]).casefold() not in folded:
            cut, start = True, closing.end()
    rest = text[start:].lstrip()
    header = _HEADER.match(rest)
    if header is not None and header[0] not in document:
        cut, rest = True, rest[header.end() :]
    if not cut:
        return text, False
    return _TRAILER.sub("", rest).lstrip(), True


def _reasoning_end(text: str, start: int, folded: str) -> int | None:
    """Where the reasoning ends with which a text goes on, by character; None if it goes on with none.

    Args:
        text: the text.
        start: character at which it goes on.
        folded: the document in lower case.
    """
    blank = _BLANK.match(text, start)
    start = start if blank is None else blank.end()
    for begin, end in _PAIRS:
        opening = begin.match(text, start)
        if opening is None or opening[0].casefold() in folded:
            continue
        name = opening[1] if begin.groups else ""
        closing = re.compile(end.format(re.escape(name)) if name else end, begin.flags).search(text, opening.end())
        return len(text) if closing is None else closing.end()
    return None


def _first_closing(text: str) -> re.Match[str] | None:
    """The first tag of a text that closes reasoning and is in no block of code."""
    fences = last = 0
    for closing in _CLOSING.finditer(text):
        fences, last = fences + text.count(_FENCE, last, closing.start()), closing.start()
        if fences % 2 == 0:
            return closing
    return None


# --- the draws of a document


@dataclass(slots=True)
class DrawnReplies:
    """The draws of a document so far: their texts in order, None where there is no answer, and the other replies."""

    texts: list[str | None] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)  # draw, kind and text of replies that are no plain one

    def __len__(self) -> int:
        """Number of draws, answers or not."""
        return len(self.texts)

    @property
    def answered(self) -> bool:
        """Whether a draw is an answer."""
        return any(text is not None for text in self.texts)

    def add(self, replies: Iterable[Reply]) -> DrawnReplies:
        """Add replies, the next draws; these alone."""
        more = DrawnReplies()
        for draw, reply in enumerate(replies, len(self)):
            if reply.kind != ReplyKind.ANSWER:
                shown = "" if reply.kind.answers else reply.text
                more.replies.append({"draw": draw, "kind": str(reply.kind), "text": shown})
            more.texts.append(reply.answer)
        self.extend(more.texts, more.replies)
        return more

    def extend(self, texts: Sequence[str | None], replies: Sequence[Mapping[str, Any]]) -> None:
        """Add stored draws, the next ones."""
        self.texts += texts
        self.replies += map(dict, replies)

    def problem(self, draws: int) -> str | None:
        """Why none of the first `draws` draws is an answer, in words; None if one is."""
        if DrawnReplies(self.texts[:draws]).answered:
            return None
        counts = counted_kinds(count_kinds(self.replies, draws))
        shown = next((one["text"] for one in self.replies if one["text"]), "")
        first = f"; the first: {shown}" if shown else ""
        number = "its only draw is no answer" if draws == 1 else f"none of its {draws} draws is an answer"
        return f"{number}: {counts}{first}"


def count_kinds(replies: Iterable[Mapping[str, Any]], draws: int) -> Counter[str]:
    """Kind -> number of the first `draws` draws of a document that are no plain answer."""
    return Counter(str(one["kind"]) for one in replies if one["draw"] < draws)


def answers(texts: Sequence[str | None], draws: int) -> list[str]:
    """The answers among the first `draws` draws of a document; more may have been stored."""
    return [text for text in texts[:draws] if text is not None]


def note_replies(replies: Iterable[Mapping[str, Any]] | None, draws: int, notes: Notes, row: int) -> None:
    """Count the first `draws` draws of a document that are no answer, and those of which reasoning was cut.

    Args:
        replies: those of the document that are no plain answer; None for a model with weights.
        draws: number of draws that the run needs.
        notes: of the input.
        row: of the document.
    """
    kinds = count_kinds(replies or (), draws)
    for note, count in ((CUT_REASONING, kinds.pop(ReplyKind.CUT, 0)), (LEFT_OUT_DRAWS, kinds.total())):
        if count:
            notes.add(note, row, count)


# --- the start of a run

_REMEDIES = {
    ReplyKind.REASONING: (
        "the model spends its tokens on reasoning: switch it off by extra, such as extra: {reasoning_effort: none} or "
        "extra: {chat_template_kwargs: {enable_thinking: false}}, or raise the tokens of a draw to 1,024 by "
        "candidate_words: all"
    ),
    ReplyKind.REFUSAL: "the model refuses to continue texts: change instruction, or take api: completions",
    ReplyKind.FILTERED: "a filter of the endpoint stops its replies: switch it off there",
    ReplyKind.EMPTY: "its replies are empty: check api and name",
}


class FirstDocuments:
    """The documents that an endpoint is asked about until one of them has an answer: `FIRST` at a time.

    If none has, the run stops before it has paid for others.
    """

    def __init__(self, address: str) -> None:
        """Start with no document; `address` is that of the endpoint, for messages."""
        self.address = address
        self.passed = False  # whether a document has an answer, or all may lack one
        self._held = 0  # documents under way and without an answer
        self._kinds: Counter[str] = Counter()  # of the replies
        self._shown = ""  # the first refusal
        self._unanswered = 0
        self._changed = asyncio.Condition()
        self._noting, self._noted = threading.Lock(), False

    def note_earlier(self, read: Callable[[], Sequence[DrawnReplies]]) -> None:
        """Note the documents of earlier commands of which all draws are known, once, in any thread.

        Args:
            read: reads their draws.

        Raises:
            StopError: as `leave`.
        """
        with self._noting:
            if not self._noted and not self.passed:
                for draws in read():
                    self._held += not draws.answered
                    self._note(draws)
            self._noted = True
        self._check()

    async def enter(self) -> None:
        """Wait until another document may be asked about."""
        async with self._changed:
            while not self.passed and self._held >= FIRST:
                await self._changed.wait()
            self._held += 1

    async def leave(self, draws: DrawnReplies | None) -> None:
        """Note the draws of a document; None: not all are known, as where the endpoint failed.

        Raises:
            StopError: `FIRST` documents have no answer, and none has one.
        """
        async with self._changed:
            if draws is None:
                self._held -= 1
            else:
                self._note(draws)
            self._changed.notify_all()
        self._check()

    def _note(self, draws: DrawnReplies) -> None:
        if draws.answered:
            self.passed = True
        else:
            self._unanswered += 1
            self._kinds.update(one["kind"] for one in draws.replies)
            self._shown = self._shown or next((one["text"] for one in draws.replies if one["text"]), "")

    def _check(self) -> None:
        if self.passed or self._unanswered < FIRST:
            return
        kind = ReplyKind(self._kinds.most_common(1)[0][0])
        shown = f", the first: {self._shown}" if kind == ReplyKind.REFUSAL and self._shown else ""
        raise StopError(
            f"endpoint {self.address}: none of the first {FIRST} documents has an answer ({counted_kinds(self._kinds)}"
            f"{shown}); {_REMEDIES[kind]}; these replies are kept, and no other document was asked about "
            "(error_budget: 1 lets a run go on)",
            ExitCode.INCOMPLETE,
        )
