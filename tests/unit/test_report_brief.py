"""Claims about the first screen: it is short, it leads with what speaks against an answer, and it claims no more."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_run import amend, build_run
from signed import sign

from pipeline.audit.summary import BlindDiagnostic, Summary, read_summary
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.report.contents import BriefAnswer, Folders, Light, Report, model_name
from pipeline.report.page import write_report
from pipeline.report.wording.conclusion import CONTRADICTED
from pipeline.selection.bounds import Bound
from pipeline.store.files import Store

BOUND = Bound(confidence=0.95, wrong_at_most=3, right_at_least=80, members_at_least=91, published_wrong_at_most=5)
APART = BlindDiagnostic(ok=False, outcome="failed", sentence="Their words alone tell them apart (AUC 0.91).")


class Visible(HTMLParser):
    """The words of a page outside its closed folds, and what the folds and tabs are called."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.assumed: list[str] = []
        self.open: list[bool] = []
        self.hidden = 0
        self.in_summary = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "details":
            self.open.append("open" in dict(attrs))
        self.in_summary = tag == "summary" or (self.in_summary and tag == "span")
        self.hidden += tag in ("style", "script", "title", "svg")

    def handle_endtag(self, tag: str) -> None:
        if tag == "details":
            self.open.pop()
        self.in_summary = self.in_summary and tag != "summary"
        self.hidden -= tag in ("style", "script", "title", "svg")

    def handle_data(self, data: str) -> None:
        closed = self.open[:-1] if self.in_summary else self.open
        if not self.hidden and all(closed):
            self.words.extend(data.split())


def page_of(store: Store) -> tuple[str, Report]:
    write_report(store)
    facts = Report.model_validate(store.read_json("report/report.json"))
    return store.read("report/report.html").decode(), facts


def amended(folder: Path, **changes: Any) -> BriefAnswer:
    store = build_run(folder)
    store.remove("selection/members/ranks.parquet")  # nothing to draw: figures take their time
    store.remove("selection/members/scores.json")
    amend(store, "members", **changes)
    return page_of(store)[1].selections[0].brief


def without_counts(store: Store, names: list[str]) -> None:
    for name in names:
        store.remove(f"selection/{name}/ranks.parquet")
        store.remove(f"selection/{name}/scores.json")
    sign(store)


@pytest.mark.parametrize(("number", "most"), [(2, 700), (14, 1500)])
def test_a_page_is_short_outside_its_folds(tmp_path: Path, number: int, most: int) -> None:
    names = [f"selection-{index}" for index in range(number)]
    procedures = ["storey", "ptdi", "bh", "kernel"]
    selections = [{"name": name, "procedure": procedures[i % 4]} for i, name in enumerate(names)]
    store = build_run(tmp_path, selections=tuple(selections))
    without_counts(store, names[1:])
    for name in names:
        amend(store, name, bound=BOUND)
    summary = read_summary(store, names[0])
    assert isinstance(summary, Summary)
    failed = summary.diagnostics.model_copy(update={"blind": APART})
    amend(store, names[0], diagnostics=failed, supported=False, reasons=failed.failures())
    page, facts = page_of(store)
    visible = Visible(page)
    assert len(visible.words) <= most
    text = " ".join(visible.words)
    for term in ("bandwidth", "null share", "hypothesis"):
        assert term not in text, text[max(0, text.find(term) - 60) : text.find(term) + 40]
    for name in names:
        assert name in text, "every selection stands in the overview"
    assumptions = {selection.summary.assumption for selection in facts.selections}
    for assumption in assumptions:
        assert page.count(assumption.replace("'", "&#39;")) == 1
    opened = [line for line in page.splitlines() if '<details name="selection"' in line]
    assert [" open " in line for line in opened] == [True] + [False] * (number - 1)


def test_what_is_not_supported_says_so_in_the_first_words_of_its_row_and_its_card(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({}, {"name": "wide", "alpha": 0.3}))
    without_counts(store, ["members", "wide"])
    summary = read_summary(store, "wide")
    assert summary is not None
    failed = summary.diagnostics.model_copy(update={"blind": APART})
    amend(store, "wide", diagnostics=failed, supported=False, reasons=failed.failures(), bound=BOUND)
    page, facts = page_of(store)
    assert '<th scope="row"><strong class="bad">Contradicted:</strong> <a href="#selection-wide">wide</a>' in page
    brief = facts.selections[1].brief
    assert brief.claim.startswith("Contradicted: their words alone")
    assert brief.standing == "contradicted"
    assert brief.reason == "failed: blind test"
    assert brief.bound == "not stated"
    assert brief.condition == "Nothing is promised: a check contradicts the assumption."
    assert brief.this_list == CONTRADICTED
    shown = " ".join((brief.claim, brief.average, brief.this_list, brief.collection))
    for number in ("95%", "30%", "at most 3", "at least 91"):
        assert number not in shown
    assert brief.lights[0] == Light(name="blind", label="Blind test", colour="red", reason=APART.sentence)


