"""The versions of a document as its row holds them, checked: of k texts one, drawn at random, was published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from pipeline.corpus.formats.base import Unreadable
from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class TextVersions:
    """The k >= 2 distinct versions of one document."""

    texts: tuple[str, ...]
    published: int  # index of the published version, in [0, k)
    digests: bytes  # SHA-256 of each version as its file has it, side by side: these differ whatever is transformed
    kinds: tuple[str, ...] = ()  # of the edited sites
    forms: tuple[bytes, ...] = ()  # of each version, a byte for each site; empty where they are not known
    differing: bool = False  # whether only what differs between versions is scored

    @property
    def text(self) -> str:
        """The published version."""
        return self.texts[self.published]

    def transformed(self, change: Callable[[str], str]) -> TextVersions:
        """The same versions with every text changed; some of them may then be equal."""
        return replace(self, texts=tuple(map(change, self.texts)))


def row_versions(
    where: str, value: Any, companions: Sequence[Any], problem_of: Callable[[Any], Unreadable | None]
) -> TextVersions | Unreadable:
    """The versions of a row; why there are none, where a text of it cannot be scored: then none of them is.

    Args:
        where: file and row, for messages.
        value: of the column of versions.
        companions: the values of `Shard.companions`: the index and, where they are given, kinds and forms.
        problem_of: why a text cannot be scored.

    Raises:
        UserError: fewer than two versions, equal ones, an index outside them, or forms that are not theirs.
    """
    index, *sites = companions
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{where} has no list of versions, but {type(value).__name__}")
    if len(value) < 2:
        raise UserError(f"{where} has {len(value)} version{'s' * (len(value) != 1)}; a document needs 2 or more")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(value):
        raise UserError(f"{where} has index {index!r}, outside its {len(value)} versions (from 0)")
    for place, text in enumerate(value):
        if (problem := problem_of(text)) is not None:
            return Unreadable(problem.reason, f"version {place}: {problem.message}")
    if len(set(value)) < len(value):
        raise UserError(f"{where} has two equal versions")
    kinds, forms = (tuple(one or ()) for one in sites) if sites else ((), ())
    if sites and not (len(forms) == len(value) and all(_fits(form, kinds) for form in forms)):
        raise UserError(f"{where} has forms that are not of its versions: a version has a byte for each of its sites")
    digests = b"".join(sha256(text.encode()).digest() for text in value)
    return TextVersions(tuple(value), index, digests, kinds, forms)


def _fits(form: Any, kinds: Sequence[str]) -> bool:
    return isinstance(form, bytes) and len(form) == len(kinds)
