"""Claims about the pages of a run, a trial and an evaluation as a real browser shows them."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile import script
from PIL import Image
from visits import PHONE, Visit, serious_violations

from pipeline.report.templates import LONGEST_LABEL
from pipeline.store.files import Store
from tests.helpers.finished import run
from tests.helpers.made_up import sentence, write_audit, write_corpus
from tests.helpers.picture_runs import finished_run
from tests.helpers.report_run import summary_in

MOST_WORDS = 300
KINDS = ("run", "trial", "evaluation")
Open = Callable[..., Visit]
PLACES = {
    "run": ("model", "input", "id", "file", "text"),
    "trial": ("model", "file", "report"),
    "evaluation": ("model", "group", "notice"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_markup_in_names_and_texts_stays_text_and_the_page_asks_for_nothing(
    visit: Open, pages: dict[str, Path], kind: str
) -> None:
    visited = visit(pages[kind])
    visited.open_folds()
    page = visited.page
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'")
    for loose in ("unsafe-eval", "http", "*", "script-src 'unsafe-inline'", "img-src data: *"):
        assert loose not in policy
    shown = page.evaluate("document.body.textContent + [...document.querySelectorAll('figure img')].map(e => e.alt)")
    for place in PLACES[kind]:
        assert f"{{{{7*7}}}} {place}" in shown, place
    if kind == "run":
        assert script("group")[: LONGEST_LABEL - 1] in shown, "in a figure, where names are cut"
    assert page.evaluate("document.documentElement.dataset.ran") is None
    assert page.locator("img[src=x], svg[onload]").count() == 0
    assert visited.problems == []


@pytest.mark.parametrize("kind", KINDS)
def test_axe_names_no_serious_fault_and_figures_stand_out_in_light_and_dark(
    visit: Open, pages: dict[str, Path], kind: str
) -> None:
    visited = visit(pages[kind])
    visited.open_folds()
    for scheme in ("light", "dark"):
        visited.page.emulate_media(color_scheme=scheme)
        assert serious_violations(visited) == [], scheme
        for figure in visited.page.locator("figure img:visible").all():
            pixels = np.asarray(Image.open(io.BytesIO(figure.screenshot())).convert("L")).astype(float)
            assert (pixels[0, 0] < 60) == (scheme == "dark")
            inked = np.abs(pixels - pixels[0, 0]) > 140
            assert 0.001 < inked.mean() < 0.5, f"{figure.get_attribute('alt')} {scheme}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_shows_all_without_scrolling_sideways(visit: Open, pages: dict[str, Path], kind: str) -> None:
    visited = visit(pages[kind], viewport=PHONE, is_mobile=True, has_touch=True)
    visited.open_folds()
    assert visited.page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]
    for figure in visited.page.locator("figure img").all():
        if figure.is_visible():
            assert figure.bounding_box()["width"] <= PHONE["width"]
    assert serious_violations(visited) == []


@pytest.mark.parametrize("kind", KINDS)
def test_light_dark_and_print_differ_and_none_is_blank(
    visit: Open, pages: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    visited, pictures = visit(pages[kind]), {}
    for name in ("light", "dark", "print"):
        scheme, media = ("dark", "screen") if name == "dark" else ("light", "print" if name == "print" else "screen")
        visited.page.emulate_media(color_scheme=scheme, media=media)
        pictures[name] = visited.picture(tmp_path / f"{kind}-{name}.png")
    corner = {name: int(picture[3, -3].mean()) for name, picture in pictures.items()}
    assert corner["light"] > 240
    assert corner["print"] == 255
    assert corner["dark"] < 60
    for name, picture in pictures.items():
        assert np.unique(picture.astype(np.int32) @ (65536, 256, 1)).size > 100, name
        differing = np.abs(picture.astype(int) - picture[3, -3]).max(axis=2) > 60
        assert 0.005 < differing.mean() < 0.6, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_keyboard_reaches_every_fold_and_link_and_opens_folds(
    visit: Open, pages: dict[str, Path], kind: str
) -> None:
    visited = visit(pages[kind])
    page = visited.page
    stops = visited.tab_stops()
    for selector in ("summary", "nav a"):
        for one in page.locator(f"{selector}:visible").all():
            text = one.text_content().strip()
            assert any(stop.endswith(text) for stop in stops), text
    fold = page.locator("details:not([open]):not([name]) > summary:visible").first.element_handle()
    fold.focus()
    for key, opened in (("Enter", True), ("Space", False)):
        page.keyboard.press(key)
        assert fold.evaluate("e => e.parentElement.open") == opened


@pytest.mark.parametrize("kind", KINDS)
def test_links_lead_to_what_is_on_the_page_and_few_words_stand_outside_of_folds(
    visit: Open, pages: dict[str, Path], kind: str
) -> None:
    page = visit(pages[kind]).page
    figures = page.locator("figure img")
    assert figures.count() >= 2
    for figure in figures.all():
        assert any(digit in figure.get_attribute("alt") for digit in "0123456789")
    targets = page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert targets
    for target in targets:
        assert target.startswith("#")
        assert page.locator(f"[id='{target[1:]}']").count() == 1, target
    page.evaluate("for (const figure of document.querySelectorAll('img, .mono')) figure.remove()")
    words = len(page.inner_text("main").replace(script("model"), "").split())
    assert kind == "run" or 60 < words < MOST_WORDS


def test_the_page_of_a_real_run_does_nothing_that_it_should_not(
    visit: Open, tmp_path: Path, tiny_model_folder: Path
) -> None:
    rows = {
        name: [
            {"text": f"{script('text')} {sentence(row)}", "kind": f"{script('group')}{row % 2}"}
            for row in range(first, first + 60)
        ]
        for name, first in (("audit", 0), ("unseen", 1000))
    }
    corpus = write_corpus(tmp_path, rows, group="kind")
    selections = [{"name": "members", "detectors": ["loss"], "alpha": 0.5}]
    run(write_audit(tmp_path, tiny_model_folder, corpus=corpus, selections=selections))
    visited = visit(Path(tmp_path / "run/report/report.html"))
    visited.open_folds()
    assert f"{summary_in(Store(str(tmp_path / 'run'))).n_selected:,} of" in visited.page.inner_text("body")
    labels = visited.page.eval_on_selector_all("figure img", "all => all.map(one => one.alt)")
    assert any(label.startswith("Documents selected against alpha") for label in labels)
    assert any(label.startswith("Selected documents by group, 2 groups") for label in labels)
    assert visited.problems == []


def test_a_page_that_misbehaves_would_be_noticed(visit: Open, tmp_path: Path) -> None:
    """What the tests above look for, they see."""
    path = tmp_path / "bad.html"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"script-src 'unsafe-inline'; img-src *\">"
    style = "<style>main { width: 900px; background: #fff; color: #ddd }</style>"
    path.write_text(
        f"<!DOCTYPE html><html><head>{policy}{style}</head><body><main><h1>Bad</h1>{script('text')}"
        "<img src='http://example.org/a.png'><script>console.error('oh')</script></main></body></html>"
    )
    visited = visit(path, viewport=PHONE)
    kinds = {problem.split(":")[0] for problem in visited.problems}
    assert {"dialog", "console", "request"} <= kinds
    assert visited.page.evaluate("document.documentElement.dataset.ran") == "text"
    assert visited.page.evaluate("document.scrollingElement.scrollWidth") > PHONE["width"]
    assert {"color-contrast", "image-alt"} <= {one.split()[1].rstrip(":") for one in serious_violations(visited)}


def test_thumbnails_are_drawn_and_captions_stay_text(visit: Open, tmp_path: Path) -> None:
    """Of a run that selected pictures, one of them with a hostile file and a hostile caption."""
    visited = visit(Path(finished_run(tmp_path).path("report/report.html")))
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
