"""Conversations before their last answer, for a model that continues them, and that answer to compare with.

A model with weights continues the rendered conversation up to the last answer: what the chat template renders before it
in a training, and not what its `add_generation_prompt` would write. The tokens are those of the whole rendered
conversation, without one that reaches into the answer. An endpoint renders by itself and receives the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pipeline.corpus.chats import Conversation, Turn
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason
from pipeline.corpus.scripts import by_characters, count_units
from pipeline.models.chat_templates import ChatTemplate, RenderedChat
from pipeline.models.tokens import Tokens, count_words, tokenize_rendered

LEAST_WORDS = 2
"""Words of an answer that is compared: one word is written by chance, and is no run of words."""

_SENT = ("name", "tool_calls", "tool_call_id")
"""Fields of a message, beside role and content, that the interface of endpoints knows."""


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """A conversation before its last answer, and that answer."""

    before: str  # as a text
    answer: str  # the part that max_tokens keeps, without white space around it
    ids: Sequence[int] = ()  # tokens before the answer, at least one; empty for an endpoint
    ends: frozenset[int] = frozenset()  # token ids that end an answer
    messages: Sequence[Mapping[str, Any]] = ()  # before the answer, at least one; empty for a model with weights


def rendered_prompts(
    template: ChatTemplate, conversations: Sequence[Conversation], max_tokens: int
) -> list[AnswerPrompt | Unreadable]:
    """What a model with weights continues of conversations; the reason where it can continue nothing.

    Args:
        template: chat template of the model.
        conversations: conversations, each with an answer.
        max_tokens: maximum number of tokens of a rendered conversation; what lies behind is not compared.
    """
    made = [template.rendered(conversation) for conversation in conversations]
    texts = [one.text for one in made if isinstance(one, RenderedChat)]
    tokens = iter(tokenize_rendered(template.tokenizer, texts, max_tokens))
    return [
        one if isinstance(one, Unreadable) else _rendered_prompt(template, conversation, one, next(tokens), max_tokens)
        for conversation, one in zip(conversations, made, strict=True)
    ]


def _rendered_prompt(
    template: ChatTemplate, conversation: Conversation, made: RenderedChat, tokens: Tokens, max_tokens: int
) -> AnswerPrompt | Unreadable:
    """What a model continues of a rendered conversation."""
    if made.turns[-1] != conversation.answers[-1]:
        return Unreadable(Reason.NO_SPAN, "the chat template leaves out the last answer")
    start, stop = made.answers[-1][0][0], made.answers[-1][-1][1]
    if tokens.kept <= start:
        return template.cut_before(made, -1, max_tokens)
    count = sum(1 for _ in takewhile(lambda span: span[1] <= start, tokens.offsets))
    if not count:
        return Unreadable(Reason.TOO_SHORT, "0 tokens before the last answer; a model continues at least 1")
    answer = made.text[start : min(stop, tokens.kept)].strip()
    return _checked(AnswerPrompt(made.text[:start], answer, tokens.ids[:count], template.ends), max_tokens)


def sent_prompt(conversation: Conversation, max_tokens: int) -> AnswerPrompt | Unreadable:
    """What an endpoint is asked about a conversation; the reason if it cannot be asked.

    Args:
        conversation: conversation with an answer.
        max_tokens: maximum number of words of all contents up to the answer; what lies behind is not compared.
    """
    last = conversation.answers[-1]
    before = "".join(f"{turn.content}\n\n" for turn in conversation.turns[:last])
    messages = [_message(turn) for turn in conversation.turns[:last]]
    if not messages:
        return Unreadable(Reason.TOO_SHORT, "0 messages before the last answer; an endpoint answers at least 1")
    try:
        json.dumps(messages, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:  # a value of tool_calls that JSON or Unicode does not have
        return Unreadable(Reason.NOT_CHAT, f"a message before the last answer cannot be sent as JSON: {error}")
    text = before + conversation.turns[last].content
    kept = count_words([text], max_tokens)[0].kept
    if kept <= len(before):
        words = count_units(before, by_characters(text))
        message = f"max_tokens, which is {max_tokens:,} here, ends before the last answer behind {words:,} words"
        return Unreadable(Reason.TOO_SHORT, message)
    return _checked(AnswerPrompt(before, text[len(before) : kept].strip(), messages=messages), max_tokens)


def _message(turn: Turn) -> dict[str, Any]:
    """A message as endpoints receive it: with its role, its content and the fields of tools."""
    return {key: value for key, value in turn.message().items() if key in ("role", "content", *_SENT)}


def _checked(prompt: AnswerPrompt, max_tokens: int) -> AnswerPrompt | Unreadable:
    """A prompt whose answer is long enough to be compared."""
    words = count_units(prompt.answer)
    if words >= LEAST_WORDS:
        return prompt
    noun = "character" if by_characters(prompt.answer) else "word"
    stated = f"{words} {noun}{'s' * (words != 1)} of the last answer within max_tokens, which is {max_tokens:,} here"
    return Unreadable(Reason.TOO_SHORT, f"{stated}; a comparison needs {LEAST_WORDS}")
