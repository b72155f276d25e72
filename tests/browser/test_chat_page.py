"""A chat that is opened in the table of a page: its question in grey, its answer with values, and nothing that runs."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hostile import hostile_run, script
from visits import DESKTOP, PHONE, Visit, serious_violations

from pipeline.answers.top_documents import attributions_file
from pipeline.report.page import write_report
from tests.helpers.signed import sign


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose first document is a chat of markup."""
    store = hostile_run(tmp_path_factory.mktemp("chat") / "run")
    columns = ["doc_id", "source", "row"]
    first = store.read_table("selection/members/selected.parquet", columns).slice(0, 1).to_pylist()[0]
    pieces = [f"{script('question')}\n\n", script("answer"), " is right", "<|im_end|>"]
    row = {
        **first,
        "text_key": 1,
        "pieces": pieces,
        "log_prob": [None, -3.0, -2.0, -1.0],
        "standardised": [None, -1.0, 0.0, 1.0],
        "kind": "log-probability",
        "detector": "loss",
        "ranked_by": "loss",
        "score": -2.0,
        "near_copies": [script("copy")],
    }
    store.write_table(attributions_file("members"), pa.Table.from_pylist([row]))
    return Path(write_report(sign(store)))


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_question_is_grey_and_the_answer_shaded(
    visit: Callable[..., Visit], page: Path, viewport: dict[str, int], scheme: str
) -> None:
    visited = visit(page, viewport=viewport, color_scheme=scheme)
    place = visited.page.locator("[data-documents=members]")
    place.scroll_into_view_if_needed()
    place.locator("tbody tr").first.wait_for()
    place.locator("button.opener").first.click()
    opened = place.locator(".opened").first
    opened.wait_for()
    text = opened.locator(".excerpt")
    assert [script(one) in text.inner_text() for one in ("question", "answer")] == [True, True]
    assert opened.locator("script, img, svg").count() == 0
    grey, shaded = text.locator("span.soft"), text.locator("span.token")
    assert (grey.count(), shaded.count()) == (1, 3)
    colours = [one.evaluate("one => getComputedStyle(one).color") for one in (grey.first, shaded.first)]
    assert colours[0] != colours[1]
    assert grey.first.get_attribute("title") == "not scored"
    assert "grey is not scored" in opened.inner_text()
    wide = visited.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    assert serious_violations(visited) == []
    assert visited.problems == []
