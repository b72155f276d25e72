"""Made-up texts for corpora that a test writes itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.small_model import WORDS


def sentence(seed: int, length: int = 12) -> str:
    """A made-up text; another seed gives another text."""
    rng = random.Random(seed)
    return f"Text {seed} " + " ".join(rng.choice(WORDS) for _ in range(length + seed % 20)) + "."


def write_jsonl(path: Path, texts: Sequence[Any], first_id: int = 0) -> str:
    """Write texts as JSONL with ids; a row that is not a str is written as the JSON value that it is."""
    rows = [{"id": f"{path.stem}-{first_id + i}", "text": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_audit(
    folder: Path,
    tiny_model: Path,
    audit: Sequence[Any] | None = None,
    unseen: Sequence[Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a corpus and its audit.yaml into a folder, to be run without Ray; the path of the YAML."""
    audit = [sentence(i) for i in range(60)] if audit is None else audit
    unseen = [sentence(1000 + i) for i in range(40)] if unseen is None else unseen
    config = {
        "run": str(folder / "run"),
        "model": {"path": str(tiny_model)},
        "corpus": {
            "audit": {"path": write_jsonl(folder / "audit.jsonl", audit), "id": "id"},
            "unseen": {"path": write_jsonl(folder / "unseen.jsonl", unseen), "id": "id"},
        },
        "detectors": ["loss", "min_k", "zlib"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
        **settings,
        "resources": {"cluster": "local", "shard_bytes": 1500, "actors": 1, **settings.get("resources", {})},
    }
    path = folder / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
