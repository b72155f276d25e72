"""Relative paths are relative to the file that names them, wherever the command runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from pipeline.config.audit import AuditConfig
from pipeline.config.models import display_name
from pipeline.config.paths import Named, Place, named_fields, path_origin, placed, placed_value, sections_in, written
from pipeline.config.yaml import read_mapping
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, number_rows, plan_shards
from pipeline.detectors import plugins
from pipeline.plan.description import build_config, load_config
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.trial.config import TrialConfig, load_trial
from tests.helpers.commands import user_error


def write_rows(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_yaml(path: Path, **settings: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and its data; the working directory is elsewhere."""
    folder = tmp_path.resolve() / "project"
    write_rows(folder / "data/audit/a.jsonl", "one text", "another text")
    write_rows(folder / "data/unseen.jsonl", "a third text")
    write_yaml(folder / "audit.yaml", **description())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def description(**changes: Any) -> dict[str, Any]:
    return {
        "run": "runs/x",
        "model": {"path": "owner/name"},
        "corpus": {"audit": {"path": "data/audit/*.jsonl"}, "unseen": {"path": ["./data/unseen.jsonl"]}},
        "selections": [{"name": "members", "detectors": ["loss"]}],
        **changes,
    }


def ids_of(config: AuditConfig) -> list[str]:
    shards = number_rows(plan_shards(config.corpus, find_inputs(config.corpus), config.resources))
    return [document.doc_id for shard in shards for document in read_shard(shard)]


