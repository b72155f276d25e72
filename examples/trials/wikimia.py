"""WikiMIA with the year of its events: beginnings of articles on events of 2014 and before, and of 2023."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline.errors import UserError

WORDS = 64
YEARS = {1: 2014, 0: 2023}
"""The label of WikiMIA, and about when the events of its articles were."""


def make_wikimia(path: Path) -> None:
    """Write the articles as lines of id, text and year; nothing where the file is there.

    Raises:
        UserError: SEENSET_SHARED does not name the folder that holds them.
    """
    if path.exists():
        return
    source = Path(os.environ.get("SEENSET_SHARED", "../shared")) / f"data/wikimia/{WORDS}.jsonl"
    if not source.exists():
        raise UserError(f"no {source}; SEENSET_SHARED names the folder that holds data/wikimia")
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = [{"id": f"wikimia-{i}", "text": row["input"], "year": YEARS[row["label"]]} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
