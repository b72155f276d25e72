"""What an export keeps is what came in: rows in their order, all columns and types, and lines of JSON byte for byte."""

import csv
import gzip
import io
import json
import re
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.corpus import LimitsConfig
from pipeline.config.dialect import Dialect
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.csv_file import CSV
from pipeline.export.request import RowMarks
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts, withdraw_receipt, write_receipt
from tests.helpers.export_runs import export, finished_run, refusal, whole_shard
from tests.helpers.made_up import sentence, write_rows

TEXTS = [
    f"<b>&amp; {sentence(i)}" + '\u2028 "quoted", é\u0301 \U0001f600' * (i % 2) + "\n\nwith a line" * (i % 5 == 0)
    for i in range(30)
]
NESTED = pa.struct([("tags", pa.list_(pa.string())), ("at", pa.timestamp("us", "UTC")), ("size", pa.decimal128(9, 2))])


def table() -> pa.Table:
    n = len(TEXTS)
    nested = [
        None if i % 4 == 0 else {"tags": ["x", None, f"<{i}>"], "at": datetime(2024, 1, 1 + i % 9), "size": Decimal(i)}
        for i in range(n)
    ]
    columns = {
        "id": pa.array([f"d{i}" for i in range(n)], pa.large_string()),
        "text": pa.array(TEXTS),
        "n": pa.array([None if i % 7 == 0 else i for i in range(n)], pa.int8()),
        "score": pa.array([float("nan") if i % 5 == 0 else i / 3 for i in range(n)], pa.float32()),
        "kind": pa.array([["a", "b", None][i % 3] for i in range(n)]).dictionary_encode(),
        "nested": pa.array(nested, NESTED),
        "blob": pa.array([bytes([i, 0, 255]) for i in range(n)], pa.binary()),
        "nothing": pa.nulls(n),
    }
    schema = pa.schema(
        [pa.field(name, column.type, metadata={"about": name}) for name, column in columns.items()],
        metadata={"origin": "a test"},
    )
    return pa.table(columns, schema=schema)


def rows_kept(count: int, keep: str = "rest") -> list[int]:
    return [i for i in range(count) if (i % 3 == 0) == (keep == "selected")]


@pytest.mark.parametrize("codec", ["snappy", "none"])
def test_parquet_keeps_columns_types_metadata_order_and_compression(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "data/a.parquet"
    path.parent.mkdir()
    pq.write_table(table(), path, row_group_size=7, compression=codec)
    run = finished_run(tmp_path / "w", {"path": str(path), "id": "id"})
    for keep in ("rest", "selected"):
        export(run, tmp_path / keep, keep=keep)
        written = pq.ParquetFile(tmp_path / keep / "a.parquet")
        assert written.schema_arrow.equals(pq.read_schema(path), check_metadata=True)
        expected = pq.read_table(path).take(rows_kept(len(TEXTS), keep))
        # NaN is no value that equals itself, so the column is compared as text
        for name in expected.column_names:
            assert repr(written.read([name]).to_pylist()) == repr(expected.select([name]).to_pylist()), name
        chunk = written.metadata.row_group(0).column(1)
        assert chunk.compression == {"snappy": "SNAPPY", "none": "UNCOMPRESSED"}[codec]


PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "": (bytes, bytes),
    ".gz": (gzip.compress, gzip.decompress),
    ".zst": (zstandard.compress, lambda data: zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()),
}


@pytest.mark.parametrize("suffix", PACKED)
def test_lines_are_copied_as_they_are(tmp_path: Path, suffix: str) -> None:
    """Spaces, orders of keys, escapes, fields twice, numbers as they were written, both ends of lines."""
    pack, unpack = PACKED[suffix]
    lines = [
        f'{{ "z": 1.50e2, "text":{json.dumps(text, ensure_ascii=i % 2 == 0)},"a":[{i},null , -0.0]}}'.encode()
        + (b"\r\n" if i % 4 == 0 else b"\n")
        for i, text in enumerate(TEXTS)
    ]
    lines[4:4] = [b"\n", b"not JSON\n", b'{"text": "\xff broken", "n": 1}\n', b"   \r\n"]
    lines[-1] = lines[-1].rstrip()
    path = tmp_path / f"data/a.jsonl{suffix}"
    path.parent.mkdir()
    path.write_bytes(pack(b"\xef\xbb\xbf" + b"".join(lines)))
    run = finished_run(tmp_path / "w", {"path": str(path)})
    exported = export(run, tmp_path / "rest")
    blank = (4, 7)
    kept = [line for i, line in enumerate(lines) if i % 3 or i in (6,)]  # row 6 cannot be read
    assert unpack((tmp_path / f"rest/a.jsonl{suffix}").read_bytes()) == b"".join(kept)
    assert exported.counts.quarantined == 2
    assert "2 audited documents could not be scored (quarantined): nothing is known of them, and they are kept" in (
        " ".join(exported.sentences())
    )
    export(run, tmp_path / "without", quarantined=False)
    kept = [line for i, line in enumerate(lines) if i % 3 and i not in (5, 6)]
    assert unpack((tmp_path / f"without/a.jsonl{suffix}").read_bytes()) == b"".join(kept)
    export(run, tmp_path / "selected", keep="selected")
    kept = [line for i, line in enumerate(lines) if i % 3 == 0 and i not in (*blank, 6)]
    assert unpack((tmp_path / f"selected/a.jsonl{suffix}").read_bytes()) == b"\xef\xbb\xbf" + b"".join(kept)


