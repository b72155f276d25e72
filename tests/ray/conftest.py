"""One Ray cluster a session, and corpora whose truth is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from clusters import start_cluster
from made_up import write_audit

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local cluster with two CPUs."""
    import ray

    start_cluster()
    yield
    ray.shutdown()


@pytest.fixture
def make_audit(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Path]:
    """Writes a corpus and its audit.yaml: (audit texts, unseen texts, **settings) -> path of the YAML."""
    return partial(write_audit, tmp_path, tiny_model_folder)
