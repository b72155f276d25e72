"""`seenset init` in a folder of pictures: they are the documents, and what stands beside them is their captions."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import here
from picture_models import encoded, random_pictures, save_llava
from test_starter import documents, rows_of, started, write

from pipeline.audit.description import load_config
from pipeline.audit.starter import HUB_PICTURE_MODEL, audit_starter, write_starter
from pipeline.trial.config import load_trial
from pipeline.trial.starter import trial_starter


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


def test_captions_beside_pictures_are_no_documents(tmp_path: Path) -> None:
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


def test_pictures_without_captions_outside_of_folders_are_a_glob(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5, captions=False)
    (tmp_path / "one.txt").write_text("What these pictures are.")
    settings = corpus_of(tmp_path)
    assert settings == {"audit": {"path": "*.png", "image": "image"}}
    text = (tmp_path / "audit.yaml").read_text()
    assert "Left out: one.txt. They are texts, and this audit is of pictures." in text


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
            write_pictures(tmp_path / "loose", 4, first=first)
            with tarfile.open(path, "w") as archive:
                for entry in sorted((tmp_path / "loose").iterdir()):
                    archive.add(entry, entry.name)
                    entry.unlink()
        else:
            write_pictures(tmp_path / "photos", 4, captions=False, first=first)
            named = [
                {"key": f"p{i}", "photo": f"photos/{i}.png", "words": f"What is seen at place {i}."}
                for i in range(first, first + 4)
            ]
            write(path, named)
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
    assert corpus_of(tmp_path / "few") == {"audit": {"path": ["one.txt", "other.txt"]}}
    shutil.rmtree(tmp_path / "few")
    assert documents(started(tmp_path)) == {"audit": 4, "unseen": 4}
    assert "Left out: docs. They are pictures, and this audit is of texts." in (tmp_path / "audit.yaml").read_text()


def test_the_starter_of_pictures_plans_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llava(tmp_path / "llava")
    write_pictures(tmp_path / "audit", 12)
    write_pictures(tmp_path / "unseen", 12, first=20)
    assert "pictures: image, captions: txt" in here(capsys, "init", tmp_path)[0]
    assert "renyi(part=description)" in here(capsys, "plan", tmp_path / "audit.yaml")[0]


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
