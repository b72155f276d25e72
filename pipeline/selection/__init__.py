"""From scores to the selected documents: ranks, their counts, and a decision that says what it promises."""

from pipeline.selection.conformal import calibrate, p_values, ranks
from pipeline.selection.procedures import (
    GUARANTEES,
    PROCEDURES,
    TERMS,
    Decision,
    Guarantee,
    Terms,
    decide,
    strict,
)
from pipeline.selection.proportion import JKBB, jkbb, storey
from pipeline.selection.step_up import calibration_needed, minimum_selectable, step_up
from pipeline.selection.summary import RankCounts

__all__ = [
    "GUARANTEES",
    "JKBB",
    "PROCEDURES",
    "TERMS",
    "Decision",
    "Guarantee",
    "RankCounts",
    "Terms",
    "calibrate",
    "calibration_needed",
    "decide",
    "jkbb",
    "minimum_selectable",
    "p_values",
    "ranks",
    "step_up",
    "storey",
    "strict",
]
