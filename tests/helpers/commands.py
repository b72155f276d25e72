"""The command in this process: how it ends, and what it prints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from ray_jobs.cli import main


def ended(*arguments: str | Path) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return int(end.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a command."""
    capsys.readouterr()
    code = ended(*arguments)
    return code, *capsys.readouterr()


def here(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """Output and errors of a command that ends with this code."""
    status, output, errors = printed(capsys, *arguments)
    assert status == code, errors
    return output, errors


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """The one line of an error, beside which only a run prints anything."""
    output, errors = here(capsys, *arguments, code=code)
    assert output == "" or arguments[0] == "run"
    assert errors.count("\n") == 1, errors
    assert errors.startswith("seenset: ")
    assert len(errors) < 2100, "more than a screen"
    return errors


def user_error(function: Callable[..., object], *arguments: Any, **settings: Any) -> str:
    """The one line of the user error that a call raises."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def in_a_process(work: Callable[[], object]) -> int:
    """The exit status of a process that does work which may kill it."""
    import torch

    if (child := os.fork()) == 0:
        status = 9
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def attempts(work: Callable[[], object]) -> int:
    """How many processes it takes until one ends as it should."""
    for attempt in range(1, 30):
        if (status := in_a_process(work)) == 0:
            return attempt
        assert status == 1
    raise AssertionError("never ended")
