"""What a name holds, of a file, a document or a group, reaches no terminal and no page as a command to it."""

import json
from pathlib import Path

import pytest
import yaml

from pipeline.errors import visible
from tests.helpers.commands import printed, refusal
from tests.helpers.made_up import MakeAudit, sentence, write_jsonl, write_rows

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
"""Sets a title, clears the screen, writes in red by an 8-bit control, and turns the direction of writing round."""

TEXTS = [sentence(i, 60) for i in range(40)]
OTHERS = [sentence(1000 + i) for i in range(40)]


def evil_audit(make_audit: MakeAudit, tmp_path: Path) -> str:
    """An audit whose files, ids and groups hold controls."""
    path = make_audit(TEXTS, OTHERS)
    config = yaml.safe_load(path.read_text())
    for role, texts in (("audit", TEXTS), ("unseen", OTHERS)):
        rows = [{"id": f"{role} {EVIL} {i}", "text": t, f"g{EVIL}": f"{EVIL}{i % 2}"} for i, t in enumerate(texts)]
        file = write_rows(tmp_path / f"{role}{EVIL}.jsonl", rows)
        config["corpus"][role] = {"path": file, "id": "id", "group": f"g{EVIL}"}
    config["selections"][0] |= {"alpha": 0.9, "detectors": ["zlib"], "calibration": "by_group"}
    path.write_text(yaml.safe_dump(config))
    return str(path)


def assert_harmless(text: str) -> None:
    assert [character for character in text if visible(character) != character] == []


@pytest.mark.slow
def test_a_run_of_names_that_hold_controls_prints_none_and_shows_none_on_its_page(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = evil_audit(make_audit, tmp_path), str(tmp_path / "run")
    for command in (f"plan {path}", f"plan {path} --json", f"run {path}", f"select {run} --json", f"status {run}"):
        code, output, errors = printed(capsys, *command.split())
        assert code == 0, errors
        assert_harmless(output + errors)
    page = (tmp_path / "run/report/report.html").read_text()
    assert_harmless(page)
    assert "U+001B" in page, "names stand there, and are seen"


def test_an_error_that_names_a_file_or_a_column_prints_no_control(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = evil_audit(make_audit, tmp_path)
    error = refusal(capsys, "plan", path, "--set", f"corpus.audit.path={json.dumps(str(tmp_path / 'nothing.jsonl'))}")
    assert_harmless(error)
    assert "U+001B" in error, "the neighbours are named"
    error = refusal(capsys, "plan", path, "--set", "corpus.audit.text=g")
    assert_harmless(error)
    assert "U+009B" in error


def test_a_name_that_holds_a_line_break_writes_no_line_of_its_own(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a\nseenset: nothing was selected"
    assert "\nseenset" not in refusal(capsys, "plan", str(make_audit(TEXTS, OTHERS)), "--set", f"seed={name!r}")[1:]
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / f"{name}.jsonl", TEXTS)
    code, output, _ = printed(capsys, "init", str(tmp_path / "data"), "--json")
    assert (code, json.loads(output)["config"].endswith("audit.yaml")) == (0, True)
