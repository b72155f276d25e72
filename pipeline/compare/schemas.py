"""JSON schemas of the files that comparisons of runs write.

`python -m pipeline.compare.schemas docs/schemas` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.audit.records import VersionedRecord
from pipeline.compare.comparison import Comparison
from pipeline.compare.joint import JointReport
from pipeline.compare.ranking import RankingReport
from pipeline.report.schemas import write_schemas

COMPARISON_RECORDS: dict[str, type[VersionedRecord]] = {
    "comparison": Comparison,
    "joint": JointReport,
    "ranking": RankingReport,
}
"""The files by name, and what they hold."""

if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]), COMPARISON_RECORDS)
