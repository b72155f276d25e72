"""A labelled source gives seen and unseen documents, each row once, and labels that cannot be read are named."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.corpus import Role
from pipeline.corpus.documents import Document, fetch_texts, read_shard
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.plan.description import build_config, build_evaluation
from pipeline.run.plan import make_plan
from tests.helpers.commands import user_error

N = 240


def text(row: int) -> str:
    return f"Document number {row} " + "says a little more " * (row % 7)


def evaluation(path: Any, **settings: Any) -> dict[str, Any]:
    labelled = {"path": str(path), "label": "label", **settings.pop("labelled", {})}
    resources = {"shard_bytes": settings.pop("shard_bytes", 1500)}
    corpus = {"labelled": labelled}
    return {"run": "r", "model": {"path": "m"}, "corpus": corpus, "resources": resources, **settings}


def shards_of(path: Any, limit: int | None = None, **settings: Any) -> list[Shard]:
    return number_rows(make_plan(build_evaluation(evaluation(path, **settings)), limit).shards)


def read(path: Any, limit: int | None = None, **settings: Any) -> dict[Role, list[Document]]:
    documents: dict[Role, list[Document]] = {"seen": [], "unseen": []}
    for shard in shards_of(path, limit, **settings):
        documents[shard.role] += read_shard(shard)
    return documents


def refusal(path: Any, **settings: Any) -> str:
    return user_error(shards_of, path, **settings)


def write_jsonl(path: Path, labels: Sequence[Any]) -> Path:
    rows = [{"text": text(i), "label": label} for i, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LABELS = [row // 50 % 2 for row in range(N)]
"""Runs of one kind, so that whole shards hold no document of the other."""


@pytest.mark.parametrize("limit", [None, 1, 7, 60, 1000])
def test_rows_of_every_format_have_the_role_of_their_label_and_their_number(tmp_path: Path, limit: int | None) -> None:
    """A limit counts documents of a role and not rows."""
    columns = {"text": [text(i) for i in range(N)], "label": LABELS}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet", row_group_size=70)
    with open(tmp_path / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(*columns.values(), strict=True)])
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
    for path in (write_jsonl(tmp_path / "a.jsonl", LABELS), *(tmp_path / name for name in ("b.parquet", "c.csv", "d"))):
        documents = read(path, limit)
        for role, member in (("seen", 1), ("unseen", 0)):
            rows = [row for row in range(N) if LABELS[row] == member][:limit]
            facts = [(d.row, d.text, d.doc_id, d.problem) for d in documents[role]]
            assert facts == [(row, text(row), f"{path}#{row}", None) for row in rows], path
            shards, last = [one for one in shards_of(path) if one.role == role], (str(path), rows[-1])
            assert fetch_texts(shards, [last]) == {last: text(rows[-1])}, "found again by its number"


def test_labels_may_be_spelt_in_these_ways(tmp_path: Path) -> None:
    for member, nonmember in (
        (1, 0),
        (1.0, 0.0),
        ("1", "0"),
        (True, False),
        ("true", "FALSE"),
        ("member", "nonmember"),
        ("Member", "non-member"),
        ("seen", " unseen "),
    ):
        path = write_jsonl(tmp_path / "a.jsonl", [member, nonmember, nonmember])
        documents = read(path)
        assert [d.row for d in documents["seen"]] == [0]
        assert [d.row for d in documents["unseen"]] == [1, 2]


def test_a_label_column_that_does_not_name_members_is_one_line_with_its_values(tmp_path: Path) -> None:
    for labels, part in (
        (
            [0, 1, 2],
            "column 'label' in {path} holds 3 values: 0, 1, 2; it takes two: 1, true, member or seen for members",
        ),
        ([1, 0, "member"], "holds 3 values: 1, 0, member"),
        (["train", "test"], "holds 2 values: train, test"),
        ([5], "holds 1 value: 5; it takes two"),
        (list("abcdefghij"), "holds more than 5 values: a, b, c, d, e; it takes two"),
        (["x" * 200, 1], f"holds 2 values: {'x' * 30}..., 1; it takes two"),
        (["two\nlines", 1], "holds 2 values: two lines, 1; it takes two"),
        ([1, 1], "holds no label of nonmembers, only 1"),
        (["member", "seen"], "holds no label of nonmembers, only member and seen"),
        ([0], "holds no label of members, only 0"),
        ([None, ""], "holds no label; labels are 1, true, member or seen for members and 0, false"),
    ):
        path = write_jsonl(tmp_path / "a.jsonl", labels)
        assert part.replace("{path}", str(path)) in refusal(path)


def test_a_row_without_a_label_goes_to_quarantine_and_none_vanishes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [1, None, 0, "", 1])
    path.write_text(path.read_text() + "{broken\n" + json.dumps({"text": "no label at all"}) + "\n")
    documents = read(path)
    assert [d.row for d in documents["seen"]] == [0, 4]
    assert [(d.row, d.problem[0] if d.problem else None) for d in documents["unseen"]] == [
        (1, "no_label"),
        (2, None),
        (3, "no_label"),
        (5, "undecodable"),
        (6, "no_label"),
    ]
    assert "no label in column 'label'" in str(documents["unseen"][0].problem)


def test_wrong_label_columns_text_files_and_a_third_value_beyond_the_limit_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [0, 1])
    line = refusal(path, labelled={"label": "labels"})
    assert "no column 'labels' in" in line
    assert "did you mean 'label'" in line
    write_jsonl(tmp_path / "b.jsonl", [0, 1, "maybe"])
    assert "b.jsonl holds 3 values: 0, 1, maybe" in refusal(tmp_path / "*.jsonl", limit=1)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.txt").write_text("a text")
    assert "corpus.labelled: .txt files have no column 'label'" in refusal(tmp_path / "texts")
    assert refusal(tmp_path / "none.jsonl").startswith("corpus.labelled: no file")


def test_the_label_column_is_in_the_fingerprint_of_a_shard_and_of_no_other(tmp_path: Path) -> None:
    shard = shards_of(write_jsonl(tmp_path / "a.jsonl", [0, 1]))[0]
    assert shard_fingerprint({}, shard)["columns"] == ["text", None, None, "label"]
    assert Shard.from_dict(shard.to_dict()) == shard
    corpus = {role: {"path": str(tmp_path / "a.jsonl")} for role in ("seen", "unseen")}
    plain = make_plan(build_evaluation({**evaluation(tmp_path / "a.jsonl"), "corpus": corpus})).shards[0]
    assert shard_fingerprint({}, plain)["columns"] == ["text", None, None]


def message(build: Any, corpus: dict[str, Any], **settings: Any) -> str:
    return user_error(build, {"run": "r", "model": {"path": "m"}, "corpus": corpus, **settings})


SOURCE = {"path": "a.jsonl"}
LABELLED = {"path": "a.jsonl", "label": "label"}


def test_a_corpus_that_does_not_do_for_a_command_says_what_to_add() -> None:
    for build, corpus, part in (
        (build_config, {"unseen": SOURCE}, "missing key 'corpus.audit', the documents to judge (given: corpus.unseen)"),
        (build_config, {"labelled": LABELLED}, "(given: corpus.labelled)"),
        (build_config, {}, "(given: nothing)"),
        (
            build_evaluation,
            {"seen": SOURCE, "audit": SOURCE},
            "corpus.unseen is not given: add corpus.unseen: {path: ...}, or name both kinds as corpus.labelled",
        ),
        (build_evaluation, {"unseen": SOURCE}, "corpus.seen is not given"),
        (
            build_evaluation,
            {"labelled": LABELLED, "unseen": SOURCE},
            "labelled takes the place of audit, unseen and seen",
        ),
        (build_evaluation, {"labelled": SOURCE}, "missing key 'corpus.labelled.label'"),
        (build_evaluation, {"seen": LABELLED, "unseen": SOURCE}, "unknown key 'corpus.seen.label'"),
    ):
        line = message(build, corpus)
        assert part in line
        if build is build_config:
            assert "add corpus.audit: {path: ...}" in line
            assert "seenset evaluate" in line


def test_selections_are_left_out_only_where_nothing_is_to_be_judged() -> None:
    selections = [{"name": "members", "detectors": ["loss"]}]
    both = {"seen": SOURCE, "unseen": SOURCE}
    shared = {"run": "r", "model": {"path": "m"}, "selections": selections}
    assert build_evaluation({**shared, "corpus": {"labelled": LABELLED}}).selections == []
    assert build_evaluation({**shared, "corpus": both}).selections == []
    assert len(build_evaluation({**shared, "corpus": {**both, "audit": SOURCE}}).selections) == 1
    assert "detector 'los' is not scored" in message(
        build_evaluation, {**both, "audit": SOURCE}, selections=[{"name": "members", "detectors": ["los"]}]
    )


def test_fsd_may_be_evaluated_on_labelled_documents() -> None:
    config = build_evaluation({**evaluation("a.jsonl"), "detectors": ["fsd"]})
    assert [role for role, _ in config.corpus.roles()] == ["unseen", "seen"]
    assert "fine-tunes on corpus.unseen" in message(build_config, {"audit": SOURCE, "seen": SOURCE}, detectors=["fsd"])
