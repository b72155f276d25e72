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
from commands import ended
from marked_runs import write_audit, write_texts

from benchmarks.small_model import save_small_model
from examples.trials.versions import ALPHA, part_of, rates_of_redraws, score_once
from pipeline.audit.description import build_config
from pipeline.audit.judge import version_part
from pipeline.audit.summary import read_summary
from pipeline.audit.verdict import read_verdict
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.models.load import open_model
from pipeline.selection.versions import joined_versions, mirrored_list, preference_residuals
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from pipeline.training.train import train

DOCUMENTS, VERSIONS = 48, 6


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


def test_the_trial_scores_in_one_pass_what_two_runs_score(folder: Path) -> None:
    private = pq.read_table(folder / "marked/private/versions.parquet")
    opened = open_model(ModelConfig(path=str(folder / "trained"), dtype="float32"))
    once = score_once(opened, private["versions"].to_pylist())
    for part, name in (("whole", "trained"), ("differing", "differing")):
        config = build_config(yaml.safe_load((folder / f"{name}.yaml").read_text()))
        store = Store(str(folder / "runs" / name))
        parts = [version_part(store.read_table(one.data), config, ["loss"]) for one in read_receipts(store, "score")]
        of_run, of_trial = joined_versions(parts), joined_versions([part_of(private, once[part])])
        np.testing.assert_allclose(of_trial.scores, of_run.scores, atol=1e-4)
        assert (of_trial.ids, of_trial.published.tolist()) == (of_run.ids, of_run.published.tolist())
        np.testing.assert_array_equal(of_trial.digests, of_run.digests)


def test_the_trial_redraws_only_what_was_not_trained(folder: Path) -> None:
    """Of scores that are larger where trained documents were published, all are listed, and few others."""
    private = pq.read_table(folder / "marked/private/versions.parquet")
    rng = np.random.default_rng(2)
    scores = joined_versions([part_of(private, rng.normal(size=DOCUMENTS * VERSIONS))])
    truth = np.arange(DOCUMENTS) < DOCUMENTS // 2
    learnt = scores.scores.copy()
    learnt[(scores.offsets[:-1] + scores.published)[truth]] += 50
    fdr, power, bh_fdr, bh_power = rates_of_redraws(replace(scores, scores=learnt), truth)
    assert power == bh_power == 1
    assert max(fdr, bh_fdr) < ALPHA + 0.1
    fdr, power, *_ = rates_of_redraws(scores, np.zeros(DOCUMENTS, dtype=bool))
    assert fdr <= ALPHA
    assert np.isnan(power)


def test_another_alpha_is_answered_from_the_scores_and_the_page_is_written_again(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "runs/trained", run)
    assert ended("select", run, "--set", "selections.0.alpha=0.5") == 0
    assert listed(run) >= listed(folder / "runs/trained")
    assert (run / "report/figures/list-version-ranks.svg").exists()
    assert ended("report", run) == 0
