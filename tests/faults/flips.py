"""Plan and read a Parquet file with flipped bytes in its footer, each time in a process that may be killed."""

import os
import random
import resource
import tempfile
from pathlib import Path

from oracles import parquet_footer, read_footer


def main(flips: int) -> dict[str, list[list[int]]]:
    """Where the flips stood and what they were, by how the processes ended."""
    ends: dict[str, list[list[int]]] = {}
    generator, footer = random.Random(0), parquet_footer()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(flips):
            place, mask = generator.randrange(len(footer)), generator.randrange(1, 256)
            damaged = bytearray(footer)
            damaged[place] ^= mask
            status = _status_of(bytes(damaged), Path(folder))
            if os.WIFSIGNALED(status):
                end = f"signal {os.WTERMSIG(status)}"
            else:
                end = "another error" if os.WEXITSTATUS(status) else "documents or one line"
            ends.setdefault(end, []).append([place, mask])
    return ends


def _status_of(footer: bytes, folder: Path) -> int:
    if process := os.fork():
        return os.waitpid(process, 0)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        read_footer(footer, folder)
        os._exit(0)
    finally:
        os._exit(1)
