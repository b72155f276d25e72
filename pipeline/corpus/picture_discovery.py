"""The pictures of a folder: which files and columns hold them, and where what is written of them stands."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.corpus.picture_files import is_picture

CAPTIONS = "txt"
"""The ending of the files beside pictures that are taken for their captions."""

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")


def image_column(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], place: str) -> str | None:
    """The column that holds pictures, or paths of picture files that lie beside the table; None where none does.

    Args:
        columns: of the table.
        rows: some of it.
        place: the folder of the table.
    """
    held = [column for column in columns if _holds_pictures([row.get(column) for row in rows], place)]
    return min(held, key=lambda column: _rank(column), default=None)


def _rank(column: str) -> int:
    return IMAGE_NAMES.index(column.lower()) if column.lower() in IMAGE_NAMES else len(IMAGE_NAMES)


def _holds_pictures(values: Sequence[Any], place: str) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and 2 * sum(_is_picture(value, place) for value in present) > len(present)


def _is_picture(value: Any, place: str) -> bool:
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"}
    if isinstance(value, str):
        return is_picture(value) and "://" not in value and os.path.isfile(os.path.join(place, value))
    if isinstance(value, bytes):
        return value.startswith(_BEGINNINGS)
    return hasattr(value, "getbands")  # that a saved dataset has decoded


def picture_groups(
    pictures: Sequence[str], others: Sequence[str], has_role: Callable[[str], bool]
) -> dict[tuple[str, ...], list[str]]:
    """Pictures that are files, by the folders or globs that a configuration names them with.

    A folder whose name speaks of a role holds the pictures of that role, with the folders in it; without such a name
    the outermost folder does. Where other data or another role lie inside, and for files outside of any folder, globs
    say which files are meant.

    Args:
        pictures: relative paths.
        others: relative paths of other data.
        has_role: whether the name of a folder speaks of a role.
    """
    tops: defaultdict[str, list[str]] = defaultdict(list)
    for path in pictures:
        parts = path.split("/")[:-1]
        named = [end for end in range(len(parts), 0, -1) if has_role(parts[end - 1])]
        tops["/".join(parts[: (named or [1])[0]])].append(path)
    groups = {}
    for top, paths in tops.items():
        inside = [*others, *(path for other, some in tops.items() if other != top for path in some)]
        plain = top and not any(path.startswith(f"{top}/") for path in inside)
        names = {f"{os.path.dirname(path)}/*{os.path.splitext(path)[1]}".lstrip("/") for path in paths}
        groups[(top,) if plain else tuple(sorted(names))] = paths
    return groups


def captions_beside(folder: str, pictures: Sequence[str]) -> str | None:
    """The ending of the captions of pictures that are files: of the files beside at least half of them."""
    count = sum(Path(folder, os.path.splitext(path)[0] + f".{CAPTIONS}").is_file() for path in pictures)
    return CAPTIONS if 2 * count >= len(pictures) else None
