"""No bytes break a reader: each file is documents, quarantined ones among them, or one line. Findings stay as cases."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import READERS, parquet_file

CASES = sorted(path for path in (Path(__file__).parent / "cases").glob("*/*") if path.is_file())

SCRAPS: dict[str, list[bytes]] = {
    "jsonl": [
        b'{"id": 1, "text": "one"}',
        b'{"text": ',
        b'"',
        b"\n",
        b"\r\n",
        b"\xef\xbb\xbf",
        b"\xff",
        b"[" * 99,
        b"{}",
        b"1e999",
        b'{"text": "\\ud800"}',
        b'{"text": null, "id": []}',
        b"x" * 301,
        b'{"text": "' + b"9" * 280 + b'"}',
        b"9" * 5000,
    ],
    "csv": [*b'text,id text , " "" a'.split(), *b"\n|\r|\r\n|\0|\xff| |\xc3\xa9".split(b"|"), b"x" * 301],
    "parquet": [parquet_file()[4:40], parquet_file()[40:200], b"\0", b"\xff\xff\xff\xff", b"\x15\x00", b"PAR1"],
    "txt": [b"a text", b"\xef\xbb\xbf", b"\xff", b" ", b"\n", b"x" * 299, b"\0"],
    "packed": [
        b'{"text": "one"}\n',
        b"\x1f\x8b\x08\x00",
        b"\x28\xb5\x2f\xfd",
        b"\0",
        b"\n",
        b"x" * 301,
        b'{"text": "' + b"y" * 200,
    ],
    "yaml": [
        b"run: r\n",
        b"model: {path: m}\n",
        b"corpus: {audit: {path: a}}\n",
        b"limits: {document_bytes: 64MiB}\n",
        b"a: &a [1]\n",
        b"b: *a\n",
        b"<<: *a\n",
        b"- ",
        b"{",
        b"[" * 500,
        b"!!python/tuple [1]",
        b"? ",
        b": ",
        b"\t",
        b"\xff",
        b"9" * 5000,
        b"2024-13-01",
        b"detectors: [loss, {min_k: {k: [0.1]}}]\n",
        b"selections: [{name: s}]\n",
        b"~",
        b"'",
        b"\n",
    ],
    "override": [*b"a . = 0 * selections corpus audit [ ] { } *a limits run".split(), b"&a ", b"9" * 5000],
}


@pytest.mark.parametrize("kind", SCRAPS)  # no footers: of some PyArrow still ends the process
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_break_a_reader(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    scraps = st.one_of(st.sampled_from(SCRAPS[kind]), st.binary(max_size=6))
    READERS[kind](b"".join(data.draw(st.lists(scraps, max_size=12))), tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_a_reader_does_not_any_more(case: Path, tmp_path: Path) -> None:
    READERS[case.parent.name](case.read_bytes(), tmp_path)
