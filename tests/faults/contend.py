"""Rounds in which eight processes take over the lock of a dead one; prints how many rounds had so many winners.

python contend.py FOLDER MOUNT, where MOUNT is local (the kernel locks a file) or network.
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
ROUNDS = 5
"""At once: most of the time of one goes by in waiting for the winner's heart."""


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


def main(folder: str) -> None:
    """Print the count of rounds by their number of winners."""
    fork = multiprocessing.get_context("fork")
    begun = []
    for number in range(ROUNDS):
        url = f"{folder}/{number}"
        dead = fork.Process(target=leave, args=(url,))
        dead.start()
        dead.join()
        start, end, winners = fork.Barrier(CONTENDERS), fork.Event(), fork.SimpleQueue()
        processes = [fork.Process(target=contend, args=(url, start, winners, end)) for _ in range(CONTENDERS)]
        for process in processes:
            process.start()
        begun.append((processes, winners, end))
    print(json.dumps(Counter(sum(winners.get() is not None for _ in processes) for processes, winners, _ in begun)))
    for processes, _, end in begun:
        end.set()
        for process in processes:
            process.join()


if __name__ == "__main__":
    if sys.argv[2] == "network":
        lock_module.LOCAL_FILE_SYSTEMS = frozenset()
    lock_module.HEARTBEAT_SECONDS = 1.0
    main(sys.argv[1])
