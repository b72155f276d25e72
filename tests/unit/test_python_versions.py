"""Versions of documents in Python: which documents were learnt, without unseen documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import ended
from made_up import sentence

import seenset
from seenset.versions import Versions

DOCS = Path(__file__).parents[2] / "docs"

COUNT, EACH = 60, 10


def versions_of(published: np.ndarray) -> Versions:
    texts = tuple(tuple(f"{sentence(i)} version {j}" for j in range(EACH)) for i in range(len(published)))
    return Versions(tuple(f"doc-{i}" for i in range(len(published))), texts, tuple(published.tolist()))


def test_documents_whose_published_version_stands_out_are_selected_and_the_collection_shows() -> None:
    rng = np.random.default_rng(11)
    published = rng.integers(EACH, size=COUNT)
    scores = rng.normal(size=(COUNT, EACH))
    scores[np.arange(30), published[:30]] += 6.0
    answer = seenset.select_versions(versions_of(published), scores.ravel(), alpha=0.1)
    assert answer.selected[:30].sum() >= 28
    assert answer.selected[30:].sum() <= 5
    assert answer.p_collection == 1 / 10_000
    assert answer.documents["rank"].to_pylist()[:3] == [1, 1, 1]
    assert repr(answer).startswith(f"VersionsAnswer({answer.selected.sum()} of 60 documents selected, on average")
    assert "finite-sample" in repr(answer)


def test_of_documents_that_were_not_learnt_most_lists_are_empty_and_the_published_index_alone_decides() -> None:
    rng = np.random.default_rng(12)
    scores = rng.normal(size=(COUNT, EACH)).ravel()
    filled, p_values = 0, []
    for _ in range(100):
        answer = seenset.select_versions(versions_of(rng.integers(EACH, size=COUNT)), scores, alpha=0.1)
        filled += bool(answer.selected.any())
        p_values.append(answer.p_collection)
    assert filled <= 10 + 3 * 3  # three standard deviations of a binomial share of .1
    assert abs(np.mean(p_values) - 0.5) < 3 * np.sqrt(1 / 12 / 100)


def test_a_model_scores_all_versions_and_documents_without_a_score_are_left_out(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    texts = [[f"{sentence(i)} version {j}" for j in range(EACH)] for i in range(12)]
    texts[3][7] = ""
    texts[5][0] = " ".join(sentence(k) for k in range(60))
    table = {"id": [f"doc-{i}" for i in range(12)], "versions": texts, "index": pa.array([1] * 12, pa.int32())}
    pq.write_table(pa.table(table), tmp_path / "versions.parquet")
    versions = seenset.read_versions(tmp_path / "versions.parquet")
    answer = seenset.audit_versions(str(tiny_model_folder), versions, "loss", max_tokens=64)
    assert set(answer.left_out) == {"doc-3", "doc-5"}
    assert answer.left_out["doc-5"] == "a version reaches max_tokens 64"
    assert len(answer.documents) == 10
    scores = seenset.score(str(tiny_model_folder), [text for one in texts for text in one], ["loss"], max_tokens=64)
    kept = np.array(scores["loss"].to_pylist(), dtype=float).reshape(12, EACH)[[0, 1, 2, 4, *range(6, 12)]]
    assert answer.documents["rank"].to_pylist() == [int((row > row[1]).sum()) + 1 for row in kept]
    same = seenset.audit_versions(
        str(tiny_model_folder), versions, "loss", reference=str(tiny_model_folder), max_tokens=64
    )
    assert not same.selected.any(), "a model has learnt nothing beyond itself"


def test_natural_preference_for_a_form_is_removed_where_the_file_states_the_forms(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    count, sites = 400, 5
    forms = rng.integers(2, size=(count, EACH, sites)).astype(np.uint8)
    forms[:, :, 0] = np.arange(EACH) % 2
    texts = [[f"document {i} {j}" for j in range(EACH)] for i in range(count)]
    published = rng.integers(EACH, size=count)
    scores = 4.0 * forms.sum(axis=2) + rng.normal(size=(count, EACH))
    scores[np.arange(160), published[:160]] += 4.0
    table = {
        "id": [str(i) for i in range(count)],
        "versions": texts,
        "index": published,
        "kinds": [[f"kind {k}" for k in range(sites)]] * count,
        "forms": [[bytes(version) for version in one] for one in forms],
    }
    pq.write_table(pa.table(table), tmp_path / "with.parquet")
    pq.write_table(pa.table({key: table[key] for key in ("id", "versions", "index")}), tmp_path / "without.parquet")
    selected = {
        name: int(
            seenset.select_versions(seenset.read_versions(tmp_path / f"{name}.parquet"), scores.ravel()).selected.sum()
        )
        for name in ("with", "without")
    }
    assert selected["with"] > selected["without"] + 50


def test_marked_documents_are_read_scored_and_judged(tiny_model_folder: Path, tmp_path: Path) -> None:
    """From `seenset mark` to the answer, on text that people wrote."""
    texts = [
        text
        for page in sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])
        for text in page.read_text("utf-8").split("\n## ")
        if len(text) > 300
    ]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    marking = ("--out", tmp_path / "marked", "--versions", 8, "--seed", 5)
    assert ended("mark", tmp_path / "pages.jsonl", *marking) == 0
    versions = seenset.read_versions(tmp_path / "marked/private/versions.parquet")
    public = [json.loads(line)["text"] for line in (tmp_path / "marked/public/pages.jsonl").read_text().splitlines()]
    assert len(public) == len(texts)
    published = {one[index] for one, index in zip(versions.texts, versions.published, strict=True)}
    assert published <= set(public)
    assert versions.forms is not None
    answer = seenset.audit_versions(str(tiny_model_folder), versions, "loss", max_tokens=2048)
    assert len(answer.documents) + len(answer.left_out) == len(versions.ids) > 20
    assert set(answer.documents["versions"].to_pylist()) == {8}
    assert answer.p_collection > 0.001, "a random model has learnt nothing"


@pytest.mark.parametrize(
    ("texts", "published", "problem"),
    [
        ((("a", "b"),), (2,), "document 'x' has index 2, outside its 2 versions"),
        ((("a", "a"),), (0,), "document 'x' has two equal versions"),
        ((("a",),), (0,), "document 'x' has 1 version; it needs 2 or more"),
    ],
)
def test_versions_that_cannot_be_compared_are_refused(
    texts: tuple[tuple[str, ...], ...], published: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(seenset.UserError, match=f"^versions: {problem}$"):
        Versions(("x",), texts, published)


def test_no_document_is_an_error(tiny_model_folder: Path) -> None:
    with pytest.raises(seenset.UserError, match=r"^versions: there is no document; seenset mark leaves out those"):
        seenset.audit_versions(str(tiny_model_folder), Versions((), (), ()))


def test_a_public_file_is_no_file_of_versions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "public.parquet")
    with pytest.raises(seenset.UserError, match=r"has no column versions .* its public files hold no versions$"):
        seenset.read_versions(tmp_path / "public.parquet")
    with pytest.raises(seenset.UserError, match=r"^scores must be one a version, got shape \(3,\) for 20 versions$"):
        seenset.select_versions(versions_of(np.zeros(2, dtype=int)), [1.0, 2.0, 3.0])
    with pytest.raises(seenset.UserError, match=r"^alpha must be in \(0, 1\), got 1.5$"):
        seenset.select_versions(versions_of(np.zeros(2, dtype=int)), np.zeros(20), alpha=1.5)
