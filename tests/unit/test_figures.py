"""Claims about the figures of a selection: what they say in words, what they are made of, and how small they are."""

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from pipeline.answers.selected import MOST_GROUPS, AlphaCurve, GroupCounts, GroupTally, alpha_curve
from pipeline.config.selection import SelectionConfig
from pipeline.report.evaluation_page import roc_figures
from pipeline.report.facts import RankHistogram, SelectionFacts, read_facts
from pipeline.report.figures import draw_figures
from pipeline.report.templates import LONGEST_LABEL, FigureImage, draw, label
from pipeline.selection.bounds import Bound
from pipeline.selection.engine import answer
from pipeline.selection.folds import EMPTY, Answer, RoleScores, SelectionInput, run_queries
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.schedule import Level
from tests.helpers.report_run import SCRIPT, amend, build_run

MOST_BYTES = 60_000


def known_scores(count: int, seed: int) -> RoleScores:
    generator = np.random.default_rng(seed)
    return RoleScores(generator.normal(size=(count, 1)), None, generator.integers(0, 2**60, size=count))


def decided(selection: SelectionConfig, audited: RoleScores, known: RoleScores) -> Answer:
    query = answer(SelectionInput(selection, Level.of(selection, None), 0, known, EMPTY, 2))
    (one,) = run_queries([query], lambda folds: {index: fold.of_shard(audited) for index, fold in folds})
    return one