def test_records_of_csv_keep_their_values_and_their_dialect(tmp_path: Path) -> None:
    head = b'\xef\xbb\xbfid,"text", n\r\n'
    records = [
        f'{i},"{text}",{"" if i % 2 else "01.50"}'.replace('"quoted"', '""quoted""') for i, text in enumerate(TEXTS)
    ]
    records[2] = '2,unquoted text that says little,"a ""b""\nc"'
    records[4] = '4,"a \r carriage return and text",\' =1+1'
    data = [record.encode() + (b"\n" if i % 2 else b"\r\n") for i, record in enumerate(records)]
    data[7] = b"\r\n\n" + data[7].replace(b"7,", b"7,\xff", 1)  # empty lines are no records
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(head + b"".join(data)))
    run = finished_run(tmp_path / "w", {"path": str(tmp_path / "a.csv.gz")})
    for keep in ("rest", "selected"):
        export(run, tmp_path / keep, keep=keep)
        written = gzip.decompress((tmp_path / keep / "a.csv.gz").read_bytes())
        assert written.startswith(b"\xef\xbb\xbfid,text, n\r\n")
        expected = head + b"".join(data[i] for i in rows_kept(len(data), keep))
        assert values_of(written) == [row for row in values_of(expected) if row]


def values_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(errors="surrogateescape"), newline="")))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("named", [False, True])
def test_records_of_csv_that_cannot_be_read_stay_as_they_are(tmp_path: Path, encoding: str, named: bool) -> None:
    records = [f"{i};text of number {i}, \u00e9" for i in range(12)]
    records[1] = '1;"he said \\"no\\" and left"'
    records[5] = "5;a;b;c"
    records[8] = f'8;"{"x" * 3000}\n{"y" * 3000}"'
    head = "sep=;\n" if named else ""
    path, copied = tmp_path / "a.csv", tmp_path / "b.csv"
    path.write_text(f"{head}id;text\n" + "\n".join(records), encoding, newline="")
    dialect = Dialect(encoding.removesuffix("-sig"), ";")
    shard = replace(whole_shard(path, "csv"), limits=LimitsConfig(document_bytes=4000), dialect=dialect)
    documents = list(read_shard(shard))
    assert [document.row for document in documents if document.problem] == [1, 5, 8]
    for kept, marks in (
        (range(1, 12), RowMarks([np.array([0])], False)),
        ([8, 11], RowMarks([np.array([8, 11])], True)),
    ):
        with copied.open("wb") as sink:
            CSV.export.copy(ExportSource((shard,), "a.csv"), marks, lambda _, sink=sink: nullcontext(sink))
        written = copied.read_text(encoding).removesuffix("\n")
        assert written == f"{head}id;text\n" + "\n".join(records[i] for i in kept)
        assert copied.read_bytes()[:2] == path.read_bytes()[:2]
        again = list(read_shard(replace(shard, path=str(copied))))
        assert [one.text for one in again] == [documents[i].text for i in kept]


