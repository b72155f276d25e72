"""A corpus that every machine has: prose from the installed packages' descriptions and docstrings.

A demonstration needs documents that anybody can gather again, that differ from each other and that no download can
withhold. Descriptions and docstrings are such documents, once templates, code and repetitions are left out.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.errors import UserError

MIN_WORDS = 30
MAX_WORDS = 90
CUT_WORDS = 50
PLAIN_SHARE = 0.85
NGRAM = 5
SURPLUS = 2
"""Passages are drawn by seed from this many times those asked for, so that a seed chooses."""

_CODE_MARKS = (">>>", "```", "~~~", "``", "http", "<", "|", "::", "{", "=", "---", " : ")
_PLAIN_WORD = re.compile(r"[A-Za-z]+(?:['\u2019-][A-Za-z]+)*")
_AROUND = "\"'\u201c\u201d\u2018\u2019()[],.;:!?"
_SKIPPED_FOLDERS = frozenset({"tests", "test", "testing", "_vendor", "vendor", "site-packages", "bin"})


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of prose and the file or description that it was taken from."""

    text: str  # 30 to 50 words
    source: str  # distribution, or distribution:file


def gather_passages(count: int, seed: int, packages: Iterable[str] | None = None) -> list[Passage]:
    """Choose `count` distinct passages among those that the installed packages hold, shuffled by `seed`.

    The same packages, count and seed give the same passages in the same order.

    Args:
        count: how many.
        seed: which of the surplus are taken, and their order.
        packages: names of the distributions to read; all that are installed by default.

    Raises:
        UserError: the installed packages hold fewer passages.
    """
    passages: list[Passage] = []
    for passage in distinct(candidates(packages)):
        passages.append(passage)
        if len(passages) >= SURPLUS * count:
            break
    if len(passages) < count:
        raise UserError(f"the installed packages hold {len(passages)} passages, {count} were asked for")
    return random.Random(seed).sample(passages, count)


def dependencies(package: str) -> set[str]:
    """Names of all that an installed package requires, and of what that requires in turn."""
    names: set[str] = set()
    to_read: list[tuple[str, set[str]]] = [(package, set())]
    read: set[tuple[str, frozenset[str]]] = set()
    while to_read:
        name, extras = to_read.pop()
        if (name, frozenset(extras)) in read:
            continue
        read.add((name, frozenset(extras)))
        try:
            requirements = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        for needed in requirements:
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                names.add(_normal_name(needed.name))
                to_read.append((_normal_name(needed.name), needed.extras))
    return names


def candidates(packages: Iterable[str] | None = None) -> Iterator[Passage]:
    """Every paragraph that passes `clean_passage`, by package name and then by file name."""
    names_read = None if packages is None else {_normal_name(name) for name in packages}
    installed = {_normal_name(d.metadata["Name"]): d for d in distributions() if d.metadata["Name"]}
    for name in sorted(installed):
        if names_read is not None and name not in names_read:
            continue
        for source, document in _documents(name, installed[name]):
            for paragraph in re.split(r"\n\s*\n", document):
                text = clean_passage(paragraph)
                if text is not None:
                    yield Passage(text, source)


def clean_passage(paragraph: str) -> str | None:
    """The paragraph as one line cut to 50 words, or None if it is no plain prose of 30 to 90 words."""
    words = paragraph.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS:
        return None
    text = " ".join(words)
    if not (text[0].isupper() and text.endswith(".")) or any(mark in text for mark in _CODE_MARKS):
        return None
    if words[0].endswith(":"):  # "Args:", "Returns:": a list, not prose
        return None
    plain = sum(_PLAIN_WORD.fullmatch(word.strip(_AROUND)) is not None for word in words)
    if plain < PLAIN_SHARE * len(words):
        return None
    return " ".join(words[:CUT_WORDS])


def distinct(passages: Iterable[Passage]) -> Iterator[Passage]:
    """Those passages that share no five words in a row with a passage already kept."""
    earlier: set[tuple[str, ...]] = set()
    for passage in passages:
        grams = ngrams(passage.text)
        if earlier.isdisjoint(grams):
            earlier |= grams
            yield passage


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Every run of five words, in lower case and without the punctuation around a word."""
    words = [word.strip(_AROUND).lower() for word in text.split()]
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def _documents(name: str, distribution: Distribution) -> Iterator[tuple[str, str]]:
    """The description, then the docstrings of each source file: (source, text)."""
    description = distribution.metadata.json.get("description")
    if isinstance(description, str):
        yield name, inspect.cleandoc(description)
    for file in sorted(str(f) for f in distribution.files or () if f.suffix == ".py"):
        parts = Path(file).parts
        if ".." in parts or _SKIPPED_FOLDERS.intersection(parts):
            continue
        for docstring in _docstrings(Path(str(distribution.locate_file(file)))):
            yield f"{name}:{Path(file).as_posix()}", docstring


def _docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file from top to bottom; a file that cannot be read has none."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=True)
            if docstring:
                yield docstring


def _normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
