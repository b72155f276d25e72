"""Claims about smoothed ranks: their draws, the limit among cells, the list, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import seenset
from pipeline.checks.resolution import planned_resolution
from pipeline.config.corpus import Role
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection import smoothed_search
from pipeline.selection.conformal import Grid
from pipeline.selection.engine import Scores, Verdict, answer, answer_all, refuse_uncovered
from pipeline.selection.folds import EMPTY, Fold, RoleScores, SelectionInput, run_queries
from pipeline.selection.schedule import Level
from pipeline.selection.smoothing import IdDigest, draws, last_draw, model_key, smoothed_p

KEY = model_key("digest")


def selection(**settings: Any) -> SelectionConfig:
    return SelectionConfig(**{"name": "a", "detectors": ["x"], "ranks": "smoothed", "alpha": 0.2, **settings})


def oracle(
    one: SelectionConfig,
    known: np.ndarray,
    audited: np.ndarray,
    keys: np.ndarray,
    of: tuple[Any, Any],
    quarantined: int,
    weights: Mapping[str, Fraction] | None = None,
) -> tuple[set[int], list[Fraction]]:
    """The list and the smoothed p-values over the weights of their groups by their definition, in fractions.

    `of`: the groups of both roles.
    """
    m, sign = len(audited) + quarantined, 1 if one.direction == "members" else -1
    p, whole = [], []
    w = [Fraction(1) if weights is None else weights[name] for name in of[1]]
    for place, score in enumerate(audited.tolist()):
        peers = [other for other, group in zip(known.tolist(), of[0], strict=True) if group == of[1][place]]
        rank = 1 + sum(sign * other >= sign * score for other in peers)
        data = hashlib.sha256(KEY + int(keys[place]).to_bytes(8, "little", signed=True)).digest()
        u = Fraction(2 * int.from_bytes(data[:8], "big") + 1, 2**65)
        p.append((rank - 1 + u) / (len(peers) + 1) / w[place])
        whole.append(Fraction(rank, len(peers) + 1))
    factor = Fraction(1)
    if one.procedure == "by":
        factor = sum((Fraction(1, j) for j in range(1, m + 1)), Fraction(0))
    if one.procedure == "storey":
        cuts = {Fraction(-(-size // 2), size) for size in (sum(g == name for g in of[0]) + 1 for name in set(of[0]))}
        cut = max(cuts)  # lambda 1/2 below 200 documents
        high = sum((w[place] for place, k in enumerate(whole) if k >= Fraction(1, 2)), Fraction(quarantined))
        factor = (max([*w, Fraction(1)]) + high) / (m * (1 - cut))
    best = 0
    for count in range(1, len(p) + 1):
        if sorted(p)[count - 1] <= min(1, one.exact_alpha * count / (m * factor)):
            best = count
    return set(sorted(range(len(p)), key=p.__getitem__)[:best]), p


def asked(
    one: SelectionConfig,
    known: np.ndarray,
    audited: np.ndarray,
    keys: np.ndarray,
    groups: tuple[Any, Any],
    quarantined: int = 0,
) -> Verdict:
    n, role = known.size, "unseen" if one.direction == "members" else "seen"
    names = pa.array([*groups[0], *groups[1]], pa.string())
    scores = Scores({"x": np.concatenate([known, audited])}, keys, names, key=KEY)
    grouped = one.calibration == "by_group"
    scores = scores if grouped else Scores(scores.columns, keys, key=KEY)
    (made,) = answer_all([one], scores, {role: np.arange(n), "audit": np.arange(n, keys.size)}, quarantined, 0)
    return made


def audits(count: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, tuple[Any, Any], int]]:
    """Known and audited scores with ties, keys, groups and a number of quarantined documents."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, m = int(rng.integers(9, 60)), int(rng.integers(1, 60))
        members = rng.random(m) < rng.choice([0, 0.2, 0.7])
        scores = rng.normal(size=n).round(1), (rng.normal(size=m) + 2.5 * members).round(1)
        kinds = rng.permutation(np.arange(n) % 3).astype(str), rng.integers(0, 3, m).astype(str)
        yield *scores, rng.integers(-(2**63), 2**63 - 1, n + m), kinds, int(rng.integers(0, 4))


