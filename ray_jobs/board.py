"""Where actors write how far their shards are; the driver takes it from there. Imports nothing: it starts at once."""

from __future__ import annotations

from typing import Any


class Board:
    """How far shards are, until somebody takes it."""

    def __init__(self) -> None:
        """Know of no shard yet."""
        self.news: dict[str, tuple[int, int] | None] = {}

    def advance(self, shard: str, documents: int, tokens: int) -> None:
        """Note how far a shard is."""
        self.news[shard] = documents, tokens

    def ready(self) -> None:
        """Note that a worker has loaded its models."""
        self.news[""] = None

    def take(self) -> dict[str, tuple[int, int] | None]:
        """What is new since the last time, by shard; None stands for a worker that is ready."""
        news, self.news = self.news, {}
        return news


def start_board() -> Any:
    """A board on the cluster that this process is connected to; it ends with its last handle."""
    import ray

    return ray.remote(num_cpus=0)(Board).remote()
