"""Claims about scores that combine several detectors by group: their ranks, what they ignore, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import seenset
from tests.helpers.commands import user_error

WAYS: dict[str, dict[str, Any]] = {
    "learnt from a half": {"procedure": "adadetect", "learn": "split"},
    "learnt from the pool": {"procedure": "adadetect", "learn": "pool"},
    "fused": {"procedure": "td4eval", "reconformal": True},
}


def table(rng: np.random.Generator, role: str, sizes: tuple[int, int], members: int, first: int) -> pa.Table:
    """Documents of two groups of other levels and scales; the first `members` of the first group are members."""
    group = np.repeat([0, 1], sizes)
    rows = (rng.normal(size=(group.size, 1)) + rng.normal(size=(group.size, 2))) / np.sqrt(2)
    rows[:members] += [3.5, 2.5]
    rows = rows * (1 + group[:, None]) + 20 * group[:, None]
    ids = [f"{role}{first + place}" for place in range(group.size)]
    names = [f"g{one}" for one in group.tolist()]
    return pa.table({"doc_id": ids, "group": names, "d": rows[:, 0], "e": rows[:, 1]})


def two_roles(seed: int = 1) -> tuple[pa.Table, pa.Table]:
    rng = np.random.default_rng(seed)
    return table(rng, "a", (60, 40), 30, 0), table(rng, "u", (50, 90), 0, 0)


@pytest.mark.parametrize("step_up", ["bh", "storey"])
@pytest.mark.parametrize("way", WAYS)
def test_documents_are_ranked_within_their_group_by_the_combined_score(way: str, step_up: str) -> None:
    audited, known = two_roles()
    asked = {"unseen": known, "calibration": "by_group", "alpha": 0.2, "step_up": step_up, **WAYS[way]}
    answer, smoothed = (seenset.select(audited, ranks=ranks, **asked) for ranks in ("whole", "smoothed"))
    held_out = {"g0": 50, "g1": 90} if WAYS[way].get("learn") == "pool" else {"g0": 25, "g1": 45}
    assert answer.summary.n_calibration == sum(held_out.values())
    for name, n in held_out.items():
        here = np.array([one == name for one in audited["group"].to_pylist()])
        places = answer.p_values[here] * (n + 1)
        assert places == pytest.approx(np.rint(places)), "multiples of 1 / (n_g + 1)"
    assert answer.selected[:30].mean() > 0.5, "groups of other levels are not taken for members"
    assert "Within each of the 2 groups" in answer.summary.assumption
    limit = 0.2 / (100 * (answer.summary.factor or 1))
    p = np.sort(answer.p_values)
    held = np.flatnonzero(p <= limit * np.arange(1, 101) * (1 + 1e-12))
    assert answer.selected.tolist() == (answer.p_values <= p[held[-1]]).tolist()
    assert np.array_equal(smoothed.p_values, answer.p_values)
    assert np.all(smoothed.selected >= answer.selected)
    assert smoothed.smoothed_p is not None
    p = np.sort(smoothed.smoothed_p)
    held = np.flatnonzero(p <= limit * np.arange(1, 101))
    assert smoothed.selected.tolist() == (smoothed.smoothed_p <= p[held[-1]]).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_rows_and_the_level_of_a_group_change_no_answer(way: str) -> None:
    audited, known = two_roles()
    asked = {"calibration": "by_group", "alpha": 0.2, "ranks": "smoothed", **WAYS[way]}
    answer = seenset.select(audited, unseen=known, **asked)
    order = np.random.default_rng(2).permutation(100)
    turned = seenset.select(audited.take(order), unseen=known.take(np.arange(140)[::-1]), **asked)
    assert turned.selected.tolist() == answer.selected[order].tolist()

    def moved(documents: pa.Table) -> pa.Table:
        second = np.array(documents["group"].to_pylist()) == "g1"
        values = np.where(second, 4.0 * documents["d"].to_numpy() + 64.0, documents["d"].to_numpy())
        return documents.set_column(2, "d", pa.array(values))

    again = seenset.select(moved(audited), unseen=moved(known), **asked)
    assert again.p_values.tolist() == answer.p_values.tolist()


def test_a_swap_within_a_group_leaves_the_score_learnt_from_the_pool_as_it_is() -> None:
    """A null document and a calibration document of its group trade scores: the weights of the detectors stay."""
    audited, known = two_roles()
    asked: dict[str, Any] = {"calibration": "by_group", "alpha": 0.2, **WAYS["learnt from the pool"]}
    before = seenset.select(audited, unseen=known, **asked)
    assert before.summary.weights is not None
    audit, calibration = audited.to_pylist(), known.to_pylist()

    def weights(place: int) -> list[float] | None:
        one, other = [dict(row) for row in audit], [dict(row) for row in calibration]
        for column in ("d", "e"):
            one[99][column], other[place][column] = calibration[place][column], audit[99][column]
        tables = pa.Table.from_pylist(one), pa.Table.from_pylist(other)
        return seenset.select(tables[0], unseen=tables[1], **asked).summary.weights

    assert all(weights(place) == before.summary.weights for place in range(50, 58)), "both are of the second group"
    assert weights(0) != before.summary.weights, "of another group: the levels of both change"


def test_known_members_teach_a_score_that_is_ranked_by_group() -> None:
    audited, known = two_roles()
    seen = table(np.random.default_rng(5), "s", (30, 10), 30, 0)
    answer = seenset.select(audited, unseen=known, seen=seen, calibration="by_group", alpha=0.2, procedure="adadetect")
    assert answer.summary.n_calibration == 140, "no half is spent"
    assert answer.selected[:30].mean() > 0.5


def test_what_is_not_proved_or_has_no_documents_is_refused_in_one_line() -> None:
    audited, known = two_roles()
    plain = {"procedure": "td4eval", "calibration": "by_group"}
    assert "by_group with reconformal: true, got by_group" in user_error(seenset.select, audited, unseen=known, **plain)
    conditional = {"procedure": "adadetect", "calibration": "conditional"}
    line = user_error(seenset.select, audited, unseen=known, **conditional)
    assert "takes calibration pooled or by_group, got conditional" in line
    few = pa.table({"doc_id": list("vwxyz"), "group": list("abcde"), "d": np.arange(5.0), "e": np.arange(5.0)})
    line = user_error(seenset.select, few, unseen=few, calibration="by_group", **WAYS["fused"])
    assert "td4eval needs at least 2 calibration documents in some group" in line
    outside = pa.concat_tables([audited, few.slice(0, 1)])
    for way in WAYS.values():
        line = user_error(seenset.select, outside, unseen=known, calibration="by_group", **way)
        assert "group 'a' has audit documents and no calibration documents" in line
