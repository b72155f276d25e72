"""The places of the files and of the page of a command: a folder that is used for nothing else.

A folder of an earlier call is recognised by the JSON file of the command, and its files are replaced. A page that is a
single file may stand beside other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserError
from pipeline.store.files import Store


@dataclass(frozen=True, slots=True)
class PagePlace:
    """The place of a page to write, and of its JSON file where it has one."""

    store: Store
    page: str  # file name
    data: str | None  # file name of the same facts as JSON; None for a page alone

    def write(self, page: str, facts: Mapping[str, Any]) -> str:
        """Write the page; the same facts give the same bytes.

        Args:
            page: HTML.
            facts: the facts that it states.

        Returns:
            The path or URL of the page.
        """
        if self.data is not None:
            self.store.write_json(self.data, facts)
        self.store.write(self.page, page.encode("utf-8", "replace"))
        return f"{self.store.url}/{self.page}"


def page_place(page: str, name: str, data: str, reserved: str | None = None) -> PagePlace:
    """The place of the page that `--page` names.

    It is checked before the answer is computed, so that a long command does not end without its page.

    Args:
        page: a folder, or a file whose name ends in .html; local path or fsspec URL.
        name: file name of the page in a folder, such as series.html.
        data: name of the JSON file of the command, which stands beside a page in a folder.
        reserved: folder of other files, in which no page is written; None: there is none.

    Raises:
        UserError: the folder holds other files, or is reserved.
    """
    folder, is_file = page, page.endswith(".html")
    if is_file:
        folder, _, name = page.rpartition("/")
        folder = folder or ("/" if page.startswith("/") else ".")
    place = Store(folder)
    inside = None if reserved is None else Store(reserved).url
    if inside is not None and (place.url == inside or place.url.startswith(f"{inside}/")):
        raise UserError(f"--page {page} is in the ledger, which holds its entries alone: give another folder")
    if not is_file:
        place = open_output(folder, data, "--page")
    return PagePlace(place, name, None if is_file else data)


def open_output(folder: str, mark: str, option: str = "--output") -> Store:
    """Open a folder for the files of one command; files of an earlier call are replaced.

    Args:
        folder: local path or fsspec URL; need not exist.
        mark: the JSON file of the command, which identifies a folder of earlier results.
        option: the option that names the folder, for messages.

    Raises:
        UserError: the folder holds other files.
    """
    store = Store(folder)
    names = store.names("")
    if names and mark not in names:
        raise UserError(f"{folder} holds other files ({', '.join(names[:3])}): give {option} another folder")
    return store
