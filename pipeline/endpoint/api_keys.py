"""Secrets of endpoints, keys and values of headers: removed from the environment, and masked in all answers.

Child processes inherit the environment. An endpoint receives its secrets and may repeat them in its answers, plain or
encoded, which are written to files of a run; `masked` replaces them before any other code reads an answer. A header may
hold a version, a title or a region instead, which stand in texts too: these are replaced in messages alone.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from pipeline.config.models import EndpointConfig, looks_like_key, names_secret
from pipeline.errors import one_line

MASK = "***"
SHORTEST_SECRET = 8
"""Minimum length of a key that is masked in texts of answers; shorter ones, such as EMPTY, are words."""

_withdrawn: dict[str, str] = {}  # variable -> key, for variables removed from the environment

for _library in ("httpx2", "httpcore2"):  # below this level they log each header of an answer
    logging.getLogger(_library).setLevel(logging.WARNING)


def read_secret(variable: str) -> str:
    """The value of an environment variable with a secret (the only place that reads it); empty if it is not set."""
    return (os.environ.get(variable) or _withdrawn.get(variable, "")).strip()


def _secrets(config: EndpointConfig) -> list[str]:
    """The secrets of an endpoint, the longest first, which may contain others; no short values of plain headers."""
    secrets = {read_secret(config.key_variable)}
    for name, variable in config.headers.items():
        value = read_secret(variable)
        secrets |= {value} if names_secret(name) or len(value) >= SHORTEST_SECRET else set()
    return sorted(filter(None, secrets), key=lambda one: (-len(one), one))


def _masked_secrets(config: EndpointConfig) -> list[str]:
    """What is masked in texts of answers: keys, and of values of headers those that are secrets by name or by look."""
    keys = {read_secret(config.key_variable)}
    for name, variable in config.headers.items():
        value = read_secret(variable)
        keys |= {value} if names_secret(name) else {word for word in value.split() if looks_like_key(word)}
    return sorted((key for key in keys if len(key) >= SHORTEST_SECRET), key=lambda one: (-len(one), one))


def withdraw_keys(models: Sequence[object]) -> list[str]:
    """Remove the secrets of models that are endpoints from the environment; only this process keeps them.

    Returns:
        The variables that held one.
    """
    endpoints = [model for model in models if isinstance(model, EndpointConfig)]
    variables = {variable for model in endpoints for variable in model.variables} & os.environ.keys()
    _withdrawn.update((variable, os.environ.pop(variable)) for variable in variables)
    return sorted(variables)


def give_keys_back() -> None:
    """Restore all removed keys in the environment, for code of this process after a command."""
    while _withdrawn:
        variable, key = _withdrawn.popitem()
        os.environ.setdefault(variable, key)


@contextmanager
def keys_withdrawn(models: Sequence[object]) -> Iterator[None]:
    """Remove the keys of models from the environment for the length of the block."""
    variables = withdraw_keys(models)
    try:
        yield
    finally:
        for variable in variables:
            os.environ.setdefault(variable, _withdrawn.pop(variable))


def masked(value: Any, config: EndpointConfig) -> Any:
    """A JSON value of an endpoint with its secrets, plain or encoded, replaced by *** in its texts."""
    for secret in _masked_secrets(config):
        value = _masked(value, spellings(secret))
    return value


def without_key(text: str, config: EndpointConfig) -> str:
    """A message of an endpoint with its secrets, of any length, replaced by ***.

    A value of less than `SHORTEST_SECRET` characters in a header without the name of a secret is a version or a region.
    """
    for secret in _secrets(config):
        text = spellings(secret).sub(MASK, text)
    return text


def error_without_key(error: Exception, config: EndpointConfig, most: int) -> str:
    """The message of an error, which may quote an answer, as `error_line` gives it, with the key replaced by ***."""
    return one_line(without_key(str(error), config)[:most])


def _masked(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(MASK, value)
    if isinstance(value, list):
        return [_masked(entry, pattern) for entry in value]
    if isinstance(value, dict):
        return {pattern.sub(MASK, name): _masked(entry, pattern) for name, entry in value.items()}
    return value


@lru_cache(maxsize=16)
def spellings(key: str) -> re.Pattern[str]:
    """A pattern that matches a key: plain, percent-encoded, hexadecimal, or in base64 as part of any encoded data.

    Args:
        key: not empty; a key shorter than `SHORTEST_SECRET` is matched only as plain text, and as no part of a word.
    """
    if len(key) < SHORTEST_SECRET:
        return re.compile(rf"(?<![A-Za-z0-9]){re.escape(key)}(?![A-Za-z0-9])")
    data = key.encode()
    plain = "".join(f"(?:{re.escape(character)}|{_percent(character)})" for character in key)
    separator = r"(?:[\s:,;\-]|0[xX]|\\x|\\u00|&#x|%)*"
    digits = separator.join("".join(f"[{d.lower()}{d.upper()}]" for d in f"{byte:02x}") for byte in data)
    return re.compile("|".join([plain, digits, *(rf"{part}[\w+/=-]?={{0,2}}" for part in _base64(data))]))


def _percent(character: str) -> str:
    return "".join("%(?:25)?" + "".join(f"[{d.lower()}{d.upper()}]" for d in f"{b:02x}") for b in character.encode())


def _base64(data: bytes) -> Iterator[str]:
    """Patterns of standard and URL-safe base64 of data after zero, one or two other bytes."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        whole = encoded[(0, 2, 3)[before] : (before + len(data)) * 8 // 6]  # independent of the adjacent bytes
        if whole:
            yield r"\s*".join("[+-]" if sign == "+" else "[/_]" if sign == "/" else sign for sign in whole)
