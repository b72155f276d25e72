"""What a user can write wrongly, and what a place can be, ends in one line with the value and never in a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UserError
from pipeline.store.files import Store
from tests.helpers.clusters import free_port
from tests.helpers.commands import printed, refusal
from tests.helpers.finished import rows
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.object_store import object_store

DEEP = "[" * 20_000 + "]" * 20_000
DIGITS = "7" * 5000
TEXTS = [sentence(i) for i in range(8)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (".".join("a" * 20_000) + "=1", "at most 100 keys, got 20,000"),
        ("." * 20_000 + "=1", "at most 100 keys, got 20,001"),
        (f"selections.{DIGITS}.alpha=1", "selections is a list and has no entry"),
        ("selections.².alpha=1", "selections is a list and has no entry '²'; its only entry is 0"),
    ],
    ids=["dots", "only dots", "a long place", "a place in superscript"],
)
def test_a_setting_that_cannot_be_one(
    setting: str, message: str, make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "plan", str(make_audit(TEXTS, TEXTS)), "--set", setting)


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        ({"target_modules": ["q_prj"]}, "no linear layer 'q_prj' in the model; did you mean 'q_proj'?"),
        ({"group": "news"}, "group 'news' needs corpus.unseen.group, a column"),
    ],
)
def test_an_adapter_that_cannot_be_trained(
    adapter: dict[str, Any], line: str, make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"detectors": [{"fsd": {"base": "loss"}}], "selections": [], "fsd": adapter}
    path = make_audit(20, 20, **settings)
    assert line in refusal(capsys, "plan", path)


def lines_of(texts: list[str]) -> str:
    return "".join(json.dumps({"id": f"a{i}", "text": text}) + "\n" for i, text in enumerate(texts))


def test_a_line_of_json_that_its_parser_fails_on_costs_one_document(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit(20, 20))
    with (tmp_path / "audit.jsonl").open("a") as file:
        for value in (DEEP, DIGITS[1:] + DIGITS, '"a", "text": "b"'):
            file.write(f'{{"id": "last", "text": {value}}}\n')
    code, _, errors = printed(capsys, "run", path, "--set", "error_budget=0.5")
    assert (code, errors) == (0, "")
    assert rows(tmp_path / "run").keys() == {f"{role}-{i}" for role in ("audit", "unseen") for i in range(20)}
    bad = pq.read_table(tmp_path / "run/quarantine").to_pylist()
    assert sorted((row["row"], row["reason"]) for row in bad) == [(row, "undecodable") for row in (20, 21, 22)]
    assert any("field 'text' stands twice" in row["message"] for row in bad)


@pytest.mark.parametrize("value", [DEEP, DIGITS], ids=["brackets", "digits"])
def test_a_first_line_of_json_that_its_parser_fails_on(
    value: str, make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit(TEXTS, [sentence(i) for i in range(20, 28)]))
    (tmp_path / "audit.jsonl").write_text(f'{{"id": "a", "text": {value}}}\n' + lines_of(TEXTS))
    code, output, _ = printed(capsys, "plan", path)
    assert code == 0
    assert f"1 of 9 sampled documents of {tmp_path}/audit.jsonl cannot be read: 1 undecodable" in output


def write_twice(path: Path, column: str) -> None:
    """A file with two columns of one name."""
    names = ["id", "text", column]
    if path.suffix == ".parquet":
        arrays = [pa.array([f"{name} {i}" for i in range(9)]) for name in names]
        pq.write_table(pa.Table.from_arrays(arrays, names=names), path)
    elif path.suffix == ".csv":
        path.write_text(",".join(names) + "\n" + "".join(f"{i},some text,other\n" for i in range(9)))
    else:
        path.write_text("".join(f'{{"id": "{i}", "text": "some text", "{column}": "other"}}\n' for i in range(9)))


@pytest.mark.parametrize("column", ["text", "id"])
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_column_that_stands_twice(
    suffix: str, column: str, make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_twice(tmp_path / f"twice{suffix}", column)
    command = ["plan", make_audit(TEXTS, TEXTS), "--set", f"corpus.audit.path={tmp_path}/twice{suffix}"]
    error = refusal(capsys, *command)
    if suffix == ".jsonl":
        assert f"9 undecodable (first: field '{column}' stands twice in it)" in error
    else:
        assert f"column '{column}' occurs 2 times in" in error
    if column == "id":
        assert printed(capsys, *command, "--set", "corpus.audit.id=null")[0] == 0, "a column that nobody reads"


@pytest.mark.parametrize("pattern", ["link.jsonl", "lin*.jsonl", "folder"])
def test_a_link_to_nothing_as_an_input(
    pattern: str, make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    for place in ("link.jsonl", "folder/link.jsonl"):
        (tmp_path / place).symlink_to("nowhere.jsonl")
    error = refusal(capsys, "plan", str(make_audit(TEXTS, TEXTS)), "--set", f"corpus.audit.path={tmp_path}/{pattern}")
    assert "link.jsonl" in error


def test_an_input_at_an_address_where_nobody_listens(make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    for name in ("a.jsonl", "*.jsonl"):
        path = f"corpus.audit.path=http://{address}/{name}"
        error = refusal(capsys, "plan", str(make_audit(TEXTS, TEXTS)), "--set", path)
        assert f"Cannot connect to host {address}" in error


def test_a_bucket_that_does_not_exist(make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_audit(TEXTS, TEXTS))
    with object_store():
        assert "bucket" in refusal(capsys, "run", path, "--set", "run=s3://nowhere/run")
        assert "nowhere" in refusal(capsys, "plan", path, "--set", "corpus.audit.path=s3://nowhere/a.jsonl")
        assert "s3://nowhere/run" in refusal(capsys, "status", "s3://nowhere/run")


ODD = {
    "empty": ("", "needs a name"),
    "a blank": (" ", "needs a name"),
    "a line break": ("a\nb", "no line break or other control character"),
    "an escape": ("a\x1b[31mb", "no line break or other control character"),
    "a null": ("a\0b", "no line break or other control character"),
    "half a character": ("a\ud800", "must be valid Unicode text"),
    "no scheme": ("://", "local path or an address such as s3://bucket/run"),
    "an unknown scheme": ("nonsense://x", "Protocol not known: nonsense"),
    "a long name": ("x" * 300, "a part has 300 bytes"),
    "a long path": ("/" + "y/" * 3000, "has 6,000 bytes"),
    "a device": ("/dev/null", "is a file, not a folder"),
    "below a device": ("/dev/null/run", "/dev/null is a file, not a folder"),
    "a folder that nobody may make": ("/proc/run", "/proc/run"),
    "a file in an archive": ("zip://x", "cannot open run directory zip://x"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_run_directory(case: str, make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]) -> None:
    run, message = ODD[case]
    path = make_audit(TEXTS, TEXTS, run=run.replace("\ud800", "\ue000"))
    if case != "half a character":  # which YAML cannot hold
        stated = "run is empty: name a folder" if run == "" else message
        assert stated in refusal(capsys, "run", str(path)).replace("⟨", "")
    for command in ("status", "select", "report"):
        assert refusal(capsys, command, run)
    if case != "a folder that nobody may make":
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            Store(run)


def test_a_run_directory_that_is_a_link_to_nothing(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    path = make_audit(TEXTS, TEXTS, run=str(tmp_path / "link"))
    assert "is a link to nothing" in refusal(capsys, "run", str(path))


def test_a_configuration_of_an_odd_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "embedded null byte" in refusal(capsys, "plan", "a\0b")
    assert "File name too long" in refusal(capsys, "plan", "z" * 1000)
    assert refusal(capsys, "plan", "z" * 5000).endswith("...\n")


def test_a_home_that_cannot_be_written(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    for name in ("XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR"):
        monkeypatch.delenv(name, raising=False)
    code, _, errors = printed(capsys, "run", str(make_audit(8, 8)))
    assert (code, "Traceback" in errors) == (0, False)
    assert os.path.exists(tmp_path / "run/report/report.html")
