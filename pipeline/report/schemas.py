"""JSON schemas of the files that a run directory holds, made from the records themselves.

`python -m pipeline.report.schemas docs/schemas` writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.audit.evaluation import Evaluation
from pipeline.audit.history import HistoryEntry
from pipeline.audit.manifest import Manifest
from pipeline.audit.records import VersionedRecord
from pipeline.audit.status import Status
from pipeline.audit.summary import Summary
from pipeline.audit.verdict import CollectionVerdict
from pipeline.report.contents import Report
from pipeline.store.files import to_json

RECORDS: dict[str, type[VersionedRecord]] = {
    "summary": Summary,
    "manifest": Manifest,
    "status": Status,
    "report": Report,
    "evaluation": Evaluation,
    "history": HistoryEntry,
    "verdict": CollectionVerdict,
}
"""The files by name, and what they hold."""


def render_schemas(records: Mapping[str, type[VersionedRecord]] = RECORDS) -> dict[str, bytes]:
    """File name -> JSON schema (draft 2020-12) of every record."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {
        f"{name}.schema.json": to_json({**dialect, **record.model_json_schema()}) for name, record in records.items()
    }


def write_schemas(folder: Path, records: Mapping[str, type[VersionedRecord]] = RECORDS) -> None:
    """Write the schemas into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in render_schemas(records).items():
        (folder / name).write_bytes(schema)


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
