"""Refusals: replies in which a model states in the first person that it does not continue a text.

The rules are one table, refusals.toml, a row a language. A reply is a refusal only if it is short, begins with one,
perhaps behind an apology, and names what is refused. What the document itself states, such as a novel in which somebody
cannot go on, is no refusal of the model: a reply is none if it repeats the reference, the part of its document with
which it is compared, or if the reference is a refusal too.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any

from pipeline.corpus.scripts import by_characters, units

VERSION = 3
"""Version of the rules; it is part of the fingerprint of draws."""

LONGEST = 1200
"""Maximum characters of a refusal, which may offer other help."""

LONGEST_BARE = 200
"""Maximum characters of a refusal that names neither copyright nor other help."""

SHARED_WORDS, SHARED_CHARACTERS = 8, 20
"""Words in a row, or characters of scripts without blanks, by which a reply repeats its reference."""

_NEAR = 240  # characters from the beginning of a refusal in which it names what is refused
_QUOTES = "\"'\u201c\u201d\u201e\u201f\u2018\u00ab\u00bb\u2039\u203a\u300c\u300e\u300a"
_LINK = r"(?:[\s,.:;!\u2013\u2014\u3002\uff0c\u3001\uff01*-]+|\b)"
_OPTIONAL = {"this": "(?!)", "person": "", "whole": "(?!)"}  # keys that a row may lack -> what stands for them
_SPACES = re.compile(r"\s+")
_CLAUSE = re.compile(r"[.!?;:\u3002\uff01\uff1f]")
_EDGES = re.compile(r"[\W_]+")


@dataclass(frozen=True, slots=True)
class Language:
    """The rules of a language: a row of refusals.toml, compiled."""

    name: str
    begin: re.Pattern[str]  # apologies, if any, and the statement, in a group `statement`
    sure: re.Pattern[str]  # objects that hardly any text but a refusal has so near to its beginning
    this: re.Pattern[str]  # objects that name the text or the request at hand
    usual: re.Pattern[str]  # objects that other texts have too
    person: re.Pattern[str]  # what shows that the model speaks of itself
    whole: re.Pattern[str]  # refusals without an object
    offer: re.Pattern[str]  # other help
    narrated: re.Pattern[str]  # what shows that somebody tells of a refusal

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Language:
        """Compile a row."""
        statement = f"(?:{'|'.join(row['statement'])}){row['between']}(?:{'|'.join(row['verb'])})"
        opening = rf"(?:(?:{'|'.join(row['opening'])}){_LINK}){{0,4}}"
        parts = {key: re.compile("|".join(row[key])) for key in ("sure", "usual", "offer", "narrated")}
        parts |= {key: re.compile("|".join(row.get(key, [absent]))) for key, absent in _OPTIONAL.items()}
        parts["whole"] = re.compile(f"{opening}(?:{parts['whole'].pattern})")
        return cls(row["name"], re.compile(f"{opening}(?P<statement>{statement})"), **parts)

    def refuses(self, text: str) -> bool:
        """Whether a folded text begins with a refusal that names what is refused."""
        short = len(text) <= LONGEST_BARE
        if short and self.whole.match(text) and not self.narrated.search(text):
            return True
        match = self.begin.match(text)
        if match is None or not self.person.search(match[0]):
            return False
        near = text[: match.start("statement") + _NEAR]
        if self.narrated.search(near):
            return False
        if self.sure.search(near):
            return True
        end = _CLAUSE.search(text, match.end("statement"))
        named = near if end is None else near[: end.start()]
        offers = self.offer.search(text) is not None
        if not short and not offers:
            return False
        opened = offers or match.start("statement") > 0
        return self.this.search(named) is not None or (opened and self.usual.search(named) is not None)


@cache
def languages() -> tuple[Language, ...]:
    """The table of rules."""
    table = resources.files(__package__).joinpath("refusals.toml").read_text(encoding="utf-8")
    return tuple(Language.of(row) for row in tomllib.loads(table)["language"])


def is_refusal(reply: str, reference: str) -> bool:
    """Whether a reply states that the model does not continue a text.

    Args:
        reply: what the model wrote.
        reference: the part of the document that it is compared with.
    """
    text = _folded(reply)
    if len(text) > LONGEST or not _refuses(text) or _refuses(_folded(reference[:LONGEST])):
        return False
    return not repeats_reference(reply, reference)


def _refuses(text: str) -> bool:
    """Whether a folded text is a refusal by the table."""
    return bool(text) and text[0] not in _QUOTES and any(language.refuses(text) for language in languages())


def _folded(text: str) -> str:
    """A text in lower case, with one kind of apostrophes and blanks, and without marks of emphasis before it."""
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'").replace("\u02bc", "'")
    return _SPACES.sub(" ", plain).strip().lstrip("*_> ")


def repeats_reference(reply: str, reference: str) -> bool:
    """Whether a reply repeats a reference.

    It does if it stands in it whole, if it begins with all of it, or if both have `SHARED_WORDS` words in a row in
    common, or `SHARED_CHARACTERS`.
    """
    characters = by_characters(reference)
    length = SHARED_CHARACTERS if characters else SHARED_WORDS
    ours, theirs = (_bare_units(text, characters) for text in (reply, reference))
    if not ours or not theirs:
        return False
    whole = tuple(ours) in _runs(theirs, len(ours)) or ours[: len(theirs)] == theirs
    return whole or not _runs(ours, length).isdisjoint(_runs(theirs, length))


def _bare_units(text: str, characters: bool) -> list[str]:
    """The words, or characters, of a text in lower case without punctuation."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [bare for unit in units(folded, characters) if (bare := _EDGES.sub("", unit))]


def _runs(words: Sequence[str], length: int) -> set[tuple[str, ...]]:
    return set(zip(*(islice(words, start, None) for start in range(length)), strict=False))
