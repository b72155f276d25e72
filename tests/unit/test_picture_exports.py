"""Exports of pictures that are files: what is kept is copied byte for byte, with what stands beside it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_models import encoded, random_pictures

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, LimitsConfig
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.picture import PICTURE
from pipeline.corpus.formats.webdataset import WEBDATASET
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.export.place import ExportFolder
from pipeline.export.request import RowMarks
from pipeline.store.files import Store

PICTURES = [encoded(picture) for picture in random_pictures([(20, 20)] * 5)]


def source_of(path: Path, **source: Any) -> ExportSource:
    limits = LimitsConfig()
    corpus = CorpusConfig.model_validate({"audit": {"path": str(path), "image": "image", **source}})
    shards = plan_shards(corpus, find_inputs(corpus, limits), ResourcesConfig(), limits=limits)
    return ExportSource(tuple(shards), path.name)


def marks_of(rows: Sequence[int], keeps: bool = True) -> RowMarks:
    return RowMarks(iter([np.array(rows, dtype=np.int64)]), keeps)


def write_tar(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """A .tar file of a folder and these files, and what they hold."""
    content = {name: PICTURES[i % 5] if name.endswith("png") else name.encode() for i, name in enumerate(names)}
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent, "set", recursive=False)
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), 1_700_000_000, 0o640
            archive.addfile(member, io.BytesIO(data))
    return content


def read_tar(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {member.mtime for member in archive} <= {1_700_000_000}
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}


@pytest.mark.parametrize(("rows", "keeps", "kept"), [([0, 3], True, [0, 3]), ([0, 3], False, [1, 2]), ([], True, [])])
def test_the_kept_samples_of_a_tar_file_have_all_their_files(
    rows: list[int], keeps: bool, kept: list[int], tmp_path: Path
) -> None:
    keys = ["set/a.b/0", "set/a.b/1", "set/2", "3"]
    names = [f"{key}{ending}" for key in keys for ending in (".png", ".txt", ".seg.json")]
    content = write_tar(tmp_path / "shard.tar", names)
    source = source_of(tmp_path / "shard.tar", caption="txt")
    sink = io.BytesIO()
    WEBDATASET.export.copy(source, marks_of(rows, keeps), lambda _: nullcontext(sink))
    written = read_tar(sink.getvalue())
    assert written == {name: content[name] for at in kept for name in names[3 * at : 3 * at + 3]}


def test_a_tar_file_that_ends_too_early_is_no_export(tmp_path: Path) -> None:
    write_tar(tmp_path / "shard.tar", [f"{i}.png" for i in range(9)])
    source = source_of(tmp_path / "shard.tar")
    whole = (tmp_path / "shard.tar").read_bytes()
    (tmp_path / "shard.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"not a whole \.tar file"):
        WEBDATASET.export.copy(source, marks_of([], False), lambda _: nullcontext(io.BytesIO()))


def test_the_kept_pictures_of_a_folder_keep_their_names_and_captions(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    names = ["a.png", "b.png", "more/c.png", "more/d.PNG", "more/d.bmp"]
    for name, data in zip(names, PICTURES, strict=True):
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text(f"of {name}")
    (folder / "a.txt").unlink()
    source = source_of(folder, caption="txt")
    assert sorted(source.files) == names
    place = ExportFolder(Store(str(tmp_path / "out")), "run", [])
    PICTURE.export.copy(source, marks_of([source.files.index("b.png")], False), place.file)
    kept = {f"photos/{name}" for name in names if name != "b.png"} | {"photos/more/c.txt", "photos/more/d.txt"}
    assert set(place.names) == kept
    assert len(place.names) == len(kept)
    assert kept <= set(PICTURE.export.names(source))
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_single_picture_is_copied_with_its_caption(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURES[0])
    (tmp_path / "a.txt").write_text("words")
    place = ExportFolder(Store(str(tmp_path / "out")), "run", [])
    PICTURE.export.copy(source_of(tmp_path / "a.png", caption="txt"), marks_of([0]), place.file)
    assert place.names == ["a.png", "a.txt"]
    assert (tmp_path / "out/a.txt").read_text() == "words"
