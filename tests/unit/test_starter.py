"""`seenset init` writes a configuration for the files that lie in a folder, which loads and plans as it stands."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from commands import ended

from pipeline.audit.description import load_config
from pipeline.audit.plan import describe_model, make_plan
from pipeline.audit.starter import HUB_MODEL, audit_starter, write_starter
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import SourceConfig
from pipeline.config.models import ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.config.training import FinetuneConfig
from pipeline.config.yaml import config_schema
from pipeline.corpus.discovery import id_column, role_of, text_column
from pipeline.errors import UserError
from pipeline.selection.procedures import PROCEDURES
from pipeline.trial.config import TrialConfig, load_trial
from pipeline.trial.starter import trial_starter


def rows_of(name: str, count: int, **columns: str) -> list[dict[str, Any]]:
    return [
        {
            "n": i,
            "key": f"{name}-{i}",
            "title": "A title",
            "body": f"Text number {i} of {name} goes on a while.",
            **columns,
        }
        for i in range(count)
    ]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines))
    elif path.suffix == ".txt":
        path.write_text(rows[0]["body"])
    elif not path.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        path.write_bytes(lines)


def started(folder: Path) -> Path:
    """The configuration that init writes into a folder."""
    return Path(write_starter(str(folder), audit_starter(str(folder)))[0])


def documents(path: Path) -> dict[str, int]:
    """Documents of each role as `seenset plan` counts them."""
    plan = make_plan(load_config(str(path)))
    return {role: plan.documents(role)[0] for role, _ in plan.config.corpus.roles()}


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".jsonl.zst", ".csv", ".parquet", ""])
def test_the_starter_of_every_format_plans_as_it_stands(
    tmp_path: Path, tiny_model_folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "models/tiny")
    write(tmp_path / f"data/candidates{ending}", rows_of("a", 30))
    write(tmp_path / f"data/after_cutoff{ending}", rows_of("u", 20))
    path = started(tmp_path)
    monkeypatch.chdir("/")
    config = load_config(str(path))
    assert isinstance(config.model, ModelConfig)
    assert config.model.shown == "models/tiny"
    assert describe_model(config.model)["architecture"] == "LlamaForCausalLM"
    assert config.corpus.unseen is not None
    for source in (config.corpus.audit, config.corpus.unseen):
        assert (source.text, source.id) == ("body", "key")
    assert documents(path) == {"audit": 30, "unseen": 20}
    assert "Other columns: n, title." in path.read_text()
    (selection,) = config.selections
    assert (selection.direction, selection.procedure, selection.alpha) == ("members", "bh", 0.1)


def test_folders_of_text_files_are_documents_and_lone_ones_beside_tables_are_not(tmp_path: Path) -> None:
    for index in range(5):
        write(tmp_path / f"suspects/{index}.txt", rows_of(f"a{index}", 1))
        write(tmp_path / f"holdout/{index}.txt", rows_of(f"u{index}", 1))
    assert documents(started(tmp_path)) == {"audit": 5, "unseen": 5}
    write(tmp_path / "other/audit.jsonl", rows_of("a", 3))
    write(tmp_path / "other/unseen.jsonl", rows_of("u", 3))
    write(tmp_path / "other/about.txt", rows_of("about", 1))
    assert "about.txt" not in started(tmp_path / "other").read_text()


def test_parts_of_one_file_are_a_glob_and_years_are_not(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"audit/part-{part:05d}-of-00003.parquet", rows_of(f"a{part}", 4))
    for year in (2019, 2024):
        write(tmp_path / f"unseen/{year}.jsonl", rows_of(f"u{year}", 6))
    settings = yaml.safe_load(started(tmp_path).read_text())["corpus"]
    assert settings["audit"]["path"] == "audit/part-*-of-*.parquet"
    assert settings["unseen"]["path"] == ["unseen/2019.jsonl", "unseen/2024.jsonl"]
    assert documents(tmp_path / "audit.yaml") == {"audit": 12, "unseen": 12}


def test_files_of_one_role_with_other_columns_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path / "audit/a.jsonl", rows_of("a", 4))
    write(tmp_path / "audit/b.jsonl", [{"text": "another kind of text", "id": 1}])
    write(tmp_path / "unseen.jsonl", rows_of("u", 4))
    path = started(tmp_path)
    assert (
        "Left out, because their columns or encodings differ: audit/b.jsonl (text: text, id: id)." in path.read_text()
    )
    assert documents(path) == {"audit": 4, "unseen": 4}


def test_the_splits_of_a_saved_dataset_have_roles_by_their_names(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list(rows_of(name, 5)) for name in ("members", "nonmembers", "candidates")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "wiki"))
    assert documents(started(tmp_path)) == {"audit": 5, "unseen": 5, "seen": 5}


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("unseen.jsonl", "unseen"),
        ("data/after_cutoff.jsonl.zst", "unseen"),
        ("heldOut/part-0.parquet", "unseen"),
        ("non-members.csv", "unseen"),
        ("not_trained.csv", "unseen"),
        ("after2024.jsonl", "unseen"),
        ("unseen/train-00000-of-00001.parquet", "unseen"),
        ("candidates/x.jsonl", "audit"),
        ("members.jsonl", "seen"),
        ("train.jsonl", "seen"),
        ("seen/audit.jsonl", "audit"),
        ("wikipedia.jsonl", None),
        ("restraint.jsonl", None),
    ],
)
def test_a_role_is_guessed_from_the_last_part_of_a_path_that_speaks_of_one(path: str, role: str | None) -> None:
    assert role_of(path)[0] == role


def test_the_text_is_told_by_name_and_else_by_length_and_ids_never_repeat() -> None:
    rows = [{"text": "short", "story": "one two three four five", "id": 1, "label": 0}] * 2
    assert text_column(list(rows[0]), rows) == ("text", "by its name")
    del rows[0]["text"]
    assert text_column(list(rows[0]), rows) == ("story", "it holds the longest texts")
    assert id_column(list(rows[0]), rows, "story") is None
    assert id_column(list(rows[0]), [rows[0], {**rows[0], "id": 2}], "story") == "id"
    assert text_column(["n", "name"], [{"n": 1, "name": "two words"}]) is None


def test_a_missing_role_is_a_comment_and_init_says_what_to_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "wikipedia.jsonl", rows_of("a", 4))
    command(["init", str(tmp_path)])
    printed = capsys.readouterr().out
    assert (
        "missing: add corpus.unseen: {path: ...}, documents of the same kind that are known not to be in the training "
        "data\n"
    ) in printed
    path = tmp_path / "audit.yaml"
    with pytest.raises(UserError, match=r"add corpus\.unseen: \{path: \.\.\.\}"):
        load_config(str(path))
    write(tmp_path / "new.jsonl", [{"text": "a text"}] * 3)
    text = path.read_text()
    block = "  # unseen:\n  #   path: PATH\n  #   text: text\n"
    assert block in text
    path.write_text(text.replace(block, block.replace("# ", "").replace("PATH", "new.jsonl")))
    assert documents(path) == {"audit": 4, "unseen": 3}


def test_known_training_data_alone_ask_for_the_clean_ones(tmp_path: Path) -> None:
    write(tmp_path / "benchmark.jsonl", rows_of("a", 4))
    write(tmp_path / "train.jsonl", rows_of("s", 4))
    path = started(tmp_path)
    assert load_config(str(path)).selections[0].direction == "clean"
    assert documents(path) == {"audit": 4, "seen": 4}


def test_known_documents_without_any_to_judge_say_so(tmp_path: Path) -> None:
    write(tmp_path / "members.jsonl", rows_of("s", 4))
    write(tmp_path / "nonmembers.jsonl", rows_of("u", 4))
    assert audit_starter(str(tmp_path)).missing == ("add corpus.audit: {path: ...}, documents to be judged",)


def test_without_a_model_here_a_hub_id_stands_in_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    starter = audit_starter(str(tmp_path))
    assert yaml.safe_load(starter.text)["model"]["path"] == HUB_MODEL
    assert "this hub id stands in for your model" in starter.text
    assert f"model: none lies here; {HUB_MODEL} stands in for yours" in starter.guesses
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/b.gguf").write_bytes(b"GGUF")
    (tmp_path / "weights/a.gguf").write_bytes(b"GGUF")
    starter = audit_starter(str(tmp_path))
    assert yaml.safe_load(starter.text)["model"]["path"] == "./weights/a.gguf"
    assert "Others: ./weights/b.gguf." in starter.text
    (tmp_path / "weights/trial.json").write_text("{}")
    (tmp_path / "weights/models/contaminated").mkdir(parents=True)
    (tmp_path / "weights/models/contaminated/c.gguf").write_bytes(b"GGUF")
    assert "contaminated" not in audit_starter(str(tmp_path)).text


def test_what_a_run_wrote_and_what_belongs_to_a_model_is_no_data(tmp_path: Path, tiny_model_folder: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "tiny")
    write(tmp_path / "tiny/vocabulary.jsonl", rows_of("v", 4))
    write(tmp_path / "runs/x/scores/audit-000000.parquet", rows_of("r", 4))
    (tmp_path / "runs/x/shards.json").write_text("[]")
    write(tmp_path / ".cache/x.jsonl", rows_of("c", 4))
    write(tmp_path / "README.txt", rows_of("r", 4))
    (tmp_path / "package.json").write_text('{"name": "one two three four"}')
    with pytest.raises(UserError, match="no documents in"):
        audit_starter(str(tmp_path))
    write(tmp_path / "notices.jsonl", rows_of("n", 4))
    assert yaml.safe_load(started(tmp_path).read_text())["corpus"]["audit"]["path"] == "notices.jsonl"


@pytest.mark.parametrize("break_", ["\n", "\u2028", "\x85", "\x1b[2J", "\x00"])
def test_names_of_files_and_columns_are_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_: str
) -> None:
    evil = f"x{break_}import: [evil.py]{break_}y"
    write(tmp_path / "unseen.jsonl", [{evil: 1, f"{evil} text": "some words of a text"}])
    name = f"audit{break_}import: [evil.py]" if break_ != "\x00" else "audit"
    for kind in ("one", "other"):
        write(tmp_path / f"{name} {kind}.jsonl", rows_of("a", 4))
    command(["init", str(tmp_path)])
    settings = yaml.safe_load((tmp_path / "audit.yaml").read_text())
    assert "import" not in settings
    assert settings["corpus"]["unseen"]["text"] == f"{evil} text"
    assert settings["corpus"]["audit"]["path"] == [f"{name} one.jsonl", f"{name} other.jsonl"]
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 5


def test_every_setting_has_the_sentence_of_its_field_once(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    write(tmp_path / "unseen.jsonl", rows_of("u", 4))
    lines = [line.strip().removeprefix("# ") for line in started(tmp_path).read_text().splitlines()]
    text = " ".join(lines)
    written = yaml.safe_load((tmp_path / "audit.yaml").read_text())
    sections: list[tuple[Any, Mapping[str, Any]]] = [
        (AuditConfig, written),
        (ModelConfig, written["model"]),
        (SourceConfig, written["corpus"]["audit"]),
        (SelectionConfig, written["selections"][0]),
    ]
    for kind, settings in sections:
        for key in settings:
            description = kind.model_fields[key].description
            assert description is None or text.count(description) == 1, key


def test_the_schema_beside_it_checks_the_starter(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    write(tmp_path / "unseen.jsonl", rows_of("u", 4))
    for starter, kind in ((audit_starter(str(tmp_path)), AuditConfig), (trial_starter(str(tmp_path)), TrialConfig)):
        path, schema_path = write_starter(str(tmp_path), starter)
        first = Path(path).read_text().splitlines()[0]
        named = tmp_path / first.removeprefix("# yaml-language-server: $schema=")
        assert named == Path(schema_path)
        schema = json.loads(named.read_text())
        assert schema == config_schema(kind, tuple(PROCEDURES))
        validator = jsonschema.Draft202012Validator(schema)
        settings = yaml.safe_load(Path(path).read_text())
        validator.validate(settings)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**settings, "max_token": 5})


def test_the_starter_of_a_trial_loads(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows_of("s", 4))
    write(tmp_path / "after.jsonl", rows_of("u", 4))
    path, _ = write_starter(str(tmp_path), trial_starter(str(tmp_path)))
    config, points = load_trial(path)
    assert config.documents.paths == [f"{tmp_path.resolve()}/./after.jsonl"]
    assert (config.documents.text, config.documents.id, len(points)) == ("body", "key", 1)
    assert config.contaminate.epochs == FinetuneConfig().epochs


def test_a_trial_never_takes_what_the_model_has_seen(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows_of("s", 4))
    starter = trial_starter(str(tmp_path))
    assert starter.missing == ("add documents: {path: ...}, documents that the model has not seen",)
    assert "documents" not in yaml.safe_load(starter.text)


def command(arguments: list[str], code: int = 0) -> None:
    assert ended(*arguments) == code


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    (tmp_path / "audit.yaml").write_text("mine")
    command(["init", str(tmp_path)], code=2)
    assert capsys.readouterr().err == (
        f"seenset: {tmp_path}/audit.yaml is there already; remove it, or give another folder\n"
    )
    assert (tmp_path / "audit.yaml").read_text() == "mine"


@pytest.mark.parametrize("option", [[], ["--trial"]])
def test_a_folder_without_data_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    command(["init", str(tmp_path / "nowhere"), *option], code=2)
    assert capsys.readouterr().err == f"seenset: no folder {tmp_path}/nowhere\n"
    command(["init", str(tmp_path), *option], code=2)
    assert capsys.readouterr().err.endswith("; the folder is empty\n")
    (tmp_path / "table.xlsx").write_text("")
    command(["init", str(tmp_path), *option], code=2)
    assert capsys.readouterr().err.endswith("; the folder holds table.xlsx\n")
    (tmp_path / "numbers.csv").write_text("a,b\n1,2\n")
    (tmp_path / "list.json").write_text("[\n1\n]\n")
    command(["init", str(tmp_path), *option], code=2)
    error = capsys.readouterr().err
    assert error.endswith("not taken: list.json (not readable as jsonl), numbers.csv (no column of text)\n")
    assert error.count("\n") == 1
    assert not (tmp_path / ".seenset").exists()


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    command(["schema"])
    assert json.loads(capsys.readouterr().out) == config_schema(AuditConfig, tuple(PROCEDURES))
    command(["schema", "--trial"])
    assert json.loads(capsys.readouterr().out) == config_schema(TrialConfig, tuple(PROCEDURES))
