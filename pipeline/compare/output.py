"""The folder that a comparison is written to: its own, and never one that holds anything else."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.store.files import Store


def open_output(folder: str, mark: str) -> Store:
    """A folder for the files of one command; what an earlier time of it left there is replaced.

    Args:
        folder: local path or fsspec URL; need not exist.
        mark: the JSON file that the command writes, by which a folder of its own is known.

    Raises:
        UserError: the folder holds other files.
    """
    store = Store(folder)
    names = store.names("")
    if names and mark not in names:
        raise UserError(f"{folder} holds other files ({', '.join(names[:3])}): give --output another folder")
    return store
