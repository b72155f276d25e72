"""Run a piece of Python in a process of its own that may take so much memory, and no more."""

from __future__ import annotations

import subprocess
import sys
import textwrap

BEGIN = """
import resource
from pathlib import Path

def room(megabytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))

"""


def run_within(megabytes: int, imports: str, code: str, seconds: float = 60) -> str:
    """What a piece of code prints that may take so much memory beyond its imports.

    Args:
        megabytes: of address space.
        imports: done before memory is counted.
        code: to be run.
        seconds: after which it is killed.

    Raises:
        AssertionError: it failed, with what it wrote to standard error.
    """
    script = f"{BEGIN}\n{textwrap.dedent(imports)}\nroom({megabytes})\n{textwrap.dedent(code)}"
    end = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds)
    assert end.returncode == 0, end.stderr[-2000:]
    return end.stdout.strip()
