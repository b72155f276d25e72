"""Rendering of messages by a Jinja template in the sandbox of transformers, in this process or in one of its own.

The sandbox bounds neither time nor memory. The template of a model's own tokenizer is as trusted as the model; any
other one is rendered in a worker process, which is ended after `SECONDS` a conversation and replaced.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime
from typing import Any

from pipeline.errors import StopError, UserError, error_line

CLOCK = datetime(2024, 7, 26)
"""The date that templates read from the clock."""

SECONDS = 10.0
"""Most seconds of a rendering in a worker process."""

ENDED_AT_START = 5
"""Renderings that are ended, one after the other from the start, before the run stops."""

_STARTING = 120.0  # seconds, for the imports of a new worker process


class Template:
    """A compiled template.

    Raises:
        UserError: it is no Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compile it; `variables` are the special tokens that it may name."""
        from transformers.utils import chat_template_utils

        try:
            self._template: Any = chat_template_utils._cached_compile_jinja_template(source)
        except Exception as error:  # an error of Jinja, or of a filter at compilation
            raise UserError(f"the chat template cannot be compiled: {error_line(error)}") from None
        self._template.globals["strftime_now"] = CLOCK.strftime
        self._aliased = chat_template_utils._alias_reasoning_fields
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of some messages. Raises any exception of the template."""
        return str(
            self._template.render(
                messages=self._aliased([dict(message) for message in messages]),
                tools=None,
                documents=None,
                add_generation_prompt=False,
                date_string=f"{CLOCK:%d %b %Y}",
                **self._variables,
            )
        )


class IsolatedTemplate:
    """A template that is rendered in a worker process.

    Raises:
        UserError: it is no Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], file: str) -> None:
        """Compile it here; the worker process starts with the first rendering. `file` names it in messages."""
        Template(source, variables)
        self._given = source, dict(variables)
        self._file, self._ended = file, 0  # renderings that were ended before the first one that was not; -1 after it
        self._pool: ProcessPoolExecutor | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of some messages.

        Raises:
            TimeoutError: the template took longer than `SECONDS`, or its process ended.
            StopError: so did the first `ENDED_AT_START`.
            ValueError: the template raised an exception.
        """
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=self._given)
            self._pool.submit(_ready).result(_STARTING)
        try:
            return self._result(self._pool.submit(_render, [dict(message) for message in messages]))
        except FutureTimeoutError:
            raise self._end(f"takes more than {SECONDS:g} seconds") from None
        except BrokenExecutor:
            raise self._end("ends its process") from None

    def _result(self, future: Future[str]) -> str:
        """The rendered text; an answer of the process, also an exception, shows that the template ends."""
        try:
            return future.result(SECONDS)
        finally:
            if future.done() and not isinstance(future.exception(), BrokenExecutor):
                self._ended = -1

    def _end(self, problem: str) -> Exception:
        """End the worker process; the error of this conversation, or of all at the start."""
        self.close()
        if self._ended >= 0:
            self._ended += 1
        if self._ended < ENDED_AT_START:
            return TimeoutError(problem)
        return StopError(
            f"chat.template {self._file} {problem} for each of the first {ENDED_AT_START} conversations: correct it, "
            "or leave it out"
        )

    def close(self) -> None:
        """End the worker process."""
        if self._pool is not None:
            for process in list(self._pool._processes.values()):
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


_compiled: list[Template] = []
"""The template of a worker process."""


def _start(source: str, variables: Mapping[str, Any]) -> None:
    _compiled[:] = [Template(source, variables)]


def _ready() -> bool:
    return bool(_compiled)


def _render(messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return _compiled[0].render(messages)
    except Exception as error:  # exceptions of a template may not be picklable
        raise ValueError(error_line(error)) from None
