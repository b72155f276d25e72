"""Made-up texts for corpora that a test writes itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.small_model import WORDS


def sentence(seed: int, length: int = 12) -> str:
    """A made-up text; another seed gives another text."""
    rng = random.Random(seed)
    return f"Text {seed} " + " ".join(rng.choice(WORDS) for _ in range(length + seed % 20)) + "."


def write_jsonl(path: Path, texts: Sequence[Any], first_id: int = 0) -> str:
    """Write texts as JSONL with ids; a row that is not a str is written as the JSON value that it is."""
    rows = [{"id": f"{path.stem}-{first_id + i}", "text": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
