"""One browser a session: Debian's Chromium, driven by Playwright. Without either the tests skip and say why."""

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hostile import hostile_run, write_evaluation_page, write_trial_page
from visits import DESKTOP, Visit

from pipeline.report.page import write_report

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    for package in ("playwright", "axe_playwright_python"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[dev]'")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a file: (path, **settings of the browser's context) -> visit."""
    contexts: list[Any] = []

    def open_page(path: Path, **settings: Any) -> Visit:
        context = browser.new_context(**{"viewport": DESKTOP, "service_workers": "block", **settings})
        contexts.append(context)
        visited = Visit(context.new_page(), [])
        visited.watch(path.as_uri())
        return visited

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, made up, whose names and texts hold markup and scripts."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        "run": Path(write_report(hostile_run(folder / "run"))),
        "trial": write_trial_page(folder / "trial"),
        "evaluation": write_evaluation_page(folder / "evaluation"),
    }
