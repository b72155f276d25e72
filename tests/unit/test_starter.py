"""`seenset init` writes a configuration for the files that lie in a folder, which loads and plans as it stands."""

import gzip
import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import datasets
import fsspec
import jsonschema
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
from test_webdataset import write_tar

from docs.blocks import PAGES, blocks
from examples.demo import demo
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import SourceConfig
from pipeline.config.models import ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.config.training import FinetuneConfig
from pipeline.config.yaml import config_schema
from pipeline.corpus.discovery import guess_role, id_column, text_column
from pipeline.plan.description import load_config
from pipeline.plan.starter import HUB_MODEL, HUB_PICTURE_MODEL, audit_starter, write_starter
from pipeline.run.plan import describe_model, make_plan
from pipeline.selection.procedures import PROCEDURES
from pipeline.trial.config import TrialConfig, load_trial
from pipeline.trial.starter import trial_starter
from tests.helpers.commands import here, refusal, user_error
from tests.helpers.picture_models import encoded, random_pictures

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs/schemas"


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    body = "Text number {} of {} goes on a while."
    return [{"n": i, "key": f"{name}-{i}", "title": "A title", "body": body.format(i, name)} for i in range(count)]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".txt":
        path.write_text(rows[0]["body"])
    elif not path.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        with fsspec.filesystem("file").open(str(path), "wb", compression="infer") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def started(folder: Path) -> Path:
    return Path(write_starter(str(folder), audit_starter(str(folder)))[0])


def documents(path: Path) -> dict[str, int]:
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
    for source in (config.corpus.audit, config.corpus.unseen):
        assert (source.text, source.id) == ("body", "key")
    assert documents(path) == {"audit": 30, "unseen": 20}
    assert "Other columns: n, title." in path.read_text()
    (selection,) = config.selections
    assert selection.direction == "members"
    recommended = selection.model_dump()
    for page in ("README.md", "docs/procedures.md", "docs/detectors/likelihood.md"):
        block = next(
            block
            for block in re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
            if "selections:" in block
        )
        (stated,) = yaml.safe_load(block)["selections"]
        assert SelectionConfig(**stated).model_dump() == recommended, page
    (asked,) = demo.TRIAL["selections"]
    assert SelectionConfig(**asked).model_dump() == recommended


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


def test_a_role_is_guessed_from_the_last_part_of_a_path_that_speaks_of_one() -> None:
    held_out = ["heldOut/part-0.parquet", "non-members.csv", "not_trained.csv", "after2024.jsonl", "unseen.jsonl"]
    for role, paths in {
        "unseen": [
            *held_out,
            "drafts/2019.txt",
            "unpublished.csv",
            "data/after_cutoff.jsonl.zst",
            "unseen/train-00000-of-00001.parquet",
        ],
        "audit": ["candidates/x.jsonl", "seen/audit.jsonl"],
        "seen": ["members.jsonl", "train.jsonl"],
        None: ["wikipedia.jsonl", "restraint.jsonl"],
    }.items():
        assert [guess_role(path)[0] for path in paths] == [role] * len(paths)


def test_the_text_is_told_by_name_and_else_by_length_and_ids_never_repeat() -> None:
    rows = [{"text": "short", "story": "one two three four five", "id": 1, "label": 0}] * 2
    assert text_column(list(rows[0]), rows) == ("text", "by its name")
    del rows[0]["text"]
    assert text_column(list(rows[0]), rows) == ("story", "it holds the longest texts")
    assert id_column(list(rows[0]), rows, "story") is None
    assert id_column(list(rows[0]), [rows[0], {**rows[0], "id": 2}], "story") == "id"
    assert text_column(["n", "name"], [{"n": 1, "name": "two words"}]) is None
    chinese = [{"n": "甲", "said": "这是一个没有空格的句子"}]
    assert text_column(["n", "said"], chinese) == ("said", "it holds the longest texts")


