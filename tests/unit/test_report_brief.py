"""Claims about the first screen: it is short, it leads with what speaks against an answer, and it claims no more."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_report import Page, report

from pipeline.checks.diagnostic import BlindDiagnostic, CountDiagnostic, ShareDiagnostic
from pipeline.checks.registry import CHECKS, Conclusion
from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.report.contents import Folders, Light, Report, model_name, run_names
from pipeline.report.page import write_report
from pipeline.results.history import note_answers, read_history
from pipeline.run.conclusion_text import CONTRADICTED
from pipeline.run.manifest import read_run
from pipeline.selection.bounds import Bound
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.selection.procedures.bound import guarantee_of_bound
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.report_run import amend, amend_checks, amend_manifest, build_run, summary_in
from tests.helpers.signed import sign

BOUND = Bound(confidence=0.95, wrong_at_most=3, right_at_least=80, members_at_least=91, published_wrong_at_most=5)
APART = BlindDiagnostic(outcome=Outcome.FAILED, sentence="Their words alone tell them apart (AUC 0.91).")


def page_of(store: Store) -> tuple[str, Report]:
    store = sign(store)
    write_report(store)
    return store.read("report/report.html").decode(), Report.model_validate(store.read_json("report/report.json"))


@pytest.mark.parametrize(("number", "most"), [(2, 700), (14, 1500)])
def test_a_page_is_short_outside_its_folds(tmp_path: Path, number: int, most: int) -> None:
    names = [f"selection-{index}" for index in range(number)]
    procedures = ["storey", "ptdi", "bh", "kernel"]
    selections = [{"name": name, "procedure": procedures[i % 4]} for i, name in enumerate(names)]
    store = build_run(tmp_path, selections=tuple(selections), drawn=names[:1])
    for name in names:
        amend(store, name, bound=BOUND)
    amend_checks(store, names[0], blind=APART)
    page, facts = page_of(store)
    visible = Page(page).visible
    assert len(visible) <= most
    text = " ".join(visible)
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
    store = build_run(tmp_path, selections=({}, {"name": "wide", "alpha": 0.3}), drawn=())
    amend(store, "wide", bound=BOUND)
    amend_checks(store, "wide", blind=APART)
    page, facts = page_of(store)
    assert '<th scope="row"><strong class="bad">Contradicted:</strong> <a href="#selection-wide">wide</a>' in page
    brief = facts.selections[1].brief
    assert brief.claim.startswith("Contradicted: their words alone")
    assert brief.conclusion == "contradicted"
    assert brief.reason == "failed: blind test"
    assert (brief.bound, facts.selections[1].answer.bound) == ("not stated", CONTRADICTED)
    assert "95% confidence" not in page
    assert brief.condition == "Nothing is guaranteed: a check contradicts the assumption."
    assert brief.this_list == CONTRADICTED
    shown = " ".join((brief.claim, brief.average, brief.this_list, brief.collection))
    for number in ("95%", "30%", "at most 3", "at least 91"):
        assert number not in shown
    assert brief.lights[0] == Light(name="blind", label="Blind test", colour="red", reason=APART.sentence)


def test_three_sentences_say_what_holds_on_average_of_this_list_and_of_all(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())
    amend(store, "members", bound=BOUND, conclusion=ConclusionValue.SUPPORTED)
    page, facts = report(store)
    brief, answer = facts.selections[0].brief, facts.selections[0].answer
    claim = f"95% confidence at most 3 of these {summary_in(store).n_selected} are wrong"
    assert brief.condition == "If the assumption holds, which no check contradicts:"
    assert brief.average == "At most 10% of such a list is wrong, over repeated audits."
    assert brief.this_list == f"With {claim}."
    assert brief.collection == "With 95% confidence at least 91 of the 240 audited were trained on."
    assert brief.bound == "at most 3 (95%)"
    assert max(map(len, (brief.average, brief.this_list, brief.collection))) < 80, "a line each"
    assert answer.headline.endswith(f"; with {claim}.")
    assert "With 95% confidence at least 91 of the 240 audited documents were trained on" in answer.bound
    assert "On average over repetitions" in answer.terms
    assert any("this one list and these audited documents" in sentence for sentence in facts.not_covered)
    for stated in (claim, answer.bound, "the same by the published bound"):
        assert stated in page.text
    amend(store, "members", bound=None, n_selected=12)
    page, facts = report(store)
    brief = facts.selections[0].brief
    assert brief.this_list == "How many of these 12 are wrong is not bounded."
    assert brief.collection == "How many of all 240 were trained on is not bounded."
    assert (brief.bound, facts.selections[0].answer.bound) == ("not bounded", None)
    assert "confidence of the bounds" not in page.text
    assert not any("this one list and these audited documents" in sentence for sentence in facts.not_covered)
    amend(store, "members", bound=Bound(0.95, 12, 0, 0, 12))
    brief = report(store)[1].selections[0].brief
    assert brief.this_list == "All of these 12 may be wrong."
    assert brief.collection == "The bound is 0: it does not show that any of the 240 audited was trained on."
    assert brief.bound == "possibly all"
    terms = guarantee_of_bound(SelectionConfig(name="one", detectors=["loss"], confidence=0.9).exact_confidence)
    promised = {"promise": terms.promise, "assumption": terms.assumption}
    amend(
        store, "members", bound=BOUND, conclusion=ConclusionValue.SUPPORTED, procedure="bound", factor=None, **promised
    )
    stated = report(store)[1].selections[0].answer.terms
    assert stated.startswith("With 90% confidence the share of wrong documents")
    assert "On average" not in stated
    for least, said in ((20, "the shortest possible list has 20 documents"), (1_000, "nothing could ever have been")):
        amend(store, "members", n_selected=0, minimum_selectable=least)
        page, facts = report(store)
        assert said in facts.selections[0].answer.terms
        assert "smallest possible p-value" not in page.text


def test_the_average_is_as_certain_as_the_guarantee(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())
    plain = {"guarantee": "finite-sample", "procedure": "storey", "calibration": "pooled", "direction": "members"}
    no_evidence = "An empty list is no evidence that the model was"
    for changes, average in (
        ({"guarantee": "asymptotic"}, "At most about 10% of such a list is wrong, not guaranteed at this size."),
        ({"guarantee": "heuristic"}, "No guarantee is proved: the target is 10% wrong, and the share can be higher."),
        ({"procedure": "bound"}, "No average is stated: procedure bound bounds the errors of this one list."),
        ({"calibration": "conditional"}, "At most 10% of such a list is wrong, with the probability stated below."),
        ({"n_selected": 0}, f"{no_evidence} not trained on them."),
        ({"n_selected": 0, "direction": "clean"}, f"{no_evidence} trained on them."),
    ):
        amend(store, "members", **{**plain, **changes})
        assert page_of(store)[1].selections[0].brief.average == average


def test_what_was_not_tested_is_no_green_light(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())

    def classifier_input(**blind: Any) -> tuple[str, str, str | None]:
        amend_checks(store, blind=BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence="Not tested.", **blind))
        (selection,) = page_of(store)[1].selections
        assert any("was not checked" in one for one in selection.answer.cautions) == (not blind["tested"])
        brief = selection.brief
        assert all((light.reason is None) == (light.colour == "green") for light in brief.lights)
        light = next(light for light in brief.lights if light.name == "blind")
        return brief.condition, light.colour, light.reason

    assert classifier_input(tested=False) == (
        "Provided both groups are alike and their documents independent; this was not checked:",
        "amber",
        "Not checked: audited and calibration documents are assumed to be alike.",
    )
    assert classifier_input(tested=True, n_to_settle=993) == (
        "Provided both groups are alike; the test could not confirm this:",
        "amber",
        "Inconclusive: about 993 documents of each kind would decide it.",
    )


def test_a_note_that_selections_share_is_printed_once_and_that_of_one_stays_with_it(tmp_path: Path) -> None:
    names = ["one", "two", "three", "four"]
    store = build_run(tmp_path, selections=tuple({"name": name} for name in names), drawn=())
    overlap, alike = (
        summary_in(store, "one").diagnostics.overlap,
        BlindDiagnostic(outcome=Outcome.PASSED, sentence="Alike."),
    )
    sentences = ("The same note.", "The same note.", "Another note.", APART.sentence)
    for name, sentence in zip(names, sentences, strict=True):
        noted = overlap.model_copy(update={"outcome": Outcome.INCONCLUSIVE, "sentence": sentence})
        amend_checks(store, name, overlap=noted, blind=APART if sentence == APART.sentence else alike)
    amend(store, "three", n_quarantined=3)
    page, _ = page_of(store)
    above, _, card = page.partition('id="selection-three"')
    assert "3 of the audited documents could not be scored" in card
    assert "3 of the audited documents could not be scored" not in above
    cards = page.split("<article ", 1)[1]
    shared = page.split("Checks with the same result for one, two:")[1].split("</ul>")[0]
    assert "The same note." in shared
    assert "Passed" not in shared, "what some selections alone passed stands in their cards"
    assert "The same note." not in cards
    assert (page.count("The same note."), page.count("Another note.")) == (2, 2), "in short, and in full"
    assert "Checks with the same result for all selections:" in page
    assert cards.count("Passed: ") == 3


def test_a_model_is_called_by_its_name_and_runs_by_what_tells_their_paths_apart() -> None:
    for path, name in {
        "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
        "/home/somebody/secret-project/tiny": "tiny",
        "/root/.cache/hub/models--org--name/snapshots/0a1b2c": "org/name",
        "s3://bucket/models/tiny/": "tiny",
    }.items():
        assert model_name(ModelConfig(path=path)) == name
        assert model_name(ModelConfig(path=path, adapter="/y/few")) == f"{name} with adapter few"
    assert model_name(EndpointConfig(endpoint="https://host/v1", name="big")) == "big"
    assert run_names("/data/old/run", "/data/new/run/") == ("old/run", "new/run")
    assert run_names("/data/a", "/data/b") == ("a", "b")
    assert run_names("s3://k/a/run", "/a/run") == ("k/a/run", "/a/run")
    assert run_names("run", "/x/run") == ("run", "x/run")
    assert run_names("/same", "/same") == ("/same", "/same")


def test_the_folder_of_an_input_is_what_all_inputs_of_its_role_share() -> None:
    def folders_of(*names: tuple[str, str]) -> Folders:
        inputs: list[Any] = [SimpleNamespace(role=role, name=name, format="jsonl") for role, name in names]
        return Folders.find(inputs)

    names = [("audit", "/a/b/x.jsonl"), ("audit", "/a/b/c/y.jsonl"), ("unseen", "s3://k/z/u.parquet"), ("seen", "s")]
    folders = folders_of(*names)
    assert folders.relative("/a/b/c/y.jsonl#3") == "c/y.jsonl#3"
    assert folders.relative("s3://k/z/u.parquet#1") == "u.parquet#1"
    assert folders.relative("an id / of its own") == "an id / of its own"
    assert folders.without("cannot read /a/b/x.jsonl") == "cannot read x.jsonl"
    below_root = folders_of(("audit", "/one/a.jsonl"), ("audit", "/other/deep/b.jsonl"))
    assert below_root.relative("/one/a.jsonl#1") == "a.jsonl#1"
    assert below_root.relative("/other/deep/b.jsonl#1") == "b.jsonl#1"


def test_the_shortest_possible_list_is_stated_for_the_null_share_that_was_estimated(tmp_path: Path) -> None:
    storey, bh = ({"name": name, "procedure": procedure} for name, procedure in (("s", "storey"), ("b", "bh")))
    store = build_run(tmp_path, selections=(storey, {**storey, "name": "all"}, bh), drawn=())
    for name, factor in (("s", 0.414), ("all", 1.22), ("b", 1.0)):
        amend(store, name, minimum_selectable=7, n_selected=0, factor=factor)
    part = " (as estimated, 41.4% of the audited documents were not trained on)"
    shares = (part, " (as estimated, none of them was trained on)", "")
    for selection, given in zip(page_of(store)[1].selections, shares, strict=True):
        (reason,) = (light.reason for light in selection.brief.lights if light.name == "resolution")
        assert reason == f"With 100 documents for calibration the shortest possible list has 7 documents{given}."
        assert selection.brief.this_list == f"It is empty; the shortest possible list has 7 documents{given}."


WEIGHTS = "3fa9c1d2e4b5968778695a4b3c2d1e0f3fa9c1d2e4b5968778695a4b3c2d1e0f"


def run_of(folder: Path, **changes: Any) -> Store:
    """A finished run with the digest of a model and a recorded date; `changes` are of its manifest."""
    store = build_run(folder, drawn=(), **changes.pop("build", {}))
    amend_manifest(store, fingerprint={"model": WEIGHTS}, **changes)
    note(store)
    return sign(store)


def note(store: Store, **settings: Any) -> None:
    """Record the answers, of a question with other settings where some are given."""
    store = sign(store)
    manifest, _ = read_run(store)
    config = manifest.config
    asked = [one.model_copy(update=settings) for one in config.selections]
    summaries = [summary_in(store, one.name) for one in asked]
    note_answers(store, config.model_copy(update={"selections": asked}), "run", summaries)


def shown(part: str) -> str:
    """The words of a part of a page."""
    body = re.sub(r"<(style|script)\b.*?</\1>", " ", part, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", "", body.replace("<dt>", " <dt>").replace("<dd>", " <dd>")).split())


def upper(page: str) -> str:
    return page[: page.index('<section id="provenance">')]


def test_the_page_begins_with_date_model_version_and_corpora_with_their_digests(tmp_path: Path) -> None:
    store = run_of(tmp_path)
    page, facts = page_of(store)
    head = page[page.index("</h1>") : page.index("<nav")]
    assert re.findall(r"<dt>(.*?)</dt>", head) == ["Answered", "Corpora", "Model", "Version"]
    (when,) = [entry.when for entry in read_history(store)]
    audited, unseen = facts.documents
    assert shown(head) == (
        f"Answered {when[:10]} {when[11:16]} UTC "
        f"Corpora audited: audit.jsonl, 240 documents, SHA-256 {audited.digest[:16]}; "
        f"known unseen: unseen.jsonl, 100 documents, SHA-256 {unseen.digest[:16]} "
        f"Model models/tiny&lt;b&gt;, SHA-256 {WEIGHTS[:16]} Version seenset 0.1.0"
    )
    note(store)  # the same answers to the same questions
    assert page_of(store)[0] == page, "the same bytes at any time"
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
    amend_manifest(store, config=manifest.config.model_copy(update={"model": endpoint}), model=known)
    assert "Model served, digest not known: an endpoint does not state its weights" in shown(page_of(store)[0])


def test_no_absolute_path_stands_above_provenance_and_ids_are_relative(tmp_path: Path) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    repeated = CountDiagnostic(
        outcome=Outcome.PASSED, sentence=f"1 document repeats an id: {tmp_path}/audit.jsonl#3.", count=1
    )
    gone = f"Not tested: {tmp_path}/audit.jsonl is gone."
    amend_checks(
        store, duplicates=repeated, blind=BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=gone)
    )
    page, facts = page_of(store)
    assert str(tmp_path) in facts.provenance.inputs[0].name
    assert str(tmp_path) not in upper(page)
    assert "1 document repeats an id: audit.jsonl#3." in upper(page)
    assert str(tmp_path) in page, "provenance holds it"
    assert facts.selections[0].selected[0].doc_id == f"{tmp_path}/audit.jsonl#0", "a program gets the id as it is"
    assert "<bdi>audit.jsonl#0</bdi>" in page.split('<article id="selection-members">')[1].split("</article>")[0]


def sections(page: str) -> dict[int, str]:
    """The numbered sections of a page, by their number."""
    parts = re.split(r"<h2>(?:<a[^>]*>)?(\d+)\. ", page)
    return {int(number): part for number, part in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_section_that_the_page_names_exists(tmp_path: Path) -> None:
    store = run_of(tmp_path, build={"selections": ({}, {"name": "wide", "alpha": 0.3})})
    for alphas in ((), (0.2, 0.1)):  # one question, and several
        for alpha in alphas:
            note(store, alpha=alpha)
        page, facts = page_of(store)
        found = sections(page)
        assert list(found) == list(range(1, len(found) + 1))
        named = {int(number) for number in re.findall(r"[Ss]ection (\d+)", shown(page))}
        assert named
        assert named <= set(found)
        assert 'id="history"' in found[2], "where the sentences say that the questions are listed"
    assert "Section 2 lists them." in facts.selections[0].answer.sentence


TRUNCATED = "200 of 200 documents were truncated at max_tokens. A truncated document is judged by its beginning."


def test_a_check_is_titled_by_its_subject_and_its_light_gives_the_result(tmp_path: Path) -> None:
    store = run_of(tmp_path)
    for outcome, sentence, colour, reason in (
        (Outcome.INCONCLUSIVE, TRUNCATED, "amber", "200 of 200 documents were truncated at max_tokens."),
        (Outcome.PASSED, "None of the 200 documents was truncated.", "green", None),
    ):
        amend_checks(
            store, truncated=ShareDiagnostic(outcome=outcome, sentence=sentence, share=0.0 if reason is None else 1.0)
        )
        page, facts = page_of(store)
        light = next(light for light in facts.selections[0].brief.lights if light.name == "truncated")
        assert (light.label, light.colour, light.reason) == ("Truncation", colour, reason)
        assert f"Truncation. {reason or sentence}" in shown(page)
    assert [check.name for check in CHECKS] == [*Conclusion.model_fields]
    for title in (title for check in CHECKS for title in (check.title, check.title_of_versions or "")):
        assert not re.search(r"\b(no|not|enough|alike|distinct|fair|read|kept)\b", title.lower()), title
