"""Rounds in which eight processes take over the lock of a dead one; prints how many rounds had so many winners.

python contend.py FOLDER ROUNDS MOUNT, where MOUNT is local (the kernel locks a file) or network.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from typing import Any

from pipeline.errors import BusyError
from pipeline.store import lock as lock_module
from pipeline.store.files import Store
from pipeline.store.lock import RunLock

CONTENDERS = 8
AT_ONCE = 5
"""Rounds: most of the time of one goes by in waiting for the dead."""


def leave(url: str) -> None:
    """Take the lock and die."""
    RunLock(Store(url)).__enter__()
    os._exit(0)


def contend(url: str, start: Any, winners: Any, end: Any) -> None:
    """Take the lock over, and hold it until all have tried."""
    lock = RunLock(Store(url))
    start.wait()
    try:
        lock.__enter__()
        winners.put(lock.owner)
    except BusyError:
        winners.put(None)
    end.wait()
    os._exit(0)


def main(folder: str, rounds: int) -> None:
    """Print the count of rounds by their number of winners."""
    fork = multiprocessing.get_context("fork")
    counts: Counter[int] = Counter()
    for first in range(0, rounds, AT_ONCE):
        begun = []
        for number in range(first, min(first + AT_ONCE, rounds)):
            url = f"{folder}/{number}"
            dead = fork.Process(target=leave, args=(url,))
            dead.start()
            dead.join()
            start, end, winners = fork.Barrier(CONTENDERS), fork.Event(), fork.SimpleQueue()
            processes = [fork.Process(target=contend, args=(url, start, winners, end)) for _ in range(CONTENDERS)]
            for process in processes:
                process.start()
            begun.append((processes, winners, end))
        for processes, winners, _ in begun:
            counts[sum(winners.get() is not None for _ in processes)] += 1
        for processes, _, end in begun:
            end.set()
            for process in processes:
                process.join()
    print(json.dumps(counts))


if __name__ == "__main__":
    if sys.argv[3] == "network":
        lock_module.LOCAL_FILE_SYSTEMS = frozenset()
    main(sys.argv[1], int(sys.argv[2]))
