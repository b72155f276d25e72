"""Pictures of a corpus: what a row may hold, what goes to quarantine and why, and which two are one document."""

import io
import os
import tarfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import imagehash
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig, LimitsConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.picture import PICTURE
from pipeline.corpus.formats.webdataset import WEBDATASET
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.near_duplicates import near_families
from pipeline.corpus.picture_files import open_picture, picture_problem, picture_sketches
from pipeline.corpus.shard import Shard
from pipeline.export.export_folder import ExportFolder
from pipeline.export.request import RowMarks
from pipeline.store.files import Store
from tests.helpers.commands import user_error
from tests.helpers.picture_models import encoded, random_pictures

PICTURES = random_pictures([(40, 30), (20, 50), (33, 33)])
PNG = [encoded(picture) for picture in PICTURES]
LIMITS = LimitsConfig()


def written(folder: Path, values: list[Any], kind: pa.DataType | None = None, **columns: list[Any]) -> str:
    """A Parquet file whose column `image` holds these values."""
    path = folder / "pictures.parquet"
    pq.write_table(pa.table({"image": pa.array(values, kind), **columns}), path)
    return str(path)


def shards_of(path: str, limits: LimitsConfig, **source: Any) -> list[Shard]:
    corpus = CorpusConfig.model_validate({"audit": {"path": path, "image": "image", **source}})
    return plan_shards(corpus, find_inputs(corpus, limits), ResourcesConfig(), limits=limits)


def documents(path: str, limits: LimitsConfig = LIMITS, **source: Any) -> list[Document]:
    """All documents of a corpus of one file."""
    return [document for shard in shards_of(path, limits, **source) for document in read_shard(shard)]


def reasons(path: str, limits: LimitsConfig = LIMITS, **source: Any) -> list[str | None]:
    """Why each document of a corpus of one file goes to quarantine, if it does."""
    return [document.problem and document.problem[0] for document in documents(path, limits, **source)]


def test_bytes_captions_and_records_as_hugging_face_writes_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "beside.png").write_bytes(PNG[1])
    path = written(tmp_path, [{"bytes": PNG[0], "path": "a.png"}, {"bytes": None, "path": "beside.png"}])
    assert [(d.picture, d.problem) for d in documents(path)] == [(PNG[0], None), (PNG[1], None)]
    path = written(tmp_path, PNG, pa.binary(), said=["a dog", "a cat", "  "], id=["x", "y", "z"])
    first, second, _ = documents(path, caption="said", id="id")
    assert (first.doc_id, first.text, first.picture) == ("x", "a dog", PNG[0])
    assert (second.text, second.problem) == ("a cat", None)
    assert reasons(path, caption="said") == [None, None, "empty"]
    assert [d.text for d in documents(path)] == ["", "", ""]


