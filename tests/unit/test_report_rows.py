"""Claims about the table of the selected documents: who is in it, how large it may get, and what it never carries."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from report_run import SCRIPT, amend, build_run

from pipeline.audit.top_documents import DocumentEvidence
from pipeline.errors import UserError
from pipeline.report.contents import Folders
from pipeline.report.facts import read_facts
from pipeline.report.page import MAX_ROWS, Listing, _Packed, _tokens, even_shares, read_listings, write_report
from pipeline.report.templates import page_script
from pipeline.store.files import Store

HOME = Folders(("/home/somebody/",))
NEAR = [("/home/somebody/unseen.jsonl#4", -2.25)]
EVIDENCE = DocumentEvidence(
    text="One\u202etwo",
    pieces=["One", "\u202etwo"],
    values=[None, -3.14159],
    kind="log-probability",
    detector="loss",
    neighbours=NEAR,
    near_copies=["/home/somebody/a#1"],
    ranked_by="td4eval",
    score=-2.5,
)


def unpacked(block: str) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(base64.b64decode(block)).splitlines()]


def with_selected(folder: Path, table: pa.Table, **arguments: Any) -> Store:
    """A run whose first selection selected the documents of a table, and has nothing to draw."""
    store = build_run(folder, **arguments)
    store.write_table("selection/members/selected.parquet", table)
    store.remove("selection/members/ranks.parquet")
    store.remove("selection/members/scores.json")
    amend(store, "members", n_selected=len(table))
    return store


def many(rows: int, **columns: Any) -> pa.Table:
    """Selected documents with ids that cannot be guessed, four scores and beginnings of English length."""
    generator = np.random.default_rng(0)
    words = np.array(
        [f"{a}{b}" for a in ("tra", "ning", "the", "of", "mod", "el") for b in ("s", "er", "al", "in", "")]
    )
    texts = words[generator.integers(0, len(words), (rows, 40))]
    table = {
        "doc_id": [generator.bytes(16).hex() for _ in range(rows)],
        "p_value": np.sort(generator.random(rows)),
        **{f"score_{index}": generator.normal(size=rows) for index in range(4)},
        "source": ["audit.jsonl"] * rows,
        "row": np.arange(rows),
        "excerpt": [" ".join(line)[:200] for line in texts],
    }
    return pa.table({**table, **columns})


def listing_of(store: Store, room: int = 4_000_000, texts: bool = True) -> Listing:
    run = read_facts(store)
    return read_listings(store, run.selections, Folders.of(run.manifest.inputs), texts, room)["members"]


def test_twenty_thousand_documents_fit_into_five_megabytes(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(MAX_ROWS + 1_000))
    write_report(store)
    page = store.read("report/report.html")
    assert len(page) < 5_000_000
    assert "The top 20,000 of 21,000, smallest p-value first" in page.decode()
    assert 'href="../selection/members/selected.parquet"' in page.decode()
    chunks = unpacked(page.decode().split('id="rows-members">')[1].split("<")[0])
    assert sum(len(chunk["p"]) for chunk in chunks) == MAX_ROWS
    assert chunks[0]["text"][0] == many(1)["excerpt"][0].as_py()


def test_what_there_is_no_room_for_is_left_out_from_the_end(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(3_000))
    listing = listing_of(store, room=150_000)
    assert len(listing.rows) + len(listing.evidence) <= 150_000
    assert 500 <= listing.n_rows < 3_000
    chunks = unpacked(listing.rows)
    assert [p for chunk in chunks for p in chunk["p"]] == sorted(p for chunk in chunks for p in chunk["p"])
    assert sum(len(chunk["p"]) for chunk in chunks) == listing.n_rows


def test_small_selections_are_whole_and_large_ones_share_the_rest() -> None:
    assert even_shares([10, 30_000, 50_000], 20_000) == [10, 9_995, 9_995]
    assert even_shares([30_000, 5], 20_000) == [19_995, 5]
    assert even_shares([1, 2], 20_000) == [1, 2]
    assert even_shares([], 20_000) == []


def test_an_id_that_only_says_the_place_is_told_by_the_place(tmp_path: Path) -> None:
    table = many(2, doc_id=["/data/audit.jsonl#0", "mine"], source=["/data/audit.jsonl"] * 2)
    (chunk,) = unpacked(listing_of(with_selected(tmp_path, table)).rows)
    assert chunk["ids"] == [None, "mine"]
    assert chunk["source"] == [0, 0]


def test_texts_stay_off_the_page_where_they_are_not_wanted(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(3))
    assert "text" in unpacked(listing_of(store).rows)[0]
    assert "text" not in unpacked(listing_of(store, texts=False).rows)[0]


def test_scores_that_json_cannot_hold_are_none(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(3, score_0=[np.nan, np.inf, 0.123456789]))
    assert unpacked(listing_of(store).rows)[0]["scores"]["score_0"] == [None, None, 0.123457]


def test_markup_and_hidden_characters_are_data(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(2, doc_id=[SCRIPT, "a\u202eb"], excerpt=[SCRIPT, "c\u202ed"]))
    write_report(store)
    page = store.read("report/report.html").decode()
    chunk = unpacked(page.split('id="rows-members">')[1].split("<")[0])[0]
    assert (chunk["ids"], chunk["text"]) == ([SCRIPT, "a⟨U+202E⟩b"], [SCRIPT, "c⟨U+202E⟩d"])
    assert "<script>alert" not in page


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = with_selected(tmp_path, many(2))
    run = read_facts(store)
    store.write("selection/members/selected.parquet", b"PAR1 and no more PAR1")
    with pytest.raises(UserError, match=r"selection/members/selected\.parquet is damaged"):
        read_facts(store)
    with pytest.raises(UserError, match=r"cannot read .*selection/members/selected\.parquet"):
        read_listings(store, run.selections, Folders(()), True, 1_000_000)


def test_tokens_go_with_their_values_and_ids_are_relative() -> None:
    assert _tokens(7, EVIDENCE, HOME, texts=True) == {
        "at": 7,
        "kind": "log-probability",
        "detector": "loss",
        "by": "td4eval",
        "score": -2.5,
        "near": [["unseen.jsonl#4", -2.25]],
        "copies": ["a#1"],
        "pieces": ["One", "⟨U+202E⟩two"],
        "values": [None, -3.14],
    }


def test_without_texts_no_token_and_no_value_of_one_is_carried() -> None:
    assert set(_tokens(7, EVIDENCE, HOME, texts=False)) == {"at", "kind", "detector", "by", "score", "near", "copies"}


def test_lines_are_packed_until_the_room_is_full_and_the_same_lines_give_the_same_bytes() -> None:
    noise = [np.random.default_rng(index).bytes(400).hex() for index in range(20)]
    packs = [_Packed(4_000), _Packed(4_000)]
    added = [[pack.add(line) for line in noise] for pack in packs]
    assert added[0] == added[1]
    assert (added[0][0], added[0][-1]) == (True, False)
    assert packs[0].text() == packs[1].text()
    assert len(packs[0].text()) <= 4_000
    assert unpacked(packs[0].text()) == [line for line, fits in zip(noise, added[0], strict=True) if fits]


def test_the_script_holds_its_table_and_cannot_end_its_element_early() -> None:
    script = page_script()
    assert "DataTables" in script
    assert "const DataTable = " in script
    assert "</script" not in script.lower()
    assert "innerHTML" not in script.partition("const DataTable = ")[2].partition("/*! Bundled")[0]