def test_three_sentences_say_what_holds_on_average_of_this_list_and_of_all(tmp_path: Path) -> None:
    brief = amended(tmp_path, bound=BOUND, supported=True)
    summary = read_summary(Store(str(tmp_path / "run")), "members")
    assert summary is not None
    assert brief.condition == "If the assumption holds, which no check contradicts:"
    assert brief.average == "At most 10% of such a list is wrong, over repeated audits."
    assert brief.this_list == f"With 95% confidence at most 3 of these {summary.n_selected} are wrong."
    assert brief.collection == "With 95% confidence at least 91 of the 240 audited were trained on."
    assert brief.bound == "at most 3 (95%)"
    assert max(map(len, (brief.average, brief.this_list, brief.collection))) < 80, "a line each"


@pytest.mark.parametrize(
    ("changes", "average"),
    [
        ({"guarantee": "asymptotic"}, "At most about 10% of such a list is wrong, not guaranteed at this size."),
        ({"guarantee": "heuristic"}, "No guarantee is proved: it aims at 10% wrong, and can be higher."),
        ({"procedure": "bound"}, "No average is stated: procedure bound bounds the errors of this one list."),
        ({"calibration": "conditional"}, "At most 10% of such a list is wrong, with the probability stated below."),
        ({"n_selected": 0}, "An empty list is no evidence that the model was not trained on them."),
        (
            {"n_selected": 0, "direction": "clean"},
            "An empty list is no evidence that the model was trained on them.",
        ),
    ],
)
def test_the_average_is_as_certain_as_the_guarantee(tmp_path: Path, changes: dict[str, Any], average: str) -> None:
    assert amended(tmp_path, **changes).average == average


def test_without_a_bound_nothing_is_said_of_the_list_or_of_all(tmp_path: Path) -> None:
    brief = amended(tmp_path, bound=None, n_selected=12)
    assert brief.this_list == "How many of these 12 are wrong is not bounded."
    assert brief.collection == "How many of all 240 were trained on is not bounded."
    assert brief.bound == "not bounded"


def test_a_bound_that_excludes_nothing_says_so(tmp_path: Path) -> None:
    brief = amended(tmp_path, bound=Bound(0.95, 12, 0, 0, 12), n_selected=12)
    assert brief.this_list == "All of these 12 may be wrong."
    assert brief.collection == "The bound is 0: it does not show that any of the 240 audited was trained on."
    assert brief.bound == "possibly all"


@pytest.mark.parametrize(
    ("blind", "condition", "reason"),
    [
        (
            BlindDiagnostic(ok=None, outcome="not tested", sentence="Not tested."),
            "Provided both groups are alike and their documents independent; this was not checked:",
            "Not checked: that audited and calibration documents are alike is assumed.",
        ),
        (
            BlindDiagnostic(ok=None, outcome="inconclusive", n_to_settle=993, sentence="Inconclusive."),
            "Provided both groups are alike; the test could not confirm this:",
            "Inconclusive: about 993 documents of each kind would decide it.",
        ),
    ],
)
def test_what_was_not_tested_is_no_green_light(
    tmp_path: Path, blind: BlindDiagnostic, condition: str, reason: str
) -> None:
    summary = read_summary(build_run(tmp_path), "members")
    assert summary is not None
    brief = amended(tmp_path / "again", diagnostics=summary.diagnostics.model_copy(update={"blind": blind}))
    assert brief.condition == condition
    light = next(light for light in brief.lights if light.name == "blind")
    assert (light.colour, light.reason) == ("amber", reason)
    assert all((light.reason is None) == (light.colour == "green") for light in brief.lights)


