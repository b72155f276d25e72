"""Speed of repeats over stored scores: 100 repeats, three selections, 10,000 documents.

python -m benchmarks.trial

Prints one JSON line; the target is under 10 seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.selection.engine import Scores
from pipeline.trial.config import TrialConfig, build_trial
from pipeline.trial.repeats import Pool, measure


def made_up(documents: int) -> tuple[TrialConfig, Pool]:
    """A trial of three selections over scores of a third trained documents, 2.5 standard deviations apart."""
    rng = np.random.default_rng(0)
    trained = rng.permutation(documents) < documents // 3
    columns = {name: rng.normal(size=documents) + 2.5 * trained for name in ("loss", "min_k")}
    scores = Scores(columns, rng.integers(-(2**62), 2**62, documents), pa.nulls(documents, pa.string()))
    pool = Pool([str(i) for i in range(documents)], np.arange(documents), trained, np.ones(documents, bool), scores)
    selections = [
        {"name": "bh", "detectors": ["loss"], "procedure": "bh"},
        {"name": "ptdi", "detectors": ["loss"], "procedure": "ptdi"},
        {"name": "td4eval", "detectors": ["loss", "min_k"], "procedure": "td4eval"},
    ]
    description = {
        "run": "unused",
        "model": {"path": "unused"},
        "documents": {"path": "unused"},
        "detectors": ["loss", "min_k"],
        "selections": selections,
        "repeats": 100,
    }
    return build_trial(description)[0], pool


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    config, pool = made_up(options.documents)
    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        rows = len(measure(pool, config, 0))
        seconds.append(time.perf_counter() - start)
    sizes = {"documents": options.documents, "repeats": config.repeats, "rows": rows}
    print(json.dumps({**sizes, "seconds": round(statistics.median(seconds), 2)}))


if __name__ == "__main__":
    main()
