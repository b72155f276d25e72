"""The right-boundary procedure is Storey's at the first lambda where Storey's estimate does not fall."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from test_procedures import audits

from pipeline.selection.conformal import Grid, RankCounts
from pipeline.selection.procedures.estimating import storey
from pipeline.selection.procedures.record import decide
from pipeline.selection.procedures.right_boundary import LAMBDAS, right_boundary
from pipeline.selection.step_up import step_up

TENTH = Fraction(1, 10)


def test_it_stops_where_the_estimate_first_does_not_fall() -> None:
    """Estimates at .05, .10, .15, .20 are 21/19, 11/18, 9/17 and 9/16; later ones are not looked at."""
    counts = RankCounts(np.array([10, 2, 0, 8, *[0] * 16]))
    assert right_boundary(counts) == (Fraction(9, 16), Fraction(1, 5))
    assert storey(counts, Fraction(1, 4)) == Fraction(1, 15)
    decision = decide("right_boundary", counts, Fraction(1, 4))
    assert (decision.factor, decision.details["lambda"]) == (Fraction(9, 16), 0.2)
    assert decision.rank == step_up(counts, Fraction(1, 4), Fraction(9, 16))


def test_the_last_lambda_is_taken_where_the_estimate_always_falls() -> None:
    counts = RankCounts(np.array([40, *[2] * 17, 0, 0]))
    estimates = [storey(counts, lambda_) for lambda_ in LAMBDAS]
    assert estimates == sorted(estimates, reverse=True)
    assert right_boundary(counts) == (estimates[-1], Fraction(19, 20))


@given(audits())
def test_it_is_storey_at_one_of_its_lambdas_over_any_grid(audit: tuple[list[int], Grid]) -> None:
    found, grid = audit
    counts = RankCounts.of(np.array(found), grid)
    estimates = [storey(counts, lambda_) for lambda_ in LAMBDAS]
    stops = [i for i in range(1, len(LAMBDAS)) if estimates[i] >= estimates[i - 1]]
    place = stops[0] if stops else len(LAMBDAS) - 1
    assert right_boundary(counts) == (estimates[place], LAMBDAS[place])
    assert decide("right_boundary", counts, TENTH).rank == decide("storey", counts, TENTH, lambda_=LAMBDAS[place]).rank
