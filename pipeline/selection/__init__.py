"""From scores to selected documents: ranks, counts of ranks, and a decision with its guarantee."""

from pipeline.selection.calibrations import simes_grid
from pipeline.selection.conformal import Grid, calibrate, p_values, ranks
from pipeline.selection.groups import GroupCalibration, calibrate_by_group, pool, ranks_by_group
from pipeline.selection.procedures import PROCEDURES, Decision
from pipeline.selection.procedures.estimating import JKBB, jkbb, storey, strict
from pipeline.selection.procedures.record import count_procedures, decide, terms_of
from pipeline.selection.promises import Guarantee, StrictAnswer, Terms
from pipeline.selection.rank_counts import RankCounts
from pipeline.selection.step_up import minimum_selectable, step_up

__all__ = [
    "JKBB",
    "PROCEDURES",
    "Decision",
    "Grid",
    "GroupCalibration",
    "Guarantee",
    "RankCounts",
    "StrictAnswer",
    "Terms",
    "calibrate",
    "calibrate_by_group",
    "count_procedures",
    "decide",
    "jkbb",
    "minimum_selectable",
    "p_values",
    "pool",
    "ranks",
    "ranks_by_group",
    "simes_grid",
    "step_up",
    "storey",
    "strict",
    "terms_of",
]
