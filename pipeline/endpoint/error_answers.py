"""Errors in the answers of endpoints: their words, and whether a filter stopped the content of a request.

Servers nest the error of a server behind them, state an error with status 200, or name the cause in a code alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.endpoint.transport import Received

OUTPUT_LIMIT = "output limit was reached"
"""Part of an error of a model whose reasoning took all tokens of an answer."""

# these decide which documents are `no_answer`: a change needs another `replies.RULES` and `ask_log_probs.CHECKS`
FILTER_CODES = frozenset(
    {
        *("contentfilter", "responsibleaipolicyviolation", "contentpolicyviolation", "datainspectionfailed"),
        *("invalidprompt", "moderationblocked", "contentblocked"),
    }
)
"""Codes of errors that a filter of content gives, in lower case without underscores."""

_FILTER_WORDS = re.compile(
    r"content[ _-](?:filter|management|moderation|policy|exists risk)|inappropriate[ _-]content|safety_check"
    r"|\b(?:content|input|prompt|request|response|output|message)s?\b[^.:]{0,40}\b(?:flagged|filtered|"
    r"violat\w+[^.:]{0,40}\b(?:polic|guideline|terms|safety))",
    re.IGNORECASE,
)
_KEY_WORDS = re.compile(r"\bapi[ _-]?keys?\b|\bcredentials?\b", re.IGNORECASE)
_PARTS = ("error", "message", "detail")  # in the order in which they are shown
_DEEPEST = 5  # errors in errors


def response_words(response: Received) -> str:
    """The words of an error that has a status of its own."""
    try:
        value = response.json()
        return error_words(value[0] if isinstance(value, list) and len(value) == 1 else value)
    except (ValueError, RecursionError):
        return response.text


def error_words(value: Any, deep: int = 0) -> str:
    """The words of an error: its code and message, the parameter that it names, and the error behind it.

    Args:
        value: the JSON value of the error.
        deep: errors around it.
    """
    if not isinstance(value, dict) or deep == _DEEPEST:
        return value if isinstance(value, str) else json.dumps(value)
    parts = [error_words(part, deep + 1) for name in _PARTS if (part := value.get(name)) and part is not True]
    parts += [_behind(value.get("metadata"), deep)]
    text = ": ".join(dict.fromkeys(filter(None, parts))) or json.dumps(value)
    code, name = value.get("code"), value.get("param")
    if isinstance(name, str) and name and f"'{name}'" not in text:
        text += f" ({name!r})"
    named = isinstance(code, str) and code and not code.isdigit() and " " not in code and code not in text
    return f"{code}: {text}" if named else text


def _behind(metadata: Any, deep: int) -> str:
    """The words of the error of a provider behind a router."""
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    if not isinstance(raw, str):
        return "" if raw is None else error_words(raw, deep + 1)
    try:
        return error_words(json.loads(raw), deep + 1)
    except (ValueError, RecursionError):
        return raw


def error_in(value: Mapping[str, Any]) -> str:
    """The words of the error that an answer with status 200 has in the place of choices; empty if it has none."""
    base = value.get("base_resp")
    if isinstance(base, dict) and base.get("status_code") and isinstance(base.get("status_msg"), str):
        return str(base["status_msg"])
    error = _holder(value).get("error")
    if not error:
        return ""
    try:
        return error_words({"error": error, "message": value.get("message"), "detail": value.get("detail")})
    except RecursionError:
        return "too deep to show"


def _holder(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What has the error of an answer: the answer itself, or its first choice."""
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return value if value.get("error") else first


def is_filtered(response: Received) -> bool:
    """Whether an error states, by its code or in words, that a filter stopped the content of a request."""
    try:
        value = response.json()
    except (ValueError, RecursionError):
        value = None
    return _states_filter(value, response_words(response))


def has_filter_error(value: Mapping[str, Any]) -> bool:
    """Whether an answer with status 200 has an error in the place of choices that states such a filter."""
    words = error_in(value)
    return bool(words) and _states_filter(_holder(value), words)


def _states_filter(value: Any, words: str) -> bool:
    codes = [code.replace("_", "").casefold() for code in _codes(value)]
    return bool(FILTER_CODES.intersection(codes)) or bool(_FILTER_WORDS.search(words[:500]))


def _codes(value: Any) -> Iterator[str]:
    """The codes and types of an error and of the error in it."""
    error = value.get("error", value) if isinstance(value, dict) else None
    inner = error.get("innererror") if isinstance(error, dict) else None
    for one in (value, error, inner):
        names = (one.get("code"), one.get("type")) if isinstance(one, dict) else ()
        yield from (name for name in names if isinstance(name, str))


def names_key(words: str) -> bool:
    """Whether the words of an error name the key of a request."""
    return _KEY_WORDS.search(words) is not None