WEIGHTED = {"calibration": "by_group", "boost": "group"}


@pytest.mark.parametrize("procedure", ["bh", "by", "storey"])
@pytest.mark.parametrize("settings", [{}, {"calibration": "by_group"}, WEIGHTED], ids=["pooled", "by group", "weights"])
@pytest.mark.parametrize("direction", ["members", "clean"])
def test_the_list_is_that_of_the_definition(procedure: str, settings: dict[str, Any], direction: str) -> None:
    if procedure == "by" and "boost" in settings:
        return  # weights are not proved for it
    one = selection(procedure=procedure, direction=direction, **settings)
    selected = 0
    for known, audited, keys, kinds, quarantined in audits(40, 7):
        sign = 1 if direction == "members" else -1
        known, audited = sign * known, sign * audited
        groups = kinds if settings else (["a"] * known.size, ["a"] * audited.size)
        made = asked(one, known, audited, keys, groups, quarantined)
        stated = made.answer.groups  # 30 binary digits, so that floats are exact
        weights = None if stated is None else {weighed.group: Fraction(weighed.weight) for weighed in stated}
        expected, p = oracle(one, known, audited, keys[known.size :], groups, quarantined, weights)
        assert set(np.flatnonzero(made.selected).tolist()) == expected
        smoothing = made.answer.smoothing
        assert smoothing is not None
        assert smoothing.n_selected == len(expected)
        assert all(value <= smoothing.limit for place, value in enumerate(p) if place in expected)
        assert smoothing.n_whole <= len(expected), "whole ranks never select more"
        selected += len(expected)
    assert selected


def test_a_document_up_to_the_limit_is_decided_in_integers() -> None:
    keys = np.arange(1000)
    numbers, grid = draws(KEY, keys), Grid.uniform(9)
    for place, u in zip((1, 2, 9, 10), numbers.tolist(), strict=False):
        p = Fraction(2**65 * (place - 1) + 2 * u + 1, 10 * 2**65)
        assert last_draw(p, place, 10) == u
        assert last_draw(p - Fraction(1, 2**80), place, 10) == u - 1
        assert smoothed_p(grid, np.array([place]), np.array([u], dtype=np.uint64))[0] == pytest.approx(float(p))
    assert last_draw(Fraction(3, 10), 4, 10) == -1
    assert last_draw(Fraction(4, 10), 4, 10) == 2**64 - 1
    uniform = np.sort(numbers / 2.0**64)
    assert np.abs(uniform - np.arange(1, 1001) / 1001).max() < 1.63 / np.sqrt(1000), "Kolmogorov-Smirnov at .01"


