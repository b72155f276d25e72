"""A run in a notebook shows one bar a stage, which the kernel writes anew, and plain lines beside it."""

import subprocess
import sys
from typing import Any

import pytest

STAGE = """
import time
from pipeline.results.status import Counts
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


def test_ipython_on_a_terminal_is_no_notebook() -> None:
    pytest.importorskip("IPython", reason="pip install ipython")
    code = (
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell as Shell; Shell.instance();"
        "from ray_jobs.progress import is_notebook; assert not is_notebook()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