def test_a_missing_role_is_a_comment_and_init_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "wikipedia.jsonl", rows_of("a", 4))
    needed = "documents of the same kind that are known not to be in the training data"
    assert f"missing: add corpus.unseen: {{path: ...}}, {needed}\n" in here(capsys, "init", tmp_path)[0]
    path = tmp_path / "audit.yaml"
    assert "add corpus.unseen: {path: ...}" in user_error(load_config, str(path))
    write(tmp_path / "new.jsonl", [{"text": "a text"}] * 3)
    text = path.read_text()
    block = "  # unseen:\n  #   path: PATH\n  #   text: text\n"
    assert block in text
    path.write_text(text.replace(block, block.replace("# ", "").replace("PATH", "new.jsonl")))
    assert documents(path) == {"audit": 4, "unseen": 3}
    path.write_text("mine")
    line = refusal(capsys, "init", tmp_path)
    assert line == f"seenset: {path} exists already; remove it, or give another folder\n"
    assert path.read_text() == "mine"


def test_known_training_data_alone_ask_for_clean_data_and_documents_to_judge(tmp_path: Path) -> None:
    write(tmp_path / "benchmark.jsonl", rows_of("a", 4))
    write(tmp_path / "train.jsonl", rows_of("s", 4))
    path = started(tmp_path)
    assert load_config(str(path)).selections[0].direction == "clean"
    assert documents(path) == {"audit": 4, "seen": 4}
    (tmp_path / "benchmark.jsonl").unlink()
    write(tmp_path / "nonmembers.jsonl", rows_of("u", 4))
    assert audit_starter(str(tmp_path)).missing == ("add corpus.audit: {path: ...}, documents to audit",)


def test_without_a_model_here_a_hub_id_stands_in_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    starter = audit_starter(str(tmp_path))
    assert yaml.safe_load(starter.text)["model"]["path"] == HUB_MODEL
    assert "replace this hub id by your model" in starter.text
    assert f"model: none in this folder; replace {HUB_MODEL} by yours" in starter.guesses
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
    assert "no documents in" in user_error(audit_starter, str(tmp_path))
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
    printed, _ = here(capsys, "init", tmp_path)
    settings = yaml.safe_load((tmp_path / "audit.yaml").read_text())
    assert "import" not in settings
    assert settings["corpus"]["unseen"]["text"] == f"{evil} text"
    assert settings["corpus"]["audit"]["path"] == [f"{name} one.jsonl", f"{name} other.jsonl"]
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 4 + 3 + 5, "a table of three rows, and five lines"


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


def test_the_schema_beside_it_is_that_of_the_documentation_and_checks_the_starter(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    write(tmp_path / "unseen.jsonl", rows_of("u", 4))
    for starter, kind in ((audit_starter(str(tmp_path)), AuditConfig), (trial_starter(str(tmp_path)), TrialConfig)):
        path, schema_path = write_starter(str(tmp_path), starter)
        first = Path(path).read_text().splitlines()[0]
        named = tmp_path / first.removeprefix("# yaml-language-server: $schema=")
        assert named == Path(schema_path)
        schema = json.loads(named.read_text())
        published = SCHEMAS / ("trial.schema.json" if kind is TrialConfig else "audit.schema.json")
        assert schema == config_schema(kind, tuple(PROCEDURES)) == json.loads(published.read_text())
        validator = jsonschema.Draft202012Validator(schema)
        settings = yaml.safe_load(Path(path).read_text())
        validator.validate(settings)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**settings, "max_token": 5})


def test_the_starter_of_a_trial_loads_and_never_takes_what_the_model_has_seen(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows_of("s", 4))
    starter = trial_starter(str(tmp_path))
    assert starter.missing == ("add documents: {path: ...}, documents that the model has not seen",)
    assert "documents" not in yaml.safe_load(starter.text)
    write(tmp_path / "after.jsonl", rows_of("u", 4))
    path, _ = write_starter(str(tmp_path), trial_starter(str(tmp_path)))
    config, points = load_trial(path)
    assert config.documents.paths == [f"{tmp_path.resolve()}/./after.jsonl"]
    assert (config.documents.text, config.documents.id, len(points)) == ("body", "key", 1)
    assert config.contaminate.epochs == FinetuneConfig().epochs


NUMBERS = "its array holds no object with named fields (a JSON int, not an object)"