@pytest.mark.parametrize("settings", [{}, {"calibration": "by_group"}, WEIGHTED], ids=["pooled", "by group", "weights"])
def test_many_documents_in_shards_give_the_same_list(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    one = selection(procedure="storey", **settings)
    for known, audited, keys, kinds, quarantined in audits(25, 11):
        audited, keys = np.repeat(audited, 9), np.arange(known.size + 9 * audited.size) * 7919
        groups = kinds[0], np.repeat(kinds[1], 9)
        expected = asked(one, known, audited, keys, groups, quarantined)
        monkeypatch.setattr(smoothed_search, "MOST_GATHERED", 12)
        monkeypatch.setattr(smoothed_search, "EDGES", 8)
        known_groups, audit_groups = (pa.chunked_array([pa.array(kind.tolist())]) for kind in groups)
        batch = RoleScores(audited[:, None], audit_groups, keys[known.size :])
        calibrating = RoleScores(known[:, None], known_groups, keys[: known.size])
        question = SelectionInput(one, Level.of(one, None), 0, calibrating, EMPTY, quarantined, None, KEY)

        def run_folds(folds: Any, batch: RoleScores = batch) -> dict[int, Any]:
            merged: dict[int, Any] = {}
            for start in range(0, len(batch.matrix), 50):
                rows = np.arange(start, min(start + 50, len(batch.matrix)))
                assert batch.groups is not None
                part = RoleScores(batch.matrix[rows], batch.groups.take(pa.array(rows)), batch.keys[rows])
                for index, fold in folds:
                    assert isinstance(fold, Fold)
                    result = fold.of_shard(part)
                    merged[index] = fold.merge(merged[index], result) if index in merged else result
            return merged

        (made,) = run_queries([answer(question)], run_folds)
        assert made.judge(batch)[1].tolist() == expected.selected.tolist()
        assert made.smoothing is not None
        assert expected.answer.smoothing is not None
        assert made.smoothing.limit == expected.answer.smoothing.limit
        monkeypatch.undo()


def table(role: str, scores: Any, **columns: Any) -> pa.Table:
    return pa.table({"doc_id": [f"{role} {i}" for i in range(len(scores))], "score": np.asarray(scores), **columns})


def two_roles(seed: int = 3) -> tuple[pa.Table, pa.Table]:
    rng = np.random.default_rng(seed)
    return table("a", np.append(rng.normal(size=70), rng.normal(3, 1, 30))), table("u", rng.normal(size=60))


def uniform(made: seenset.Selected, n: int) -> np.ndarray:
    """U of every document, from its p-values."""
    assert made.smoothed_p is not None
    return made.smoothed_p * (n + 1) - np.rint(made.p_values * (n + 1)) + 1


def test_the_draws_depend_on_ids_alone() -> None:
    audited, known = two_roles()
    made = seenset.select(audited, unseen=known, procedure="bh", ranks="smoothed")
    numbers = uniform(made, 60)
    assert np.all((numbers > 0) & (numbers < 1))
    for settings in ({"seed": 5}, {"alpha": 0.3}, {"procedure": "storey", "lambda_": 0.3}, {"ties": "random"}):
        other = seenset.select(audited, unseen=known, ranks="smoothed", **{"procedure": "bh", **settings})
        assert uniform(other, 60) == pytest.approx(numbers, abs=1e-9)
    noise = np.random.default_rng(4).normal(size=100)
    changed = audited.set_column(1, "score", pa.array(noise))
    assert uniform(seenset.select(changed, unseen=known, ranks="smoothed"), 60) == pytest.approx(numbers, abs=1e-9)
    named = audited.set_column(0, "doc_id", pa.array([f"b {i}" for i in range(100)]))
    renamed = uniform(seenset.select(named, unseen=known, ranks="smoothed"), 60)
    assert not np.isclose(renamed, numbers, atol=1e-9).any()
    several = np.stack([noise, noise, -noise], axis=1)
    more = pa.table({"doc_id": audited["doc_id"], **{f"d{i}": several[:, i] for i in range(3)}})
    base = pa.table({"doc_id": known["doc_id"], **{f"d{i}": np.arange(60.0) for i in range(3)}})
    for detector in ("d0", "d2"):
        answer = seenset.select(more, unseen=base, detectors=[detector], ranks="smoothed")
        assert uniform(answer, 60) == pytest.approx(numbers, abs=1e-9)


def test_the_order_of_rows_and_the_roles_of_nulls_change_no_draw() -> None:
    audited, known = two_roles()
    made = seenset.select(audited, unseen=known, procedure="storey", ranks="smoothed")
    order = np.random.default_rng(8).permutation(100)
    turned = seenset.select(audited.take(order), unseen=known.take(np.arange(60)[::-1]), ranks="smoothed")
    assert turned.selected.tolist() == made.selected[order].tolist()
    assert turned.smoothed_p is not None
    assert made.smoothed_p is not None
    assert np.array_equal(turned.smoothed_p, made.smoothed_p[order])
    first, last = audited.slice(0, 1), known.slice(0, 1)  # a null document and a calibration document
    swapped = pa.concat_tables([last, audited.slice(1)]), pa.concat_tables([first, known.slice(1)])
    again = seenset.select(swapped[0], unseen=swapped[1], procedure="storey", ranks="smoothed")
    assert uniform(again, 60)[1:] == pytest.approx(uniform(made, 60)[1:], abs=1e-9)
    keys = np.arange(9)
    assert IdDigest.of(keys[:4]) + IdDigest.of(keys[4:]) == IdDigest.of(keys[::-1])
    assert IdDigest.of(keys).key() != IdDigest.of(keys[:8]).key()


def test_a_document_without_a_score_is_at_one_and_never_listed() -> None:
    audited, known = two_roles()
    scores = audited["score"].to_numpy().copy()
    scores[[0, 99]] = np.nan
    for alpha in (0.1, 0.5, 0.999):
        answer = seenset.select(table("a", scores), unseen=known, procedure="storey", ranks="smoothed", alpha=alpha)
        assert answer.smoothed_p is not None
        assert answer.smoothed_p[[0, 99]].tolist() == [1.0, 1.0]
        assert not answer.selected[[0, 99]].any()
        assert answer.summary.n_quarantined == 2
        assert answer.summary.n_selected == answer.selected.sum()


def test_the_summary_states_the_draw_and_what_other_draws_change() -> None:
    audited, known = two_roles()
    answer = seenset.select(audited, unseen=known, procedure="bh", ranks="smoothed")
    summary = answer.summary
    assert summary.smoothed is not None
    assert summary.smoothed.n_whole == seenset.select(audited, unseen=known, procedure="bh").summary.n_selected
    others = summary.smoothed.others
    assert others is not None
    changes = zip(others.n_selected, others.entered, others.left, strict=True)
    assert [summary.n_selected + entered - left for _, entered, left in changes] == others.n_selected
    assert len(others.n_selected) == 20
    sentence = summary.smoothed.sentence(summary.n_selected)
    assert f"select {summary.smoothed.n_whole:,}. Under 20 other draws the list has" in sentence
    assert "as good as random" in summary.assumption
    assert summary.minimum_selectable == 1
    assert summary.bound is not None
    assert summary.bound.wrong_at_most + summary.bound.right_at_least == summary.n_selected
    assert "smoothed" not in seenset.select(audited, unseen=known, procedure="bh").summary.plain()


def test_other_draws_select_as_often_as_new_keys_do() -> None:
    """20 lists from counts against lists of 400 keys: their means differ by at most four standard errors."""
    known, audited = np.arange(20.0), np.repeat([30.0, 18.5, 17.5, 5.5], [6, 4, 5, 45])
    keys, one = np.arange(80), selection(procedure="bh", alpha=0.3)
    stated, drawn = [], []
    for number in range(400):
        scores = Scores({"x": np.concatenate([known, audited])}, keys, key=model_key(str(number)))
        (made,) = answer_all([one], scores, {"unseen": np.arange(20), "audit": np.arange(20, keys.size)}, 0, 0)
        assert made.answer.smoothing is not None
        assert made.answer.smoothing.others is not None
        drawn.append(int(made.selected.sum()))
        stated.append(float(np.mean(made.answer.smoothing.others.n_selected)))
    assert np.std(drawn) > 1, "else nothing is compared"
    error = np.hypot(np.std(drawn), np.std(stated)) / np.sqrt(400)
    assert abs(np.mean(drawn) - np.mean(stated)) <= 4 * error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"procedure": "ebh"}, "no proof for procedure ebh; take"),
        ({"procedure": "bound"}, "no proof for procedure bound"),
        ({"procedure": "ptdi"}, "no proof for procedure ptdi"),
        ({"procedure": "storey", "calibration": "conditional"}, "pooled or by_group, got conditional"),
        ({"procedure": "td4eval"}, "with reconformal: true, got reconformal: false"),
    ],
)
def test_what_has_no_proof_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        seenset.select([3.0, 1.0], unseen=range(30), ranks="smoothed", **settings)
    assert "\n" not in str(raised.value)