def test_a_note_that_some_selections_share_is_printed_once_with_their_names(tmp_path: Path) -> None:
    """It was repeated in the card of every selection as soon as one selection did not share it."""
    names = ["one", "two", "three", "four"]
    store = build_run(tmp_path, selections=tuple({"name": name} for name in names))
    without_counts(store, names)
    summary = read_summary(store, "one")
    assert summary is not None
    for name, sentence in zip(
        names, ("The same note.", "The same note.", "Another note.", APART.sentence), strict=True
    ):
        blind = APART if sentence == APART.sentence else BlindDiagnostic(ok=True, sentence="Alike.")
        overlap = summary.diagnostics.overlap.model_copy(update={"ok": None, "sentence": sentence})
        changed = summary.diagnostics.model_copy(update={"overlap": overlap, "blind": blind})
        amend(store, name, diagnostics=changed, supported=changed.support(), reasons=changed.failures())
    page, _ = page_of(store)
    cards = page.split("<article ", 1)[1]
    shared = page.split("Checks with the same result for one, two:")[1].split("</ul>")[0]
    assert "The same note." in shared
    assert "Passed" not in shared, "what some selections alone passed stands in their cards"
    assert "The same note." not in cards
    assert (page.count("The same note."), page.count("Another note.")) == (2, 2), "in short, and in full"
    assert "Checks with the same result for all selections:" in page
    assert cards.count("Passed: ") == 3


def test_too_few_calibration_documents_are_an_amber_light(tmp_path: Path) -> None:
    store = build_run(tmp_path, n=5)
    without_counts(store, ["members"])
    brief = page_of(store)[1].selections[0].brief
    light = next(light for light in brief.lights if light.name == "resolution")
    assert (light.colour, light.reason) == (
        "amber",
        "With 5 documents for calibration nothing could ever have been selected.",
    )
    assert brief.this_list == "It is empty; nothing could ever have been selected."


# --- names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("/home/somebody/secret-project/tiny", "tiny"),
        ("/root/.cache/hub/models--org--name/snapshots/0a1b2c", "org/name"),
        ("s3://bucket/models/tiny/", "tiny"),
    ],
)
def test_a_model_is_called_by_its_name_and_not_by_its_folder(path: str, name: str) -> None:
    assert model_name(ModelConfig(path=path)) == name
    assert model_name(ModelConfig(path=path, adapter="/y/few")) == f"{name} with adapter few"
    assert model_name(EndpointConfig(endpoint="https://host/v1", name="big")) == "big"


def test_ids_are_relative_to_their_corpus(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    without_counts(store, ["members"])
    page, facts = page_of(store)
    assert facts.selections[0].selected[0].doc_id == f"{tmp_path}/audit.jsonl#0", "a program gets the id as it is"
    articles = page.split('<article id="selection-members">')[1].split("</article>")[0]
    assert "<bdi>audit.jsonl#0</bdi>" in articles
    assert str(tmp_path) not in articles


def test_the_folder_of_an_input_is_what_all_inputs_of_its_role_share() -> None:
    names = [("audit", "/a/b/x.jsonl"), ("audit", "/a/b/c/y.jsonl"), ("unseen", "s3://k/z/u.parquet"), ("seen", "s")]
    folders = Folders.of([SimpleNamespace(role=role, name=name, format="jsonl") for role, name in names])  # type: ignore[misc]
    assert folders.relative("/a/b/c/y.jsonl#3") == "c/y.jsonl#3"
    assert folders.relative("s3://k/z/u.parquet#1") == "u.parquet#1"
    assert folders.relative("an id / of its own") == "an id / of its own"
    assert folders.without("cannot read /a/b/x.jsonl") == "cannot read x.jsonl"


def test_the_shortest_possible_list_is_stated_for_the_null_share_that_was_estimated(tmp_path: Path) -> None:
    """It was stated as a fact about the number of calibration documents, beside a shorter list."""
    storey, bh = ({"name": name, "procedure": procedure} for name, procedure in (("s", "storey"), ("b", "bh")))
    store = build_run(tmp_path, selections=(storey, {**storey, "name": "all"}, bh))
    for name, factor in (("s", 0.414), ("all", 1.22), ("b", 1.0)):
        amend(store, name, minimum_selectable=7, n_selected=0, factor=factor)
    part = " (as estimated, 41.4% of the audited documents were not trained on)"
    shares = (part, " (as estimated, none of them was trained on)", "")
    for selection, given in zip(page_of(store)[1].selections, shares, strict=True):
        (reason,) = (light.reason for light in selection.brief.lights if light.name == "resolution")
        assert reason == f"With 100 documents for calibration the shortest possible list has 7 documents{given}."
        assert selection.brief.this_list == f"It is empty; the shortest possible list has 7 documents{given}."
