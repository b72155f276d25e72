"""Claims about weights of groups (`boost: group`) of scores that combine several detectors."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_combined import WAYS, table
from test_group_weights import selected_by_definition, weights_by_definition

import seenset
from pipeline.config.corpus import Role
from pipeline.config.selection import SelectionConfig
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.selection.conformal import halves
from pipeline.selection.engine import Scores, Verdict, answer_all
from pipeline.selection.folds import RoleScores
from tests.helpers.commands import ended, here, user_error

BOOSTED = {"calibration": "by_group", "boost": "group", "alpha": 0.2}
ALL_WAYS = {**WAYS, "learnt from known members": {"procedure": "adadetect"}}
SEED = 5


def audit_of(rng: np.random.Generator, known_members: bool) -> tuple[Scores, dict[Role, np.ndarray]]:
    """Two groups of other levels and scales, in another mix in each role; the first has most of the members."""
    sizes: dict[Role, tuple[tuple[int, int], int]] = {"audit": ((60, 40), 30), "unseen": ((50, 90), 0)}
    if known_members:
        sizes["seen"] = (20, 10), 20
    parts = [table(rng, role, size, members, 0) for role, (size, members) in sizes.items()]
    rows = pa.concat_tables(parts)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    roles = {role: np.arange(*ends[place : place + 2]) for place, role in enumerate(sizes)}
    columns = {name: rows[name].to_numpy() for name in ("d", "e")}
    return Scores(columns, rng.permutation(10**6)[: len(rows)], rows["group"].combine_chunks()), roles


def answered(scores: Scores, roles: dict[Role, np.ndarray], **asked: Any) -> Verdict:
    selection = SelectionConfig.model_validate({"name": "a", "detectors": ["d", "e"], **BOOSTED, **asked})
    (made,) = answer_all([selection], scores, roles, 0, SEED)
    return made


OTHER: dict[Role, Role] = {"audit": "audit", "unseen": "seen", "seen": "unseen"}


def as_column(made: Verdict, scores: Scores, places: np.ndarray) -> list[tuple[str, float]]:
    """Group and combined score of the documents at some positions."""
    assert scores.groups is not None
    assert made.answer.fused is not None
    matrix = np.stack([scores.columns[name][places] for name in ("d", "e")], axis=1)
    groups = scores.groups.take(pa.array(places))
    combined = made.answer.fused(RoleScores(matrix, pa.chunked_array([groups]), scores.keys[places]))
    return list(zip(groups.to_pylist(), combined.tolist(), strict=True))


def that_rank(scores: Scores, roles: dict[Role, np.ndarray], way: str) -> np.ndarray:
    """The calibration documents that do not teach: all, or of each group the half with the larger hashes."""
    known = roles["unseen"]
    if way in ("learnt from the pool", "learnt from known members"):
        return known
    group = scores.group_numbers[known]
    return np.sort(np.concatenate([k[~halves(scores.keys[k], SEED)] for k in (known[group == g] for g in set(group))]))


@pytest.mark.parametrize("direction", ["members", "clean"])
@pytest.mark.parametrize("step_up", ["bh", "storey"])
@pytest.mark.parametrize("way", ALL_WAYS)
def test_weights_and_lists_are_those_of_the_combined_score_as_one_column(
    way: str, step_up: str, direction: str
) -> None:
    rng, listed = np.random.default_rng([len(way), len(step_up)]), 0
    for _ in range(3):
        scores, roles = audit_of(rng, way == "learnt from known members")
        asked: dict[str, Any] = {"step_up": step_up, **ALL_WAYS[way]}
        if direction == "clean":  # the same question of negated scores and swapped roles
            scores = Scores({name: -column for name, column in scores.columns.items()}, scores.keys, scores.groups)
            swapped = {OTHER[role]: places for role, places in roles.items()}
            made = answered(scores, swapped, **asked, direction="clean")
        else:
            made = answered(scores, roles, **asked)
        known, audited = (as_column(made, scores, p) for p in (that_rank(scores, roles, way), roles["audit"]))
        stated = {one.group: one.weight for one in made.answer.groups or []}
        assert stated == {name: float(w) for name, w in weights_by_definition(known, audited).items()}
        assert [one.n_calibration for one in made.answer.groups or []] == [
            sum(group == name for group, _ in known) for name in ("g0", "g1")
        ]
        assert made.selected.tolist() == selected_by_definition(known, audited, Fraction(1, 5), step_up)
        listed += int(made.selected[:30].sum())
        smoothed = answered(scores, roles, ranks="smoothed", **asked) if direction == "members" else made
        assert smoothed.answer.groups == made.answer.groups
        assert np.all(smoothed.selected >= made.selected)
    assert listed > 10


@pytest.mark.parametrize("way", ALL_WAYS)
def test_score_and_weights_do_not_read_which_documents_of_a_group_are_audited(way: str) -> None:
    """Rows of each group fall on its audited and ranking calibration documents in another order."""
    rng = np.random.default_rng(8)
    scores, roles = audit_of(rng, way == "learnt from known members")
    before = answered(scores, roles, **ALL_WAYS[way])
    pooled = np.concatenate([roles["audit"], that_rank(scores, roles, way)])
    columns = {name: column.copy() for name, column in scores.columns.items()}
    keys, group = scores.keys.copy(), scores.group_numbers[pooled]
    for one in (0, 1):
        places = pooled[group == one]
        order = rng.permutation(places)
        for column in columns.values():
            column[places] = column[order]
    after = answered(Scores(columns, keys, scores.groups), roles, **ALL_WAYS[way])
    assert after.answer.groups == before.answer.groups
    assert after.answer.weights == before.answer.weights
    assert after.p.tolist() != before.p.tolist()


def test_a_run_of_combined_scores_states_its_weights_and_verify_recomputes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    for role, members in (("audit", 30), ("unseen", 0)):
        pq.write_table(table(rng, role, (60, 40), members, 0), tmp_path / f"{role}.parquet")
    source = {
        role: {"path": str(tmp_path / f"{role}.parquet"), "id": "doc_id", "group": "group", "scores": ["d", "e"]}
        for role in ("audit", "unseen")
    }
    selections: list[dict[str, Any]] = [
        {"name": "pool", "learn": "pool", "procedure": "adadetect"},
        {"name": "half", "learn": "split", "procedure": "adadetect", "step_up": "storey", "ranks": "smoothed"},
        {"name": "fused", "procedure": "td4eval", "reconformal": True, "step_up": "storey"},
    ]
    config = {
        "run": str(tmp_path / "run"),
        "resources": {"cluster": "local"},
        "corpus": source,
        "selections": [{**one, **BOOSTED, "detectors": ["d", "e"]} for one in selections],
    }
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(config))
    output, _ = here(capsys, "run", tmp_path / "audit.yaml")
    page = (tmp_path / "run/report/report.html").read_text()
    for name in ("pool", "half", "fused"):
        summary = json.loads((tmp_path / f"run/selection/{name}/summary.json").read_text())
        last, first = sorted(summary["groups"], key=lambda one: one["weight"])
        assert name != "pool" or first["group"] == "g0", "the group with the members"
        assert "at most alpha times" not in summary["promise"]
        extent = " to ".join(f"{one['weight']:.3g} ({one['group']})" for one in (last, first))
        for shown in (output, page):
            assert f"divided by the weight of its group, from {extent}." in " ".join(shown.split())
    assert ended("pack", tmp_path / "run", tmp_path / "bundle") == 0
    assert ended("verify", tmp_path / "bundle") == 0
    planned, _ = here(capsys, "plan", tmp_path / "audit.yaml")
    assert " ".join(planned.split()).count("This is at equal weights of the groups") >= 3


def test_weights_of_fused_p_values_that_are_not_ranked_again_are_refused_in_one_line() -> None:
    rng = np.random.default_rng(1)
    audited, known = table(rng, "a", (9, 9), 0, 0), table(rng, "u", (9, 9), 0, 0)
    line = user_error(seenset.select, audited, unseen=known, procedure="td4eval", **BOOSTED)
    assert "by_group with reconformal: true, got by_group" in line
    document = {"path": "x.parquet", "group": "g", "scores": ["d", "e"]}
    question = {"name": "a", "detectors": ["d", "e"], "procedure": "adadetect", "boost": "group"}
    config = {"run": "r", "corpus": {"audit": document, "unseen": document}, "selections": [question]}
    line = user_error(lambda: make_plan(build_config(config)))
    assert "boost group weighs the groups of calibration by_group, got calibration pooled" in line