def test_a_plan_states_the_shortest_list_with_and_without_and_recommends_below_300() -> None:
    def planned(known: int, m: int = 300, series: bool = False, **settings: Any) -> dict[str, Any]:
        one = selection(**{"alpha": 0.1, "procedure": "bh", **settings})
        return planned_resolution(one, m, {"unseen": known}, False, series)

    whole, smoothed = planned(99, ranks="whole"), planned(99)
    assert whole["minimum_selectable"] == 30
    assert "ranks: smoothed there is no shortest list" in whole["advice"]
    assert smoothed["minimum_selectable"] == 1
    assert smoothed["outcome"] == "passed"
    assert "shortest possible list of whole ranks has 30 documents; smoothed ranks have none" in smoothed["sentence"]
    assert "if 15 documents score above every unseen document" in smoothed["sentence"]
    assert "probability of at least 0.5" in smoothed["sentence"]
    assert "advice" not in smoothed
    assert "has 30 documents at a null share of 1; smoothed" in planned(99, procedure="storey")["sentence"]
    one, few = planned(99, m=10)["sentence"], planned(1, m=20)["sentence"]
    assert one.endswith("a single document can be selected, with whole ranks and with smoothed ones.")
    assert "whole ranks would have 100 documents; smoothed ranks have none: if 20 documents score above" in few
    assert few.endswith("with a probability of at least 0.2.")
    for other in (
        planned(300, ranks="whole"),
        planned(99, m=5, ranks="whole"),
        planned(99, series=True, ranks="whole"),
        planned(99, procedure="bound", ranks="whole"),
        planned(99, calibration="conditional", ranks="whole"),
    ):
        assert "advice" not in other


