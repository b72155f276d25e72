"""Keys of endpoints: taken out of the environment, which every child process gets, and masked in all that comes back.

An endpoint knows the key that it is sent. One that writes it into its answers, plain or encoded, would have it land in
the files of a run; `masked` replaces it before anything else reads an answer.
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

from pipeline.config.models import EndpointConfig

MASK = "***"
SHORTEST_SECRET = 8
"""Characters from which on a key is masked in the texts of answers too; shorter ones, such as EMPTY, are words."""

_withdrawn: dict[str, str] = {}  # variable -> key, of those that the environment no longer holds

for _library in ("httpx2", "httpcore2"):  # below this level they tell each header of an answer
    logging.getLogger(_library).setLevel(logging.WARNING)


def key_of(config: EndpointConfig) -> str:
    """The key of an endpoint, from its environment variable (read nowhere else); empty if it is not set."""
    return (os.environ.get(config.key_variable) or _withdrawn.get(config.key_variable, "")).strip()


def withdraw_keys(models: Sequence[object]) -> list[str]:
    """Take the keys of those models that are endpoints out of the environment: this process alone keeps them.

    Returns:
        The variables that held one.
    """
    variables = {model.key_variable for model in models if isinstance(model, EndpointConfig)} & os.environ.keys()
    _withdrawn.update((variable, os.environ.pop(variable)) for variable in variables)
    return sorted(variables)


def give_keys_back() -> None:
    """Give all that was withdrawn back to the environment, for whatever this process does after a command."""
    while _withdrawn:
        variable, key = _withdrawn.popitem()
        os.environ.setdefault(variable, key)


@contextmanager
def keys_withdrawn(models: Sequence[object]) -> Iterator[None]:
    """Withdraw the keys of models, and give back to the environment after the block what it held before."""
    variables = withdraw_keys(models)
    try:
        yield
    finally:
        for variable in variables:
            os.environ.setdefault(variable, _withdrawn.pop(variable))


def masked(value: Any, config: EndpointConfig) -> Any:
    """A JSON value of an endpoint in whose texts the key, plain or encoded, is replaced by ***."""
    key = key_of(config)
    return _masked(value, spellings(key)) if len(key) >= SHORTEST_SECRET else value


def without_key(text: str, config: EndpointConfig) -> str:
    """A message of an endpoint with the key, however short, replaced by ***."""
    key = key_of(config)
    return spellings(key).sub(MASK, text) if key else text


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
    """What matches a key: plain or percent-encoded, in hexadecimal, or in base64 within whatever was encoded.

    Args:
        key: not empty; one that is shorter than a secret is matched plain alone.
    """
    if len(key) < SHORTEST_SECRET:
        return re.compile(re.escape(key))
    data = key.encode()
    plain = "".join(f"(?:{re.escape(character)}|{_percent(character)})" for character in key)
    separator = r"(?:[\s:,;\-]|0[xX]|\\x|\\u00|&#x|%)*"
    digits = separator.join("".join(f"[{d.lower()}{d.upper()}]" for d in f"{byte:02x}") for byte in data)
    return re.compile("|".join([plain, digits, *(rf"{part}[\w+/=-]?={{0,2}}" for part in _base64(data))]))


def _percent(character: str) -> str:
    return "".join("%(?:25)?" + "".join(f"[{d.lower()}{d.upper()}]" for d in f"{b:02x}") for b in character.encode())


def _base64(data: bytes) -> Iterator[str]:
    """Patterns of what base64, ordinary or for URLs, makes of data after none, one or two other bytes."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        whole = encoded[(0, 2, 3)[before] : (before + len(data)) * 8 // 6]  # what the bytes beside it do not change
        if whole:
            yield r"\s*".join("[+-]" if sign == "+" else "[/_]" if sign == "/" else sign for sign in whole)
