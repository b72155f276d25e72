"""JSON schema of what `seenset series` says.

`python -m pipeline.series.schemas docs/schemas` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.audit.records import VersionedRecord
from pipeline.report.schemas import write_schemas
from pipeline.series.course import Course

SERIES_RECORDS: dict[str, type[VersionedRecord]] = {"series": Course}
"""The file by name, and what it holds."""

if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]), SERIES_RECORDS)
