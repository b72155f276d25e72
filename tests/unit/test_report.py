"""Claims about the report: what it says, how certain it is allowed to sound, and what it never contains."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys
import time
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from report_run import SCRIPT, SECRET, amend, build_run
from signed import sign

from pipeline.audit.manifest import AdapterRecord, GradientRecord, read_run, write_manifest
from pipeline.audit.selected import ScoreHistogram
from pipeline.audit.status import Counts, StatusFile
from pipeline.audit.summary import BlindDiagnostic, Summary, SymmetryDiagnostic, read_summary
from pipeline.config.corpus import TransformConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError, visible
from pipeline.report.contents import Report
from pipeline.report.facts import RankHistogram, SelectionFacts, read_facts
from pipeline.report.figures import MAX_POINTS, _slope, _thinned, draw_figures
from pipeline.report.page import write_report
from pipeline.selection.promises import StrictAnswer
from pipeline.store.files import Store


class Page(HTMLParser):
    """Tags and words of a page, those in folds among them; its scripts and its data apart."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: list[str] = []
        self.skipping = False
        self.feed(source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.skipping = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self.skipping = False

    def handle_data(self, data: str) -> None:
        (self.blocks if self.skipping else self.words).append(data)


def report(store: Store, texts: bool = True) -> tuple[Page, Report]:
    path = write_report(store, texts)
    assert path == f"{store.url}/report/report.html"
    facts = Report.model_validate(store.read_json("report/report.json"))
    return Page(store.read("report/report.html").decode()), facts


def unpacked(block: str) -> list[Any]:
    """The lines of a data block of a page."""
    return [json.loads(line) for line in gzip.decompress(base64.b64decode(block)).splitlines()]


def documents_of(page: Page) -> list[dict[str, Any]]:
    """The documents in the table of a page of one selection."""
    rows = []
    for chunk in unpacked(page.blocks[-3]):
        for i, p in enumerate(chunk["p"]):
            rows.append({"id": chunk["ids"][i], "p": p, "text": chunk.get("text", [None] * (i + 1))[i]})
    return rows


def summary_in(store: Store) -> Summary:
    summary = read_summary(store, "members")
    assert summary is not None
    return summary


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_run(tmp_path_factory.mktemp("report"))


# --- how certain it sounds


def test_a_finite_sample_answer_names_the_average_and_its_assumption(run: Store) -> None:
    page, facts = report(run)
    summary = facts.selections[0].summary
    count = summary.n_selected
    assert count > 50
    headline = f"Of 240 audited documents, {count} were selected as part of the training data of models/tiny<b>."
    assert headline in page.text
    assert "On average over repetitions of the whole audit" in page.text
    assert "is at most 10%, if this holds: " + summary.assumption in facts.selections[0].answer.sentence
    assert "is at most 10%, if this holds: the assumption in section 2." in page.text
    assert page.text.count(summary.assumption) == 1, "the assumption stands on the page once"
    assert "approximately" not in facts.selections[0].answer.sentence
    assert "4 of the audited documents could not be scored and count as hypotheses with p = 1." in page.text


def test_an_asymptotic_answer_says_that_it_is_not_guaranteed_and_shows_the_strict_one(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({"procedure": "ptdi"},))
    page, facts = report(store)
    sentence = facts.selections[0].answer.sentence
    assert "approximately at most 10% for large samples" in sentence
    assert "not guaranteed at this size" in sentence
    safe = facts.selections[0].summary.strict.n_selected
    assert f"The procedure with a finite-sample guarantee (storey) selects {safe} of 240." in sentence
    assert "approximately at most 10% for large samples; this is not guaranteed at this size" in page.text
    assert f"{safe} selected by storey (finite-sample)" in page.text


def test_without_a_proved_guarantee_none_is_claimed(tmp_path: Path) -> None:
    page, facts = report(build_run(tmp_path, selections=({"procedure": "kernel"},)))
    answer = facts.selections[0].answer
    assert "No guarantee is proved for this procedure (kernel)" in answer.sentence
    assert "is at most" not in answer.sentence
    assert "by a procedure for which no guarantee is proved." in answer.headline
    assert "The procedure with a finite-sample guarantee (storey) selects" in answer.sentence
    assert "none proved" in page.text


def test_the_clean_direction_turns_both_the_finding_and_the_error_round(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({"direction": "members"},))
    amend(store, "members", direction="clean")
    page, _ = report(store)
    assert "were selected as not part of the training data of" in page.text
    assert "wrong documents (in truth part of the training data)" in page.text
    assert "which documents are not part of the training data" in page.text


def test_one_document_is_one(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    amend(store, "members", n_selected=1)
    assert "240 audited documents, 1 was selected as part of" in report(store)[0].text


def test_nothing_selected_is_not_an_acquittal(tmp_path: Path) -> None:
    store = build_run(tmp_path, members=0.0)
    page, facts = report(store)
    assert facts.selections[0].summary.n_selected == 0
    assert "Of 240 audited documents, none was selected as part of the training data" in page.text
    assert "This is not evidence that the model was not trained on them" in page.text
    assert "the shortest possible list has 24 documents" in page.text
    assert "is at most 10%" not in facts.selections[0].answer.sentence
    assert "Here no point is." in page.text


@pytest.mark.parametrize(
    ("alpha", "said"), [(0.1, "10 documents."), (0.001, "1,000 documents and only 240 are audited")]
)
def test_a_knockoff_filter_that_selects_nothing_says_how_few_it_could_have(
    tmp_path: Path, alpha: float, said: str
) -> None:
    store = build_run(tmp_path, members=0.0)
    amend(store, "members", procedure="ktd", alpha=alpha, guarantee="heuristic")
    text = report(store)[0].text
    assert f"The shortest possible list of the knockoff filter has {said}" in text
    assert "for calibration the shortest possible list" not in text


def test_nothing_selected_in_the_clean_direction_does_not_accuse(tmp_path: Path) -> None:
    store = build_run(tmp_path, members=0.0)
    amend(store, "members", direction="clean")
    assert "This is not evidence that the model was trained on them" in report(store)[0].text


def test_too_few_calibration_documents_are_named_as_the_reason(tmp_path: Path) -> None:
    store = build_run(tmp_path, n=5)
    page, facts = report(store)
    summary = facts.selections[0].summary
    assert summary.minimum_selectable > summary.n_audit
    assert "With only 5 documents for calibration nothing could ever have been selected" in page.text
    assert "the smallest possible p-value is 1/6" in page.text
    assert "at least about 9 for anything to be selectable" in page.text
    assert "about 1,199 for a selection of one in a hundred" in page.text


def test_by_asks_for_more_calibration_than_bh(tmp_path: Path) -> None:
    store = build_run(tmp_path, n=5, selections=({"procedure": "by"},))
    least = float(sum(Fraction(1, k) for k in range(1, 241))) / 0.1 - 1
    amend(store, "members", minimum_selectable=300)
    assert f"at least about {int(np.ceil(least))} for anything" in report(store)[0].text


def test_a_failed_check_stands_in_the_answer_itself(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    sentence = "Calibration and audited documents differ in more than membership (AUC 0.91)."
    checks = summary_in(store).diagnostics.model_copy(update={"blind": BlindDiagnostic(ok=False, sentence=sentence)})
    amend(store, "members", diagnostics=checks, supported=checks.support(), reasons=checks.failures())
    page, facts = report(store)
    selection = facts.selections[0]
    assert f"Blind test failed: {sentence}" in selection.answer.sentence
    answer, rest = page.text.split("The answer in full")
    assert sentence in answer
    assert "✗ failed Blind test. " + sentence in rest
    assert selection.answer.doubts == [f"Blind test failed: {sentence}"]
    assert selection.answer.sentence.startswith("Contradicted: their words alone tell the audited from")
    assert answer.index("Do not act on this answer.") < answer.index("Selection “members”") < answer.index("Of 240")
    assert answer.index("Contradicted: their words alone") < answer.index("Of 240 audited documents")
    assert "if this holds" not in answer, "the terms of a promise that is void are not held out"
    assert "finite-sample, but contradicted here" in rest
    assert "Do not act on this list: a check contradicts the selection" in rest.split("Selected documents")[1]
    assert "Nothing is promised of this selection" in selection.answer.terms
    assert "✓ passed Overlap between roles. No calibration document is also audited." in rest


def test_an_untested_assumption_is_called_untested(run: Store) -> None:
    page, facts = report(run)
    assert "differ in more than membership is not known: the test" in facts.selections[0].answer.sentence
    assert "△ inconclusive Blind test. Inconclusive: fewer than" in page.text
    assert "△ limited Truncation. 2 of 340 documents were truncated at max_tokens." in page.text


def test_what_could_not_be_found_casts_no_doubt_on_what_was(tmp_path: Path) -> None:
    store = build_run(tmp_path, n=5)
    page, facts = report(store)
    assert facts.selections[0].summary.diagnostics.resolution.ok is False
    assert facts.selections[0].answer.doubts == []
    assert "△ limited Number of calibration documents." in page.text


def test_a_number_to_know_is_no_limit(run: Store) -> None:
    page, facts = report(run)
    assert facts.selections[0].summary.minimum_selectable > 240 / 100
    assert "limited Number" not in page.text
    assert "\N{EN DASH} noted Number of calibration documents. With 100 unseen documents" in page.text


@pytest.mark.parametrize("procedure", ["storey", "ptdi", "kernel"])
def test_the_strict_answer_is_no_way_round_a_failed_check(tmp_path: Path, procedure: str) -> None:
    store = build_run(tmp_path, selections=({"procedure": procedure},))
    checks = summary_in(store).diagnostics.model_copy(update={"blind": BlindDiagnostic(ok=False, sentence="Apart.")})
    amend(store, "members", diagnostics=checks, supported=checks.support(), reasons=checks.failures())
    answer = report(store)[1].selections[0].answer
    assert answer.headline.startswith("Contradicted: ")
    assert "guarantee (storey) selects" not in answer.sentence
    assert ("strict answer beside it (storey) either" in answer.terms) == (procedure != "storey")


def test_signs_that_are_no_fair_coins_say_nothing_against_the_ranks_beside_them(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    skewed = SymmetryDiagnostic(ok=False, sentence="The signs are skewed.", p_value=0.001)
    checks = summary_in(store).diagnostics.model_copy(update={"sign_symmetry": skewed})
    strict = StrictAnswer("bh on ranks of W", 7, 0.01, "finite-sample")
    amend(store, "members", procedure="ktd", diagnostics=checks, supported=False, reasons=["Skewed."], strict=strict)
    terms = report(store)[1].selections[0].answer.terms
    assert "Nothing is promised of this selection" in terms
    assert "(bh on ranks of W) selects 7 of 240" in terms


def test_several_selections_have_no_common_guarantee(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({}, {"name": "wide", "alpha": 0.3}))
    page, facts = report(store)
    assert [entry.summary.name for entry in facts.selections] == ["members", "wide"]
    assert "None covers all of them together" in page.text
    assert "is at most 30%, if this holds" in page.text


def test_the_limits_of_the_guarantee_are_spelt_out(run: Store) -> None:
    text = report(run)[0].text
    assert "It is not a statement about any one document." in text
    assert "It is not a statement about this one list" in text
    assert "Documents that were not selected are not shown to be the opposite" in text
    assert "They must come from the same source as the audited documents" in text


# --- what the run is


def test_a_sample_says_so_first_and_in_the_answer(tmp_path: Path) -> None:
    page, facts = report(build_run(tmp_path, limit=240))
    assert facts.limit == 240
    top, _ = page.text.split("1. The answer")
    assert "This is a sample: only the first 240 documents of each role were read." in top
    sentence = facts.selections[0].answer.sentence
    assert "(a sample: the first 240 of each role, not the whole corpus)" in sentence


def test_a_whole_run_is_no_sample(run: Store) -> None:
    page, facts = report(run)
    assert facts.limit is None
    assert "sample:" not in page.text


def test_scores_alone_are_no_answer(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    store.remove_folder("selection")
    StatusFile(store, Counts(2)).write("incomplete", 3)
    page, facts = report(store)
    assert "No selection has been made." in page.text
    assert facts.selections == []
    assert store.names("report/figures") == []
    assert "empty" in page.text


def test_a_selection_that_was_not_made_is_named(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({}, {"name": "wide", "alpha": 0.3}))
    store.remove_folder("selection/wide")
    StatusFile(store, Counts(2)).write("incomplete", 3)
    assert "Asked for and not made yet: wide." in report(store)[0].text


def test_a_selection_from_other_scores_is_called_out(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    amend(store, "members", n_audit=999)
    assert "counts 999 audited documents, and the run holds 240" in report(store)[0].text


def test_what_was_fine_tuned_on_and_what_was_changed_in_the_texts_is_told(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    manifest, _ = read_run(store)
    training = FinetuneConfig(method="lora", epochs=3)
    few = AdapterRecord(
        folder="adapters/0", training=training, train_on=["unseen", "seen"], documents=["0a1b2c3d"] * 30
    )
    config = manifest.config.model_copy(update={"text_transform": TransformConfig(dates="replace_year", year=2020)})
    write_manifest(store, manifest.model_copy(update={"config": config, "adapters": {"few": few}}))
    sign(store)
    text = report(store)[0].text
    assert b"0a1b2c3d" not in store.read("report/report.json"), "hashes of documents stay in the manifest"
    assert "The year 2020 stands in the place of every year in every text, before any use." in text
    assert "lora, 3 epochs on 30 documents of unseen and seen, which do not calibrate" in text


def test_gradient_norms_of_a_quantised_model_say_what_they_leave_out(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    manifest, _ = read_run(store)
    gradient = GradientRecord(method="batched", reason="", uncovered=[], differentiable=62, quantised=210)
    write_manifest(store, manifest.model_copy(update={"gradient": gradient}))
    sign(store)
    top, _ = report(store)[0].text.split("1. The answer")
    assert "the norm over the 62 parameter tensors that can be differentiated, and leaves out 210 quantised" in top
    whole = gradient.model_copy(update={"differentiable": 272, "quantised": 0})
    write_manifest(store, manifest.model_copy(update={"gradient": whole}))
    sign(store)
    assert "quantised" not in report(store)[0].text


def test_an_incomplete_run_says_so(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    StatusFile(store, Counts(2)).write("incomplete", 3)
    store.remove("receipts/score/unseen-000000.json")
    text = report(store)[0].text.split("1. The answer")[0]
    assert "The run ended in the state “incomplete”" in text
    assert "1 of 2 parts of the corpus are not scored" in text


def test_no_manifest_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        write_report(Store(str(tmp_path / "nothing")))


def test_a_damaged_summary_names_what_is_missing(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    store.write_json("selection/members/summary.json", {"schema": 1, "name": "members"})
    sign(store)
    with pytest.raises(UserError, match=r"summary\.json is damaged: missing key 'supported'"):
        write_report(store)


def test_quarantine_is_counted_by_reason_with_examples_of_each(run: Store) -> None:
    page, facts = report(run)
    assert facts.quarantine.reasons == {"empty": {"audit": 3}, "model_error": {"audit": 1}}
    assert {example.doc_id for example in facts.quarantine.examples} == {"q0", "q1", "q2", "q3"}
    assert "q3 audit, model error: <b>failed on" in page.text
    assert "p = 1, which is evidence of nothing" in page.text


def test_an_id_that_repeats_across_shards_is_quarantined_and_not_scored(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    table = store.read_table("quarantine/audit-000000-a.parquet").slice(0, 1)
    table = table.set_column(table.schema.get_field_index("reason"), "reason", pa.array(["duplicate_id"]))
    store.write_table("quarantine/duplicate_id.parquet", table)
    _, facts = report(sign(store))
    assert facts.quarantine.reasons["duplicate_id"] == {"audit": 1}
    assert "duplicate_id" in {example.reason for example in facts.quarantine.examples}
    audited = facts.documents[0]
    assert (audited.n_in, audited.n_scored, audited.n_quarantined) == (240, 235, 5)


def test_provenance_and_settings_are_on_the_page(run: Store) -> None:
    page, facts = report(run)
    for wanted in ("LlamaForCausalLM", "float32", "seenset 0.1.0", "ab12", "audit.jsonl", run.url):
        assert wanted in page.text, wanted
    assert facts.provenance.seed == 7
    assert facts.model.fingerprint in page.text


# --- what it never contains


def test_a_hostile_text_is_shown_and_not_run(run: Store) -> None:
    page, facts = report(run)
    assert str(facts.selections[0].selected[0].excerpt).startswith(SCRIPT)
    assert SCRIPT in page.text
    assert not {tag for tag, _ in page.tags} & {"b1", "iframe", "object", "link", "form", "base"}
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert [attrs["type"] for attrs in scripts] == ["text/plain", "text/plain", "module"]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 3


def test_nothing_hides_in_a_text(run: Store) -> None:
    source = run.read("report/report.html").decode() if report(run) else ""
    assert "safe⟨U+202E⟩txt.exe⟨U+0000⟩end" in source
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x00-\x08\x0b-\x1f\x7f-\x9f]", source)
    assert visible("a\ud800b\u2028") == "a⟨U+D800⟩b⟨U+2028⟩"
    assert visible("नमस्ते\u200d 👩\u200d🔬 é") == "नमस्ते\u200d 👩\u200d🔬 é"


def test_the_page_loads_nothing(run: Store) -> None:
    page, _ = report(run)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    digest = base64.b64encode(hashlib.sha256(page.blocks[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy, "no other script can run"
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attrs.get(name)
            part = tag == "img" and str(value).startswith("data:image/svg+xml;base64,")
            place = tag == "a" and str(value).startswith(("#", "../selection/"))
            assert value is None or part or place, (tag, name)
    style = re.search("<style>(.*?)</style>", run.read("report/report.html").decode(), re.DOTALL)
    assert style is not None
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)


def test_no_text_leaves_no_text_anywhere(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    report(store, texts=True)
    page, facts = report(store, texts=False)
    for path in (tmp_path / "run" / "report").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
            assert b"alert('selected')" not in path.read_bytes(), path
    listed = documents_of(page)
    assert len(listed) == facts.selections[0].summary.n_selected
    assert {document["text"] for document in listed} == {None}
    assert all(document.excerpt is None for document in facts.selections[0].selected)
    assert all(example.message is None for example in facts.quarantine.examples)
    assert "Texts were left out" in page.text
    assert len(facts.selections[0].selected) == 50


def test_excerpts_are_short(run: Store) -> None:
    _, facts = report(run)
    excerpts = [document.excerpt for document in facts.selections[0].selected]
    assert len(excerpts) == 50
    assert all(SECRET in excerpt for excerpt in excerpts)
    assert excerpts[5].endswith("…")
    assert max(map(len, excerpts)) <= 201


def test_a_document_without_an_excerpt_says_so(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    name = "selection/members/selected.parquet"
    table = store.read_table(name)
    store.write_table(name, table.drop(["excerpt"]).append_column("excerpt", pa.nulls(len(table), pa.string())))
    page, facts = report(sign(store))
    assert {document.excerpt for document in facts.selections[0].selected} == {"text not available"}
    assert "text not available" in page.text


# --- files


def test_a_second_report_has_the_same_bytes(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    folder = tmp_path / "run" / "report"
    write_report(store)
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_report(store)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first
    assert len(first) == 5


def test_figures_are_files_and_in_the_page_and_stale_ones_go(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    for old in ("old-scores.svg", "members-scores.png"):
        store.write(f"report/figures/{old}", b"stale")
    page, facts = report(store)
    names = ["members-p-values.svg", "members-quantiles.svg", "members-scores.svg"]
    assert store.names("report/figures") == names
    assert sorted(facts.selections[0].figures) == [f"figures/{name}" for name in names]
    shown = [attrs for tag, attrs in page.tags if tag == "img"]
    assert all(attrs["alt"] for attrs in shown)
    images = {base64.b64decode(attrs["src"].partition(",")[2]) for attrs in shown}
    assert images == {store.read(f"report/figures/{name}") for name in names}


def test_a_hundred_thousand_ranks_draw_fast_and_keep_the_threshold(run: Store) -> None:
    n = 100_000
    generator = np.random.default_rng(0)
    rank = np.arange(1, n + 2)
    count = generator.integers(1, 20, size=n + 1)
    threshold = 54_321 / (n + 1)
    x, y = _thinned(np.cumsum(count) / count.sum(), rank / (n + 1), threshold)
    assert len(x) <= MAX_POINTS + 1
    assert x[list(y).index(threshold)] == count[:54_321].sum() / count.sum()
    summary = summary_in(run).model_copy(update={"n_calibration": n, "threshold": threshold})
    began = time.perf_counter()
    assert len(draw_figures(SelectionFacts("members", summary, RankHistogram(rank, count), None, ()))) == 2
    assert time.perf_counter() - began < 20


def test_the_smallest_and_the_emptiest_selections_can_be_drawn(run: Store) -> None:
    update = {"n_audit": 1, "n_calibration": 1, "n_selected": 0, "threshold": None}
    summary = summary_in(run).model_copy(update=update)
    one = RankHistogram(np.array([2]), np.array([1]))
    empty = ScoreHistogram(column="loss", edges=[0.0, 1.0], roles={"audit": [0]})
    flat = ScoreHistogram(column="loss", edges=[1.0, 1.0], roles={"audit": [3]})
    single = ScoreHistogram(column="loss", edges=[0.0, 1.0], roles={"audit": [1]})
    drawn = [draw_figures(SelectionFacts("s", summary, one, scores, ())) for scores in (empty, flat, single)]
    assert [len(figures) for figures in drawn] == [2, 2, 3]
    assert draw_figures(SelectionFacts("s", summary, None, None, ())) == []


def test_the_drawn_threshold_is_where_the_curve_last_meets_the_line(tmp_path: Path) -> None:
    for procedure in ("bh", "by", "storey", "ptdi"):
        store = build_run(tmp_path / procedure, n=1000, selections=({"procedure": procedure},))
        (selection,) = read_facts(store).selections
        assert selection.ranks is not None
        slope = _slope(selection.summary, 240)
        assert slope is not None
        every = np.zeros(1001, dtype=np.int64)
        every[selection.ranks.rank - 1] = selection.ranks.count
        p = np.arange(1, 1002) / 1001
        met = p[np.cumsum(every) >= slope * p * (1 - 1e-12)].max()
        assert met == selection.summary.threshold, procedure


def test_the_report_never_imports_torch() -> None:
    code = "import sys, pipeline.report; assert not {'torch', 'ray', 'matplotlib.pyplot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
