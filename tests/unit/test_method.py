"""The method on one page finds what a run finds: examples/method.py on the inputs of examples/method_data.py."""

import ast
import json
import runpy
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import seenset
from examples import method, method_data
from tests.helpers.commands import ended


@pytest.mark.floating_point
def test_the_method_on_one_page_lists_the_same_ids_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert method_data.main([str(tmp_path)]) == 0
    assert ended("run", tmp_path / "audit.yaml") == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["method.py", str(tmp_path)])
    runpy.run_path(method.__file__, run_name="__main__")
    lists = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    trained = set(json.loads((tmp_path / "trained.json").read_text()))
    for name, selection in seenset.open_run(tmp_path / "run").selections.items():
        count, _, *ids = lists.pop(name).split()
        assert int(count) == len(ids)
        assert sorted(ids) == sorted(selection.table()["doc_id"].to_pylist())
        assert len(trained.intersection(ids)) > len(trained) / 2
    assert lists == {}


@pytest.mark.parametrize("n", [1, 19, 100, 199, 200, 251])
def test_ranks_and_selections_of_tied_scores_are_those_of_seenset(n: int) -> None:
    rng, longest = np.random.default_rng(n), 0
    for values in (3, 40, 1000):
        for m in (1, 60, 200):
            unseen, audited = (rng.integers(0, values, size).astype(float) for size in (n, m))
            audited[: m // 2] += values * 0.8
            ranks = method.conformal_ranks(audited, unseen)
            for alpha in ("0.1", "0.3"):
                shares = {"bh": Fraction(1), "storey": method.storey_share(ranks, n)}
                for procedure, pi0 in shares.items():
                    answer = seenset.select(audited, unseen, procedure=procedure, alpha=float(alpha))
                    last = method.last_selected_rank(ranks, n, Fraction(alpha), pi0)
                    assert (answer.p_values == ranks / (n + 1)).all()
                    assert (answer.selected == (ranks <= last)).all()
                    longest = max(longest, int(answer.selected.sum()))
    assert longest > 0 or n == 1


def test_the_method_takes_at_most_80_lines_on_numpy_and_transformers_alone() -> None:
    text = Path(method.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert imported - sys.stdlib_module_names == {"numpy", "transformers"}
