"""Links in the folder of a corpus: those that lead out of it are refused, or followed to regular files.

A link in a folder from elsewhere, such as an unpacked archive, can name any file of this machine, and its content would
become a document. The path of a configuration may itself be a link, and the files of a hub snapshot are links into the
same entry of the hub's cache.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from fsspec.utils import glob_translate

from pipeline.errors import SettingError

_SPECIAL = ("/proc", "/sys", "/dev")
_CACHE_ENTRY = re.compile(r"(models|datasets|spaces)--.+")


def is_special(path: str, places: Iterable[str] = _SPECIAL) -> bool:
    """Whether a local path leads to a file that the system makes, such as the memory of a process."""
    real = os.path.realpath(path)
    return any(_is_within(real, place) for place in places)


def leads_out(path: str, folder: str) -> bool:
    """Whether a local path leads out of a folder by a link; the hub's cache entry of a snapshot belongs to it."""
    real, inside = os.path.realpath(path), os.path.realpath(folder)
    return not any(_is_within(real, place) for place in (inside, *_blob_folders(inside)))


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _blob_folders(folder: str) -> Iterator[str]:
    """The folder with the content of a hub snapshot, if the folder is one or is in one."""
    parts = folder.split("/")
    for place in range(1, len(parts)):
        if parts[place] == "snapshots" and _CACHE_ENTRY.fullmatch(parts[place - 1]):
            yield "/".join([*parts[:place], "blobs"])


def check_links(key: str, shown: str, folder: str, paths: Iterable[str], follow: bool) -> None:
    """Check that links in a folder stay in it, or that they may be followed.

    Args:
        key: setting that names the folder, for messages.
        shown: the folder as written there.
        folder: local path of the folder.
        paths: links in it that would be read.
        follow: whether links that lead out of the folder are followed.

    Raises:
        UserError: links lead out of the folder and are not to be followed, or lead to files of the system.
    """
    leading = [path for path in paths if leads_out(path, folder)]
    if leading and not follow:
        noun = "link leads" if len(leading) == 1 else "links lead"
        first = _arrow(leading[0], folder)
        fault = f": {len(leading):,} {noun} out of {shown} (first: {first}); remove them"
        raise SettingError(key, fault, ", or set follow_links: true to read the regular files behind them")
    for path in leading:
        if is_special(path):
            fault = f"leads to {os.path.realpath(path)}: files of {', '.join(_SPECIAL[:-1])} and {_SPECIAL[-1]}"
            raise SettingError(key, f": link {_arrow(path, folder)} {fault} are never read")


def _arrow(path: str, folder: str) -> str:
    return f"{os.path.relpath(path, folder)} -> {os.readlink(path)}" if os.path.islink(path) else path


def linked_folders(infos: Iterable[dict[str, Any]], folder: str) -> list[str]:
    """The links of a listing that lead to folders outside of a folder, which the listing leaves out."""
    links = (str(info["name"]) for info in infos if info.get("islink"))
    return [path for path in links if os.path.isdir(path) and leads_out(path, folder)]


def files_behind(link: str) -> Iterator[str]:
    """The files below a link to a folder, in order; each folder is entered once, also if links form a circle."""
    return (path for path, is_folder in _paths_behind(link) if not is_folder)


def links_on_the_way(pattern: str, folder: str) -> list[str]:
    """The links to folders out of a folder that a glob leaves out, although a path below them may match.

    Args:
        pattern: local path with `*`, `?`, `[` or `**`, as `fsspec` reads them.
        folder: the part of it before the first of these, up to a slash.
    """
    deepest, links = _deepest(pattern), list[str]()
    for place, folders, _ in os.walk(folder):
        paths = [os.path.join(place, name) for name in sorted(folders)]
        if paths and paths[0].count("/") >= deepest:
            folders.clear()  # what is in them has too many parts
        else:
            links += [path for path in paths if os.path.islink(path) and leads_out(path, folder)]
    return [link for link in links if "**" in pattern or is_special(link) or any(matches_behind(pattern, link))]


def matches_behind(pattern: str, link: str) -> Iterator[str]:
    """The paths that match a pattern below a link to a folder."""
    matches = re.compile(glob_translate(pattern)).match
    return (path for path, _ in _paths_behind(link, _deepest(pattern)) if matches(path))


def _deepest(pattern: str) -> int:
    """Most slashes of a path that matches a pattern."""
    return sys.maxsize if "**" in pattern else pattern.count("/")


def _paths_behind(link: str, deepest: int = sys.maxsize) -> Iterator[tuple[str, bool]]:
    """The paths with at most so many slashes below a link to a folder, each with whether it is a folder."""
    entered = {os.path.realpath(link)}
    for place, folders, names in os.walk(link, followlinks=True):
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(place, name))
            if real in entered:
                folders.remove(name)
            entered.add(real)
        folders.sort()
        yield from ((os.path.join(place, name), True) for name in folders)
        yield from ((os.path.join(place, name), False) for name in sorted(names))
        if place.count("/") + 1 >= deepest:
            folders.clear()
