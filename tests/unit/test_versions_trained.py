"""From `seenset mark` to an answer: a model that was trained on published versions, and the same model untouched."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.small_model import save_small_model
from examples.trials.versions import ALPHA, part_of, rates_of_redraws, score_once
from pipeline.answers.verdict import read_verdict
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.models.load import open_model
from pipeline.results.summary import read_summary
from pipeline.selection.version_scores import joined_versions
from pipeline.store.files import Store
from pipeline.training.train import train
from tests.helpers.commands import ended
from tests.helpers.marked_runs import finite_scores, write_audit, write_texts

DOCUMENTS, VERSIONS = 48, 6

pytestmark = pytest.mark.floating_point


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
    config = FinetuneConfig(method="full", epochs=80, batch_size=4, learning_rate=4e-3)
    texts = [one["text"] for one in published[: DOCUMENTS // 2]]
    train(opened.model, opened.tokenizer, texts, config, folder / "trained")
    for name, model in {"untouched": "untouched", "trained": "trained", "differing": "trained"}.items():
        assert ended("run", write_audit(folder, name, folder / model, differing=name == "differing")) == 0
        assert ended("verdict", folder / "runs" / name) == 0
    return folder


def listed(run: Path) -> set[str]:
    return set(pq.read_table(run / "selection/list/selected.parquet")["doc_id"].to_pylist())


def test_documents_that_a_model_was_trained_on_are_named_and_the_collection_is_shown(folder: Path) -> None:
    members = {f"d{number}" for number in range(DOCUMENTS // 2)}
    for name in ("trained", "differing"):
        named = listed(folder / "runs" / name)
        assert len(named & members) >= 0.8 * len(members)
        assert len(named - members) <= 0.4 * len(named)
    run = folder / "runs/trained"
    verdict = read_verdict(Store(str(run)))
    assert (verdict.answer, verdict.versions.p_value) == ("trained on", 1e-4)
    assert ended("verdict", run, "--fail-if-trained") == 4


def test_an_untouched_model_has_uniform_ranks_and_learnt_nothing(folder: Path) -> None:
    run = folder / "runs/untouched"
    assert listed(run) == set()
    summary, verdict = read_summary(Store(str(run)), "list"), read_verdict(Store(str(run)))
    assert summary.details["p_uniform_ranks"] > 0.001
    assert verdict.answer == "not shown"


def test_the_trial_scores_in_one_pass_what_two_runs_score(folder: Path) -> None:
    private = pq.read_table(folder / "marked/private/versions.parquet")
    opened = open_model(ModelConfig(path=str(folder / "trained"), dtype="float32"))
    once = score_once(opened, private["versions"].to_pylist())
    for part, name in (("whole", "trained"), ("differing", "differing")):
        of_run, of_trial = finite_scores(folder / f"{name}.yaml"), joined_versions([part_of(private, once[part])])
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
