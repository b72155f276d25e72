"""examples/papers: every configuration plans as it stands, but for the model, files and GPUs that are not here."""

import json
import re
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml

from examples.papers import prepare
from examples.papers.judge import error_and_power
from pipeline.plan.description import load_config
from pipeline.run.machine import Node, actor_shape, places
from tests.helpers.commands import ended, here, refusal, user_error
from tests.helpers.made_up import sentence, write_audit, write_rows

FOLDER = Path(prepare.__file__).parent
PAPERS = sorted(FOLDER.glob("*.yaml"))
EIGHT_GPUS = [Node(64.0, 8.0)]


TEXTS = [sentence(i, 30) for i in range(240)]
ROWS = [{"input": t, "Example_A": t, "label": i % 2, "Label": i % 2} for i, t in enumerate(TEXTS)]
"""Rows with the columns of both data sets."""


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_configuration_names_the_hub_and_fills_eight_gpus(path: Path) -> None:
    config = load_config(str(path))
    assert re.fullmatch(r"[\w-]+/[\w.-]+", config.model.path)
    shape = actor_shape(config.resources, EIGHT_GPUS)
    assert (places(EIGHT_GPUS, shape), config.resources.actors, config.resources.cluster) == (8, 8, "ray")
    files = {entry for _, source in config.corpus.roles() for entry in source.paths}
    names = {Path(entry).parent.name for entry in files}
    assert names <= set(prepare.BENCHMARKS)
    assert all(f"prepare {name}" in path.read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_configuration_plans_without_a_network(
    path: Path, tiny_model_folder: Path, tiny_t5_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = [f"run={tmp_path / 'run'}", f"model.path={tiny_model_folder}", "model.quantization=null"]
    settings += ["resources.cluster=local", "resources.gpus_per_actor=0", "resources.cpus_per_actor=1"]
    settings += [f"paraphraser.path={tiny_t5_folder}"] if "paraphraser" in raw else []
    for role, source in raw["corpus"].items():
        name = Path(source["path"]).parent.name
        prepare.part_benchmark(name, ROWS, tmp_path / name)
        settings.append(f"corpus.{role}.path={tmp_path / name / Path(source['path']).name}")
    words = [word for setting in settings for word in ("--set", setting)]
    facts = json.loads(here(capsys, "plan", path, "--json", *words)[0])
    assert [entry["name"] for entry in facts["selections"]] == [entry["name"] for entry in raw["selections"]]
    assert facts["roles"]["audit"]["documents"] == 120


def test_a_hub_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    prepare.part_benchmark("wikimia_64", ROWS, tmp_path)
    settings = [f"--set=corpus.{role}.path={tmp_path / role}.jsonl" for role in ("audit", "unseen")]
    line = refusal(capsys, "plan", FOLDER / "ptdi_wikimia.yaml", *settings)
    assert "model EleutherAI/gpt-neox-20b: no such folder, and the hub cannot be reached" in line


def test_the_parts_are_disjoint_and_a_missing_column_is_named(tmp_path: Path) -> None:
    counts = prepare.part_benchmark("arxivtection", ROWS, tmp_path)
    assert counts == {"audit": 120, "unseen": 60, "seen": 60}
    parts = {
        part: [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()] for part in counts
    }
    assert len({row["id"] for rows in parts.values() for row in rows}) == 240
    assert {row["member"] for row in parts["unseen"]} == {0}
    assert {row["member"] for row in parts["seen"]} == {1}
    error = user_error(prepare.part_benchmark, "arxivtection", [{"text": "a"}], tmp_path)
    assert "no column 'Example_A' in avduarte333/arXivTection; columns: text" in error
    error = user_error(prepare.part_benchmark, "wikimia_32", [{"input": "a", "label": 2}], tmp_path)
    assert "row 0 of swj0419/WikiMIA: label must be 0 or 1, got 2" in error


def test_the_readme_has_a_line_and_a_free_cell_for_every_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)\.yaml` \|.*\| (.*?) ?\|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in rows} == {path.stem for path in PAPERS}
    assert {name.partition("_")[0] for name, _ in rows} == {"ptdi", "td4eval", "ktd", "fsd", "samia"}
    assert {ours for _, ours in rows} == {""}


@pytest.mark.slow
def test_error_and_power_are_those_of_the_labels(tiny_model_folder: Path, tmp_path: Path) -> None:
    selections = [{"name": "all", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}]
    path = write_audit(tmp_path, tiny_model_folder, [], evidence=0, selections=selections)
    rows = [{"id": f"a{i}", "text": sentence(i), "member": int(i < 20)} for i in range(30)]
    write_rows(tmp_path / "audit.jsonl", rows)
    assert ended("run", path) == 0
    ((count, wrong, power),) = error_and_power(str(tmp_path / "run"), tmp_path / "audit.jsonl").values()
    assert count == 30
    assert (round(wrong, 6), power) == (round(10 / 30, 6), 1.0)
