"""Documents that `seenset mark` marks, and audits of them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from benchmarks.small_model import WORDS
from pipeline.answers.collection_test import version_part
from pipeline.plan.description import build_config
from pipeline.selection.version_scores import VersionScores, joined_versions
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import ended

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


def versions_audit(folder: Path, model: Path, source: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The configuration of an audit of documents with versions, which a source describes."""
    return {
        "run": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": {"audit": source},
        "detectors": ["loss"],
        "selections": [{"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": 0.2}],
        "resources": {"cluster": "local"},
        **changed,
    }


def write_audit(folder: Path, name: str, model: Path, differing: bool = False, **changed: Any) -> Path:
    """Write the configuration of an audit of the documents that are marked in a folder."""
    versions = {"kinds": "kinds", "forms": "forms", "differing": differing}
    source = {"path": str(folder / "marked/private/versions.parquet"), "id": "id", "versions": versions}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(versions_audit(folder, model, source, run=str(folder / "runs" / name), **changed)))
    return path


def run_here(folder: Path, audit: dict[str, Any]) -> int:
    """Write the configuration of an audit as audit.yaml and run it; its exit code."""
    (folder / "audit.yaml").write_text(yaml.safe_dump(audit))
    return ended("run", folder / "audit.yaml")


def write_items(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows as items.jsonl, .parquet or .csv."""
    path, table = folder / f"items.{suffix}", pa.Table.from_pylist(rows)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "parquet":
        pq.write_table(table, path, row_group_size=10)
    else:
        pyarrow.csv.write_csv(table, path)
    return path


def finite_scores(path: Path, columns: Sequence[str] = ("loss",)) -> VersionScores:
    """The scores of the versions of the finished run of a configuration."""
    config = build_config(yaml.safe_load(path.read_text()))
    store = Store(config.run)
    tables = [store.read_table(receipt.data) for receipt in read_receipts(store, "score")]
    return joined_versions([version_part(table, config, list(columns)) for table in tables])
