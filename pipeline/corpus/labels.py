"""Labels of documents whose membership is known: which values are labels, and which columns can be used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pipeline.config.corpus import Role
from pipeline.errors import UserError

SPELLINGS: dict[Role, tuple[str, ...]] = {
    "seen": ("1", "true", "member", "seen"),
    "unseen": ("0", "false", "nonmember", "unseen"),
}
"""What a label may be, by the role that it gives a document; 1.0, True and non-member are other ways to write these."""

_ROLE_OF: dict[str, Role] = {spelling: role for role, spellings in SPELLINGS.items() for spelling in spellings}
_ACCEPTED = " and ".join(
    f"{', '.join(spellings[:-1])} or {spellings[-1]} for {kind}"
    for kind, spellings in (("members", SPELLINGS["seen"]), ("nonmembers", SPELLINGS["unseen"]))
)
_LISTED = 5
_CHARACTERS = 30


def role_of_label(label: Any, source: str) -> Role | None:
    """The role that a label gives a document; None where there is no label (null, NaN or nothing but white space).

    Args:
        label: as it is written in the row.
        source: the input's name, for errors.

    Raises:
        UserError: it is none of `SPELLINGS`.
    """
    spelling = _spelling(label)
    if spelling is not None and spelling not in _ROLE_OF:
        raise UserError(f"label {_shortened(label)} in {source} is unknown; labels are {_ACCEPTED}")
    return None if spelling is None else _ROLE_OF[spelling]


def check_labels(labels: Iterable[Any], column: str, source: str) -> None:
    """Check that a column holds two values, one for members and one for nonmembers; rows may lack a label.

    Args:
        labels: of every row, as written.
        column: that holds them.
        source: the inputs' names, for errors.

    Raises:
        UserError: it holds others, or one alone: names them.
    """
    values: dict[str, str] = {}
    for label in labels:
        spelling = _spelling(label)
        if spelling is not None and spelling not in values:
            values[spelling] = _shortened(label)
            if len(values) > _LISTED:
                break
    where = f"column {column!r} in {source}"
    if not values:
        raise UserError(f"{where} holds no label; labels are {_ACCEPTED}")
    known = {_ROLE_OF.get(spelling) for spelling in values}
    if len(values) > 2 or None in known:
        count = f"more than {_LISTED}" if len(values) > _LISTED else str(len(values))
        shown = ", ".join(list(values.values())[:_LISTED])
        noun = "value" if len(values) == 1 else "values"
        raise UserError(f"{where} holds {count} {noun}: {shown}; it takes two: {_ACCEPTED}")
    if len(known) == 1:
        missing = "nonmembers" if "seen" in known else "members"
        raise UserError(f"{where} holds no label of {missing}, only {' and '.join(values.values())}; {_ACCEPTED}")


def _spelling(label: Any) -> str | None:
    """A label as it is compared; None where there is none."""
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return None
    text = str(label).strip().casefold()
    text = text.removesuffix(".0") if text in ("0.0", "1.0") else text
    return {"non-member": "nonmember", "non_member": "nonmember", "": None}.get(text, text)


def _shortened(label: Any) -> str:
    text = " ".join(str(label).split())
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
