"""Speed of a selection: counts, decisions and the fused threshold over the ranks of 1e8 documents on one core.

`python -m benchmarks.selection` prints one JSON line. Ranks of six correlated detectors against n = 10,000 calibration
documents stand in a pool of shards that is generated first and then cycled through, so neither generation nor
storage is timed, and the values repeat. `seconds_per_1e8`: rank counts of every detector and every procedure
on each; `fused_seconds_per_1e8`: fusing twice and both passes of the threshold. Peaks are of resident size, after
1e7 and after all documents; then `equals_sort` holds 1e7 documents at once to check both answers against sorted values,
and `ranking_seconds_per_1e8` ranks one shard's scores by every detector and scales up. `bound_seconds` is the bound of
one list of all documents, the first time in a process; `bound_share` what that is of ranking, counting and deciding in
memory for one detector and one procedure.

`digest_share` is what digests take of `seenset select` without its report: one selection by one detector over DIGESTED
documents in made-up score shards of SHARD documents, on a disk. The digests are of every score file that is read, every
file of the answer that is written, and those of the run. `digest_check_share` is what a reader takes to check the whole
answer, verdicts on all documents included, as a part of the same. Both are of the processor time of the process alone:
near-duplicates are found beside it, in another one. Digests and selection grow alike with the documents.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from fractions import Fraction
from functools import reduce
from importlib import metadata
from operator import add
from typing import Any

import numpy as np

from pipeline.selection.bounds import wrong_in_list
from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.record import decide
from pipeline.selection.procedures.td4eval import find_fused_threshold, fused_places, fusion_weights, p_at
from pipeline.selection.thresholds import Threshold

N = 10_000
DETECTORS = 6
SHARD = 250_000
POOL = 8
ALPHA = Fraction(1, 10)
MEMBERS = 0.3
SHIFTS = (2.5, 2.2, 1.8, 1.5, 1.2, 1.0)
CHECKED = 10_000_000
DIGESTED = 500_000


def count_procedures() -> list[str]:
    """The procedures that decide by rank counts and alpha alone, those of plugins too."""
    return [name for name, one in PROCEDURES.items() if one.decide is not None and not one.needs_sought]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--digested", type=int, default=DIGESTED, help="documents whose selection is written")
    arguments = parser.parse_args()
    documents = arguments.documents
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pool = [_shard(seed) for seed in range(POOL)]
    checked = min(documents, CHECKED)
    _count_and_decide(pool, checked)
    _fused(pool, checked)
    peak_checked = _peak_mb()
    bound_seconds = _bound(_count(pool, checked)[0], documents)
    seconds = _count_and_decide(pool, documents)
    fused_seconds = _fused(pool, documents)
    selection_seconds = _select(documents)
    peak = _peak_mb()
    from benchmarks.digests import digest_shares  # loads torch, whose memory is in no peak

    digests = digest_shares(arguments.digested)
    result = {
        "seconds_per_1e8": round(seconds * 1e8 / documents, 2),
        "fused_seconds_per_1e8": round(fused_seconds * 1e8 / documents, 2),
        "bound_seconds": round(bound_seconds, 2),
        "bound_share": round(bound_seconds / selection_seconds, 3),
        "peak_mb": round(peak, 1),  # before the check by sorting
        "peak_mb_1e7": round(peak_checked, 1),
        "equals_sort": _equals_sort(pool, checked),
        "ranking_seconds_per_1e8": round(_ranking() * 1e8 / SHARD, 2),
        **digests,
        "documents": documents,
        "digested": arguments.digested,
        "calibration": N,
        "detectors": DETECTORS,
        "procedures": count_procedures(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("seenset", "numpy")},
        },
    }
    print(json.dumps(result))


def _calibration() -> np.ndarray:
    return calibrate(np.random.default_rng(POOL).normal(size=N))


def _scores(seed: int) -> Iterator[np.ndarray]:
    """Scores of SHARD documents, a detector at a time."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=SHARD)
    for shift in SHIFTS:
        scores = np.sqrt(0.5) * (common + rng.normal(size=SHARD))
        scores[: int(MEMBERS * SHARD)] += shift
        yield scores


def _shard(seed: int) -> np.ndarray:
    """Ranks of SHARD documents, int32, (SHARD, DETECTORS), each detector's contiguous."""
    table = np.empty((DETECTORS, SHARD), dtype=np.int32)
    for row, scores in enumerate(_scores(seed)):
        table[row] = ranks(scores, _calibration(), "members")
    return table.T


