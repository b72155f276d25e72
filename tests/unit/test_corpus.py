"""Files become shards from metadata, shards become documents, and nothing vanishes on the way."""

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.small_model import WORDS
from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.corpus.documents import Document, collapsed, fetch_texts, read_shard, text_key
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.input_files import Extent
from pipeline.corpus.inputs import find_inputs, number_rows, plan_shards
from pipeline.corpus.keys import make_excerpt, make_excerpts
from pipeline.corpus.shard import Shard
from tests.helpers.commands import user_error

TEXTS = [f"Document number {i} " + "says a little more " * (i % 9) for i in range(300)]


def shards_of(path: Any, limit: int | None = None, shard_bytes: int = 1500, **source: Any) -> list[Shard]:
    corpus = CorpusConfig.model_validate({"audit": {"path": path, **source}})
    return number_rows(plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_bytes=shard_bytes), limit=limit))


def read(path: Any, limit: int | None = None, **settings: Any) -> tuple[list[Shard], list[Document]]:
    shards = shards_of(path, limit, **settings)
    return shards, [document for shard in shards for document in read_shard(shard)]


def refusal(path: Any, **settings: Any) -> str:
    return user_error(read, path, **settings)


def jsonl(texts: list[str], **extra: Any) -> bytes:
    return "".join(json.dumps({"text": text, "n": i, **extra}) + "\n" for i, text in enumerate(texts)).encode()


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("formats")
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS)))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl(TEXTS)))
    with open(folder / "d.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["n", "text"])
        writer.writerows(enumerate(TEXTS))
    pq.write_table(pa.table({"text": TEXTS, "n": range(len(TEXTS))}), folder / "e.parquet", row_group_size=70)
    (folder / "f").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "f" / f"{i:04d}.txt").write_text(text)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "g"))
    return {p: str(folder / p) for p in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.csv", "e.parquet", "f", "g")}


def test_every_format_gives_the_same_documents_in_order_and_a_limit_the_first(
    every_format: dict[str, str],
) -> None:
    for name, path in every_format.items():
        shards, documents = read(path)
        assert [d.text for d in documents] == TEXTS, name
        assert [d.row for d in documents] == list(range(300)), name
        assert len({d.doc_id for d in documents}) == 300
        assert all(d.problem is None for d in documents)
        if name in ("a.jsonl", "e.parquet", "f", "g"):
            assert len(shards) > 5, f"{name} should be split"
        for limit in (1, 7, 50, 300, 1000):
            assert [d.text for d in read(path, limit=limit)[1]] == TEXTS[:limit]


def test_ids_default_to_file_and_row(every_format: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(every_format["f"]).parent)
    assert [d.doc_id for d in read("a.jsonl")[1][:2]] == ["a.jsonl#0", "a.jsonl#1"]
    assert read("e.parquet")[1][299].doc_id == "e.parquet#299"
    assert read("f")[1][3].doc_id == "f/0003.txt#0"
    assert [d.doc_id for d in read("a.jsonl", id="n")[1][:2]] == ["0", "1"]


def test_the_cut_into_shards_never_changes_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for size, texts in ((1, TEXTS[:20]), (37, TEXTS), (1000, TEXTS), (5000, TEXTS)):
        path.write_bytes(jsonl(texts))
        _, whole = read(str(path), shard_bytes=1 << 30)
        shards, documents = read(str(path), shard_bytes=size)
        assert documents == whole
        assert [document.text for document in documents] == texts
        assert len(shards) > 2


def test_globs_lists_and_urls_name_files(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"part{i}.jsonl").write_bytes(jsonl(TEXTS[i * 100 : i * 100 + 100]))
    assert [d.text for d in read(str(tmp_path / "part*.jsonl"))[1]] == TEXTS
    assert [d.text for d in read([str(tmp_path / f"part{i}.jsonl") for i in (0, 1, 1)])[1]] == TEXTS[:200]
    with fsspec.open("memory://bucket/x.jsonl", "wb") as file:
        file.write(jsonl(TEXTS))
    documents = read("memory://bucket/x.jsonl")[1]
    assert [d.text for d in documents] == TEXTS
    assert documents[5].doc_id == "memory:///bucket/x.jsonl#5"


def test_a_wrong_column_names_the_columns(every_format: dict[str, str]) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "d.csv", "e.parquet", "g"):
        text = refusal(every_format[name], text="txt")
        assert "no column 'txt'" in text
        assert "did you mean 'text'" in text
    assert "no column 'uid'" in refusal(every_format["a.jsonl"], id="uid")


