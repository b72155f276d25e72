"""The verdict on a collection: its words, its exit codes, what it refuses, and that no failed check hides in it."""

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import seenset
from pipeline.answers.verdict import CollectionVerdict, read_verdict
from pipeline.answers.verdict_text import CALIBRATING, by_count, head
from pipeline.checks.dependent_documents import GroupSizes, group_numbers
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.corpus.documents import Document
from pipeline.corpus.keys import Keys
from pipeline.errors import ExitCode, UserError
from pipeline.report.contents import Report
from pipeline.results.summary import read_summary, unsettled
from pipeline.run.conclusion_text import CONTRADICTED, GROUPED
from pipeline.run.records import VERDICT_FILE
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from ray_jobs.select import give_verdict, select_again
from tests.helpers.commands import ended
from tests.helpers.finished import refile, run, with_column
from tests.helpers.made_up import write_audit
from tests.helpers.signed import file_blind_test, sign

APART = BlindDiagnostic(outcome=Outcome.FAILED, sentence="Their words differ.", auc=0.9, low=0.85, high=0.95)
ALIKE = BlindDiagnostic(outcome=Outcome.PASSED, sentence="Their words do not differ.", auc=0.5, low=0.45, high=0.55)
UNSETTLED = BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence="Inconclusive: too few documents.", n_to_settle=1600)
UNTESTED = BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, tested=False, sentence="Their words could not be compared.")


