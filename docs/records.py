"""Write docs/schemas: JSON schemas of what other programs read and editors complete, made from the records themselves.

python -m docs.records
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.answers.verdict import CollectionVerdict
from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import DIALECT, config_schema, described_schema
from pipeline.results.status import Status
from pipeline.results.summary import Summary
from pipeline.run.records import VersionedRecord
from pipeline.selection.procedures import PROCEDURES
from pipeline.store.files import to_json
from pipeline.store.receipts import DIGEST
from pipeline.trial.config import TrialConfig

RECORDS: dict[str, type[VersionedRecord]] = {"summary": Summary, "verdict": CollectionVerdict, "status": Status}
"""Files of a run by name, and what they hold."""

CONFIGS: dict[str, type[BaseModel]] = {"audit": AuditConfig, "trial": TrialConfig}
"""Configurations by name."""


def render_schemas() -> dict[str, bytes]:
    """File name -> JSON schema (draft 2020-12) of every record and configuration."""
    schemas = {name: record_schema(record) for name, record in RECORDS.items()}
    schemas |= {name: config_schema(kind, tuple(PROCEDURES)) for name, kind in CONFIGS.items()}
    return {f"{name}.schema.json": to_json(schema) for name, schema in schemas.items()}


def record_schema(record: type[VersionedRecord]) -> dict[str, Any]:
    """The schema of a file, with the digest that a sealed one holds besides the fields of its record."""
    schema = {"$schema": DIALECT, **described_schema(record)}
    if record.sealed:
        sentence = "SHA-256 of all other keys; absent on standard output."
        schema["properties"][DIGEST] = {"description": sentence, "title": "Digest", "type": "string"}
    return schema


def write_schemas(folder: Path) -> None:
    """Write the schemas into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in render_schemas().items():
        (folder / name).write_bytes(schema)


if __name__ == "__main__":
    write_schemas(Path(__file__).parent / "schemas")
