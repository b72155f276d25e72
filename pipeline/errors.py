"""The user error, the exit codes of the command, how messages print names, and errors of storage and of full disks."""

from __future__ import annotations

import difflib
import errno
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self

_READABLE_FORMATS = {"\u200c", "\u200d"}  # joiners: many scripts and emoji cannot be written without them

_EXTRAS = {"s3fs": "s3", "gcsfs": "gs", "num2words": "pictures", "inspect_ai": "inspect"}
"""Optional package -> the extra of Seenset that installs it."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "os error 28")
_STORAGE_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "azure", "boto3", "botocore", "gcsfs", "google", "requests", "s3fs"}
)

LINE_BREAK = "⟨U+000A⟩"
"""Replaces a line break of a name in a message of one line."""


class ExitCode(IntEnum):
    """Exit codes of the process; docs/commands.md documents each."""

    DONE = 0
    USER_ERROR = 2
    INCOMPLETE = 3
    SELECTED = 4  # documents were selected, and no check contradicts their guarantee
    UNSUPPORTED = 5  # documents were selected, and a check contradicts their guarantee
    BUSY = 75
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can correct, stated in one line: the value, the limit and the nearest valid value.

    Example:
        >>> try:
        ...     seenset.select([0.9, 0.2], unseen=[0.1, 0.3], alpha=1)
        ... except seenset.UserError as error:
        ...     print(error)
        alpha: must be in (0, 1), got 1
    """

    exit_code = ExitCode.USER_ERROR


class BusyError(UserError):
    """Another driver holds the run directory."""

    exit_code = ExitCode.BUSY


class IncompleteError(UserError):
    """The run cannot go on to its selections: shards are missing or too many documents were quarantined."""

    exit_code = ExitCode.INCOMPLETE


class FileError(UserError):
    """A fault of a file, and what the user can do about it.

    Attributes:
        file: address of the file as messages name it, with the line where it is known.
        fault: predicate of the file, such as `is missing`.
        remedy: what the user can do; None where the caller states it.
        mark: what stands between fault and remedy.
    """

    def __init__(self, file: str, fault: str, remedy: str | None = None, mark: str = "; ") -> None:
        super().__init__(file, fault, remedy, mark)  # `args`, from which a pickled error is made again
        self.file, self.fault, self.remedy, self.mark = file, fault, remedy, mark

    @property
    def problem(self) -> str:
        """The file and its fault, without the remedy."""
        return f"{self.file} {self.fault}"

    def __str__(self) -> str:
        return self.problem if self.remedy is None else f"{self.problem}{self.mark}{self.remedy}"

    def with_remedy(self, remedy: str) -> Self:
        """The same fault with a remedy."""
        return type(self)(self.file, self.fault, remedy)


class DamagedError(FileError):
    """A file of a run directory is missing or differs from its receipt; the run writes it again."""


class VersionError(FileError):
    """A file was written by another version, whose form this one does not read."""


class NotWrittenError(UserError):
    """A place cannot be written to.

    Attributes:
        place: what cannot be written to.
        reason: why, with the path.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        return f"cannot write to {self.place}: {self.reason}"


class SettingError(UserError):
    """What a setting names cannot be used.

    Attributes:
        setting: the setting of a configuration.
        fault: the rest of the message; it begins with a colon or a verb, or with a key below the setting.
        offer: the end of the message, with another setting that would allow it; empty if there is none.
    """

    def __init__(self, setting: str, fault: str, offer: str = "") -> None:
        super().__init__(setting, fault, offer)
        self.setting, self.fault, self.offer = setting, fault, offer

    def __str__(self) -> str:
        return f"{self.setting}{self.fault}{self.offer}"


class RetiredError(UserError):
    """A thing of an earlier version that this one has not; the message names what to do instead."""


class FullError(IncompleteError):
    """No space is left on the device: the same command resumes the run once space is free."""


class LostDeviceError(IncompleteError):
    """A GPU refuses all further work of this process: another process resumes its work."""


class StopError(UserError):
    """A fault that would affect every further document: the run ends at once; the exit code indicates the remedy."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USER_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def instead_of_exit(error: BaseException) -> BaseException:
    """The error itself, or an IncompleteError where code that a run calls would end the process.

    A SystemExit raised again from another thread or process would end the command with its own exit code, which is 0
    after `sys.exit()`; what `is_foreign` holds for would end it with a traceback.
    """
    if isinstance(error, SystemExit):
        did = f"called sys.exit({error.code!r})"
    elif is_foreign(error):
        did = f"raised {_kind_and_line(error)}"
    else:
        return error
    return IncompleteError(
        f"code of a plugin, a model or a library {did}, so the run is not complete; finished shards are kept: correct "
        "that code and rerun the command"
    )


class PanicError(Exception):
    """A library in Rust panicked; what it raises is no Exception, and would end the process."""


class ForeignError(Exception):
    """Code raised an object of a class of its own that is no Exception; the message begins with that class."""


def is_foreign(error: BaseException) -> bool:
    """Whether an error is no Exception, and none that ends a program on purpose: it would end the process.

    Such are panics of libraries in Rust, and classes that a plugin derives from BaseException.
    """
    ours = type(error).__module__.partition(".")[0] in ("pipeline", "ray_jobs")
    return not (ours or isinstance(error, (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)))


