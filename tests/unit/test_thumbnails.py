"""Thumbnails of selected pictures: small, their pixels alone, of pictures that were scored, and left out on request."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image
from test_report import report, unpacked

from pipeline.answers.top_documents import SIDE, make_thumbnail, read_thumbnails, thumbnails_file
from pipeline.corpus.picture_files import open_picture
from pipeline.store.files import Store
from tests.helpers.picture_runs import HOSTILE, finished_run, hostile_picture


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished_run(tmp_path_factory.mktemp("thumbnails"))


def test_a_thumbnail_holds_pixels_and_nothing_that_stood_beside_them() -> None:
    data = hostile_picture()
    assert HOSTILE.encode() in data
    thumbnail = make_thumbnail(open_picture(data))
    assert b"script" not in thumbnail
    with Image.open(io.BytesIO(thumbnail)) as image:
        assert image.size == (96, 32)
        assert not image.getexif()


def test_every_selected_picture_has_a_small_thumbnail_and_none_without_texts(run: Store) -> None:
    selected = run.read_table("selection/m/selected.parquet")
    thumbnails = read_thumbnails(run, "m")
    assert len(selected) > 0
    assert set(thumbnails) == set(zip(selected["source"].to_pylist(), selected["row"].to_pylist(), strict=True))
    for data in thumbnails.values():
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "JPEG"
            assert max(image.size) <= SIDE
    page, _ = report(run)
    (chunk,) = unpacked(page.blocks[-3])
    assert all(base64.b64decode(thumb).startswith(b"\xff\xd8") for thumb in chunk["thumbs"])
    assert "a red house" in chunk["text"][0]
    assert HOSTILE not in run.read("report/report.html").decode()
    page, _ = report(run, texts=False)
    (chunk,) = unpacked(page.blocks[-3])
    assert "thumbs" not in chunk
    assert "text" not in chunk


def test_without_texts_no_thumbnail_is_made(tmp_path: Path) -> None:
    store = finished_run(tmp_path, texts=False)
    assert not store.exists(thumbnails_file("m"))
    assert len(store.read_table("selection/m/selected.parquet")) > 0
