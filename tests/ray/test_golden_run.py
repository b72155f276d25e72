"""The recorded scores of a real model come out of whole runs, whatever the number of actors."""

import json
from pathlib import Path

import pytest

from tests.helpers.finished import rows, run
from tests.helpers.golden_values import ABSOLUTE, RELATIVE
from tests.helpers.made_up import MakeAudit

SHARES = [0.1, 0.2, 0.3, 0.5, 1.0]
COLUMNS = {"loss": "loss", "zlib": "zlib", "lowercase": "lowercase"}
COLUMNS |= {f"{ours}(k={k})": f"{theirs}_{k}" for k in SHARES for ours, theirs in
            (("min_k", "min_k"), ("min_k_plus_plus", "min_k++"))}  # fmt: skip

pytestmark = pytest.mark.floating_point


def test_a_run_gives_the_recorded_scores_whatever_the_number_of_threads(
    shared_folder: Path, smollm2_folder: Path, make_audit: MakeAudit, tmp_path: Path
) -> None:
    golden = [json.loads(line) for line in (shared_folder / "golden/smollm2_wikimia.jsonl").open(encoding="utf-8")][::8]
    texts = []
    for row in golden:
        lines = (shared_folder / f"data/wikimia/{row['length']}.jsonl").read_text(encoding="utf-8").splitlines()
        texts.append(json.loads(lines[row["row"]])["input"])
    detectors = ["loss", "zlib", "lowercase", {"min_k": {"k": SHARES}}, {"min_k_plus_plus": {"k": SHARES}}]
    settings = {"detectors": detectors, "selections": [], "resources": {"shard_bytes": 800}}
    path = make_audit(texts, ["An unseen text."], model={"path": str(smollm2_folder)}, **settings)
    for actors in (1, 2):
        run(path, f"run={tmp_path / str(actors)}", f"resources.actors={actors}")
    one = rows(tmp_path / "1")
    assert one == rows(tmp_path / "2")
    for number, row in enumerate(golden):
        for ours, theirs in COLUMNS.items():
            assert one[f"audit-{number}"][ours] == pytest.approx(row[theirs], rel=RELATIVE, abs=ABSOLUTE), ours
