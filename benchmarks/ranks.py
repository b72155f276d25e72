"""Cost of smoothed ranks and of weights of groups beside whole ranks, over many documents on one core.

`python -m benchmarks.ranks --documents 10000000` prints one JSON line. Every way answers one selection with `storey`
over scores in shards of SHARD documents, which are generated first and cycled through with ids of their own, so that
neither files nor text are part of it: a run adds the input and output of both, which is the same for all ways. Each
way has a process of its own. `seconds` is the processor time of all reads, from the first count to the last verdict;
`mb` is the largest resident size above that before the first pass; `reads` counts how often all shards were read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.selection import SelectionConfig
from pipeline.selection.engine import answer
from pipeline.selection.folds import EMPTY, Fold, RoleScores, SelectionInput, run_queries
from pipeline.selection.schedule import Level
from pipeline.selection.smoothing import model_key

SHARD, POOL, KNOWN, GROUPS = 250_000, 4, 10_000, 8
MEMBERS, SHIFT = 0.1, 2.5

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "smoothed": {"ranks": "smoothed"},
    "by_group": {"calibration": "by_group"},
    "boost": {"calibration": "by_group", "boost": "group"},
    "boost, smoothed": {"calibration": "by_group", "boost": "group", "ranks": "smoothed"},
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    for way in arguments.ways:
        with context.Pool(1) as process:
            figures[way] = process.apply(measure, (way, arguments.documents))
    pairs = [("smoothed", "whole"), ("boost", "by_group"), ("boost, smoothed", "by_group")]
    ratios = {
        f"{one} / {other}": {name: round(figures[one][name] / figures[other][name], 2) for name in ("seconds", "mb")}
        for one, other in pairs
        if one in figures and other in figures
    }
    print(json.dumps({"documents": arguments.documents, "calibration": KNOWN, "ways": figures, "ratios": ratios}))


def measure(way: str, documents: int) -> dict[str, float]:
    """Processor time, memory and reads of a way."""
    settings = {"name": "a", "detectors": ["x"], "procedure": "storey", "alpha": 0.1, **WAYS[way]}
    selection = SelectionConfig.model_validate(settings)
    rng, grouped = np.random.default_rng(0), selection.calibration == "by_group"
    shards = [_scores(rng, SHARD, MEMBERS, grouped) for _ in range(POOL)]
    known = _scores(rng, KNOWN, 0.0, grouped)
    calibrating = RoleScores(*known, np.arange(-KNOWN, 0))
    reads = 0

    def batches() -> Iterator[RoleScores]:
        nonlocal reads
        reads += 1
        for place, first in enumerate(range(0, documents, SHARD)):
            yield RoleScores(*shards[place % POOL], np.arange(first, first + SHARD))

    def run_folds(folds: Sequence[tuple[int, Fold]]) -> dict[int, Any]:
        merged: dict[int, Any] = {}
        for batch in batches():
            for index, fold in folds:
                result = fold.of_shard(batch)
                merged[index] = fold.merge(merged[index], result) if index in merged else result
        return merged

    question = SelectionInput(
        selection, Level.of(selection, None), 0, calibrating, EMPTY, 0, None, model_key("made up")
    )
    before, start = _peak_mb(), time.process_time()
    (made,) = run_queries([answer(question)], run_folds)
    selected = sum(int(made.judge(batch)[1].sum()) for batch in batches())
    seconds = time.process_time() - start
    return {
        "seconds": round(seconds, 2),
        "mb": round(_peak_mb() - before, 1),
        "reads": reads,
        "selected": selected,
    }


def _scores(
    rng: np.random.Generator, size: int, members: float, grouped: bool
) -> tuple[np.ndarray, pa.ChunkedArray | None]:
    scores = rng.normal(size=size) + SHIFT * (np.arange(size) < members * size)
    code = rng.integers(0, GROUPS, size)
    names = pa.array(np.char.add("group ", code.astype(str)))
    return scores[:, None], pa.chunked_array([names]) if grouped else None


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
