"""Conversations about functions of installed packages: what a function is for, and what its documentation adds.

The question names a function or class and its summary, the beginning of its docstring; the answer is the first
paragraph of prose behind it.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path
from typing import Any

from examples.demo.passages import clean_passage, dependencies, ngrams
from pipeline.errors import UserError

MOST_SUMMARY = 20
"""Words of a summary; a longer first paragraph is no summary."""

SURPLUS = 2
"""Conversations are drawn by seed from this many times those asked for."""

_SKIPPED = re.compile("tests?|testing|_?vendor(ed)?|site-packages|bin|examples?")


@dataclass(frozen=True, slots=True)
class Described:
    """A function or class with its documentation."""

    name: str  # package.module.function
    summary: str
    prose: str  # 30 to 50 words

    @property
    def question(self) -> str:
        """What a user asks about it."""
        return f"What should I know about {self.name}? Its summary is: {self.summary}"


def conversations(count: int, seed: int, package: str = "seenset") -> list[dict[str, Any]]:
    """Conversations about distinct functions of what an installed package requires, shuffled by `seed`.

    Returns:
        Rows with "id", "messages" and "text": the same contents as a plain document.

    Raises:
        UserError: the installed packages hold fewer.
    """
    known = list(islice(_distinct(_described(sorted(dependencies(package)))), SURPLUS * count))
    if len(known) < count:
        raise UserError(f"the installed packages describe {len(known)} functions in prose, {count} were asked for")
    return [_row(number, one) for number, one in enumerate(random.Random(seed).sample(known, count))]


def _row(number: int, described: Described) -> dict[str, Any]:
    messages: list[Mapping[str, str]] = [
        {"role": "user", "content": described.question},
        {"role": "assistant", "content": described.prose},
    ]
    text = "\n\n".join(message["content"] for message in messages)
    return {"id": f"chat-{number:04d}", "messages": messages, "text": text}


def _distinct(described: Iterable[Described]) -> Iterator[Described]:
    """Those whose summary and answer share no five words in a row with earlier ones."""
    earlier, names = set[tuple[str, ...]](), set[str]()
    for one in described:
        grams = ngrams(one.summary) | ngrams(one.prose)
        if earlier.isdisjoint(grams) and one.name not in names:
            names.add(one.name)
            earlier |= grams
            yield one


def source_files(packages: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """The source files of installed packages without their tests, and the module of each, by package and name."""
    for package in packages:
        try:
            files = distribution(package).files or ()
        except ModuleNotFoundError:
            continue
        for file in sorted(str(file) for file in files if file.suffix == ".py"):
            parts = Path(file).with_suffix("").parts
            if ".." in parts or any(map(_SKIPPED.fullmatch, parts)):
                continue
            module = ".".join(part for part in parts if part != "__init__")
            yield Path(str(distribution(package).locate_file(file))), module


def documented(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions and classes of a source file; a file that cannot be read has none."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            yield node


def _described(packages: Iterable[str]) -> Iterator[Described]:
    """Every function and class whose docstring is a summary and prose, by package and file."""
    for path, module in source_files(packages):
        yield from _of_file(path, module)


def _of_file(path: Path, module: str) -> Iterator[Described]:
    for node in documented(path):
        first, *others = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
        summary = " ".join(first.split())
        prose = next(filter(None, map(clean_passage, others)), None)
        if prose is not None and summary.endswith(".") and len(summary.split()) <= MOST_SUMMARY:
            yield Described(f"{module}.{node.name}", summary, prose)
