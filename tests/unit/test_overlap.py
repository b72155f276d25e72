"""Selection over score shards with near-duplicates: across roles they stop or are dropped, within one are noted."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.small_model import WORDS
from pipeline.answers.select import ShardMap, select_all
from pipeline.checks.dependent_documents import read_sketches
from pipeline.corpus.documents import text_key
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.near_duplicates import sketch
from pipeline.plan.description import build_config
from pipeline.results.summary import Summary
from pipeline.run.conclusion_text import GROUPED
from pipeline.run.plan import make_plan
from pipeline.run.records import KEYS_FILE
from pipeline.run.scored import KEYS_SCHEMA, read_scored
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, withdraw_receipt
from tests.helpers.commands import user_error
from tests.helpers.export_runs import file_scores
from tests.helpers.made_up import write_corpus

LIST = "This is a list of people reported killed by the police in {}"
HEADER = "licensed to everybody under the terms of the licence text {}"


def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    return map(function, receipts)


def select(
    tmp_path: Path,
    audit: Sequence[str],
    known: Sequence[str],
    trained: Sequence[str] | None = None,
    overlap: str = "error",
    each: ShardMap = each,
    raised: int = 0,
    **asked: Any,
) -> Summary:
    """The answer to a question over scores that stand in a run directory, with an adapter trained on some texts."""
    tmp_path.mkdir(exist_ok=True)
    column = "loss" if trained is None else "fsd"
    corpus = write_corpus(tmp_path, {"audit": audit, "unseen": known, "seen": known})
    selection = {"name": "a", "detectors": [column], "procedure": "bh", "alpha": 0.2, **asked}
    described = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "resources": {"shard_bytes": 30_000}}
    asked = {"detectors": [column], "overlap": overlap, "selections": [selection]}
    config = build_config({**described, **asked, "corpus": corpus})
    plan, store = make_plan(config), Store(config.run)
    if trained is not None:
        columns = {
            "adapter": ["default"] * len(trained),
            "text_key": [text_key(text) for text in trained],
            "sketch": [sketch(text) for text in trained],
        }
        store.write_table(KEYS_FILE, pa.table(columns, schema=KEYS_SCHEMA))
    for shard in number_rows(plan.shards):
        withdraw_receipt(store, "score", shard.id)  # of a question before
        high = raised if shard.role == "audit" else 0
        file_scores(store, shard, lambda document, high=high: 6.0 * (document.row < high), column)
    (summary,) = select_all(config, read_scored(store, plan.shards), None, each)
    return summary


def many(template: str) -> list[str]:
    return [template.format(i) for i in range(30)]


def article(seed: int, words: int = 160) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words).tolist())


def test_a_copy_with_changes_is_found_in_another_role(tmp_path: Path) -> None:
    for copy, share in (
        (article(7).upper(), 1.0),
        (f"Correction: {article(7)}", 156 / 157),
        (f"{article(7)} Read more on our site.", 156 / 162),
        (article(7).replace(article(7).split()[30], "amended", 1), 151 / 161),
    ):
        audit, known = list(map(article, range(30))), [*map(article, range(100, 130)), copy]
        error = user_error(select, tmp_path, audit, known)
        assert "1 of 31 unseen documents are near-duplicates of audit documents " in error
        assert " 1 audit docu" in error
        summary = select(tmp_path, audit, known, overlap="drop")
        shared = summary.diagnostics.overlap
        assert (shared.outcome, shared.n_calibration, shared.n_audit) == ("passed", 1, 1)
        assert shared.n_equal == (share == 1)
        assert [(pair.audit, pair.calibration) for pair in shared.pairs] == [("audit-7", "unseen-30")]
        assert shared.pairs[0].share == pytest.approx(share, abs=4 * 0.035)
        assert "audit-7 and unseen-30, " in shared.sentence
        assert summary.n_calibration == 30


def test_a_licence_a_dateline_or_a_title_makes_no_copies(tmp_path: Path) -> None:
    for header in (HEADER, "LONDON, 3 May 2024 (Reuters) - the prime minister said {}", LIST):
        audit, known = ([header.format(article(i)) for i in range(at, at + 30)] for at in (0, 100))
        for question in ({}, {"direction": "clean"}):
            summary = select(tmp_path, audit, known, known[:10], **question)
            assert summary.diagnostics.overlap.n_calibration == 0
            near = summary.diagnostics.near_copies
            assert (near.outcome, near.audit.n_copies, near.calibration.n_copies) == ("passed", 0, 0)
            assert summary.n_calibration == 20, "all that was not trained on"


def test_short_texts_are_copies_only_if_equal_and_no_adapter_judges_its_own_training(tmp_path: Path) -> None:
    audit, known = [*many("audited {} alone"), "One  TEXT here"], many("known {} alone")
    select(tmp_path, audit, [*known, "one text there"])
    error = user_error(select, tmp_path, audit, [*known, "one text here"])
    assert "1 of 31 unseen documents are near-duplicates " in error
    assert "(1 of them with the same text" in error
    for direction in ("members", "clean"):
        error = user_error(select, tmp_path, audit, known, audit[3:4], direction=direction)
        assert "the adapters were trained on 1 audit documents and cannot judge these" in error


def test_an_adapter_trained_on_a_near_duplicate_judges_where_it_can_only_cost_power(tmp_path: Path) -> None:
    edition = "{} " + article(1)
    audit = [*map(article, range(10, 40)), edition.format("first")]
    known = [*map(article, range(100, 130)), f"{article(2)} one", f"{article(2)} two"]
    trained = [edition.format("second"), f"{article(2)} one"]
    summary = select(tmp_path, audit, known, trained)
    assert summary.n_calibration == 30, "the other edition may have been learnt too"
    assert "1 audited documents are near-duplicates of one" in summary.diagnostics.fine_tuned.sentence
    error = user_error(select, tmp_path, audit, known, trained, direction="clean")
    assert "trained on near-duplicates of 1 audit documents, which selection a could" in error


def editions(first: int, count: int, copies: int) -> list[str]:
    """Articles in so many editions each, one word apart."""
    return [f"{edition} {article(seed)}" for seed in range(first, first + count) for edition in WORDS[:copies]]


def test_near_duplicates_within_a_role_are_counted_and_listed(tmp_path: Path) -> None:
    audit = [*map(article, range(20)), *editions(50, 2, 3), article(60), article(60)]
    summary = select(tmp_path, audit, list(map(article, range(100, 140))))
    near = summary.diagnostics.near_copies
    assert (near.outcome, near.audit.n_documents, near.audit.n_copies) == ("inconclusive", 28, 8)
    assert (near.audit.n_families, near.audit.largest, near.audit.n_distinct) == (3, 3, 23)
    assert near.audit.effective == pytest.approx(28**2 / (20 + 2 * 9 + 4), abs=0.05)
    assert [(family.size, family.ids) for family in near.audit.families] == [
        (3, ["audit-20", "audit-21", "audit-22"]),
        (3, ["audit-23", "audit-24", "audit-25"]),
        (2, ["audit-26", "audit-27"]),
    ]
    assert "8 of 28 audited documents are near-duplicates of others among them (3 families, the largest of 3)" in (
        near.sentence
    )
    listed = Store(str(tmp_path / "run")).read_table("diagnostics/near-copies-audit.parquet").to_pylist()
    assert [(row["doc_id"], row["row"], row["family"]) for row in listed] == [
        (f"audit-{place}", place, (place - 20) // 3) for place in range(20, 28)
    ]
    assert not Store(str(tmp_path / "run")).exists("diagnostics/near-copies-unseen.parquet")
    assert near.sentence not in summary.reasons


@pytest.mark.slow
@pytest.mark.parametrize("procedure", ["ptdi", "bky", "quantile", "right_boundary", "kernel"])
def test_few_families_take_an_adaptive_guarantee_and_not_that_of_bh_and_storey(tmp_path: Path, procedure: str) -> None:
    audit, known = editions(0, 8, 10), list(map(article, range(100, 200)))
    adaptive = select(tmp_path, audit, known, raised=40, procedure=procedure)
    assert adaptive.conclusion == "contradicted"
    near = adaptive.diagnostics.near_copies
    assert (near.outcome, near.bh_stands) == ("failed", True)
    (reason,) = (reason for reason in adaptive.reasons if reason == near.sentence)
    assert f"count as about 8 independent documents, too few for {procedure}" in reason
    plain, storey = (select(tmp_path, audit, known, raised=40, procedure=name) for name in ("bh", "storey"))
    assert plain.n_selected >= 40
    assert (near.n_selected_by_bh, near.n_selected_by_storey) == (plain.n_selected, storey.n_selected)
    assert (
        "The guarantees of bh and storey hold with near-duplicates among the audited documents; bh selects "
        f"{plain.n_selected}, storey {storey.n_selected}." in reason
    )
    for others, asked in (([], "bh"), ([], "storey"), (list(map(article, range(500, 1500))), procedure)):
        near = select(tmp_path, [*audit, *others], known, procedure=asked).diagnostics.near_copies
        assert (near.outcome, near.audit.n_families) == ("inconclusive", 8)
    assert adaptive.diagnostics.families.outcome != "failed"
    void = select(tmp_path, editions(0, 4, 20), known, raised=40, procedure=procedure).diagnostics
    assert (void.near_copies.outcome, void.families.outcome) == ("failed", "failed")
    assert " hold with " not in void.near_copies.sentence, "another check contradicts bh too"


@pytest.mark.parametrize("calibrating", [False, True])
def test_no_bound_is_stated_where_near_duplicates_are_audited_or_calibrate(tmp_path: Path, calibrating: bool) -> None:
    """A family that calibrates moves all ranks together: "at least N" was above zero in 28% of empty collections."""
    audit, known = list(map(article, range(80))), list(map(article, range(100, 200)))
    few, many = ([*known, *editions(300, 1, copies)] for copies in (2, 8))
    assert select(tmp_path, audit, few, raised=40, procedure="bh").bound is not None
    texts = (audit, many) if calibrating else (editions(0, 8, 10), known)
    alike = select(tmp_path, *texts, raised=40, procedure="bh")
    assert alike.bound is None
    assert not calibrating or alike.bound_withheld == GROUPED
    assert not calibrating or alike.conclusion != "contradicted"
    assert "A bound assumes independent documents, so none is stated." in alike.diagnostics.near_copies.sentence
    assert select(tmp_path, *texts, raised=40, procedure="bound").conclusion == "contradicted"


def test_near_duplicates_that_calibrate_take_the_guarantee_of_every_procedure(tmp_path: Path) -> None:
    audit = list(map(article, range(30)))
    for copies, outcome in ((1, "passed"), (2, "failed")):
        summary = select(tmp_path, audit, [*map(article, range(100, 140)), *editions(200, 10, copies)])
        near = summary.diagnostics.near_copies
        assert near.outcome == outcome
        assert near.bh_stands == (outcome == "passed")
    assert near.sentence in summary.reasons
    assert "They rank as 50 distinct documents" in near.sentence
    assert "so the p-values of every procedure can be too small by a factor of up to 1.20" in near.sentence


def test_the_order_in_which_shards_are_read_changes_nothing(tmp_path: Path) -> None:
    def backwards(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
        return iter(list(map(function, receipts))[::-1])

    audit, known = editions(0, 8, 4), [*editions(100, 20, 2), *(f"so {text}" for text in editions(0, 2, 3))]
    one = select(tmp_path / "one", audit, known, overlap="drop")
    other = select(tmp_path / "other", audit, known, overlap="drop", each=backwards)
    assert one.diagnostics.near_copies == other.diagnostics.near_copies
    assert one.diagnostics.overlap == other.diagnostics.overlap
    assert len(one.diagnostics.overlap.pairs) == 3


def test_of_too_many_documents_a_sample_is_compared_that_keeps_families_together(tmp_path: Path) -> None:
    audit = [*map(article, range(100)), *(article(seed) for seed in range(200, 240) for _ in range(5))]
    select(tmp_path, audit, list(map(article, range(300, 330))))
    store = Store(str(tmp_path / "run"))
    corpus = {role: {"path": str(tmp_path / f"{role}.jsonl")} for role in ("audit", "unseen")}
    described = {"run": store.url, "model": {"path": "m"}, "corpus": corpus, "resources": {"shard_bytes": 30_000}}
    scored = read_scored(store, make_plan(build_config(described)).shards)
    some = read_sketches(scored, "audit", each, most=150).find_near_duplicates(0.8).record
    assert not some.whole
    assert 90 < some.n_documents < 210, "half of 300: families of five, so within 4 standard errors"
    assert some.largest == 5
    assert some.n_copies == 5 * some.n_families, "no family is torn"
    assert read_sketches(scored, "audit", each).find_near_duplicates(0.8).record.n_copies == 200