@pytest.mark.parametrize("beyond", [1, 6, 15])
def test_documents_beyond_all_known_ones_are_listed_as_often_as_stated(beyond: int) -> None:
    """J of K documents at rank 1, the others at the last: a list with probability J / K, within 4 standard errors."""
    keys, one, runs = np.arange(399), selection(procedure="bh", alpha=0.1), 400
    scores = {"x": np.concatenate([np.zeros(99), np.repeat([1.0, -1.0], [beyond, 300 - beyond])])}
    roles: dict[Role, np.ndarray] = {"unseen": np.arange(99), "audit": np.arange(99, 399)}
    listed = [
        answer_all([one], Scores(scores, keys, key=model_key(str(number))), roles, 0, 0)[0].selected.any()
        for number in range(runs)
    ]
    stated = beyond / 30
    assert abs(np.mean(listed) - stated) <= 4 * np.sqrt(stated * (1 - stated) / runs)


def test_a_series_refuses_smoothed_ranks() -> None:
    with pytest.raises(UserError, match="series does not cover ranks: smoothed"):
        refuse_uncovered(selection())


@pytest.mark.parametrize("settings", [{"procedure": "adadetect"}, {"procedure": "td4eval", "reconformal": True}])
@pytest.mark.parametrize("step_up", ["bh", "storey"])
def test_learnt_and_fused_scores_are_smoothed_on_their_held_out_ranks(settings: dict[str, Any], step_up: str) -> None:
    rng = np.random.default_rng(2)
    shift = np.repeat([0.0, 2.5], [60, 40])[:, None]
    values = rng.normal(size=(100, 2)) + shift, rng.normal(size=(81, 2))
    both = [
        pa.table({"doc_id": [f"{role}{i}" for i in range(len(some))], "d": some[:, 0], "e": some[:, 1]})
        for role, some in zip("au", values, strict=True)
    ]
    asked = {"unseen": both[1], "alpha": 0.2, "step_up": step_up, **settings}
    whole, smoothed = (seenset.select(both[0], ranks=ranks, **asked) for ranks in ("whole", "smoothed"))
    assert np.array_equal(whole.p_values, smoothed.p_values)
    assert smoothed.smoothed_p is not None
    n = whole.summary.n_calibration
    assert np.all((smoothed.smoothed_p <= whole.p_values) & (smoothed.smoothed_p > whole.p_values - 1 / (n + 1)))
    p, level = np.sort(smoothed.smoothed_p), 0.2 / (100 * (smoothed.summary.factor or 1))
    held = np.flatnonzero(p <= level * np.arange(1, 101))
    assert smoothed.summary.n_selected == held[-1] + 1 >= whole.summary.n_selected
    assert smoothed.selected.tolist() == (smoothed.smoothed_p <= p[held[-1]]).tolist()