fields = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(fields, fields), min_size=1, max_size=20),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.randoms(),
)
def test_any_csv_is_cut_between_its_records(rows: list[tuple[str, str]], ending: str, quoting: Any, rng: Any) -> None:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator=ending, quoting=quoting).writerows([("id", "text"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text(buffer.getvalue(), encoding="utf-8", newline="")
        kept = [i for i in range(len(rows)) if rng.random() < 0.5]
        sink = io.BytesIO()
        marks = RowMarks([np.array(kept, dtype=np.int64)], True)
        CSV.export.copy(ExportSource((whole_shard(path, "csv"),), path.name), marks, lambda _: nullcontext(sink))
    whole = list(csv.reader(io.StringIO(buffer.getvalue(), newline="")))
    written = list(csv.reader(io.StringIO(sink.getvalue().decode(), newline="")))
    records = [record for record in whole[1:] if record]
    assert [record for record in written if record] == [whole[0], *(records[i] for i in kept if i < len(records))]


def test_a_saved_dataset_keeps_features_and_files_and_a_split_stays_one(tmp_path: Path) -> None:
    n = range(len(TEXTS))
    columns = {"text": TEXTS, "label": [i % 2 for i in n], "deep": [{"a": [i], "b": None} for i in n]}
    deep = {"z": datasets.List(datasets.Value("int16")), "b": datasets.Value("string")}
    kinds = {"text": datasets.Value("large_string"), "label": datasets.ClassLabel(names=["no", "yes"]), "deep": deep}
    whole = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    whole.save_to_disk(tmp_path / "data/saved", num_shards=3)
    run = finished_run(tmp_path / "w", {"path": str(tmp_path / "data/saved")})
    export(run, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "data/saved").iterdir())
    assert sorted(path.name for path in (tmp_path / "out/saved").iterdir()) == names
    written = datasets.load_from_disk(str(tmp_path / "out/saved"))
    assert list(written.features.items()) == list(whole.features.items())
    assert written.data.schema.equals(whole.data.schema, check_metadata=True)
    assert json.dumps(written.to_list()) == json.dumps(whole.select(rows_kept(len(TEXTS))).to_list())
    datasets.DatasetDict({"train": whole.select(range(5)), "test": whole}).save_to_disk(tmp_path / "data/splits")
    run = finished_run(tmp_path / "v", {"path": str(tmp_path / "data/splits"), "split": "test"})
    export(run, tmp_path / "one", keep="selected")
    splits = datasets.load_from_disk(str(tmp_path / "one/splits"))
    assert {name: split["text"] for name, split in splits.items()} == {
        "test": [TEXTS[i] for i in rows_kept(len(TEXTS), "selected")]
    }


def test_text_files_of_folders_keep_their_names(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS):
        place = tmp_path / f"data/{'ab'[i % 2]}/{i // 2:02}.txt"
        place.parent.mkdir(exist_ok=True, parents=True)
        place.write_bytes(b"\xff" if i == 4 else text.encode())
    run = finished_run(tmp_path / "w", {"path": [str(tmp_path / "data/a"), str(tmp_path / "data/b")]})
    exported = export(run, tmp_path / "out")
    removed = {f"{folder}/{i:02}.txt" for folder in "ab" for i in range(0, 15, 3)}
    names = {str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*.txt")}
    assert set(exported.files) == names - removed
    for name in exported.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "data" / name).read_bytes()


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path: Path) -> None:
    for folder in ("x", "y/z"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        write_lines(tmp_path / "data" / folder / "a.jsonl", [f"{folder} {text}" for text in TEXTS])
    run = finished_run(tmp_path / "w", {"path": str(tmp_path / "data/**/*.jsonl")})
    assert export(run, tmp_path / "out").files == ["x/a.jsonl", "y/z/a.jsonl"]
    for folder in ("x", "y/z"):
        written = [json.loads(line)["text"] for line in (tmp_path / "out" / folder / "a.jsonl").open()]
        assert written == [f"{folder} {TEXTS[i]}" for i in rows_kept(len(TEXTS))]


def write_lines(path: Path, texts: list[str], **columns: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    rows = ({"text": text, **{name: values[i] for name, values in columns.items()}} for i, text in enumerate(texts))
    return write_rows(path, rows)


def test_a_clean_data_set_holds_the_selected_and_no_quarantined_document(tmp_path: Path) -> None:
    texts = [*TEXTS, " ", TEXTS[3] + " again"]
    path = write_lines(tmp_path / "data/a.jsonl", texts, id=[*map(str, range(31)), "4"])
    run = finished_run(tmp_path / "w", {"path": path, "id": "id"}, direction="clean")
    exported = export(run, tmp_path / "out")
    written = [json.loads(line)["text"] for line in (tmp_path / "out/a.jsonl").open()]
    assert written == [texts[i] for i in rows_kept(30, "selected")]
    assert (exported.counts.selected, exported.counts.quarantined, exported.counts.kept) == (10, 2, 10)
    assert "2 audited documents could not be scored (quarantined): never selected, so left out" in (
        " ".join(exported.sentences())
    )
    assert export(run, tmp_path / "rest", keep="rest").counts.kept == 22


def test_a_run_that_left_documents_to_earlier_runs_exports_what_it_selected_alone(tmp_path: Path) -> None:
    """Whether those are kept, the earlier runs alone can tell."""
    path = write_lines(tmp_path / "data/a.jsonl", TEXTS, n=list(range(30)))
    store = Store(finished_run(tmp_path / "w", {"path": path}))
    receipt = next(receipt for receipt in read_receipts(store, "score") if receipt.role == "audit")
    withdraw_receipt(store, "score", receipt.shard)
    write_receipt(store, "score", replace(receipt, n_in=receipt.n_in + 1, n_judged=1))
    refused = refusal(store.url, tmp_path / "rest")
    assert re.search(r"1 documents of run .* are already audited by earlier runs \(against\)", refused)
    assert not (tmp_path / "rest").exists()
    export(store.url, tmp_path / "selected", keep="selected")
    assert numbers_in(tmp_path / "selected/a.jsonl") == rows_kept(30, "selected")


def test_an_id_that_stands_in_an_earlier_shard_is_quarantined_by_its_place(tmp_path: Path) -> None:
    """Selection takes it out of the scores, and both documents may have one text."""
    texts = [sentence(i, 60) for i in range(40)]
    texts[36] = texts[0]
    ids = [str(i if i != 36 else 0) for i in range(40)]
    path = write_lines(tmp_path / "data/a.jsonl", texts, id=ids, n=list(range(40)))
    run = finished_run(tmp_path / "w", {"path": path, "id": "id"})
    assert export(run, tmp_path / "without", quarantined=False).counts.quarantined == 1
    assert numbers_in(tmp_path / "without/a.jsonl") == rows_kept(40)
    export(run, tmp_path / "with")
    assert numbers_in(tmp_path / "with/a.jsonl") == sorted([*rows_kept(40), 36])


def numbers_in(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.open()]


def test_an_input_of_which_nothing_is_kept_is_an_empty_file_of_its_format(tmp_path: Path) -> None:
    pq.write_table(table(), path := tmp_path / "b.parquet")
    run = finished_run(tmp_path / "w", {"path": str(path), "id": "id"}, chosen=lambda document: False)
    assert export(run, tmp_path / "out", keep="selected").counts.kept == 0
    written = pq.read_table(tmp_path / "out/b.parquet")
    assert (len(written), written.schema.equals(table().schema)) == (0, True)


MIB = 1 << 20


def copy(path: Path, form: str, rows: np.ndarray) -> int:
    """Copy a file without some rows; the bytes that were written."""
    shard = whole_shard(path, form)
    source = ExportSource((replace(shard, limits=LimitsConfig(document_bytes=MIB)),), "a")
    written: list[int] = []
    sink = SimpleNamespace(write=lambda data: written.append(len(data)), flush=lambda: None, closed=False)
    format_named(form).export.copy(source, RowMarks([rows], False), lambda _: nullcontext(sink))
    return sum(written)


def test_a_line_is_copied_in_pieces(tmp_path: Path) -> None:
    record = b'"' + (b"x" * 65_533 + b'""\n') * 384 + b'"'
    for form, head, line in (("jsonl", b"", b"x" * (24 * MIB)), ("csv", b"text\n", record)):
        path = tmp_path / f"a.{form}"
        path.write_bytes(head + line + b"\nlast\n")
        tracemalloc.start()
        written = copy(path, form, np.array([1]))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert written == len(head + line) + 1, form
        assert peak < 12 * MIB, form


@pytest.mark.parametrize("form", ["parquet", "dataset"])
def test_a_table_is_copied_in_pieces(tmp_path: Path, form: str) -> None:
    """Arrow's memory, of a file of 256 MiB."""
    pieces, rows, rng = 32, 128, np.random.default_rng(0)
    texts = [rng.bytes(MIB // 32).hex() for _ in range(rows)]
    table, path = pa.table({"text": texts}), tmp_path / "a"
    if form == "parquet":
        with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
            for _ in range(pieces):
                writer.write_table(table)
    else:
        path.mkdir()
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (path / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "a"}))
        (path / "dataset_info.json").write_text("{}")
        with pa.OSFile(str(path / files[0]["filename"]), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            for _ in range(pieces):
                out.write_table(table)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        written = copy(path, form, np.arange(1, pieces * rows, 2))
    finally:
        pa.set_memory_pool(before)
    assert written > 100 * MIB
    assert 0 < pool.max_memory() < 100 * MIB
