"""Names are nouns of the field, and one name means one thing: no two rooms have a public name in common."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "ray_jobs", "cluster")

VAGUE = {"found", "asked", "own", "said", "told"}
"""Words that say nothing of the value that they name."""

CLEAN_ROOMS = (
    "benchmarks",
    "cluster",
    "examples",
    "pipeline/corpus",
    "pipeline/models",
    "pipeline/passes",
    "pipeline/selection",
    "pipeline/training",
)
CLEAN_FILES = (
    "pipeline/audit/allocation.py",
    "pipeline/audit/forecast.py",
    "pipeline/audit/plan.py",
    "pipeline/audit/price.py",
    "pipeline/config/corpus.py",
    "pipeline/config/models.py",
    "pipeline/config/training.py",
    "pipeline/config/yaml.py",
    "pipeline/endpoint/client.py",
    "pipeline/store/files.py",
    "pipeline/store/lock.py",
    "pipeline/trial/config.py",
    "pipeline/trial/contaminate.py",
    "pipeline/trial/detection.py",
    "pipeline/trial/documents.py",
    "pipeline/trial/figures.py",
    "pipeline/trial/intervals.py",
    "pipeline/trial/ranking.py",
    "pipeline/trial/splits.py",
    "ray_jobs/adapters.py",
    "ray_jobs/finetune.py",
    "ray_jobs/interrupts.py",
    "ray_jobs/progress.py",
    "ray_jobs/training.py",
)

PENDING = {"Answer", "answer", "read_run"}
"""Names that two rooms still share."""


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
    rooms: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in public_names(path):
                rooms[name].add(str(path.parent.relative_to(ROOT)))
    shared = {name: sorted(places) for name, places in rooms.items() if len(places) > 1}
    assert {name: places for name, places in shared.items() if name not in PENDING} == {}
    assert shared.keys() >= PENDING, "a name that is shared no more is pending no more"


@pytest.mark.parametrize("place", [*CLEAN_ROOMS, *CLEAN_FILES])
def test_names_are_nouns(place: str) -> None:
    files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    vague = [f"{path.relative_to(ROOT)}:{line} {name}" for path in files for line, name in names_made_in(path)]
    assert [name for name in vague if name.split()[-1].lstrip("_") in VAGUE] == []
