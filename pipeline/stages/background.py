"""Work ahead in a thread: the next window is read and tokenised while this one is on the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_background(produce: Callable[[], Iterator[Item]]) -> Iterator[Item]:
    """Run the producer in a thread, at most one item ahead; its error is raised here."""
    waiting: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(maxsize=1)
    stop = threading.Event()

    def put(entry: tuple[Item] | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                waiting.put(entry, timeout=0.5)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in produce():
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="seenset-reader", daemon=True)
    thread.start()
    try:
        while (entry := waiting.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        stop.set()
        thread.join()