@pytest.mark.parametrize("option", [[], ["--trial"]])
def test_a_folder_without_data_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert refusal(capsys, "init", tmp_path / "nowhere", *option) == f"seenset: no folder {tmp_path}/nowhere\n"
    assert refusal(capsys, "init", tmp_path, *option).endswith("; the folder is empty\n")
    (tmp_path / "table.xlsx").write_text("")
    assert refusal(capsys, "init", tmp_path, *option).endswith("; not taken: table.xlsx (not read; save as .csv)\n")
    (tmp_path / "numbers.csv").write_text("a,b\n1,2\n")
    (tmp_path / "list.json").write_text("[\n1\n]\n")
    line = refusal(capsys, "init", tmp_path, *option)
    rest = "numbers.csv (no column of text), table.xlsx (not read; save as .csv)"
    assert line.endswith(f"list.json (not readable as json: list.json: {NUMBERS}), {rest}\n")
    assert not (tmp_path / ".seenset").exists()


def picture_bytes(number: int) -> bytes:
    return encoded(random_pictures([(24, 24)], seed=number)[0])


def write_pictures(folder: Path, count: int, captions: bool = True, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + count):
        (folder / f"{index}.png").write_bytes(picture_bytes(index))
        if captions:
            (folder / f"{index}.txt").write_text(f"A picture of the number {index} in a quiet river.")


def records(count: int, first: int) -> list[dict[str, Any]]:
    return [
        {"key": f"p{i}", "photo": {"bytes": picture_bytes(i), "path": f"{i}.png"}, "words": f"Seen from the place {i}."}
        for i in range(first, first + count)
    ]


def corpus_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(started(folder).read_text())
    return settings["corpus"]


def test_captions_beside_pictures_are_no_documents(
    tmp_path: Path, llava: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "candidates" / "cats", 3)
    write_pictures(tmp_path / "candidates" / "dogs", 3, first=10)
    write_pictures(tmp_path / "after_cutoff", 4, first=20)
    assert corpus_of(tmp_path) == {
        "audit": {"path": "candidates", "image": "image", "caption": "txt"},
        "unseen": {"path": "after_cutoff", "image": "image", "caption": "txt"},
    }
    assert documents(tmp_path / "audit.yaml") == {"audit": 6, "unseen": 4}
    config = load_config(str(tmp_path / "audit.yaml"))
    assert config.detectors == [{"renyi": {"part": "description"}}]
    assert config.selections[0].detectors == ["renyi(part=description)"]
    assert config.model.path == HUB_PICTURE_MODEL
    (tmp_path / "audit.yaml").unlink()
    shutil.copytree(llava, tmp_path / "llava")
    assert "pictures: image, captions: txt" in here(capsys, "init", tmp_path)[0]
    assert "renyi(part=description)" in here(capsys, "plan", tmp_path / "audit.yaml")[0]


def test_other_data_in_a_folder_of_pictures_are_left_out_of_it(tmp_path: Path) -> None:
    write_pictures(tmp_path / "audit", 3)
    (tmp_path / "audit" / "about.json").write_text(json.dumps({"made": "by several hands in a long year"}))
    write_pictures(tmp_path / "audit" / "unseen", 2, first=10)
    settings = corpus_of(tmp_path)
    assert settings["unseen"]["path"] == "audit/unseen"
    assert settings["audit"]["path"] == "audit/*.png"
    text = (tmp_path / "audit.yaml").read_text()
    assert "Left out: audit/about.json. They are texts, and this audit is of pictures." in text
    assert documents(tmp_path / "audit.yaml") == {"audit": 3, "unseen": 2}


