"""Pictures that are told apart without a model: by their pixels, and by facts of their files alone."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.checks.blind import blind_test
from pipeline.checks.classifier import PictureLooks, blind, picture_features, read_picture_looks
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from tests.helpers.picture_models import encoded, picture_audit

COUNT = 120


def collection(seed: int, form: str = "JPEG", shift: int = 0, size: int = 24, **settings: int) -> list[bytes]:
    """Pictures with random shapes, so much brighter, as files of one kind."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(COUNT):
        coarse = Image.fromarray(rng.integers(0 + shift, 200 + shift, (4, 4, 3), dtype=np.uint8))
        files.append(encoded(coarse.resize((size, size), Image.Resampling.BICUBIC), form, **settings))
    return files


@cache
def looks(seed: int, form: str = "JPEG", **settings: int) -> list[PictureLooks]:
    return [read_picture_looks(data) for data in collection(seed, form, **settings)]


def test_two_halves_of_one_collection_are_not_told_apart() -> None:
    for seed in range(2):  # a 99% interval, and it must lie above 0.53 too
        assert blind(looks(2 * seed, quality=80), looks(2 * seed + 1, quality=80), seed).outcome != "failed"
    assert blind(looks(1)[:3], looks(2)[:50], 0) is None, "too few"


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("quality", {"quality": 60}),
        ("format", {"form": "PNG"}),
        ("size", {"quality": 80, "size": 25}),
        ("brightness", {"quality": 80, "shift": 55}),
    ],
)
def test_what_a_file_or_its_pixels_tell_is_found(kind: str, other: dict[str, int]) -> None:
    test = blind(looks(1, quality=80), looks(2, **other), 0)  # type: ignore[arg-type]
    assert test.outcome == "failed", (kind, test)
    assert test.auc > 0.9


def test_a_file_that_is_no_picture_has_features_too() -> None:
    good = collection(1, quality=80)[:2]
    features = picture_features([*good, b"nothing", good[0][:200]])
    assert features.shape[0] == 4
    assert np.isfinite(features).all()
    assert (features[2, :-1] == 0).sum() >= 280


def test_an_audit_of_pictures_is_tested_by_their_files_and_captions(tmp_path: Path) -> None:
    for role, files in (("audit", collection(1, quality=80)), ("unseen", collection(2, quality=60))):
        captions = [f"picture {row} of a house" for row in range(COUNT)]
        table = {"id": [f"{role}-{row}" for row in range(COUNT)], "image": files, "caption": captions}
        pq.write_table(pa.table(table), tmp_path / f"{role}.parquet")
    detector = {"loss": {"part": "description", "caption": "given"}}
    plan = make_plan(build_config(picture_audit(tmp_path, tmp_path, detectors=[detector], selections=[])))
    found = blind_test(plan.shards, "unseen", plan.config)
    assert (found.outcome, found.by) == ("failed", "thumbnails, colours, files and captions")
    assert "only their thumbnails, colours, files and captions" in found.sentence


def test_captions_of_another_hand_are_found_where_the_pictures_are_alike() -> None:
    def captioned(seed: int, pattern: str) -> list[PictureLooks]:
        rng = np.random.default_rng(seed)
        words = np.array(["house", "tree", "river", "road", "cloud", "boat"])
        return [replace(look, caption=pattern.format(rng.choice(words))) for look in looks(seed, quality=80)]

    def alike(one: str, other: str) -> bool:
        return blind(captioned(1, one), captioned(2, other), 0).outcome != "failed"

    assert alike("a {}", "a {}")
    assert not alike("a photo of a {}", "a picture of a {}")
    assert alike("a {}", ""), "a role without captions is compared by its pictures alone"
