"""The negative control: false alarms over splits of unseen documents are counted, and come as often as is allowed."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from examples.trials import run
from examples.trials.negative_control import VERDICT, count_alarms, exact_size
from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import Scores
from pipeline.selection.shares import clopper_pearson
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence, write_jsonl

BH = [SelectionConfig(name="bh", detectors=["loss"], procedure="bh", alpha=0.1, confidence=0.9)]


def finite_scores(documents: int, seed: int = 0) -> Scores:
    values = np.random.default_rng(seed).normal(size=documents)
    return Scores({"loss": values}, np.arange(documents, dtype=np.int64))


@pytest.mark.parametrize("documents", [100, 101, 600, 5000])
def test_the_exact_size_is_the_largest_at_which_alpha_is_a_ratio_of_ranks(documents: int) -> None:
    audited = exact_size(documents, Fraction(1, 100))  # each with 100 others, but one
    assert 101 * audited - 1 <= documents < 101 * (audited + 1) - 1


def test_alarms_are_those_of_bh_written_out() -> None:
    scores, alpha, splits = finite_scores(98), 0.1, 200
    expected = 0
    for number in range(splits):
        order = np.random.Generator(np.random.PCG64([3, number])).permutation(
            98
        )  # as `seed=3` below, which none shifts
        audited, unseen = (scores.columns["loss"][part] for part in (order[:9], order[9:]))
        p = np.sort([(1 + (unseen >= one).sum()) / 90 for one in audited])
        expected += bool((p <= alpha * np.arange(1, 10) / 9 + 1e-12).any())
    row, verdict = count_alarms(scores, BH, 9, 89, splits, seed=3)
    assert (row.name, row.lists, row.splits) == ("bh", expected, splits)
    assert (verdict.name, verdict.verdicts) == (VERDICT, None), "nine documents are too few for the permutation test"


def test_the_permutation_test_shows_no_more_than_chance_and_refuses_a_large_split() -> None:
    *_, verdict = count_alarms(finite_scores(60), BH, 30, 30, 100)
    assert clopper_pearson(verdict.verdicts, 100, 0.0005)[0] <= 0.01
    assert "a split takes 60 documents, got 59" in user_error(count_alarms, finite_scores(59), BH, 30, 30, 1)


def test_a_users_own_unseen_documents_are_scored_once_and_split(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [sentence(i) for i in range(120)])
    monkeypatch.chdir(tmp_path)
    call = ["negative_control", "--unseen", own, "--model", str(tiny_model_folder), "--splits", "5"]
    assert run.main(call) == 0
    shown = capsys.readouterr().out
    assert "5 splits of 120 unseen documents: 60 audited, 60 calibrate" in shown
    assert "5 splits of 120 unseen documents: 1 audited, 99 calibrate" in shown
    assert "Not run, as unseen documents do not suffice: ptdi_known_members, known_members, ktd, versions." in shown
    stored = tmp_path / run.WORK / "negative_control-own" / "scores.parquet"
    before = stored.stat().st_mtime_ns
    assert run.main(call) == 0
    assert stored.stat().st_mtime_ns == before
    assert run.main([*call[:-1], "0"]) == 2
    assert "--splits must be at least 1, got 0" in capsys.readouterr().err
    write_jsonl(tmp_path / "own.jsonl", [sentence(i) for i in range(60)])
    assert run.main(call) == 2
    assert "takes at least 100 unseen documents, got 60" in capsys.readouterr().err
