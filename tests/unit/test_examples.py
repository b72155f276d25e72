"""The trials that ship can be read, and all of them can be asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.trials.run import NAMES
from examples.trials.systems import columns_of
from pipeline.trial.config import load_trial

TRIALS = sorted((Path(__file__).resolve().parents[2] / "examples" / "trials").glob("*.yaml"))


def test_every_trial_has_a_name() -> None:
    assert sorted(NAMES) == [path.stem for path in TRIALS]


@pytest.mark.parametrize("path", TRIALS, ids=lambda path: path.stem)
def test_every_selection_of_a_trial_reads_what_its_detectors_make(path: Path) -> None:
    config, points = load_trial(str(path))
    assert points
    made = set().union(*(columns_of(entry) for entry in config.detectors))
    assert {column for selection in config.selections for column in selection.detectors} <= made
