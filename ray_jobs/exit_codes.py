"""Exit codes that a command gives as 0, because Ray Jobs, KubeRay and other schedulers fail a job on any other."""

from __future__ import annotations

from pipeline.errors import ExitCode, UserError

_KNOWN = {code.value for code in ExitCode} - {ExitCode.DONE, ExitCode.INTERRUPTED}
_as_zero: frozenset[int] = frozenset()


def begin_codes() -> None:
    """Give every code as it is, from now on."""
    global _as_zero
    _as_zero = frozenset()


def give_as_zero(codes: str | None) -> None:
    """Give these exit codes as 0, from now on.

    Args:
        codes: such as `3,4`; None: all are given as they are.

    Raises:
        UserError: one of them is no exit code of the command, or is 0.
    """
    global _as_zero
    _as_zero = frozenset() if codes is None else frozenset(_known(part.strip()) for part in codes.split(","))


def given_code(code: int) -> int:
    """The exit code that the process ends with: 0 where that is wanted, else the true one."""
    return 0 if code in _as_zero else code


def given_line(code: int) -> str:
    """A line for the log where a code is given as 0; else nothing."""
    return f"seenset: exit code {code} is given as 0, for --exit-zero-on names it\n" if code in _as_zero else ""


def _known(part: str) -> int:
    if part.isascii() and part.isdecimal() and int(part[:9]) in _KNOWN:
        return int(part)
    reason = {
        "0": " (0 is 0 already)",
        "1": " (1 is an error of Seenset or its libraries, which nothing hides)",
        "130": " (130 is an interruption, after which nothing is done)",
    }
    codes = ", ".join(map(str, sorted(_KNOWN)))
    raise UserError(
        f"--exit-zero-on: {part[:40]!r} is not an exit code that can be given as 0{reason.get(part, '')}; "
        f"known: {codes}; several are written 3,4"
    )
