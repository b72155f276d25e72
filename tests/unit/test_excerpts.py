"""How a document begins is one line of bounded length in which nothing hides."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import collapsed, text_key
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.keys import excerpt_of, excerpts_of
from pipeline.corpus.shard import Shard

TEXTS = ["first", "second\ntext", "third"]


def test_an_excerpt_is_one_line_and_says_where_it_goes_on() -> None:
    assert excerpt_of("one\n\n two\tthree ", 50) == "one two three"
    assert excerpt_of("word " * 100, 12) == "word word wo…"
    assert excerpt_of("a\u202eb\x1b[31m", 50) == "a⟨U+202E⟩b⟨U+001B⟩[31m"
    assert excerpt_of(" " * 1000 + "late", 10) == "…"


def shard_of(path: Path) -> Shard:
    config = AuditConfig.model_validate(
        {"run": "r", "model": {"path": "m"}, "corpus": {"audit": {"path": str(path)}}, "detectors": ["loss"]}
    )
    (shard,) = plan_shards(config.corpus, find_inputs(config.corpus), config.resources)
    return shard


def test_excerpts_are_of_the_rows_whose_text_is_still_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    shard = shard_of(path)
    keys = [text_key(text) for text in TEXTS]
    assert excerpts_of(shard, [2, 1], [keys[2], keys[1]], 20) == ["third", "second text"]
    assert excerpts_of(shard, [0, 1], [keys[1], keys[1]], 20) == [None, "second text"]
    assert excerpts_of(shard, [0, 7], [keys[0], keys[0]], 20) == ["first", None]


def test_a_file_that_is_gone_or_another_gives_no_excerpt(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    shard, key = shard_of(path), text_key(TEXTS[0])
    for replace in (
        lambda: pq.write_table(pa.table({"body": TEXTS}), path),
        lambda: path.write_bytes(b"not Parquet"),
        path.unlink,
    ):
        replace()
        assert excerpts_of(shard, [0], [key], 20) == [None]


@given(st.text(st.sampled_from("ab  \n\t\xa0\u2003\x1f\x85\u200bé"), max_size=8))
def test_white_space_collapses_as_splitting_at_it_would(text: str) -> None:
    assert collapsed(text) == " ".join(text.split())
