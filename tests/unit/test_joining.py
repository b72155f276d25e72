"""Claims about documents side by side: every one is met once, whatever stands where, with few of them in memory."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compare.finished_runs import JoinedRuns, refuse_different
from pipeline.report.contents import common_folder
from pipeline.store import external_sort
from tests.helpers.commands import user_error


def joined(runs: Sequence[Sequence[tuple[str, int]]], chunk: int = 7) -> JoinedRuns:
    """Runs of documents (id, key of the text); key 0 stands for a document in quarantine."""
    rows = JoinedRuns(len(runs))
    for place, documents in enumerate(runs):
        entries = [
            {
                "doc_id": name,
                "p_value": 0.5 if key else 1.0,
                "selected": False,
                "quarantined": key == 0,
                "text_key": key,
            }
            for name, key in documents
        ]
        for start in range(0, len(entries), chunk):
            rows.add(place, pa.Table.from_pylist(entries[start : start + chunk]))
    return rows


documents = st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 2)), max_size=12)


@settings(max_examples=80)
@given(st.lists(documents, min_size=2, max_size=3), st.sampled_from([3, external_sort.ROWS]))
def test_runs_share_the_documents_whose_id_and_text_are_the_same(
    runs: list[list[tuple[str, int]]], in_memory: int
) -> None:
    """Also where few rows stand in memory: most are sorted on disk, and an id is repeated beyond the end of a piece."""
    # of an id, a run scores one row at most: the others repeat it
    runs = [[(name, key) for i, (name, key) in enumerate(run) if not key or (name, 1) not in run[:i]] for run in runs]
    runs = [[(n, k) for i, (n, k) in enumerate(run) if not k or n not in {m for m, o in run[:i] if o}] for run in runs]
    keys = [dict(sorted(run, key=lambda row: row[1])) for run in runs]  # of each id that of the row that was scored
    common = set.intersection(*map(set, keys))
    shared = {name for name in common if len({one[name] for one in keys if one[name]}) <= 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "ROWS", in_memory)
        patch.setattr(external_sort, "_BATCH", min(2, in_memory))
        rows = joined(runs)
        parts, counts = list(rows.parts()), rows.count()
        rows.close()
    met = [name for part in parts for name in part.shared[0]["doc_id"].to_pylist()]
    assert met == sorted(shared)
    for index in range(len(keys)):
        assert all(part.shared[index]["doc_id"].equals(part.shared[0]["doc_id"]) for part in parts)
        assert all(set(part.shared[index]["run"].to_pylist()) <= {index} for part in parts)
    assert counts.n_shared == len(shared)
    assert counts.n_other_text == len(common) - len(shared)
    assert counts.n_documents == [len(one) for one in keys]
    assert counts.n_repeated == [len(run) - len(one) for run, one in zip(runs, keys, strict=True)]


def test_few_of_the_joined_rows_stand_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_sort, "ROWS", 64)
    monkeypatch.setattr(external_sort, "_BATCH", 16)
    sizes = [len(part.shared[0]) for part in joined([[(f"d{i:04}", 1) for i in range(900)]] * 2).parts()]
    assert (sum(sizes), max(sizes) < 700) == (900, True)


def test_runs_of_different_documents_are_refused_with_the_number_that_they_share() -> None:
    counts = joined([[("a", 1), ("b", 1), ("c", 1)], [("a", 1), ("b", 2)]]).count()
    part = "audited 3 and 2 documents and share 1; 1 more have the same id and another"
    assert part in user_error(refuse_different, counts, False)
    refuse_different(counts, True)
    part = "share 0: nothing can be compared; give both corpora an id column"
    assert part in user_error(refuse_different, joined([[("a", 1)], [("b", 1)]]).count(), True)


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