def test_files_without_documents_or_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1]}), tmp_path / "n.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    (tmp_path / "folder").mkdir()
    for name, part in (
        ("n.parquet", "holds int64, not text"),
        ("x.jsonl", "holds no documents"),
        ("x.parquet", "holds no documents"),
        ("folder", "holds no file"),
        ("x.docx", ".parquet"),
    ):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(b"")
        assert part in refusal(str(tmp_path / name))


def test_a_truncated_packed_file_says_after_which_row(tmp_path: Path) -> None:
    lines = jsonl([str(random.Random(i).random()) * 5 for i in range(20000)])
    for name, whole in (("x.jsonl.gz", gzip.compress(lines)), ("x.jsonl.zst", zstandard.compress(lines))):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        assert f"{name} is damaged after row" in refusal(str(tmp_path / name))


def test_a_corrupt_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 this is not Parquet PAR1")
    assert "is not a readable Parquet file" in refusal(str(path))
    pq.write_table(pa.table({"text": TEXTS * 20}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[100:1000] = bytes(900)
    path.write_bytes(bytes(data))
    assert "x.parquet is damaged" in refusal(str(path))


def test_a_bad_document_keeps_its_row_and_says_why(tmp_path: Path) -> None:
    lines = [
        b'{"text": "a good one"}',
        b'{"text": ""}',
        b'{"text": "  \\n "}',
        b'{"text": 5}',
        b'{"other": "x"}',
        b'{"text": null}',
        b"not json",
        b"[1, 2]",
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "bad \xff\xfe bytes"}',
        b'{"text": "nul \\u0000 inside"}',
        b"[" * 100_000,
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    documents = read(str(path), shard_bytes=1 << 30)[1]
    reasons = [d.problem[0] if d.problem else "" for d in documents]
    bad, other = ["undecodable"], ["not_text"]
    assert reasons == ["", "empty", "empty", *3 * other, *bad, *other, *2 * bad, "", *bad]
    assert documents[10].text == "nul \x00 inside"


def test_invalid_utf8_spoils_one_document_in_every_format(tmp_path: Path) -> None:
    bad = b"caf\xe9 au lait"
    (tmp_path / "a.csv").write_bytes(b"text\nfine\n" + bad + b"\nalso fine\n")
    texts = pa.array([b"fine", bad, b"also fine"], pa.binary())
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    (tmp_path / "c").mkdir()
    for i, data in enumerate([b"fine", bad, b"also fine"]):
        (tmp_path / "c" / f"{i}.txt").write_bytes(data)
    for name in ("a.csv", "b.parquet", "c"):
        documents = read(str(tmp_path / name))[1]
        assert [d.problem and d.problem[0] for d in documents] == [None, "undecodable", None], name


def test_a_csv_field_may_hold_newlines_nul_and_two_million_characters(tmp_path: Path) -> None:
    long = "word " * 400_000
    with open(tmp_path / "x.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], ["two\nlines, and a comma"], [long]])
    assert [d.text for d in read(str(tmp_path / "x.csv"))[1]] == ["two\nlines, and a comma", long]


def test_a_saved_dataset_of_several_splits_asks_which(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"text": TEXTS[:n]}) for name, n in (("test", 2), ("train", 5))}
    path = str(tmp_path / "x")
    datasets.DatasetDict(splits).save_to_disk(path)
    assert refusal(path) == (
        f"{path} holds several splits, test (2 rows), train (5 rows): say which beside its path, as in split: test"
    )
    assert len(read(path, split="train")[1]) == 5
    assert len(read(f"{path}/test")[1]) == 2
    datasets.DatasetDict({"train": splits["train"]}).save_to_disk(str(tmp_path / "y"))
    assert len(read(str(tmp_path / "y"))[1]) == 5
    assert "splits: train" in refusal(str(tmp_path / "y"), split="test")


def test_a_dataset_that_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    corpus = CorpusConfig(audit=SourceConfig(dataset="no/such-set"))
    assert "cannot open dataset no/such-set" in user_error(find_inputs, corpus)


def test_excerpts_come_from_their_rows(every_format: dict[str, str]) -> None:
    for name in ("a.jsonl", "e.parquet", "b.jsonl.gz"):
        shards = read(every_format[name])[0]
        wanted = [(every_format[name], row) for row in (0, 17, 299)]
        assert fetch_texts(shards, wanted) == {key: TEXTS[key[1]] for key in wanted}


def test_an_excerpt_is_one_line_and_says_where_it_goes_on() -> None:
    assert make_excerpt("one\n\n two\tthree ", 50) == "one two three"
    assert make_excerpt("word " * 100, 12) == "word word wo…"
    assert make_excerpt("a\u202eb\x1b[31m", 50) == "a⟨U+202E⟩b⟨U+001B⟩[31m"
    assert make_excerpt(" " * 1000 + "late", 10) == "…"


def test_excerpts_are_of_the_rows_whose_text_is_still_the_same(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", ["first", "second\ntext", "third"]
    pq.write_table(pa.table({"text": texts}), path)
    (shard,) = shards_of(str(path))
    keys = [text_key(text) for text in texts]
    assert make_excerpts(shard, [2, 1], [keys[2], keys[1]], 20) == ["third", "second text"]
    assert make_excerpts(shard, [0, 1], [keys[1], keys[1]], 20) == [None, "second text"]
    assert make_excerpts(shard, [0, 7], [keys[0], keys[0]], 20) == ["first", None]
    pq.write_table(pa.table({"body": texts}), path)
    assert make_excerpts(shard, [0], keys[:1], 20) == [None]
    path.unlink()
    assert make_excerpts(shard, [0], keys[:1], 20) == [None]


@given(st.text(st.sampled_from("ab  \n\t\xa0\u2003\x1f\x85\u200bé"), max_size=8))
def test_white_space_collapses_as_splitting_at_it_would(text: str) -> None:
    assert collapsed(text) == " ".join(text.split())


def test_keys_ignore_case_space_and_form_but_not_words() -> None:
    assert text_key("The ﬁrst  words of this\tsentence") == text_key("the first words OF THIS sentence ")
    assert text_key("the first words of a sentence") != text_key("the first words of the sentence")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".jsonl.gz", ".jsonl.zst"])
