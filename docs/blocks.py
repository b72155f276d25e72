"""The fenced blocks, links and headings of the README and of the pages, as the tests of the documentation read them.

How a block says what it is:

- `yaml`: a whole audit or trial, or a part of one.
- `bash`: commands, one a line.
- `python`: statements; the blocks of a page follow one another.
- A first line `# NAME.yaml` or `# NAME.py` names the file that a block is, which later commands read.
- A block that cannot run on two cores and without network stands below a line `<!-- not run: why -->`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
RUNNABLE = ("yaml", "bash", "python")
EXCUSE = re.compile(r"<!-- not run: (\S.*?) -->")
_FILE = re.compile(r"# (\S+\.(?:yaml|py))\n")
_READER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of the page, from 1
    language: str
    text: str
    excuse: str | None  # why it is not run

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        named = _FILE.match(self.text)
        return named[1] if named else None

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def all_pages() -> list[Path]:
    """README.md, then every page of the site."""
    built = PAGES / "_build"
    return [ROOT / "README.md", *sorted(path for path in PAGES.rglob("*.md") if built not in path.parents)]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    tokens = _tokens(page)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence" and token.map is not None:
            excuse = EXCUSE.search(before.content) if before is not None and before.type == "html_block" else None
            yield Block(page, token.map[0] + 1, token.info.strip(), token.content, excuse[1] if excuse else None)


def links(page: Path) -> Iterator[str]:
    """The targets of all links and pictures of a page."""
    for token in _inline(page):
        yield str(token.attrs.get("href") or token.attrs.get("src") or "")


def anchors(page: Path) -> set[str]:
    """What a link into a page may end with: its headings as GitHub and the site name them."""
    names: set[str] = set()
    tokens = _tokens(page)
    for token, inner in itertools.pairwise(tokens):
        if token.type == "heading_open":
            shown = "".join(child.content for child in inner.children or [])
            name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            names.add(name)
    return names | set(re.findall(r"^\(([\w-]+)\)=$", page.read_text(encoding="utf-8"), re.MULTILINE))


def _tokens(page: Path) -> list[Token]:
    return _READER.parse(page.read_text(encoding="utf-8"))


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from (child for child in token.children or [] if child.type in ("link_open", "image"))
