"""Run a piece of Python in a process of its own that may take so much memory, and no more."""

import textwrap

from tests.helpers.clusters import output_of

BEGIN = """
import resource
from pathlib import Path

def room(megabytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))

"""


def run_within(megabytes: int, imports: str, code: str, seconds: float = 60) -> str:
    """What code prints that may take so many megabytes of address space beyond its imports."""
    script = f"{BEGIN}\n{textwrap.dedent(imports)}\nroom({megabytes})\n{textwrap.dedent(code)}"
    return output_of(script, seconds=seconds).strip()
