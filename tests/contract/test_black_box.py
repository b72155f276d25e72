"""These tests see the product as a user does: the command and `import seenset`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("*.py"))
SHARED = {
    "tests.helpers.object_store": "tests/helpers/object_store.py",
    "tests.helpers.openai_server": "tests/helpers/openai_server.py",
}
"""Servers that other tests use too."""
INTERNAL = ("pipeline", "ray_jobs", "cluster", "benchmarks", "examples", "tests", "docs")


def modules(path: Path) -> set[str]:
    """The modules that a file names in its imports."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or ".")
    return named


@pytest.mark.parametrize("path", [*FILES, *(ROOT / name for name in SHARED.values())], ids=lambda path: path.name)
def test_a_file_imports_nothing_of_the_inside(path: Path) -> None:
    assert {name for name in modules(path) - SHARED.keys() if name.split(".")[0] in INTERNAL} == set()
    if path != Path(__file__):
        text = path.read_text(encoding="utf-8")
        assert [word for word in ("pipeline.", "ray_jobs.", "monkeypatch.setattr", "mock") if word in text] == []


def test_only_the_public_names_of_the_interface_are_used() -> None:
    assert {name for path in FILES for name in modules(path) if name.startswith("seenset.")} == set()
