"""README.md and the pages of docs/: their settings are settings, their links lead somewhere, and the site builds."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel

import seenset
from docs import reference
from docs.blocks import PAGES, ROOT, RUNNABLE, Block, all_pages, anchors, blocks, links
from examples.trials.run import EVERY_NAME
from pipeline.config.audit import AuditConfig
from pipeline.detectors.registry import parse_detectors
from pipeline.plan.description import build_config, build_evaluation
from pipeline.trial.config import TrialConfig, build_trial

README = ROOT / "README.md"
EVERY_PAGE = all_pages()
EVERY_BLOCK = [block for page in EVERY_PAGE for block in blocks(page)]
SETTINGS = [block for block in EVERY_BLOCK if block.language == "yaml" and block.excuse is None]
SETTINGS = [block for block in SETTINGS if "\nimport: " not in block.text]  # tests/ray runs those with their files
SHOWN = ("text", "json")
"""Languages of blocks that are only looked at."""

SOURCE = {"path": "documents.jsonl", "group": "section"}
PARTS: dict[str, Any] = {
    "run": "runs/part",
    "model": {"path": "models/part"},
    "reference_model": {"path": "models/reference"},
    "paraphraser": {},
    "corpus": {"audit": SOURCE, "unseen": SOURCE, "seen": SOURCE},
    "detectors": ["loss", "zlib", "lowercase", "reference", "min_k", "min_k_plus_plus"],
}
"""What a part of an audit is merged into."""

REPLACED = ("model", "audit", "unseen", "seen", "documents")
"""What a part replaces as a whole."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def registered_names(section: type[BaseModel]) -> set[str]:
    """The settings of a section, as a user writes them."""
    return {field.alias or name for name, field in section.model_fields.items()}


