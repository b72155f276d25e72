"""Relative paths of a configuration: relative to the file that names them, or to the working directory.

A relative path becomes `FOLDER/./PATH`, as in rsync: any program can open it from any working directory, and the part
after `/./` is the path as written, which appears in the names of documents and models and in errors.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum, auto
from functools import reduce
from operator import getitem
from typing import Any, get_args

from pydantic import BaseModel

from pipeline.config.misplaced import of_other_system, with_backslashes
from pipeline.errors import UserError

MARK = "/./"
_RUN_FILES = ("manifest.json", "trial.json", "models", "00000000.json")  # the last is in a ledger


_IRREGULAR = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class Place(Enum):
    """The kind of object that a setting's text refers to."""

    RUN = auto()  # a folder that may not exist yet
    INPUT = auto()  # a file or folder that must exist, or a glob
    MODEL = auto()  # a folder, a GGUF file or a hub id
    CODE = auto()  # a Python file, or a module
    SETTINGS_FILE = auto()  # a JSON file, or the name of one that is packaged
    SWEPT = auto()  # a mapping from settings of the whole configuration to values


@dataclass(frozen=True, slots=True)
class Named:
    """Marks a mapping from names to the settings of a section."""

    section: type[BaseModel]


def irregular_kind(path: str) -> str | None:
    """The kind of a local path that is neither a file nor a folder, which may block a reader; otherwise None.

    Raises:
        OSError: the path does not exist.
    """
    mode = os.stat(path).st_mode
    return next((name for test, name in _IRREGULAR if test(mode)), None)


def check_run_folder(run: str, folders: Mapping[str, str]) -> None:
    """Check that a new run directory neither is nor contains one of some folders, which its files would fill.

    Args:
        run: the run directory.
        folders: folder -> the file or folder in it that a message names.

    Raises:
        UserError: it is or contains one of them.
    """
    if "://" in run or "\0" in run:  # an invalid name is refused when the folder is opened
        return
    if not run:
        raise UserError("run is empty: name a folder, such as runs/audit")
    if any(os.path.exists(os.path.join(run, name)) for name in _RUN_FILES[:2]):
        return
    real = os.path.realpath(os.path.expanduser(run))
    for folder, named in folders.items():
        if "://" not in folder and os.path.commonpath([real, os.path.realpath(folder)]) == real:
            raise UserError(
                f"run: {run} holds {named}, and a run directory holds only files of the run; name a folder of its own, "
                "such as runs/audit"
            )


def written(path: str) -> str:
    """A path as written in its configuration."""
    return path if "://" in path else path.rpartition(MARK)[2]


def path_origin(path: str) -> str | None:
    """The folder that a path was written relative to; None if the path contains none."""
    return None if "://" in path else path.rpartition(MARK)[0] or None


def placed(kind: type[BaseModel], data: Mapping[str, Any], folder: str, file: str | None = None) -> dict[str, Any]:
    """Resolve the relative paths of a plain mapping against a folder. Nothing else is changed or checked.

    Args:
        kind: model or dataclass of the mapping.
        data: a whole configuration, or a part of one.
        folder: absolute path.
        file: file that holds the mapping. Paths that exist only in the working directory are then refused.

    Raises:
        UserError: a path exists only in the working directory.
    """
    return _placed_section(kind, data, _Origin(kind, folder, file), "")


def placed_value(kind: type[BaseModel], path: str, value: Any, folder: str, file: str | None = None) -> Any:
    """The value of the setting `a.b.c`, resolved as by `placed`."""
    keys = path.split(".")
    tree = reduce(lambda inner, key: {key: inner}, reversed(keys), value)
    return reduce(getitem, keys, placed(kind, tree, folder, file))


