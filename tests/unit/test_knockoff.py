"""Claims about the knockoff filter and its symmetry test that hold for every input."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import polygamma

from benchmarks.selection import run_folds
from pipeline.config.selection import SelectionConfig
from pipeline.detectors.base import Evidence
from pipeline.detectors.knockoff import compete, knockoff, knockoff_spread, simultaneous_draws, spread_column
from pipeline.detectors.registry import count_draws, parse_detectors
from pipeline.errors import UserError
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.knockoff import Scale, fewest, find_scale, find_threshold, is_selected, sign_symmetry
from pipeline.selection.procedures import check_settings
from pipeline.selection.thresholds import Threshold

FIFTH = Fraction(1, 5)
levels = st.fractions(Fraction(1, 20), Fraction(19, 20), max_denominator=20)


def value_at(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


# sizes: coarse (ties), at the edges of bins, zero, denormal as float32 and below it, beyond float32, anything
sizes = st.one_of(
    st.integers(0, 12).map(float),
    st.builds(lambda h, end: value_at(h << 16 | end), st.integers(0x3F70, 0x3F90), st.sampled_from([0, 1, 0xFFFF])),
    st.sampled_from([0.0, 1e-45, 1e-40, 1e-60, 5e-324, 1e39, 1e300, value_at(0x00800000)]),
    st.floats(0, 10),
)
# few negatives, so that the filter selects something in most examples
signed = st.builds(lambda size, sign: size * sign, sizes, st.sampled_from([1.0, 1.0, 1.0, 1.0, -1.0]))


def by_sorting(w: list[float], q: Fraction) -> Threshold:
    """The definition, for each t in turn, on W with |W| rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        v = [float(np.float32(x)) for x in w]
    for t in sorted({abs(x) for x in v if x != 0}):
        ahead = sum(x >= t for x in v)
        if Fraction(1 + sum(x <= -t for x in v), max(1, ahead)) <= q:
            return Threshold(t if ahead else None, ahead)
    return Threshold(None, 0)


@settings(max_examples=200)
@given(st.lists(signed, min_size=1, max_size=60), levels, st.sampled_from([1, 1, 1, 2, 4, 12]), st.integers(1, 4))
def test_the_filter_found_by_counting_equals_the_definition(
    w: list[float], q: Fraction, draws: int, shards: int
) -> None:
    """(1 / draws) (1 + #{W <= -t}) / max(1, #{W >= t}) <= q, and none of fewer than `fewest` documents."""
    values = np.array(w)
    found = run_folds(find_threshold(q * draws), lambda: (values[i::shards] for i in range(shards)))
    assert found == by_sorting(w, q * draws)
    chosen = is_selected(values, found)
    assert chosen.sum() == found.n_selected
    assert (values[chosen] > 0).all()
    least, sentence = fewest(q, len(w), draws)
    assert found.n_selected == 0 or found.n_selected >= least == math.ceil(1 / (draws * q))
    assert sentence.endswith(f"has {least:,} documents.") == (least <= len(w))
    assert [fewest(q, m, draws)[1].endswith("documents.") for m in (least, least - 1)] == [True, False]
    assert run_folds(find_threshold(q * draws), lambda: [np.ones(least)]).n_selected == least
    if least > 1:
        assert run_folds(find_threshold(q * draws), lambda: [np.ones(least - 1)]).n_selected == 0


def test_symmetric_signs_pass_skewed_ones_fail_and_a_handful_shows_nothing() -> None:
    rng = np.random.default_rng(2)
    fair = sign_symmetry(rng.normal(size=1000))
    assert fair.outcome == "inconclusive"
    assert "no contradiction" in fair.sentence
    w = rng.exponential(size=10_000) - rng.exponential(size=(10_000, 10)).mean(axis=1)
    skewed, signs = sign_symmetry(w), (w > 0)[np.argsort(np.abs(w))].reshape(10, 1_000).mean(axis=1)
    assert skewed.outcome == "failed"
    assert skewed.shares == tuple(signs)
    assert f"of the 10. of 10 groups by size of W, smallest first, {signs[-1]:.0%} are" in skewed.sentence
    assert signs[-1] == pytest.approx(0.874, abs=0.042)  # four standard errors of 1,000 documents
    assert "does not hold here" in skewed.sentence
    some = sign_symmetry(np.random.default_rng(3).permutation([1.0] * 27 + [-1.0] * 12))
    assert some.outcome == "inconclusive"
    assert "69% have a positive W (95% interval 52% to 83%)" in some.sentence
    few = sign_symmetry(np.array([1.0, -1.0, 0.0]))
    assert (few.p_value, few.n, few.shares) == (1.0, 2, ())
    assert "cannot be tested on 2 documents" in few.sentence