def merged(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(whole)
    for key, value in part.items():
        both = isinstance(value, dict) and isinstance(whole.get(key), dict) and key not in REPLACED
        settings[key] = merged(whole[key], value) if both else value
    return settings


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_settings_of_a_page_are_settings(block: Block) -> None:
    part = yaml.safe_load(block.text)
    assert isinstance(part, dict)
    if "labelled" in part.get("corpus", {}):
        build_evaluation({**PARTS, **part})
    elif set(part) <= registered_names(AuditConfig):
        sources = [source for source in part.get("corpus", {}).values() if isinstance(source, dict)]
        scores, pictures, versions = (any(key in one for one in sources) for key in ("scores", "image", "versions"))
        chats = any("messages" in one for one in sources)
        whole = {} if scores else {**PARTS, "corpus": {}} if pictures or versions or chats else PARTS
        build_config(merged(whole, part))
    else:
        assert set(part) <= registered_names(TrialConfig), f"neither an audit nor a trial: {sorted(part)}"
        trial = {key: value for key, value in PARTS.items() if key != "corpus"}
        selections = [{"name": "part", "detectors": ["loss"]}]
        build_trial(merged({**trial, "documents": SOURCE, "selections": selections}, part))


def test_every_block_says_what_it_is_and_a_command_that_is_not_run_why() -> None:
    for block in EVERY_BLOCK:
        assert block.language in (*RUNNABLE, *SHOWN) or block.language.startswith("{"), block
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "bash" and block.excuse is None:
            assert [command for command in block.commands if not command.startswith("seenset ")] == [], block


def test_every_make_target_trial_and_benchmark_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in EVERY_PAGE:
        text = page.read_text(encoding="utf-8")
        for target, names in re.findall(r"(?:`|^)make ([\w-]+)(?: NAME=\"?([\w ]+))?", text, re.MULTILINE):
            assert target in targets, f"{page_id(page)}: make {target}"
            assert {*names.split()} <= {*EVERY_NAME, "all", "NAME"}, f"{page_id(page)}: make {target} NAME={names}"
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert find_spec(module) is not None, f"{page_id(page)}: python -m {module}"


@pytest.mark.parametrize("page", [*EVERY_PAGE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [target for target in links(page) if not _leads_somewhere(page, target)]
    assert not broken


def _leads_somewhere(page: Path, target: str) -> bool:
    parts = urlsplit(target)
    if parts.scheme:
        return parts.scheme == "https" and "." in parts.netloc and " " not in target
    place = (page.parent / parts.path).resolve() if parts.path else page
    if not place.is_relative_to(ROOT) or not place.exists():
        return False
    return not parts.fragment or (place.suffix == ".md" and parts.fragment in anchors(place))


def test_every_page_is_in_the_navigation_and_the_readme_is_one_screen() -> None:
    assert len(README.read_bytes()) <= 8 * 1024
    trees = [block.text for block in blocks(PAGES / "index.md") if block.language == "{toctree}"]
    named = {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}
    pages = {str(page.relative_to(PAGES).with_suffix("")) for page in EVERY_PAGE if page != README}
    assert named == pages - {"index"}


def test_the_reference_of_the_configuration_is_current_with_a_sentence_a_setting() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "make docs writes it anew"
    _, *lists = reference.page().split("\n## ")
    rows = [line for line in "\n".join(lists).splitlines() if line.startswith(("- `", "- [`"))]
    assert len(rows) > 100
    assert [row for row in rows if ": " not in row or not row.endswith((".", ")"))] == []


def test_every_name_of_the_interface_is_on_its_page() -> None:
    page = (PAGES / "python.md").read_text(encoding="utf-8")
    assert [name for name in seenset.__all__ if not re.search(rf"(:: |`|seenset\.){name}\b", page)] == []


def test_the_tree_and_the_paths_of_the_architecture_are_those_of_the_code() -> None:
    page = PAGES / "architecture.md"
    tree = next(block.text for block in blocks(page) if block.language == "text")
    rooms = re.findall(r"^  (\w+)/", tree, re.MULTILINE)
    assert sorted(rooms) == sorted(path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py"))
    assert all((ROOT / name).is_dir() for name in re.findall(r"^(\w+)/", tree, re.MULTILINE))
    named = r"`((?:pipeline|ray_jobs|cluster|seenset|tests|docs)/[\w/.]*)`"
    paths = re.findall(named, page.read_text(encoding="utf-8"))
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *options, str(PAGES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"(?:https?:)?//|@import|url\(http")
    for file in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        assert not loaded.search(file.read_text(encoding="utf-8")), file.name


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


def test_no_file_refers_to_a_section_that_is_not_there() -> None:
    there = sections()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "METHODS" not in text, path
        assert not sorted(set(cited(text)) - there), path


def test_the_methods_page_refers_to_its_own_sections() -> None:
    text = " ".join(METHODS.read_text(encoding="utf-8").split())
    named = {section for found in WITHIN.finditer(text) for section in re.findall(NUMBER, found[1])}
    assert len(named) > 10
    assert not sorted(named - sections())
    wrapped, linked = "(docs/methods.md,\n    sections 3.1 and 99).", "[methods, section 98.7](../methods.md#x)"
    assert [*cited(wrapped), *cited(linked)] == ["3.1", "99", "98.7"], "one that is not there is noticed"
    assert {"99", "98.7"}.isdisjoint(sections())


def test_the_tests_that_the_methods_page_names_exist() -> None:
    file, named = "", 0
    text = METHODS.read_text(encoding="utf-8")
    for path, test in re.findall(r"`((?:\w+/)*test_\w+\.py|\.\.)(?:::(test_\w+))?`", text):
        file = file if path == ".." else path
        (found,) = (ROOT / "tests").glob(f"**/{file}")
        assert not test or f"def {test}(" in found.read_text(encoding="utf-8"), test
        named += 1
    assert named > 20


def stated_defaults(page: str) -> Iterator[tuple[str, str, str]]:
    """Detector, argument and default, as a page states them in a row of a detector or, for all, of an argument."""
    detectors = re.findall(r"^\| `(\w+)`", page.split("\n| argument |")[0], re.MULTILINE)
    for name, row in re.findall(r"^\| `(\w+)` ?(.*)$", page, re.MULTILINE):
        if name in detectors:
            yield from ((name, *stated) for stated in re.findall(r"`(\w+)`: [^;|]*?default `?([\w.]+)", row))
        else:
            yield from ((detector, name, row.split("|")[1].strip(" `")) for detector in detectors)


def test_the_pages_of_detectors_state_the_defaults_of_their_arguments() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (PAGES / "detectors").glob("*.md")]
    stated = {(name, argument): default for page in pages for name, argument, default in stated_defaults(page)}
    names = {name for name, _ in stated}
    defaults = {
        (name, key): str(value) for name in names for key, value in parse_detectors([name])[0].arguments.items()
    }
    assert {key: float(stated[key]) if value[0].isdigit() else stated[key] for key, value in defaults.items()} == {
        key: float(value) if value[0].isdigit() else value for key, value in defaults.items()
    }
