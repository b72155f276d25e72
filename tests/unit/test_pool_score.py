"""Claims about the score that adadetect learns from the unordered pool, and about where its choice is stated."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter
from scipy.stats import multivariate_normal
from test_fused_selections import verdict_of
from test_sentence_numbers import outlook

import seenset
from pipeline.answers.summarise import learnt_sentences
from pipeline.config.corpus import Role
from pipeline.config.selection import LEARN, RecordedSelection, SelectionConfig, recorded
from pipeline.results.history import AnsweredQuestion
from pipeline.selection.conformal import POOL_SIZE, Sample
from pipeline.selection.engine import Scores, answer, answer_all
from pipeline.selection.folds import RoleScores, SelectionInput, run_queries
from pipeline.selection.pool_score import fit_pool
from pipeline.selection.procedures import PROCEDURES, check_settings
from pipeline.selection.procedures.adadetect import PoolQuestion, expected_power
from pipeline.selection.schedule import Level, Slot
from tests.helpers.commands import user_error

POOL: dict[str, Any] = {"procedure": "adadetect", "learn": "pool", "step_up": "storey"}
HIGHER = (2.5, 2.0, 1.5, 1.0, 0.5)
FILED = Path(__file__).parents[1] / "golden/learnt.json"


def documents(seed: int, n: int = 60, m: int = 100, off: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Calibration and audited scores by five detectors; 40 of the audited ones are members.

    `off` is added to the last column of a tenth of all documents.
    """
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(n + m, 1)) + rng.normal(size=(n + m, 5))) / np.sqrt(2)
    rows[n : n + 40] += HIGHER
    rows[rng.random(n + m) < 0.1, 4] += off
    return rows[:n], rows[n:]


