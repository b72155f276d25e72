"""The curated words of English (`english.toml`) as tables of families: (kind, line) each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import resources

_WORDS = tomllib.loads(resources.files(__package__).joinpath("english.toml").read_text(encoding="utf-8"))

SETS: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _WORDS["sets"].items()}
"""Words that stand between others, and words of a kind."""

MONTHS: tuple[str, ...] = tuple(_WORDS["months"].split())
UNORDERED = SETS["UNORDERED"] | set(MONTHS)
"""Items whose enumeration keeps its order."""


def spelling_lines() -> Iterator[tuple[str, str]]:
    """Every American spelling and its British one; the kind is the stem."""
    between = _WORDS["spellings_between"]
    for family in _WORDS["stems"].split(";"):
        stems, *endings = family.split()
        american, british = stems.split("/")
        bound = bool(endings) and endings[0].startswith("-")  # a stem that is no word
        for ending in [*([] if bound else [""]), *(ending.lstrip("-") for ending in endings)]:
            yield american, f"{american}{ending}|{british}{ending} ; {between.get(american, '')}"
    for stem in _WORDS["ize"].split():
        for ending in ("e", "es", "ed", "ing", "ation", "ations", "er", "ers"):
            yield "ize", f"{stem}iz{ending}|{stem}is{ending}"


def phrase_lines(table: str) -> Iterator[tuple[str, str]]:
    """The families of a table; the kind is the canonical form, and of contractions and units what is short in it."""
    for line in _WORDS[table].strip().split("\n"):
        first = line.split("|")[0]
        yield (first.split()[-1] if table == "contraction" else first.split()[0] if table == "that" else first), line


def number_lines() -> Iterator[tuple[str, str]]:
    """Numbers of what is counted, in words and in figures."""
    for value, word in enumerate(_WORDS["numbers"].split(), 2):
        yield word, f"{word}|{value} ; >COUNTED <!LABEL ="


def patterns() -> Iterator[tuple[str, str, list[list[str]]]]:
    """(name, regular expression, families of what it matches); capitals in braces stand for a set in an expression."""
    sets = {"MONTH": _WORDS["months"], "NUMBER": _WORDS["numbers"], **_WORDS["sets"]}
    for name, entry in _WORDS["patterns"].items():
        families = [family.split("|") for line in entry["families"].strip().split("\n") for family in line.split(";")]
        forms = "|".join(re.escape(form) for family in families for form in sorted(family, key=len, reverse=True))
        expression = entry["pattern"].replace("{FORMS}", f"(?:{forms})")
        for capitals, words in sets.items():
            expression = expression.replace(f"{{{capitals}}}", f"(?:{'|'.join(words.split())})")
        yield name, expression, families