def _ranking() -> float:
    columns, calibration = list(_scores(POOL)), _calibration()
    start = time.perf_counter()
    for scores in columns:
        ranks(scores, calibration, "members")
    return time.perf_counter() - start


def _stream(pool: list[np.ndarray], documents: int) -> Iterator[np.ndarray]:
    for index in range(-(-documents // SHARD)):
        yield pool[index % len(pool)][: documents - index * SHARD]


def _count(pool: list[np.ndarray], documents: int) -> list[RankCounts]:
    counts = [RankCounts.empty(N) for _ in range(DETECTORS)]
    for shard in _stream(pool, documents):
        counts = [total + RankCounts.of(column, N) for total, column in zip(counts, shard.T, strict=True)]
    return counts


def _count_and_decide(pool: list[np.ndarray], documents: int) -> float:
    start = time.perf_counter()
    for counts in _count(pool, documents):
        for procedure in count_procedures():
            decide(procedure, counts, ALPHA)
    return time.perf_counter() - start


def _select(documents: int) -> float:
    """Seconds to rank, count and decide as one selection does without a bound; no file is read or written."""
    scores, calibration = next(iter(_scores(POOL))), _calibration()
    start = time.perf_counter()
    counts = RankCounts.empty(N)
    for _ in range(-(-documents // SHARD)):
        counts = counts + RankCounts.of(ranks(scores, calibration, "members"), N)
    decide("bh", counts, ALPHA)
    return time.perf_counter() - start


def _bound(counts: RankCounts, documents: int) -> float:
    """Seconds of the bound of one list of so many documents, nothing of it known before."""
    many = RankCounts(counts.counts * max(1, documents // counts.m))
    start = time.perf_counter()
    wrong_in_list(many, decide("bh", many, ALPHA).rank, Fraction(95, 100))
    return time.perf_counter() - start


def _fused_stream(pool: list[np.ndarray], documents: int, w: np.ndarray) -> Iterator[np.ndarray]:
    return (fused_places(shard, N, w) for shard in _stream(pool, documents))


def _weights(pool: list[np.ndarray], documents: int) -> np.ndarray:
    rejections = [decide("bh", counts, ALPHA).n_selected for counts in _count(pool, documents)]
    return fusion_weights(rejections, "rejections")


def _fused(pool: list[np.ndarray], documents: int) -> float:
    w = _weights(pool, min(documents, CHECKED))
    start = time.perf_counter()
    run_folds(find_fused_threshold(ALPHA, N), lambda: _fused_stream(pool, documents, w))
    return time.perf_counter() - start


def run_folds(
    passes: Generator[Callable[[np.ndarray], Any], Any, Threshold], stream: Callable[[], Iterable[np.ndarray]]
) -> Threshold:
    """Run the folds of a threshold in this process; `stream` starts a reading of the values of every shard."""
    total = None
    while True:
        try:
            count = passes.send(total)
        except StopIteration as end:
            return end.value
        results = map(count, stream())
        first = next(results, None)
        total = None if first is None else reduce(add, results, first)


def _equals_sort(pool: list[np.ndarray], documents: int) -> bool:
    """Whether BH by counting equals BH by sorting, for the first detector's ranks and for the fused p-values."""
    w = _weights(pool, documents)
    threshold = run_folds(find_fused_threshold(ALPHA, N), lambda: _fused_stream(pool, documents, w))
    fused = np.sort(np.concatenate([p_at(places, N) for places in _fused_stream(pool, documents, w)]))
    expected = _last_holding(fused, 1)
    last = float(fused[expected - 1]) if expected else None
    ranked = np.sort(np.concatenate([shard[:, 0] for shard in _stream(pool, documents)]))
    selected = decide("bh", _count(pool, documents)[0], ALPHA).n_selected
    return (threshold.value, threshold.n_selected) == (last, expected) and selected == _last_holding(ranked, N + 1)


def _last_holding(ascending: np.ndarray, unit: int) -> int:
    """The greatest i with m x_i <= alpha unit i, x_i the i-th smallest value; rationals check what floats propose.

    A value that is no float32 value is the nearest float to a multiple of 1 / (2(N + 1)).
    """
    m = ascending.size
    levels = float(ALPHA) * unit / m * np.arange(1, m + 1)
    for i in np.flatnonzero(ascending.astype(np.float64) <= levels * (1 + 1e-9))[::-1].tolist():
        value = Fraction(ascending[i].item())
        if Fraction(float(np.float32(ascending[i]))) != value:
            value = Fraction(round(value * 2 * (N + 1)), 2 * (N + 1))
        if m * value <= ALPHA * unit * (i + 1):
            return i + 1
    return 0


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
