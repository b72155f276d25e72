"""Claims about selections by several detectors, asked as an audit asks them."""

import pickle
import warnings
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.engine import Scores, Verdict, answer_all
from pipeline.selection.procedures.adadetect import fit_discriminant, fit_score
from pipeline.selection.procedures.known import known_scores
from pipeline.selection.thresholds import Moments
from tests.helpers.commands import user_error


def verdict_of(
    known: np.ndarray, audit: np.ndarray, quarantined: int = 0, seen: np.ndarray | None = None, **settings: Any
) -> Verdict:
    """The verdict on audit documents (documents, detectors) that are ranked among known ones."""
    others = np.empty((0, known.shape[1])) if seen is None else seen
    rows = np.concatenate([known, audit, others]).astype(np.float64)
    names = [f"d{index}" for index in range(rows.shape[1])]
    scores = Scores(dict(zip(names, rows.T, strict=True)), np.arange(len(rows), dtype=np.int64))
    end = len(known) + len(audit)
    calibrating, other = ("seen", "unseen") if settings.get("direction") == "clean" else ("unseen", "seen")
    roles: dict[Any, np.ndarray] = {calibrating: np.arange(len(known)), "audit": np.arange(len(known), end)}
    if seen is not None:
        roles[other] = np.arange(end, len(rows))
    config = {"name": "a", "detectors": names, **settings}
    (verdict,) = answer_all([SelectionConfig(**config)], scores, roles, quarantined, 0)
    return verdict


