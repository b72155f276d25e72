"""The trial of all registered detectors, on a tiny model and few passages."""

import re
from pathlib import Path

import numpy as np
import pytest

from examples.trials import detectors
from examples.trials.detectors import Cost, Sizes, groups_of, known_detectors, run_detectors
from pipeline.detectors.base import detector_names
from pipeline.detectors.registry import parse_detectors
from tests.helpers.made_up import write_rows

WORDS = ("the", "model", "reads", "a", "text", "twice", "and", "writes", "what", "it", "has", "seen", "before", "now")


def test_every_registered_detector_is_in_one_group_or_named_as_left_out() -> None:
    known, unusable = known_detectors()
    columns = [column for group in groups_of(known) for column in group.columns]
    assert sorted(columns) == sorted(one.column for one in known)
    assert {one.name for one in known} | set(unusable) == set(detector_names())


def test_the_passes_of_a_detector_are_counted() -> None:
    entries = ["lowercase", "fsd", {"knockoff": {"draws": 2}}, {"cdd": {"draws": 7}}]
    passes = ["2 forward", "2 forward + 1 adapter", "3 gradient + 2 written", "8 written"]
    assert [str(Cost.of(one)) for one in parse_detectors(entries)] == passes


def test_what_is_scored_is_in_the_table_and_the_rest_is_named_with_the_reason(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detectors, "detector_names", lambda: ["loss", "reference", "samia"])
    monkeypatch.setattr(detectors, "EXPOSURES", {"four times": 4, detectors.AMONG: 1})
    monkeypatch.setattr(detectors, "REPEATS", 5)
    monkeypatch.setattr(detectors, "CALIBRATION", (10, 100))
    sizes, folder = Sizes(members=10, unseen=40, seen=2, others=4, few=5), tmp_path / "work"
    rng = np.random.default_rng(0)
    folder.mkdir()
    write_rows(folder / "passages.jsonl", ({"id": f"p{n}", "text": " ".join(rng.choice(WORDS, 30))} for n in range(56)))
    model = {"path": str(tiny_model_folder)}
    assert run_detectors(folder, model, sizes) == 0
    printed = capsys.readouterr().out
    tables = re.split(r"^Read ", printed, flags=re.MULTILINE)[1:]
    kinds = ["", ", 10 unseen calibrate", ", 100 unseen calibrate"]
    assert [table.split(":")[0] for table in tables] == [
        f"{one}{kind}" for one in detectors.EXPOSURES for kind in kinds
    ]
    rows = [sorted(re.findall(r"^\| `(.+?)`( \*)? \|", table, re.MULTILINE)) for table in tables]
    both, few = [("loss", ""), ("reference", "")], [("samia", " *")]
    assert rows == [both + few, both, [], both, both, []], "too few passages for 100, and for the few of samia"
    assert tables[1].count("smoothed") == 4, "by both procedures at both alphas"
    assert "Not in it: `samia` (costly: four times alone)." in tables[5]
    assert (folder / "tables.md").read_text(encoding="utf-8") in printed

    scored = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    assert run_detectors(folder, model, sizes, minutes=0) == 0
    assert capsys.readouterr().out.endswith((folder / "tables.md").read_text(encoding="utf-8"))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == scored, "nothing is scored anew"
