"""What the selections of a finished run are worth by the labels of a benchmark: the column where our figures go."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import seenset


def error_and_power(run: str, audit: Path) -> dict[str, tuple[int, float, float]]:
    """(selected, share of wrong ones among them, share of the sought that were selected) of each selection.

    Args:
        run: directory of a finished run.
        audit: `audit.jsonl` of `prepare`, whose column `member` is the truth.
    """
    rows = [json.loads(line) for line in audit.read_text(encoding="utf-8").splitlines()]
    members = {row["id"]: row["member"] for row in rows}
    figures = {}
    for name, selection in seenset.open_run(run).selections.items():
        table = selection.documents()
        sought = 0 if selection.summary.direction == "clean" else 1
        selected = table.filter(table["selected"])["doc_id"].to_pylist()
        right = sum(members[doc_id] == sought for doc_id in selected)
        wanted = sum(member == sought for member in members.values())
        figures[name] = (len(selected), 1 - right / max(1, len(selected)) if selected else 0.0, right / max(1, wanted))
    return figures


if __name__ == "__main__":
    for name, (count, wrong, power) in error_and_power(sys.argv[1], Path(sys.argv[2])).items():
        print(f"{name}: {count} selected, {wrong:.3f} of them wrong, power {power:.3f}")
