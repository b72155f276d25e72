"""Made-up texts for corpora that a test writes itself."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
import zstandard

from benchmarks.small_model import WORDS

MakeAudit = Callable[..., Path]
"""`write_audit` in a folder of the test: (audit texts, unseen texts, **settings) -> path of the YAML."""


def sentence(seed: int, length: int = 12) -> str:
    """A made-up text; another seed gives another text. Its number does not tell seeds of a thousand from others."""
    rng = random.Random(seed)
    return f"Text {seed % 1_000} " + " ".join(rng.choice(WORDS) for _ in range(length + seed % 20)) + "."


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """Write JSON values, one a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def write_jsonl(path: Path, texts: Sequence[Any], first_id: int = 0) -> str:
    """Write texts as JSONL with ids; a row that is not a str is written as the JSON value that it is."""
    return write_rows(path, ({"id": f"{path.stem}-{first_id + i}", "text": text} for i, text in enumerate(texts)))


def write_columns(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write columns as the kind of file that its name says: JSON lines, packed or not, CSV or Parquet."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table.column_names, *zip(*columns.values(), strict=True)])
    else:
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    return path


def write_corpus(folder: Path, texts: Mapping[str, Sequence[str | dict[str, Any]]], **columns: Any) -> dict[str, Any]:
    """Write the documents of each role, texts or rows, with ids; the corpus of a configuration that names columns."""
    corpus = {}
    for role, some in texts.items():
        rows = [one if isinstance(one, dict) else {"text": one} for one in some]
        path = write_rows(folder / f"{role}.jsonl", ({"id": f"{role}-{i}", **row} for i, row in enumerate(rows)))
        corpus[role] = {"path": path, "id": "id", **columns}
    return corpus


def write_audit(
    folder: Path, tiny_model: Path, audit: Sequence[Any] | int = 60, unseen: Sequence[Any] | int = 40, **settings: Any
) -> Path:
    """Write a corpus, of texts or of so many, and its audit.yaml, to be run without Ray; the path of the YAML."""
    audit = [sentence(i) for i in range(audit)] if isinstance(audit, int) else audit
    unseen = [sentence(1000 + i) for i in range(unseen)] if isinstance(unseen, int) else unseen
    config = {
        "run": str(folder / "run"),
        "model": {"path": str(tiny_model)},
        "corpus": {
            role: {"path": write_jsonl(folder / f"{role}.jsonl", texts), "id": "id"}
            for role, texts in (("audit", audit), ("unseen", unseen))
            if "corpus" not in settings
        },
        "detectors": ["loss", "min_k", "zlib"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
        **settings,
        "resources": {"cluster": "local", "shard_bytes": 1500, "actors": 1, **settings.get("resources", {})},
    }
    path = folder / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
