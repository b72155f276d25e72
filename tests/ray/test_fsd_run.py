"""`detectors: [{fsd: ...}]`: adapters are trained before scoring, on documents that then do not calibrate."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.corpus.documents import text_key
from pipeline.errors import UserError
from pipeline.models.load import RECORD, open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from pipeline.run.machine import ActorShape, Node
from pipeline.trial.config import build_trial
from ray_jobs.finetune import AdapterJob, trainings_beside
from tests.helpers.finished import rows, run, run_trial, written
from tests.helpers.made_up import MakeAudit, sentence, write_jsonl

pytestmark = pytest.mark.floating_point

FSD = {
    "documents": 12,
    "dtype": "float32",
    "learning_rate": 2e-2,
    "adapters": {"few": {"documents": 5, "method": "ia3"}, "same": {"epochs": 3}},
}
DRAWN = {"knockoff": {"base": "loss", "draws": 1}}
DETECTORS = ["loss", {"fsd": {"base": ["loss", "min_k"]}}, {"fsd": {"base": "loss", "adapter": ["few", "same"]}}, DRAWN]
ASKED: dict[str, Any] = {
    "detectors": DETECTORS,
    "selections": [{"name": "members", "detectors": ["fsd(base=loss)"], "procedure": "bh", "alpha": 0.2}],
    "fsd": FSD,
    "error_budget": 1.0,  # of single-token paraphrases
}


def digest(text: str) -> str:
    return f"{text_key(text) & (1 << 64) - 1:016x}"


def test_trainings_leave_the_actors_of_another_stage_their_place() -> None:
    def divided(jobs: int, workers: int, shape: ActorShape, *nodes: Node) -> tuple[int, int] | None:
        config = FinetuneConfig()
        job = AdapterJob("one", "key", ModelConfig(path="m"), [], config, {}, workers, shape.gpus > 0, shape.cpus)
        return trainings_beside([job] * jobs, shape, nodes)

    on_cpus, on_gpus = ActorShape(0.0, 1), ActorShape(1.0, 1)
    assert divided(3, 1, on_cpus, Node(2.0)) == (1, 1)
    assert divided(1, 1, on_cpus, Node(1.0)) is None
    assert divided(6, 1, on_gpus, Node(8.0, 4.0), Node(8.0, 4.0)) == (4, 4)
    assert divided(2, 1, on_gpus, Node(8.0, 4.0), Node(8.0, 4.0)) == (2, 6)
    assert divided(2, 6, ActorShape(0.5, 1), Node(16.0, 8.0)) == (1, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_trains_and_scores_to_the_bits_of_this_process(
    make_audit: MakeAudit, tmp_path: Path, paraphraser: dict[str, str]
) -> None:
    path = make_audit(20, 30, **ASKED, paraphraser=paraphraser)
    run(path, f"run={tmp_path / 'there'}", "resources.cluster=ray", "resources.actors=2")
    run(path, f"run={tmp_path / 'here'}")
    assert rows(tmp_path / "here") == rows(tmp_path / "there")


def test_a_run_trains_its_adapters_once_and_scores_against_them(
    make_audit: MakeAudit, tmp_path: Path, tiny_model_folder: Path, paraphraser: dict[str, str]
) -> None:
    unseen = [sentence(1000 + i) for i in range(30)]
    path = make_audit(20, 30, **ASKED, paraphraser=paraphraser)
    outcome = run(path)
    folder = tmp_path / "run"
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = {name: set(part["documents"]) for name, part in manifest["adapters"].items()}
    calibration = set(manifest["calibration"]["unseen"])
    assert len(parts["few"]) == 5
    assert 11 <= len(parts["default"]) <= 12
    assert parts["few"] | parts["default"] | calibration == {digest(text) for text in unseen}
    assert not calibration & (parts["few"] | parts["default"])
    (summary,) = outcome.selections
    scored = rows(folder)
    texts = {f"unseen-{i}": text for i, text in enumerate(unseen) if f"unseen-{i}" in scored}
    calibrating = [text for text in texts.values() if digest(text) in calibration]
    assert summary.n_calibration == len(calibrating) > 10
    assert f"{len(texts) - len(calibrating)} unseen documents" in summary.diagnostics.fine_tuned.sentence

    assert manifest["adapters"]["same"]["folder"] == manifest["adapters"]["default"]["folder"]

    # each score is that of a model with the adapter, loaded by itself
    config = ModelConfig(path=str(tiny_model_folder))
    for name, column in (("default", "fsd(base=loss)"), ("few", "fsd(base=loss, adapter=few)")):
        adapter = folder / manifest["adapters"][name]["folder"]
        assert len(json.loads((adapter / RECORD).read_text())["result"]["losses"]) == (6 if name == "default" else 3)
        models = [open_model(config), open_model(config.model_copy(update={"adapter": str(adapter)}))]
        for doc_id in list(texts)[:6]:
            each = []
            for lm in models:
                ids = tokenize(lm.tokenizer, [texts[doc_id]], 1024)[0].ids
                each.append(float(forward(lm, [ids], frozenset({"log_prob"})).log_prob.double().mean()))
            assert scored[doc_id]["fsd(base=loss, adapter=same)"] == scored[doc_id]["fsd(base=loss)"]
            assert scored[doc_id][column] == pytest.approx(each[0] - each[1], abs=2e-6)
    assert {name.name for name in (folder / "adapters").iterdir()} == {
        "documents.parquet", *(Path(part["folder"]).name for part in manifest["adapters"].values())
    }  # fmt: skip
    # the same call again, with another question, trains and scores nothing anew
    keys = str(folder / "adapters/documents.parquet")
    before = written(folder, "adapters", "scores", "receipts")
    run(path, "selections.0.alpha=0.3")
    after = written(folder, "adapters", "scores", "receipts")
    assert {**after, keys: 0} == {**before, keys: 0}
    run(path, "selections=[]")
    assert not (folder / "selection/members").exists(), "an answer to what is no longer asked"
    gone = folder / manifest["adapters"]["few"]["folder"]
    gone.rename(tmp_path / "few")
    with pytest.raises(UserError, match=f"{gone.name} is missing, and documents were scored with it"):
        run(path)
    (tmp_path / "few").rename(gone)
    with pytest.raises(UserError, match=r"adapters: .* then, .* now"):
        run(path, "fsd.learning_rate=1e-3")


@pytest.mark.parametrize("place", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_whose_training_diverges_stops_in_one_line_and_leaves_nothing(
    place: str, make_audit: MakeAudit, tmp_path: Path, paraphraser: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if place == "ray":
        request.getfixturevalue("cluster")
    asked = {"detectors": ["fsd", DRAWN], "selections": [], "paraphraser": paraphraser}
    path = make_audit([sentence(1)], [sentence(i) for i in range(9, 19)], **asked)
    line = r"^adapter default: the fine-tuning loss is (nan|inf) at step \d of 9; [^\n]*$"
    with pytest.raises(UserError, match=line):
        run(path, "fsd.learning_rate=1e30", "fsd.batch_size=1", f"resources.cluster={place}")
    folder = tmp_path / "run"
    assert [name.name for name in (folder / "adapters").iterdir()] == ["documents.parquet"]
    if place == "ray":  # where paraphrases are drawn beside the training
        assert len(list((folder / "receipts/paraphrase").iterdir())) > 0
    assert not (folder / "scores").exists()
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    run(path, "detectors=[loss]")
    assert not list((folder / "adapters").iterdir()), "nothing was fine-tuned on, and all calibrate"


def test_an_adapter_that_was_trained_on_audited_documents_may_not_judge_them(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    audited = [sentence(i) for i in range(12)]
    own = write_jsonl(tmp_path / "own.jsonl", [*audited[:3], *(sentence(2000 + i) for i in range(5))])
    fsd = {"corpus": {"path": own}, "documents": 8, "epochs": 1, "dtype": "float32"}
    asked = [{"name": "members", "detectors": ["fsd"], "procedure": "bh", "alpha": 0.2}]
    path = make_audit(audited, [sentence(1000 + i) for i in range(12)], detectors=["loss", "fsd"], selections=asked)
    with pytest.raises(UserError, match=r"adapters were trained on 3 audit documents and cannot judge these"):
        run(path, f"fsd={json.dumps(fsd)}")
    summaries = run(path, f"fsd={json.dumps(fsd)}", "selections.0.detectors=[loss]").selections
    assert [summary.n_audit for summary in summaries] == [12]


def test_a_trial_leaves_the_fine_tuning_documents_out_of_every_comparison(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """The contaminated model has an adapter of its own, over which that of fsd is trained."""
    documents = write_jsonl(tmp_path / "documents.jsonl", [sentence(i, 20) for i in range(60)])
    described = {
        "run": str(tmp_path / "trial"),
        "model": {"path": str(tiny_model_folder)},
        "documents": {"path": documents, "id": "id"},
        "contaminate": {"epochs": 2, "learning_rate": 2e-2, "dtype": "float32"},
        "split": {"unseen": 24},
        "fsd": {"documents": 10, "epochs": 1, "dtype": "float32"},
        "detectors": ["loss", "fsd"],
        "selections": [{"name": "a", "detectors": ["fsd"], "procedure": "bh", "alpha": 0.3}],
        "repeats": 3,
        "resources": {"cluster": "local"},
    }
    config, points = build_trial(described)
    outcome = run_trial(config, points)
    (row,) = outcome.facts["audits"]
    assert row["audited"] == 36
    (repeats,) = (tmp_path / "trial/repeats").glob("*.parquet")
    found = pq.read_table(repeats).to_pylist()
    assert [(each["n_calibration"], each["n_audit"], each["n_members"]) for each in found] == [(14, 36, 18)] * 3
    assert [detector["detector"] for detector in outcome.facts["detectors"]] == ["loss", "fsd"]
