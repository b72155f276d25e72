"""Selection over score shards that share documents: equal texts count, equal beginnings are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.audit.allocation import KEYS_FILE, KEYS_SCHEMA
from pipeline.audit.description import build_config
from pipeline.audit.plan import make_plan
from pipeline.audit.scored import read_scored
from pipeline.audit.select import select_all
from pipeline.audit.summary import Summary
from pipeline.corpus.documents import id_key, text_keys
from pipeline.corpus.families import common_beginnings
from pipeline.errors import UserError
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, write_receipt

LIST = "This is a list of people reported killed by the police in {}"
HEADER = "licensed to everybody under the terms of the licence text {}"


def each(receipts: Sequence[Receipt], function: Callable[[Receipt], Any]) -> Iterator[Any]:
    return map(function, receipts)


def select(
    tmp_path: Path, audit: Sequence[str], known: Sequence[str], trained: Sequence[str] | None = None, **asked: Any
) -> Summary:
    """The answer to a question over scores that stand in a run directory, with an adapter trained on some texts."""
    column = "loss" if trained is None else "fsd"
    texts = {"audit": audit, "unseen": known, "seen": known}
    corpus = {}
    for role, each_text in texts.items():
        path = tmp_path / f"{role}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in each_text))
        corpus[role] = {"path": str(path)}
    selection = {"name": "a", "detectors": [column], "procedure": "bh", "alpha": 0.2, **asked}
    described = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "corpus": corpus, "detectors": [column]}
    config = build_config({**described, "selections": [selection], "resources": {"shard_bytes": 1 << 20}})
    plan, store = make_plan(config), Store(config.run)
    if trained is not None:
        keys = [text_keys(text) for text in trained]
        text, prefix = np.array(keys).T
        common = common_beginnings(*np.array([text_keys(each_text) for each_text in known]).T)
        prefixes = pa.array(prefix, mask=np.isin(prefix, common))
        columns = {"adapter": ["default"] * len(keys), "text_key": text, "prefix_key": prefixes}
        store.write_table(KEYS_FILE, pa.table(columns, schema=KEYS_SCHEMA))
    rng = np.random.default_rng(0)
    for shard in plan.shards:
        some = texts[shard.role]
        keys = [text_keys(text) for text in some]
        rows = {
            "doc_id": [f"{shard.role} {i}" for i in range(len(some))],
            "row": pa.array(range(len(some)), pa.int64()),
            "group": pa.nulls(len(some), pa.string()),
            "id_key": [id_key(f"{shard.role} {i}") for i in range(len(some))],
            "text_key": [text_key for text_key, _ in keys],
            "prefix_key": [prefix_key for _, prefix_key in keys],
            column: rng.normal(size=len(some)),
        }
        store.write_table(f"scores/{shard.id}.parquet", pa.table(rows))
        counts = {"n_in": len(some), "n_scored": len(some), "n_quarantined": 0, "tokens": 1, "n_truncated": 0}
        fixed = {"data": f"scores/{shard.id}.parquet", "quarantine": None, "reasons": {}, "fingerprint": {}}
        write_receipt(store, "score", Receipt(shard=shard.id, role=shard.role, **counts, **fixed))
    (summary,) = select_all(config, read_scored(store, plan.shards), None, each)
    return summary


def many(template: str, start: int, count: int = 30) -> list[str]:
    return [template.format(i) for i in range(start, start + count)]


def test_lists_of_two_years_are_told_and_calibrate(tmp_path: Path) -> None:
    audit = [*many("audited {} alone", 0), LIST.format(2023)]
    summary = select(tmp_path, audit, [*many("known {} alone", 0), LIST.format(2024)])
    overlap = summary.diagnostics.overlap
    assert (overlap.ok, overlap.n_calibration, overlap.n_alike) == (None, 0, 1)
    assert [(pair.audit, pair.calibration) for pair in overlap.pairs] == [("audit 30", "unseen 30")]
    assert summary.n_calibration == 31
    assert overlap.sentence not in summary.reasons


def test_an_equal_text_stops_the_selection(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 31 unseen documents are audit documents too \(same text; 1 audit"):
        select(tmp_path, [*many("audited {} alone", 0), "One  TEXT"], [*many("known {} alone", 0), "one text"])


@pytest.mark.parametrize("question", [{}, {"direction": "clean"}])
def test_an_adapter_never_judges_a_text_that_it_was_trained_on(tmp_path: Path, question: dict[str, Any]) -> None:
    audit = many("audited {} alone", 0)
    with pytest.raises(UserError, match="the adapters were trained on 1 audit documents and cannot judge these"):
        select(tmp_path, audit, many("known {} alone", 0), audit[3:4], **question)


def test_an_adapter_that_was_trained_on_the_list_of_another_year_judges_where_that_can_only_cost_power(
    tmp_path: Path,
) -> None:
    audit = [*many("audited {} alone", 0), LIST.format(2023)]
    known = [*many("known {} alone", 0), LIST.format(2024), LIST.format(2025)]
    summary = select(tmp_path, audit, known, [LIST.format(2024)])
    assert summary.n_calibration == 30, "a list of any year may be an edition of the one that was trained on"
    assert summary.diagnostics.fine_tuned is not None
    assert "1 audited documents begin like one that was" in summary.diagnostics.fine_tuned.sentence
    with pytest.raises(UserError, match="begin with the same 8 words as 1 audit documents, which selection a could"):
        select(tmp_path, audit, known, [LIST.format(2024)], direction="clean")


def test_a_licence_on_every_document_stops_no_direction(tmp_path: Path) -> None:
    audit, known = many(HEADER, 0), many(HEADER, 100)
    for question in ({}, {"direction": "clean"}):
        summary = select(tmp_path, audit, known, known[:10], **question)
        assert summary.diagnostics.overlap.n_alike == 30
        assert summary.n_calibration == 20, "all that was not trained on"
    with pytest.raises(UserError, match="trained on 1 audit documents"):
        select(tmp_path, audit, known, [HEADER.format(3)], direction="clean")
