"""Compressed files of other programs are read; where not, the message says where the data end, or what to do."""

import bz2
import gzip
import json
import lzma
import random
import zlib
from pathlib import Path

import pytest
import zstandard
from bounded_memory import run_within
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus import unpacking
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import measure_extent
from pipeline.corpus.inputs import find_inputs, plan_shards
from tests.helpers.commands import user_error
from tests.helpers.made_up import sentence

LINES = [json.dumps({"text": sentence(number)}) + "\n" for number in range(300)]
PLAIN = "".join(LINES).encode()
HALVES = ["".join(LINES[:150]).encode(), "".join(LINES[150:]).encode()]
PACK = {".gz": gzip.compress, ".zst": zstandard.compress}
SKIPPED = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"


def texts(path: Path) -> list[str]:
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path)}})
    shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig())
    return [document.text for shard in shards for document in read_shard(shard)]


def written(folder: Path, data: bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def long_window(data: bytes, log: int) -> bytes:
    """A frame with a window of 2**log bytes, whose header does not state the size of its content."""
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frame = bytearray(packer.compress(data) + packer.flush())
    frame[5] = (log - 10) << 3  # a compressor with such a window would take gigabytes
    return bytes(frame)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("padding", [0, 1, 3, 17, 100_000])
def test_members_and_zeros_behind_them_are_read(tmp_path: Path, suffix: str, padding: int) -> None:
    parts = [PACK[suffix](half) for half in HALVES]
    expected = [sentence(number) for number in range(300)]
    for data in (
        PACK[suffix](PLAIN),
        b"".join(parts),
        (bytes(padding)).join(parts),
        parts[0] + PACK[suffix](b"") + parts[1],
    ):
        path = written(tmp_path, data + bytes(padding), f"a.jsonl{suffix}")
        assert texts(path) == expected
        (entry,) = find_inputs(CorpusConfig.model_validate({"audit": {"path": str(path)}}))
        assert measure_extent(entry).rows == 300


def test_frames_without_content_are_skipped(tmp_path: Path) -> None:
    first, second = (zstandard.compress(half) for half in HALVES)
    for data in (SKIPPED + first + second, first + SKIPPED + second, first + second + SKIPPED):
        assert len(texts(written(tmp_path, data, "a.jsonl.zst"))) == 300


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("junk", [b"junk", b"\n", b"\0\0junk", b"\x1f", b"PK\3\4" + bytes(100)])
@pytest.mark.parametrize("rows", [300, 20_000])
def test_what_follows_the_data_is_named_with_the_byte_at_which_they_end(
    tmp_path: Path, suffix: str, junk: bytes, rows: int
) -> None:
    rng = random.Random(0)
    lines = [json.dumps({"text": f"{sentence(n % 300)} {rng.random()}"}) + "\n" for n in range(rows)]
    whole = PACK[suffix]("".join(lines).encode())
    path = written(tmp_path, whole + junk, f"a.jsonl{suffix}")
    zeros = len(junk) - len(junk.lstrip(b"\0"))
    refused = user_error(texts, path)
    end = len(whole) + zeros
    assert f"its data end at byte {end:,}, and something else follows: cut it there (head -c {end} a.jsonl" in refused
    path.write_bytes(path.read_bytes()[:end])
    assert len(texts(path)) == rows


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("lost", [1, 4, 9, 300])
def test_a_file_that_breaks_off_is_truncated(tmp_path: Path, suffix: str, lost: int) -> None:
    for data in (PACK[suffix](PLAIN), b"".join(PACK[suffix](half) for half in HALVES)):
        assert "it is truncated" in user_error(texts, written(tmp_path, data[:-lost], f"a.jsonl{suffix}"))


@pytest.mark.parametrize("suffix", PACK)
def test_a_changed_byte_is_found(tmp_path: Path, suffix: str) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True).compress if suffix == ".zst" else gzip.compress
    data = bytearray(checked(PLAIN))
    data[len(data) // 2] ^= 5
    refused = user_error(texts, written(tmp_path, bytes(data), f"a.jsonl{suffix}"))
    assert "a.jsonl" in refused
    assert "damaged" in refused


@pytest.mark.parametrize("log", [24, 27, 28, 31])
def test_a_long_window_is_read_where_there_is_memory_for_it(
    tmp_path: Path, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_free_memory", lambda: 1 << 32)
    path = written(tmp_path, long_window(PLAIN, log), "a.jsonl.zst")
    assert zstandard.get_frame_parameters(path.read_bytes()[:18]).window_size == 1 << log
    assert len(texts(path)) == 300


IMPORTS = """
from pipeline.corpus.input_files import open_plain
from pipeline.errors import UserError
from test_unpacking import Path, texts
"""


def test_a_window_beyond_the_memory_is_answered_by_the_command_that_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, long_window(PLAIN, 31), "a.jsonl.zst")
    code = f"""
    try:
        texts(Path({str(path)!r}))
    except UserError as error:
        print(error)
    """
    found = run_within(900, IMPORTS, code)
    assert "takes a window of 2,048 MiB to unpack, too much for the memory that is free" in found
    assert found.endswith("unpack it with zstd -d --long=31 a.jsonl.zst")
    monkeypatch.setattr(unpacking, "_free_memory", lambda: 3 << 30)
    assert user_error(texts, path).endswith("unpack it with zstd -d --long=31 a.jsonl.zst")
    for log in (27, 30):
        assert len(texts(written(tmp_path, long_window(PLAIN, log), "b.jsonl.zst"))) == 300


def test_a_window_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    data = bytearray(long_window(PLAIN, 31))
    assert data[:4] == b"\x28\xb5\x2f\xfd"
    data[5] = 0xF8  # a window of 2**41 bytes
    assert "zstd -d --long=31" in user_error(texts, written(tmp_path, bytes(data), "a.jsonl.zst"))


def test_the_file_of_the_examples_is_read_or_answered_by_the_command(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_folder / "cases/long31.jsonl.zst"
    for free, rows in ((1 << 32, 60), (1 << 31, None)):
        monkeypatch.setattr(unpacking, "_free_memory", lambda free=free: free)
        if rows is None:
            assert user_error(texts, path).endswith("unpack it with zstd -d --long=31 long31.jsonl.zst")
        else:
            assert len(texts(path)) == rows


@pytest.mark.parametrize("name", ["skippable.jsonl.zst", "two_members.jsonl.gz", "padded.jsonl.gz"])
def test_other_files_of_the_examples_are_read(shared_folder: Path, name: str) -> None:
    assert len(texts(shared_folder / "cases" / name)) == 60


def test_the_example_with_something_behind_it_is_named_with_the_byte(shared_folder: Path) -> None:
    refused = user_error(texts, shared_folder / "cases/garbage.jsonl.gz")
    assert "its data end at byte 3,909, and something else follows: cut it there (head -c 3909 garbage" in refused


def test_a_dictionary_is_named(tmp_path: Path) -> None:
    dictionary = zstandard.train_dictionary(2000, [line.encode() for line in LINES])
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(PLAIN)
    refused = user_error(texts, written(tmp_path, data, "a.jsonl.zst"))
    assert f"was compressed with dictionary {dictionary.dict_id()}: unpack it with zstd -d -D DICTIONARY" in refused


@pytest.mark.parametrize(
    ("name", "data", "command"),
    [
        ("a.jsonl.bz2", bz2.compress(PLAIN), "bunzip2 -k a.jsonl.bz2"),
        ("a.jsonl.xz", lzma.compress(PLAIN), "xz -dk a.jsonl.xz"),
        ("a.jsonl.lz4", b"", "lz4 -d a.jsonl.lz4"),
        ("a.zip", b"PK", "unzip a.zip"),
        ("a.7z", b"", "7z x a.7z"),
        ("a.tar.gz", gzip.compress(bytes(1024)), "gunzip -k a.tar.gz"),
        ("a.tgz", gzip.compress(bytes(1024)), "tar -xzf a.tgz"),
    ],
)
def test_other_compressions_are_answered_by_the_command_that_unpacks(
    tmp_path: Path, name: str, data: bytes, command: str
) -> None:
    assert user_error(texts, written(tmp_path, data, name)).endswith(f"; unpack it: {command}")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    assert "it does not start as a gzip file does" in user_error(texts, written(tmp_path, PLAIN, "a.jsonl.gz"))
    assert "it does not start as a zstd file does" in user_error(texts, written(tmp_path, PLAIN, "a.jsonl.zst"))
    assert len(texts(written(tmp_path, gzip.compress(PLAIN), "A.JSONL.GZ"))) == 300


@pytest.mark.slow
@pytest.mark.parametrize("suffix", PACK)
def test_a_file_of_zeros_unpacks_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"zeros{suffix}"
    with path.open("wb") as file:
        if suffix == ".zst":
            with zstandard.ZstdCompressor(level=19).stream_writer(file) as writer:
                for _ in range(1000):
                    writer.write(bytes(1 << 20))
        else:
            packer = zlib.compressobj(9, wbits=31)
            for _ in range(1000):
                file.write(packer.compress(bytes(1 << 20)))
            file.write(packer.flush())
    code = f"""
    size = 0
    with open_plain({str(path)!r}) as file:
        while piece := file.read(1 << 16):
            size += len(piece)
    print(size)
    """
    assert run_within(150, IMPORTS, code, seconds=120) == str(1000 << 20)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 70), st.booleans())
def test_any_members_are_read_as_one_content(parts: list[bytes], padding: int, cut: int, zstd: bool) -> None:
    import io

    pack, name = (zstandard.compress, "a.zst") if zstd else (gzip.compress, "a.gz")
    data = bytes(padding).join(pack(part) for part in parts) + bytes(padding)
    stream = unpacking.Unpacked(name, io.BytesIO(data), 1 << 20)
    read = list(iter(lambda: stream.read(cut), b""))
    assert b"".join(read) == b"".join(parts)
    assert stream.compressed == len(data)