def test_rows_are_counted_in_small_files_and_estimated_in_large_ones(tmp_path: Path, suffix: str) -> None:
    """The first rows are 40 times as long as the others: the beginning alone would say a tenth of the rows."""
    rng = random.Random(0)

    def extent(long: int, short: int) -> tuple[Extent, int]:
        texts = ["\n".join(rng.choices(WORDS, k=400)) for _ in range(long)]
        texts += ["\n".join(rng.choices(WORDS, k=10)) for _ in range(short)]
        path = tmp_path / f"{long}{suffix}"
        if "csv" in suffix:
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([["text"], *([text] for text in texts)])
        else:
            pack = {".gz": gzip.compress, ".zst": zstandard.compress}
            path.write_bytes(pack.get(path.suffix, bytes)(jsonl(texts)))
        (entry,) = find_inputs(CorpusConfig(audit=SourceConfig(path=str(path))))
        return measure_extent(entry), len(texts)

    small, rows = extent(3, 50)
    assert (small.rows, small.exact) == (rows, True)
    if suffix in (".jsonl", ".csv"):
        large, rows = extent(1_000, 80_000)
        assert not large.exact
        assert 0.7 * rows < large.rows < 1.4 * rows
    else:  # only the beginning can be read, which here is like the rest
        large, rows = extent(0, 150_000)
        assert not large.exact
        assert 0.9 * rows < large.rows < 1.1 * rows
        assert large.text_bytes > 3 * (tmp_path / f"0{suffix}").stat().st_size


def test_planning_reads_no_parquet_text(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": TEXTS * 50}), path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)  # the texts are gone; the footer stands
    path.write_bytes(bytes(data))
    assert sum(s.stop - s.start for s in shards_of(str(path)) if s.stop) == len(TEXTS) * 50
