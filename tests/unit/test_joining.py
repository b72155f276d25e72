"""Claims about documents side by side: every one is met once, whatever stands where, with few of them in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compare.finished_runs import common_folder
from pipeline.compare.joining import count_shared, refuse_different, side_by_side
from pipeline.errors import UserError
from pipeline.store import pieces
from pipeline.store.pieces import SortedRows

SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("p_value", pa.float64()),
        ("selected", pa.bool_()),
        ("scored", pa.bool_()),
        ("text_key", pa.int64()),
    ]
)


def rows_of(documents: Sequence[tuple[str, int]], chunk: int = 7) -> SortedRows:
    """Rows of (id, key of the text); key 0 stands for a document in quarantine."""
    rows = SortedRows(SCHEMA, ["doc_id"])
    entries = [
        {"doc_id": name, "p_value": 0.5 if key else 1.0, "selected": False, "scored": key != 0, "text_key": key}
        for name, key in documents
    ]
    for start in range(0, len(entries), chunk):
        rows.add(pa.Table.from_pylist(entries[start : start + chunk], schema=SCHEMA))
    return rows


documents = st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 2)), max_size=12)


def of_id(documents: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The key of each id: that of the row that was scored."""
    keys: dict[str, int] = {}
    for name, key in documents:
        keys[name] = max(keys.get(name, 0), key)
    return keys


@settings(max_examples=50)
@given(st.lists(documents, min_size=2, max_size=3))
def test_runs_share_the_documents_whose_id_and_text_are_the_same(runs: list[list[tuple[str, int]]]) -> None:
    # of an id, a run scores one row at most: the others repeat it
    runs = [[(name, key) for i, (name, key) in enumerate(run) if not key or (name, 1) not in run[:i]] for run in runs]
    runs = [[(n, k) for i, (n, k) in enumerate(run) if not k or n not in {m for m, o in run[:i] if o}] for run in runs]
    keys = [of_id(run) for run in runs]
    common = set.intersection(*map(set, keys))
    shared = {name for name in common if len({one[name] for one in keys if one[name]}) <= 1}
    parts = list(side_by_side([rows_of(run) for run in runs]))
    met = [name for part in parts for name in part.shared[0]["doc_id"].to_pylist()]
    assert met == sorted(shared)
    for index, one in enumerate(keys):
        assert all(part.shared[index]["doc_id"].equals(part.shared[0]["doc_id"]) for part in parts)
        alone = [name for part in parts for name in part.only[index]["doc_id"].to_pylist()]
        assert sorted(alone) == sorted(set(one) - shared)
    counts = count_shared([rows_of(run) for run in runs])
    assert counts.n_shared == len(shared)
    assert counts.n_other_text == len(common) - len(shared)
    assert counts.n_documents == [len(one) for one in keys]
    assert counts.n_repeated == [len(run) - len(one) for run, one in zip(runs, keys, strict=True)]


def test_rows_that_are_sorted_on_disk_are_joined_as_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs on disk, and an id that is repeated beyond the end of a piece."""
    monkeypatch.setattr(pieces, "ROWS", 64)
    monkeypatch.setattr(pieces, "_BATCH", 16)
    rng = random.Random(5)
    first = [(f"d{i:04}", 1) for i in range(900)] + [("d0500", 0)] * 100
    second = [(f"d{i:04}", 1) for i in range(300, 1200)] + [("d1199", 0)] * 50
    for one in (first, second):
        rng.shuffle(one)
    runs = [rows_of(first), rows_of(second)]
    parts = list(side_by_side(runs))
    assert len(parts) > 10
    assert max(len(table) for part in parts for table in part.shared) < 700
    assert [name for part in parts for name in part.shared[1]["doc_id"].to_pylist()] == [
        f"d{i:04}" for i in range(300, 900)
    ]
    assert all(all(part.shared[0]["scored"].to_pylist()) for part in parts)
    counts = count_shared(runs)
    assert (counts.n_documents, counts.n_repeated, counts.n_shared) == ([900, 900], [100, 50], 600)


def test_runs_of_different_documents_are_refused_with_the_number_that_they_share() -> None:
    counts = count_shared([rows_of([("a", 1), ("b", 1), ("c", 1)]), rows_of([("a", 1), ("b", 2)])])
    with pytest.raises(UserError, match=r"audited 3 and 2 documents and share 1; 1 more have the same id and another"):
        refuse_different(counts, False)
    refuse_different(counts, True)
    none = count_shared([rows_of([("a", 1)]), rows_of([("b", 1)])])
    with pytest.raises(UserError, match="share 0: nothing can be compared; give both corpora an id column"):
        refuse_different(none, True)


@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (["/data/a/x.jsonl"], "/data/a/"),
        (["/data/a/x.jsonl", "/data/a/b/y.jsonl"], "/data/a/"),
        (["/data/a/x.jsonl", "/data/ab/y.jsonl"], "/data/"),
        (["x.jsonl"], ""),
        (["s3://bucket/a/x.parquet", "s3://bucket/b/x.parquet"], "s3://bucket/"),
        ([], ""),
    ],
)
def test_the_folder_of_a_corpus_is_that_of_all_its_files(names: list[str], folder: str) -> None:
    assert common_folder(names) == folder
