"""One Ray cluster a session, and corpora whose truth is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up import sentence, write_jsonl

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local cluster with two CPUs."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def make_audit(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Path]:
    """Writes a corpus and its audit.yaml: (audit texts, unseen texts, **settings) -> path of the YAML."""

    def make(audit: Sequence[Any] | None = None, unseen: Sequence[Any] | None = None, **settings: Any) -> Path:
        audit = [sentence(i) for i in range(60)] if audit is None else audit
        unseen = [sentence(1000 + i) for i in range(40)] if unseen is None else unseen
        config = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(tiny_model_folder)},
            "corpus": {
                "audit": {"path": write_jsonl(tmp_path / "audit.jsonl", audit), "id": "id"},
                "unseen": {"path": write_jsonl(tmp_path / "unseen.jsonl", unseen), "id": "id"},
            },
            "detectors": ["loss", "min_k", "zlib"],
            "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
            "resources": {"shard_bytes": 1500},
            **settings,
        }
        path = tmp_path / "audit.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return make
