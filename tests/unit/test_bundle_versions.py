"""Bundles of documents with versions: ranks, lists and verdict follow from scores, and indices from the commitment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bundle_runs import forged, in_first
from commands import ended
from marked_runs import write_audit, write_texts

from pipeline.bundle.container import RefutedError
from pipeline.bundle.verify import verify_bundle

SELECTIONS = [
    {"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": 0.5},
    {"name": "both", "detectors": ["loss", "min_k"], "procedure": "versions", "alpha": 0.5},
    {"name": "ranks", "detectors": ["min_k"], "procedure": "bh", "alpha": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A folder with 24 marked documents, a run over 20 of them with its verdict, and its bundle."""
    folder = tmp_path_factory.mktemp("marked")
    write_texts(folder / "texts.jsonl", 24)
    assert ended("mark", folder / "texts.jsonl", "--out", folder / "marked", "--versions", 6, "--seed", 3) == 0
    audit = write_audit(folder, "run", tiny_model_folder, detectors=["loss", "min_k"], selections=SELECTIONS)
    assert ended("run", audit, "--limit", 20) == 0
    assert ended("verdict", folder / "runs/run") == 0
    assert ended("pack", folder / "runs/run", folder / "bundle") == 0
    return folder


def test_a_bundle_holds_and_its_indices_lead_to_its_commitment_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commitment = folder / "marked/commitment.json"
    root = json.loads(commitment.read_text())["root"]
    assert ended("verify", folder / "bundle", "--commitment", commitment) == 0
    lines = capsys.readouterr().out.splitlines()
    led = f"commitment: 20 documents with their indices lead to root {root}"
    assert f"holds    {led} of 24 committed documents" in lines
    assert sum(line.startswith("holds    selection ") for line in lines) == 9
    assert any(line.startswith("holds    verdict: it follows from the scores") for line in lines)
    assert ended("verify", folder / "bundle") == 0
    assert f"stated   {led}; verify --commitment" in capsys.readouterr().out
    (tmp_path / "other.json").write_text(commitment.read_text().replace(root, "0" * 64))
    assert ended("verify", folder / "bundle", "--commitment", tmp_path / "other.json") == 5
    assert "refuted  commitment: " in capsys.readouterr().out
    assert ended("verify", folder / "bundle", "--commitment", folder / "run.yaml") == 2
    assert "is no commitment.json of seenset mark" in capsys.readouterr().err


def flipped(value: bytes) -> bytes:
    return bytes([value[0] ^ 1]) + value[1:]


def of_versions(**values: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda verdict: {**verdict, "versions": {**verdict["versions"], **values}}


DOCUMENTS = "documents.parquet"
VERDICT, ONE = "verdict.json", "commitment: 1 documents with their indices lead to root"
FORGERIES: dict[str, tuple[dict[str, Any], str]] = {
    "score": ({DOCUMENTS: in_first("versions", lambda v: {**v, "scores": [9.0] * 12})}, "verdict: versions."),
    "index": ({DOCUMENTS: in_first("versions", lambda v: {**v, "published": (v["published"] + 1) % 6})}, ONE),
    "version": ({DOCUMENTS: in_first("commitments", flipped)}, ONE),
    "proof": ({DOCUMENTS: in_first("proof", lambda v: [flipped(v[0]), *v[1:]])}, ONE),
    "node": ({DOCUMENTS: in_first("proof", lambda v: [v[0][:-1] + b"0", *v[1:]])}, ONE),
    "no salt": ({DOCUMENTS: in_first("commitments", lambda _: None)}, "commitment: 1 of 20 documents have no salt"),
    "rank": ({"answers/list.parquet": in_first("p_value", lambda _: 0.01)}, "selection list: p_value of document"),
    "list": ({"answers/ranks.parquet": in_first("selected", lambda v: not v)}, "selection ranks: selected of document"),
    "collection p": ({VERDICT: of_versions(p_value=0.00011)}, "verdict: versions.p_value is stated as 0.00011"),
    "e-value": ({VERDICT: of_versions(e_value=1e9)}, "verdict: versions.e_value"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_value_is_refuted_and_named_under_correct_digests(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, words = FORGERIES[name]
    (tmp_path / "forged").write_bytes(forged((folder / "bundle").read_bytes(), changes))
    assert ended("verify", tmp_path / "forged", "--commitment", folder / "marked/commitment.json") == 5
    assert f"refuted  {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("versions", lambda v: {**v, "scores": v["scores"][1:]}, "scores of a document are not those of its versions"),
        ("versions", lambda v: {**v, "forms": [v["forms"][0][1:], *v["forms"][1:]]}, "sites of a document are not"),
        ("versions", lambda v: {**v, "published": 6}, "index outside its versions"),
        ("commitments", lambda v: v[:-1], "commitments of a document are not those"),
        ("versions", lambda _: None, "column versions holds a value"),
    ],
)
def test_values_of_another_shape_are_refused_in_one_line(
    folder: Path, column: str, change: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(RefutedError, match=words):
        verify_bundle(forged((folder / "bundle").read_bytes(), {DOCUMENTS: in_first(column, change)}), "b")


def test_texts_that_are_packed_have_the_digests_of_the_commitment(folder: Path, tmp_path: Path) -> None:
    assert ended("pack", folder / "runs/run", tmp_path / "b", "--texts") == 0
    data = (tmp_path / "b").read_bytes()
    held = [one.about for one in verify_bundle(data, "b").findings if one.outcome == "holds"]
    assert "texts" in held
    other = forged(data, {DOCUMENTS: in_first("texts", lambda texts: ["Another text.", *texts[1:]])})
    (refuted,) = [one for one in verify_bundle(other, "b").findings if one.outcome == "refuted"]
    assert (refuted.about, "(1 do)" in refuted.sentence) == ("texts", True)


def test_a_file_without_salts_is_verified_without_a_commitment(
    folder: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(folder / "marked/private/versions.parquet").drop_columns(["salt"])
    (tmp_path / "marked/private").mkdir(parents=True)
    pq.write_table(table, tmp_path / "marked/private/versions.parquet")
    assert ended("run", write_audit(tmp_path, "run", tiny_model_folder)) == 0
    assert ended("pack", tmp_path / "runs/run", tmp_path / "b") == 0
    capsys.readouterr()
    assert ended("verify", tmp_path / "b") == 0
    assert "stated   commitment: 24 of 24 documents have no salt" in capsys.readouterr().out
    assert ended("verify", tmp_path / "b", "--commitment", folder / "marked/commitment.json") == 5


def test_a_private_file_that_is_not_the_one_that_was_scored_is_not_packed(
    folder: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "marked", tmp_path / "marked")
    assert ended("run", write_audit(tmp_path, "run", tiny_model_folder)) == 0
    path = tmp_path / "marked/private/versions.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array([1, 0, *range(2, 24)])), path)
    capsys.readouterr()
    assert ended("pack", tmp_path / "runs/run", tmp_path / "b") == 2
    assert "does not hold the versions that were scored: put the file back" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
