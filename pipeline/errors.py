"""The user error, the exit codes of the command, how messages print names, and errors of storage and of full disks."""

from __future__ import annotations

import difflib
import errno
import unicodedata
from collections.abc import Iterable
from enum import IntEnum

_READABLE_FORMATS = {"\u200c", "\u200d"}  # joiners: many scripts and emoji cannot be written without them

_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "num2words": "pictures"}
"""By the package that other packages ask for: the extra of Seenset that installs it."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28")
_STORAGE_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore", "gcsfs", "google", "requests", "s3fs"}
)

LINE_BREAK = "⟨U+000A⟩"
"""What stands for a line break of a name in a message of one line."""


class ExitCode(IntEnum):
    """What the process says when it ends; docs/commands.md has a sentence for each."""

    DONE = 0
    USER_ERROR = 2
    INCOMPLETE = 3
    SELECTED = 4  # and nothing contradicts the guarantee of what was
    UNSUPPORTED = 5  # selected, with a guarantee that a check contradicts
    BUSY = 75
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can correct, stated in one line: the value, the limit and the near miss."""

    exit_code = ExitCode.USER_ERROR


class BusyError(UserError):
    """Another driver holds the run directory."""

    exit_code = ExitCode.BUSY


class IncompleteError(UserError):
    """The run cannot go on to its selections: shards are missing or too many documents were quarantined."""

    exit_code = ExitCode.INCOMPLETE


class DamagedError(UserError):
    """A file of a run directory is gone or is not what its receipt says; the run makes it again."""


class FullError(IncompleteError):
    """There is no space left to write to: the same command goes on when there is."""


class LostDeviceError(IncompleteError):
    """A GPU refuses all further work of this process: another process goes on where this one was."""


class StopError(UserError):
    """A fault that would meet every further document: the run ends at once, with an exit code that names the remedy."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USER_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def instead_of_exit(error: BaseException) -> BaseException:
    """The error itself, or what stands for a SystemExit: code that a run calls must not end the process.

    A SystemExit that another thread or process passed on would end the command with the exit code of that code, which
    is 0 where it called `sys.exit()`.
    """
    if not isinstance(error, SystemExit):
        return error
    return IncompleteError(
        f"code of a plugin, a model or a library called sys.exit({error.code!r}), so the run is not complete; finished "
        "shards are kept: correct that code and rerun the command"
    )


def nearest(value: str, known: Iterable[str], what: str = "known") -> str:
    """A tail for an error message: the nearest known name if one is near, and all of them."""
    names = list(known)
    folded = {name.casefold(): name for name in names[::-1]}
    near = difflib.get_close_matches(value.casefold(), folded, n=1, cutoff=0.5)
    guess = f"did you mean {folded[near[0]]!r}? " if near else ""
    return f"{guess}{what}: {', '.join(names)}"


def visible(text: str) -> str:
    """Text in which nothing hides: controls, bidirectional overrides and the like appear as their code points."""
    if text.isprintable():
        return text
    return "".join(character if _shows(character) else f"⟨U+{ord(character):04X}⟩" for character in text)


def one_line(text: str) -> str:
    """A message as one line in which nothing hides: names of files and columns stand in it, and may hold anything."""
    return visible(" ".join(text.split()))


def not_opened(error: Exception) -> str:
    """Why something could not be opened, in one line; where a package of an extra is missing, it names the extra."""
    text = one_line(str(error))
    if isinstance(error, ImportError):
        for package, extra in _EXTRAS.items():
            if package in text:
                return f"{package} is not installed: pip install 'seenset[{extra}]'"
    return text


def _shows(character: str) -> bool:
    if character in "\n\t" or character in _READABLE_FORMATS:
        return True
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def is_full(error: BaseException) -> bool:
    """Whether an error says that there was no space left."""
    if isinstance(error, FullError) or (isinstance(error, OSError) and error.errno in _FULL):
        return True
    return any(words in str(error) for words in _FULL_WORDS)


def is_of_storage(error: Exception) -> bool:
    """Whether an error is of a disk, a network or an object store, whose libraries have classes of their own."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _STORAGE_PACKAGES


def write_error(error: OSError, where: str) -> UserError:
    """The error of a place that cannot be written to: it is a file, it is full, or it may not be changed."""
    if is_full(error):
        return FullError(f"no space left for {where}: make room, and the same command goes on")
    return UserError(f"cannot write to {where}: {error.strerror}: {error.filename}")


def message_of_storage(error: Exception) -> str:
    """What an error of storage states, with the path that it is about."""
    path = getattr(error, "filename", None)
    reason = (path and getattr(error, "strerror", None)) or str(error) or type(error).__name__
    return f"storage: {reason}{f': {path}' if path else ''}"
