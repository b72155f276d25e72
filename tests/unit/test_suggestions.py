"""What an error suggests is accepted in its place."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import seenset
from pipeline.errors import UserError
from pipeline.plan.description import build_config, load_config
from pipeline.run.plan import make_plan
from pipeline.trial.config import load_trial
from tests.helpers.commands import user_error


def described(**settings: Any) -> dict[str, Any]:
    corpus = {"audit": {"path": "a.jsonl"}, "unseen": {"path": "b.jsonl"}}
    return {"run": "runs/audit", "model": {"path": "none"}, "corpus": corpus, **settings}


def selection(*detectors: str) -> dict[str, Any]:
    return {"name": "members", "detectors": list(detectors)}


def suggestion(data: dict[str, Any], *overrides: str) -> str:
    """What stands between `did you mean` and the question mark."""
    (found,) = re.findall(r"did you mean (.*?)\?", user_error(build_config, data, overrides))
    return found


def test_a_value_in_the_place_of_arguments_is_given_to_the_first_that_takes_it() -> None:
    for name, value in (("min_k", "0.2"), ("gap_k", "0.3"), ("min_k", "[0.1, 0.2]")):
        meant = f"{{{name}: {{k: {value}}}}}"
        assert suggestion(described(detectors=[yaml.safe_load(f"{{{name}: {value}}}")])) == meant
        config = build_config(described(detectors=[yaml.safe_load(meant)]))
        assert config.detectors == [yaml.safe_load(meant)]


def test_a_detector_in_capitals_is_found_and_a_single_one_becomes_a_list() -> None:
    for name in ("LOSS", "Loss", "los"):
        assert suggestion(described(detectors=[name])) == "'loss'"
    listed = suggestion(described(), "detectors=renyi")
    assert listed == "[renyi]"
    assert build_config(described(), [f"detectors={listed}"]).detectors == ["renyi"]


def test_a_setting_of_the_selections_is_suggested_only_where_some_are_given() -> None:
    assert "unknown key 'alpha'" in user_error(build_config, described(), ["alpha=0.05"])
    data = described(selections=[selection("loss"), {**selection("loss"), "name": "clean"}])
    path = suggestion(data, "alpha=0.05").strip("'")
    del data["alpha"]
    assert [one.alpha for one in build_config(data, [f"{path}=0.05"]).selections] == [0.05, 0.05]


def test_a_selection_that_names_a_detector_gets_its_column() -> None:
    scored = [{"renyi": {"order": "2", "k": 0.1}}]
    column = suggestion(described(detectors=scored, selections=[selection("renyi")]))
    selected = selection(yaml.safe_load(column))
    assert build_config(described(detectors=scored, selections=[selected])).selections[0].detectors == [
        column.strip("'")
    ]


def test_a_detector_of_pictures_gets_its_part() -> None:
    data = described(detectors=["renyi"])
    for source in data["corpus"].values():
        source["image"] = "image"
    (example,) = re.findall(r"take (\{.*?\}\}),", user_error(build_config, data))
    data["detectors"] = [yaml.safe_load(example)]
    assert build_config(data).detectors == [{"renyi": {"part": "description"}}]


@pytest.mark.parametrize("run", [".", "..", "data"])
def test_a_run_directory_that_would_fill_a_folder_of_the_user_is_refused(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for name in ("a.jsonl", "b.jsonl"):
        (folder / "data" / name).write_text('{"text": "some words"}\n')
    corpus = {"audit": {"path": "data/a.jsonl"}, "unseen": {"path": "data/b.jsonl"}}
    (folder / "audit.yaml").write_text(yaml.safe_dump({**described(), "corpus": corpus, "run": run}))
    line = user_error(lambda: make_plan(load_config(str(folder / "audit.yaml"))))
    assert re.search("^run: .* a run directory holds only files of the run; name a folder", line)
    make_plan(load_config(str(folder / "audit.yaml"), [f"run={folder}/runs/audit"]))
    trial = {"run": run, "model": {"path": "none"}, "documents": {"path": "data/a.jsonl"}}
    trial |= {"selections": [selection("loss")]}
    (folder / "trial.yaml").write_text(yaml.safe_dump(trial))
    if run != "data":
        with pytest.raises(UserError, match=r"trial\.yaml, and a run directory holds only files of the run"):
            load_trial(str(folder / "trial.yaml"))


def test_a_run_directory_that_would_fill_the_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "some words"}\n')
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(described(model={"path": "./model", "adapter": "adapter"})))
    for name in ("model", "adapter"):
        with pytest.raises(UserError, match=rf"^run: .*{name} holds {name}, and a run directory holds only"):
            make_plan(load_config(str(tmp_path / "audit.yaml"), [f"run={tmp_path / name}"]))
    make_plan(load_config(str(tmp_path / "audit.yaml"), [f"run={tmp_path}/model/runs"]))


def test_what_is_one_text_or_no_sequence_or_no_model_is_refused() -> None:
    for given, line in (
        (("none", "one text"), "texts must be a sequence of texts, got one str; write [text] to score one"),
        *((("none", texts), "texts must be a sequence of texts, got ") for texts in (5, None, {"a": "text"})),
        (("none", ["one text"], "loss"), "detectors must be a sequence, got 'loss'; write ['loss']"),
        (("none", ["one text"], 5), "detectors must be a sequence, got 5"),
        ((5, ["one text"]), "model must be a path, a ModelConfig or an opened model, got int"),
    ):
        assert line in user_error(seenset.score, *given)


def test_a_notebook_without_widgets_shows_no_warning_of_a_progress_bar() -> None:
    code = """
import sys, types
kernel = types.ModuleType("IPython")
kernel.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"], sys.modules["ipywidgets"] = kernel, None
import seenset
import tqdm.auto
"""
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert end.stderr == ""
