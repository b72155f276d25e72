"""A trial over pictures with captions: what it reads, writes for its audits, and trains in."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageEnhance

from examples.trials.pictures import make_model, make_pictures
from pipeline.config.corpus import Role
from pipeline.config.yaml import build
from pipeline.errors import UserError
from pipeline.models.load import open_picture_model
from pipeline.selection.engine import Scores
from pipeline.selection.guarantees import Outcome
from pipeline.trial.config import Point, TrialConfig
from pipeline.trial.repeats import Pool, check_repeat, known_of_documents
from pipeline.trial.splits import positions
from pipeline.trial.trial import contaminate, plan_contamination
from pipeline.trial.trial_documents import check_inputs, read_documents
from tests.helpers.picture_models import encoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trial")
    make_pictures(made / "pictures.parquet", 24)
    make_model(made / "model")
    return made


@pytest.fixture
def make_trial(folder: Path, tmp_path: Path) -> Callable[..., TrialConfig]:
    """The trial of a file of pictures: (file, **settings) -> its configuration."""

    def make(path: Path = folder / "pictures.parquet", **settings: Any) -> TrialConfig:
        described = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(folder / "model")},
            "documents": {"path": str(path), "id": "id", "image": "image", "caption": "caption"},
            "contaminate": {"method": "full", "epochs": 1, "dtype": "float32"},
            "split": {"unseen": 6},
            "selections": [{"name": "members", "detectors": ["renyi"], "procedure": "bh"}],
            **settings,
        }
        return build(TrialConfig, described)

    return make


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "pictures.parquet").to_pylist()
    return rows


def written(path: Path, rows: list[dict[str, Any]], folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(folder / "pictures.parquet")), path)
    return path


def test_bad_pictures_and_captions_are_left_out_and_near_duplicates_stay_together(
    folder: Path, tmp_path: Path, make_trial: Callable[..., TrialConfig]
) -> None:
    first, second, third, fourth, fifth, *_ = rows_of(folder)
    smaller = encoded(Image.open(BytesIO(first["image"]["bytes"])).resize((24, 24)), "JPEG", quality=80)
    cut = {"bytes": second["image"]["bytes"][:900], "path": None}
    broken = [
        {**first, "id": "smaller", "image": {"bytes": smaller, "path": None}},
        {**second, "id": "cut", "image": cut},
        {**third, "id": "text", "image": {"bytes": b"no picture at all", "path": None}},
        {**fourth, "id": "word", "caption": "Red."},
        {**fifth, "caption": "The same id again."},
    ]
    documents = read_documents(make_trial(written(tmp_path / "some.parquet", [*rows_of(folder), *broken], folder)))
    assert documents.left_out == {"undecodable": 2, "too_short": 1, "duplicate_id": 1}
    assert len(documents) == len(documents.pictures or []) == 25
    assert documents.family[documents.ids.index("smaller")] == documents.family[documents.ids.index(first["id"])]
    assert np.unique(documents.family).size == 24


def test_the_files_of_its_audits_hold_the_same_pictures_and_captions(
    folder: Path, tmp_path: Path, make_trial: Callable[..., TrialConfig]
) -> None:
    documents = read_documents(make_trial())
    pq.write_table(documents.table(np.arange(5, 11)), tmp_path / "audit.parquet")
    some = read_documents(make_trial(tmp_path / "audit.parquet"))
    assert (some.ids, some.texts, some.pictures) == (
        documents.ids[5:11],
        documents.texts[5:11],
        (documents.pictures or [])[5:11],
    )


def test_pictures_and_captions_decide_which_model_is_trained(
    folder: Path, tmp_path: Path, make_trial: Callable[..., TrialConfig]
) -> None:
    config = make_trial()
    documents = read_documents(config)
    planned = plan_contamination(config, config, documents, 0)
    assert planned.folder is not None
    contaminate(config, planned, documents, 0)
    assert open_picture_model(planned.model).processor is not None
    assert planned.trained.sum() == 9
    rows = rows_of(folder)
    recaptioned = [{**row, "caption": f"Not {row['caption']}"} for row in rows]
    repainted = [{**row, "image": other["image"]} for row, other in zip(rows, rows[::-1], strict=True)]
    folders = {planned.folder}
    for name, changed in (("same", rows), ("captions", recaptioned), ("pictures", repainted)):
        other = make_trial(written(tmp_path / f"{name}.parquet", changed, folder))
        folders.add(plan_contamination(other, other, read_documents(other), 0).folder or Path())
    assert len(folders) == 3


def test_a_trial_over_pictures_needs_captions_and_a_model_that_reads_pictures(
    folder: Path, tiny_model_folder: Path, make_trial: Callable[..., TrialConfig]
) -> None:
    documents = {"path": str(folder / "pictures.parquet"), "image": "image"}
    with pytest.raises(UserError, match=r"documents.caption is needed: .* name its column"):
        make_trial(documents=documents)
    config = make_trial()
    check_inputs(config, [Point({}, config)])
    config = make_trial(model={"path": str(tiny_model_folder)})
    with pytest.raises(UserError, match="reads texts alone"):
        check_inputs(config, [Point({}, config)])


def test_looks_separate_dark_from_bright_and_a_mixed_up_repeat_is_not_supported(
    folder: Path, tmp_path: Path, make_trial: Callable[..., TrialConfig]
) -> None:
    make_pictures(tmp_path / "made.parquet", 80)
    rows = pq.read_table(tmp_path / "made.parquet").to_pylist()
    for row in rows[40:]:
        picture = Image.open(BytesIO(row["image"]["bytes"]))
        row["image"] = {"bytes": encoded(ImageEnhance.Brightness(picture).enhance(0.5)), "path": None}
    config = make_trial(written(tmp_path / "both.parquet", rows, folder), split={"shift": {"by": "classifier"}})
    documents = read_documents(config)
    places = positions(config, documents, "classifier")
    bright = np.arange(80) < 40
    middle = np.median(places)
    assert max((places[bright] > middle).mean(), (places[~bright] > middle).mean()) > 0.8
    known = known_of_documents(documents.texts, documents.pictures)
    scores, everything = Scores({}, np.arange(80), pa.nulls(80, pa.string())), np.ones(80, dtype=bool)
    pool = Pool(documents.ids, np.arange(80), ~everything, everything, scores)

    def outcome(calibration: np.ndarray) -> Outcome:
        audited = np.setdiff1d(np.arange(80), calibration)
        roles: dict[Role, np.ndarray] = {"unseen": calibration, "audit": audited}
        return check_repeat(pool, known, roles, config.selections, 0)["unseen"]

    assert outcome(np.flatnonzero(bright)) == Outcome.FAILED
    assert outcome(np.arange(0, 80, 2)) != Outcome.FAILED
