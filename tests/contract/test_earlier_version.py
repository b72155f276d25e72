"""A run directory of an earlier version is refused in one line that names the version and what to do."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from command import here

import seenset as interface

FILED = Path(__file__).with_name("expected") / "run-0.9.0.tar.gz"
LINE = (
    "manifest.json was written by seenset 0.9.0 in form 1, and this version reads form 3: start a new run directory "
    "with seenset run, or use that version"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 40 audited and 60 unseen documents, beside its configuration and corpus; the model is not there."""
    with tarfile.open(FILED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_every_reader_of_a_run_of_0_9_0_refuses_it_and_changes_nothing(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for command in (
        ("status", run),
        ("report", run),
        ("verdict", run),
        ("select", run),
        ("select", run, "--set", "selections.*.alpha=0.9"),
        ("pack", run, tmp_path / "run.seenset"),
        ("export", run, "--list"),
        ("compare", run, tmp_path / "other"),
        ("joint", run, tmp_path / "other"),
    ):
        ended = here(*command)
        assert (ended.code, LINE in ended.line) == (2, True), command
    with pytest.raises(interface.UserError, match=r"was written by seenset 0\.9\.0 in form 1"):
        interface.open_run(run)
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_a_run_does_not_go_on_in_the_directory_of_0_9_0(run: Path, world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "model", "model")
    for command in (("run", "audit.yaml"), ("run", "audit.yaml", "--set", "seed=7")):
        ended = here(*command)
        assert (ended.code, LINE in ended.line) == (2, True), command
