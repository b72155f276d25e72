"""Help towards calibration documents that resemble the audited: words that tell them apart, a matched subset."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from test_density_ratio import texts
from test_preflight_checks import planned

from pipeline.plan.description import build_config
from pipeline.plan.matching import telling_words, telling_words_phrase, write_matched
from pipeline.plan.preflight import plan_checks
from pipeline.run.plan import make_plan
from tests.helpers.commands import user_error


def dated(made: list[str], word: str, share: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{text} {word}" if rng.random() < share else text for text in made]


def plan_of(tmp_path: Path, known: list[str], audit: list[str], **selection: Any) -> Any:
    chosen = {"name": "members", "detectors": ["loss"], "alpha": 0.2, **selection}
    return planned(tmp_path, audit, known, selections=[chosen], resources={"shard_bytes": 1 << 16})


def test_the_words_that_tell_them_apart_are_named_the_strongest_first() -> None:
    known = dated(texts(1, 200, 0.1), "twentytwentythree", 0.6, 1)
    audit = dated(dated(texts(2, 200, 0.1), "twentyfourteen", 0.7, 2), "sometimes", 0.3, 3)
    audited, known_words = telling_words(known, audit)
    assert audited[:2] == ["twentyfourteen", "sometimes"]
    assert known_words[0] == "twentytwentythree"
    assert not any(word.startswith(("1x", "2x")) for word in (*audited, *known_words))  # stand in one text
    line = telling_words_phrase("unseen", audited, known_words)
    assert line.startswith("words that tell them apart: twentyfourteen, sometimes")
    # and texts that share no word have none to name
    assert telling_words([f"a{i}" for i in range(20)], [f"b{i}" for i in range(20)]) == ([], [])


def test_a_plan_names_the_next_step_after_a_failed_blind_test_and_no_other(tmp_path: Path) -> None:
    known, audit = texts(1, 300, 0.1), dated(texts(2, 300, 0.1), "gone", 0.9, 1)
    (step,) = [line for line in plan_checks(plan_of(tmp_path, known, audit))["lines"] if line.startswith("next: ")]
    assert step.startswith(
        "next: Calibrate on documents like the audited ones that the model cannot have seen, such as"
    )
    assert "seenset plan AUDIT.YAML --matched FOLDER" in step
    (tmp_path / "alike").mkdir()
    alike = plan_of(tmp_path / "alike", known, texts(3, 300, 0.1))
    assert not any(line.startswith("next: ") for line in plan_checks(alike)["lines"])


def test_a_matched_subset_calibrates_as_it_stands_and_words_no_longer_tell_it_apart(tmp_path: Path) -> None:
    known = [*texts(1, 500, 0.05), *texts(3, 300, 0.5)]
    audit = texts(2, 400, 0.5)
    plan = plan_of(tmp_path, known, audit)
    (matched,) = write_matched(plan, str(tmp_path / "matched"))
    table = pq.read_table(matched.path)
    assert matched.before.outcome == "failed"
    assert matched.after.outcome != "failed"
    assert 100 < matched.count == len(table) < 600
    assert "corpus.unseen: {path:" in matched.sentence()
    assert matched.facts()["documents"] == len(table)
    first = table.to_pylist()[0]
    assert known[first["row"]] == first["text"]
    assert first["id"] == f"u{first['row']}"
    from_topic = sum(row >= 500 for row in table["row"].to_pylist()) / len(table)
    assert from_topic > 0.75  # it was 3 in 8
    again = write_matched(plan, str(tmp_path / "again"))[0]
    assert pq.read_table(again.path).equals(table)
    described = plan.config.model_dump(mode="json", by_alias=True)
    described["corpus"]["unseen"] = {"path": matched.path, "id": "id"}
    checks = plan_checks(plan_from(described))
    assert checks["documents"]["unseen"] == len(table)
    assert checks["words"] == {}


def test_token_ids_are_called_tokens_and_a_matched_subset_holds_them(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ["x"], ["y"])
    rng = np.random.default_rng(0)
    for role in ("audit", "unseen"):
        most = 4 if role == "audit" else 2  # of 5 documents that are of another kind
        starts = [20 if n % 5 < most else 80 for n in range(400)]
        ids = [rng.integers(start, start + 60, 60).tolist() for start in starts]
        table = pa.table({"id": [f"{role}{n}" for n in range(400)], "ids": ids})
        pq.write_table(table, tmp_path / f"{role}.parquet")
    described = plan.config.model_dump(mode="json", by_alias=True)
    for role in ("audit", "unseen"):
        described["corpus"][role] = {"path": str(tmp_path / f"{role}.parquet"), "id": "id", "tokens": "ids"}
    plan = plan_from(described)
    checks = plan_checks(plan)
    (matched,) = write_matched(plan, str(tmp_path / "matched"))
    assert "whose tokens resemble the audited" in matched.sentence()
    assert all(test["by"] == "tokens" for name, test in matched.facts().items() if name in ("before", "after"))
    said = " ".join([*checks["lines"], checks["scope"], matched.sentence()])
    assert "tokens that tell them apart: " in said
    assert "word" not in said
    assert matched.sentence().split(": then")[0].count(", tokens: tokens}") == 1
    rows = pq.read_table(matched.path).to_pylist()
    assert all(row["text"] == " ".join(map(str, row["tokens"])) for row in rows)
    described["corpus"]["unseen"] = {"path": matched.path, "id": "id", "tokens": "tokens"}
    assert plan_checks(plan_from(described))["documents"]["unseen"] == len(rows)


def plan_from(described: dict[str, Any]) -> Any:
    return make_plan(build_config(described))


def test_documents_that_nothing_matches_are_said_to_be_so(tmp_path: Path) -> None:
    known, audit = texts(1, 200, 0.0), [f"{text} zzz yyy xxx" for text in texts(2, 200, 0.9)]
    (matched,) = write_matched(plan_of(tmp_path, known, audit), str(tmp_path / "matched"))
    sentence = matched.sentence()
    assert "too few to calibrate on" in sentence or "nothing of this set repairs that" in sentence


def test_too_few_documents_and_a_folder_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    for known, audited in ((15, 50), (50, 30)):
        few = plan_of(tmp_path, texts(1, known, 0.1), texts(2, audited, 0.1))
        part = f"takes at least 20 of them and 40 audited ones, got {known} and {audited}"
        assert part in user_error(write_matched, few, str(tmp_path / "matched"))
    enough = plan_of(tmp_path, texts(1, 50, 0.1), texts(2, 50, 0.1))
    (tmp_path / "file").write_text("")
    assert f"--matched: {tmp_path / 'file'} is a file" in user_error(write_matched, enough, str(tmp_path / "file"))
    assert "cannot write " in user_error(write_matched, enough, str(tmp_path / "file" / "folder"))
