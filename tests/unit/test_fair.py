"""examples/papers/fair: one driver over four specifications, on stand-ins with the columns of the data sets."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from examples.papers.fair import driver
from examples.papers.fair.__main__ import main
from examples.papers.fair.driver import BENCHMARKS, FUSED, PARTS, measured_areas, prepare, specification, trial_audit
from pipeline.detectors.base import detector_names
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from seenset import open_run
from tests.helpers.made_up import sentence, write_rows

DOCUMENTS = 160


def stand_in(name: str, folder: Path, model: Path, documents: int = DOCUMENTS) -> str:
    """A data set with the columns and files of the one on the hub, every second document a member."""
    texts = [sentence(i, 20) for i in range(documents)]
    tokens = [AutoTokenizer.from_pretrained(model)(text)["input_ids"] for text in texts]
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for i, text in enumerate(texts):
        if name == "hubble":
            copies = (0, 1, 0, 64)[i % 4]
            rows["train" if copies else "test"].append({"text": text, "duplicates": copies})
        elif name == "toaa":
            condition = ("plain_1x", "rare_1tok_16x")[i % 4 // 2]
            rows["train"].append({"input_ids": tokens[i], "membership": i % 2, "condition": condition})
        elif name == "olmo_detect":
            rows["train"].append({"text": text, "label": i % 2, "subset": "all"})
        else:
            rows[("test", "train")[i % 2]].append({"uid": i, "batch_idx": i, "token_ids": tokens[i]})
    folder.mkdir()
    steps = {"train": "data/train-070000", "test": "data/train-071000"} if name == "checkmiabench" else {}
    for split, entries in rows.items():
        path = folder / f"{steps.get(split, split)}.{'parquet' if steps else 'jsonl'}"
        path.parent.mkdir(exist_ok=True)
        if steps:
            pq.write_table(pa.Table.from_pylist(entries), path)
        elif entries:
            write_rows(path, entries)
    return str(folder)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_stand_in_is_parted_by_label_and_condition(name: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    data = stand_in(name, tmp_path / "data", tiny_model_folder)
    counts = prepare(name, tmp_path, data, [f"model.path={tiny_model_folder}", "model.revision=null"])
    assert counts == {"audit": 80, "unseen": 40, "seen": 40}
    files = {part: (tmp_path / name / f"{part}.jsonl").read_text().splitlines() for part in PARTS}
    rows = {part: [json.loads(line) for line in lines] for part, lines in files.items()}
    assert {row["text"] for part in PARTS for row in rows[part]} == {sentence(i, 20) for i in range(DOCUMENTS)}
    of_text = {sentence(i, 20): i % 2 for i in range(DOCUMENTS)}
    assert all(row["member"] == of_text[row["text"]] for part in PARTS for row in rows[part])
    assert ({row["member"] for row in rows["unseen"]}, {row["member"] for row in rows["seen"]}) == ({0}, {1})


def test_a_missing_column_and_a_missing_data_set_are_one_line(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = stand_in("olmo_detect", tmp_path / "data", tiny_model_folder)
    with pytest.raises(UserError, match="no column 'duplicates' in allegrolab/passages_gutenberg_unpopular; columns:"):
        prepare("hubble", tmp_path, data)
    assert main(["prepare", "hubble", "--dataset", str(tmp_path / "none"), "--work", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["run", "hubble", "--work", str(tmp_path / "work")]) == 2
    assert "first run: python -m examples.papers.fair prepare hubble" in capsys.readouterr().err


def test_four_specifications_name_detectors_as_far_as_the_models_allow(tmp_path: Path) -> None:
    figures = {figure.detector for name in BENCHMARKS for figure in specification(name).figures}
    assert figures <= {*detector_names(), driver.BEST}
    hubble, olmo = (trial_audit(name, tmp_path) for name in ("hubble", "olmo_detect"))
    assert set(hubble["detectors"]) - set(olmo["detectors"]) == {"reference", "ez", "wbc"}
    unnamed = {"knockoff", "knockoff_spread", "from_column"}  # no paraphraser, file or column is named
    assert set(detector_names()) - set(hubble["detectors"]) == unnamed
    given = trial_audit("olmo_detect", tmp_path, ["paraphraser.path=some/paraphraser"])
    assert "ktd" in [entry["name"] for entry in given["selections"]]
    assert {"known_members", FUSED, "adadetect"} <= {entry["name"] for entry in hubble["selections"]}
    build_config(hubble)


@pytest.mark.slow
def test_a_run_of_a_stand_in_prints_the_papers_column_beside_ours(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = stand_in("hubble", tmp_path / "data", tiny_model_folder, documents=600)  # `dc_pdd` counts tokens of 100
    prepare("hubble", tmp_path, data)
    models = [f"{role}.path={tiny_model_folder}" for role in ("model", "reference_model")]
    settings = [*models, "resources.cluster=local", "evidence=0", "fsd.epochs=1", "error_budget=0.5"]
    assert main(["run", "hubble", "--work", str(tmp_path), *(w for one in settings for w in ("--set", one))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "hubble/audit.jsonl").read_text().splitlines()]
    table = open_run(tmp_path / "runs/hubble").selections[FUSED].documents()
    loss = dict(zip(table["doc_id"].to_pylist(), table["loss"].to_pylist(), strict=True))
    seen = np.array([loss[row["id"]] for row in rows if row["condition"] == "64"])
    others = np.array([loss[row["id"]] for row in rows if not row["member"]])
    wins = (seen[:, None] > others) + (seen[:, None] == others) / 2
    areas = measured_areas("hubble", tmp_path)
    auc = areas["64", "loss"].auc.value
    assert auc == pytest.approx(wins.mean())
    assert {condition for condition, _ in areas} == {"1", "64", "all"}
    capsys.readouterr()
    assert main(["table", "hubble", "--work", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"64 +│ loss +│ +0\.996 │ +{auc:.3f} \[", shown)
    assert re.search(r"256 +│ loss +│ +1 │ +no such rows", shown)
    assert re.search(r"│ known_members +│ +\d+ │", shown)
