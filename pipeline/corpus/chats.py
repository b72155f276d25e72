"""Conversations: reading of messages from the values of a row, and why a row has none that can be scored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason

ASSISTANT = "assistant"
_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_ROLE_OF = {**{role: role for role in _ROLES}, "human": "user", "gpt": ASSISTANT}
_ZERO = re.compile(r"\s*[+-]?(0+\.?0*|\.0+)(e[+-]?\d+)?\s*", re.IGNORECASE)
_CONTENT_KEYS = ("role", "content", "from", "value")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str  # one of system, developer, user, assistant, tool
    content: str
    others: Mapping[str, Any] = field(default_factory=dict)  # other fields, such as tool_calls, for the template

    @property
    def blank(self) -> bool:
        """Whether the content is blank."""
        return not self.content.strip()

    @property
    def unscored(self) -> bool:
        """Whether its `weight` is 0, a number or a text of it: trainers leave out such answers."""
        weight = self.others.get("weight")
        return bool(_ZERO.fullmatch(weight)) if isinstance(weight, str) else weight == 0

    def message(self, content: str | None = None) -> dict[str, Any]:
        """The message as templates receive it, perhaps with another content."""
        return {"role": self.role, **self.others, "content": self.content if content is None else content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a document. At least one is an answer to score, and the last of these is not blank."""

    turns: tuple[Turn, ...]
    prompt: int = 0  # number of turns of a prompt, whose answers are not scored
    tools: tuple[Mapping[str, Any], ...] = ()  # schemas of functions, for the template

    @property
    def text(self) -> str:
        """The contents in order, a blank line between them: the text of the document without a template."""
        return "\n\n".join(turn.content for turn in self.turns)

    @property
    def answers(self) -> list[int]:
        """The numbers from 0 of the turns to score: of the assistant, behind the prompt, with a weight or none."""
        turns = enumerate(self.turns)
        return [at for at, turn in turns if turn.role == ASSISTANT and at >= self.prompt and not turn.unscored]

    @property
    def sides(self) -> tuple[str, str]:
        """All contents but the answers to score, and these answers."""
        scored = {*self.answers}
        return (
            "\n\n".join(turn.content for number, turn in enumerate(self.turns) if number not in scored),
            "\n\n".join(turn.content for number, turn in enumerate(self.turns) if number in scored),
        )

    @property
    def answered(self) -> bool:
        """Whether the last answer to score is not blank."""
        return not self.turns[self.answers[-1]].blank

    def replaced(self, contents: Sequence[str]) -> Conversation:
        """The conversation with other contents of the first turns."""
        turns = [replace(turn, content=content) for turn, content in zip(self.turns, contents, strict=False)]
        return replace(self, turns=(*turns, *self.turns[len(turns) :]))

    def changed(self, change: Callable[[str], str]) -> Conversation:
        """The conversation with a change of every content."""
        return replace(self, turns=tuple(replace(turn, content=change(turn.content)) for turn in self.turns))


def read_conversation(value: Any, tools: Any = None) -> Conversation | Unreadable:
    """The conversation in the value of a column of messages.

    Args:
        value: list of `{role, content}` or of `{from, value}`, or a JSON text of such a list.
        tools: list of schemas of functions, or a JSON text of it; None: there are none.

    Returns:
        The conversation; the reason, with the number of the turn from 1, if there is none that can be scored.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _not_chat("text that is no JSON list of messages (prompt with completion reads columns of texts)")
    turns = _read_turns(value, "messages")
    return turns if isinstance(turns, Unreadable) else _checked(turns, tools=tools)


def read_completion(prompt: Any, completion: Any, tools: Any = None) -> Conversation | Unreadable:
    """The conversation of a prompt and its completion, of which only the completion is scored.

    Args:
        prompt: text of the user, or list of messages.
        completion: text of the assistant, or list of messages.
        tools: as of `read_conversation`.
    """
    made = []
    for value, role in ((prompt, "user"), (completion, ASSISTANT)):
        messages = [{"role": role, "content": value}] if isinstance(value, str) else value
        turns = _read_turns(messages, "prompt" if role == "user" else "completion")
        if isinstance(turns, Unreadable):
            return turns
        made.append(turns)
    return _checked([*made[0], *made[1]], len(made[0]), tools)


def _read_turns(value: Any, what: str) -> list[Turn] | Unreadable:
    """The turns of a list of messages."""
    if isinstance(value, Unreadable):
        return value
    if not isinstance(value, list):
        return _not_chat(f"no {what}" if value is None else f"{type(value).__name__}, not a list of messages")
    turns = []
    for number, message in enumerate(value, 1):
        turn = _read_turn(message)
        if isinstance(turn, str):
            return _not_chat(f"turn {number}: {turn}")
        turns.append(turn)
    return turns


def _checked(turns: Sequence[Turn], prompt: int = 0, tools: Any = None) -> Conversation | Unreadable:
    """The conversation of some turns, if the assistant answers in it behind the prompt."""
    schemas = _read_tools(tools)
    if isinstance(schemas, Unreadable):
        return schemas
    conversation = Conversation(tuple(turns), prompt, schemas)
    if not conversation.answers:
        unscored = any(turn.role == ASSISTANT and turn.unscored for turn in turns)
        others = f"{' behind the prompt' * bool(prompt)}{' with a weight other than 0' * unscored}"
        return _not_chat(f"{len(turns)} turns, none of the assistant{others}")
    if not conversation.answered:
        return _not_chat(f"turn {conversation.answers[-1] + 1}: the last answer is empty")
    return conversation


def _read_tools(value: Any) -> tuple[Mapping[str, Any], ...] | Unreadable:
    """The tools of a conversation, without nulls: columns of objects hold them in the place of missing fields."""
    if isinstance(value, Unreadable):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return _not_chat("tools are a text that is no JSON list")
    if value is None:
        return ()
    if not isinstance(value, list):
        return _not_chat(f"tools are {type(value).__name__}, not a list of schemas of functions")
    for number, tool in enumerate(value, 1):
        if not isinstance(tool, Mapping):
            kind = "null" if tool is None else type(tool).__name__
            return _not_chat(f"tool {number} of {len(value)} is {kind}, not the schema of a function")
    return tuple(_without_nulls(tool) for tool in value)


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null, at any depth of mappings and lists."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _read_turn(message: Any) -> Turn | str:
    """The turn of a message, or why it has none."""
    if isinstance(message, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in message):
        message = dict(message)  # of a map of Arrow
    if not isinstance(message, Mapping):
        return f"{type(message).__name__}, not a message with role and content"
    given = {name: value for name, value in message.items() if value is not None}
    name, key = ("role", "content") if "role" in given else ("from", "value")
    if name not in given:
        nulls = [key for key in ("role", "from") if key in message]
        return f"{nulls[0]} is null" if nulls else f"no role (fields: {', '.join(map(str, message)):.80})"
    role = _ROLE_OF.get(given[name]) if isinstance(given[name], str) else None
    if role is None:
        return f"unknown role {given[name]!r:.40} (roles: {', '.join(_ROLE_OF)})"
    content = _read_content(given.get(key, "" if "tool_calls" in given else None))
    if content is None:
        return f"{key} is no text, nor a list of parts of type text"
    return Turn(role, content, {one: _without_nulls(value) for one, value in given.items() if one not in _CONTENT_KEYS})


def _read_content(content: Any) -> str | None:
    """The text of a content; None if it has another part than texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None


def _not_chat(message: str) -> Unreadable:
    return Unreadable(Reason.NOT_CHAT, message)
