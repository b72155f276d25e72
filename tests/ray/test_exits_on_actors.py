"""A detector that calls sys.exit on an actor costs its documents, and never ends an incomplete run as done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LEAVING = """
import sys
from seenset import FORWARD, detector

@detector(needs={FORWARD: ["log_prob"]})
def leaving(evidence):
    sys.exit(0)
"""


@pytest.mark.slow
def test_a_detector_that_exits_on_an_actor_ends_with_an_incomplete_run(
    tmp_path: Path, make_audit: Callable[..., Path]
) -> None:
    (tmp_path / "mine.py").write_text(LEAVING)
    selection = {"name": "members", "detectors": ["leaving"], "procedure": "bh", "alpha": 0.2}
    settings = {"detectors": ["leaving"], "selections": [selection], "import": [str(tmp_path / "mine.py")]}
    audit = make_audit(**settings, resources={"cluster": "ray"})
    command = [sys.executable, "-m", "ray_jobs.cli", "run", str(audit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ})
    assert done.returncode == 3, done.stdout + done.stderr
    assert "100 of 100 documents were quarantined" in done.stderr
