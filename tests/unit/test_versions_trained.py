"""From `seenset mark` to an answer: a model that was trained on published versions, and the same model untouched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from marked_runs import write_audit, write_texts

from benchmarks.small_model import save_small_model
from pipeline.audit.description import build_config
from pipeline.audit.summary import read_summary
from pipeline.audit.verdict import read_verdict
from pipeline.audit.versions import version_part
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.models.load import open_model
from pipeline.selection.versions import joined_versions, mirrored_list, preference_residuals
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from pipeline.training.train import train
from ray_jobs.cli import main

DOCUMENTS, VERSIONS = 48, 6


def ended(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with marked documents, an untouched model, and one that read the first half of what was published."""
    folder = tmp_path_factory.mktemp("trained")
    write_texts(folder / "texts.jsonl", DOCUMENTS)
    marking = ("--out", folder / "marked", "--versions", VERSIONS, "--seed", 7, "--id", "id")
    assert ended("mark", folder / "texts.jsonl", *marking) == 0
    save_small_model(folder / "untouched", hidden=64)
    published = [json.loads(line) for line in (folder / "marked/public/texts.jsonl").read_text().splitlines()]
    opened = open_model(ModelConfig(path=str(folder / "untouched"), dtype="float32"))
    config = FinetuneConfig(method="full", epochs=25, batch_size=4, learning_rate=4e-3)
    texts = [one["text"] for one in published[: DOCUMENTS // 2]]
    train(opened.model, opened.tokenizer, texts, config, folder / "trained")
    for name, model in {"untouched": "untouched", "trained": "trained", "differing": "trained"}.items():
        assert ended("run", write_audit(folder, name, folder / model, differing=name == "differing")) == 0
        assert ended("verdict", folder / "runs" / name) == 0
    return folder


def listed(run: Path) -> set[str]:
    """The ids of the documents that a run selects."""
    return set(pq.read_table(run / "selection/list/selected.parquet")["doc_id"].to_pylist())


def test_documents_that_a_model_was_trained_on_are_named_and_the_collection_is_shown(folder: Path) -> None:
    run = folder / "runs/trained"
    members = {f"d{number}" for number in range(DOCUMENTS // 2)}
    named = listed(run)
    assert len(named & members) >= 0.8 * len(members)
    assert len(named - members) <= 0.4 * len(named)
    verdict = read_verdict(Store(str(run)))
    assert verdict is not None
    assert verdict.versions is not None
    assert (verdict.answer, verdict.versions.p_value) == ("trained on", 1e-4)
    assert ended("verdict", run, "--fail-if-trained") == 4


def test_an_untouched_model_has_uniform_ranks_and_learnt_nothing(folder: Path) -> None:
    run = folder / "runs/untouched"
    assert listed(run) == set()
    summary, verdict = read_summary(Store(str(run)), "list"), read_verdict(Store(str(run)))
    assert summary is not None
    assert verdict is not None
    assert summary.details["p_uniform_ranks"] > 0.001
    assert verdict.answer == "not shown"


def test_redrawn_indices_of_an_untouched_model_give_an_empty_list(folder: Path) -> None:
    config = build_config(yaml.safe_load((folder / "untouched.yaml").read_text()))
    store, rng = Store(str(folder / "runs/untouched")), np.random.default_rng(5)
    parts = [version_part(store.read_table(one.data), config, ["loss"]) for one in read_receipts(store, "score")]
    scores = preference_residuals(joined_versions(parts))
    empty = 0
    for seed in range(200):
        redrawn = replace(scores, published=rng.integers(VERSIONS, size=scores.sizes.size))
        empty += not mirrored_list(redrawn, Fraction(1, 5), seed).selected.any()
    assert empty >= 160  # at least 1 - alpha of them


def test_scores_of_what_differs_name_the_trained_documents_too(folder: Path) -> None:
    members = {f"d{number}" for number in range(DOCUMENTS // 2)}
    named = listed(folder / "runs/differing")
    assert len(named & members) >= 0.8 * len(members)
    assert len(named - members) <= 0.4 * len(named)


def test_another_alpha_is_answered_from_the_scores_and_the_page_is_written_again(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "runs/trained", run)
    assert ended("select", run, "--set", "selections.0.alpha=0.5") == 0
    assert listed(run) >= listed(folder / "runs/trained")
    assert (run / "report/figures/list-version-ranks.svg").exists()
    assert ended("report", run) == 0