def _kind_and_line(error: BaseException) -> str:
    line = error_line(error)
    return f"{type(error).__name__}{': ' * bool(line)}{line}"


def is_panic(error: BaseException) -> bool:
    """Whether an error is the panic of a library in Rust, such as tokenizers, whose class no module exports."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


@contextmanager
def foreign_as_errors() -> Iterator[None]:
    """Convert what `is_foreign` holds for to a PanicError, if a library in Rust panicked, or a ForeignError."""
    try:
        yield
    except BaseException as error:
        if not is_foreign(error):
            raise
        if is_panic(error):
            raise PanicError(error_line(error) or "the library panicked").with_traceback(error.__traceback__) from None
        raise ForeignError(_kind_and_line(error)).with_traceback(error.__traceback__) from None


def nearest(value: str, known: Iterable[str], what: str = "known") -> str:
    """The end of an error message: the nearest known name, if one is similar, and all known names."""
    names = list(known)
    folded = {_folded(name): name for name in names[::-1]}
    near = difflib.get_close_matches(_folded(value), folded, n=1, cutoff=0.51)
    guess = f"did you mean {folded[near[0]]!r}? " if near else ""
    return f"{guess}{what}: {', '.join(names)}"


def _folded(name: str) -> str:
    """A name without differences of spelling: Min-K++ is min_k_plus_plus."""
    return name.casefold().replace("-", "_").replace("+", "_plus")


_PERCENT = re.compile(r"(\d*[.,]?\d+) ?(%|\u2030|percent|per cent|pct|pc)")
_RATIO = re.compile(r"(\d+) ?(?:/|:| in | out of ) ?([1-9]\d*)")
_THOUSANDS = re.compile(r"\d{1,3}(?:[,_' ]\d{3})+")
_POWER = re.compile(r"(\d+(?:\.\d+)?)(e\+?\d|k|m)")
_COMMA = re.compile(r"(\d*)[,·](\d+)")
_MOST_DIGITS = 40


def number_meant(value: object, whole: bool = False, share: bool = False, one: bool = True) -> str:
    """The end of an error message: the number that a value may mean, such as 0.05 for 5%; empty if there is none.

    Args:
        value: the refused value.
        whole: whether a whole number is needed.
        share: whether a number in (0, 1] is needed.
        one: whether a share may be 1.
    """
    if not isinstance(value, str) or len(value) > _MOST_DIGITS:
        return ""
    text, number = unicodedata.normalize("NFKC", value).replace("\u2044", "/").strip().lower(), None
    if percent := _PERCENT.fullmatch(text):
        number = float(percent[1].replace(",", ".")) / (1000 if percent[2] == "\u2030" else 100)
    elif ratio := _RATIO.fullmatch(text):
        number = int(ratio[1]) / int(ratio[2])
    elif whole and _THOUSANDS.fullmatch(text):
        number = float(re.sub(r"\D", "", text))
    elif whole and (power := _POWER.fullmatch(text)):
        number = float(power[1] + {"k": "e3", "m": "e6"}.get(power[2], power[2]))
    elif not whole and (comma := _COMMA.fullmatch(text)):
        number = float(f"{comma[1] or 0}.{comma[2]}")
    if number is None or (whole and number != int(number)) or (share and not (0 < number <= 1 and (one or number < 1))):
        return ""
    return f"; did you mean {number:.15g}?"


def visible(text: str) -> str:
    """A text without invisible characters: controls, bidirectional overrides and the like appear as code points."""
    if text.isprintable():
        return text
    return "".join(character if _shows(character) else f"⟨U+{ord(character):04X}⟩" for character in text)


def one_line(text: str) -> str:
    """A message as one line without invisible characters, which the file and column names in it may contain."""
    return visible(" ".join(text.split()))


def error_line(error: BaseException, most: int | None = None) -> str:
    """The message of an error as one line without invisible characters; empty if it has none.

    Args:
        error: an error, often of another library, whose message may have any length and many lines.
        most: characters to keep; None: all.
    """
    return one_line(str(error))[:most]


def not_opened(error: Exception) -> str:
    """Why something could not be opened, in one line; names the extra if a package of an extra is missing."""
    text = error_line(error)
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
    """Whether an error reports that no space was left."""
    if isinstance(error, FullError) or (isinstance(error, OSError) and error.errno in _FULL):
        return True
    return any(words in str(error) for words in _FULL_WORDS)


def is_of_storage(error: Exception) -> bool:
    """Whether an error comes from a disk, a network or an object store, whose libraries define their own classes."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _STORAGE_PACKAGES


def write_error(error: OSError, where: str) -> NotWrittenError | FullError:
    """The error for a path that cannot be written to: it is a file, its device is full, or it is read-only."""
    if is_full(error):
        return FullError(f"no space left for {where}: free some space and rerun the command")
    return NotWrittenError(where, f"{error.strerror}: {error.filename}")


def message_of_storage(error: Exception) -> str:
    """The message of a storage error, with the path that it concerns."""
    path = getattr(error, "filename", None)
    reason = (path and getattr(error, "strerror", None)) or str(error) or type(error).__name__
    return f"storage: {reason}{f': {path}' if path else ''}"
