"""Claims about the report: what it says, how certain it is allowed to sound, and what it never contains."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.answers.selected import ScoreHistogram
from pipeline.answers.top_documents import TokenAttributions
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.sign_symmetry import SymmetryDiagnostic
from pipeline.config.corpus import TransformConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import visible
from pipeline.report.contents import Folders, Report
from pipeline.report.facts import RankHistogram, SelectionFacts, read_facts
from pipeline.report.figures import _slope, draw_figures
from pipeline.report.page import Listing, _tokens, even_shares, read_listings, write_report
from pipeline.report.templates import page_script
from pipeline.results.status import Counts, StatusFile
from pipeline.run.manifest import AdapterRecord, GradientRecord, read_run
from pipeline.selection.guarantees import ConclusionValue, Outcome, StrictAnswer
from pipeline.store.files import Store
from tests.helpers.commands import user_error
from tests.helpers.report_run import SCRIPT, SECRET, amend, amend_checks, amend_manifest, build_run, summary_in
from tests.helpers.signed import sign


class Page(HTMLParser):
    """Tags and words of a page; its scripts and its data apart, and what is visible outside its closed folds."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: list[str] = []
        self.visible: list[str] = []
        self.folds: list[bool] = []
        self.skipping = self.in_summary = False
        self.feed(source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.skipping = tag in ("style", "script")
        self.in_summary = tag == "summary" or (self.in_summary and tag == "span")
        self.folds += ["open" in dict(attrs)] * (tag == "details")

    def handle_endtag(self, tag: str) -> None:
        self.skipping = False
        self.in_summary = self.in_summary and tag != "summary"
        if tag == "details":
            self.folds.pop()

    def handle_data(self, data: str) -> None:
        (self.blocks if self.skipping else self.words).append(data)
        if not self.skipping and all(self.folds[:-1] if self.in_summary else self.folds):
            self.visible.extend(data.split())


def report(store: Store, texts: bool = True) -> tuple[Page, Report]:
    path = write_report(store, texts)
    assert path == f"{store.url}/report/report.html"
    facts = Report.model_validate(store.read_json("report/report.json"))
    return Page(store.read("report/report.html").decode()), facts


def unpacked(block: str) -> list[Any]:
    """The lines of a data block of a page."""
    return [json.loads(line) for line in gzip.decompress(base64.b64decode(block)).splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_run(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def reported(run: Store) -> tuple[Page, Report]:
    return report(run)


def test_a_finite_sample_answer_names_the_average_its_assumption_and_limits(reported: tuple[Page, Report]) -> None:
    page, facts = reported
    (selection,), text = facts.selections, page.text
    summary, sentence = selection.summary, selection.answer.sentence
    count = summary.n_selected
    assert count > 50
    for stated in (
        f"Of 240 audited documents, {count} were selected as part of the training data of models/tiny<b>.",
        "On average over repetitions of the whole audit",
        "is at most 10%, if this holds: the assumption in section 2.",
        "4 of the audited documents could not be scored and count as hypotheses with p = 1.",
        "It is not a statement about any one document.",
        "It is not a statement about this one list",
        "Documents that were not selected are not shown to be the opposite",
        "They must come from the same source as the audited documents",
        "△ inconclusive Blind test. Inconclusive: fewer than",
        "△ limited Truncation. 2 of 340 documents were truncated at max_tokens.",
        "\N{EN DASH} noted Number of calibration documents. With 100 unseen documents",
    ):
        assert stated in text
    assert "is at most 10%, if this holds: " + summary.assumption in sentence
    assert "differ in more than membership is not known: the test" in sentence
    assert text.count(summary.assumption) == 1, "the assumption stands on the page once"
    assert "approximately" not in sentence
    assert summary.minimum_selectable > 240 / 100
    assert "limited Number" not in text, "a number to know is no limit"
    assert (facts.limit, "sample:" in text) == (None, False)


def test_answers_without_a_guarantee_claim_none_and_show_the_strict_one(tmp_path: Path) -> None:
    selections = ({"procedure": "ptdi"}, {"procedure": "kernel", "name": "kernel"})
    page, facts = report(build_run(tmp_path, selections=selections, drawn=()))
    approximate, answer = (selection.answer for selection in facts.selections)
    assert "approximately at most 10% for large samples; this is not guaranteed at this size" in approximate.sentence
    safe = facts.selections[0].summary.strict.n_selected
    assert f"The procedure with a finite-sample guarantee (storey) selects {safe} of 240." in approximate.sentence
    assert "approximately at most 10% for large samples; this is not guaranteed at this size" in page.text
    assert f"{safe} selected by storey (finite-sample)" in page.text
    assert "No guarantee is proved for this procedure (kernel)" in answer.sentence
    assert "is at most" not in answer.sentence
    assert "by a procedure for which no guarantee is proved." in answer.headline
    assert "The procedure with a finite-sample guarantee (storey) selects" in answer.sentence
    assert "none proved" in page.text


def test_the_clean_direction_turns_both_the_finding_and_the_error_round(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())
    amend(store, "members", n_selected=1)
    assert "240 audited documents, 1 was selected as part of" in report(store)[0].text
    amend(store, "members", n_selected=2, direction="clean")
    text = report(store)[0].text
    assert "were selected as not part of the training data of" in text
    assert "wrong documents (in truth part of the training data)" in text
    assert "which documents are not part of the training data" in text
    amend(store, "members", n_selected=0)
    assert "This is not evidence that the model was trained on them" in report(store)[0].text


def test_nothing_selected_is_not_an_acquittal(tmp_path: Path) -> None:
    page, facts = report(build_run(tmp_path, members=0.0))
    assert facts.selections[0].summary.n_selected == 0
    assert "Of 240 audited documents, none was selected as part of the training data" in page.text
    assert "This is not evidence that the model was not trained on them" in page.text
    assert "the shortest possible list has 24 documents" in page.text
    assert "is at most 10%" not in facts.selections[0].answer.sentence
    assert "Here no point is." in page.text


def test_a_knockoff_filter_says_how_few_it_could_select_and_its_signs_do_not_count(tmp_path: Path) -> None:
    store = build_run(tmp_path, members=0.0, drawn=())
    for alpha, fewest in ((0.1, "10 documents."), (0.001, "1,000 documents and only 240 are audited")):
        amend(store, "members", procedure="ktd", alpha=alpha, guarantee="heuristic")
        text = report(store)[0].text
        assert f"The shortest possible list of the knockoff filter has {fewest}" in text
        assert "for calibration the shortest possible list" not in text
    amend_checks(
        store, sign_symmetry=SymmetryDiagnostic(outcome=Outcome.FAILED, sentence="The signs are skewed.", p_value=0.001)
    )
    strict = StrictAnswer("bh on ranks of W", 7, 0.01, "finite-sample")
    amend(store, "members", n_selected=9, conclusion=ConclusionValue.CONTRADICTED, reasons=["Skewed."], strict=strict)
    terms = report(store)[1].selections[0].answer.terms
    assert "Nothing is guaranteed for this selection" in terms
    assert "(bh on ranks of W) selects 7 of 240" in terms


@pytest.mark.parametrize(("procedure", "least"), [("bh", "9"), ("by", "60")])
def test_too_few_calibration_documents_are_named_as_the_reason(tmp_path: Path, procedure: str, least: str) -> None:
    store = build_run(tmp_path, n=5, selections=({"procedure": procedure},), drawn=())
    amend(store, "members", minimum_selectable=300)
    page, facts = report(store)
    assert "With only 5 documents for calibration nothing could ever have been selected" in page.text
    assert "the smallest possible p-value is 1/6" in page.text
    assert f"at least about {least} for anything to be selectable" in page.text
    assert ("about 1,199 for a selection of one in a hundred" in page.text) == (procedure == "bh")
    assert facts.selections[0].summary.diagnostics.resolution.outcome == "failed"
    assert facts.selections[0].answer.doubts == [], "what could not be found casts no doubt on what was"
    assert "△ limited Number of calibration documents." in page.text
    light = next(light for light in facts.selections[0].brief.lights if light.name == "resolution")
    nothing = "With 5 documents for calibration nothing could ever have been selected."
    assert (light.colour, light.reason) == ("amber", nothing)
    assert facts.selections[0].brief.this_list == "It is empty; nothing could ever have been selected."


@pytest.mark.parametrize("procedure", ["storey", "kernel"])
def test_a_failed_check_stands_in_the_answer_itself_and_voids_all_guarantees(tmp_path: Path, procedure: str) -> None:
    store = build_run(tmp_path, selections=({"procedure": procedure},), drawn=())
    sentence = "Calibration and audited documents differ in more than membership (AUC 0.91)."
    amend_checks(store, blind=BlindDiagnostic(outcome=Outcome.FAILED, sentence=sentence))
    page, facts = report(store)
    answer = facts.selections[0].answer
    assert f"Blind test failed: {sentence}" in answer.sentence
    above, rest = page.text.split("The answer in full")
    assert sentence in above
    assert "✗ failed Blind test. " + sentence in rest
    assert answer.doubts == [f"Blind test failed: {sentence}"]
    assert answer.headline.startswith("Contradicted: ")
    assert answer.sentence.startswith("Contradicted: their words alone tell the audited from")
    assert above.index("Do not act on this answer.") < above.index("Selection “members”") < above.index("Of 240")
    assert above.index("Contradicted: their words alone") < above.index("Of 240 audited documents")
    assert "if this holds" not in above, "the terms of a guarantee that is void are not held out"
    assert "guarantee (storey) selects" not in answer.sentence, "the strict answer is no way round"
    assert ("strict answer beside it (storey) either" in answer.terms) == (procedure != "storey")
    assert ("finite-sample, but contradicted here" in rest) == (procedure == "storey")
    assert "Do not act on this list: a check contradicts the selection" in rest.split("Selected documents")[1]
    assert "Nothing is guaranteed for this selection" in answer.terms
    assert "✓ passed Overlap between roles. No calibration document is also audited." in rest


def test_several_selections_have_no_common_guarantee_and_missing_ones_are_named(tmp_path: Path) -> None:
    store = build_run(tmp_path, selections=({}, {"name": "wide", "alpha": 0.3}))
    page, facts = report(store)
    assert [entry.summary.name for entry in facts.selections] == ["members", "wide"]
    assert "None covers all of them together" in page.text
    assert "is at most 30%, if this holds" in page.text
    store.remove_folder("selection/wide")
    StatusFile(store, Counts(2)).write("incomplete", 3)
    assert "Configured but not made yet: wide." in report(store)[0].text
    store.remove_folder("selection")
    page, facts = report(store)
    assert "No selection has been made." in page.text, "scores alone are no answer"
    assert facts.selections == []
    assert store.names("report/figures") == []


def test_what_was_fine_tuned_on_changed_or_left_out_of_gradient_norms_is_told(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())
    training, few = FinetuneConfig(method="lora", epochs=3), ["0a1b2c3d"] * 30
    adapter = AdapterRecord(folder="adapters/0", training=training, train_on=["unseen", "seen"], documents=few)
    transform = {"text_transform": TransformConfig(dates="replace_year", year=2020)}
    config = read_run(store)[0].config.model_copy(update=transform)
    amend_manifest(store, config=config, adapters={"few": adapter})
    text = report(store)[0].text
    assert b"0a1b2c3d" not in store.read("report/report.json"), "hashes of documents stay in the manifest"
    assert "The year 2020 replaces every year in every text, before any use." in text
    assert "lora, 3 epochs on 30 documents of unseen and seen, which do not calibrate" in text
    gradient = GradientRecord(method="batched", reason="", uncovered=[], differentiable=62, quantised=210)
    amend_manifest(store, gradient=gradient)
    top, _ = report(store)[0].text.split("1. The answer")
    assert "the norm over the 62 parameter tensors that can be differentiated, and leaves out 210 quantised" in top
    amend_manifest(store, gradient=gradient.model_copy(update={"differentiable": 272, "quantised": 0}))
    assert "quantised" not in report(store)[0].text


def test_a_sample_an_incomplete_run_and_a_selection_from_other_scores_say_so(tmp_path: Path) -> None:
    store = build_run(tmp_path, limit=240, drawn=())
    page, facts = report(store)
    assert facts.limit == 240
    assert "This is a sample: only the first 240 documents of each role were read." in page.text.split("1. The ans")[0]
    assert "(a sample: the first 240 of each role, not the whole corpus)" in facts.selections[0].answer.sentence
    amend(store, "members", n_audit=999)
    assert "counts 999 audited documents, and the run holds 240" in report(store)[0].text
    StatusFile(store, Counts(2)).write("incomplete", 3)
    store.remove("receipts/score/unseen-000000.json")
    text = report(store)[0].text.split("1. The answer")[0]
    assert "The run ended in the state “incomplete”" in text
    assert "1 of 2 parts of the corpus are not scored" in text


def test_quarantine_and_provenance_are_on_the_page(run: Store, reported: tuple[Page, Report]) -> None:
    page, facts = reported
    assert facts.quarantine.reasons == {"empty": {"audit": 3}, "model_error": {"audit": 1}}
    assert {example.doc_id for example in facts.quarantine.examples} == {"q0", "q1", "q2", "q3"}
    wanted = (
        "q3 audit, model error: <b>failed on",
        "p = 1, which is evidence of nothing",
        "LlamaForCausalLM",
        "float32",
    )
    for part in (*wanted, "seenset 0.1.0", "ab12", "audit.jsonl", run.url, facts.model.fingerprint):
        assert part in page.text, part
    assert facts.provenance.seed == 7


def test_an_id_that_repeats_across_shards_is_quarantined_and_not_scored(tmp_path: Path) -> None:
    store = build_run(tmp_path, drawn=())
    table = store.read_table("quarantine/audit-000000-a.parquet").slice(0, 1)
    table = table.set_column(table.schema.get_field_index("reason"), "reason", pa.array(["duplicate_id"]))
    store.write_table("quarantine/duplicate_id.parquet", table)
    _, facts = report(sign(store))
    assert facts.quarantine.reasons["duplicate_id"] == {"audit": 1}
    assert "duplicate_id" in {example.reason for example in facts.quarantine.examples}
    audited = facts.documents[0]
    assert (audited.n_in, audited.n_scored, audited.n_quarantined) == (240, 235, 5)


def test_a_hostile_text_is_shown_and_not_run_and_hides_nothing(run: Store, reported: tuple[Page, Report]) -> None:
    page, facts = reported
    assert str(facts.selections[0].selected[0].excerpt).startswith(SCRIPT)
    assert SCRIPT in page.text
    assert not {tag for tag, _ in page.tags} & {"b1", "iframe", "object", "link", "form", "base"}
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert [attrs["type"] for attrs in scripts] == ["text/plain", "text/plain", "module"]
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 3
    source = run.read("report/report.html").decode()
    assert "safe⟨U+202E⟩txt.exe⟨U+0000⟩end" in source
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\ufeff\x00-\x08\x0b-\x1f\x7f-\x9f]", source)
    assert visible("a\ud800b\u2028") == "a⟨U+D800⟩b⟨U+2028⟩"
    assert visible("नमस्ते\u200d 👩\u200d🔬 é") == "नमस्ते\u200d 👩\u200d🔬 é"


def test_the_page_loads_nothing(run: Store, reported: tuple[Page, Report]) -> None:
    page, _ = reported
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
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
    listed = unpacked(page.blocks[-3])
    assert sum(len(chunk["p"]) for chunk in listed) == facts.selections[0].summary.n_selected
    assert not any("text" in chunk for chunk in listed)
    assert all(document.excerpt is None for document in facts.selections[0].selected)
    assert all(example.message is None for example in facts.quarantine.examples)
    assert "Texts were left out" in page.text
    assert len(facts.selections[0].selected) == 50


def test_excerpts_are_short_and_one_that_is_missing_says_so(reported: tuple[Page, Report], tmp_path: Path) -> None:
    excerpts = [document.excerpt for document in reported[1].selections[0].selected]
    assert len(excerpts) == 50
    assert all(SECRET in excerpt for excerpt in excerpts)
    assert excerpts[5].endswith("…")
    assert max(map(len, excerpts)) <= 201
    store = build_run(tmp_path, drawn=())
    name = "selection/members/selected.parquet"
    table = store.read_table(name)
    store.write_table(name, table.drop(["excerpt"]).append_column("excerpt", pa.nulls(len(table), pa.string())))
    page, facts = report(sign(store))
    assert {document.excerpt for document in facts.selections[0].selected} == {"text not available"}
    assert "text not available" in page.text


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
    first = {path: path.read_bytes() for path in (tmp_path / "run/report").rglob("*") if path.is_file()}
    write_report(store)
    assert {path: path.read_bytes() for path in first} == first, "a second report has the same bytes"
    assert len(first) == 5


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


@pytest.mark.parametrize("procedure", ["by", "storey"])
def test_the_drawn_threshold_is_where_the_curve_last_meets_the_line(tmp_path: Path, procedure: str) -> None:
    (selection,) = read_facts(build_run(tmp_path, n=1000, selections=({"procedure": procedure},))).selections
    slope, ranks = _slope(selection.summary, 240), selection.ranks
    every = np.zeros(1001, dtype=np.int64)
    every[ranks.rank - 1] = ranks.count
    p = np.arange(1, 1002) / 1001
    assert p[np.cumsum(every) >= slope * p * (1 - 1e-12)].max() == selection.summary.threshold


EVIDENCE = TokenAttributions(
    text="One\u202etwo",
    pieces=["One", "\u202etwo"],
    values=[None, -3.14159],
    kind="log-probability",
    detector="loss",
    near_copies=["/home/somebody/a#1"],
    ranked_by="td4eval",
    score=-2.5,
)


def with_selected(folder: Path, table: pa.Table) -> Store:
    """A run whose first selection selected the documents of a table, and has nothing to draw."""
    store = build_run(folder, drawn=())
    store.write_table("selection/members/selected.parquet", table)
    amend(store, "members", n_selected=len(table))
    return store


def many(rows: int, **columns: Any) -> pa.Table:
    """Selected documents with ids that cannot be guessed, four scores and beginnings of English length."""
    generator = np.random.default_rng(0)
    words = np.array(
        [f"{a}{b}" for a in ("tra", "ning", "the", "of", "mod", "el") for b in ("s", "er", "al", "in", "")]
    )
    texts = words[generator.integers(0, len(words), (rows, 40))]
    table = {
        "doc_id": [generator.bytes(16).hex() for _ in range(rows)],
        "p_value": np.sort(generator.random(rows)),
        **{f"score_{index}": generator.normal(size=rows) for index in range(4)},
        "source": ["audit.jsonl"] * rows,
        "row": np.arange(rows),
        "excerpt": [" ".join(line)[:200] for line in texts],
    }
    return pa.table({**table, **columns})


def listing_of(store: Store, room: int = 4_000_000, texts: bool = True) -> Listing:
    run = read_facts(store)
    return read_listings(store, run.selections, Folders.find(run.manifest.inputs), texts, room)["members"]


def test_what_there_is_no_room_for_is_left_out_from_the_end(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(3_000))
    listing = listing_of(store, room=150_000)
    assert len(listing.rows) + len(listing.attributions) <= 150_000
    assert 500 <= listing.n_rows < 3_000
    chunks = unpacked(listing.rows)
    assert [p for chunk in chunks for p in chunk["p"]] == sorted(p for chunk in chunks for p in chunk["p"])
    assert sum(len(chunk["p"]) for chunk in chunks) == listing.n_rows


def test_small_selections_are_whole_and_large_ones_share_the_rest() -> None:
    assert even_shares([10, 30_000, 50_000], 20_000) == [10, 9_995, 9_995]
    assert even_shares([30_000, 5], 20_000) == [19_995, 5]
    assert even_shares([1, 2], 20_000) == [1, 2]
    assert even_shares([], 20_000) == []


def test_markup_hidden_characters_and_odd_scores_are_data_in_a_list(tmp_path: Path) -> None:
    ids = ["/data/audit.jsonl#0", SCRIPT, "a\u202eb"]
    odd = {"score_0": [np.nan, np.inf, 0.123456789], "excerpt": ["one", SCRIPT, "c\u202ed"]}
    store = with_selected(tmp_path, many(3, doc_id=ids, source=["/data/audit.jsonl"] * 3, **odd))
    write_report(store)
    page = store.read("report/report.html").decode()
    assert "<script>alert" not in page
    assert 'href="../selection/members/selected.parquet"' in page
    (chunk,) = unpacked(page.split('id="rows-members">')[1].split("<")[0])
    assert chunk["ids"] == [None, SCRIPT, "a⟨U+202E⟩b"], "an id that repeats the place is not stored beside it"
    assert (chunk["source"], chunk["text"]) == ([0, 0, 0], ["one", SCRIPT, "c⟨U+202E⟩d"])
    assert chunk["scores"]["score_0"] == [None, None, 0.123457]
    assert "text" not in unpacked(listing_of(store, texts=False).rows)[0]
    run = read_facts(store)
    store.write("selection/members/selected.parquet", b"PAR1 and no more PAR1")
    assert "selection/members/selected.parquet is damaged" in user_error(read_facts, store)
    error = user_error(read_listings, store, run.selections, Folders(()), True, 1_000_000)
    assert error.startswith("cannot read ")
    assert "selection/members/selected.parquet" in error


def test_tokens_go_with_their_values_where_texts_are_wanted_and_ids_are_relative() -> None:
    home = Folders(("/home/somebody/",))
    with_texts, without = (_tokens(7, EVIDENCE, home, texts=texts) for texts in (True, False))
    assert set(without) == set(with_texts) - {"pieces", "values"}
    assert with_texts == {
        "at": 7,
        "kind": "log-probability",
        "detector": "loss",
        "by": "td4eval",
        "score": -2.5,
        "copies": ["a#1"],
        "pieces": ["One", "⟨U+202E⟩two"],
        "values": [None, -3.14],
    }


def test_the_script_holds_its_table_and_cannot_end_its_element_early() -> None:
    script = page_script()
    assert "DataTables" in script
    assert "const DataTable = " in script
    assert "</script" not in script.lower()
    assert "innerHTML" not in script.partition("const DataTable = ")[2].partition("/*! Bundled")[0]
