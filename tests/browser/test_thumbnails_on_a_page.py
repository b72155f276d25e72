"""Thumbnails of selected pictures in a real browser: they are drawn, beside captions that stay text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from visits import Visit


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that selected pictures, one of them with a hostile file and a hostile caption."""
    from test_thumbnails import finished_run

    return Path(finished_run(tmp_path_factory.mktemp("thumbnails")).path("report/report.html"))


def test_thumbnails_are_drawn_and_captions_stay_text(visit: Callable[..., Visit], page: Path) -> None:
    visited = visit(page)
    place = visited.page.locator("[data-documents=m]")
    place.scroll_into_view_if_needed()
    place.locator("img.thumbnail").first.wait_for()
    widths = visited.page.evaluate("[...document.querySelectorAll('img.thumbnail')].map((image) => image.naturalWidth)")
    assert widths
    assert set(widths) <= {96, 40, 32}  # of the hostile picture, scaled down, and of the others
    assert "<script>" in place.inner_text()
    place.locator("button.opener").first.click()
    place.locator("div.opened img.thumbnail").wait_for()
    assert visited.problems == []