def mixture_score(pool: np.ndarray) -> np.ndarray:
    """The score of each row by definition: responsibilities, means and densities of every population, 40 times."""
    low, middle, high = np.quantile(pool, [0.16, 0.5, 0.84], axis=0)
    z = np.clip((pool - middle) / ((high - low) / 2), -8, 8)
    n, d = z.shape
    starts = []
    for x in [*z.T, z.mean(axis=1)]:
        starts.append(1 / (1 + np.exp(-3 * (x - np.quantile(x, 0.85)) / x.std())))

    def em(further: list[np.ndarray]) -> tuple[float, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        r = np.stack([1 - sum(further), *further])
        for step in range(41):
            means = (r @ z) / r.sum(axis=1, keepdims=True)
            covariance = sum((k[:, None] * (z - mean)).T @ (z - mean) for k, mean in zip(r, means, strict=True)) / n
            covariance += 0.05 * np.eye(d)
            shares = np.clip(r.sum(axis=1)[1:] / n, 0.01, 0.95)
            shares = np.r_[max(0.01, 1 - shares.sum()), shares]
            density = [p * multivariate_normal(mean, covariance).pdf(z) for p, mean in zip(shares, means, strict=True)]
            if step < 40:
                r = np.stack(density) / np.sum(density, axis=0)
        return np.log(np.sum(density, axis=0)).sum(), means, np.stack(density), r, np.sqrt(np.diag(covariance))

    fits = [em([start]) for start in starts]
    best = max(fits, key=lambda fit: fit[0])
    raised = (best[1][1] - best[1][0]) / best[4]
    if raised.max() >= 4 and np.delete(raised, raised.argmax()).mean() < raised.max() / 8:
        first = best[3][1]
        _, means, density, _, deviation = max((em([first, (1 - first) * s]) for s in starts), key=lambda fit: fit[0])
        counted = [np.clip((mean - means[0]) / deviation, -1, 1).sum() for mean in means[1:]]
        members = 2 if counted[1] > counted[0] else 1
        return np.log(density[members]) - np.log(density[0] + density[3 - members])
    best = max((fit for fit in fits if (fit[1][1] - fit[1][0]).sum() >= 0), key=lambda fit: fit[0])
    return np.log(best[2][1]) - np.log(best[2][0])


@pytest.mark.parametrize(("seed", "off"), [(0, 0.0), (1, 0.0), (2, 6.0), (3, 6.0)])
def test_the_score_is_the_log_odds_of_a_mixture_by_its_definition(seed: int, off: float) -> None:
    pool = np.concatenate(documents(seed, off=off))
    learnt = fit_pool(pool)
    assert (learnt.outliers is not None) == bool(off)
    assert np.allclose(learnt.score(pool), mixture_score(pool), atol=1e-5)


@pytest.mark.parametrize("off", [0.0, 6.0])
def test_the_score_depends_neither_on_the_order_of_rows_nor_on_roles(off: float) -> None:
    known, audit = documents(4, off=off)
    pool = np.concatenate([known, audit])
    rng, expected = np.random.default_rng(0), fit_pool(pool).score(pool)
    for _ in range(3):
        assert np.array_equal(fit_pool(rng.permutation(pool)).score(pool), expected)
    other = known.copy(), audit.copy()
    other[0][:30], other[1][40:70] = audit[40:70], known[:30]  # nulls change their roles
    before, after = (verdict_of(*roles, **POOL) for roles in ((known, audit), other))
    assert before.answer.weights == after.answer.weights
    assert before.answer.fused is not None
    assert after.answer.fused is not None
    batch = RoleScores(pool, None, np.arange(len(pool)))
    assert np.array_equal(before.answer.fused(batch), after.answer.fused(batch))


@pytest.mark.parametrize("parts", [1, 3, 17])
def test_the_answer_does_not_depend_on_how_documents_are_cut_into_shards(parts: int) -> None:
    known, audit = documents(5)
    names = [f"d{index}" for index in range(5)]
    selection = SelectionConfig(name="a", detectors=names, alpha=0.1, **POOL)
    keys = np.arange(160, dtype=np.int64)
    inputs = RoleScores(known, None, keys[:60]), RoleScores(np.empty((0, 5)), None, keys[:0]), 0
    query = answer(SelectionInput(selection, Level.of(selection, None), 0, *inputs))
    shards = np.array_split(np.arange(100), parts)

    def run_folds(folds: Any) -> dict[int, Any]:
        merged: dict[int, Any] = {}
        for shard in reversed(shards):
            for index, fold in folds:
                part = fold.of_shard(RoleScores(audit[shard], None, keys[60:][shard]))
                merged[index] = fold.merge(merged[index], part) if index in merged else part
        return merged

    (made,) = run_queries([query], run_folds)
    whole = verdict_of(known, audit, alpha=0.1, **POOL)
    p = np.concatenate([made.judge(RoleScores(audit[shard], None, keys[60:][shard]))[0] for shard in shards])
    assert np.array_equal(p, whole.p)
    assert made.weights == whole.answer.weights


def test_all_documents_calibrate_and_lists_grow() -> None:
    found = np.zeros(2)
    for seed in range(6):
        known, audit = documents(seed)
        split, pool = (verdict_of(known, audit, alpha=0.1, **{**POOL, "learn": kind}) for kind in ("split", "pool"))
        assert (split.answer.n_calibration, pool.answer.n_calibration) == (30, 60)
        assert (split.answer.basis.halved, pool.answer.basis.halved) == (True, False)
        assert split.answer.weights is None
        assert pool.answer.guarantee == "finite-sample"
        assert sum(map(abs, pool.answer.weights or [])) == pytest.approx(1, abs=1e-5)
        found += split.selected[:40].sum(), pool.selected[:40].sum()
    assert found[1] > 2 * found[0]


def test_clean_documents_are_sought_with_the_scores_negated() -> None:
    known, audit = documents(7)
    clean = verdict_of(-known, -audit, alpha=0.1, direction="clean", **POOL)
    members = verdict_of(known, audit, alpha=0.1, **POOL)
    assert members.selected.any()
    assert np.array_equal(clean.p, members.p)
    assert clean.answer.weights == members.answer.weights


def test_known_members_are_learnt_from_where_they_are_given() -> None:
    known, audit = documents(8)
    seen = documents(9)[1][:40]
    pool, split = (verdict_of(known, audit, seen=seen, **{**POOL, "learn": kind}) for kind in ("pool", "split"))
    assert np.array_equal(pool.p, split.p)
    assert pool.answer.details["known_members"] == 40


@pytest.mark.parametrize("ties", ["conservative", "random"])
def test_with_one_detector_the_answer_is_that_of_the_detector(ties: str) -> None:
    known, audit = (side[:, :1].round(1) * 1e6 for side in documents(10))
    pool, plain = (verdict_of(known, audit, alpha=0.2, ties=ties, **asked) for asked in (POOL, {"procedure": "storey"}))
    assert np.array_equal(pool.p, plain.p)
    assert np.array_equal(pool.selected, plain.selected)
    assert pool.answer.weights is None


def test_constant_columns_and_columns_without_a_difference_are_no_error() -> None:
    known, audit = documents(11)
    for column in range(5):
        known[:, column], audit[:, column] = 3.0, 3.0
        answered = verdict_of(known, audit, alpha=0.1, **POOL)
        assert answered.answer.weights is not None
        assert column == 4 or answered.answer.weights[: column + 1] == [0.0] * (column + 1)
    assert not answered.selected.any(), "all documents are equal"
    assert set(answered.p) == {1.0}


@pytest.mark.parametrize("seed", [56, 91])
def test_rounding_does_not_decide_whether_populations_without_a_difference_are_taken(seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(29, 4)).round(1)
    rows[:, 3] = 3.0  # from this column both populations start alike
    orders = [np.roll(np.arange(4), first) for first in range(4)]
    assert [fit_pool(rows[:, order]).weights.tolist() for order in orders] == [[0.25] * 4] * 4


def table(rows: np.ndarray) -> pa.Table:
    return pa.table({f"d{index}": column for index, column in enumerate(rows.T)})


def test_a_scan_of_a_schedule_states_what_learning_costs() -> None:
    known, audit = documents(17)
    rows = np.concatenate([known, audit])
    scores = Scores({f"d{index}": column for index, column in enumerate(rows.T)}, np.arange(160, dtype=np.int64))
    roles: dict[Role, np.ndarray] = {"unseen": np.arange(60), "audit": np.arange(60, 160)}
    slot = Slot(1, Fraction(1, 5), Fraction(1, 2))
    for learn, stated in (("pool", True), ("split", False)):
        selection = SelectionConfig(name="a", detectors=list(scores.columns), **{**POOL, "learn": learn})
        (made,) = answer_all([selection], scores, roles, 0, 0, slot)
        assert ("Learning from the pool spends nothing of it" in made.answer.promise) == stated


def test_documents_without_a_score_are_hypotheses_with_p_of_one() -> None:
    known, audit = documents(12)
    audit[3, 2], audit[60, 0], known[5, 1] = np.nan, np.inf, np.nan
    made = seenset.select(table(audit), unseen=table(known), **POOL)
    assert (made.summary.n_calibration, made.summary.n_audit, made.summary.n_quarantined) == (59, 100, 2)
    assert made.p_values[[3, 60]].tolist() == [1, 1]
    assert made.selected.any()
    assert not made.selected[[3, 60]].any()


def test_of_many_documents_those_with_the_smallest_hashes_are_learnt_from() -> None:
    rng = np.random.default_rng(13)
    n, m = 150_000, 60_000
    rows, keys = rng.normal(size=(n + m, 2)), np.arange(n + m, dtype=np.int64)
    rows[n : n + 6_000] += 3
    sample = Sample.draw(keys, rows, 0, POOL_SIZE)
    assert len(sample.rows) == POOL_SIZE < n + m
    answered = verdict_of(rows[:n], rows[n:], alpha=0.1, procedure="adadetect", learn="pool")
    assert answered.answer.weights == fit_pool(sample.rows).weights.tolist()
    assert answered.answer.n_calibration == n, "all of them calibrate"


def test_learning_from_the_pool_is_refused_where_nothing_is_learnt() -> None:
    selection = SelectionConfig(name="a", detectors=["loss"], procedure="storey", learn="pool")
    assert user_error(check_settings, selection, "selections.0") == (
        "selections.0: learn pool is for procedure adadetect; got procedure storey, which learns no score: learn must "
        "be null"
    )


def test_a_question_and_an_answer_without_the_key_are_of_a_split() -> None:
    known, audit = (table(side) for side in documents(14))
    split, pool = (seenset.select(audit, unseen=known, **{**POOL, "learn": kind}).summary for kind in ("split", "pool"))
    assert "learn" not in split.plain()
    assert pool.plain()["learn"] == "pool"
    plain: dict[str, Any] = {"name": "a", "detectors": ["loss"], "procedure": "adadetect"}
    assert SelectionConfig(**recorded(plain)).learn == "split"
    (index,) = TypeAdapter(list[RecordedSelection]).validate_python([plain])
    assert index.learn == "split"
    asked = [AnsweredQuestion.model_construct(settings=settings) for settings in (plain, {**plain, "learn": "split"})]
    assert asked[0].key() == asked[1].key(), "one question, though an earlier version left the key out"


def test_a_configuration_without_the_key_learns_from_the_pool_and_says_so() -> None:
    assert set(LEARN) == {name for name, one in PROCEDURES.items() if one.learns}
    plain: dict[str, Any] = {"name": "a", "detectors": ["loss"], "procedure": "adadetect"}
    for written in (plain, {**plain, "learn": None}):
        assert SelectionConfig(**written).model_dump()["learn"] == "pool"
    assert SelectionConfig(**{**plain, "learn": "split"}).model_dump()["learn"] == "split"
    assert "learn" not in SelectionConfig(**{**plain, "procedure": "storey"}).model_dump()
    known, audit = (table(side) for side in documents(14))
    made = [
        seenset.select(audit, unseen=known, procedure="adadetect", step_up="storey", **learn)
        for learn in ({}, {"learn": "pool"})
    ]
    assert made[0].summary.plain() == made[1].summary.plain()
    assert made[0].summary.learn == "pool"


def test_weights_are_stated_with_how_they_were_found() -> None:
    known, audit = (table(side) for side in documents(15))
    summary = seenset.select(audit, unseen=known, **POOL).summary
    (stated,) = learnt_sentences(summary)
    assert "found without knowing which documents are which" in stated
    assert summary.weights is not None
    for name, weight in zip(summary.detectors, summary.weights, strict=True):
        assert f"{name} {weight:.2g}" in stated
    assert learnt_sentences(seenset.select(audit, unseen=known, **{**POOL, "learn": "split"}).summary) == []


def test_one_detector_and_few_documents_are_warned_of_with_the_expected_power(tmp_path: Path) -> None:
    known, audit = documents(16)
    with pytest.warns(UserWarning, match="With one detector there is nothing to learn: learn: pool ranks by d0"):
        seenset.select(table(audit[:, :1]), unseen=table(known[:, :1]), **POOL)
    with pytest.warns(UserWarning, match="Expect little of learn: pool with 9 documents .* it finds 0%"):
        few = seenset.select(table(audit), unseen=table(known[:9]), **POOL).summary
    assert [line.split(":")[0] for line in learnt_sentences(few)] == [
        "Expect little of learn",
        learnt_sentences(few)[1].split(":")[0],
    ]
    planned = outlook(tmp_path, known=9, detectors=["loss", "zlib"], procedure="adadetect", learn="pool")
    assert "Expect little of learn: pool with 9 documents" in planned["sentence"]
    assert planned["sentence"].startswith("With 9 unseen documents to calibrate on and 200 to judge")
    one = outlook(tmp_path, known=9, procedure="adadetect", learn="pool")
    assert one["sentence"].endswith("With one detector there is nothing to learn: learn: pool ranks by loss.")
    for learn in ("pool", "split"):
        taught = outlook(tmp_path, seen=9, detectors=["loss", "zlib"], procedure="adadetect", learn=learn)
        assert "The score is learnt from 9 known seen documents and the unordered pool" in taught["sentence"]
    enough = outlook(tmp_path, known=10, detectors=["loss", "zlib"], procedure="adadetect", learn="pool")
    assert "Expect" not in enough["sentence"]


def test_the_expected_power_grows_with_alpha_and_with_calibration_documents() -> None:
    powers = [
        expected_power(PoolQuestion(n, 100, ("a", "b", "c"), Fraction(alpha), "storey"))
        for n, alpha in ((9, "0.1"), (9, "0.5"), (200, "0.5"))
    ]
    assert 0 <= powers[0] < powers[1] < powers[2] < 1


@pytest.mark.parametrize(("learn", "direction"), [("split", "members"), ("pool", "members"), ("pool", "clean")])
def test_answers_are_those_filed(learn: str, direction: str) -> None:
    filed = json.loads(FILED.read_text())
    sign = 1 if direction == "members" else -1
    known, audit = (sign * np.array(filed[role]) for role in ("known", "audit"))
    role = {"members": "unseen", "clean": "seen"}[direction]
    made = seenset.select(
        table(audit), **{role: table(known)}, **{**POOL, "learn": learn}, direction=direction, alpha=0.2
    )
    expected = filed[learn]
    assert np.flatnonzero(made.selected).tolist() == expected["selected"]
    assert np.allclose(made.p_values, expected["p_values"], rtol=1e-12, atol=0)
    weights = expected["weights"]
    assert made.summary.weights == (None if weights is None else pytest.approx(weights))
