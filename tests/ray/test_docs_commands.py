"""What README.md and the pages tell a reader to type is typed here, in order, in a folder like the reader's.

The folder holds the files that the pages name: a corpus of made-up texts, and tiny random models under the names of the
real ones. So every block runs as it stands, but for the place of the models.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.blocks import ROOT, Block, all_pages, blocks
from ray_jobs.cli import app, main
from tests.helpers.made_up import sentence, write_columns

COUNTS = {"audit": 60, "unseen": 40, "seen": 40, "labelled": 80, "documents": 240}
LENGTHS = {"audit": 30, "unseen": 20, "seen": 30, "labelled": 20, "documents": 20}
FIRST = ROOT / "README.md"
RUN: list[str] = []
"""Every command, Python block and file of settings that was run."""


@pytest.fixture(scope="module")
def desk(tiny_model_folder: Path, tiny_t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """The reader's folder, after all that README.md says."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        shutil.copytree(tiny_model_folder, folder / name)
    shutil.copytree(tiny_t5_folder, folder / "humarin/chatgpt_paraphraser_on_T5_base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_drafts(folder / "data/drafts.jsonl")
        desk = Desk(folder)
        desk.do(FIRST)
        yield desk


class Desk:
    """A folder in which the pages are followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def do(self, page: Path) -> None:
        """All that a page says, in order."""
        names: dict[str, Any] = {}
        for block in blocks(page):
            if block.excuse is not None:
                continue
            if block.file is not None:
                self.write(block)
            elif block.language == "bash":
                for command in block.commands:
                    self.type(block, command)
            elif block.language == "python":
                exec(compile(block.text, str(block), "exec"), names)
                RUN.append(f"{block}: python")

    def type(self, block: Block, command: str) -> None:
        """One command, which must end well."""
        arguments = shlex.split(command)
        assert arguments[0] == "seenset", f"{block}: {command}"
        with pytest.raises(SystemExit) as ended:
            main(arguments[1:])
        assert not ended.value.code, f"{block}: {command}: exit code {ended.value.code}"
        RUN.append(f"{block}: {command}")

    def write(self, block: Block) -> None:
        """A file of settings or of code as it stands on the page, and the documents that it names."""
        place = self.folder / str(block.file)
        place.parent.mkdir(parents=True, exist_ok=True)
        RUN.append(f"{block}: {block.file}")
        if block.language != "yaml":
            place.write_text(block.text, encoding="utf-8")
            return
        settings = yaml.safe_load(block.text)
        for model in ("model", "reference_model", "paraphraser"):
            if "path" in (settings.get(model) or {}):
                settings[model]["path"] = str(self.folder / settings[model]["path"])  # workers stand elsewhere
        sources = {**settings.get("corpus", {}), **{key: settings[key] for key in ("documents",) if key in settings}}
        for role, source in sources.items():
            write_documents(self.folder, role, source)
        place.write_text(yaml.safe_dump(settings), encoding="utf-8")


def write_drafts(place: Path) -> None:
    """Prose for `seenset mark`, which refuses texts of which nothing can be marked: the paragraphs of these pages."""
    pages = "\n\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("guarantee.md", "versions.md"))
    texts = [text for text in pages.split("\n\n") if len(text.split()) > 40]
    place.parent.mkdir(parents=True, exist_ok=True)
    write_columns(place, {"body": texts})


def write_documents(folder: Path, role: str, source: dict[str, str]) -> None:
    """The documents of a role, in the file and under the columns that the settings name."""
    place = folder / source["path"].replace("*", "part")
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    first = 1000 * (1 + list(COUNTS).index(role))
    texts = [sentence(first + i, LENGTHS[role]) for i in range(COUNTS[role])]
    columns: dict[str, list[str]] = {source.get("text", "text"): texts}
    if "id" in source:
        columns[source["id"]] = [f"{role}-{i}" for i in range(len(texts))]
    if "label" in source:
        columns[source["label"]] = [str(i // 2 % 2) for i in range(len(texts))]  # both kinds in every group
    if "group" in source:
        columns[source["group"]] = [("news", "notes")[i % 2] for i in range(len(texts))]
    write_columns(place, columns)


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_can_be_done(page: Path, desk: Desk) -> None:
    if page != FIRST:
        desk.do(page)


def test_every_command_is_shown_and_was_run() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    shown = {entry.split(": seenset ")[1].split()[0] for entry in RUN if ": seenset " in entry}
    assert shown == names
