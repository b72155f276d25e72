"""Claims about the list, the residuals and the collection of documents with versions: by hand and by enumeration."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.special import polygamma
from scipy.stats import chi2, chisquare

from pipeline.errors import UserError
from pipeline.selection.conformal import RankCounts
from pipeline.selection.step_up import step_up
from pipeline.selection.version_scores import (
    MaskedOrder,
    VersionScores,
    fewest_versions,
    gap_statistic,
    log_e_values,
    mirrored_list,
    preference_residuals,
    rank_step_up,
    redraw_p_value,
    shrinkage,
    uniformity_p_value,
    version_ranks,
)

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)


def of(documents: Sequence[Sequence[float]], published: Sequence[int]) -> VersionScores:
    """Documents "0", "1", ... by the scores of their versions."""
    sizes = [len(one) for one in documents]
    digests = [sha256(f"{j}/{i}".encode()).digest() for j, k in enumerate(sizes) for i in range(k)]
    return VersionScores(
        scores=np.array([score for one in documents for score in one], dtype=np.float64),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        published=np.array(published, dtype=np.int64),
        ids=tuple(str(j) for j in range(len(sizes))),
        digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32),
    )


@pytest.mark.parametrize("row", [[1, 1, 1, 1], [2, 1, 1, 0], [0, 3, 3, 3, 1]])
def test_whichever_version_was_published_its_ranks_are_all_ranks_once(row: list[float]) -> None:
    for seed in range(5):
        found = [int(version_ranks(of([row], [index]), seed)[0]) for index in range(len(row))]
        assert sorted(found) == list(range(1, len(row) + 1))
        assert all(row[a] >= row[b] for a, b in itertools.pairwise(np.argsort(found).tolist()))


def test_ties_are_ordered_by_hash_or_against_the_published_version() -> None:
    scores = of([[1, 1, 1]], [1])
    keys = [sha256(b"ties\x007\x000\x00" + row.tobytes()).digest() for row in scores.digests]
    assert version_ranks(scores, 7)[0] == 1 + sum(key < keys[1] for key in keys)
    assert len({tuple(version_ranks(of([[1, 1, 1]] * 9, [0] * 9), seed)) for seed in range(20)}) == 20
    assert version_ranks(of([[1, 1, 0], [1, 1, 0], [0, 0]], [0, 2, 1]), 0, "against").tolist() == [2, 3, 2]


@pytest.mark.parametrize(
    ("documents", "published", "message"),
    [
        ([[1, 2], [1]], [0, 0], "document '1' has fewer than two versions"),
        ([[1, 2], [1, 2]], [0, 2], "document '1' has a published index outside its versions"),
        ([[1, 2], [1, 2]], [-1, 0], "document '0' has a published index outside its versions"),
        ([[1, math.nan], [math.inf, 2]], [0, 0], "2 scores of versions are not finite"),
    ],
)
def test_bad_versions_are_refused_by_name(documents: list[list[float]], published: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of(documents, published)


def signs_and_groups(k: int, z: int, seed: int = 0, others: int = 30) -> dict[int, tuple[int, int]]:
    """Of a document with k versions beside one with `others`: its sign and group at each rank."""
    result = {}
    for rank in range(1, k + 1):
        scores = of([list(range(k, 0, -1)), list(range(others))], [rank - 1, 0])
        answer = mirrored_list(scores, TENTH, seed, z, lambda _, __, groups: groups)
        result[rank] = int(answer.signs[0]), int(answer.statistic[0])
    return result


def test_mirrored_ranks_by_hand() -> None:
    """k = 13, z = 4: G = 2, so 1 and 2 are positive, 6..13 negative, in turn of groups from the last; 3..5 dropped."""
    drawn = signs_and_groups(13, 4)
    assert drawn[1] == (1, 1)
    assert drawn[2] == (1, 2)
    assert {drawn[rank] for rank in (3, 4, 5)} == {(0, 0)}
    assert [drawn[rank] for rank in range(13, 5, -1)] == [(-1, 1), (-1, 2)] * 4


@pytest.mark.parametrize("z", [1, 3, 4, 7])
@pytest.mark.parametrize("k", [2, 4, 5, 6, 10, 19, 20])
def test_each_group_has_one_positive_and_z_negative_ranks(k: int, z: int) -> None:
    drawn = signs_and_groups(k, z, seed=next(seed for seed in range(99) if kept(k, z, seed)))
    own, groups = min(z, k - 1), max(1, k // (z + 1))
    for group in range(1, groups + 1):
        assert sorted(sign for sign, g in drawn.values() if g == group) == [-1] * own + [1]
    assert sum(sign == 0 for sign, _ in drawn.values()) == k - groups * (own + 1)


def kept(k: int, z: int, seed: int) -> bool:
    number = int.from_bytes(sha256(f"thinning\0{seed}\x000\0".encode()).digest(), "big")
    return number * z < min(z, k - 1) << 256


def test_a_positive_document_of_few_versions_is_kept_by_its_hash() -> None:
    states = [(kept(3, 4, seed), signs_and_groups(3, 4, seed)[1][0]) for seed in range(60)]
    assert all(sign == int(stays) for stays, sign in states)
    assert abs(sum(stays for stays, _ in states) - 30) <= 4 * math.sqrt(60 / 4)


def test_z_is_at_most_the_largest_number_of_versions_less_one() -> None:
    for sizes, z in (([2, 4, 3], 3), ([2, 5, 3], 4), ([20] * 3, 19)):
        scores = of([list(range(k)) for k in sizes], [0] * 3)
        assert (mirrored_list(scores, TENTH, 0, z=19) if z == 19 else mirrored_list(scores, TENTH, 0)).z == z
    assert fewest_versions(TENTH, np.array([20, 20])) == 3
    assert fewest_versions(TENTH, np.array([20, 20]), z=19) == 1
    assert fewest_versions(TENTH, np.array([2, 2])) == 10
    assert fewest_versions(TENTH, np.array([2, 4])) == 4


def slow_statistic(documents: list[list[float]], groups: list[int]) -> list[float]:
    """T from its definition, document by document."""
    pooled = math.sqrt(sum(np.var(x) * len(x) for x in documents) / sum(len(x) - 1 for x in documents))
    scaled = [np.sort(np.array(x) / pooled)[::-1] for x in documents]
    result = []
    for x, g in zip(scaled, groups, strict=True):
        k = len(x)
        others = np.delete(x, g - 1)
        v = [np.var(np.delete(y, i), ddof=1) if k > 3 else 1.0 for y in scaled if len(y) == k for i in range(k)]
        s = 1.0
        if k > 3 and len(v) >= 20 * k and np.median(v) > 0:
            least = 1e-6 * float(np.median(v))
            logs = np.log(np.maximum(v, least))
            m0, spread = float(np.median(logs)), float(np.var(logs))
            b = max(0.0, spread - float(polygamma(1, (k - 2) / 2))) / spread
            s = math.exp((m0 + b * (math.log(max(np.var(others, ddof=1), least)) - m0)) / 2)
        result.append((x[g - 1] - others.mean()) / (s * math.sqrt(1 + 1 / (k - 1))))
    return result


def test_the_statistic_is_that_of_its_definition() -> None:
    """Also where scores of two versions differ so much that other spreads are small, and without spread in most."""
    rng = np.random.default_rng(1)
    sizes = rng.permutation([5] * 25 + [4] * 20 + [3] * 30 + [2] * 30 + [9] * 19)
    mixed = [(rng.normal(size=k) * math.exp(rng.normal()) * (1e4 if k == 2 else 1)).tolist() for k in sizes]
    several = [int(rng.integers(1, k + 1)) for k in sizes]
    flat = [[1.1, 0.1, 0.1, 0.1, 0.1]] * 15 + [[0.3] * 5] * 10 + [[0.5, 2.5, 0.5, 0.5, 0.5]]
    for documents, groups in (([*mixed, [1, 0, 0, 0, 0]], [*several, 1]), ([[3, 5]], [1]), (flat, [1] * 26)):
        scores = of(documents, [0] * len(documents))
        statistic = gap_statistic(scores.scores, scores.offsets, np.array(groups))
        np.testing.assert_allclose(statistic, slow_statistic(documents, groups), rtol=1e-9, atol=1e-12)
    assert math.isclose(statistic[25], 2 * statistic[0])
    assert [shrinkage(spread, 9) for spread in (0, 0.3, 0.6)] == [0, 0, pytest.approx(1 - polygamma(1, 3.5) / 0.6)]


def test_documents_without_spread_add_nothing_and_nothing_selected_is_no_failure() -> None:
    empty = of([], [])
    assert mirrored_list(empty, TENTH, 0).selected.size == 0
    assert preference_residuals(empty) is empty
    assert rank_step_up(np.zeros(0, np.int64), np.zeros(0, np.int64), TENTH).size == 0
    assert redraw_p_value(empty, 0, 9) == 1.0
    assert log_e_values(np.zeros(0, np.int64), np.zeros(0, np.int64)).size == 0
    with_constant = of([[0.1] * 7, [0.1, 0.5, 0.2], [0, 1, 4, 4]], [0, 1, 2])
    assert with_constant.standardised()[:7].tolist() == [0] * 7
    assert redraw_p_value(with_constant, 1, 999) == redraw_p_value(of([[1, 5, 2], [0, 1, 4, 4]], [1, 2]), 1, 999)
    np.testing.assert_allclose(with_constant.standardised()[7:10], (np.array([1, 5, 2]) - 8 / 3) / np.std([1, 5, 2]))
    assert redraw_p_value(of([[0, 0, 0, 1]] * 12, [0] * 12), 8) == 1, "the lowest of all sums"
    scores = of([[1.5] * 5] * 30, [0] * 30)
    assert not gap_statistic(scores.scores, scores.offsets, np.ones(30, dtype=np.int64)).any()
    assert preference_residuals(replace(scores, forms=np.arange(150)[:, None] % 5)) is not None
    assert redraw_p_value(scores, 0, 99) == 1.0


def test_the_longest_prefix_is_selected_and_ties_are_ordered_by_hash() -> None:
    """z = 4, (1 + #negative) / (4 #positive): 1/8 after ++, 2/12 after ++-+, 5/20 after ++-+--++-, 6/20 at the end."""
    signs = [1, 1, -1, 1, -1, -1, 1, 1, -1, -1]
    documents = [[5.0 * (sign > 0), 4, 3, 2, 1] for sign in signs]
    scores = of(documents, [0] * 10)
    answer = mirrored_list(scores, Fraction(1, 4), 0, 4, lambda *_: -np.arange(10.0))
    assert answer.signs.tolist() == signs
    assert np.flatnonzero(answer.selected).tolist() == [0, 1, 3, 6, 7]
    assert not mirrored_list(scores, Fraction(1, 13), 0, 4, lambda *_: -np.arange(10.0)).selected.any()
    assert mirrored_list(scores, Fraction(1, 6), 0, 4, lambda *_: -np.arange(10.0)).selected.sum() == 3
    scores = of([[5, 4, 3, 2, 1]] * 4 + [[0, 4, 3, 2, 1]] * 4, [0] * 8)
    for seed in range(10):
        order = sorted(range(8), key=lambda j: sha256(f"order\0{seed}\0{j}\0".encode()).digest())
        first = list(itertools.takewhile(lambda j: j < 4, order))
        answer = mirrored_list(scores, Fraction(1, 4), seed, 4, lambda *_: np.zeros(8))
        assert set(first) <= set(np.flatnonzero(answer.selected).tolist())


def spread_first(scores: np.ndarray, offsets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.array([np.ptp(x) for x in np.split(scores, offsets[1:-1])]) - groups


def by_another(scores: np.ndarray, offsets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each document's place depends on the group and the scores of the next one."""
    return np.roll(groups + np.minimum.reduceat(scores, offsets[:-1]), 1)


@pytest.mark.parametrize("order", [gap_statistic, spread_first, by_another])
@pytest.mark.parametrize(
    ("sizes", "z"), [([5, 5, 5, 5], 4), ([3, 3, 3, 3, 3], 2), ([6, 3, 4, 5], 2), ([2] * 8, 1), ([4, 4, 4], 3)]
)
def test_the_fdr_over_all_indices_is_at_most_q(sizes: list[int], z: int, order: MaskedOrder) -> None:
    """The first document is a member, published index fixed; those of the others take all values, each equally often.

    No k is at most z here, so that no hash thins and the mean over all indices is the FDR itself, without noise.
    Scores are integers: ties abound.
    """
    rng = np.random.default_rng(4)
    for q in (HALF, Fraction(3, 4)):
        documents = [rng.integers(4, size=k).tolist() for k in sizes]
        documents[0][1] = 9
        scores = of(documents, [0] * len(sizes))
        total = Fraction(0)
        drawn = list(itertools.product(*map(range, sizes[1:])))
        for indices in drawn:
            published = np.array([1, *indices])
            selected = mirrored_list(replace(scores, published=published), q, 5, z, order).selected
            total += Fraction(int(selected[1:].sum()), max(1, int(selected.sum())))
        assert total / len(drawn) <= q


def preferring(n: int = 60, k: int = 6, columns: int = 4, seed: int = 6) -> tuple[VersionScores, np.ndarray]:
    """Scores that are a linear function of form counts and noise, and the noise."""
    rng = np.random.default_rng(seed)
    forms = rng.integers(3, size=(n * k, columns))
    noise = rng.normal(size=n * k)
    values = 10 * forms @ rng.normal(size=columns) + noise
    scores = of(values.reshape(n, k).tolist(), rng.integers(k, size=n).tolist())
    return replace(scores, forms=forms), noise


def within(values: np.ndarray, k: int) -> np.ndarray:
    return (values.reshape(-1, k) - values.reshape(-1, k).mean(axis=1, keepdims=True)).ravel()


@pytest.mark.parametrize(("n", "columns", "like"), [(60, 4, 0.97), (24, 60, 0.5)])
def test_residuals_are_those_of_ridge_regression_on_standardised_columns(n: int, columns: int, like: float) -> None:
    scores, noise = preferring(n, columns=columns)
    x = np.stack([within(column.astype(float), 6) for column in scores.forms.T], axis=1)
    x /= x.std(axis=0)
    y = within(scores.scores, 6)
    residual = y - x @ np.linalg.solve(x.T @ x + np.eye(columns), x.T @ y)
    pooled = math.sqrt((y**2).sum() / (5 * n))
    found = preference_residuals(scores).scores
    np.testing.assert_allclose(found, residual / pooled, atol=1e-9)
    assert np.corrcoef(found, within(noise, 6))[0, 1] > like
    assert (found == found.round(10)).all()


def test_residuals_do_not_read_the_published_index_and_follow_the_versions() -> None:
    scores, _ = preferring()
    found = preference_residuals(scores).scores
    assert (preference_residuals(replace(scores, published=(scores.published + 1) % 6)).scores == found).all()
    moved = np.concatenate([6 * j + np.random.default_rng(j).permutation(6) for j in range(60)])
    other = replace(scores, scores=scores.scores[moved], forms=scores.forms[moved])
    np.testing.assert_allclose(preference_residuals(other).scores, found[moved], atol=2e-10)
    sparse = replace(scores, forms=csr_array(scores.forms))
    np.testing.assert_allclose(preference_residuals(sparse).scores, found, atol=2e-10)


def test_a_form_that_varies_in_few_documents_is_left_out() -> None:
    scores, _ = preferring()
    assert scores.forms is not None
    rare = np.zeros((360, 1), dtype=np.int64)
    rare[: 19 * 6 : 6] = 1
    found = preference_residuals(scores).scores
    wider = replace(scores, forms=np.hstack([scores.forms, rare, np.full((360, 2), [7, 1])]))
    np.testing.assert_allclose(preference_residuals(wider).scores, found, atol=2e-10)
    assert preference_residuals(replace(scores, forms=rare)).scores is scores.scores
    rare[19 * 6] = 1
    wider = replace(scores, forms=np.hstack([scores.forms, rare]))
    assert np.abs(preference_residuals(wider).scores - found).max() > 1e-6


def test_bh_on_ranks_of_equal_k_is_the_step_up_procedure_and_of_unequal_k_by_hand() -> None:
    """p = 1/20, 1/10, 2/20, 1/2: at q = 2/15 the third is selected, 4/10 <= 3 q, and so are those before it."""
    rng = np.random.default_rng(7)
    for k in (5, 20, 100):
        ranks = np.minimum(rng.integers(1, k + 1, size=200), rng.integers(1, k + 1, size=200) ** 2 // 5 + 1)
        for q in (TENTH, HALF):
            cut = step_up(RankCounts(np.bincount(ranks - 1, minlength=k)), q)
            assert (rank_step_up(ranks, np.full(200, k), q) == (ranks <= cut)).all()
    ranks, sizes = np.array([1, 1, 2, 1]), np.array([20, 10, 20, 2])
    assert rank_step_up(ranks, sizes, Fraction(2, 15)).tolist() == [True, True, True, False]
    assert not rank_step_up(ranks, sizes, Fraction(13, 100)).any()


@pytest.mark.parametrize(
    ("documents", "published"), [([[1, 5, 2], [0, 1, 4, 4], [2, 2, 1, 3, 9]], [1, 2, 3]), ([[0, 1]] * 3, [1] * 3)]
)
def test_the_p_value_of_a_collection_is_that_of_all_draws(documents: list[list[float]], published: list[int]) -> None:
    """60 possible draws, or 8, each with equal chance: the share of redraws that reach T has this mean exactly."""
    scores = of(documents, published)
    parts = [(np.array(one) - np.mean(one)) / np.std(one) for one in documents]
    observed = sum(part[index] for part, index in zip(parts, scores.published, strict=True))
    share = np.mean([sum(draw) >= observed - 1e-9 for draw in itertools.product(*parts)])
    redraws = 9_999
    reached = redraw_p_value(scores, 8) * (redraws + 1) - 1
    assert reached == pytest.approx(round(reached), abs=1e-6)
    assert abs(reached / redraws - share) <= 4 * math.sqrt(share * (1 - share) / redraws)
    assert redraw_p_value(scores, 8) == redraw_p_value(scores, 8) != redraw_p_value(scores, 9)


def test_the_e_values_by_hand_and_that_of_very_much_evidence_does_not_overflow() -> None:
    ranks, sizes = np.array([1, 3, 2, 1, 1, 1]), np.array([3, 3, 3, 5, 2, 20])
    products = dict.fromkeys((0.1, 0.2, 0.5, 0.9), 1.0)
    path = []
    for r, k in zip(ranks, sizes, strict=True):
        products = {bet: value * (1 + bet * (k + 1 - 2 * r) / (k - 1)) for bet, value in products.items()}
        path.append(float(np.mean(list(products.values()))))
    np.testing.assert_allclose(np.exp(log_e_values(ranks, sizes)), path)
    values = log_e_values(np.ones(5_000, dtype=np.int64), np.full(5_000, 20))
    assert math.isclose(values[-1], 5_000 * math.log(1.9) - math.log(4))


def test_uniformity_is_the_chi_squared_test_of_ranks() -> None:
    rng = np.random.default_rng(9)
    ranks, pair, statistics = rng.integers(1, 6, size=200), np.repeat([1, 2], [7, 3]), 0.0
    few = rng.integers(1, 21, size=40)  # 40 documents of 20 versions: cells of at least 3 ranks, which makes 6
    for some, k, cells in ((ranks, 5, 5), (few, 20, 6), (pair, 2, 2)):
        cell = np.arange(k) * cells // k
        plain = chisquare(np.bincount(cell[some - 1], minlength=cells), np.bincount(cell) * (some.size / k))
        assert math.isclose(uniformity_p_value(some, np.full(some.size, k)), plain.pvalue)
        statistics += plain.statistic
    assert uniformity_p_value(np.array([1] * 9), np.full(9, 5)) == 1.0
    mixed = uniformity_p_value(np.concatenate([ranks, few, pair]), np.repeat([5, 20, 2], [200, 40, 10]))
    assert math.isclose(mixed, chi2.sf(statistics, 4 + 5 + 1))
    assert uniformity_p_value(np.ones(100, dtype=np.int64), np.full(100, 5)) < 1e-10