@dataclass(frozen=True, slots=True)
class _Origin:
    """The folder that relative paths of a configuration are resolved against."""

    root: type[BaseModel]
    folder: str
    file: str | None

    def place(self, place: Place, path: str, where: str) -> str:
        """Resolve one path; a hub id, a module and a packaged name are returned unchanged."""
        if not path or "://" in path or os.path.isabs(path) or path.startswith("~"):
            return path
        joined = os.path.join(self.folder, path)
        if not _exists(place, joined) and (instead := of_other_system(path, self.folder)) is not None:
            raise UserError(f"{where}: no {with_backslashes(path)}; {instead}")
        if not _is_path(place, path) and not (place is Place.MODEL and os.path.exists(joined)):
            if place is Place.MODEL:
                self._refuse_elsewhere(place, path, where)
            return path
        if not _exists(place, joined):
            self._refuse_elsewhere(place, path, where)
        if place is Place.RUN:
            return os.path.normpath(joined)
        return f"{self.folder.rstrip('/')}{MARK}{os.path.normpath(path)}"

    def _refuse_elsewhere(self, place: Place, path: str, where: str) -> None:
        """Refuse a path that exists only in the working directory, which older versions resolved paths against."""
        here = os.path.realpath(os.getcwd())
        explicit = path.startswith(("./", "../"))
        if self.file is None or explicit or here == self.folder or not _exists(place, os.path.join(here, path)):
            return
        corrected = os.path.relpath(os.path.join(here, path), self.folder)
        new = f", or ./{path} for a new one beside it" if place is Place.RUN else ""
        raise UserError(
            f"{where}: {path} is in the working directory and not beside {self.file}; relative paths are relative to "
            f"the file that names them: write {corrected if corrected.startswith('.') else f'./{corrected}'}{new}"
        )


def _is_path(place: Place, path: str) -> bool:
    if place is Place.MODEL:
        return path.startswith(("./", "../")) or path in (".", "..") or path.endswith(".gguf") or path.count("/") > 1
    if place is Place.CODE:
        return path.endswith(".py")
    if place is Place.SETTINGS_FILE:
        return "." in os.path.basename(path) or "/" in path
    return True


def _exists(place: Place, path: str) -> bool:
    if place is Place.RUN:
        return any(os.path.exists(os.path.join(path, name)) for name in _RUN_FILES)
    return os.path.exists(path) or (place is Place.INPUT and any(glob.iglob(path, recursive=True)))


def _placed_section(kind: type, data: Mapping[str, Any], origin: _Origin, where: str) -> dict[str, Any]:
    result = dict(data)
    for name, field in named_fields(kind).items():
        for key in {name, getattr(field, "alias", None) or name} & result.keys():
            at = f"{where}.{key}" if where else key
            result[key] = _placed_field(field, result[key], origin, at)
    return result


def _placed_field(field: Any, value: Any, origin: _Origin, where: str) -> Any:
    for mark in getattr(field, "metadata", ()):
        if mark is Place.SWEPT:
            return _placed_sweep(value, origin, where)
        if isinstance(mark, Place):
            return _each_text(value, lambda text, mark=mark: origin.place(mark, text, where))  # type: ignore[misc]
        if isinstance(mark, Named) and isinstance(value, Mapping):
            return {
                name: _placed_section(mark.section, part, origin, f"{where}.{name}")
                if isinstance(part, Mapping)
                else part
                for name, part in value.items()
            }
    if isinstance(value, Mapping):
        for section in sections_in(getattr(field, "annotation", None)):
            value = _placed_section(section, value, origin, where)
    return value


def _placed_sweep(value: Any, origin: _Origin, where: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    swept = {}
    for path, values in value.items():
        several = isinstance(values, list) and isinstance(path, str)
        swept[path] = (
            [placed_value(origin.root, path, one, origin.folder, origin.file) for one in values] if several else values
        )
    return swept


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a change to a text, or to all texts of a list or of a mapping."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(one, change) for one in value]
    if isinstance(value, Mapping):
        return {key: _each_text(one, change) for key, one in value.items()}
    return value


def named_fields(kind: Any) -> dict[Any, Any]:
    """The fields of a model or a dataclass, by name."""
    fields: dict[Any, Any] = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    return fields


def sections_in(annotation: Any) -> Iterator[type]:
    """The models and dataclasses in a type annotation, in order."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def split_overrides(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """The `a.b=c` overrides as settings and values.

    Raises:
        UserError: one has no value, or undoes one before it.
    """
    split: list[tuple[str, str]] = []
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes key=value, got {override!r}")
        if undone := next((one for one, _ in split if one == path or one.startswith(f"{path}.")), None):
            again = "is given twice" if undone == path else f"undoes --set {undone} before it"
            raise UserError(f"--set {path:.200} {again}: leave one of them out")
        split.append((path, value))
    return split
