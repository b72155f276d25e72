"""Sentences of a plan and a starter configuration: missing settings, guesses, and where the work runs."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.corpus import ROLE_DOCUMENTS, ROLES, Role
from pipeline.wording import some_of

AUDIT_HEAD = "An audit of the data in this folder: which of these documents was the model trained on?"
GUESSES_MARKED = "Guessed values are marked; change them here. Relative paths are relative to this file."
DIALECT = "Guessed from the beginning of the first file."
SMOOTHED = "Short lists are possible, at a draw by model and id; whole, without one, from about 300 known documents on."
PICTURES = "Guessed: it holds pictures."
CAPTIONS = "Guessed: it describes the pictures."
PICTURE_IDS = "Guessed: no value repeats in the first rows."
IDS = "Guessed: by its name, and no value repeats in the first rows."
NO_IDS = "No column is named like an id and has a different value in every row."
NO_MODEL = "This folder holds no model folder and no .gguf file: replace this hub id by your model."
NOT_NEEDED = "Not needed here."
ONE_A_FILE = "one document a file"
EMPTY = "; the folder is empty"
ALL_HIDDEN = "; the folder holds hidden files alone"

MATRIX_PRODUCT = "a matrix product on it"
"""The basis of the estimated time of a run."""

AND_TO_CALIBRATE = ", so that at least one is left to calibrate on"
"""Why an adapter needs one document more than its training documents."""


NO_ROLE = "no name states their role"
OTHER_KIND = "texts and pictures are audited apart"


def counted(files: str, count: int, reason: str) -> str:
    """Files that are not taken, with their number and the reason."""
    return f"{files} ({f'{count:,} files, ' if count > 1 else ''}{reason})"


def differs_from(others: str, columns: str) -> str:
    """The reason why files of a role are not taken: they differ from those that are."""
    return f"{columns}: columns or encoding differ from those of {others}; join them"


def without_role(files: str) -> str:
    """States the files that are left out because their names state no role."""
    return f"Left out: {files}. No name states their role."


def of_other_kind(files: str, pictured: bool) -> str:
    """States the files that are left out because they are of the other kind, texts or pictures."""
    kinds = "texts, and this audit is of pictures" if pictured else "pictures, and this audit is of texts"
    return f"Left out: {files}. They are {kinds}."


def of_other_columns(files: str, columns: str) -> str:
    """States the files that are left out of a source."""
    return f"Left out, because their columns or encodings differ: {files} ({columns})."


def guessed_text(reason: str, others: Sequence[str]) -> str:
    """The reason for the choice of the text column, and the other columns."""
    more = f" Other columns: {', '.join(others)}." if others else ""
    return f"Guessed: {reason}.{more}"


def model_stands_in(name: str) -> str:
    """States that the folder has no model."""
    return f"model: none in this folder; replace {name} by yours"


def model_found(others: Sequence[str]) -> str:
    """States that the model is in the folder, and names further models."""
    more = f" Others: {some_of(others)}." if others else ""
    return f"Guessed: it is in this folder.{more}"


def first_files(count: int) -> str:
    """States that not all files of the folder were examined."""
    return f"Only the first {count:,} files were examined."


def role_by_name(words: Sequence[str], role: Role) -> str:
    """The reason for a role: words in file names."""
    return f"Guessed from the name ({', '.join(words)}). {_if_wrong(role)}"


def audited_by_default() -> str:
    """The reason for the role audit: no name states another role."""
    return f"Guessed: no name states another role. {_if_wrong('audit')}"


def _if_wrong(role: Role) -> str:
    return f"If that is wrong, rename this part to {' or '.join(other for other in ROLES if other != role)}."


def role_missing(role: Role) -> str:
    """States that an audit needs documents of a role, and that the folder has none."""
    return f"Missing: {ROLE_DOCUMENTS[role]}. Remove the comment signs and fill in the path."


def not_given(need: str, role: Role) -> str:
    """States a role that is needed and that the configuration does not give."""
    return f"{need} corpus.{role}, which is not given"


def add_role(role: Role) -> str:
    """The setting to add to a configuration without a role."""
    return f"add corpus.{role}: {{path: ...}}, {ROLE_DOCUMENTS[role]}"
