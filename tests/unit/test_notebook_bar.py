"""A run in a notebook shows one bar a stage, which the kernel writes anew, and plain lines beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import sentence, write_audit

STAGE = """
import time
from pipeline.audit.status import Counts
from pipeline.stages.events import Advance
from ray_jobs import progress, terminal
from ray_jobs.progress import Reporter

progress.REDRAW_SECONDS = 0.0
reporter, counts = Reporter(terminal.console()), Counts(4, "<b>score</b>", {str(i): 100.0 for i in range(4)})
reporter.say("one input")
"""
WORK = """
with reporter:
    reporter.pace("still loading")
    for step in range(10):
        counts.advance(Advance("0", step, 10 * step))
        reporter.update(counts)
    counts.under_way, counts.size_done, counts.shards_done = {}, 400.0, 4
    reporter.update(counts, last=True)
"""


def run_cells(*cells: str) -> list[Any]:
    """The outputs of the cells of a notebook that a real kernel runs."""
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel: no notebook to run")
    pytest.importorskip("ipykernel", reason="pip install ipykernel: no kernel to run a notebook")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300, allow_errors=True)
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_stage_is_one_output_that_ends_full() -> None:
    _, shown, stopped = run_cells(
        STAGE,
        WORK,
        "with reporter:\n    counts.size_done = 0\n    reporter.update(counts)\n    raise KeyboardInterrupt",
    )
    assert [output.output_type for output in shown] == ["display_data"]
    data = shown[0].data
    assert data["text/plain"].startswith("100% <b>score</b>: shards 4/4")
    assert 'value="1.0000"' in data["text/html"]
    assert "&lt;b&gt;score" in data["text/html"]
    assert "<b>" not in data["text/html"]
    assert [output.output_type for output in stopped] == ["display_data", "error"]
    assert stopped[0].data["text/plain"].startswith("0% stopped: <b>score</b>")


@pytest.mark.slow
def test_an_audit_in_a_notebook_shows_its_stage_and_its_messages(tmp_path: Path, tiny_model_folder: Path) -> None:
    path = write_audit(tmp_path, tiny_model_folder, [sentence(i) for i in range(40)])
    (outputs, quiet) = run_cells(
        f"import seenset\nrun = seenset.audit({str(path)!r})",
        f"_ = seenset.audit({str(path)!r}, quiet=True)",
    )
    assert [output for output in outputs if output.output_type == "error"] == []
    bars = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    lines = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert len(bars) == 1
    assert bars[0].startswith("100% score: shards ")
    assert "run directory" in lines
    assert "ETA" not in lines
    assert [output for output in quiet if output.output_type != "stream"] == []


def test_ipython_on_a_terminal_is_no_notebook() -> None:
    pytest.importorskip("IPython", reason="pip install ipython")
    code = (
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell as Shell; Shell.instance();"
        "from ray_jobs.progress import is_notebook; assert not is_notebook()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
