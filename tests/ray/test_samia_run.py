"""`detectors: [samia, samia_zlib]`: continuations are drawn once, stored, and compared with what came."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.detectors.samia import samia_score
from tests.helpers.commands import user_error
from tests.helpers.finished import rows, run, written
from tests.helpers.made_up import MakeAudit, sentence

STAGE = "sample/ratio0.5_t1_k50_p1_reference"
SETTINGS: dict[str, Any] = {
    "detectors": [{"samia": {"draws": 3}}, {"samia_zlib": {"draws": 3}}],
    "selections": [{"name": "members", "detectors": ["samia(draws=3)"], "procedure": "bh", "alpha": 0.2}],
}


def test_continuations_are_scored_stored_and_the_same_whatever_the_number_of_workers(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    texts = [sentence(i) for i in range(20)]
    path = make_audit([*texts, "alone", ""], [sentence(1000 + i) for i in range(12)], error_budget=0.5, **SETTINGS)
    outcome = run(path, "resources.actors=1")
    assert (outcome.status.scored, outcome.status.quarantined) == (32, 2)
    folder = tmp_path / "run"
    drawn, scored = rows(folder, f"{STAGE}/3"), rows(folder, "score")
    for row in scored.values():
        own = drawn[row["doc_id"]]
        assert len(set(own["continuations"])) == 3
        assert row["samia(draws=3)"] == samia_score(own["continuations"], own["reference"])
        assert row["samia_zlib(draws=3)"] == samia_score(own["continuations"], own["reference"], compressed=True)
    assert drawn["audit-0"]["reference"] == " ".join(texts[0].split()[len(texts[0].split()) // 2 :])
    bad = pq.read_table(folder / "quarantine").to_pylist()
    assert {row["doc_id"]: row["reason"] for row in bad} == {"audit-20": "too_short", "audit-21": "empty"}
    again = tmp_path / "again"
    run(path, f"run={again}", "resources.actors=auto")
    assert rows(again, f"{STAGE}/3") == drawn
    assert rows(again, "score") == scored
    # a resume draws nothing anew
    before = written(folder / "samples")
    run(path, "selections.0.alpha=0.3")
    assert written(folder / "samples") == before
    # other n-grams and fewer draws read what is stored, and more draws begin with it
    run(path, "detectors=[{samia: {draws: [2, 4], n: 2, kind: precision}}]", "selections=[]", "resources.actors=1")
    found = rows(folder, f"{STAGE}/4")
    for name, row in rows(folder, "score").items():
        texts = found[name]["continuations"]
        assert texts[:3] == drawn[name]["continuations"]
        assert len(texts) == 4
        for draws in (2, 4):
            expected = samia_score(texts[:draws], found[name]["reference"], n=2, kind="precision")
            assert row[f"samia(draws={draws}, n=2, kind=precision)"] == expected


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"prefix_ratio": 0}, "prefix_ratio must be a number in (0, 1)"),
        ({"prefix_ratio": 1}, "got 1"),
        ({"draws": 0}, "draws must be a whole number of at least 1, got 0"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"kind": "f1"}, "kind must be one of recall, precision, got 'f1'"),
        ({"candidate_words": 3}, "candidate_words must be one of reference, all, got 3"),
        ({"temperature": -1}, "temperature must be a number of at least 0, got -1"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1 or null, got 0"),
        ({"top_p": 0}, "top_p must be a number in (0, 1], got 0"),
        ({"draw": 3}, "did you mean 'draws'"),
    ],
)
def test_a_setting_outside_its_limits_is_one_line(make_audit: MakeAudit, changed: dict[str, Any], part: str) -> None:
    assert part in user_error(lambda: run(make_audit(detectors=[{"samia": changed}], selections=[])))