TEST_ALONE = "Of collections that it was not trained on, at most one in 20 gives p <= 0.05 by chance."
BY_CHANCE = f"{TEST_ALONE[:-1]}, and at most one in 10 this or a count above 0."


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The run of 60 audited and 60 unseen documents, which no model was trained on."""
    root = tmp_path_factory.mktemp("verdict")
    numbers = np.random.default_rng(0).permutation(9_000).reshape(2, -1) + 1_000
    texts = {
        role: [f"{a} is the number that stands beside {b} in the first line of their list." for a, b in pairs]
        for role, pairs in zip(("audit", "unseen"), numbers[:, :120].reshape(2, 60, 2), strict=True)
    }
    settings = {"detectors": ["loss", "zlib"], "resources": {"shard_bytes": 1 << 20}}
    run(write_audit(root, tiny_model_folder, **texts, **settings))
    return root / "run"


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Store:
    shutil.copytree(finished, tmp_path / "run")
    store = Store(str(tmp_path / "run"))
    file_blind_test(store, ALIKE)
    return store


def set_scores(store: Store, shift: float, groups: Callable[[str, int], str | None] = lambda role, row: None) -> None:
    """Normal scores, with audited ones higher by a shift, and groups by role and row."""
    rng = np.random.default_rng(0)

    def changed(table: pa.Table, receipt: Receipt) -> pa.Table:
        common = rng.normal(size=len(table))
        for column in ("loss", "zlib"):
            values = common + 0.5 * rng.normal(size=len(table)) + shift * (receipt.role == "audit")
            table = with_column(table, column, pa.array(values))
        names = pa.array([groups(receipt.role, row) for row in table["row"].to_pylist()], pa.string())
        return with_column(table, "group", names)

    refile(Path(store.root), changed)


def answered(store: Store, shift: float, blocks: str | None = None, **given: Any) -> CollectionVerdict:
    """The verdict on scores that are set, with the selections answered anew."""
    overrides = given.pop("overrides", [])
    set_scores(store, shift, **given)
    select_again(store.url, overrides, texts=False)
    return give_verdict(store.url, blocks)


def weakly_shown(store: Store) -> CollectionVerdict:
    """The verdict at a p-value between .01 and .05, by bisection of the shift: p falls from 1 to 1e-4 as it grows."""
    low, high = -1.0, 2.0
    for _ in range(20):
        verdict = answered(store, (low + high) / 2)
        if 0.01 < verdict.test.p_value <= 0.05:
            return verdict
        low, high = ((low + high) / 2, high) if verdict.test.p_value > 0.05 else (low, (low + high) / 2)
    raise AssertionError("no shift has such a p-value")


@pytest.mark.filterwarnings("error:Pydantic serializer warnings")  # of the report, which is written again
def test_a_collection_that_was_not_trained_on_is_not_shown_to_be(store: Store) -> None:
    set_scores(store, 0)
    verdict = give_verdict(store.url)
    assert verdict.answer == "not shown"
    assert verdict.conclusion == "supported"
    assert verdict.exit_code == ExitCode.DONE
    assert verdict.test.p_value > 0.05
    assert verdict.sentences[0].endswith("That is no proof that it was not.")
    assert verdict.sentences[1] == (
        "The count shows none: selection members, loss at 95% confidence, 60 audited documents."
    )
    assert (verdict.test.n_audit, verdict.test.n_unseen, verdict.test.blocks) == (60, 60, "family")
    assert read_verdict(store) == verdict
    assert give_verdict(store.url) == verdict


@pytest.mark.parametrize("outcome", [UNSETTLED, UNTESTED])
def test_an_inconclusive_verdict_states_its_bound_and_what_decides_it(
    store: Store, outcome: BlindDiagnostic, capsys: pytest.CaptureFixture[str]
) -> None:
    file_blind_test(store, outcome)
    verdict = answered(store, 1.5)
    assert (verdict.answer, verdict.conclusion) == ("trained on", "inconclusive")
    assert verdict.exit_code == ExitCode.SELECTED
    unchecked = " and their documents independent; this was not checked"
    checked = "; the test could not confirm this" if outcome is UNSETTLED else unchecked
    condition = f", provided both groups are alike{checked}."
    assert verdict.sentences[0].startswith("It is shown, with p = 0.0001, that ")
    assert verdict.sentences[0].endswith(f"{condition} {BY_CHANCE}")
    assert verdict.sentences[1].startswith("With 95% confidence at least ")
    assert verdict.sentences[1].endswith(condition)
    assert verdict.reasons == [unsettled(outcome)]
    step = "stays inconclusive, which is normal" if outcome is UNSETTLED else "where the texts can be read"
    assert verdict.next is not None
    assert step in verdict.next
    page = store.read("report/report.html").decode()
    assert '<div class="answer inconclusive" id="verdict">' in page
    assert "Do not act on this verdict" not in page
    assert ended("verdict", store.url, "--fail-if-trained") == 4
    printed = capsys.readouterr().out
    assert "CONTRADICTED" not in printed
    assert f"\n{verdict.reasons[0]}\n" in printed, "the outcome is stated once"
    assert f"\nnext: {verdict.next}\n" in printed
    assert html.unescape(page).count(verdict.next) == 1


def test_a_verdict_at_a_weak_p_value_states_chance_before_the_count_on_the_open_card(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """At p between .01 and .05 the verdict was a flat sentence, and p and the count stood in a fold of the page."""
    verdict = weakly_shown(store)
    p = f"{verdict.test.p_value:.2g}"
    assert verdict.answer == "trained on"
    assert verdict.sentences[0] == (
        f"It is shown, with p = {p}, that {verdict.model} was trained on documents of this collection. {BY_CHANCE}"
    )
    page = store.read("report/report.html").decode()
    card = page[page.index('id="verdict"') :]
    opened = html.unescape(card[: card.index("<details>")])
    places = [opened.index(text) for text in (f"p = {p}", BY_CHANCE, verdict.sentences[1])]
    assert places == sorted(places)
    assert ended("verdict", store.url) == 0
    assert capsys.readouterr().out.splitlines()[:2] == verdict.sentences[:2]


def test_a_verdict_by_the_count_alone_states_how_often_a_count_is_above_0_by_chance() -> None:
    by, chance = by_count(0.95, tested=True)
    assert head("m", "trained on", (by, chance), "") == (
        "It is shown, with 95% confidence, that m was trained on documents of this collection. "
        "Of collections that it was not trained on, at most one in 20 gives a count above 0 by chance, and at most one "
        "in 10 this or p <= 0.05."
    )
    assert by_count(0.92, tested=False)[1] == (
        "Of collections that it was not trained on, at most 8% give a count above 0 by chance."
    )


def test_no_bound_is_stated_anywhere_where_a_blind_test_contradicts_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    set_scores(store, 1.5)
    file_blind_test(store, APART)
    with pytest.warns(seenset.UnsupportedWarning):
        run = seenset.open_run(store.url) if select_again(store.url, [], texts=False) else None
    verdict = give_verdict(store.url)
    assert (verdict.answer, verdict.conclusion, verdict.counts) == ("not supported", "contradicted", [])
    assert CONTRADICTED in verdict.sentences
    capsys.readouterr()
    export = ["export", store.url, f"{store.root}-export", "--unsupported-too"]
    for command in (["verdict", store.url], ["status", store.url], export):
        assert ended(*command) == 0
    printed = capsys.readouterr().out
    page = store.read("report/report.html").decode()
    written = [Path(f"{store.root}-export/README.md").read_text(), store.read(VERDICT_FILE).decode(), page, printed]
    for text in written:
        assert not re.search(r"95% confidence|at least \d+ of the", text)
    assert run.selections["members"].summary.bound is None
    assert json.loads(store.read("selection/members/summary.json"))["bound"] is None
    assert json.loads(store.read("selection/members/alphas.json"))["right_at_least"] is None


def test_the_command_and_the_python_interface_state_the_same_and_end_as_they_say(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    set_scores(store, 1.5)
    select_again(store.url, [], texts=False)
    summary = read_summary(store, "members")
    assert ended("verdict", store.url, "--json", "--fail-if-trained") == 4
    verdict = CollectionVerdict.model_validate(json.loads(capsys.readouterr().out))
    assert verdict == read_verdict(store) == seenset.verdict(store.url)
    assert (verdict.answer, verdict.conclusion, verdict.reasons) == ("trained on", "supported", [])
    assert verdict.test.p_value == 1e-4
    (counted,) = verdict.counts
    assert (counted.unit, counted.at_least, counted.n_units) == ("document", summary.bound.members_at_least, 60)
    first = f"With 95% confidence at least {counted.at_least} of the 60 audited documents were trained on"
    assert first in verdict.sentences[1]
    assert verdict.sentences[0].endswith(BY_CHANCE)
    run = seenset.open_run(store.url)
    file_blind_test(store, APART)
    with pytest.warns(seenset.UnsupportedWarning, match="Their words differ"):
        assert seenset.verdict(run).conclusion == "contradicted"
    assert ended("verdict", store.url, "--fail-if-trained") == 5
    text = capsys.readouterr().out
    assert text.startswith("Contradicted: the audited documents differ from the unseen ones; this does not show that ")
    assert "CONTRADICTED, do not act on it: Their words differ." in text
    assert "p = 0.0001" in text
    assert ended("verdict", store.url, "--blocks", "paragraph") == 2
    assert "blocks must be group or family, got 'paragraph'" in capsys.readouterr().err


def test_the_report_shows_the_verdict_and_a_new_question_takes_it_away(store: Store) -> None:
    file_blind_test(store, APART)
    answered(store, 1.5)
    report = Report.model_validate(store.read_json("report/report.json"))
    assert report.verdict == read_verdict(store)
    assert not report.texts, "the report has no more texts than before"
    page = store.read("report/report.html").decode()
    assert "The whole collection" in page
    assert "Do not act on this verdict." in page
    select_again(store.url, ["selections.0.alpha=0.1"], texts=False)
    assert not store.exists(VERDICT_FILE)
    assert "The whole collection" not in store.read("report/report.html").decode()


def test_a_run_without_unseen_documents_or_with_too_few_says_what_to_add(store: Store) -> None:
    set_scores(store, 0, groups=lambda role, row: f"{role} {row // 4}")
    with pytest.raises(UserError, match="at least 20 blocks of audited and 20 of unseen documents, and has 15 audited"):
        give_verdict(store.url)
    verdict = give_verdict(store.url, "family")
    assert verdict.test.blocks == "family"
    with pytest.raises(UserError, match="at least 20 blocks"):
        give_verdict(store.url)
    assert read_verdict(store) == verdict, "a question that is refused takes no answer away"
    set_scores(store, 0)
    with pytest.raises(UserError, match="no document of this run has"):
        give_verdict(store.url, "group")
    shards = store.read_json("shards.json")
    store.write_json("shards.json", [shard for shard in shards if shard["role"] != "unseen"])
    sign(store)
    with pytest.raises(UserError, match=r"has none: add corpus\.unseen"):
        give_verdict(store.url)


def test_with_groups_in_both_roles_the_verdict_counts_groups(store: Store) -> None:
    groups = {"groups": lambda role, row: "shared" if row < 2 else f"{role} {row // 2}"}
    every = answered(store, 1.5, **groups)
    summary = read_summary(store, "members")
    assert (summary.conclusion, summary.bound_withheld) == ("contradicted", CONTRADICTED), "pairs that calibrate"
    verdict = answered(store, 1.5, overrides=["selections.0.calibrate=one_per_block"], **groups)
    assert (verdict.counts, verdict.test) == (every.counts, every.test), "the verdict counts groups by itself"
    (counted,) = verdict.counts
    assert (counted.unit, counted.n_units, counted.documents_of_each, counted.n_mixed) == ("group", 29, 2, 4)
    assert 0 < counted.at_least <= 29
    summary = read_summary(store, "members")
    assert (summary.bound, summary.bound_withheld) == (None, GROUPED), "documents of one group are not independent"
    assert summary.conclusion == "supported"
    assert summary.n_calibration == len({"shared", *(f"unseen {row // 2}" for row in range(2, 60))}) + 1
    assert "seenset verdict counts groups" in summary.diagnostics.groups.sentence
    assert not re.search(r"at least \d+ of the 60", store.read("report/report.html").decode())
    assert verdict.sentences[1].startswith(
        f"With 95% confidence at least {counted.at_least} of the 29 audited groups contain a document that was trained"
    )
    assert "assumed to carry no information on its score" in verdict.sentences[2]
    assert "4 documents are left out" in verdict.sentences[2]


@pytest.mark.parametrize(
    ("groups", "breaks"),
    [
        ([None] * 100, False),
        ([f"own {i}" for i in range(5_000)], False),
        ([f"pair {i // 2}" for i in range(5_000)], True),
        ([*(None for _ in range(100)), "one", "one"], False),
        (["one"] * 10, True),
    ],
)
def test_groups_break_bounds_where_they_hold_several_documents(groups: list[str | None], breaks: bool) -> None:
    def sizes(some: list[str | None]) -> GroupSizes:
        keys = Keys.of([Document(row, f"{row}", "a text", group) for row, group in enumerate(some)])
        return GroupSizes.of(group_numbers(keys))

    first, second = sizes(groups[::2]), sizes(groups[1::2])
    assert (first + second).breaks_bounds == breaks
    assert first + second == second + first == sizes(groups)


def test_blocks_of_different_sizes_allow_no_permutation_test_and_the_verdict_says_so(
    store: Store,
) -> None:
    set_scores(store, 0, groups=lambda role, row: f"{role} {row // 2}" if role == "audit" else f"{role} {row}")
    verdict = give_verdict(store.url)
    assert verdict.test is None
    assert any("No permutation test was made" in sentence for sentence in verdict.sentences)
    assert (verdict.counts[0].unit, verdict.counts[0].documents_of_each) == ("group", 1)


def test_where_one_role_alone_is_grouped_the_page_leaves_the_count_to_the_verdict(store: Store) -> None:
    verdict = answered(store, 2.5, groups=lambda role, row: f"{role} {row // 2}" if role == "unseen" else None)
    (count,) = verdict.counts
    assert (count.unit, count.n_units) == ("document", 60)
    assert count.at_least > 0
    assert verdict.sentences[2] == CALIBRATING
    brief = Report.model_validate(store.read_json("report/report.json")).selections[0].brief
    assert brief.collection == "Nothing is stated of the 60 audited documents."
    groups = {"groups": lambda role, row: f"{role} {row // 2}" if role == "audit" else None}
    assert answered(store, 2.5, **groups).counts[0].at_least > 0
    brief = Report.model_validate(store.read_json("report/report.json")).selections[0].brief
    assert brief.collection == (
        "How many of all 60 were trained on is not bounded by this selection; seenset verdict counts blocks."
    )
    assert brief.this_list.endswith("wrong is not bounded: documents depend on each other.")


def test_no_count_is_stated_of_blocks_that_ignore_groups_and_the_condition_is_named(store: Store) -> None:
    verdict = answered(store, 2.5, "family", groups=lambda role, row: f"{role} {row // 2}")
    assert (verdict.answer, verdict.counts) == ("trained on", [])
    assert verdict.sentences[0].endswith(f", provided documents of one group are independent. {TEST_ALONE}")
    assert verdict.sentences[1] == (
        "No count is stated: a count requires independent documents, and the groups of these are ignored (blocks: "
        "family). The permutation test takes documents of one group to be independent."
    )
    (summary,) = select_again(store.url, ["selections.0.procedure=bound"], texts=False)
    assert (summary.conclusion, summary.bound) == ("contradicted", None), "it guarantees nothing but a bound"
    verdict = give_verdict(store.url)
    assert (verdict.answer, verdict.conclusion, verdict.counts[0].unit) == ("trained on", "supported", "group")
    verdict = answered(store, 2.5, "family", groups=lambda role, row: f"{role} {row}")
    assert verdict.counts, "groups of one document each"


def test_lower_scores_are_no_sign_of_training_and_a_p_value_of_1_is_explained(store: Store) -> None:
    set_scores(store, -1.5)
    verdict = give_verdict(store.url)
    assert (verdict.test.p_value, verdict.answer) == (1, "not shown")
    assert verdict.direction.sentence in verdict.sentences
    assert "training raises scores, so the test gives p = 1" in verdict.direction.sentence
    set_scores(store, 1.5)
    text = " ".join(give_verdict(store.url).sentences)
    assert "do not score higher" not in text
    assert "Both rest on this" not in text
    assert "The verdict assumes that nothing but training tells the audited documents from the unseen ones." in text
