"""Bounds of one list: the envelope against all orders, lists against a scan of all numbers of nulls, sentences."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binom

import seenset
from pipeline.answers.stated_bounds import bound_clause, bound_sentence, bound_text, bounds_not_covered
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.results.summary import Summary
from pipeline.run.conclusion_text import CONTRADICTED
from pipeline.selection import bounds
from pipeline.selection.bounds import Envelope, bounds_of_lists, fewest_in_list, probability_of_keeping, wrong_in_list
from pipeline.selection.conformal import RankCounts
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.procedures import why_unbounded
from ray_jobs.terminal import print_summaries

SURE = Fraction(95, 100)
TENTH = Fraction(1, 10)


def share_exceeding(envelope: Envelope, k: int, limits: np.ndarray) -> float:
    """Of all orders of n calibration documents and k nulls, the share in which nulls exceed a limit at some level."""
    n, exceeding, orders = envelope.n, 0, 0
    for places in combinations(range(n + k), k):  # where the nulls stand
        ranks = np.array(places) - np.arange(k) + 1  # 1 + the calibration documents before each
        counts = np.array([(ranks <= level).sum() for level in envelope.levels])
        exceeding += bool((counts > limits).any())
        orders += 1
    return exceeding / orders


@pytest.mark.parametrize("delta", [Fraction(1, 20), Fraction(1, 3)])
@pytest.mark.parametrize(("n", "k"), [(1, 3), (4, 1), (5, 6), (8, 4), (3, 9)])
def test_of_all_orders_at_most_a_share_delta_exceeds_the_envelope(n: int, k: int, delta: Fraction) -> None:
    envelope = Envelope.of(n, k, 1 - delta)
    limits = envelope.most(k)
    share = share_exceeding(envelope, k, limits)
    assert share <= delta
    assert 1 - probability_of_keeping(n, k, envelope.levels, limits[None])[0] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("confidence", [Fraction(8, 10), SURE, Fraction(999, 1000)])
@pytest.mark.parametrize("n", [20, 200, 2_000])
def test_the_envelope_is_exceeded_by_at_most_a_share_delta_of_draws_by_count(n: int, confidence: Fraction) -> None:
    for k in (1, 5, 64, 300, 1_500, 5_000):  # the last ones of n = 2,000 are simulated
        envelope = Envelope.of(n, k, confidence)
        kept = probability_of_keeping(n, k, envelope.levels, envelope.most(k)[None])[0]
        assert 1 - kept <= float(1 - confidence) * (1 + 1e-9)
        if n > 1 and k >= 300:
            assert 1 - kept >= 0.8 * float(1 - confidence) or k * n > 2_000_000  # and it is not much too wide


@pytest.mark.parametrize("confidence", [Fraction(1, 10**20), Fraction(1, 100), Fraction(1, 5), Fraction(1, 2)])
@pytest.mark.parametrize("n", [1, 2, 5, 12, 40])
def test_an_envelope_of_height_zero_is_exceeded_by_at_most_a_share_delta(n: int, confidence: Fraction) -> None:
    before = np.zeros(1, dtype=np.int64)
    for k in range(1, 21):
        envelope = Envelope.of(n, k, confidence)
        kept = probability_of_keeping(n, k, envelope.levels, envelope.most(k)[None])[0]
        assert 1 - kept <= float(1 - confidence)
        least = np.floor(k * envelope.levels / (n + 1) * (1 + 1e-12)).astype(np.int64)
        if probability_of_keeping(n, k, envelope.levels, least[None])[0] >= confidence:
            assert envelope.most(k).tolist() == least.tolist()
        limits = Envelope.of(n, 20, confidence).most(k)
        assert (limits >= before).all()
        before = limits


@pytest.mark.parametrize(("n", "k", "delta"), [(200, 300, Fraction(1, 20)), (1_000, 1_000, Fraction(1, 5))])
def test_a_simulated_envelope_is_little_higher_than_the_counted_one(
    n: int, k: int, delta: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    envelope = Envelope.of(n, k, 1 - delta)
    mean = k * envelope.levels / (n + 1)
    counted = envelope.most(k) - mean
    monkeypatch.setattr(bounds, "EXACT_WORK", 0)
    bounds._height.cache_clear()
    simulated = envelope.most(k) - mean
    bounds._height.cache_clear()
    assert 1 <= simulated.sum() / counted.sum() <= 1.012


def test_an_envelope_has_the_same_levels_and_limits_on_every_machine() -> None:
    for n, expected in ((3_998, [297, 40, 3_959]), (3_999, [317, 20, 3_960])):  # one more adds levels below a hundredth
        levels = Envelope.of(n, 4_000, SURE).levels
        assert [levels.size, *levels[[0, -1]]] == expected
    for n, m, total, within in ((4_000, 500, 78_165, 20), (4_001, 499, 78_113, 0), (3, 666_667, 1_752_763, 0)):
        assert abs(Envelope.of(n, m, SURE).most(m).sum() - total) <= within  # the first one is counted, not simulated
    limits = [tuple(Envelope.of(200, 1_000, SURE).most(k)) for k in (1, 2, 63, 64, 65, 66, 67)]
    assert (len(set(limits)), limits[4]) == (6, limits[5]), "numbers of nulls above 64 are powers of 1.02"
    assert Envelope.of(4, 3, Fraction(4, 5)).most(3).tolist() == [2, 2, 3, 3], "the least height, a hair above 3.5"


@pytest.mark.parametrize("delta", [TENTH, Fraction(1, 20), Fraction(1, 1000)])
def test_the_draw_that_is_taken_lies_below_the_quantile_as_seldom_as_is_said(delta: Fraction) -> None:
    """It does if at least as many draws as its place lie below the quantile, each with probability 1 - delta."""
    place = bounds._place(delta)
    below = binom(bounds.DRAWS, 1 - float(delta))
    assert below.sf(place - 1) <= bounds.UNLUCKY < below.sf(place - 2)


def random_counts(rng: np.random.Generator, n: int, nulls: int, members: int) -> tuple[RankCounts, np.ndarray]:
    """Rank counts of nulls by Polya's urn and of members anywhere; and the nulls' own counts."""
    own = rng.multinomial(nulls, rng.dirichlet(np.ones(n + 1)))
    places = np.minimum(n, rng.geometric(rng.choice([0.02, 0.2, 0.9]), size=members) - 1)
    return RankCounts(own + np.bincount(places, minlength=n + 1)), own


def test_the_number_of_nulls_is_the_largest_that_a_scan_finds_consistent() -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        n, nulls, members = (int(rng.integers(1, most)) for most in (40, 100, 100))
        counts, _ = random_counts(rng, n, nulls, members)
        envelope = Envelope.of(n, counts.m, SURE)
        above = counts.m - np.cumsum(counts.counts)[envelope.levels - 1]
        consistent = [k for k in range(counts.m + 1) if (k <= envelope.most(k) + above).all()]
        assert bounds_of_lists(counts, SURE).nulls == max(consistent)


def test_where_the_nulls_keep_within_the_envelope_every_bound_is_true() -> None:
    """The proof of docs/guarantee.md, on counts in which members lie anywhere: no list and no threshold is excepted."""
    rng = np.random.default_rng(1)
    kept = 0
    for _ in range(200):
        n, nulls, members = int(rng.integers(1, 80)), int(rng.integers(0, 150)), int(rng.integers(1, 150))
        counts, own = random_counts(rng, n, nulls, members)
        envelope = Envelope.of(n, counts.m, SURE)
        if not (np.cumsum(own)[envelope.levels - 1] <= envelope.most(nulls)).all():
            continue
        kept += 1
        lists = bounds_of_lists(counts, SURE)
        assert nulls <= lists.nulls
        assert (np.cumsum(own) <= lists.wrong).all()
        assert (lists.wrong <= np.cumsum(counts.counts)).all()
    assert kept > 150


def test_documents_without_a_score_are_counted_as_hypotheses_and_never_as_listed() -> None:
    counts = RankCounts.of(np.ones(400, dtype=int), 50).with_quarantined(5)
    everything = wrong_in_list(counts, 51, SURE, unlisted=5)
    assert everything.wrong_at_most + everything.right_at_least == 400
    assert everything.members_at_least <= 400
    none = wrong_in_list(counts, 0, SURE)
    assert (none.wrong_at_most, none.right_at_least, none.published_wrong_at_most) == (0, 0, 0)
    assert none.members_at_least == everything.members_at_least > 300


def test_the_longest_list_keeps_alpha_and_no_bound_is_above_the_published_one() -> None:
    rng = np.random.default_rng(3)
    lengths = set()
    for _ in range(40):
        counts, _ = random_counts(rng, 60, 80, 160)
        for alpha in (TENTH, Fraction(3, 10)):
            lists = bounds_of_lists(counts, SURE)
            holding = [
                rank
                for rank in range(1, 62)
                if counts.at_most(rank) and lists.wrong_at(rank) <= alpha * counts.at_most(rank)
            ]
            rank = bounds_of_lists(counts, SURE).longest(alpha)
            assert rank == max(holding, default=0)
            lengths.add(rank)
        for rank in (1, 5, 20, 61):
            bound = wrong_in_list(counts, rank, SURE)
            assert bound.wrong_at_most <= bound.published_wrong_at_most <= counts.at_most(rank)
            assert bound.right_at_least == counts.at_most(rank) - bound.wrong_at_most <= bound.members_at_least
    assert len(lengths) > 5
    lists = bounds_of_lists(RankCounts.of(np.array([1, 1001, 1001, 1001]), 1_000), SURE)
    assert (lists.longest(TENTH), lists.wrong_at(0)) == (1_000, 0), "one document ahead of all others is a list"


def test_no_list_of_procedure_bound_is_shorter_than_the_fewest() -> None:
    rng = np.random.default_rng(4)
    shortest = 10**9
    for _ in range(150):
        n, m = 60, 240
        members = int(rng.integers(10, 200))
        counts, _ = random_counts(rng, n, m - members, members)
        rank = bounds_of_lists(counts, SURE).longest(Fraction(1, 5))
        if rank:
            shortest = min(shortest, counts.at_most(rank))
    assert fewest_in_list(60, 240, Fraction(1, 5), SURE) <= shortest < 240
    assert fewest_in_list(5, 20, Fraction(1, 5), SURE) == 15, "3 of 5 nulls can lie at the first rank"
    assert fewest_in_list(1_000, 5, Fraction(1, 2), Fraction(1, 100)) == 1
    # and nothing can be selected where the fewest exceed the audited
    assert fewest_in_list(1, 100, TENTH, SURE) > 100
    assert bounds_of_lists(RankCounts.of(np.ones(100, dtype=int), 1), SURE).longest(TENTH) == 0


def test_a_confidence_that_draws_cannot_show_bounds_nothing() -> None:
    counts = RankCounts.of(np.ones(5_000, dtype=int), 3_000)
    bound = wrong_in_list(counts, 1, Fraction(99_999, 100_000))
    assert (bound.wrong_at_most, bound.members_at_least) == (5_000, 0)
    exact = Envelope.of(50, 30, 1 - Fraction(1, 10**13))  # 1 - kept is then rounding error alone
    assert (exact.most(30) == 30).all()
    for n, k, delta in ((3_000, 5_000, Fraction(7, 10_000)), (50, 30, Fraction(bounds.LEAST_DELTA))):
        assert (Envelope.of(n, k, 1 - delta).most(k) < k).any(), "the largest draw can, and the least probability"


RNG = np.random.default_rng(0)
AUDITED, UNSEEN = RNG.normal(size=300) + 2.5 * (np.arange(300) < 150), RNG.normal(size=200)


def test_procedure_bound_selects_the_longest_list_of_which_alpha_can_be_wrong() -> None:
    summary = seenset.select(AUDITED, unseen=UNSEEN, procedure="bound", alpha=0.1, confidence=0.9).summary
    assert 0 < summary.bound.wrong_at_most <= 0.1 * summary.n_selected
    assert summary.minimum_selectable <= summary.n_selected
    assert (summary.strict.procedure, summary.strict.n_selected) == ("bound", summary.n_selected)
    assert "90% confidence" in summary.promise
    assert "at most 10% would give" in summary.promise
    assert "average" not in summary.promise.replace("no average", "")
    longer = seenset.select(AUDITED, unseen=UNSEEN, procedure="bh", alpha=0.1).summary
    assert summary.n_selected < longer.n_selected  # which bounds an average


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"procedure": "td4eval"}, "only with reconformal"),
        ({"procedure": "ktd"}, "does not select by ranks"),
        ({"calibration": "by_group"}, "among the same ones"),
        ({"ties": "random"}, "independently of one another"),
    ],
)
def test_a_selection_that_no_theorem_covers_has_no_bound_and_says_why(settings: dict, why: str) -> None:
    selection = SelectionConfig(name="one", detectors=["loss"], **settings)
    assert why in (why_unbounded(selection) or "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"confidence": 1.0}, r"confidence: must be in \(0, 1\), got 1.0"),
        ({"confidence": 0}, r"confidence: must be in \(0, 1\), got 0"),
        ({"confidence": "high"}, r"confidence: must be a number in \(0, 1\), got 'high'"),
        ({"confidence": 0.9, "procedure": "td4eval"}, "no bound at confidence 0.9 is available, because procedure td4"),
        ({"confidence": 0.9, "ties": "random"}, "no bound at confidence 0.9 is available, because ties: random"),
        ({"procedure": "bound", "ties": "random"}, "procedure bound is not available, because ties: random"),
        ({"procedure": "bound", "calibration": "conditional"}, "takes calibration pooled, got conditional"),
    ],
)
def test_a_bound_that_cannot_be_had_is_refused_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        seenset.select(AUDITED, unseen=UNSEEN, **settings)


def summary(**changes: object) -> Summary:
    made = seenset.select(AUDITED, unseen=UNSEEN, procedure="bh").summary
    values = {name: value for name, value in made if name != "schema_"}
    return Summary(**{**values, "conclusion": ConclusionValue.SUPPORTED, **changes})


def with_bound(made: Summary, **changes: int) -> Summary:
    values = {name: getattr(made.bound, name) for name in type(made.bound).__slots__}
    return made.model_copy(update={"bound": type(made.bound)(**{**values, **changes})})


@pytest.mark.parametrize(
    ("n_selected", "wrong", "members", "sentence"),
    [
        (40, 0, 50, "none of these 40 is wrong"),
        (40, 1, 50, "at most 1 of these 40 is wrong"),
        (1, 0, 50, "the one selected document is not wrong"),
        (1, 1, 0, "The one selected document may be wrong."),  # no confidence is needed for what may be
        (12, 12, 0, "All of these 12 may be wrong."),
        (12, 12, 30, "at least 30 of the 600 audited documents were trained on"),
        (0, 0, 0, "The bound is 0: it does not show that any of the 600 audited documents was trained on."),
        (0, 0, 1, "at least 1 of the 600 audited documents was trained on"),
    ],
)
def test_the_sentence_says_how_many_are_wrong_and_how_many_were_trained_on(
    n_selected: int, wrong: int, members: int, sentence: str
) -> None:
    made = with_bound(summary(n_selected=n_selected, n_audit=600), wrong_at_most=wrong, members_at_least=members)
    stated = bound_sentence(made) or ""
    assert sentence == stated if sentence.endswith(".") else sentence in stated
    assert stated.startswith("All of these 12 may be wrong.") == (n_selected == 12)


def test_sentence_and_clause_state_the_confidence_and_what_it_means() -> None:
    made = with_bound(summary(n_selected=240, n_audit=600), wrong_at_most=38, members_at_least=214)
    wrong = "ith 95% confidence at most 38 of these 240 are wrong"
    assert bound_sentence(made) == f"W{wrong}, and at least 214 of the 600 audited documents were trained on."
    assert bound_clause(made) == f"; w{wrong}"
    assert "were not trained on" in (bound_sentence(made.model_copy(update={"direction": "clean"})) or "")
    assert "fail in at most 5% of such audits" in (bound_text(made) or "")
    nothing = summary(bound=None)
    assert bound_sentence(nothing) is bound_text(nothing) is None


def test_the_command_prints_a_note_of_several_selections_once_and_marks_the_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made = with_bound(summary(n_selected=240, n_audit=600), wrong_at_most=38, members_at_least=214)
    print_summaries([made, summary(conclusion=ConclusionValue.CONTRADICTED, name="void")])
    printed = capsys.readouterr().out
    assert "selection: With 95% confidence at most 38 of these 240 are wrong, and at least 214 of the 600" in printed
    assert f"void: {CONTRADICTED}" in printed
    assert printed.count("confidence") == 1
    assert bounds_not_covered([summary(conclusion=ConclusionValue.CONTRADICTED)]) == []
    (sound,) = (line for line in printed.splitlines() if "│ selection " in line)
    (void,) = (line for line in printed.splitlines() if "│ void " in line)
    assert "│ finite-sample, but contradicted here │" in void
    assert "contradicted here" not in sound
    unchecked = [summary(conclusion=ConclusionValue.INCONCLUSIVE, name=name) for name in ("first", "second")]
    (remark,) = unchecked[0].remarks
    print_summaries(unchecked)
    printed = capsys.readouterr().out
    assert (printed.count(remark), f"first, second: {remark}" in printed) == (1, True)


def test_a_bound_that_no_check_confirms_is_stated_under_its_condition() -> None:
    unchecked = "provided both groups are alike and their documents independent; this was not checked"
    assert (bound_sentence(summary(conclusion=ConclusionValue.INCONCLUSIVE)) or "").endswith(f", {unchecked}.")
    assert bound_clause(summary(conclusion=ConclusionValue.INCONCLUSIVE)).endswith(f", {unchecked}")
    diagnostics = summary().diagnostics
    blind = diagnostics.blind.model_copy(update={"tested": True})
    made = summary(conclusion=ConclusionValue.INCONCLUSIVE, diagnostics=diagnostics.model_copy(update={"blind": blind}))
    assert (bound_sentence(made) or "").endswith(", provided both groups are alike; the test could not confirm this.")
    assert "provided" not in (bound_sentence(summary()) or "")


def test_a_summary_with_a_bound_that_is_contradicted_is_read_without_it() -> None:
    written = {**summary().plain(), "conclusion": "contradicted"}
    del written["bound_withheld"]
    assert written["bound"]["members_at_least"] > 0
    read = Summary.model_validate(written)
    assert (read.conclusion, read.bound, read.bound_withheld) == ("contradicted", None, CONTRADICTED)
