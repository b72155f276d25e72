"""Names are nouns of the field, and one name means one thing: no two rooms have a public name in common."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pipeline", "ray_jobs", "cluster")
PACKAGES = (*ROOMS, "seenset", "benchmarks", "examples")

VAGUE = {"found", "asked", "own", "said", "told"}
"""Words that say nothing of the value that they name."""

REPLACED = {
    *("crew", "nursery", "breed", "guard", "ending", "ahead", "mend", "guilt", "condemned", "journal"),
    *("apart", "weighing", "precheck", "strongest", "course", "reading"),
}
"""Words for which the field has another: worker, supervisor, prefetch, repair, suspect, attempt log, two-sample test,
density ratio, preflight check, top documents, series summary, pass."""

MOST_OF = 40
"""Functions that are named `of` or end in `_of`, which state a grammatical role and not what they do or return."""

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def public_names(path: Path) -> Iterator[str]:
    """The functions and classes of a module that other modules may import."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_"):
            yield node.name


def names_made_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of every function, parameter, variable and attribute that a file makes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_no_two_rooms_share_a_public_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ROOMS:
            for name in public_names(path):
                places[name].add(str(path.parent.relative_to(ROOT)))
    assert {name: sorted(rooms) for name, rooms in places.items() if len(rooms) > 1} == {}


def test_few_functions_are_named_by_a_grammatical_role() -> None:
    names = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] in (*ROOMS, "seenset")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch("of|.*_of", node.name)
    ]
    assert len(names) <= MOST_OF, names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_nouns_of_the_field(path: Path) -> None:
    names = [(0, path.stem), *names_made_in(path)]
    parts = [(line, name, {part.rstrip("s") for part in re.findall("[a-z]+", snake(name))}) for line, name in names]
    refused = [(line, name) for line, name, some in parts if name.lstrip("_") in VAGUE or some & REPLACED]
    assert refused == []


def snake(name: str) -> str:
    """A name in lower case with underlines between its words."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def test_names_of_tests_have_at_most_80_characters() -> None:
    names = {name for path in (ROOT / "tests").rglob("test_*.py") for _, name in names_made_in(path)}
    assert len([name for name in names if name.startswith("test_")]) > 1_000
    assert sorted(name for name in names if name.startswith("test_") and len(name) > 80) == []
