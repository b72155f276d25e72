"""Write docs/schemas: JSON schemas of the files of runs, comparisons and schedules, made from the records themselves.

python -m docs.records
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.audit.digests import AnswerDigests
from pipeline.audit.evaluation import Evaluation
from pipeline.audit.history import HistoryEntry
from pipeline.audit.manifest import Manifest
from pipeline.audit.records import VersionedRecord
from pipeline.audit.status import Status
from pipeline.audit.summary import Summary
from pipeline.audit.verdict import CollectionVerdict
from pipeline.compare.comparison import Comparison
from pipeline.compare.joint import JointReport
from pipeline.compare.ranking import RankingReport
from pipeline.report.contents import Report
from pipeline.series.summary import SeriesSummary
from pipeline.store.files import to_json
from pipeline.store.receipts import DIGEST

RECORDS: dict[str, type[VersionedRecord]] = {
    "summary": Summary,
    "digests": AnswerDigests,
    "manifest": Manifest,
    "status": Status,
    "report": Report,
    "evaluation": Evaluation,
    "history": HistoryEntry,
    "verdict": CollectionVerdict,
    "comparison": Comparison,
    "joint": JointReport,
    "ranking": RankingReport,
    "series": SeriesSummary,
}
"""The files by name, and what they hold."""


def render_schemas(records: Mapping[str, type[VersionedRecord]] = RECORDS) -> dict[str, bytes]:
    """File name -> JSON schema (draft 2020-12) of every record."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {f"{name}.schema.json": to_json({**dialect, **_schema(record)}) for name, record in records.items()}


def _schema(record: type[VersionedRecord]) -> dict[str, Any]:
    """The schema of a file, with the digest that a sealed one holds besides the fields of its record."""
    schema = record.model_json_schema()
    if record.sealed:
        sentence = "SHA-256 of all other keys; absent on standard output."
        schema["properties"][DIGEST] = {"description": sentence, "title": "Digest", "type": "string"}
    return schema


def write_schemas(folder: Path, records: Mapping[str, type[VersionedRecord]] = RECORDS) -> None:
    """Write the schemas into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in render_schemas(records).items():
        (folder / name).write_bytes(schema)


if __name__ == "__main__":
    write_schemas(Path(__file__).parent / "schemas")
