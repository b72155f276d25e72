"""What a page begins with, what it keeps from its upper part, and that every section that it names exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_run import amend, build_run
from signed import sign

from pipeline.audit.history import note_answers, read_history, several_questions
from pipeline.audit.manifest import read_run, write_manifest
from pipeline.audit.summary import BlindDiagnostic, Diagnostics, ShareDiagnostic, read_summary
from pipeline.config.models import EndpointConfig
from pipeline.report.contents import Folders, Report, run_names
from pipeline.report.page import write_report
from pipeline.report.wording.brief import TITLES
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts

WEIGHTS = "3fa9c1d2e4b5968778695a4b3c2d1e0f3fa9c1d2e4b5968778695a4b3c2d1e0f"
LINES = ("Answered", "Corpora", "Model", "Version")


def run_of(folder: Path, **changes: Any) -> Store:
    """A finished run with the digest of a model and a recorded date; `changes` are of its manifest."""
    store = build_run(folder, **changes.pop("build", {}))
    manifest, _ = read_run(store)
    write_manifest(store, manifest.model_copy(update={"fingerprint": {"model": WEIGHTS}, **changes}))
    note(store)
    return sign(store)


def note(store: Store, **settings: Any) -> None:
    """Record the answers, of a question with other settings where some are given."""
    store = sign(store)
    manifest, _ = read_run(store)
    config = manifest.config
    asked = [one.model_copy(update=settings) for one in config.selections]
    summaries = [read_summary(store, one.name) for one in asked]
    note_answers(store, config.model_copy(update={"selections": asked}), "run", [one for one in summaries if one])


def page_of(store: Store) -> tuple[str, Report]:
    store = sign(store)
    write_report(store)
    return store.read("report/report.html").decode(), Report.model_validate(store.read_json("report/report.json"))


def shown(part: str) -> str:
    """The words of a part of a page."""
    body = re.sub(r"<(style|script)\b.*?</\1>", " ", part, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", "", body.replace("<dt>", " <dt>").replace("<dd>", " <dd>")).split())


def upper(page: str) -> str:
    return page[: page.index('<section id="provenance">')]


# --- the first four lines


def test_the_page_begins_with_date_corpora_model_and_version(tmp_path: Path) -> None:
    store = run_of(tmp_path)
    page, facts = page_of(store)
    head = page[page.index("</h1>") : page.index("<nav")]
    assert tuple(re.findall(r"<dt>(.*?)</dt>", head)) == LINES
    (when,) = [entry.when for entry in read_history(store)]
    audited, unseen = facts.documents
    assert audited.digest is not None
    assert unseen.digest is not None
    assert shown(head) == (
        f"Answered {when[:10]} {when[11:16]} UTC "
        f"Corpora audited: audit.jsonl, 240 documents, SHA-256 {audited.digest[:16]}; "
        f"known unseen: unseen.jsonl, 100 documents, SHA-256 {unseen.digest[:16]} "
        f"Model models/tiny&lt;b&gt;, SHA-256 {WEIGHTS[:16]} Version seenset 0.1.0"
    )


def test_the_same_run_renders_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    store = run_of(tmp_path)
    pages = [page_of(store)[0] for _ in range(2)]
    assert pages[0] == pages[1]
    note(store)  # the same answers to the same questions
    assert page_of(store)[0] == pages[0]


def test_another_text_changes_the_digest_of_its_corpus_alone(tmp_path: Path) -> None:
    store = run_of(tmp_path)
    audited, unseen = page_of(store)[1].documents
    (receipt,) = [one for one in read_receipts(store, "score") if one.role == "audit"]
    store.write_json(f"receipts/score/{receipt.shard}.json", replace(receipt, documents="of another text").to_dict())
    changed, same = page_of(store)[1].documents
    assert changed.digest != audited.digest
    assert same.digest == unseen.digest


def test_what_is_not_known_is_stated_as_not_known(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    page, facts = page_of(store)
    assert (facts.answered_at, facts.model.digest) == (None, None)
    assert "Answered date not recorded" in shown(page)
    endpoint = EndpointConfig(name="served", endpoint="http://localhost:8000/v1")
    manifest, _ = read_run(store)
    known = manifest.model.model_copy(update={"architecture": "endpoint"})
    config = manifest.config.model_copy(update={"model": endpoint})
    write_manifest(store, manifest.model_copy(update={"config": config, "model": known}))
    assert "Model served, digest not known: an endpoint does not state its weights" in shown(page_of(store)[0])


# --- no path of the machine above provenance


def test_no_absolute_path_stands_above_provenance(tmp_path: Path) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    summary = read_summary(store, "members")
    assert summary is not None
    repeated = summary.diagnostics.duplicates.model_copy(
        update={"sentence": f"1 document repeats an id: {tmp_path}/audit.jsonl#3."}
    )
    untested = summary.diagnostics.blind.model_copy(
        update={"ok": None, "outcome": "not tested", "sentence": f"Not tested: {tmp_path}/audit.jsonl is gone."}
    )
    diagnostics = summary.diagnostics.model_copy(update={"duplicates": repeated, "blind": untested})
    amend(store, "members", diagnostics=diagnostics, supported=None)
    page, facts = page_of(store)
    assert str(tmp_path) in facts.provenance.inputs[0].name
    assert str(tmp_path) not in upper(page)
    assert "1 document repeats an id: audit.jsonl#3." in upper(page)
    assert str(tmp_path) in page, "provenance holds it"


def test_inputs_below_the_root_alone_are_named_by_their_last_part() -> None:
    names = ["/one/a.jsonl", "/other/deep/b.jsonl"]
    inputs = [type("Entry", (), {"name": name, "role": "audit", "format": "jsonl"})() for name in names]
    folders = Folders.of(inputs)
    assert [folders.relative(f"{name}#1") for name in names] == ["a.jsonl#1", "b.jsonl#1"]


def test_two_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart() -> None:
    """Both stood as "run run" on the page of a comparison."""
    assert run_names("/data/old/run", "/data/new/run/") == ("old/run", "new/run")
    assert run_names("/data/a", "/data/b") == ("a", "b")
    assert run_names("s3://k/a/run", "/a/run") == ("k/a/run", "/a/run")
    assert run_names("run", "/x/run") == ("run", "x/run")
    assert run_names("/same", "/same") == ("/same", "/same")


# --- sections that are named


def sections(page: str) -> dict[int, str]:
    """The numbered sections of a page, by their number."""
    parts = re.split(r"<h2>(?:<a[^>]*>)?(\d+)\. ", page)
    return {int(number): part for number, part in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("several", [False, True], ids=["one question", "several questions"])
def test_every_section_that_the_page_names_exists(tmp_path: Path, several: bool) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    if several:
        note(store, alpha=0.2)
        note(store)
    page, facts = page_of(store)
    found = sections(page)
    assert list(found) == list(range(1, len(found) + 1))
    named = {int(number) for number in re.findall(r"[Ss]ection (\d+)", shown(page))}
    assert named
    assert named <= set(found)
    assert 'id="history"' in found[2], "where the sentences say that the questions are listed"
    if several:
        assert "Section 2 lists them." in facts.selections[0].answer.sentence


# --- checks and notes


def truncated_run(folder: Path, share: float, sentence: str) -> Store:
    """A run of two selections with a check of truncation that came out so."""
    store = run_of(folder, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    for name in ("members", "wide"):
        summary = read_summary(store, name)
        assert summary is not None
        check = ShareDiagnostic(ok=None if share else True, sentence=sentence, share=share)
        amend(store, name, diagnostics=summary.diagnostics.model_copy(update={"truncated": check}))
    return store


def test_a_check_is_titled_by_its_subject_and_its_light_gives_the_result(tmp_path: Path) -> None:
    sentence = "200 of 200 documents were truncated at max_tokens. A truncated document is judged by its beginning."
    page, facts = page_of(truncated_run(tmp_path, 1.0, sentence))
    light = next(light for light in facts.selections[0].brief.lights if light.name == "truncated")
    assert (light.label, light.colour) == ("Truncation", "amber")
    assert light.reason == "200 of 200 documents were truncated at max_tokens."
    assert "Truncation. 200 of 200 documents were truncated at max_tokens." in shown(page)
    assert "Read to the end" not in page


def test_nothing_truncated_is_a_green_light(tmp_path: Path) -> None:
    _, facts = page_of(truncated_run(tmp_path, 0.0, "None of the 200 documents was truncated."))
    light = next(light for light in facts.selections[0].brief.lights if light.name == "truncated")
    assert (light.label, light.colour) == ("Truncation", "green")


def test_every_diagnostic_has_a_title_that_states_no_result() -> None:
    assert set(Diagnostics.model_fields) <= set(TITLES)
    for title in TITLES.values():
        assert not re.search(r"\b(no|not|enough|alike|distinct|fair|read|kept)\b", title.lower()), title


def test_a_note_stands_on_the_page_once_and_not_for_each_selection(tmp_path: Path) -> None:
    sentence = "200 of 200 documents were truncated at max_tokens. A truncated document is judged by its beginning."
    store = truncated_run(tmp_path, 1.0, sentence)
    note(store, alpha=0.2)
    note(store)
    page, facts = page_of(store)
    text = shown(upper(page))
    several, cautions = several_questions(read_history(store)), facts.selections[0].answer.cautions
    assert several is not None
    assert len(cautions) == 3
    assert cautions == facts.selections[1].answer.cautions
    assert text.count(cautions[0]) == 0, "the light of the blind test states it"
    for note_text in (*cautions[1:], several, sentence):
        assert text.count(note_text.replace("'", "&#39;")) == 1, note_text
    assert text.count("Inconclusive: about") == 1, "the light of the blind test"


def test_what_one_selection_alone_has_stays_with_it(tmp_path: Path) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    amend(store, "wide", n_quarantined=3)
    page, _ = page_of(store)
    card = page[page.index('id="selection-wide"') :]
    assert "3 of the audited documents could not be scored" in card
    assert "3 of the audited documents could not be scored" not in page[: page.index('id="selection-wide"')]


def test_a_failed_check_stands_with_each_selection_that_it_contradicts(tmp_path: Path) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    for name in ("members", "wide"):
        summary = read_summary(store, name)
        assert summary is not None
        failed = BlindDiagnostic(ok=False, sentence="The words tell the roles apart.")
        diagnostics = summary.diagnostics.model_copy(update={"blind": failed})
        amend(store, name, diagnostics=diagnostics, supported=False, reasons=diagnostics.failures())
    page, _ = page_of(store)
    cards = page.split('<div class="answer ')[1:]
    assert len(cards) == 2
    for card in cards:
        assert "<b>Blind test.</b> The words tell the roles apart." in card
