"""Claims about weights of groups (`boost: group`): their definition, what they ignore, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import seenset
from pipeline.compare.joint import GRID_ERROR
from pipeline.config.selection import SelectionConfig
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.run.plan import make_plan
from pipeline.selection.conformal import POOL_SIZE, Sample
from pipeline.selection.engine import answer
from pipeline.selection.folds import EMPTY, RoleScores, SelectionInput, run_queries
from pipeline.selection.group_weights import GroupPools, count_high, quantile
from pipeline.selection.schedule import Level
from pipeline.wording import percent
from tests.helpers.commands import ended, here, user_error
from tests.helpers.made_up import write_rows

Scored = Sequence[tuple[str, float | None]]  # group and score of each document; None: it could not be scored

BOOSTED = {"calibration": "by_group", "boost": "group"}


# --- an independent oracle


def empirical(values: Sequence[float], share: Fraction) -> float:
    return next(v for place, v in enumerate(sorted(values), 1) if place >= share * len(values))


def weights_by_definition(known: Scored, audited: Scored) -> dict[str, Fraction]:
    scored = [(group, score) for group, score in audited if score is not None]
    z: dict[str, list[float]] = {}
    for name in sorted({group for group, _ in scored}):
        pool = [score for group, score in [*known, *scored] if group == name and score is not None]
        low, centre, high = (empirical(pool, Fraction(share, 100)) for share in (5, 20, 30))
        z[name] = [(score - centre) / ((high - low) or 1.0) for score in pool]
    cut = empirical([value for values in z.values() for value in values], Fraction(4, 5))
    odds = {}
    for name, values in z.items():
        a = (sum(value > cut for value in values) + Fraction(1, 2)) / (len(values) + 1)
        odds[name] = a / (1 - a)
    total = sum(odds[group] for group, _ in scored)
    found = {}
    for name, one in odds.items():
        weight, power = one * len(scored) / total, Fraction(1)
        while weight * power < 2**29:
            power *= 2
        while weight * power >= 2**30:
            power /= 2
        found[name] = math.floor(weight * power) / power
    return found


def selected_by_definition(known: Scored, audited: Scored, alpha: Fraction, procedure: str) -> list[bool]:
    weights, m = weights_by_definition(known, audited), len(audited)
    sizes = {name: sum(group == name for group, _ in known) for name in {group for group, _ in known}}
    p = []
    for name, score in audited:
        above = sum(group == name and other >= score for group, other in known) if score is not None else sizes[name]
        p.append(Fraction(1 + above, sizes[name] + 1))
    w = [Fraction(1) if score is None else weights[name] for name, score in audited]
    share = Fraction(1)
    if procedure == "storey":
        cut = min(Fraction(1, 2), Fraction(min(sizes.values()), min(sizes.values()) + 1))
        t = max(Fraction(math.ceil(cut * (n + 1)), n + 1) for n in sizes.values())
        high = sum((weight for weight, one in zip(w, p, strict=True) if one >= cut), Fraction(0))
        share = (max([*weights.values(), Fraction(1)]) + high) / (m * (1 - t))
    ratio = [one / weight for one, weight in zip(p, w, strict=True)]
    ratio = [r if score is not None else Fraction(m + 1) for r, (_, score) in zip(ratio, audited, strict=True)]
    fits = [r for r in ratio if r <= 1 and r * m * share <= alpha * sum(other <= r for other in ratio)]
    best = max(fits, default=Fraction(-1))
    return [r <= best and score is not None for r, (_, score) in zip(ratio, audited, strict=True)]


def as_table(documents: Scored, first: int) -> pa.Table:
    groups, scores = zip(*documents, strict=True)
    ids = [str(first + place) for place in range(len(documents))]
    return pa.table({"doc_id": ids, "group": list(groups), "loss": pa.array(list(scores), pa.float64())})


def drawn(rng: np.random.Generator, decimals: int | None = None) -> tuple[list[tuple[str, float]], Scored]:
    """Documents of one to four groups, which differ in size, share of members, level and scale; some without score."""
    known: list[tuple[str, float]] = []
    audited: list[tuple[str, float | None]] = []
    for name in "abcd"[: rng.integers(1, 5)]:
        level, scale, share = rng.normal() * 3, rng.uniform(0.2, 4), rng.uniform(0, 0.7)
        m = int(rng.integers(1, 30))
        raw = rng.normal(size=m) + 4.0 * (rng.random(m) < share)
        calibration = level + scale * rng.normal(size=rng.integers(1, 40))
        scores = level + scale * raw
        if decimals is not None:
            calibration, scores = calibration.round(decimals), scores.round(decimals)
        known += [(name, score) for score in calibration.tolist()]
        audited += [(name, None if rng.random() < 0.05 else score) for score in scores.tolist()]
    return known, audited


@pytest.mark.parametrize("procedure", ["bh", "storey"])
@pytest.mark.parametrize("decimals", [None, 0])
def test_weights_and_lists_are_those_of_the_definition(procedure: str, decimals: int | None) -> None:
    rng, listed, partly = np.random.default_rng(3), 0, 0
    for _ in range(60):
        known, audited = drawn(rng, decimals)
        if all(score is None for _, score in audited):
            continue
        alpha = float(rng.choice([0.1, 0.2, 0.4]))
        answer = seenset.select(
            as_table(audited, 0), as_table(known, 1000), procedure=procedure, alpha=alpha, **BOOSTED
        )
        stated = {one.group: one.weight for one in answer.summary.groups or []}
        assert stated == {name: float(w) for name, w in weights_by_definition(known, audited).items()}
        expected = selected_by_definition(known, audited, Fraction(str(alpha)), procedure)
        assert answer.selected.tolist() == expected
        listed, partly = listed + sum(expected), partly + (0 < sum(expected) < len(expected))
        plain = seenset.select(as_table(audited, 0), as_table(known, 1000), calibration="by_group", alpha=alpha)
        assert answer.p_values.tolist() == plain.p_values.tolist(), "p-values are those before the division"
        if sum(expected):
            ratios = [p / stated.get(name, 1) for p, (name, _) in zip(answer.p_values, audited, strict=True)]
            reach = (answer.summary.threshold or 0) * (1 + 1e-12)
            scored = [score is not None for _, score in audited]
            assert [r <= reach and one for r, one in zip(ratios, scored, strict=True)] == expected
            assert sum(expected) >= answer.summary.minimum_selectable or procedure == "storey"
    assert listed > 100
    assert partly > 15


# --- what weights depend on


def weights(known: Scored, audited: Scored, **asked: Any) -> dict[str, float]:
    answer = seenset.select(as_table(audited, 0), as_table(known, 1000), procedure="bh", **BOOSTED, **asked)
    return {one.group: one.weight for one in answer.summary.groups or []}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_weights_ignore_the_order_and_the_roles_of_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known, audited = drawn(rng)
    scored = [(name, score) for name, score in audited if score is not None]
    if not scored:
        return
    before = weights(known, scored)
    shuffled = [[part[place] for place in rng.permutation(len(part))] for part in (known, scored)]
    assert weights(*shuffled) == before
    swapped_known, swapped = list(known), list(scored)
    for name in {group for group, _ in scored}:  # the scores of a group fall on its documents in another order
        places = [(swapped_known, i) for i, one in enumerate(known) if one[0] == name]
        places += [(swapped, i) for i, one in enumerate(scored) if one[0] == name]
        scores = [part[i] for part, i in places]
        for (part, i), new in zip(places, rng.permutation(len(scores)), strict=True):
            part[i] = scores[new]
    assert weights(swapped_known, swapped) == before


def test_weights_ignore_the_level_and_the_scale_of_a_group() -> None:
    known, audited = drawn(np.random.default_rng(12))
    scored = [(name, score) for name, score in audited if score is not None]

    def moved(documents: Scored) -> list[tuple[str, float]]:
        return [(name, 4.0 * (score or 0.0) + 64.0 if name == "a" else score or 0.0) for name, score in documents]

    assert len(weights(known, scored)) > 1
    assert weights(moved(known), moved(scored)) == pytest.approx(weights(known, scored))


def test_weights_average_one_and_a_group_with_more_members_has_a_larger_one() -> None:
    rng = np.random.default_rng(4)
    known = [(name, float(score)) for name in "ab" for score in rng.normal(size=100)]
    audited = [("a", float(score)) for score in rng.normal(size=100) + 3.0 * (np.arange(100) < 60)]
    audited += [("b", float(score)) for score in rng.normal(size=50)]
    found = weights(known, audited)
    assert found["a"] > 3 * found["b"]
    mean = (100 * found["a"] + 50 * found["b"]) / 150
    assert 1 - 2**-29 < mean <= 1


def test_the_clean_direction_counts_low_scores_as_high_ones() -> None:
    known, audited = drawn(np.random.default_rng(8))
    tables = [
        as_table([(name, None if score is None else -score) for name, score in documents], first)
        for documents, first in ((audited, 0), (known, 1000))
    ]
    clean = seenset.select(tables[0], seen=tables[1], direction="clean", procedure="bh", alpha=0.3, **BOOSTED)
    members = seenset.select(as_table(audited, 0), as_table(known, 1000), procedure="bh", alpha=0.3, **BOOSTED)
    assert clean.summary.groups == members.summary.groups
    assert clean.selected.tolist() == members.selected.tolist()


def test_more_documents_than_are_pooled_are_drawn_without_regard_to_their_roles() -> None:
    rng, n_groups = np.random.default_rng(5), 3
    count = POOL_SIZE + 60_000
    keys, scores, code = rng.permutation(10 * count)[:count], rng.normal(size=count), rng.integers(0, 3, count)

    def pools(first: int) -> GroupPools:
        rows = np.stack([scores, code.astype(float)], axis=1)
        parts = [slice(0, first), slice(first, count)]
        made = [Sample.draw(keys[part], rows[part], 0, POOL_SIZE) for part in parts]
        return GroupPools(made[0] + made[1], np.full(n_groups, 100))

    few, many = count_high(pools(1_000)), count_high(pools(200_000))
    assert few[0].sum() == POOL_SIZE
    assert [one.tolist() for one in few] == [one.tolist() for one in many]
    assert few[1].sum() == POOL_SIZE // 5


@given(st.lists(st.integers(-5, 5), min_size=1), st.sampled_from([Fraction(1, 20), Fraction(1, 5), Fraction(4, 5)]))
def test_a_quantile_is_the_smallest_value_with_its_share(values: list[int], share: Fraction) -> None:
    assert quantile(np.sort(np.array(values, dtype=np.float64)), share) == empirical(values, share)


def test_smoothed_ranks_are_divided_by_the_same_weights_in_any_order_of_rows() -> None:
    rng, listed = np.random.default_rng(10), 0
    for _ in range(10):
        known, audited = drawn(rng)
        if all(score is None for _, score in audited):
            continue
        asked: dict[str, Any] = {"procedure": "storey", "alpha": 0.3, **BOOSTED}
        tables = as_table(audited, 0), as_table(known, 1000)
        whole, made = (seenset.select(*tables, ranks=ranks, **asked) for ranks in ("whole", "smoothed"))
        assert made.summary.groups == whole.summary.groups
        assert made.p_values.tolist() == whole.p_values.tolist()
        assert np.all(made.selected >= whole.selected), "the list contains that of whole ranks"
        assert made.smoothed_p is not None
        weights = {one.group: one.weight for one in made.summary.groups or []}
        ratio = np.array([p / weights.get(name, 1) for p, (name, _) in zip(made.smoothed_p, audited, strict=True)])
        scored = np.array([score is not None for _, score in audited])
        reach = min(1.0, (made.summary.threshold or 0) * (1 + 1e-12))
        assert made.selected.tolist() == ((ratio <= reach) & scored).tolist()
        order = rng.permutation(len(audited))
        turned = seenset.select(
            tables[0].take(order), tables[1].take(np.arange(len(known))[::-1]), ranks="smoothed", **asked
        )
        assert turned.selected.tolist() == made.selected[order].tolist()
        assert turned.summary.groups == made.summary.groups
        listed += int(made.selected.sum())
    assert listed


@pytest.mark.parametrize("procedure", ["bh", "storey"])
def test_weights_cost_no_further_reading_of_the_documents(procedure: str) -> None:
    known, audited = drawn(np.random.default_rng(14))
    scored = [(name, score) for name, score in audited if score is not None]

    def batch(documents: Scored, first: int) -> RoleScores:
        names = pa.chunked_array([pa.array([name for name, _ in documents])])
        scores = np.array([[score] for _, score in documents], dtype=np.float64)
        return RoleScores(scores, names, np.arange(first, first + len(documents)))

    audit, calibration, found = batch(scored, 0), batch(known, 1000), {}
    for boost in (None, "group"):
        asked = {"name": "a", "detectors": ["x"], "procedure": procedure, "calibration": "by_group", "boost": boost}
        one, readings = SelectionConfig.model_validate({**asked, "alpha": 0.3}), []

        def run_folds(folds: Any, readings: list[int] = readings) -> dict[int, Any]:
            readings.append(len(folds))
            halves = [RoleScores(audit.matrix[part], audit.groups[part], audit.keys[part]) for part in PARTS]
            return {index: fold.merge(*map(fold.of_shard, halves)) for index, fold in folds}

        question = SelectionInput(one, Level.of(one, None), 0, calibration, EMPTY, 3)
        (made,) = run_queries([answer(question)], run_folds)
        found[boost] = len(readings)
        assert made.m == len(scored) + 3
        assert made.counts is not None
        assert boost is None or made.counts.counts[-1] == 3, "the last rank is that of documents without a score"
    assert found["group"] == found[None] == 1


PARTS = slice(0, 5), slice(5, None)


# --- odd documents


def test_constant_scores_a_single_group_and_single_documents_are_answered() -> None:
    flat = [("a", 1.0)] * 8 + [("b", 1.0)] * 4
    answer = seenset.select(as_table(flat, 0), as_table(flat, 1000), procedure="bh", **BOOSTED)
    assert not answer.selected.any()
    assert [one.n_high for one in answer.summary.groups or []] == [0, 0]
    rng = np.random.default_rng(2)
    known = [("a", float(score)) for score in rng.normal(size=60)]
    audited = [("a", float(score)) for score in rng.normal(size=40) + 4.0 * (np.arange(40) < 20)]
    for procedure in ("bh", "storey"):
        asked: dict[str, Any] = {"procedure": procedure, "calibration": "by_group"}
        one, plain = (seenset.select(as_table(audited, 0), as_table(known, 1000), **asked, **boost) for boost in BOTH)
        assert [each.weight for each in one.summary.groups or []] == [1.0]
        assert one.selected.tolist() == plain.selected.tolist(), "one group has the weight 1"
        assert one.selected.any()
    mixed = seenset.select(as_table([*audited, ("b", 9.0)], 0), as_table([*known, ("b", 0.0)], 1000), **BOOSTED)
    assert [each.n_pooled for each in mixed.summary.groups or []] == [100, 2]


BOTH: list[dict[str, Any]] = [{"boost": "group"}, {}]


def test_documents_without_a_score_stay_hypotheses_and_enter_no_weight() -> None:
    rng = np.random.default_rng(6)
    known = [(name, float(score)) for name in "ab" for score in rng.normal(size=50)]
    audited: list[tuple[str, float | None]] = [("a", float(s)) for s in rng.normal(size=40) + 4.0]
    audited += [("b", float(score)) for score in rng.normal(size=40)]
    lost: list[tuple[str, float | None]] = [("b", math.nan), ("b", None)] * 40
    asked: dict[str, Any] = {"procedure": "bh", "alpha": 0.1, **BOOSTED}
    every, without = (
        seenset.select(as_table([*audited, *more], 0), as_table(known, 1000), **asked) for more in (lost, [])
    )
    assert every.summary.groups == without.summary.groups
    assert (every.summary.n_audit, every.summary.n_quarantined) == (160, 80)
    assert every.summary.minimum_selectable == 2 * without.summary.minimum_selectable
    assert not every.selected[80:].any()
    assert every.p_values[80:].tolist() == [1.0] * 80


def test_scores_near_the_largest_number_are_answered() -> None:
    known = [("a", 1.7e308 * (-1) ** place) for place in range(20)] + [("b", float(place)) for place in range(20)]
    answer = seenset.select(as_table(known[:30], 0), as_table(known, 1000), procedure="bh", **BOOSTED)
    assert all(one.weight > 0 for one in answer.summary.groups or [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration": "pooled"}, "boost group weighs the groups of calibration by_group, got calibration pooled"),
        ({"calibration": "conditional"}, "got calibration conditional"),
        (
            {"procedure": "by"},
            "boost group takes procedure adadetect, bh, storey or td4eval, got by: for others no guarantee",
        ),
        ({"procedure": "ptdi"}, "boost group takes procedure adadetect, bh, storey or td4eval, got ptdi"),
        ({"boost": "source"}, "boost: input should be 'group', got 'source'"),
    ],
)
def test_what_weights_are_not_proved_for_is_refused_in_one_line(changes: Mapping[str, Any], message: str) -> None:
    known, audited = drawn(np.random.default_rng(1))
    asked = {"procedure": "bh", **BOOSTED, **changes}
    assert message in user_error(seenset.select, as_table(audited, 0), as_table(known, 1000), **asked)
    document = {"path": "x.parquet", "group": "g", "scores": ["loss"]}
    question = {"name": "a", "detectors": ["loss"], **asked}
    config = {"run": "r", "corpus": {"audit": document, "unseen": document}, "selections": [question]}
    assert message in user_error(lambda: make_plan(build_config(config)))


def test_a_group_without_calibration_documents_is_refused() -> None:
    known, audited = [("a", 0.0), ("a", 1.0)], [("a", 0.5), ("z", 0.5)]
    line = user_error(seenset.select, as_table(audited, 0), as_table(known, 1000), procedure="bh", **BOOSTED)
    assert "group 'z' has audit documents and no calibration documents" in line
    nameless = as_table([("a", 0.5), ("a", 0.5)], 0).set_column(1, "group", pa.array(["a", None], pa.string()))
    line = user_error(seenset.select, nameless, as_table(known, 1000), procedure="bh", **BOOSTED)
    assert "1 of 2 audit documents have no group" in line


# --- a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of scores from elsewhere, of two groups of which one has members, with and without weights."""
    folder, rng = tmp_path_factory.mktemp("weighted"), np.random.default_rng(9)
    for role, member in (("audit", 60), ("unseen", 0)):
        scores = np.round(rng.normal(size=200) + 2.5 * (np.arange(200) < member), 6).tolist()
        write_rows(
            folder / f"{role}.jsonl",
            [{"id": f"{role}{i}", "kind": "ab"[i >= 100], "loss": score} for i, score in enumerate(scores)],
        )
    source = {role: {"path": f"{folder}/{role}.jsonl", "id": "id", "group": "kind"} for role in ("audit", "unseen")}
    ask = {"detectors": ["loss"], "procedure": "bh", "calibration": "by_group"}
    config = {
        "run": str(folder / "run"),
        "resources": {"cluster": "local"},
        "corpus": {role: {**one, "scores": ["loss"]} for role, one in source.items()},
        "selections": [
            {"name": "plain", **ask},
            {"name": "weighted", **ask, "boost": "group"},
            {"name": "smoothed", **ask, "boost": "group", "ranks": "smoothed"},
        ],
    }
    (folder / "audit.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_run_states_its_weights_and_verify_recomputes_them(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = here(capsys, "run", finished / "audit.yaml")
    plain, weighted = (
        json.loads((finished / f"run/selection/{name}/summary.json").read_text()) for name in ("plain", "weighted")
    )
    assert "groups" not in plain, "answers without weights keep their bytes"
    assert weighted["n_selected"] > plain["n_selected"]
    a, b = weighted["groups"]
    assert (a["group"], a["n_calibration"], a["n_audit"], a["n_pooled"]) == ("a", 100, 100, 200)
    assert a["n_high"] + b["n_high"] == 80, "a fifth of all"
    assert a["weight"] + b["weight"] == pytest.approx(2)
    assert "is at most alpha, for any number of documents" in weighted["promise"]
    assert "is at most alpha times the true share of nulls" in plain["promise"]
    sentence = f"divided by the weight of its group, from {b['weight']:.3g} (b) to {a['weight']:.3g} (a)."
    page = (finished / "run/report/report.html").read_text()
    for shown in (output, page):
        assert sentence in " ".join(shown.split())
        assert percent(round(a["n_high"] / 200, 3)) in shown
    assert "largest p-value selected, divided by its weight" in page
    documents = pq.read_table(finished / "run/selection/weighted/documents").to_pylist()
    ratio = {one["doc_id"]: one["p_value"] / (a, b)[int(one["doc_id"][5:]) >= 100]["weight"] for one in documents}
    listed = {one["doc_id"] for one in documents if one["selected"]}
    assert listed == {name for name, value in ratio.items() if value <= weighted["threshold"] * (1 + 1e-12)}
    assert all(abs(one["p_value"] * 101 - round(one["p_value"] * 101)) < GRID_ERROR for one in documents)
    smoothed = json.loads((finished / "run/selection/smoothed/summary.json").read_text())
    assert smoothed["groups"] == weighted["groups"]
    assert smoothed["smoothed"]["n_whole"] == weighted["n_selected"] <= smoothed["n_selected"]
    for shown in (output, page):
        assert f"select {weighted['n_selected']:,}. Under 20 other draws the list has" in " ".join(shown.split())
    rows = pq.read_table(finished / "run/selection/smoothed/selected.parquet").to_pylist()
    assert len(rows) == smoothed["n_selected"]
    for row in rows:
        group = (a, b)[int(row["doc_id"][5:]) >= 100]
        assert row["smoothed_p"] == pytest.approx((row["conformal_rank"] - 1 + (row["rank_draw"] + 0.5) / 2**64) / 101)
        assert row["smoothed_p"] / group["weight"] <= smoothed["threshold"] * (1 + 1e-12)
    bundle = finished / "bundle"
    assert ended("pack", finished / "run", bundle) == 0
    assert ended("verify", bundle) == 0


def test_plan_states_that_weights_can_shorten_the_shortest_list(finished: Path) -> None:
    config = build_config(yaml.safe_load((finished / "audit.yaml").read_text()))
    plain, weighted, _ = (one["sentence"] for one in forecast(make_plan(config), {})["selections"])
    assert weighted == (
        f"{plain} This is at equal weights of the groups: those with more high scores get larger ones, and can have "
        "shorter lists."
    )