@pytest.mark.parametrize("form", ["parquet", "dataset", "tar", "jsonl", "csv"])
def test_columns_of_pictures_and_captions_are_found(form: str, tmp_path: Path) -> None:
    for role, first in (("audit", 0), ("unseen", 10)):
        rows = records(4, first)
        path = tmp_path / f"{role}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif form == "dataset":
            features = datasets.Features({"key": datasets.Value("string"), "photo": datasets.Image()})
            made = datasets.Dataset.from_list([{"key": r["key"], "photo": r["photo"]} for r in rows], features=features)
            made.save_to_disk(str(tmp_path / role))
        elif form == "tar":
            caption, named = (
                b"A quiet river in winter",
                ((i, end) for i in range(first, first + 4) for end in ("png", "txt")),
            )
            write_tar(path, {f"{i}.{end}": caption if end == "txt" else picture_bytes(i) for i, end in named})
        else:
            write_pictures(tmp_path / "photos", 4, captions=False, first=first)
            write(path, [{**row, "photo": f"photos/{row['photo']['path']}"} for row in rows])
    column = "image" if form == "tar" else "photo"
    for source in corpus_of(tmp_path).values():
        assert source["image"] == column
        assert source.get("caption") == {"dataset": None, "tar": "txt"}.get(form, "words")
        assert source.get("id") == (None if form == "tar" else "key")
    assert documents(tmp_path / "audit.yaml") == {"audit": 4, "unseen": 4}


def test_pictures_beside_texts_are_left_out_of_an_audit_of_texts(tmp_path: Path) -> None:
    write(tmp_path / "audit.jsonl", rows_of("a", 4))
    write(tmp_path / "unseen.jsonl", rows_of("u", 4))
    write_pictures(tmp_path / "docs", 2, captions=False)
    write_pictures(tmp_path / "few", 1, captions=False, first=7)
    write(tmp_path / "few" / "one.txt", rows_of("t", 1))
    write(tmp_path / "few" / "other.txt", rows_of("u", 1))
    assert corpus_of(tmp_path / "few") == {"audit": {"path": "*.txt"}}
    shutil.rmtree(tmp_path / "few")
    assert documents(started(tmp_path)) == {"audit": 4, "unseen": 4}
    assert "Left out: docs. They are pictures, and this audit is of texts." in (tmp_path / "audit.yaml").read_text()


def test_a_trial_trains_on_pictures_with_captions_alone(tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", 6)
    path, _ = write_starter(str(tmp_path), trial_starter(str(tmp_path)))
    config, _ = load_trial(path)
    assert (config.documents.image, config.documents.caption) == ("image", "txt")
    for caption in (tmp_path / "photos").glob("*.txt"):
        caption.unlink()
    starter = trial_starter(str(tmp_path))
    assert "pictures with captions that the model has not seen" in starter.text
    assert audit_starter(str(tmp_path)).missing


def mixed_folder(folder: Path) -> Path:
    """50 text files, 50 documents of a word processor and a table, with other files beside them."""
    folder.mkdir()
    for number in range(50):
        (folder / f"{number}.txt").write_text(f"Text file {number} of the archive holds these words.")
        with zipfile.ZipFile(folder / f"{number}.docx", "w") as archive:
            archive.writestr("word/document.xml", DOCX.format(number))
    rows = "".join(f"{number};Café no. {number} has a row of a table\n" for number in range(9))
    (folder / "table.csv").write_text("id;text\n" + rows, encoding="cp1252")
    for name in (
        "README.txt",
        ".hidden",
        "slides.pdf",
        "sheet.xlsx",
        "more.zip",
        "x.7z",
        "run.sh",
        "[red]page.html",
        "note",
    ):
        (folder / name).write_text("something else")
    (folder / "broken.parquet").write_text("not a table")
    (folder / "numbers.csv").write_text("a,b\n1,2\n")
    (folder / "a/b/c/d/e").mkdir(parents=True)
    (folder / "dangling.csv").symlink_to("nowhere")
    return folder


MAGIC = "Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file."
DOCX = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:pPr><w:jc/></w:pPr>'
    "<w:r><w:t>First paragraph</w:t></w:r><w:del><w:r><w:delText>deleted</w:delText></w:r></w:del></w:p>"
    '<w:p><w:r><w:t xml:space="preserve">and </w:t></w:r><w:r><w:t>number {}</w:t><w:br/><w:t>é</w:t></w:r></w:p>'
    "</w:body></w:document>"
)


