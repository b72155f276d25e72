"""How a command ends in this process."""

from __future__ import annotations

import pytest

from ray_jobs.cli import main


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, the output and the errors of a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    output = capsys.readouterr()
    return int(end.value.code or 0), output.out, output.err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line of a user error."""
    status, _, errors = ended(capsys, *arguments)
    assert (status, errors.count("\n")) == (code, 1), errors
    assert errors.startswith("seenset: ")
    assert len(errors) < 2100, "more than a screen"
    return errors