def test_paths_lie_beside_the_file_or_in_the_saved_dataset_that_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(PNG[0])
    (folder / "more" / "one.png").write_bytes(PNG[1])
    os.symlink(tmp_path / "secret.png", folder / "link.png")
    bad = {
        "../secret.png": "leads out of the folder",
        "link.png": "leads out of the folder",
        str(tmp_path / "secret.png"): "no path beside the file",
        "https://host/x.png": "no path beside the file",
        "none.png": "No such file",
        "\\ud800.png": "",
    }
    lines = "".join(f'{{"image": "{name}"}}\n' for name in ("more/one.png", *bad))
    (folder / "list.jsonl").write_text(lines)
    good, *others = documents(str(folder / "list.jsonl"))
    assert good.picture == PNG[1]
    for document, message in zip(others, bad.values(), strict=True):
        assert document.problem[0] == "not_picture"
        assert message in document.problem[1]
    (folder / "list.csv").write_text("image\nmore/one.png\n")
    assert documents(str(folder / "list.csv"))[0].picture == PNG[1]
    datasets.Dataset.from_dict({"image": ["secret.png", "one.png"]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "one.png").write_bytes(PNG[1])
    assert reasons(str(tmp_path / "saved")) == ["not_picture", None]


def test_bad_pictures_go_to_quarantine_each_with_its_reason(tmp_path: Path) -> None:
    frames = [picture.resize((20, 20)) for picture in PICTURES]
    animated = io.BytesIO()
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    bomb = encoded(Image.new("1", (12_000, 12_000)))
    assert len(bomb) < 60_000
    bad = [
        (None, "not_picture"),
        (b"", "empty"),
        (b"this is no picture at all", "undecodable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "undecodable"),
        (animated.getvalue(), "animated"),
        (bomb, "too_large"),
        (b"x" * 70_000, "too_large"),
    ]
    path = written(tmp_path, [*(value for value, _ in bad), PNG[0]], pa.binary())
    limits = LimitsConfig.model_validate({"document_bytes": 60_000})
    assert reasons(path, limits) == [*(reason for _, reason in bad), None]
    assert [document.picture for document in documents(path, limits)] == [*[None] * len(bad), PNG[0]]


def test_decoded_pictures_are_upright_of_three_colours_and_whole(tmp_path: Path) -> None:
    whole = encoded(PICTURES[0].resize((200, 200)), "JPEG")
    (document,) = documents(written(tmp_path, [whole[: len(whole) // 2]], pa.binary()))
    assert document.picture is not None
    with pytest.raises(ValueError, match="not a whole picture"):
        open_picture(document.picture)
    turned = Image.new("L", (10, 20))
    exif = turned.getexif()
    exif[0x0112] = 6  # held on its side
    picture = open_picture(encoded(turned, "JPEG", exif=exif))
    assert (picture.size, picture.mode) == ((20, 10), "RGB")


def test_a_missing_column_and_a_corpus_that_is_not_of_texts_or_of_pictures_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, PNG, pa.binary())
    error = user_error(documents, path, image="imge")
    assert error.startswith("no column 'imge' in ")
    assert "; did you mean 'image'" in error
    path = written(tmp_path, PNG, pa.binary(), number=[1, 2, 3])
    assert f"column 'number' in {path} holds int64: a picture is bytes" in user_error(documents, path, image="number")
    (tmp_path / "a.txt").write_text("words")
    assert ".txt files hold no pictures" in user_error(documents, str(tmp_path / "a.txt"))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(PNG[0])
    for corpus, message in (
        ({"audit": {"path": "a", "caption": "c"}}, "caption goes with image, and only with it"),
        (
            {"audit": {"path": "a", "caption": "c", "text": "t"}},
            "only with it, and a source has documents of one kind: leave out text or caption",
        ),
        ({"audit": {"path": "a", "text": "t", "image": "i"}}, "text and image: a source has documents of one kind"),
        (
            {"audit": {"path": "a", "image": "i"}, "unseen": {"path": "b"}},
            "got pictures in corpus.audit and texts in corpus.unseen",
        ),
        ({"audit": {"path": str(tmp_path / "pictures")}}, "holds no file that ends in .parquet"),
        ({"audit": {"path": str(tmp_path / "pictures/a.png")}}, "is none of .parquet"),
    ):
        assert message in user_error(lambda of=corpus: find_inputs(build(CorpusConfig, of)))


def natural(seed: int) -> Image.Image:
    """A smooth picture with shapes in it, as photographs have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((160, 120), Image.Resampling.BICUBIC)


def test_a_sketch_holds_bits_of_the_hash_of_imagehash_and_tells_near_duplicates() -> None:
    rng = np.random.Generator(np.random.PCG64(1))  # the seed is a part of what a sketch is
    drawn = np.stack([rng.permutation(288)[:3] for _ in range(128)])
    pictures = [natural(seed) for seed in range(40)]
    for picture, sketch in zip(pictures, picture_sketches(pictures), strict=True):
        hashes = [imagehash.dhash(picture, 12).hash, imagehash.dhash_vertical(picture, 12).hash]
        bits = np.concatenate([one.ravel() for one in hashes]).astype(np.uint8)
        assert np.packbits(bits[drawn], axis=1).tobytes() == sketch
    recompressed = [open_picture(encoded(picture, "JPEG", quality=40)) for picture in pictures]
    resized = [picture.resize((80, 60)) for picture in pictures]
    sketches = np.array([list(s) for s in picture_sketches([*pictures, *recompressed, *resized])], dtype=np.uint8)
    assert sketches.shape == (120, 128)
    family = near_families(sketches, 0.8)
    for first in range(40):
        members = set(np.flatnonzero(family == family[first]).tolist())
        assert members <= {first, first + 40, first + 80}
    assert np.unique(family).size <= 48  # of 80 copies nine in ten are known as such


def tar_of(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def test_a_folder_of_pictures_is_read_with_the_captions_beside_them(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "b.png").write_bytes(PNG[0])
    (tmp_path / "b.txt").write_text("a red house\n")
    (tmp_path / "more" / "a.JPG").write_bytes(encoded(PICTURES[1], "JPEG"))
    (tmp_path / "notes.md").write_text("no picture")
    first, second = documents(str(tmp_path), caption="txt")
    assert (first.doc_id, first.text, first.picture) == (f"{tmp_path}/b.png#0", "a red house", PNG[0])
    assert second.problem == ("not_text", "no text in this row")
    assert [d.problem for d in documents(str(tmp_path))] == [None, None]
    assert [d.picture for d in documents(str(tmp_path / "*.png"))] == PNG[:1]
    corpus = CorpusConfig.model_validate({"audit": {"path": str(tmp_path), "image": "image", "caption": "txt"}})
    before = find_inputs(corpus)[0].stamp
    assert find_inputs(corpus)[0].stamp == before
    (tmp_path / "b.txt").write_text("a tree")
    assert find_inputs(corpus)[0].stamp != before, "a caption was written again"


def test_a_tar_file_of_webdataset_is_read_sample_by_sample(tmp_path: Path) -> None:
    members = {
        "a/0001.png": PNG[0],
        "a/0001.txt": b"a red house",
        "a/0001.json": b'{"source": "web", "image": "no.png"}',
        "a/0002.json": b'{"source": "book"}',
        "a/0002.webp": encoded(PICTURES[1], "WEBP", lossless=True),
        "a/0002.txt": b"a tree",
        "a/0003.txt": b"words alone",
        "b.jpg": b"",
    }
    path = tar_of(tmp_path / "pictures.tar", members)
    first, second, third, fourth = documents(path, caption="txt", group="source")
    assert (first.doc_id, first.text, first.group, first.picture) == ("a/0001", "a red house", "web", PNG[0])
    assert (second.doc_id, second.group, second.problem) == ("a/0002", "book", None)
    assert second.picture is not None
    assert third.problem == ("not_picture", "no picture in this row")
    assert fourth.problem == ("empty", "a picture of 0 bytes")
    error = user_error(documents, path, image="jpg")
    assert error.startswith("no column 'jpg' in ")
    assert "; did you mean 'png'" in error


def test_pictures_of_16_bits_keep_their_pixels_and_deeper_ones_are_refused() -> None:
    levels = np.random.default_rng(0).integers(300, 60_000, (40, 40))
    grey = open_picture(encoded(Image.fromarray(levels.astype(np.uint16))))
    assert np.array_equal(np.asarray(grey)[..., 0], levels >> 8)
    for pixels in (levels.astype(np.int32), (levels / 60_000).astype(np.float32)):
        problem = picture_problem(encoded(Image.fromarray(pixels), "TIFF"), 10_000)
        assert problem[0] == "undecodable"
    beyond_pillow = picture_problem(encoded(Image.new("1", (20_000, 20_000))), 1 << 40)
    assert beyond_pillow[0] == "too_large"


def test_pictures_without_a_pattern_are_near_duplicates_only_if_colours_are_alike() -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    across = Image.fromarray(np.broadcast_to(ramp, (64, 64)).copy()).convert("RGB")
    plain = [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue", "white", "black", "#404040")]
    plain += [across, across.transpose(Image.Transpose.ROTATE_90)]
    again = [open_picture(encoded(picture.resize((90, 50)), "JPEG", quality=60)) for picture in plain]
    sketches = np.array([list(s) for s in picture_sketches([*plain, *again])], dtype=np.uint8)
    family = near_families(sketches, 0.8)
    assert len(set(family.tolist())) == len(plain)
    assert np.array_equal(family[: len(plain)], family[len(plain) :])


def test_a_tar_file_is_never_shorter_than_it_was_without_a_word(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", {f"{n}.png": PNG[n % 3] for n in range(6)})
    with tarfile.open(path) as archive:
        head = archive.getmembers()[4].offset
    data = Path(path).read_bytes()
    for broken in (
        data[:head],
        data[: head + 100],
        data[: head + 3] + b"\xff" + data[head + 4 :],
        data + data,
        data[: len(data) // 3],
    ):
        Path(path).write_bytes(broken)
        assert "is damaged" in user_error(documents, path)
    Path(path).write_bytes(b"no archive")
    assert "is not a readable .tar file" in user_error(documents, path)


def test_a_link_in_a_tar_file_and_a_large_sample_are_one_document_in_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, target in (("1.png", ""), ("2.png", "1.png"), ("3.png", "")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.LNKTYPE, target) if target else (tarfile.REGTYPE, "")
            member.size = 0 if target else len(PNG[0])
            archive.addfile(member, None if target else io.BytesIO(PNG[0]))
    assert reasons(str(path)) == [None, "not_picture", None]
    limits = LimitsConfig.model_validate({"document_bytes": 8000})
    many = tar_of(tmp_path / "a.tar", {**{f"1.{n}.png": b"x" * 7000 for n in range(9)}, "2.png": PNG[0]})
    first, second = documents(many, limits)
    assert first.problem
    assert second.picture == PNG[0]
    large = tar_of(tmp_path / "b.tar", {"1.png": PNG[0], "2.png": b"x" * 9000, "3.png": PNG[1]})
    assert reasons(large, limits) == [None, "too_large", None]


def test_a_caption_or_a_path_of_bad_utf8_costs_one_document(tmp_path: Path) -> None:
    good = pa.array(["aa", "bb", "cc"])
    broken = pa.Array.from_buffers(pa.string(), 3, [None, good.buffers()[1], pa.py_buffer(b"aa\xff\xfecc")])
    path = written(tmp_path, PNG, pa.binary(), said=broken)
    assert reasons(path, caption="said") == [None, "undecodable", None]
    records = pa.StructArray.from_arrays([pa.array([PNG[0], None, None], pa.binary()), broken], ["bytes", "path"])
    pq.write_table(pa.table({"image": records}), path)
    assert reasons(path) == [None, "undecodable", "not_picture"]


def source_of(path: Path) -> ExportSource:
    return ExportSource(tuple(shards_of(str(path), LIMITS, caption="txt")), path.name)


def option_marks(rows: Sequence[int], keeps: bool) -> RowMarks:
    return RowMarks(iter([np.array(rows, dtype=np.int64)]), keeps)


def test_kept_samples_of_a_tar_file_have_all_files_and_a_cut_file_is_no_export(tmp_path: Path) -> None:
    keys, endings = ("set/a.b/0", "set/a.b/1", "set/2", "3"), (".png", ".txt", ".seg.json")
    content = {f"{key}{end}": PNG[0] if end == ".png" else key.encode() for key in keys for end in endings}
    path = Path(tar_of(tmp_path / "shard.tar", content))
    source, sink = source_of(path), io.BytesIO()
    WEBDATASET.export.copy(source, option_marks([0, 3], False), lambda _: nullcontext(sink))
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as archive:
        exported = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert exported == {name: data for name, data in content.items() if name.startswith(("set/a.b/1", "set/2"))}
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OSError, match=r"not a whole \.tar file"):
        WEBDATASET.export.copy(source, option_marks([], False), lambda _: nullcontext(io.BytesIO()))


def test_the_kept_pictures_of_a_folder_keep_their_names_and_captions(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    names = ["a.png", "b.png", "more/c.png", "more/d.PNG", "more/d.bmp"]
    for name, picture in zip(names, random_pictures([(20, 20)] * 5), strict=True):
        (folder / name).write_bytes(encoded(picture))
        (folder / name).with_suffix(".txt").write_text(f"of {name}")
    (folder / "a.txt").unlink()
    source = source_of(folder)
    assert sorted(source.files) == names
    place = ExportFolder(Store(str(tmp_path / "out")), "run", [])
    PICTURE.export.copy(source, option_marks([source.files.index("b.png")], False), place.file)
    kept = {f"photos/{name}" for name in names if name != "b.png"} | {"photos/more/c.txt", "photos/more/d.txt"}
    assert set(place.names) == kept
    assert len(place.names) == len(kept)
    assert kept <= set(PICTURE.export.names(source))
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    single = ExportFolder(Store(str(tmp_path / "single")), "run", [])
    PICTURE.export.copy(source_of(folder / "b.png"), option_marks([0], True), single.file)
    assert single.names == ["b.png", "b.txt"]
    assert (tmp_path / "single/b.txt").read_text() == "of b.png"
