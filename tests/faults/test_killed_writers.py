"""Temporary files of a writer that was killed are not left in a finished run."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.store.files import Store
from pipeline.store.lock import RunLock
from tests.helpers.finished import run
from tests.helpers.made_up import MakeAudit

KILLED = """
import os, signal, sys
from pipeline.store.files import Store

store, name = Store(sys.argv[1]), sys.argv[2]
with store.replaced(name) as file:
    file.write(b"half of what")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
PLACES = ("status.json", "scores/audit-000000-a.parquet", "receipts/score/audit-000000.json", "report/report.html")


def kill_a_writer(folder: Path, name: str) -> None:
    """Kill a process that writes a file of a run; its temporary file stays."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder), name], check=False)
    assert ended.returncode == -signal.SIGKILL


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_a_finished_run_has_no_temporary_file_of_a_killed_writer(make_audit: MakeAudit, tmp_path: Path) -> None:
    for name in PLACES:
        kill_a_writer(tmp_path / "run", name)
    assert len(temporaries(tmp_path / "run")) == len(PLACES)
    path = make_audit()
    assert run(path).exit_code == 0
    assert temporaries(tmp_path / "run") == []
    assert "selecting" in (said := run_again(path))
    assert "score:" not in said


def run_again(path: Path) -> str:
    """What a second run prints."""
    code = f"from ray_jobs.cli import main; main(['run', {str(path)!r}])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_lock_and_files_of_other_names_stay(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    with RunLock(store) as lock:
        for name in (".hidden", "a.12345678", ".a.1234567g", "scores/.keep"):
            store.write(name, json.dumps(name).encode())
        kill_a_writer(tmp_path / "run", "scores/a.parquet")
        before = {path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*") if path.is_file()}
        lock.held.remove_temporaries()
        after = {path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*") if path.is_file()}
        (gone,) = before - after
        assert gone.name.startswith(".a.parquet.")
        lock.check()
