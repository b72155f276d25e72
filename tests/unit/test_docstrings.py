"""What docstrings and documentation refer to is in this repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "docs/methods.md"
READ = ("pipeline", "ray_jobs", "cluster", "seenset", "docs")
KINDS = {".py", ".md", ".yaml", ".yml", ".html", ".json", ".toml", ".txt"}
FILES = sorted(
    path
    for folder in READ
    for path in (ROOT / folder).rglob("*")
    if path.suffix in KINDS and "_build" not in path.relative_to(ROOT).parts
)

NUMBER = r"\d+(?:\.\d+)*"
LIST = rf"{NUMBER}(?:(?:, | and | to |, and ){NUMBER})*"
CITATION = re.compile(
    rf"docs/methods\.md, sections? ({LIST})"  # in a docstring
    rf"|\[[^\]]*?sections? ({LIST})[^\]]*\]\([^)]*\bmethods\.md[^)]*\)"  # a link on another page
)
WITHIN = re.compile(rf"\bsections? ({LIST})")  # on the page itself; "sec." is a section of a paper
HEADING = re.compile(rf"^#{{2,3}} ({NUMBER})\.? \S", re.MULTILINE)


def sections() -> set[str]:
    return set(HEADING.findall(METHODS.read_text(encoding="utf-8")))


def cited(text: str) -> Iterator[str]:
    """The sections of docs/methods.md that a text names, wherever its lines break."""
    for found in CITATION.finditer(" ".join(re.sub(r"^\s*#\s", " ", text, flags=re.MULTILINE).split())):
        yield from re.findall(NUMBER, found[1] or found[2])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_refers_to_a_section_that_is_not_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "METHODS" not in text
    assert not sorted(set(cited(text)) - sections())


def test_the_methods_page_refers_to_its_own_sections() -> None:
    text = " ".join(METHODS.read_text(encoding="utf-8").split())
    named = {section for found in WITHIN.finditer(text) for section in re.findall(NUMBER, found[1])}
    assert len(named) > 10
    assert not sorted(named - sections())
    wrapped, linked = "(docs/methods.md,\n    sections 3.1 and 99).", "[methods, section 98.7](../methods.md#x)"
    assert [*cited(wrapped), *cited(linked)] == ["3.1", "99", "98.7"], "one that is not there is noticed"
    assert {"99", "98.7"}.isdisjoint(sections())


def test_the_sections_of_the_methods_page_are_numbered_without_a_gap() -> None:
    found = HEADING.findall(METHODS.read_text(encoding="utf-8"))
    chapters = [name for name in found if "." not in name]
    assert chapters == [str(number) for number in range(1, len(chapters) + 1)]
    for chapter in chapters:
        parts = [name for name in found if name.startswith(f"{chapter}.")]
        assert parts == [f"{chapter}.{number}" for number in range(1, len(parts) + 1)]


def test_the_tests_that_the_methods_page_names_exist() -> None:
    """`..::` stands for the file that is named in the row above it."""
    file, named = "", 0
    text = METHODS.read_text(encoding="utf-8")
    for path, test in re.findall(r"`((?:\w+/)*test_\w+\.py|\.\.)(?:::(test_\w+))?`", text):
        file = file if path == ".." else path
        (found,) = (ROOT / "tests").glob(f"**/{file}")
        assert not test or f"def {test}(" in found.read_text(encoding="utf-8"), test
        named += 1
    assert named > 20
