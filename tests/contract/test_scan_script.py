"""scan.sh, which schedulers call, with the command itself: its exit codes, SIGTERM, and the scan of a week."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from answers import check_same
from command import ROOT, SEENSET, Ended, Orders, done, end_of, environment, wait_for
from world import FEW

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "cluster/kuberay/setup/scan.sh"


def start(*arguments: str | Path, **changes: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(SEENSET[0]).parent), os.environ["PATH"]])
    return subprocess.Popen(
        ["bash", str(SCRIPT), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PATH=path, **changes),
        start_new_session=True,
    )


def scan(*arguments: str | Path, **changes: str) -> Ended:
    return end_of(start(*arguments, **changes))


def status(run: Path) -> tuple[str, int]:
    facts = json.loads((run / "status.json").read_text())
    return facts["state"], facts["exit_code"]


def test_0_2_and_3_are_the_codes_of_the_command(audit: Callable[..., Path], reference: Path, tmp_path: Path) -> None:
    path = audit(error_budget=0.0)
    assert "no file" in done(scan(path, "--set", "corpus.audit.path=none.jsonl"), 2).line
    done(scan(path), 3)
    assert status(tmp_path / "run") == ("incomplete", 3)
    done(scan(path, "--set", "error_budget=0.2"))
    assert status(tmp_path / "run") == ("complete", 0)
    check_same(tmp_path / "run", reference, *FEW)


def test_4_and_5_are_no_failures_and_stay_in_the_status(world: Path, second: Path, contradicted: Path) -> None:
    for run, code in ((second, 4), (contradicted, 5)):
        done(scan(world / f"{run.name}.yaml", "--fail-if-selected"))
        assert status(run) == ("complete", code)


def test_75_of_a_second_job_and_130_after_sigterm_which_a_retry_resumes(
    audit: Callable[..., Path], orders: Orders, reference: Path, tmp_path: Path
) -> None:
    orders.give(seconds=0.3)
    path, run = audit(), tmp_path / "run"
    first = start(path)
    wait_for(lambda: list((run / "receipts/score").glob("*.json")), first)
    assert done(scan(path), 75).line
    first.send_signal(signal.SIGTERM)  # to the script alone
    assert done(end_of(first), 130).line
    assert status(run) == ("incomplete", 130)
    orders.give()
    done(scan(path))
    check_same(run, reference, *FEW)


def test_without_arguments_it_is_the_scan_of_the_iso_week(audit: Callable[..., Path], tmp_path: Path) -> None:
    weeks = {f"{datetime.now(UTC):%G-W%V}"}
    done(scan(SEENSET_AUDIT=str(audit()), SEENSET_SCANS=str(tmp_path / "scans")))
    weeks.add(f"{datetime.now(UTC):%G-W%V}")
    (run,) = (tmp_path / "scans").iterdir()
    assert run.name in weeks
    assert status(run) == ("complete", 4), "something is selected, which is no failure"
