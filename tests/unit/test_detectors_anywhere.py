"""Every registered detector on other documents, models and numbers of workers: it works, or is refused in one line."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.detectors.base import detector_names
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.stages.registry import check_stages
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import ended, user_error
from tests.helpers.picture_models import save_llava, write_pictures
from tests.helpers.tiny_t5 import save_tiny_t5

ROLES = ("audit", "unseen", "seen")
ALL = set(detector_names())
N = 14
ARGUMENTS: dict[str, dict[str, Any]] = {
    "from_column": {"column": "score"},
    "knockoff": {"draws": 2},
    "knockoff_spread": {"draws": 3},
    "recall": {"shots": 3},
    "con_recall": {"shots": 3},
    "codec": {"shots": 3},
    "dc_pdd": {"documents": 3},
    "cdd": {"draws": 2, "alpha": 0.9},
    **{name: {"draws": 2} for name in ("samia", "samia_zlib", "coverage")},
}
IDS = {
    "camia", "con_recall", "codec", "dc_pdd", "etd", "ez", "gap_k", "gradient_norm",
    "loss", "m_entropy", "min_k", "min_k_plus_plus", "mod_renyi", "perplexity", "recall", "reference", "renyi",
    "wbc", "zlib",
}  # fmt: skip
"""Those that take documents given as token ids."""

PARTS = {"loss", "perplexity", "renyi", "mod_renyi", "m_entropy", "min_k", "min_k_plus_plus", "gap_k"}
"""Those that take a part of a picture with its description."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Texts with token ids and a column of scores; pictures; another model; a model of pictures."""
    folder, rng = tmp_path_factory.mktemp("anywhere"), np.random.default_rng(11)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    other = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    torch.nn.init.normal_(other.lm_head.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    other.save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    for role in ROLES:
        texts = [" ".join(WORDS[i] for i in rng.integers(30, size=12 + n % 9)).title() for n in range(N)]
        ids = pa.array([tokenizer(text)["input_ids"] for text in texts], pa.list_(pa.int32()))
        columns = {"id": [f"{role}{n}" for n in range(N)], "text": texts, "ids": ids, "score": rng.normal(size=N)}
        pq.write_table(pa.table(columns), folder / f"{role}.parquet")
        (folder / "pictures").mkdir(exist_ok=True)
        write_pictures(folder / "pictures" / f"{role}.parquet", N, len(role))
    save_llava(folder / "llava")
    return folder


def settings(
    folder: Path, model: Path, names: Iterable[str], source: Mapping[str, Any], **beside: Any
) -> dict[str, Any]:
    files = folder / "pictures" if "image" in source else folder
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "reference_model": {"path": str(folder / "other"), "dtype": "float32"},
        "fsd": {"documents": 4, "epochs": 1},
        "corpus": {role: {"path": str(files / f"{role}.parquet"), "id": "id", **source} for role in ROLES},
        "detectors": [{name: ARGUMENTS.get(name, {})} for name in names],
        "max_tokens": 32,
        "error_budget": 0.05,
        "resources": {"cluster": "local", "shard_documents": 5, "actors": 1},
        **beside,
    }


def refused(given: Mapping[str, Any]) -> str:
    return user_error(lambda: check_stages(make_plan(build_config({"run": "run", **given})).config))


def object_columns(path: Path, given: Mapping[str, Any]) -> dict[str, list[float]]:
    """The scores of a run, by detector, in the order of the documents' ids."""
    path.mkdir(parents=True)
    (path / "audit.yaml").write_text(json.dumps({"run": str(path / "run"), **given}))
    assert ended("run", path / "audit.yaml", "--no-text") == 0
    store = Store(str(path / "run"))
    receipts = {stage: [*read_receipts(store, stage)] for stage in ("paraphrase", "sample", "score")}
    assert "model" not in given or all(one.tokens > 0 for some in receipts.values() for one in some if one.data)
    tables = [store.read_table(one.data) for one in receipts["score"] if one.data]
    table = pa.concat_tables(tables).sort_by("doc_id")
    assert len(table) >= 3 * N - 2  # a paraphrase may have no two tokens
    first = table.column_names.index("sketch") + 1
    columns = {name.split("(")[0]: table[name].to_pylist() for name in table.column_names[first:]}
    assert all(math.isfinite(value) for values in columns.values() for value in values)
    return columns


@pytest.fixture(scope="module")
def by_workers(folder: Path, tiny_model_folder: Path) -> list[dict[str, list[float]]]:
    columns: list[dict[str, list[float]]] = []
    save_tiny_t5(folder / "t5")
    paraphraser = {"path": str(folder / "t5"), "dtype": "float32"}
    for actors in (1, 2):
        resources = {"cluster": "local", "shard_documents": 5, "actors": actors}
        beside = {"paraphraser": paraphraser, "resources": resources}
        given = settings(folder, tiny_model_folder, ALL - {"from_column"}, {}, **beside)
        elsewhere = settings(folder, folder, [], {"scores": ["score"]})["corpus"]
        imported = object_columns(folder / f"elsewhere{actors}", {"corpus": elsewhere, "resources": resources})
        columns.append({**object_columns(folder / f"by{actors}", given), "from_column": imported["score"]})
    return columns


@pytest.mark.parametrize("name", sorted(ALL))
def test_two_workers_give_the_scores_of_one(by_workers: list[dict[str, list[float]]], name: str) -> None:
    one, two = (columns[name] for columns in by_workers)
    assert one == two
    assert len(set(one)) > 1 or name == "coverage"  # random weights continue no text as it goes on


@pytest.fixture(scope="module")
def of_ids(folder: Path, tiny_model_folder: Path) -> dict[str, list[float]]:
    return object_columns(folder / "of-ids", settings(folder, tiny_model_folder, IDS, {"tokens": "ids"}))


@pytest.mark.parametrize("name", sorted(ALL))
def test_token_ids_are_scored_or_refused_in_one_line(
    folder: Path, tiny_model_folder: Path, of_ids: dict[str, list[float]], name: str
) -> None:
    if name in IDS:
        assert len(set(of_ids[name])) > 1
    else:
        assert name in refused(settings(folder, tiny_model_folder, [name], {"tokens": "ids"}))


@pytest.fixture(scope="module")
def of_pictures(folder: Path) -> dict[str, list[float]]:
    detectors = [{name: {"part": "description", "caption": "given"}} for name in sorted(PARTS)]
    source = {"image": "image", "caption": "caption"}
    given = settings(folder, folder / "llava", [], source, detectors=detectors)
    return object_columns(folder / "of-pictures", given)


@pytest.mark.parametrize("name", sorted(ALL))
def test_pictures_are_scored_or_refused_in_one_line(
    folder: Path, of_pictures: dict[str, list[float]], name: str
) -> None:
    given = settings(folder, folder / "llava", [name], {"image": "image"})
    assert name in refused(given)
    if name in PARTS:
        assert len(set(of_pictures[name])) > 1
    else:
        parted = [{name: {**ARGUMENTS.get(name, {}), "part": "description"}}]
        assert name in refused({**given, "detectors": parted})