@settings(max_examples=150, deadline=None)
@given(
    st.integers(4, 40),
    st.integers(1, 40),
    st.sampled_from([0.05, 0.1, 0.2, 0.25, 0.5]),
    st.integers(0, 2),
    st.integers(0, 2**32),
)
def test_one_detector_with_all_the_weight_selects_exactly_what_bh_selects(
    n: int, m: int, alpha: float, quarantined: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    known, audit = rng.integers(0, 30, size=(n, 1)), rng.integers(0, 60, size=(m, 1))
    plain = verdict_of(known, audit, quarantined, procedure="bh", alpha=alpha)
    fused = verdict_of(known, audit, quarantined, procedure="td4eval", alpha=alpha)
    assert np.array_equal(fused.selected, plain.selected)
    if plain.selected.any():
        assert np.array_equal(fused.p, plain.p)
        assert fused.answer.threshold == plain.answer.threshold


def test_an_exact_tie_that_bh_selects_is_selected_by_a_detector_of_all_the_weight() -> None:
    """Two of ten documents beat all 49 known ones: 10 (1/50) = .1 times 2, which a p-value rounded up would miss."""
    known = np.stack([np.arange(49), np.arange(49)], axis=1)
    audit = np.full((10, 2), -1)
    audit[:2, 0] = 100
    plain = verdict_of(known[:, :1], audit[:, :1], procedure="bh", alpha=0.1)
    assert plain.selected.sum() == 2
    for kind in ("rejections", "max"):
        fused = verdict_of(known, audit, procedure="td4eval", alpha=0.1, weights=kind)
        assert fused.answer.weights == [1.0, 0.0]
        assert np.array_equal(fused.selected, plain.selected), kind


@pytest.mark.parametrize("kind", ["rejections", "equal", "max", "random"])
@pytest.mark.parametrize("detectors", [2, 3, 6])
def test_an_exact_tie_on_which_all_detectors_agree_is_selected(kind: str, detectors: int) -> None:
    """Ten of 100 documents beat all 99 known ones by every detector: 100 (1/100) = .1 times 10."""
    known = np.repeat(np.arange(99)[:, None], detectors, axis=1)
    audit = np.full((100, detectors), -1)
    audit[:10] = 100
    plain = verdict_of(known[:, :1], audit[:, :1], procedure="bh", alpha=0.1)
    fused = verdict_of(known, audit, procedure="td4eval", alpha=0.1, weights=kind)
    assert np.array_equal(fused.selected, plain.selected)
    assert (plain.selected.sum(), fused.answer.threshold) == (10, 0.01)
    assert not verdict_of(known, audit[1:], 2, procedure="td4eval", alpha=0.1, weights=kind).selected.any()
    less = verdict_of(known, audit, procedure="td4eval", alpha=0.0999, weights=kind)
    assert not less.selected.any()


def fused_exactly(known: np.ndarray, audit: np.ndarray, weights: list[float], alpha: Fraction, q: int) -> np.ndarray:
    """What BH selects on the fused p-values in 60 digits, of which those within 1e-40 of a tie are at it."""
    n, m = len(known), len(audit) + q
    k = 1 + (known[None] >= audit[:, None]).sum(axis=1)
    with mpmath.workdps(60):
        half = mpmath.mpf(1) / (2 * (n + 1))
        total = mpmath.fsum(weights)
        p = []
        for row in k.tolist():
            clipped = [min(max(mpmath.mpf(r) / (n + 1), half), 1 - half) for r in row]
            t = mpmath.fsum(w * mpmath.cot(mpmath.pi * c) for w, c in zip(weights, clipped, strict=True)) / total
            p.append(mpmath.atan2(1, t) / mpmath.pi)
        level = mpmath.mpf(alpha.numerator) / alpha.denominator / m
        order = sorted(p)
        last = max((i for i in range(1, len(p) + 1) if order[i - 1] <= level * i + mpmath.mpf(10) ** -40), default=0)
        return np.array([last > 0 and one <= order[last - 1] for one in p])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([9, 19, 24, 39, 59, 99]),
    st.integers(2, 4),
    st.integers(2, 40),
    st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.5, 0.8]),
    st.sampled_from(["rejections", "equal", "max", "random"]),
    st.integers(0, 2),
    st.integers(0, 2**32),
)
def test_fused_selections_are_those_of_sixty_digits(
    n: int, d: int, m: int, alpha: float, kind: str, q: int, seed: int
) -> None:
    """Many documents have equal ranks by all detectors, and many of the others equal ranks in another order."""
    rng = np.random.default_rng(seed)
    known = np.repeat(np.arange(n)[:, None], d, axis=1).astype(float)
    levels = rng.integers(-1, n, 6) + 0.5
    levels[:2] = n
    audit = rng.choice(levels, (m, d))
    alike = rng.random(m) < 0.6
    audit[alike] = audit[alike, :1]
    verdict = verdict_of(known, audit, q, procedure="td4eval", alpha=alpha, weights=kind)
    weights = [Fraction(w).limit_denominator(d * m) for w in verdict.answer.weights or []]
    exact = [mpmath.mpf(w.numerator) / w.denominator for w in weights]
    if kind == "random":
        exact = [mpmath.mpf(w) for w in verdict.answer.weights or []]
    if not any(exact):
        assert not verdict.selected.any()
        return
    if sum(w > 0 for w in exact) == 1:  # exact ranks, without the clip
        column = exact.index(max(exact))
        plain = verdict_of(known[:, :1], audit[:, column : column + 1], q, procedure="bh", alpha=alpha)
        assert np.array_equal(verdict.selected, plain.selected)
        return
    expected = fused_exactly(known, audit, exact, Fraction(repr(alpha)), q)
    assert np.array_equal(verdict.selected, expected)
    if expected.any():
        assert verdict.p[expected].max() <= (verdict.answer.threshold or 0) < verdict.p[~expected].min(initial=2)


