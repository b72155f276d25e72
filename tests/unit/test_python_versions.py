"""Versions of documents in Python: which documents were learnt, without unseen documents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import seenset
from seenset.versions import Versions
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence

COUNT, EACH = 60, 10


def draw_versions(published: np.ndarray) -> Versions:
    texts = tuple(tuple(f"{sentence(i)} version {j}" for j in range(EACH)) for i in range(len(published)))
    return Versions(tuple(f"doc-{i}" for i in range(len(published))), texts, tuple(published.tolist()))


def test_documents_whose_published_version_stands_out_are_selected_and_shown() -> None:
    rng = np.random.default_rng(11)
    published = rng.integers(EACH, size=COUNT)
    scores = rng.normal(size=(COUNT, EACH))
    scores[np.arange(30), published[:30]] += 6.0
    answer = seenset.select_versions(draw_versions(published), scores.ravel(), alpha=0.1)
    assert answer.selected[:30].sum() >= 28
    assert answer.selected[30:].sum() <= 5
    assert answer.p_collection == 1 / 10_000
    assert answer.documents["rank"].to_pylist()[:3] == [1, 1, 1]
    assert repr(answer).startswith(f"VersionsAnswer({answer.selected.sum()} of 60 documents selected, on average")
    assert "finite-sample" in repr(answer)


def test_a_model_scores_all_versions_and_leaves_out_odd_documents(tiny_model_folder: Path, tmp_path: Path) -> None:
    texts = [[f"{sentence(i)} version {j}" for j in range(EACH)] for i in range(12)]
    published = [number * 7 % EACH for number in range(12)]
    texts[3][7] = ""
    texts[5][0] = " ".join(sentence(k) for k in range(60))
    table = {"id": [f"doc-{i}" for i in range(12)], "versions": texts, "index": pa.array(published, pa.int32())}
    pq.write_table(pa.table(table), tmp_path / "versions.parquet")
    versions = seenset.read_versions(tmp_path / "versions.parquet")
    answer = seenset.audit_versions(str(tiny_model_folder), versions, "loss", max_tokens=64)
    assert set(answer.left_out) == {"doc-3", "doc-5"}
    assert answer.left_out["doc-5"] == "a version reaches max_tokens 64"
    assert len(answer.documents) == 10
    scores = seenset.score(str(tiny_model_folder), [text for one in texts for text in one], ["loss"], max_tokens=64)
    table = np.array(scores["loss"].to_pylist(), dtype=float).reshape(12, EACH)
    ranks = [int((table[i] > table[i][published[i]]).sum()) + 1 for i in (0, 1, 2, 4, *range(6, 12))]
    assert answer.documents["rank"].to_pylist() == ranks
    same = seenset.audit_versions(
        str(tiny_model_folder), versions, "loss", reference=str(tiny_model_folder), max_tokens=64
    )
    assert not same.selected.any(), "a model has learnt nothing beyond itself"


def test_versions_that_cannot_be_compared_are_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    for texts, published, problem in (
        (("a", "b"), 2, "document 'x' has index 2, outside its 2 versions"),
        (("a", "a"), 0, "document 'x' has two equal versions"),
        (("a",), 0, "document 'x' has 1 version; it needs 2 or more"),
    ):
        assert user_error(Versions, ("x",), (texts,), (published,)) == f"versions: {problem}"
    error = user_error(seenset.audit_versions, str(tiny_model_folder), Versions((), (), ()))
    assert error.startswith("versions: there is no document; seenset mark leaves out those")
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "public.parquet")
    error = user_error(seenset.read_versions, tmp_path / "public.parquet")
    assert "has no column versions " in error
    assert error.endswith(" its public files hold no versions")
    two = draw_versions(np.zeros(2, dtype=int))
    error = user_error(seenset.select_versions, two, [1.0, 2.0, 3.0])
    assert error == "scores must be one per version, got shape (3,) for 20 versions"
    assert user_error(seenset.select_versions, two, np.zeros(20), alpha=1.5) == "alpha must be in (0, 1), got 1.5"
