"""What happens to the promise when audited and calibration documents differ in more than membership."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from simulation import Estimate

from pipeline.selection.conformal import RankCounts, calibrate, ranks
from pipeline.selection.procedures.record import decide

PAGE_SE = 0.002


@pytest.mark.parametrize(
    ("share", "shift", "fdr"),
    [
        (0.5, 0.0, {"bh": 0.050, "storey": 0.098}),
        (0.5, 0.25, {"bh": 0.083, "storey": 0.203}),
        (0.1, 0.0, {"bh": 0.083, "storey": 0.093}),
        (0.1, 0.25, {"bh": 0.168, "storey": 0.256}),
    ],
)
def test_a_quarter_of_a_standard_deviation_raises_the_error_as_documented(
    share: float, shift: float, fdr: dict[str, float]
) -> None:
    """The nulls of an audit score higher than calibration by `shift`; 1,000 of each, members 2.5 higher, alpha = .1."""
    rng, size, members = np.random.default_rng(41), 1_000, round(1_000 * share)
    wrong: dict[str, list[float]] = {procedure: [] for procedure in fdr}
    for _ in range(2_000):
        calibration, scores = calibrate(rng.normal(size=size)), rng.normal(size=size)
        scores[:members] += 2.5
        scores[members:] += shift
        k = ranks(scores, calibration, "members")
        counts = RankCounts.of(k, size)
        for procedure, shares in wrong.items():
            selected = k <= decide(procedure, counts, Fraction(1, 10)).rank
            shares.append(selected[members:].sum() / max(1, selected.sum()))
    for procedure, shares in wrong.items():
        found = Estimate.of(shares)
        assert abs(found.mean - fdr[procedure]) <= 4 * math.hypot(found.se, PAGE_SE), (procedure, found)
        assert (found.mean > 0.1 + 4 * found.se) == (fdr[procedure] > 0.1)
