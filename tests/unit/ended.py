"""How a command ends in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_jobs.cli import main


def exit_of(*arguments: str | Path) -> int:
    """The exit code of a command, which lets no other error through."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return int(end.value.code or 0)


def ended(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a command."""
    capsys.readouterr()
    code = exit_of(*arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def here(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    """The output and the errors of a command that ends with a code."""
    status, output, errors = ended(capsys, *arguments)
    assert status == code, errors
    return output, errors


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """The one line of a user error."""
    _, errors = here(capsys, *arguments, code=code)
    assert errors.count("\n") == 1, errors
    assert errors.startswith("seenset: ")
    assert len(errors) < 2100, "more than a screen"
    return errors


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    """The one line of the error that a command ends with, behind the lines of its work."""
    _, errors = here(capsys, *arguments, code=code)
    (line,) = [line for line in errors.splitlines() if line.startswith("seenset: ")]
    return line