def audited_scores(count: int = 400) -> RoleScores:
    batch = known_scores(count, 1)
    return replace(batch, matrix=batch.matrix + 3.0 * (np.arange(count) < count // 2)[:, None])


@pytest.fixture(scope="module")
def selection(tmp_path_factory: pytest.TempPathFactory) -> SelectionFacts:
    (facts,) = read_facts(build_run(tmp_path_factory.mktemp("figures"))).selections
    curve = AlphaCurve(alphas=[0.05, 0.1, 0.2], n_selected=[90, 120, 150], right_at_least=[80, 95, 90], confidence=0.95)
    groups = GroupCounts(
        n_scored={SCRIPT: 60, "news": 40, "日本語": 30}, n_selected={SCRIPT: 7, "news": 31, "日本語": 0}
    )
    bound = Bound(0.95, 25, 95, 95, 30)
    changes = {"weights": [0.75, 0.25], "detectors": ["loss", "min_k(k=0.1)"], "bound": bound}
    summary = facts.summary.model_copy(update=changes)
    return replace(facts, alphas=curve, groups=groups, summary=summary)


@pytest.fixture(scope="module")
def figures(selection: SelectionFacts) -> dict[str, FigureImage]:
    return {figure.file.removeprefix("members-").removesuffix(".svg"): figure for figure in draw_figures(selection)}


def test_every_figure_says_in_words_what_it_shows_with_its_numbers(
    figures: dict[str, FigureImage], selection: SelectionFacts
) -> None:
    summary = selection.summary
    assert list(figures) == ["scores", "p-values", "quantiles", "alphas", "groups", "weights"]
    drawn = sum(selection.scores.roles["audit"])  # of 236 with scores, all but those of two that are beyond its edges
    assert drawn >= 234
    medians = rf"medians are about \S+ for {drawn} audited and \S+ for 100 known unseen documents"
    assert re.search(medians, figures["scores"].alt)
    assert "Histogram of 240 p-values" in figures["p-values"].alt
    below = int(selection.ranks.count[selection.ranks.rank <= round(101 * (summary.threshold or 0))].sum())
    assert f"{below:,} of 240 are at most the threshold {summary.threshold:.3g}" in figures["quantiles"].alt
    right = "120 at the requested 10%; with 95% confidence at least 95 of these are right, provided"
    assert right in figures["alphas"].alt
    assert "most in: news 31 of 40, " in figures["groups"].alt
    assert "loss 0.75, min_k(k=0.1) 0.25" in figures["weights"].alt
    for figure in figures.values():
        image = ElementTree.fromstring(f"{figure.image[:-1]}/>")
        kind, _, data = image.attrib["src"].partition(",")
        assert (image.tag, kind, set(image.attrib)) == ("img", "data:image/svg+xml;base64", {"src", "alt"})
        assert (image.get("alt"), base64.b64decode(data)) == (figure.alt, figure.svg)
        elements = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(figure.svg).iter()}
        assert not elements & {"script", "image"}, "it runs and loads nothing"


def test_a_figure_is_small_whatever_it_is_of_and_the_same_bytes_again(selection: SelectionFacts) -> None:
    n = 200_000
    count = np.random.default_rng(0).integers(1, 20, size=n + 1)
    summary = selection.summary.model_copy(update={"n_calibration": n, "threshold": 0.3})
    many = GroupCounts(
        n_scored={f"group {i}" * 20: 9 for i in range(900)}, n_selected={f"group {i}" * 20: i % 9 for i in range(900)}
    )
    large = replace(selection, summary=summary, ranks=RankHistogram(np.arange(1, n + 2), count), groups=many)
    drawn = draw_figures(large)
    assert max(len(figure.svg) for figure in drawn) < MOST_BYTES / 3
    assert "880 more groups are not drawn" in drawn[4].caption
    assert draw_figures(large) == drawn


def test_the_figures_of_ten_and_a_hundred_detectors_are_small_and_give_their_numbers() -> None:
    fpr = np.linspace(0, 1, 100_001)
    curves = {f"d{i}": (fpr, fpr**0.5) for i in range(10)}
    whole, small = roc_figures(curves, dict.fromkeys(curves, 2 / 3), ("seen", "unseen"))
    assert "d0 0.667" in whole.alt
    assert "TPR at 1% FPR: d0 0.100" in small.alt
    generator = np.random.default_rng(0)
    curve = tuple(np.concatenate([[0.0], np.sort(generator.random(50_000)), [1.0]]) for _ in range(2))
    curves = {f"detector {i}": (curve[0], curve[1]) for i in range(100)}
    drawn = roc_figures(curves, dict.fromkeys(curves, 0.5), ("seen", "unseen"))
    assert [figure.file for figure in drawn] == ["roc.svg", "roc-small.svg"]
    assert max(len(figure.svg) for figure in (whole, small, *drawn)) < MOST_BYTES
    assert "detector 11 0.500, and of 88 more" in drawn[0].alt
    assert "The 12 detectors with the largest AUC are drawn" in drawn[0].caption


def test_alphas_are_drawn_to_a_half_or_to_the_one_that_was_asked_for(selection: SelectionFacts) -> None:
    curve = AlphaCurve(alphas=[0.1, 0.5, 0.8, 0.9], n_selected=[1, 2, 3, 4], right_at_least=None, confidence=None)
    for alpha, last in ((0.1, "2 at 50%"), (0.8, "3 at 80%")):
        summary = selection.summary.model_copy(update={"alpha": alpha})
        drawn = draw_figures(replace(selection, alphas=curve, summary=summary))
        assert next(one for one in drawn if one.file == "members-alphas.svg").alt.endswith(f"; {last}.")


@pytest.mark.parametrize("change", [{"conclusion": ConclusionValue.CONTRADICTED}, {"bound": None}])
def test_a_bound_that_does_not_stand_is_not_drawn(selection: SelectionFacts, change: dict[str, object]) -> None:
    changed = replace(selection, summary=selection.summary.model_copy(update=change))
    figure = next(one for one in draw_figures(changed) if one.file == "members-alphas.svg")
    assert "confidence" not in figure.alt + figure.caption + figure.svg.decode()
    assert ("Nothing is guaranteed at any alpha" in figure.caption) == ("conclusion" in change)


def test_the_knockoff_filter_is_drawn_by_w(tmp_path: Path) -> None:
    store = build_run(tmp_path)
    amend(store, "members", procedure="ktd", details={"smallest_w_selected": 2.25}, n_selected=77, factor=None)
    (facts,) = read_facts(store).selections
    figure = draw_figures(facts)[0]
    assert figure.file == "members-w.svg"
    assert figure.alt.endswith("77 selected, from W = 2.25 on.")
    amend(store, "members", details={}, n_selected=0)
    (facts,) = read_facts(store).selections
    assert draw_figures(facts)[0].alt.endswith("none is selected.")


def test_names_that_a_user_chose_are_cut_hide_nothing_and_keep_their_numbers() -> None:
    assert len(label("x" * 500)) == LONGEST_LABEL
    assert label("a\u202eb\x00\n c") == "a⟨U+202E⟩b⟨U+0000⟩ c"
    text = "0.123456 'DejaVu Sans' d=\"M 1.23456 2\""
    figure = draw("file.svg", "title", "alt", "caption", lambda _, axes: axes.set_xlabel(label(text)))
    assert label(text) in [element.text for element in ElementTree.fromstring(figure.svg).iter()]


@pytest.mark.parametrize(
    ("procedure", "settings"),
    [
        *((name, {}) for name in ("bh", "by", "ebh", "storey", "bky", "ptdi", "quantile", "bound", "adadetect")),
        ("bh", {"calibration": "conditional"}),
    ],
)
def test_the_curve_says_what_asking_with_another_alpha_says(procedure: str, settings: dict[str, str]) -> None:
    known, audited = known_scores(199, 0), audited_scores()
    asked_for = SelectionConfig.model_validate(
        {"name": "s", "detectors": ["loss"], "procedure": procedure, "alpha": 0.123, **settings}
    )
    first = decided(asked_for, audited, known)
    count = int(first.judge(audited)[1].sum())
    curve = alpha_curve(asked_for, first, count, 2)
    assert curve is not None
    assert 0.123 in curve.alphas
    assert curve.n_selected[curve.alphas.index(0.123)] == count
    for alpha in (0.02, 0.1, 0.3, 0.5):
        other = decided(asked_for.model_copy(update={"alpha": alpha}), audited, known)
        at = curve.alphas.index(alpha)
        assert curve.n_selected[at] == int(other.judge(audited)[1].sum()), alpha
        if curve.right_at_least is not None:
            assert curve.right_at_least[at] == other.bound.right_at_least, alpha
    assert (curve.right_at_least is None) == (first.bound is None)


def test_without_a_curve_or_bound_no_claim_is_made() -> None:
    known, audited = known_scores(199, 0), audited_scores()
    for procedure in ("td4eval", "ktd", "storey"):
        config = SelectionConfig.model_validate({"name": "s", "detectors": ["loss"], "procedure": procedure})
        one = replace(decided(config, audited, known), bound=None)
        curve = alpha_curve(config, one, int(one.judge(audited)[1].sum()), 2)
        assert (curve is None) == (procedure != "storey")
    assert curve is not None
    assert (curve.right_at_least, curve.confidence) == (None, None)
    assert Fraction(repr(curve.alphas[0])) == Fraction(1, 100)


def tally(names: Sequence[str | None], selected: Sequence[bool] | None = None) -> GroupTally:
    chosen = np.zeros(len(names), dtype=bool) if selected is None else np.array(selected)
    return GroupTally.count(pa.chunked_array([pa.array(names, pa.string())]), chosen)


def test_groups_are_counted_the_same_in_any_order_and_however_the_shards_are_cut() -> None:
    rows = list(zip(["b", "a", None, "b", "a", "a"], [True, False, True, True, True, False], strict=True))
    one, two, three, whole = (tally(*zip(*some, strict=True)) for some in (rows[3:5], rows[:1], rows[1:3], rows))
    expected = GroupCounts(n_scored={"a": 3, "b": 2}, n_selected={"a": 1, "b": 2})
    assert whole.record() == (one + two + tally(*zip(*rows[5:], strict=True)) + three).record() == expected
    assert tally([None], [True]).record() is None


def test_more_groups_than_a_figure_could_show_are_not_held() -> None:
    names = [str(i) for i in range(MOST_GROUPS + 1)]
    assert tally(names).record() is None
    assert (tally(names[:-1]) + tally(names[5:15])).record() is not None
    assert (tally(names[:-1]) + tally(names[-1:])).record() is None
    assert (tally(names) + tally(names[:1])).record() is None
