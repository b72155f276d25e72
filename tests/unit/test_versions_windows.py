"""Runs of consecutive rows of a shuffled file as documents with versions: exact draws, and runs over files."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.small_model import WORDS
from pipeline.config.corpus import CorpusConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import read_shard, text_problem
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.options import COLUMNS, window_orders
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import ended, here
from tests.helpers.marked_runs import versions_audit, write_items


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6])
def test_the_published_order_is_uniform_among_versions_and_they_do_not_depend_on_it(window: int) -> None:
    seen: dict[tuple[str, ...], Counter[int]] = {}
    for order in itertools.permutations(WORDS[:window]):
        orders = window_orders(order, 8, text_problem)
        texts, index = orders
        assert texts[index] == "\n".join(order)
        assert all(sorted(text.split("\n")) == sorted(order) for text in texts)
        seen.setdefault(tuple(texts), Counter())[index] += 1
    k = math.factorial(min(COLUMNS, window))
    assert all(counts == Counter(range(k)) for counts in seen.values())


def test_equal_rows_keep_the_published_order_uniform_among_the_distinct_ones() -> None:
    texts = ["a", "a", "b", "c", "b"]
    seen: dict[tuple[str, ...], Counter[int]] = {}
    for order in itertools.permutations(texts):
        orders = window_orders(order, 0, text_problem)
        seen.setdefault(tuple(orders[0]), Counter())[orders[1]] += 1
    for versions, counts in seen.items():
        assert len(set(versions)) == len(versions)
        assert set(counts) == set(range(len(versions)))
        assert len(set(counts.values())) == 1


def test_every_row_moves_in_a_window_that_four_divides_but_those_of_fixed_columns() -> None:
    rows = [f"row {number}" for number in range(20)]
    orders = window_orders(rows, 40, text_problem)
    texts = [text.split("\n") for text in orders[0]]
    assert len(texts) == 24
    assert {text.index("row 0") for text in texts} != {0}
    assert max(sum(a == b for a, b in zip(text, rows, strict=True)) for text in texts if text != rows) == 10


@pytest.mark.parametrize("rows", [["same", "same"], ["alone"], ["a", "a\na", "b"]])
def test_rows_of_one_order_are_left_out(rows: list[str]) -> None:
    left = window_orders(rows, 0, text_problem)
    assert isinstance(left, Unreadable)
    assert (left.reason, left.cause) == ("not_permutable", "equal rows")


def settings(folder: Path, model: Path, path: Path, **source: Any) -> dict[str, Any]:
    source = {"path": str(path), "text": "item", "versions": {"permute": "order", "window": 5}, **source}
    resources = {"cluster": "local", "shard_documents": 3, "shard_bytes": 200}
    return versions_audit(folder, model, source, resources=resources)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_run_permutes_rows_in_whichever_format_and_however_shards_are_cut(
    tmp_path: Path, tiny_model_folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = np.random.default_rng(0).choice(20**4, 103, replace=False)  # no two rows are equal
    rows = [{"item": " ".join(WORDS[code // 20**place % 20] for place in range(4))} for code in codes.tolist()]
    rows[10:15] = [rows[10]] * 5
    rows[22] = {"item": " "}
    given = {**settings(tmp_path, tiny_model_folder, write_items(tmp_path, suffix, rows)), "error_budget": 0.1}
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(given))
    assert "a document is 5 rows of about" in here(capsys, "plan", tmp_path / "audit.yaml")[0]
    assert ended("run", tmp_path / "audit.yaml") == 0
    (receipt,) = read_receipts(Store(given["run"]), "score")
    assert (receipt.n_in, receipt.n_scored, receipt.reasons) == (21, 19, {"not_permutable": 1, "empty": 1})
    scored = pq.read_table(Path(given["run"]) / receipt.data)
    assert [len(one["scores"]) for one in scored["versions"].to_pylist()] == [24] * 18 + [6]
    assert scored["doc_id"][1].as_py().endswith(f"items.{suffix}#5")
    assert ended("verdict", given["run"]) == 0
    assert ended("pack", given["run"], tmp_path / "bundle") == 0
    assert ended("verify", tmp_path / "bundle") == 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_limit_counts_documents_and_not_rows(tmp_path: Path, tiny_model_folder: Path, suffix: str) -> None:
    path = write_items(tmp_path, suffix, [{"item": word} for word in WORDS[:33]])
    plan = make_plan(build_config(settings(tmp_path, tiny_model_folder, path)), limit=3)
    (shard,) = plan.shards
    documents = list(read_shard(shard))
    assert [document.row for document in documents] == [0, 5, 10]
    assert plan.documents("audit")[0] == 3
    assert documents[1].text == "\n".join(WORDS[5:10])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"versions": {"permute": "order"}}, "permute: order needs window"),
        ({"versions": {"permute": "choices", "window": 4}}, "window goes with permute: order"),
        ({"versions": {"window": 4}}, "window goes with permute: order"),
        ({"versions": {"permute": "order", "window": 1}}, "window"),
        ({"versions": {"permute": "order", "window": 4, "template": "{a}{b}"}}, "leave out template"),
        ({"versions": {"permute": "order", "window": 4, "kinds": "a", "forms": "b"}}, "leave out kinds, forms"),
        ({"id": "name"}, "a document is a run of rows: leave out id and group"),
    ],
)
def test_settings_that_make_no_windows_are_refused_in_one_line(source: dict[str, Any], message: str) -> None:
    versions = {"permute": "order", "window": 4}
    with pytest.raises(UserError, match=message):
        build(CorpusConfig, {"audit": {"path": "a.jsonl", "text": "item", "versions": versions, **source}})


def test_a_folder_of_texts_has_no_order_of_rows(tmp_path: Path, tiny_model_folder: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("red blue")
    given = settings(tmp_path, tiny_model_folder, tmp_path / "texts", text="text")
    with pytest.raises(UserError, match=r"corpus\.audit\.versions: the rows of a file are permuted, and txt files"):
        make_plan(build_config(given))


def test_plan_names_the_window_that_fits(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_items(tmp_path, "jsonl", [{"item": " ".join(WORDS[:20])} for _ in range(40)])
    given = {**settings(tmp_path, tiny_model_folder, path), "max_tokens": 100}
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(given))
    assert "so that window: 3 fits" in " ".join(here(capsys, "plan", tmp_path / "audit.yaml")[0].split())
