"""Documents that `seenset mark` marks, and audits of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from benchmarks.small_model import WORDS

EDITABLE = (
    "the color of the {} is often new",
    "they do not favor the {}",
    "although the {} was small, it is old",
    "for example, the {} was 20% of the {}",
    "in 2014, the {} was near the center",
    "the {} was organized on 12 March 2024",
)
"""Sentences with sites that the rules edit."""


def write_texts(path: Path, count: int) -> None:
    """Write documents with sites that the rules edit."""
    rng = random.Random(4)
    lines = []
    for number in range(count):
        sentences = [one.format(*rng.choices(WORDS, k=2)) for one in rng.sample(EDITABLE, 5)]
        text = " ".join(f"{one[0].upper()}{one[1:]}." for one in sentences)
        lines.append(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    path.write_text("".join(lines))


def write_audit(folder: Path, name: str, model: Path, differing: bool = False, **changed: Any) -> Path:
    """Write the configuration of an audit of the documents that are marked in a folder."""
    audit = {
        "run": str(folder / "runs" / name),
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": {
            "audit": {
                "path": str(folder / "marked/private/versions.parquet"),
                "id": "id",
                "versions": {"kinds": "kinds", "forms": "forms", "differing": differing},
            }
        },
        "detectors": ["loss"],
        "selections": [{"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": 0.2}],
        "resources": {"cluster": "local"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**audit, **changed}))
    return path