def documents(seed: int, shift: float = 2.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """60 calibration documents, 80 audited ones of which the first 40 are members, and 30 known members."""
    rng = np.random.default_rng(seed)
    known, audit, seen = (rng.normal(size=(count, 3)) for count in (60, 80, 30))
    audit[:40] += [shift, shift / 2, 0]
    seen += [shift, shift / 2, 0]
    return known, audit, seen


def test_adadetect_with_known_members_calibrates_on_all_and_says_on_what_it_rests() -> None:
    known, audit, seen = documents(3)
    split = verdict_of(known, audit, procedure="adadetect", learn="split", alpha=0.2)
    whole = verdict_of(known, audit, seen=seen, procedure="adadetect", alpha=0.2)
    assert (split.answer.n_calibration, whole.answer.n_calibration) == (30, 60)
    assert whole.answer.details["known_members"] == 30
    assert "known_members" not in split.answer.details
    assert "given the known documents that the score is learnt from" in whole.answer.assumption
    assert whole.answer.guarantee == split.answer.guarantee == "finite-sample"
    assert (split.answer.basis.halved, whole.answer.basis.halved) == (True, False)


def test_clean_documents_are_sought_with_the_roles_exchanged() -> None:
    known, audit, seen = documents(5)
    clean = verdict_of(-known, -audit, seen=-seen, procedure="adadetect", alpha=0.2, direction="clean")
    members = verdict_of(known, audit, seen=seen, procedure="adadetect", alpha=0.2)
    assert np.array_equal(clean.selected, members.selected)


@pytest.mark.parametrize(
    "fused", [{"procedure": "adadetect", "learn": "split"}, {"procedure": "td4eval", "reconformal": True}]
)
def test_storey_behind_a_learnt_score_estimates_the_share_of_nulls(fused: dict[str, Any]) -> None:
    found = np.zeros(2)
    for seed in range(6, 10):  # in one draw of ten both select nothing
        known, audit, _ = documents(seed, shift=3.0)
        plain, storey = (verdict_of(known, audit, alpha=0.1, step_up=step, **fused) for step in ("bh", "storey"))
        assert np.array_equal(plain.p, storey.p)
        assert (plain.answer.factor, plain.answer.resolution(50)[1]) == (1, 997), "half of them calibrate"
        # among 30 calibration documents the first p-value of at least a half is 16 / 31
        assert storey.answer.factor == pytest.approx((1 + (storey.p >= 0.5).sum()) / (80 * (1 - 16 / 31)))
        found += plain.selected.sum(), storey.selected.sum()
    assert found[1] > found[0]
    assert "estimated from the audit itself" in storey.answer.promise
    assert storey.answer.guarantee == "finite-sample"
    half = verdict_of(known, audit, alpha=0.1, step_up="storey", lambda_=0.25, **fused)
    assert half.answer.details["lambda"] == 0.25


def test_published_known_members_read_scores_and_known_members_ranks() -> None:
    """A monotone change of all scores moves the published estimate, and not the one on p-values."""
    known, audit, seen = (side[:, :1] for side in documents(7))
    shares: dict[str, list[float]] = {"ptdi_known_members": [], "known_members": []}
    for name, kept in shares.items():
        for change in (lambda x: x, np.exp):
            verdict = verdict_of(change(known), change(audit), seen=change(seen), procedure=name, alpha=0.2)
            kept.append(verdict.answer.null_proportion)
    assert shares["known_members"][0] == shares["known_members"][1]
    assert shares["ptdi_known_members"][0] != shares["ptdi_known_members"][1]
    sides = (known, seen, audit)
    expected = known_scores(*(Moments.of(side, float(np.median(known))) for side in sides))
    assert shares["ptdi_known_members"][0] == expected.pi0
    for name, kind in (("ptdi_known_members", "asymptotic"), ("known_members", "heuristic")):
        assert verdict_of(known, audit, seen=seen, procedure=name).answer.guarantee == kind
        with pytest.raises(UserError, match=f"procedure {name} needs documents .* there are none"):
            verdict_of(known, audit, procedure=name)


def made_up(seed: int = 0, shift: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    calibration, mixture = rng.normal(size=(60, 3)), rng.normal(size=(120, 3))
    mixture[:50] += [shift, shift / 2, 0.0]
    return calibration, mixture


def test_a_row_scores_the_same_bits_in_any_shard_and_after_a_journey() -> None:
    calibration, mixture = made_up()
    learnt = fit_score(calibration, mixture)
    low, middle, high = np.quantile([*calibration, *mixture], [0.16, 0.5, 0.84], axis=0)
    assert (learnt.center.tolist(), learnt.scale.tolist()) == (middle.tolist(), ((high - low) / 2).tolist())
    whole = learnt.score(mixture)
    travelled = pickle.loads(pickle.dumps(learnt))
    assert np.array_equal(np.concatenate([travelled.score(mixture[i : i + 7]) for i in range(0, 120, 7)]), whole)
    assert whole.dtype == np.float64
    assert learnt.score(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("fit", [fit_score, fit_discriminant])
def test_what_is_learnt_does_not_see_the_order_and_survives_absurd_scores(fit: Any) -> None:
    known, rows = made_up(seed=1)
    known[:, 2] = rows[:, 2] = 4.0
    rows[0, 0] = 1e200
    score = fit(known, rows).score(rows)
    assert (np.isfinite(score).all(), fit(known, rows).scale[2]) == (True, 1)
    rng = np.random.default_rng(0)
    assert np.array_equal(fit(rng.permutation(known), rng.permutation(rows)).score(rows), score)


@pytest.mark.parametrize("settings", [{"learn": "pool"}, {"learn": "split"}, {"learn": "pool", "seen": True}])
def test_scores_near_the_largest_number_are_learnt_from_as_smaller_ones_are(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    known, audit, seen = (rng.normal(size=(count, 3)).round(2) for count in (60, 50, 20))
    audit[:20] += 3
    seen += 3
    largest = np.abs(np.concatenate([known, audit, seen])[:, 1]).max()
    verdicts = []
    for scale in (1.0, 1.79e308 / largest):
        sides = [side * [1.0, scale, 1.0] for side in (known, audit, seen)]
        given = {**settings, "seen": sides[2] if "seen" in settings else None}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            verdicts.append(verdict_of(sides[0], sides[1], procedure="adadetect", alpha=0.5, **given))
    assert np.isfinite(sides[1]).all()
    assert verdicts[0].selected.any()
    assert np.array_equal(verdicts[0].selected, verdicts[1].selected)


@pytest.mark.parametrize("pool", [2, 3, 9])
def test_a_discriminant_has_the_pooled_covariance_with_two_means_taken_off(pool: int) -> None:
    known, rows = np.array([[3.0]]), np.arange(float(pool))[:, None]
    learnt = fit_discriminant(known, rows)
    low, high = np.quantile(rows, [0.16, 0.84])
    z = (rows - np.median(rows)) / ((high - low) / 2)
    covariance = (z**2).sum() / (len(known) + pool - 2) + 1e-6
    difference = (3.0 - np.median(rows)) / ((high - low) / 2) - z.mean()
    assert learnt.coefficients == pytest.approx([difference / covariance, 0.0])
    assert learnt.score(np.array([[-1e9], [1e9]])) == pytest.approx(8 * difference / covariance * np.array([-1, 1]))


def test_too_few_documents_to_learn_from_are_refused_in_one_line() -> None:
    known, rows = made_up()
    assert np.isfinite(fit_discriminant(known[:1], rows).score(rows)).all()
    for fit, sides, part in (
        (fit_score, (known[:0], rows), "both halves, got 0 to learn from and 120 in the mixture"),
        (fit_score, (known, rows[:0]), "both halves"),
        (fit_discriminant, (known[:0], rows), "documents to learn from and documents to rank, got 0 and 120"),
    ):
        assert part in user_error(fit, *sides)


@pytest.mark.parametrize("procedure", ["td4eval", "bh"])
def test_of_quarantined_documents_alone_nothing_is_selected(procedure: str) -> None:
    known, none = np.arange(38.0).reshape(19, 2), np.empty((0, 2))
    answer = verdict_of(known, none, quarantined=3, procedure=procedure, reconformal=True).answer
    assert (answer.m, answer.rank, answer.threshold) == (3, 0, None)