@pytest.mark.parametrize(("options", "taken_as"), [([], "audit"), (["--trial"], "documents")])
def test_a_table_states_everything_found_and_why_it_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], taken_as: str
) -> None:
    folder = mixed_folder(tmp_path / "archive")
    shown, _ = here(capsys, "init", folder, *options)
    (folder / f"{'trial' if options else 'audit'}.yaml").unlink()
    found = json.loads(here(capsys, "init", folder, *options, "--json")[0])["contents"]
    rows = {row["files"]: (row["count"], row["taken_as"], row["reason"]) for row in found if row["files"] != ".*"}
    assert rows == {
        "table.csv": (1, taken_as, 'text: text, id: id, encoding: "cp1252", delimiter: ";"'),
        "*.txt": (
            50,
            None,
            "text files beside tables, which may describe them; to audit them, move them into a folder, or join them",
        ),
        "*.docx": (50, None, "not read; save as .txt"),
        "slides.pdf": (1, None, "not read; save as .txt"),
        "[red]page.html": (1, None, "not read; save as .txt"),
        "sheet.xlsx": (1, None, "not read; save as .csv"),
        "more.zip": (1, None, "not read; unpack it"),
        "x.7z": (1, None, "not read; unpack it"),
        "run.sh": (1, None, "not read: no format of documents"),
        "note": (1, None, "not read: no format of documents"),
        "README.txt": (1, None, "by its name no documents"),
        "broken.parquet": (1, None, f"not readable as parquet: broken.parquet is not a readable Parquet file: {MAGIC}"),
        "numbers.csv": (1, None, "no column of text"),
        "dangling.csv": (1, None, "a link to nothing"),
        "a/b/c/d/e/": (1, None, "not searched: deeper than 4 folders"),
    }
    for name, (_, _, reason) in rows.items():
        assert name in shown
        assert reason[:40] in shown


def test_the_table_of_a_folder_of_folders_names_columns_models_runs_and_pictures(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    write(tmp_path / "audit/a.jsonl", rows_of("a", 4))
    write(tmp_path / "audit/b.jsonl", [{"text": "another kind of text", "id": 1}])
    for part in range(3):
        write(tmp_path / f"unseen/part-{part}.jsonl", rows_of(f"u{part}", 4))
        write(tmp_path / f"notes/{part}.txt", rows_of(f"n{part}", 1))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/shards.json").write_text("[]")
    (tmp_path / "node_modules").mkdir()
    write_pictures(tmp_path / "pictures", 2)
    rows = {row.files: (row.count, row.taken_as, row.reason) for row in audit_starter(str(tmp_path)).contents}
    assert rows == {
        "audit/a.jsonl": (1, "audit", "text: body, id: key"),
        "audit/b.jsonl": (
            1, None, "text: text, id: id: columns or encoding differ from those of audit/a.jsonl; join them"
        ),
        "unseen/part-*.jsonl": (3, "unseen", "text: body, id: key"),
        "notes": (3, None, "no name states their role"),
        "pictures": (2, None, "texts and pictures are audited apart"),
        "pictures/*.txt": (2, None, "captions of the pictures beside them"),
        "model/": (1, None, "a model"),
        "old/": (1, None, "a run, a trial, an adapter or an environment of Python"),
        "node_modules/": (1, None, "installed packages"),
    }  # fmt: skip


def test_a_folder_without_documents_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}.docx").write_bytes(b"")
    (tmp_path / "scan.pdf").write_bytes(b"")
    message = user_error(audit_starter, str(tmp_path))
    assert message.endswith("not taken: *.docx (50 files, not read; save as .txt), scan.pdf (not read; save as .txt)")


