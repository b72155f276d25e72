"""Conversations: reading of messages from the values of a row, and why a row has none that can be scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.reasons import Reason

ASSISTANT = "assistant"
_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_ROLE_OF = {**{role: role for role in _ROLES}, "human": "user", "gpt": ASSISTANT}
_CONTENT_KEYS = ("role", "content", "from", "value")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str  # one of system, developer, user, assistant, tool
    content: str
    others: Mapping[str, Any] = field(default_factory=dict)  # other fields, such as tool_calls, for the template

    def message(self, content: str | None = None) -> dict[str, Any]:
        """The message as templates receive it, perhaps with another content."""
        return {"role": self.role, **self.others, "content": self.content if content is None else content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a document. At least one is of the assistant, and the last of these is not blank."""

    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The contents in order, a blank line between them: the text of the document without a template."""
        return "\n\n".join(turn.content for turn in self.turns)


def read_conversation(value: Any) -> Conversation | Unreadable:
    """The conversation in the value of a column of messages.

    Args:
        value: list of `{role, content}` or of `{from, value}`, or a JSON text of such a list.

    Returns:
        The conversation; the reason, with the number of the turn from 1, if there is none that can be scored.
    """
    if isinstance(value, Unreadable):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _not_chat("text that is no JSON list of messages")
    if not isinstance(value, list):
        what = "no messages" if value is None else f"{type(value).__name__}, not a list of messages"
        return _not_chat(what)
    turns = []
    for number, message in enumerate(value, 1):
        turn = _read_turn(message)
        if isinstance(turn, str):
            return _not_chat(f"turn {number}: {turn}")
        turns.append(turn)
    return _checked(turns)


def _checked(turns: Sequence[Turn]) -> Conversation | Unreadable:
    """The conversation of some turns, if the assistant answers in it."""
    answers = [number for number, turn in enumerate(turns, 1) if turn.role == ASSISTANT]
    if not answers:
        return _not_chat(f"{len(turns)} turns, none of the assistant")
    if not turns[answers[-1] - 1].content.strip():
        return _not_chat(f"turn {answers[-1]}: the last answer is empty")
    return Conversation(tuple(turns))


def _read_turn(message: Any) -> Turn | str:
    """The turn of a message, or why it has none."""
    if not isinstance(message, Mapping):
        return f"{type(message).__name__}, not a message with role and content"
    given = {name: value for name, value in message.items() if value is not None}
    name, key = ("role", "content") if "role" in given else ("from", "value")
    if name not in given:
        return f"no role (fields: {', '.join(map(str, message)):.80})"
    role = _ROLE_OF.get(given[name]) if isinstance(given[name], str) else None
    if role is None:
        return f"unknown role {given[name]!r:.40} (roles: {', '.join(_ROLE_OF)})"
    content = _read_content(given.get(key, "" if "tool_calls" in given else None))
    if content is None:
        return f"{key} is no text, nor a list of parts of type text"
    return Turn(role, content, {one: value for one, value in given.items() if one not in _CONTENT_KEYS})


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
