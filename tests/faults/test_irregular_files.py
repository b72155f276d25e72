"""Inputs and ledgers that are no files, such as a FIFO or a device, are user errors; none is opened."""

import os
from pathlib import Path

import pytest

from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.inputs import find_inputs
from pipeline.errors import UserError
from pipeline.plan.description import build_config, load_config
from pipeline.run.plan import make_plan
from pipeline.store.files import Store
from pipeline.store.ledger import read_ledger
from tests.helpers.commands import user_error


def refusal(path: Path, **columns: str) -> str:
    return user_error(find_inputs, CorpusConfig.model_validate({"audit": {"path": str(path), **columns}}))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.csv.gz", "a.parquet", "a.txt"])
def test_a_fifo_as_input_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    expected = f"corpus.audit: cannot read {tmp_path / name}: it is a FIFO, not a regular file"
    assert refusal(tmp_path / name) == expected
    assert refusal(tmp_path) == expected


def test_a_text_file_that_links_to_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    (tmp_path / "text.txt").write_text("A document.")
    expected = f"corpus.audit: cannot read {tmp_path / 'endless.txt'}: it is a device, not a regular file"
    assert refusal(tmp_path / "endless.txt") == expected
    assert "1 link leads out of" in refusal(tmp_path)


def test_a_caption_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    os.mkfifo(tmp_path / "a.txt")
    found = refusal(tmp_path, image="image", caption="txt")
    assert found == f"corpus.audit: cannot read {tmp_path / 'a.txt'}: it is a FIFO, not a regular file"


def test_a_ledger_that_is_or_has_a_fifo_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "00000000.json"
    os.mkfifo(fifo)
    expected = f"ledger {tmp_path}: 00000000.json is a FIFO, not a regular file"
    assert user_error(read_ledger, Store(str(tmp_path))) == expected
    assert user_error(lambda: read_ledger(Store(str(fifo)))).endswith(f"{fifo} is a file, not a folder")


def test_a_configuration_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    """It was waited for without end."""
    os.mkfifo(tmp_path / "audit.yaml")
    with pytest.raises(UserError, match=f"^config {tmp_path / 'audit.yaml'} is a FIFO, not a file$"):
        load_config(str(tmp_path / "audit.yaml"), ())


@pytest.mark.parametrize("kind", ["a FIFO", "a file"])
@pytest.mark.parametrize("key", ["against", "series.ledger"])
def test_an_earlier_list_that_is_no_folder_is_refused_before_anything_is_read(
    tmp_path: Path, key: str, kind: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    earlier = tmp_path / "earlier"
    os.mkfifo(earlier) if kind == "a FIFO" else earlier.write_text("")
    corpus = {role: {"path": str(tmp_path / "a.jsonl")} for role in ("audit", "unseen")}
    config = {"run": str(tmp_path / "run"), "model": {"path": "none"}, "corpus": corpus}
    config |= {"detectors": ["loss"], "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh"}]}
    config |= {"against": str(earlier)} if key == "against" else {"series": {"ledger": str(earlier)}}
    what = "the folder of a run or a ledger" if key == "against" else "a folder"
    with pytest.raises(UserError, match=f"^{key}: {earlier} is {kind}, not {what}$"):
        make_plan(build_config(config))
