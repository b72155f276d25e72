"""Rendering of messages by a Jinja template in the sandbox of transformers, in this process or in one of its own.

The sandbox bounds neither time nor memory. The template of a model's own tokenizer is as trusted as the model; any
other one is compiled and rendered in a worker process, for Jinja computes what is constant at the compilation. The
process is ended and replaced where a rendering takes more than `SECONDS`, or more than `MEMORY` on Linux.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import StopError, UserError, error_line

CLOCK = datetime(2024, 7, 26)
"""The date that templates read from the clock."""

SECONDS = 10.0
"""Most seconds of a rendering in a worker process."""

MEMORY = 1 << 30
"""Most bytes of memory of a rendering in a worker process, on Linux."""

CHARACTERS = 1 << 27
"""Most characters that a template of a file renders of a conversation."""

ENDED_AT_START = 5
"""Renderings that are ended, one after the other from the start, before the run stops."""

_STARTING = 120.0  # seconds, for the imports of a new worker process


class RenderingLimitError(Exception):
    """A rendering that needs more than a limit: the predicate of a sentence about the template."""


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
        except MemoryError:
            raise
        except Exception as error:  # an error of Jinja, or of a filter at compilation
            raise UserError(f"the chat template cannot be compiled: {error_line(error)}") from None
        self._template.globals["strftime_now"] = CLOCK.strftime
        self._aliased = chat_template_utils._alias_reasoning_fields
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of some messages, with schemas of functions. Raises any exception of the template."""
        return str(
            self._template.render(
                messages=self._aliased([dict(message) for message in messages]),
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=False,
                date_string=f"{CLOCK:%d %b %Y}",
                **self._variables,
            )
        )


class IsolatedTemplate:
    """A template that is compiled and rendered in a worker process.

    Raises:
        UserError: it is no Jinja, or its compilation needs more than a limit.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], file: str) -> None:
        """Start the worker process and compile the template in it. `file` names it in messages."""
        self._given = source, dict(variables)
        self._file, self._ended = file, 0  # renderings that were ended before the first one that was not; -1 after it
        self._pool: ProcessPoolExecutor | None = None
        try:
            self._start()
        except RenderingLimitError as error:
            raise UserError(f"chat.template {file} {error} to compile: correct it, or leave it out") from None
        except ValueError as error:
            self.close()
            raise UserError(str(error)) from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of some messages, with schemas of functions.

        Raises:
            RenderingLimitError: the template took more than `SECONDS`, `MEMORY` or `CHARACTERS`, or its process ended.
            StopError: so did the first `ENDED_AT_START`.
            ValueError: the template raised an exception.
        """
        try:
            if self._pool is None:
                self._start()
            text = self._result(_render, [dict(message) for message in messages], [dict(tool) for tool in tools])
        except RenderingLimitError as error:
            raise self._counted(error) from None
        self._ended = -1
        return text

    def _start(self) -> None:
        """Start a worker process with the template. Raises as `_result`."""
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._pool.submit(_limit_memory, MEMORY).result(_STARTING)
        self._result(_compile, *self._given)

    def _result(self, function: Callable[..., str], *arguments: Any) -> str:
        """The result of a function in the worker process, which is ended if it needs more than a limit.

        Raises:
            RenderingLimitError: it does.
            ValueError: it raised another exception.
        """
        assert self._pool is not None
        try:
            return self._pool.submit(function, *arguments).result(SECONDS)
        except FutureTimeoutError:
            problem = f"takes more than {SECONDS:g} seconds"
        except MemoryError:
            problem = f"takes more than {MEMORY / 2**30:g} GiB of memory"
        except OverflowError:
            problem = f"renders more than {CHARACTERS:,} characters"
        except BrokenExecutor:
            problem = "ends its process"
        except ValueError:
            self._ended = -1  # an answer of the process shows that the template ends
            raise
        self.close()
        raise RenderingLimitError(problem)

    def _counted(self, error: RenderingLimitError) -> Exception:
        """The error of this conversation, or of all at the start."""
        if self._ended >= 0:
            self._ended += 1
        if self._ended < ENDED_AT_START:
            return error
        return StopError(
            f"chat.template {self._file} {error} for each of the first {ENDED_AT_START} conversations: correct it, "
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


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to what it has after its imports, and `more` bytes."""
    from transformers.utils import chat_template_utils  # noqa: F401 - what a compilation needs

    if sys.platform == "linux":
        import resource

        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))


def _compile(source: str, variables: Mapping[str, Any]) -> str:
    try:
        _compiled[:] = [Template(source, variables)]
    except UserError as error:
        raise ValueError(str(error)) from None
    return ""


def _render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        text = _compiled[0].render(messages, tools)
    except MemoryError:
        raise
    except Exception as error:  # exceptions of a template may not be picklable
        raise ValueError(error_line(error)) from None
    if len(text) > CHARACTERS:
        raise OverflowError
    return text
