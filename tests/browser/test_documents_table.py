"""Claims about the table of selected documents on a run's page, in a real browser: search, order, filters, opening."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import script
from visits import Visit

Open = Callable[..., Visit]


@pytest.fixture
def table(visit: Open, pages: dict[str, Path]) -> tuple[Visit, Any]:
    visited = visit(pages["run"])
    place = visited.page.locator("[data-documents=members]")
    place.scroll_into_view_if_needed()
    place.locator("tbody tr").first.wait_for()
    return visited, place


@pytest.fixture
def n_selected(pages: dict[str, Path]) -> int:
    """Number of documents in the table."""
    summary = pages["run"].parents[1] / "selection/members/summary.json"
    return int(json.loads(summary.read_text())["n_selected"])


def column(place: Any, at: int) -> list[str]:
    return [text.strip() for text in place.locator(f"tbody tr td:nth-child({at})").all_inner_texts()]


def test_the_search_keeps_the_rows_that_hold_the_words(table: tuple[Visit, Any], n_selected: int) -> None:
    visited, place = table
    assert f"of {n_selected}" in place.inner_text()
    search = place.get_by_role("searchbox")
    for words, rows in (('"text number 77"', 1), ("<script>", 25), ("no document holds this", 0), ("", 25)):
        search.fill(words)
        visited.page.wait_for_function(
            "rows => document.querySelectorAll('[data-documents=members] button.opener').length === rows", arg=rows
        )
        assert ("number 77" in place.locator("tbody").inner_text()) == (rows == 1)
    assert visited.problems == []


def test_a_heading_sorts_by_number_both_ways(table: tuple[Visit, Any]) -> None:
    visited, place = table
    heading = place.get_by_role("columnheader", name="loss")
    shown = []
    for _ in range(2):
        before = column(place, 4)
        heading.click()
        visited.page.wait_for_function(
            "before => document.querySelector('[data-documents=members] tbody tr td:nth-child(4)').innerText != before",
            arg=before[0],
        )
        shown.append([float(value) for value in column(place, 4)])
    ascending, descending = sorted(shown)
    assert ascending == sorted(ascending)
    assert descending == sorted(descending, reverse=True)
    assert descending[0] > ascending[-1]
    assert heading.get_attribute("aria-sort") in ("ascending", "descending")
    assert visited.problems == []


def test_a_filter_by_p_value_leaves_the_smaller_ones(table: tuple[Visit, Any], n_selected: int) -> None:
    _, place = table
    place.get_by_label("p-value at most").fill("0.0099009900990099")
    place.locator(f"text=(of {n_selected})").wait_for()
    assert {float(value) for value in column(place, 3)} == {0.009901}


def test_the_keyboard_opens_a_row_that_shows_its_text_as_text(table: tuple[Visit, Any]) -> None:
    visited, place = table
    opener = place.locator("button.opener").first
    opener.focus()
    visited.page.keyboard.press("Enter")
    opened = place.locator(".opened").first
    opened.wait_for()
    assert opener.get_attribute("aria-expanded") == "true"
    for where in ("text", "file"):
        assert script(where) in opened.inner_text()
    assert opened.locator("script, img, svg").count() == 0
    visited.page.keyboard.press("Enter")
    opened.wait_for(state="detached")
    assert visited.problems == []


def test_without_scripts_the_page_still_lists_the_strongest(visit: Open, pages: dict[str, Path]) -> None:
    visited = visit(pages["run"], java_script_enabled=False)
    text = visited.page.locator("body").inner_text()
    assert "needs scripts" in text
    visited.page.locator("details.unscripted summary").first.click()
    assert f"{script('id')} 0" in visited.page.locator("details.unscripted").first.inner_text()