@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=8), st.integers(1, 3))
def test_a_text_competes_with_its_paraphrases_and_loses_ties(rows: list[list[int]], draws: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float64).T[: draws + 1]
    for row, w in zip(rows, compete(scores[0], scores[1:]).tolist(), strict=True):
        ranked = sorted(row[: draws + 1])
        size = ranked[-1] - float(np.median(ranked[:-1]))
        assert w == (size if row[0] > max(row[1 : draws + 1]) else -size)
        if draws == 1:
            assert w == row[0] - row[1]


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        ({}, None),
        ({"draws": 4}, None),
        ({"combine": "mean"}, None),
        ({"combine": "simultaneous"}, 10),
        ({"draws": 4, "combine": "simultaneous"}, 4),
        ({"base": "loss", "draws": 2, "combine": "simultaneous"}, 2),
        ({"base": {"min_k": {"k": 0.1}}, "combine": "simultaneous"}, 10),
    ],
)
def test_the_filter_reads_from_the_column_how_many_paraphrases_compete(settings: dict, draws: int | None) -> None:
    (detector,) = parse_detectors([{"knockoff": settings}] if settings else ["knockoff"])
    assert simultaneous_draws(detector.column) == draws
    assert (count_draws([detector]), count_draws([])) == (settings.get("draws", 10), 0)
    assert simultaneous_draws("loss") is None
    others = {name: value for name, value in settings.items() if name != "combine"}
    if draws is not None and draws > 2:
        (spread,) = parse_detectors([{"knockoff_spread": others}] if others else ["knockoff_spread"])
        assert spread_column(detector.column) == spread.column
        assert spread.needs == detector.needs
    elif draws is None:
        assert spread_column(detector.column) is None


def test_an_answer_of_simultaneous_knockoffs_says_on_what_it_rests() -> None:
    rng = np.random.default_rng(4)
    w = np.abs(rng.normal(size=400)) * np.where(rng.random(400) < 1 / 5, 1, -1)
    audit = np.concatenate([w[:150], rng.normal(4, 1, size=50)])
    column = "knockoff(base=loss, draws=4, combine=simultaneous)"
    scores = Scores({column: np.concatenate([w[200:], audit])}, np.arange(400))
    selection = SelectionConfig(name="a", detectors=[column], procedure="ktd", alpha=0.2)
    (verdict,) = answer_all([selection], scores, {"unseen": np.arange(200), "audit": np.arange(200, 400)}, 0, 0)
    answer = verdict.answer
    assert verdict.selected[150:].sum() > 40
    assert answer.guarantee == "heuristic"
    assert "higher than all 4 of its paraphrases with a probability of at most 1/5" in answer.assumption
    assert answer.resolution(200)[0] == 2
    assert answer.symmetry.outcome == "inconclusive"
    assert "the knockoff filter assumes 1 in 5" in answer.symmetry.sentence
    assert sign_symmetry(w[200:]).outcome == "failed", "a fifth is not half"


def test_the_spread_reads_all_scores_but_the_largest_whichever_is_the_texts() -> None:
    texts = [["a", "bbb", "cc", "d"], ["bbb", "a", "d", "cc"]]
    (length,) = parse_detectors(["zlib"])
    scores = {"a": 1.0, "bbb": 9.0, "cc": 4.0, "d": 2.0}
    base = replace(length, function=lambda evidence: torch.tensor([scores[text] for text in evidence.texts]))
    for row in texts:
        evidence = Evidence(row[:1], {}, paraphrases=[[text] for text in row[1:]])
        assert [evidence.of_draw(draw).texts for draw in (1, 2, 3)] == [[text] for text in row[1:]]
        assert knockoff_spread(evidence, base, 3).tolist() == [np.var([1.0, 2.0, 4.0], ddof=1)]
        w = scores[row[0]] - np.mean([scores[text] for text in row[1:]])
        assert knockoff(evidence, base, 3).tolist() == [pytest.approx(w)]