def test_a_table_states_why_a_file_of_a_known_kind_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", rows_of("a", 4))
    quoted = "".join(f'{number}\t"Quoted" words begin this text\n' for number in range(9))
    files = {
        "commas.csv": b"id,text\n1,some words, and others\n",
        "empty.csv": b"",
        "packed.csv": gzip.compress(b"id,text\n1,some words\n", mtime=0),
        "lines.csv": gzip.compress(b"id,text\n1,some words\n", mtime=0x41410A0D),  # its head reads as lines
        "quotes.tsv": f"id\ttext\n{quoted}".encode(),
        "field.jsonl": json.dumps({"page": {"text": "some words of a text"}, "n": 1}).encode() + b"\n{}\n",
        "chat.jsonl": json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode() + b"\n{}\n",
        "whole.json": json.dumps({"data": [{"text": "some words"}]}).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rows = {row.files: row.reason for row in audit_starter(str(tmp_path)).contents if row.taken_as is None}
    assert rows["commas.csv"] == "not readable as csv: line 2 has 3 fields, and the header has 2"
    assert rows["empty.csv"] == "it is empty"
    assert rows["packed.csv"] == "by its first bytes it is a gzip file: rename it to packed.csv.gz"
    assert rows["lines.csv"] == "by its first bytes it is a gzip file: rename it to lines.csv.gz"
    assert "quoting: none" in rows["quotes.tsv"]
    assert rows["field.jsonl"] == "no column of text, but a field of page may be one: text: page.text"
    assert rows["chat.jsonl"] == (
        "no column of text, but messages holds lists of messages without an answer of the assistant"
    )
    assert rows["whole.json"].startswith("no column of text: it is one object, whose data is a list of objects: jq")


def test_links_out_of_the_folder_are_no_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "archive"
    write(folder / "texts/a.txt", rows_of("a", 1))
    write(folder / "texts/b.txt", rows_of("b", 1))
    write(tmp_path / "other/secret.txt", rows_of("c", 1))
    (folder / "k.txt").symlink_to("/proc/self/environ")
    (folder / "away").symlink_to("../other")
    (folder / "again").symlink_to("texts")
    (folder / "c.txt").symlink_to("texts/a.txt")
    assert corpus_of(folder)["audit"] == {"path": ["c.txt", "texts"]}
    rows = {row.files: row.reason for row in audit_starter(str(folder)).contents if row.taken_as is None}
    out = "a link out of the folder; follow_links: true reads what is behind it"
    assert rows["k.txt"] == rows["away/"] == out
    assert rows["again/"] == "a link to another folder in it"
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/.a.txt").write_text("some words")
    assert refusal(capsys, "init", tmp_path / "hidden").endswith("; the folder holds hidden files alone\n")


def test_text_files_of_the_folder_itself_are_one_glob(tmp_path: Path) -> None:
    for number in range(50):
        write(tmp_path / f"{number}.txt", rows_of("a", 1))
        (tmp_path / f"{number}.docx").write_bytes(b"PK")
    assert corpus_of(tmp_path)["audit"] == {"path": "*.txt"}
    rows = {row.files: (row.count, row.taken_as) for row in audit_starter(str(tmp_path)).contents}
    assert rows["*.txt"] == (50, "audit")
    (tmp_path / "README.txt").write_text("what is here")
    assert (
        audit_starter(str(tmp_path))
        .contents[0]
        .files.endswith(", 10.txt, 11.txt, 12.txt, 13.txt, 14.txt, 15.txt and 42 more")
    )


def test_the_lines_of_the_page_join_kinds_of_files_into_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed_folder(tmp_path / "archive")
    (tmp_path / "archive/numbers.csv").unlink()
    (tmp_path / "archive/dangling.csv").unlink()
    monkeypatch.chdir(tmp_path)
    (block,) = [one for one in blocks(PAGES / "joining.md") if one.language == "python"]
    exec(compile(block.text, str(block), "exec"), {})  # a page of this repository
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "joined.jsonl").read_text().splitlines())}
    assert len(rows) == 51 + 50 + 9
    assert rows["archive/7.txt#0"]["text"] == "Text file 7 of the archive holds these words."
    assert rows["archive/7.docx#0"]["text"] == "First paragraph\nand number 7\né"
    assert rows["archive/table.csv#8"] == {
        "id": "archive/table.csv#8", "text": "Café no. 8 has a row of a table", "kind": ".csv"
    }  # fmt: skip
    write(tmp_path / "unseen.jsonl", [{"id": f"u{n}", "text": f"Unseen words {n}", "kind": ".txt"} for n in range(9)])
    corpus = {
        "audit": {"path": "joined.jsonl", "id": "id", "group": "kind"},
        "unseen": {"path": "unseen.jsonl", "id": "id"},
    }
    settings = {
        "run": "run",
        "model": {"path": "m"},
        "corpus": {**corpus, "unseen": {**corpus["unseen"], "group": "kind"}},
    }
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(settings))
    assert documents(tmp_path / "audit.yaml") == {"audit": 110, "unseen": 9}