def test_data_lie_beside_the_file_and_ids_do_not_tell_where(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_config(str(project / "audit.yaml"))
    assert ids_of(first) == ["data/audit/a.jsonl#0", "data/audit/a.jsonl#1", "data/unseen.jsonl#0"]
    assert first.run == str(project / "runs/x")
    monkeypatch.chdir(project)
    second = load_config("audit.yaml")
    assert first == second
    assert Store(second.run).url == str(project / "runs/x")
    monkeypatch.chdir("/")
    manifest = build_config(json.loads(first.model_dump_json(by_alias=True)))
    assert ids_of(manifest) == ids_of(first) == ids_of(second)


def test_ids_above_the_file_and_of_absolute_paths_are_as_they_were_written(project: Path) -> None:
    audit, unseen = {"path": "../data/audit"}, {"path": str(project / "data/unseen.jsonl")}
    path = write_yaml(project / "configs/audit.yaml", **description(corpus={"audit": audit, "unseen": unseen}))
    assert ids_of(load_config(path)) == [
        "../data/audit/a.jsonl#0",
        "../data/audit/a.jsonl#1",
        f"{project}/data/unseen.jsonl#0",
    ]
    assert (written("s3://bucket/./a"), path_origin("s3://bucket/./a")) == ("s3://bucket/./a", None)
    audit = {"path": f"{project}/data/./audit/a.jsonl"}
    config = build_config(description(corpus={"audit": audit}, selections=[]))
    assert ids_of(config) == ["audit/a.jsonl#0", "audit/a.jsonl#1"]


def marks_in(hint: Any) -> Iterator[Any]:
    """What a type annotation is annotated with, however deep."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from marks_in(inner)


def settings_of(kind: type, where: str = "") -> Iterator[tuple[str, Any, str, Place | None]]:
    """Path, annotation, description and place of every setting of a configuration, with those of its sections."""
    hints = get_type_hints(kind, include_extras=True)
    for name, field in named_fields(kind).items():
        marks = [*marks_in(hints[name]), *getattr(field, "metadata", ())]
        path = f"{where}{getattr(field, 'alias', None) or name}"
        place = next((mark for mark in marks if isinstance(mark, Place)), None)
        yield path, hints[name], getattr(field, "description", None) or "", place
        for section in sections_in(hints[name]):
            yield from settings_of(section, f"{path}.")
        for mark in marks:
            if isinstance(mark, Named):
                yield from settings_of(mark.section, f"{path}.any.")


ROOTS = (AuditConfig, TrialConfig)
PATHS = [
    pytest.param(root, path, place, id=f"{root.__name__}-{path}")
    for root in ROOTS
    for path, _, _, place in settings_of(root)
    if place not in (None, Place.SWEPT)
]
VALUES = {
    Place.RUN: "runs/other",
    Place.INPUT: "data/files/*.jsonl",
    Place.MODEL: "./models/base",
    Place.CODE: "mine.py",
    Place.SETTINGS_FILE: "zero.json",
}
NO_PATHS = {"delimiter", "encoding", "gguf_file", "id", "image", "name"}
"""Settings whose descriptions name files or folders and that are no paths."""


@pytest.mark.parametrize(("root", "path", "place"), PATHS)
def test_every_path_is_relative_to_its_file(project: Path, root: type[BaseModel], path: str, place: Place) -> None:
    def resolved(value: str) -> Any:
        return placed_value(root, path, value, str(project))

    value = VALUES[place]
    beside = project / value
    assert resolved(value) == (str(beside) if place is Place.RUN else f"{project}/./{value.removeprefix('./')}")
    assert resolved("s3://bucket/a/b.py") == "s3://bucket/a/b.py"
    assert resolved("/whole/path.py") == "/whole/path.py"
    for name in ("owner/name", "gpt2", "~/model") if place is Place.MODEL else ():
        assert resolved(name) == name
    packaged = {"resources": {"deepspeed": "zero2"}}
    assert placed(AuditConfig, packaged, str(project)) == packaged


def test_settings_that_are_paths_are_those_whose_descriptions_name_files_or_folders() -> None:
    found = {path for root in ROOTS for path, _, _, place in settings_of(root) if place is not None}
    named = {
        path
        for root in ROOTS
        for path, hint, description, _ in settings_of(root)
        if "str" in repr(hint)
        and (re.search(r"\b(files?|folders?|[Aa] run|ledger)\b", description) or path.endswith(("path", "corpus")))
    }
    assert {"against", "series.ledger", "model.adapter", "fsd.adapters.any.corpus.path"} <= found
    assert {path for path in named - found if path.rpartition(".")[2] not in NO_PATHS} == set()


def test_overrides_are_relative_to_the_working_directory_and_runs_are_told_apart(project: Path) -> None:
    write_rows(Path("mine.jsonl"), "a text of mine")
    here = Path.cwd().resolve()
    config = load_config(str(project / "audit.yaml"), ["corpus.audit.path=mine.jsonl", "run=runs/y"])
    assert ids_of(config) == ["mine.jsonl#0", "data/unseen.jsonl#0"]
    assert config.run == str(here / "runs/y")
    (project / "models/base").mkdir(parents=True)
    named = load_config(write_yaml(project / "audit.yaml", **description(model={"path": "models/base"})))
    assert display_name(named.model) == "models/base", "as the file calls it"
    write_rows(Path("runs/x/manifest.json"), "")
    assert "or ./runs/x for a new one beside it" in user_error(load_config, str(project / "audit.yaml"))
    path = write_yaml(project / "audit.yaml", **description(run="./runs/x"))
    assert load_config(path).run == str(project / "runs/x")


def test_a_file_that_relied_on_the_working_directory_says_what_to_write(project: Path) -> None:
    adapters: dict[str, Any] = {"adapters": {"a": {"corpus": {"path": "a.csv"}}}}
    relied: list[tuple[dict[str, Any], str, str, str]] = [
        (
            {"corpus": {"audit": {"path": "old/*.jsonl"}}, "selections": []},
            "old/a.jsonl",
            "corpus.audit.path",
            "old/*.jsonl",
        ),
        ({"run": "runs/old"}, "runs/old/manifest.json", "run", "runs/old"),
        ({"model": {"path": "old/model"}}, "old/model/config.json", "model.path", "old/model"),
        ({"model": {"path": "old.gguf"}}, "old.gguf", "model.path", "old.gguf"),
        ({"import": ["old.py"]}, "old.py", "import", "old.py"),
        ({"fsd": adapters}, "a.csv", "fsd.adapters.a.corpus.path", "a.csv"),
    ]
    for settings, here, key, name in relied:
        write_rows(Path(here), "a text")
        path = write_yaml(project / "old.yaml", **description(**settings))
        error = user_error(load_config, path)
        assert error.startswith(f"{key}: {name} is in the working directory and not beside {path};")
        assert f"write ../elsewhere/{name}" in error
        corrected = yaml.safe_dump(description(**settings)).replace(name, f"../elsewhere/{name}")
        (project / "old.yaml").write_text(corrected)
        read_mapping(path, AuditConfig)


PLUGIN = """
from seenset import FORWARD, detector, mean_of_all

@detector(needs={FORWARD: ["log_prob"]})
def beside(evidence):
    return mean_of_all(evidence[FORWARD].log_prob, evidence[FORWARD].mask)
"""


@pytest.mark.usefixtures("forgotten_plugins")
def test_plugins_of_one_name_beside_two_files_are_not_taken_for_one_another(project: Path) -> None:
    configs = []
    for name in ("one", "two"):
        selections = [{"name": "members", "detectors": ["beside"]}]
        settings = description(detectors=["beside"], selections=selections) | {"import": ["mine.py"]}
        path = write_yaml(project / name / "audit.yaml", **settings)
        (project / name / "mine.py").write_text(f"# {name}{PLUGIN}")
        configs.append(load_config(path))
    for name, config in zip(("one", "two"), configs, strict=True):
        (plugin,) = plugins.imported(config.import_)
        assert str(plugin.source).startswith(f"# {name}\n")
    (project / "two/mine.py").write_text("1 / 0")
    assert user_error(load_config, path).startswith("import: mine.py, line 1: cannot be imported")


def test_where_an_adapters_corpus_lies_changes_no_fingerprint(tiny_model_folder: Path, tmp_path: Path) -> None:
    prints = []
    for name in ("one", "two"):
        write_rows(tmp_path / name / "own.jsonl", "text")
        settings = description(
            model={"path": str(tiny_model_folder)},
            detectors=["loss", {"fsd": {"base": "loss"}}],
            fsd={"corpus": {"path": "own.jsonl"}},
        )
        prints.append(plan_stages(load_config(write_yaml(tmp_path / name / "audit.yaml", **settings)))[-1].fingerprint)
    assert prints[0] == prints[1]


def test_a_trial_and_the_values_of_its_sweep_are_relative_to_its_file(project: Path) -> None:
    for name in ("s", "m"):
        (project / "models" / name).mkdir(parents=True)
    trial = {
        "run": "runs/t",
        "work": "runs/w",
        "model": {"path": "models/s"},
        "documents": {"path": "data/audit"},
        "selections": [{"name": "members", "detectors": ["loss"]}],
        "sweep": {"model.path": ["models/s", "models/m", "owner/name"], "selections.*.alpha": [0.1]},
    }
    path = write_yaml(project / "trial.yaml", **trial)
    config, points = load_trial(path)
    assert (config.run, config.work) == (str(project / "runs/t"), str(project / "runs/w"))
    assert [point.config.model.path for point in points] == [
        f"{project}/./models/s",
        f"{project}/./models/m",
        "owner/name",
    ]
    assert [point.settings["model.path"] for point in points] == ["models/s", "models/m", "owner/name"]
    assert written(read_mapping(path, TrialConfig)["documents"]["path"]) == "data/audit"
