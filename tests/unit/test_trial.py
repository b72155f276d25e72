"""Splits, measures and tables of a trial, on scores and documents that the test makes up."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve
from test_report import Page

from pipeline.answers.detection import RATES, DetectorScores, detection, roc
from pipeline.config.models import ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.near_duplicates import draw_families
from pipeline.errors import UserError
from pipeline.report.tables import as_text, labels, page_table, readable
from pipeline.selection.bounds import Bound
from pipeline.selection.conformal import RankCounts
from pipeline.selection.procedures.record import decide
from pipeline.trial.config import SplitConfig, build_trial
from pipeline.trial.ranking import ranking_rows, read_results
from pipeline.trial.repeats import Pool, mean_interval, measure, repeats
from pipeline.trial.splits import Drawable, choose_trained, draw_split
from pipeline.trial.table import audit_row, audit_table, selection_rows, selection_table, to_arrow
from pipeline.trial.trial_documents import read_documents
from pipeline.trial.trial_page import selection_figures, trial_page
from pipeline.trial.trial_text import verification
from tests.helpers.commands import user_error
from tests.helpers.report_run import SCRIPT, summary_of
from tests.helpers.trials import facts_of, measured, pool, swept_rows, trial


@settings(max_examples=100, deadline=None)
@given(family=st.lists(st.integers(0, 6), min_size=1, max_size=40), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_a_drawn_part_holds_whole_families_and_never_more_than_asked(
    family: list[int], share: float, seed: int
) -> None:
    numbers = np.unique(family, return_inverse=True)[1]
    everything = np.ones(len(family), dtype=bool)
    count = int(share * len(family))
    chosen = draw_families(everything, numbers, count, np.random.default_rng(seed))
    assert chosen.sum() <= count
    assert not set(numbers[chosen]) & set(numbers[~chosen])
    if count - chosen.sum() > 0:  # what was passed over did not fit
        left = [size for f, size in zip(*np.unique(numbers[~chosen], return_counts=True), strict=True)]
        assert min(left) > count - chosen.sum()


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.2, 0.8),
    noise=st.sampled_from([0.0, 0.1, 0.3]),
    member_share=st.sampled_from([None, 0.1, 0.5, 1.0, 0.0]),
    audited=st.sampled_from([1.0, 0.5, 20]),
    repeat=st.integers(0, 50),
)
def test_no_document_has_two_roles_and_noise_is_as_asked(
    share: float, noise: float, member_share: float | None, audited: float, repeat: int
) -> None:
    known = {"unseen": 60, "seen": 30}
    trained = choose_trained(np.arange(400), share, known, seed=3)
    assert trained.sum() == 30 + round(share * 310)
    config = SplitConfig(label_noise=noise, member_share=member_share, audited=audited)
    drawn = draw_split(Drawable(trained, np.arange(400)), known, config, seed=1, model=0, repeat=repeat)
    together = np.concatenate([drawn.audit, drawn.unseen, drawn.seen])
    assert np.unique(together).size == together.size
    assert (drawn.unseen.size, drawn.seen.size) == (60, 30)
    assert trained[drawn.unseen].sum() == round(noise * 60)
    assert (~trained[drawn.seen]).sum() == round(noise * 30)
    if member_share is not None:
        assert trained[drawn.audit].sum() == round(member_share * drawn.audit.size)
    if audited == 20:
        assert drawn.audit.size == 20


def test_a_trial_reads_no_more_of_a_document_than_its_limits_allow(tmp_path: Any) -> None:
    (tmp_path / "documents.jsonl").write_text('{"text": "a short text"}\n{"text": "%s"}\n' % ("long " * 100))
    described = trial(documents={"path": str(tmp_path / "documents.jsonl")})
    whole, _ = build_trial(described)
    limited, _ = build_trial({**described, "limits": {"document_bytes": 100}})
    assert read_documents(whole).left_out == {}
    assert read_documents(limited).left_out == {"too_large": 1}
    assert len(read_documents(limited)) == 1


def test_a_text_without_blanks_is_no_text_of_one_word(tmp_path: Any) -> None:
    texts = ["一个没有空格的短文", "字", "word", "ไม่มีช่องว่าง"]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    read = read_documents(build_trial(trial(documents={"path": str(tmp_path / "documents.jsonl")}))[0])
    assert (read.texts, read.left_out) == ([texts[0], texts[3]], {"too_short": 2})


@pytest.mark.parametrize(
    ("family", "known", "line"),
    [
        (np.repeat(0, 6), {"unseen": 2}, "contaminate.share takes 2 documents and can have none: near-duplicates"),
        (np.repeat([0, 1], [4, 2]), {"unseen": 1}, r"split\.unseen takes 1 documents and can have none.* at least 4"),
        (np.arange(30), {"unseen": 0.01}, r"split\.unseen 0\.01 of 30 documents is none; give a larger share"),
    ],
)
def test_a_part_that_would_be_empty_is_one_line_in_the_words_of_the_trial(
    family: np.ndarray, known: dict[Any, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        draw_split(Drawable(choose_trained(family, 0.5, known, 0), family), known, SplitConfig(), 0, 0, 0)


def test_too_few_documents_say_how_many_are_needed() -> None:
    with pytest.raises(UserError, match=r"50 documents are too few .* needs at least 61"):
        choose_trained(np.arange(50), 0.5, {"unseen": 40, "seen": 20}, seed=0)
    trained = np.arange(100) < 50
    with pytest.raises(UserError, match=r"split.unseen needs 60 untrained documents .*, got 50"):
        draw_split(Drawable(trained, np.arange(100)), {"unseen": 60}, SplitConfig(), 0, 0, 0)
    config = SplitConfig(audited=90, member_share=0.5)
    with pytest.raises(UserError, match=r"split.audited 90 at split.member_share 0.5 needs 45 untrained .*, got 40"):
        draw_split(Drawable(trained, np.arange(100)), {"unseen": 10}, config, 0, 0, 0)


def test_a_sweep_is_a_grid_and_a_star_reaches_every_selection() -> None:
    two = [{"name": name, "detectors": [name]} for name in ("loss", "min_k")]
    config, points = build_trial(
        trial(selections=two, sweep={"selections.*.alpha": [0.05, 0.1], "split.label_noise": [0, 0.1, 0.2]})
    )
    assert [tuple(point.settings.values()) for point in points][:2] == [(0.05, 0), (0.05, 0.1)]
    assert len(points) == 6
    assert [selection.alpha for selection in points[-1].config.selections] == [0.1, 0.1]
    assert config.selections[0].alpha == 0.1
    assert points[-1].config.split.label_noise == 0.2
    assert build_trial(trial())[1][0].settings == {}


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"sweep": {"selections.0.alfa": [0.1]}}, "sweep selections.0.alfa=0.1: unknown key 'selections.0.alfa'"),
        (
            {"sweep": {"selections.1.alpha": [0.1]}},
            "sweep selections.1.alpha: selections is a list and has no entry '1'; its only entry is 0",
        ),
        ({"sweep": {"selections.0.alpha": [2]}}, "sweep selections.0.alpha=2: selections.0.alpha: must be in (0, 1)"),
        ({"sweep": {"run": ["a", "b"]}}, "sweep run: a sweep cannot change run"),
        ({"sweep": {"repeats": []}}, "sweep.repeats"),
        ({"contaminate": {"share": 1.5}}, "contaminate.share: input should be less than or equal to 1, got 1.5"),
        ({"contaminate": {"epoch": 1}}, "unknown key 'contaminate.epoch'; did you mean 'epochs'"),
        ({"split": {"unseen": -1}}, "split.unseen"),
        ({"selections": []}, "selections"),
        ({"selections": [{"name": "a", "detectors": ["los"]}]}, "detector 'los' is not scored"),
        ({"split": {"unseen": 0}}, "calibrated on corpus.unseen, which is not given; set split.unseen above 0"),
        ({"model": {"path": "a", "adapter": "b"}}, "model.adapter must be null"),
    ],
)
def test_a_bad_trial_is_one_line(changed: dict[str, Any], part: str) -> None:
    assert part in user_error(build_trial, trial(**changed))


@pytest.mark.parametrize(
    ("draw_values", "mean"),
    [
        (lambda rng, n: (rng.random(n) < 0.02).astype(float), 0.02),
        (lambda rng, n: np.clip(rng.normal(0.1, 0.03, n), 0, 0.2), 0.1),
        (lambda rng, n: rng.random(n), 0.5),
    ],
)
@pytest.mark.parametrize("n", [10, 100])
def test_the_interval_of_a_mean_covers_it(draw_values: Any, mean: float, n: int) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        low, high = mean_interval(draw_values(rng, n))
        covered += low <= mean <= high
    # at least 95%; 4 standard errors of a share of .95 in 300
    assert covered / 300 >= 0.95 - 4 * np.sqrt(0.95 * 0.05 / 300)


def test_an_interval_is_never_more_certain_than_the_repeats_allow() -> None:
    assert mean_interval(np.zeros(20))[0] == 0
    assert 0.1 < mean_interval(np.zeros(20))[1] < 0.5
    low, high = mean_interval(np.full(200, 0.9) + np.random.default_rng(0).normal(0, 0.01, 200))
    assert low > 0.86
    assert high < 0.94
    assert mean_interval(np.empty(0)) == (0.0, 1.0)
    for seed in range(50):  # of values that drift too it holds their own mean
        rng = np.random.default_rng(seed)
        values = np.clip(np.concatenate([rng.normal(0.47, 0.12, 60), rng.normal(0.35, 0.12, 40)]), 0, 1)
        low, high = mean_interval(values)
        assert low <= values.mean() <= high


@settings(max_examples=50, deadline=None)
@given(
    trained=st.lists(st.integers(-5, 5), min_size=1, max_size=60),
    untrained=st.lists(st.integers(-5, 5), min_size=1, max_size=60),
)
def test_auc_and_tpr_equal_scikit_learns_with_ties_too(trained: list[int], untrained: list[int]) -> None:
    one, other = np.array(trained, dtype=float), np.array(untrained, dtype=float)
    found = detection([DetectorScores(one, other)])
    labels, scores = np.repeat([1, 0], [one.size, other.size]), np.concatenate([one, other])
    assert found.auc.value == pytest.approx(roc_auc_score(labels, scores))
    fpr, tpr, _ = roc_curve(labels, scores, drop_intermediate=False)
    for rate in RATES:
        assert found.tpr[rate].value == pytest.approx(tpr[fpr <= rate + 1e-9].max())
    ours = roc(one, other)
    assert np.allclose(ours[0], fpr)
    assert np.allclose(ours[1], tpr)


@pytest.mark.parametrize(("value", "high_score"), [(1.0, 1.0), (0.0, -1.0)])
def test_a_perfect_figure_is_not_reported_as_certain(value: float, high_score: float) -> None:
    sample = DetectorScores(np.full(20, high_score), np.zeros(500))
    found = detection([sample])
    # Hoeffding for 20 of 20 disjoint pairs; Clopper & Pearson for 20 of 20 trained documents, at a quarter of the error
    for estimate, tail in ((found.auc, 0.025), *((found.tpr[rate], 0.0125) for rate in RATES)):
        assert estimate.value == value
        ends = (tail ** (1 / 20), 1.0) if value else (0.0, 1 - tail ** (1 / 20))
        assert (estimate.low, estimate.high) == pytest.approx(ends)
    again = detection([sample, DetectorScores(np.full(25, high_score), np.zeros(600))])
    assert again.auc.low == pytest.approx(found.auc.low)  # two models may share all documents


def test_one_misordered_pair_is_no_more_certain_than_none_and_needs_members() -> None:
    trained = np.arange(100.0) + 99.5
    perfect, nearly = (detection([DetectorScores(trained, other)]).auc for other in (np.arange(99.0), np.arange(101.0)))
    assert (perfect.value, nearly.value) == (1.0, pytest.approx(1 - 1 / 10_100))
    assert nearly.low <= 0.025 ** (1 / 100)
    none = detection([DetectorScores(np.empty(0), np.arange(5.0))])
    assert {none.auc.value, *(estimate.value for estimate in none.tpr.values())} == {None}


def test_a_quarantined_document_counts_as_audited_and_is_never_selected() -> None:
    found = pool()
    scored = found.scored.copy()
    scored[:60] = False
    hurt = Pool(found.ids, found.family, found.trained, scored, found.scores)
    config, _ = build_trial(trial(repeats=5))
    for repeat in repeats(hurt, config, 0):
        assert repeat.quarantined > 0
        assert repeat.verdicts[0].answer.m == repeat.split.audit.size
        assert repeat.audited.size == repeat.split.audit.size - repeat.quarantined
        assert scored[repeat.audited].all()


@pytest.mark.parametrize(("share", "undefined"), [(0.0, "power"), (1.0, "fdr")])
def test_at_a_share_of_0_or_1_a_figure_is_not_defined(share: float, undefined: str) -> None:
    config, _ = build_trial(trial(repeats=10, split={"member_share": share}))
    rows = selection_rows({}, config.selections, measure(pool(), config, 0))
    assert rows[0][undefined] is None
    assert rows[0][{"power": "fdr", "fdr": "power"}[undefined]] is not None
    assert "not defined" in as_text([selection_table(rows, [])])
    to_arrow(rows)


def test_both_directions_count_what_they_seek() -> None:
    asked = [
        {"name": "members", "detectors": ["loss"], "alpha": 0.2},
        {"name": "clean", "direction": "clean", "detectors": ["loss"], "alpha": 0.2},
    ]
    config, _ = build_trial(trial(repeats=20, selections=asked, split={"unseen": 60, "seen": 60}))
    rows = selection_rows({}, config.selections, measure(pool(600, share=0.5), config, 0))
    assert [row["direction"] for row in rows] == ["members", "clean"]
    assert all(row["power"] > 0.4 and row["contradicted"] is False for row in rows)
    assert rows[0]["null_share"] + rows[1]["null_share"] == pytest.approx(1)
    assert rows[0]["null_estimate"] is None, "bh estimates nothing"


def test_an_audit_is_held_against_the_truth() -> None:
    selection = SelectionConfig(name="a", direction="clean", detectors=["loss"])
    counts = RankCounts.of(np.ones(5, dtype=np.int64), 9)
    summary = summary_of(selection, counts, decide("bh", counts, selection.exact_alpha))
    audited, truth = ["u", "v", "x", "y", "z"], {"u", "z"}
    row = audit_row(summary, ["x", "y", "z"], audited, truth)
    assert (row["selected"], row["true"], row["wrong_at_most"]) == (3, 2, None)
    assert row["share_false"] == pytest.approx(1 / 3)
    assert row["power"] == pytest.approx(2 / 3)
    bounded = audit_row(summary.model_copy(update={"bound": Bound(0.95, 4, 26, 27, 9)}), ["x"], audited, truth)
    assert (bounded["wrong_at_most"], bounded["sought_at_least"], bounded["sought"]) == (4, 27, 3)
    assert "27 of 3 " in as_text([audit_table([{"audit": "a", **bounded}])])
    empty = audit_row(summary, [], audited, truth)
    assert empty["share_false"] is None, "an empty selection has no share of false ones, and 0.000 would praise it"
    assert empty["power"] == 0
    assert as_text([audit_table([{"audit": "k", **empty}])]).count("not defined") == 1


def test_settings_are_shown_as_short_as_they_can_be_told_apart() -> None:
    assert labels(["selections.*.alpha", "split.unseen"]) == ["alpha", "split.unseen"]
    both = ["selections.0.alpha", "selections.1.alpha"]
    assert labels(both) == both
    rows = [{"model.path": f"work/family/{name}", "alpha": 0.05} for name in ("small", "large", "large")]
    assert [row["model.path"] for row in readable(rows, ["model.path"])] == ["small", "large", "large"]
    assert readable(rows, ["alpha"])[0] == {"model.path": "work/family/small", "alpha": "0.05"}
    assert readable(rows[:1], ["model.path"])[0]["model.path"] == "work/family/small"
    mixed = [{"model.path": path} for path in ("/work/small", "org/large", None)]
    assert [row["model.path"] for row in readable(mixed, ["model.path"])] == ["/work/small", "org/large", "None"]


def test_a_table_says_the_settings_of_a_point_once() -> None:
    two = [{"name": name, "detectors": [name]} for name in ("loss", "min_k")]
    _, points = build_trial(trial(repeats=2, selections=two, sweep={"selections.*.alpha": [0.125, 0.25]}))
    lines = as_text([selection_table(measured(points), ["selections.*.alpha"])]).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["0.125", "│", "0.25", "│"]
    assert sum(line.startswith("├") for line in lines) == 1


def test_every_kind_of_sweep_is_drawn() -> None:
    swept = {"selections.0.alpha": [0.05, 0.2], "selections.0.procedure": ["bh", "storey"]}
    rows = measured(build_trial(trial(repeats=5, sweep=swept))[1])
    for settings_ in (list(swept), list(swept)[::-1], []):
        fdr, power = selection_figures(rows, settings_)
        assert f"{rows[0]['fdr']:.3f} [{rows[0]['fdr_low']:.3f}, {rows[0]['fdr_high']:.3f}] (target 0.05)" in fdr.alt
        assert f"{rows[0]['power']:.3f} [{rows[0]['power_low']:.3f}" in power.alt
        assert b"<svg " in fdr.svg
        assert b"<svg " in power.svg


def test_the_verdict_of_a_trial_claims_no_more_than_its_repeats_show() -> None:
    _, rows, paths = swept_rows()
    kept = verification(rows, paths, 1)
    assert kept.headline == "All 2 selections are consistent with their target, each at each point of the sweep."
    assert kept.contradicted == []
    assert "20 random splits of these documents, given the scores of 1 contaminated model" in kept.extent
    unverified = " ".join(kept.unverified)
    assert "calibration documents of an audit resemble its audited ones" in unverified
    assert "Repeats can refute a guarantee, not prove it" in unverified
    assert "without a finite-sample guarantee" not in unverified
    assert "alike by construction" in unverified
    shifted = " ".join(verification(rows, paths, 1, shifted=True).unverified)
    assert "alike by construction" not in shifted
    assert "they were made to differ" in shifted
    for row in rows:
        row.update(fdr=None, fdr_low=None, fdr_high=None, contradicted=None)
    assert verification(rows, paths, 1).headline.startswith("Nothing: no audited document was of the kind")
    rows[0].update(fdr=0.0, fdr_low=0.0, fdr_high=0.1, contradicted=False)
    assert verification(rows, paths, 1).headline == (
        "The selection is consistent with its target, each at each point of the sweep. "
        "For 1 more the share of wrong documents is not defined."
    )


def test_a_contradicted_target_is_named_with_its_settings_and_figures() -> None:
    _, rows, paths = swept_rows(procedure="ptdi")
    rows[1].update(fdr=0.45, fdr_low=0.4, fdr_high=0.5, contradicted=True)
    broken = verification(rows, paths, 1)
    assert broken.headline.startswith("1 of 2 selections is consistent with its target, each at each")
    assert broken.headline.endswith(" 1 contradicts its target.")
    (sentence,) = broken.contradicted
    assert "Selection members (ptdi, alpha 0.2)" in sentence
    assert "was 0.450 [0.400, 0.500] on average, and its target is 0.2" in sentence
    assert "without a finite-sample guarantee" in " ".join(broken.unverified)


def test_the_page_of_a_trial_holds_its_tables_and_figures_and_loads_and_runs_nothing() -> None:
    config, rows, paths = swept_rows()
    config = config.model_copy(update={"model": ModelConfig(path=f"models/{SCRIPT}")})
    images = selection_figures(rows, paths)
    tables = [selection_table(rows, paths)]
    report = f"runs/{SCRIPT}/report.html"
    source = trial_page(config, facts_of(rows, config), paths, tables, images, [report])
    page = Page(source)
    assert page.text.count(SCRIPT) >= 3
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "link", "form", "base"}
    assert all(attrs["src"].startswith("data:image/svg+xml;base64,") for tag, attrs in page.tags if tag == "img")
    assert all(str(attrs["href"]).startswith("#") for _, attrs in page.tags if "href" in attrs)
    assert all(image.image in source for image in images)
    assert "default-src 'none'" in source
    cells = {cell for row in page_table(tables[0]).rows for cell in row}
    assert f"{rows[0]['fdr']:.3f} [{rows[0]['fdr_low']:.3f}, {rows[0]['fdr_high']:.3f}]" in cells
    assert all(cell in page.text for cell in cells)
    assert "What was verified, and what was not" in page.text
    assert "too short 2" in page.text


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([{"model": "a", "item": "d0", "right": 1}], "no column 'correct'"),
        ([{"model": "a", "item": "d0", "correct": 1.0}], "at least 2 models"),
        ([{"model": m, "item": "dd", "correct": 1.0} for m in "ab"], "item 'dd' in"),
        ([{"model": m, "item": "d0", "correct": 2.0} for m in "ab"], "got 2.0"),
        ([{"model": m, "item": "d0", "correct": 1.0} for m in "aab"], "two results"),
    ],
)
def test_bad_results_are_one_line(tmp_path: Any, rows: list[dict[str, Any]], part: str) -> None:
    path = tmp_path / "results.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert part in user_error(read_results, str(path), ["d0", "d1"])
    with pytest.raises(UserError, match="cannot read results"):
        read_results(str(tmp_path / "none.parquet"), ["d0"])


def test_a_ranking_without_results_or_clean_selection_is_refused(tmp_path: Any) -> None:
    found = pool(60)
    rows = [{"model": model, "item": item, "correct": True} for model in ("m0", "m1") for item in found.ids]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "results.parquet")
    results = read_results(str(tmp_path / "results.parquet"), found.ids)
    config, _ = build_trial(trial(repeats=1))
    with pytest.raises(UserError, match="direction clean"):
        ranking_rows({}, config, [found], results)
    results.correct[1, :] = np.nan
    asked = [{"name": "clean", "direction": "clean", "detectors": ["loss"], "alpha": 0.2}]
    config, _ = build_trial(trial(repeats=1, selections=asked))
    with pytest.raises(UserError, match="model 'm1' has no result for"):
        ranking_rows({}, config, [found], results)