def shrunk(v: np.ndarray, k: int) -> np.ndarray:
    """log s^2 = m0 + b (log v - m0), m0 the median of log v, b = max(0, Var(log v) - trigamma((k - 2) / 2)) / Var."""
    low = np.sort(v)[(v.size - 1) // 2]
    if v.size < 20 or k <= 3 or low == 0:
        return np.ones(v.size)
    log = np.log(np.maximum(v, 1e-6 * low))
    b = max(0.0, log.var(ddof=1) - polygamma(1, (k - 2) / 2)) / log.var(ddof=1) if log.var() else 0.0
    return np.exp((np.log(low) + b * (log - np.log(low))) / 2)


@given(
    st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 11), st.sampled_from([0.0, 0.4, 1.5]), st.integers(1, 4)
)
def test_the_scale_found_by_counting_is_that_of_the_methods_page(
    seed: int, n: int, draws: int, sigma: float, shards: int
) -> None:
    rng = np.random.default_rng(seed)
    v = rng.chisquare(4, n) * np.exp(rng.normal(0, sigma, n)) * (rng.random(n) < 0.8)
    v = np.round(v, int(rng.integers(1, 9)))  # ties and zeros
    found = run_folds(find_scale(draws), lambda: (v[i::shards] for i in range(shards)))
    np.testing.assert_allclose(found.of(v), shrunk(v, draws + 1), rtol=1e-6)
    turned = v[::-1]
    assert run_folds(find_scale(draws), lambda: [turned]) == found, "no order and no shard matters"


def test_equal_spreads_and_no_documents_have_a_scale_and_unequal_ones_need_twenty() -> None:
    assert run_folds(find_scale(4), lambda: [np.full(30, 0.25)]).of(np.full(2, 0.25)).tolist() == [0.5, 0.5]
    assert (
        run_folds(find_scale(4), lambda: iter(()))
        == Scale()
        == run_folds(find_scale(4), lambda: [np.full(30, math.inf)])
    )
    for documents, scaled in ((19, False), (20, True)):
        spread = np.exp(np.arange(documents))
        assert (run_folds(find_scale(10), lambda spread=spread: [spread]) != Scale()) == scaled


def test_a_selection_divides_by_the_spread_only_where_it_names_it() -> None:
    rng, column, k = np.random.default_rng(5), "knockoff(base=loss, draws=10, combine=simultaneous)", 11
    each = np.exp(rng.normal(0, 2, 400))
    scores = rng.normal(size=(400, k)) * each[:, None]
    scores[370:, 0] += 4 * each[370:]
    w = compete(torch.from_numpy(scores[:, 0]), torch.from_numpy(scores[:, 1:].T)).numpy()
    v = np.sort(scores, axis=1)[:, :-1].var(axis=1, ddof=1)
    columns, audit = {column: w, spread_column(column): v}, np.arange(200, 400)
    plain = SelectionConfig(name="a", detectors=[column], procedure="ktd", alpha=0.1)
    scaled = SelectionConfig(name="b", detectors=list(columns), procedure="ktd", alpha=0.1)
    without, within = answer_all(
        [plain, scaled], Scores(columns, np.arange(400)), {"unseen": np.arange(200), "audit": audit}, 0, 0
    )
    for verdict, statistic in ((without, w[audit]), (within, w[audit] / shrunk(v[audit], k))):
        cut = by_sorting(list(statistic), Fraction(1, 10) * 10)
        assert (verdict.selected == is_selected(statistic, cut)).all()
    assert within.selected[170:].sum() >= without.selected[170:].sum() + 10, "24 more on average, with an sd of 4"
    assert (within.p == without.p).all()
    assert within.answer.guarantee == without.answer.guarantee == "heuristic"
    assert within.answer.details.keys() == {"scale_kept", "smallest_scaled_w_selected"}
    check_settings(scaled, "selections.0")
    spread, needed = list(columns)[1], r"takes 1 detector and 'knockoff_spread\(base=loss, draws=10\)' behind it"
    for others, message in (
        (["loss"], needed),
        ([spread, "loss"], needed),
        ([column], "twice"),
        ([spread] * 2, "twice"),
    ):
        with pytest.raises(UserError, match=message):
            check_settings(scaled.model_copy(update={"detectors": [column, *others]}), "selections.0")
    with pytest.raises(UserError, match="procedure ktd takes 1 detector, got 2"):
        check_settings(scaled.model_copy(update={"detectors": ["loss", "min_k"]}), "selections.0")


def test_the_symmetry_test_is_a_test() -> None:
    """Its p-value is below x with probability at most x: 800 runs, four standard errors."""
    rng = np.random.default_rng(3)
    fair = rng.normal(size=(800, 120))
    fifths = np.where(rng.random((200, 120)) < 1 / 5, 1.0, -1.0) * rng.exponential(size=(200, 120))
    for runs, draws in ((fair, 1), (fifths, 4)):
        p = np.array([sign_symmetry(w, draws).p_value for w in runs])
        for x in (0.01, 0.05, 0.2):
            assert (p <= x).mean() <= x + 4 * math.sqrt(x * (1 - x) / p.size)
