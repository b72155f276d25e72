"""Claims about blocks of dependent documents, their sizes, and the answers that allow for them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import seenset
from pipeline.checks.dependent_documents import GroupSizes
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.run.conclusion_text import GROUPED
from pipeline.selection.blocks import NONE, Blocks, Related, Sizes
from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.engine import Scores, Verdict, answer_all
from pipeline.selection.procedures.estimating import storey, storey_cut

sizes_of_blocks = st.lists(st.integers(1, 12), min_size=1, max_size=20)
cuts = st.sampled_from([Fraction(1, 2), Fraction(4, 5), Fraction(3, 10), Fraction(101, 201), Fraction(161, 201)])


@given(sizes_of_blocks, cuts)
def test_the_part_of_a_block_is_the_smallest_that_few_exceed_and_the_best_there_is(
    sizes: list[int], t: Fraction
) -> None:
    counts, f = Sizes.of(np.repeat(np.arange(len(sizes)), sizes)), 1 / (1 - t)
    assert (counts.documents, counts.blocks, counts.largest) == (sum(sizes), len(sizes), max(sizes))
    assert counts.pairs == sum(size**2 for size in sizes) - sum(sizes)
    part = counts.part(t)
    fits = [c for c in range(1, 13) if sum(size > c for size in sizes) <= f]
    assert part == fits[0]
    cost = [c * f + sum(max(0, size - c) for size in sizes) for c in range(1, 13)]
    assert cost[part - 1] == min(cost)
    assert counts.left_out(part) == sum(max(0, size - part) for size in sizes)
    if max(sizes) == 1:
        assert part == 1
    if len(set(sizes)) == 1:
        assert part == (sizes[0] if len(sizes) > f else 1)


@settings(max_examples=60)
@given(sizes_of_blocks, st.integers(1, 60), st.integers(0, 3), st.integers(0, 2**32))
def test_the_estimate_by_blocks_is_its_definition_and_single_documents_are_unchanged(
    sizes: list[int], n: int, quarantined: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    ranks, keys = rng.integers(1, n + 2, block.size), rng.permutation(10_000)[: block.size]
    t, below = storey_cut(Grid.uniform(n), None)
    part = Sizes.of(block).part(t)
    place = Related.of(keys).places(block, seed)
    for one in range(len(sizes)):
        assert sorted(place[block == one].tolist()) == list(range(sizes[one])), "each position of a block once"
    kept = place < part
    nulls = (part + int((kept & (ranks > below)).sum()) + quarantined) / (1 - t) + int((~kept).sum())
    counts = RankCounts.of(ranks, n, place, part).with_quarantined(quarantined)
    assert storey(counts) == nulls / (block.size + quarantined)
    single = np.zeros(block.size, dtype=np.int64)
    plain = RankCounts.of(ranks, n).with_quarantined(quarantined)
    assert storey(RankCounts.of(ranks, n, single, 1).with_quarantined(quarantined)) == storey(plain)
    cut = rng.integers(0, block.size + 1)
    shards = [RankCounts.of(ranks[some], n, place[some], part) for some in (slice(0, cut), slice(cut, None))]
    assert storey((shards[0] + shards[1]).with_quarantined(quarantined)) == storey(counts), "shards do not matter"


def test_the_estimate_of_a_sample_is_that_of_the_documents_whose_blocks_are_known() -> None:
    rng = np.random.default_rng(0)
    ranks, place = rng.integers(1, 101, 400), np.tile([0, 1, 2, NONE], 100)
    t, below = storey_cut(Grid.uniform(99), None)
    known = place != NONE
    sample = RankCounts.of(ranks[known], 99, place[known], 2)
    whole = RankCounts.of(ranks, 99, place, 2).with_quarantined(7)
    above = int((ranks[known & (place < 2)] > below).sum())
    assert storey(sample) == ((2 + above) / (1 - t) + 100) / 300
    assert storey(whole) == (storey(sample) * 400 + 7 / (1 - t)) / 407


def related(names: str, families: list[int] | None = None, first: int = 0) -> Related:
    """Documents whose groups are letters; "." is none."""
    group = np.array([NONE if name == "." else ord(name) for name in names], dtype=np.int64)
    family = None if families is None else np.unique(families, return_inverse=True)[1]
    return Related.of(np.arange(first, first + len(names)), family, group)


def same(blocks: np.ndarray) -> list[list[int]]:
    return sorted(np.flatnonzero(blocks == one).tolist() for one in np.unique(blocks))


def test_a_family_and_a_group_of_one_role_join_their_documents_and_one_another() -> None:
    found = Blocks.of(related("aab..", [0, 1, 2, 2, 3]), related("cc.d", [0, 1, 1, 2]), False)
    assert same(found.audited) == [[0, 1], [2, 3], [4]]
    assert same(found.calibrating) == [[0, 1, 2], [3]]
    dependence = found.dependence()
    assert dependence is not None
    assert (dependence.n_calibration, dependence.n_blocks, dependence.factor) == (4, 2, Fraction(5, 3))
    assert (dependence.n_families, dependence.family_factor) == (3, Fraction(5, 4))
    assert (dependence.audited.counts, dependence.families.counts) == ({1: 1, 2: 2}, {1: 3, 2: 1})
    assert Blocks.of(related("ab.."), related("cd.."), False).dependence() is None


def test_a_group_of_both_roles_is_a_block_of_the_audit_or_a_stratum_of_calibration() -> None:
    """A group with 1 in 10 audited documents: up to 3 in 10 that calibrate are independent, more are one block."""
    audited = related("a.........")
    for share, joined in ((1, False), (3, False), (4, True)):
        found = Blocks.of(audited, related("a" * share + "." * (10 - share)), False)
        assert found.audited.max() == 9, "one audited document"
        assert (found.dependence() is not None) is joined
        if joined:
            dependence = found.dependence()
            assert dependence is not None
            assert dependence.factor == Fraction(11, 10 - share + 1 + 1)
    one_in_each = Blocks.of(related("abcdefghij" * 3), related("a" * 50 + "." * 50), False)
    assert same(one_in_each.audited)[0] == [0, 10, 20], "whatever calibration holds of it"
    assert np.unique(one_in_each.calibrating).size == 51
    by_group = Blocks.of(related("abab", [0, 0, 1, 2]), related("aabbcc"), True)
    assert same(by_group.audited) == [[0, 1], [2], [3]], "only the family, across groups"
    assert same(by_group.calibrating) == [[0], [1], [2], [3], [4, 5]], "c has calibration documents alone"
    dependence = by_group.dependence()
    assert dependence is not None
    assert dependence.factor == 1, "c calibrates nothing"


def test_one_document_of_a_family_and_of_a_group_that_hardly_calibrates_teaches() -> None:
    audited, known = related("aaabbbbbbccc", [0, 0, *range(1, 11)]), related("aaac" + "d" * 8, first=50)
    for by_group in (False, True):
        blocks = Blocks.of(audited, known, by_group)
        joined = [block for block in same(blocks.learning) if len(block) > 1]
        assert joined == [[0, 1], [3, 4, 5, 6, 7, 8]], "b has no known document, a and c have some"
        assert Blocks.of(known, audited, by_group).learning.max() + 1 == 5, "d"


@pytest.mark.parametrize("learn", ["split", "pool"])
def test_groups_with_calibration_documents_all_teach_a_learnt_score(learn: str) -> None:
    columns, roles = documents()
    keys = np.random.default_rng(3).integers(-(2**62), 2**62, 800)
    strata = pa.array([f"language {i % 4}" for i in range(800)])
    asked: dict[str, Any] = {"procedure": "adadetect", "learn": learn, "detectors": DETECTORS}
    made, plain = (verdict(Scores(columns, keys, group), roles, **asked) for group in (strata, None))
    assert np.array_equal(made.p, plain.p)


def test_by_group_the_factor_is_the_largest_of_the_groups_that_are_audited() -> None:
    known = related("aaaaabbbbb", [0, 0, 0, 1, 2, 3, 4, 5, 6, 7])
    dependence = Blocks.of(related("ab"), known, True).dependence()
    assert dependence is not None
    assert dependence.factor == Fraction(6, 4)
    pooled = Blocks.of(related("ab"), known, False).dependence()
    assert pooled is not None
    assert pooled.factor == Fraction(11, 9)


def test_positions_in_blocks_depend_on_ids_and_seed_alone() -> None:
    rng = np.random.default_rng(1)
    keys, block = rng.integers(-(2**63), 2**63, 300), rng.integers(0, 40, 300)
    places = Related.of(keys).places(block, 3)
    order = rng.permutation(300)
    assert np.array_equal(Related.of(keys[order]).places(block[order], 3), places[order])
    assert not np.array_equal(Related.of(keys).places(block, 4), places)


# --- answers


DETECTORS = ["d0", "d1"]


def documents(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[Any, np.ndarray]]:
    """400 unseen and 100 seen documents and 300 audited ones, of which the first 200 are nulls in groups of 20."""
    rng = np.random.default_rng(seed)
    roles = {"unseen": np.arange(400), "seen": np.arange(400, 500), "audit": np.arange(500, 800)}
    block = np.arange(200) // 20
    columns = {}
    for name, shift in zip(DETECTORS, (3.0, 2.5), strict=True):
        values = rng.normal(size=800)
        values[500:700] = rng.normal(size=10)[block]
        values[700:] += shift
        values[400:500] += shift
        columns[name] = values
    return columns, roles


def registered_names(audited: list[str | None]) -> pa.Array:
    return pa.array([*[None] * 500, *audited], pa.string())


GROUPS = registered_names([*(f"g{i // 20}" for i in range(200)), *[None] * 100])
FAMILY = np.concatenate([np.arange(500), 500 + np.arange(200) // 20, np.arange(600, 700)])


def verdict(scores: Scores, roles: dict[Any, np.ndarray], quarantined: int = 0, **asked: Any) -> Verdict:
    config = {"name": "a", "detectors": DETECTORS[:1], "alpha": 0.1, **asked}
    (made,) = answer_all([SelectionConfig(**config)], scores, roles, quarantined, 5)
    return made


STOREY = {
    "storey": {"procedure": "storey"},
    "lambda": {"procedure": "storey", "lambda": 0.6},
    "conditional": {"procedure": "storey", "calibration": "conditional"},
    "adadetect": {"procedure": "adadetect", "step_up": "storey", "detectors": DETECTORS},
    "td4eval": {"procedure": "td4eval", "step_up": "storey", "reconformal": True, "detectors": DETECTORS},
}


@pytest.mark.parametrize("asked", STOREY.values(), ids=STOREY)
@pytest.mark.parametrize("kind", ["group", "family"])
@pytest.mark.parametrize("quarantined", [0, 5])
def test_every_procedure_with_the_estimate_of_storey_counts_a_part_of_each_block(
    asked: dict[str, Any], kind: str, quarantined: int
) -> None:
    columns, roles = documents()
    keys = np.random.default_rng(3).integers(-(2**62), 2**62, 800)
    scores = Scores(columns, keys, GROUPS if kind == "group" else None, FAMILY if kind == "family" else None)
    made, plain = (
        verdict(scores, roles, quarantined, **asked),
        verdict(Scores(columns, keys), roles, quarantined, **asked),
    )
    assert np.array_equal(made.p, plain.p) or asked["procedure"] == "adadetect"  # it learns from one of each block
    counts, lambda_ = made.answer.counts, Fraction(str(asked["lambda"])) if "lambda" in asked else None
    assert counts is not None
    assert counts.kept is not None
    t, below = storey_cut(counts.grid, lambda_)
    assert counts.kept.part == (20 if 1 / (1 - t) < 10 else 1)
    values = counts.grid.values[below] if below < counts.grid.size else 1.0
    block = FAMILY[500:] - FAMILY[500:].min()
    place = Related.of(keys[500:]).places(np.unique(block, return_inverse=True)[1], 5)
    kept = place < counts.kept.part
    above = int((kept & (made.p >= values)).sum())
    expected = ((counts.kept.part + above + quarantined) / (1 - t) + int((~kept).sum())) / (300 + quarantined)
    assert made.answer.factor == pytest.approx(float(expected))
    assert plain.answer.factor != made.answer.factor
    assert made.answer.nulls is None, "it allows for dependent documents"
    assert made.answer.details["kept_of_a_block"] == counts.kept.part
    assert "kept_of_a_block" not in plain.answer.details


@pytest.mark.parametrize(
    "procedure", ["bky", "quantile", "right_boundary", "ptdi", "kernel", "known_members", "ptdi_known_members"]
)
def test_other_estimates_are_unchanged_and_the_strict_answer_allows_for_blocks(procedure: str) -> None:
    columns, roles = documents()
    keys = np.arange(800)
    made, plain = (verdict(Scores(columns, keys, groups), roles, procedure=procedure) for groups in (GROUPS, None))
    assert np.array_equal(made.selected, plain.selected)
    by_blocks = verdict(Scores(columns, keys, GROUPS), roles, procedure="storey")
    assert made.answer.strict.n_selected == by_blocks.answer.strict.n_selected
    assert made.answer.nulls is not None
    t, nulls = made.answer.nulls
    assert nulls == pytest.approx(300 * (by_blocks.answer.factor or 0))
    assert made.answer.dependence is not None
    assert made.answer.dependence.audited.excess(t, nulls) > 0.05
    assert plain.answer.nulls is None or plain.answer.dependence is None


@pytest.mark.parametrize(
    "asked",
    [
        {"procedure": "bh"},
        {"procedure": "by"},
        {"procedure": "ebh"},
        {"procedure": "bound"},
        {"procedure": "td4eval", "detectors": DETECTORS},
    ],
)
def test_lists_without_an_estimate_do_not_depend_on_blocks(asked: dict[str, Any]) -> None:
    columns, roles = documents()
    made, plain = (verdict(Scores(columns, np.arange(800), groups), roles, **asked) for groups in (GROUPS, None))
    assert np.array_equal(made.selected, plain.selected)
    assert made.answer.threshold == plain.answer.threshold
    assert made.answer.nulls is None
    assert made.answer.dependence is not None


def test_clean_documents_are_sought_with_blocks_of_the_seen_ones() -> None:
    columns, roles = documents()
    swapped = {"audit": roles["audit"], "seen": roles["unseen"], "unseen": roles["seen"]}
    negative = {name: -values for name, values in columns.items()}
    members, clean = (
        verdict(Scores(values, np.arange(800), GROUPS), who, procedure="storey", direction=direction)
        for values, who, direction in ((columns, roles, "members"), (negative, swapped, "clean"))
    )
    assert np.array_equal(members.selected, clean.selected)
    assert members.answer.factor == clean.answer.factor


def calibrating(size: int) -> pa.Array:
    return pa.array([*(f"u{i // size}" for i in range(400)), *[None] * 400], pa.string())


@pytest.mark.parametrize("asked", [{"procedure": "bh"}, *STOREY.values(), {"procedure": "ptdi"}])
def test_one_document_of_each_calibration_group_calibrates_if_that_is_asked(asked: dict[str, Any]) -> None:
    columns, roles = documents()
    scores = Scores(columns, np.arange(800), calibrating(5))
    every, one = (verdict(scores, roles, **asked, calibrate=kind) for kind in ("all", "one_per_block"))
    assert every.calibrating.all()
    assert one.calibrating.sum() == 80
    assert Counter((np.flatnonzero(one.calibrating) // 5).tolist()) == dict.fromkeys(range(80), 1)
    halved = 2 if asked["procedure"] == "td4eval" else 1
    assert (every.answer.n_calibration, one.answer.n_calibration) == (400 // halved, 80 // halved)
    assert every.answer.dependence is not None
    assert every.answer.dependence.factor == Fraction(401, 81)
    assert one.answer.dependence is None
    alone = {**roles, "unseen": roles["unseen"][one.calibrating]}
    assert np.array_equal(one.p, verdict(Scores(columns, np.arange(800)), alone, **asked).p)


def test_by_group_one_document_of_each_family_calibrates_also_across_two_groups() -> None:
    columns, roles = documents()
    language = pa.array(["en", "de"] * 400, pa.string())
    family = np.concatenate([np.arange(400) // 4, np.arange(400, 800)])  # of two groups each
    scores = Scores(columns, np.arange(800), language, family)
    made = verdict(scores, roles, procedure="bh", calibration="by_group", calibrate="one_per_block")
    assert made.answer.n_calibration == 100
    assert made.answer.dependence is None
    every = verdict(scores, roles, procedure="bh", calibration="by_group")
    assert every.answer.dependence is not None
    assert every.answer.dependence.factor == Fraction(201, 101)


def test_documents_that_were_not_compared_enter_no_estimate_by_blocks() -> None:
    columns, roles = documents()
    family = FAMILY.copy()
    family[600:750] = NONE
    keys = np.arange(800)
    made = verdict(Scores(columns, keys, GROUPS, family), roles, procedure="storey")
    counts = made.answer.counts
    assert counts is not None
    assert counts.kept is not None
    assert (counts.kept.compared, counts.kept.scored) == (150, 300)
    assert made.answer.dependence is not None
    assert not made.answer.dependence.whole
    alone = verdict(Scores(columns, keys, None, np.where(family == NONE, NONE, keys)), roles, procedure="storey")
    assert alone.answer.dependence is None, "a sample without groups in which no document repeats another"


# --- in Python


def table(scores: np.ndarray, group: list[str | None] | None = None) -> pa.Table:
    columns: dict[str, Any] = {"doc_id": [f"{scores.size}-{i}" for i in range(scores.size)], "score": scores}
    return pa.table(columns | ({} if group is None else {"group": pa.array(group, pa.string())}))


def test_groups_of_a_table_count_whether_calibration_is_by_group_or_not() -> None:
    columns, roles = documents()
    values = columns["d0"]
    audited, unseen = values[roles["audit"]], values[roles["unseen"]]
    groups = GROUPS.to_pylist()[500:]
    given = seenset.select(table(audited, groups), unseen=table(unseen))
    without = seenset.select(table(audited), unseen=table(unseen))
    assert without.summary.diagnostics.groups is None
    assert without.summary.bound is not None
    assert given.summary.factor != without.summary.factor
    check = given.summary.diagnostics.groups
    assert check is not None
    assert check.outcome == "inconclusive"
    assert (
        check.sentence.startswith("The audit documents are grouped, ")
        or "audited documents are grouped" in check.sentence
    )
    assert "counts at most 20 documents of each block" in check.sentence
    assert (given.summary.bound, given.summary.bound_withheld) == (None, GROUPED)
    with pytest.warns(seenset.UnsupportedWarning):
        adaptive = seenset.select(table(audited, groups), unseen=table(unseen), procedure="ptdi")
    check = adaptive.summary.diagnostics.groups
    assert check is not None
    assert check.n_selected_by_storey == given.summary.n_selected
    bh = seenset.select(table(audited, groups), unseen=table(unseen), procedure="bh")
    assert check.n_selected_by_bh == bh.summary.n_selected
    assert bh.summary.diagnostics.groups is not None
    assert "The guarantees of bh and storey hold with groups among the audited documents; bh selects " in check.sentence


def test_grouped_unseen_documents_are_not_supported_in_python_and_one_of_each_is() -> None:
    columns, roles = documents()
    values = columns["d0"]
    known = table(values[roles["unseen"]], [f"u{i // 5}" for i in range(400)])
    audited = table(values[roles["audit"]])
    with pytest.warns(seenset.UnsupportedWarning, match="too small by a factor of up to 4.95"):
        every = seenset.select(audited, unseen=known, procedure="bh")
    assert every.summary.conclusion == "contradicted"
    one = seenset.select(audited, unseen=known, procedure="bh", calibrate="one_per_block")
    assert one.summary.conclusion == "inconclusive", "words were not compared"
    assert one.summary.n_calibration == 80
    assert one.summary.bound is not None
    with pytest.raises(UserError, match="calibrate"):
        seenset.select(audited, unseen=known, calibrate="some")  # type: ignore[arg-type]


def test_names_of_groups_are_counted_as_those_of_a_run() -> None:
    names = ["a", "b", None, "a", None, "a"]
    sizes = GroupSizes.of_names(pa.array(names, pa.string()))
    assert (sizes.n_documents, sizes.n_grouped, sorted(sizes.sizes.values())) == (6, 4, [1, 3])


def test_numbers_may_name_groups_also_as_floats_which_are_no_scores() -> None:
    """pandas turns whole numbers beside missing ones into floats."""
    columns, roles = documents()
    values, names = columns["d0"], GROUPS.to_pylist()[500:]
    numbers = pa.array([None if name is None else float(name[1:]) for name in names], pa.float64())
    unseen = table(values[roles["unseen"]])
    numbered = table(values[roles["audit"]]).append_column("group", numbers)
    made, named = (seenset.select(one, unseen=unseen) for one in (numbered, table(values[roles["audit"]], names)))
    assert made.summary.detectors == ["score"]
    assert np.array_equal(made.selected, named.selected)
    assert made.summary.factor == named.summary.factor


@pytest.mark.parametrize(
    ("calibrating", "procedure", "step"),
    [
        (1, "ptdi", "Select by procedure bh or storey, "),
        (1, "bound", "Select by procedure bh or storey, "),
        (5, "bh", "Select with calibrate: one_per_block, which calibrates on one unseen document of each block."),
        (5, "storey", "Select with calibrate: one_per_block, which calibrates on one unseen document of each block."),
        (
            5,
            "ptdi",
            "Select with calibrate: one_per_block, which calibrates on one unseen document of each block, and ",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::seenset.UnsupportedWarning")
def test_the_next_step_is_one_that_is_supported(calibrating: int, procedure: str, step: str) -> None:
    columns, roles = documents()
    values = columns["d0"]
    audited = table(values[roles["audit"]], GROUPS.to_pylist()[500:])
    unseen = table(values[roles["unseen"]], [f"u{i // calibrating}" for i in range(400)])
    made = seenset.select(audited, unseen=unseen, procedure=procedure)
    assert made.summary.conclusion == "contradicted"
    assert (made.summary.next or "").startswith(step)
    taken = {"calibrate": "one_per_block"} if "one_per_block" in step else {}
    for other in ("bh", "storey") if procedure in ("ptdi", "bound") else (procedure,):
        repaired = seenset.select(audited, unseen=unseen, procedure=other, **taken)
        assert repaired.summary.conclusion == "inconclusive", "words were not compared"
