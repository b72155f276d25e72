"""A learnt detector is the trees of its file, whatever the batch, and refuses other files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from commands import ended, user_error
from made_up import sentence, write_jsonl

from pipeline.audit.description import load_config
from pipeline.audit.plan import make_plan
from pipeline.audit.reconcile import reconcile
from pipeline.config.audit import AuditConfig
from pipeline.detectors.base import FORWARD, REFERENCE, Detector, Evidence, parse
from pipeline.detectors.knockoff import base_detector
from pipeline.detectors.learnt import Learnt, beginning_key, learnt_of, learnt_text, trees_sum, with_contents
from pipeline.detectors.registry import DetectorChoice
from pipeline.errors import UserError
from pipeline.passes.forward import TokenStatistics
from pipeline.selection.engine import Scores
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed
from pipeline.trial.config import TrialConfig, build_trial, load_trial
from pipeline.trial.learn import FEATURES, FEATURES_OF_REFERENCE, boosted, learn, trees_of, with_features
from pipeline.trial.repeats import Pool

TOKENS = 12
MEASURED: list[Any] = ["loss", {"token_quantile": {"share": [0.25, 0.75]}}, {"min_k": {"window": 2}}]


def evidence_of(log_probs: np.ndarray, name: str = "text") -> Evidence:
    """Evidence of texts that are their numbers, each with as many tokens."""
    mask = torch.ones(log_probs.shape, dtype=torch.bool)
    texts = [f"{name} {number}" for number in range(len(log_probs))]
    return Evidence(texts, {FORWARD: TokenStatistics(torch.from_numpy(log_probs).float(), mask)})


def drawn(rng: np.random.Generator, documents: int, effect: float = 0.0) -> np.ndarray:
    """Log-probabilities of documents that differ from one another by much."""
    ease = rng.normal(size=(documents, 1))
    return -np.exp(rng.normal(size=(documents, TOKENS)) + ease - effect)


def pool_of_scores(columns: dict[str, np.ndarray], trained: np.ndarray) -> Pool:
    n = len(trained)
    scores = Scores(columns, np.arange(n), pa.nulls(n, pa.string()))
    return Pool([f"d{i}" for i in range(n)], np.arange(n), trained, np.ones(n, dtype=bool), scores)


TRIAL: dict[str, Any] = {
    "run": "trial",
    "model": {"path": "m"},
    "documents": {"path": "d.jsonl"},
    "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}],
}


def trial_of(detectors: list[Any], **settings: Any) -> TrialConfig:
    return build_trial({**TRIAL, "detectors": detectors, **settings})[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learnt from 300 made-up documents, of which half have somewhat likelier tokens."""
    path, rng = tmp_path_factory.mktemp("learnt") / "learnt.json", np.random.default_rng(0)
    trained = np.arange(300) < 150
    evidence = evidence_of(np.concatenate([drawn(rng, 150, 0.7), drawn(rng, 150)]), "learnt from")
    columns = {one.column: one.score(evidence).numpy() for one in parse(MEASURED)}
    learn(str(path), trial_of(MEASURED), [pool_of_scores(columns, trained)], evidence.texts)
    return path


def detector_of(file: Path) -> Detector:
    (one,) = parse([{"learnt": {"file": str(file)}}])
    return one


def test_the_trees_of_a_file_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(400, 5)) * [1, 1e18, 1e-6, 1, 1]
    rows[:, 0] = rows[:, 0].round()
    trained = rows[:, 0] + rng.normal(size=400) > 0.8
    model = boosted(rows, trained, seed=3)
    share = trained.mean()
    trees = json.loads(json.dumps(trees_of(model)))
    arrays = [{name: np.array(values) for name, values in tree.items()} for tree in trees]
    others = np.concatenate([rng.normal(size=(500, 5)) * [1, 1e18, 1e-6, 1, 1], rows, rows + 0.5])  # thresholds as well
    made = trees_sum(math.log(share / (1 - share)), arrays, others)
    np.testing.assert_allclose(made, model.decision_function(others), atol=1e-10, rtol=0)
    assert np.unique(made).size > 500


def test_a_learnt_detector_is_its_trees_over_its_features_whatever_the_batch(file: Path) -> None:
    content, rows = json.loads(file.read_text()), drawn(np.random.default_rng(2), 40)
    together = detector_of(file).score(evidence_of(rows))
    columns = np.transpose([one.score(evidence_of(rows)).numpy() for one in parse(MEASURED)])
    trees = [{name: np.array(values) for name, values in tree.items()} for tree in content["trees"]]
    np.testing.assert_allclose(together, trees_sum(content["baseline"], trees, columns), atol=1e-10, rtol=0)
    alone = [float(detector_of(file).score(evidence_of(rows[i : i + 1]))[0]) for i in range(40)]
    assert alone == together.tolist()
    rng = np.random.default_rng(4)
    members, others = (detector_of(file).score(evidence_of(drawn(rng, 500, effect))).numpy() for effect in (0.7, 0.0))
    assert (members[:, None] > others).mean() > 0.6  # it learnt something


def test_documents_that_were_learnt_from_and_features_without_a_number_have_no_score(file: Path) -> None:
    rows = drawn(np.random.default_rng(5), 3)
    seen = evidence_of(rows, "learnt from")
    assert detector_of(file).score(seen).isnan().all()
    assert beginning_key("Learnt  FROM 1") == beginning_key(seen.texts[1])
    assert beginning_key("x" * 200 + "cut") == beginning_key("x" * 200)
    rows[1, 3] = math.nan
    assert detector_of(file).score(evidence_of(rows)).isnan().tolist() == [False, True, False]


def test_quantiles_are_those_of_numpy_over_the_tokens_alone() -> None:
    rows = np.random.default_rng(6).normal(size=(2, 3, TOKENS)) - 5
    lengths = [12, 5, 1]
    mask = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    target, other = (TokenStatistics(torch.from_numpy(one), mask) for one in rows)
    evidence = Evidence(["text"] * 3, {FORWARD: target, REFERENCE: other})
    for name, values in (("token_quantile", rows[0]), ("difference_quantile", rows[0] - rows[1])):
        assert "share must be a number in [0, 1], got 1.1" in user_error(parse, [{name: {"share": 1.1}}])
        for share in (0.0, 0.1, 0.3, 1.0):
            (one,) = parse([name if share == 0.1 else {name: {"share": share}}])
            expected = [np.quantile(row[:n], share) for row, n in zip(values, lengths, strict=True)]
            np.testing.assert_allclose(one.score(evidence), expected, rtol=1e-12)


def changed(file: Path, **content: Any) -> str:
    """The text of the file with other content, and the fingerprint of that."""
    old = {key: value for key, value in json.loads(file.read_text()).items() if key != "fingerprint"}
    return learnt_text({**old, **content})


def test_a_bad_file_is_one_line(file: Path, tmp_path: Path) -> None:
    for text, part in (
        (lambda file: file.read_text().replace('"baseline": ', '"baseline": 1'), "undamaged: it states fingerprint"),
        (lambda file: file.read_text()[:-40], "this is another or a damaged one"),
        (lambda file: '{"format": "another"}', "this is another or a damaged one"),
        (lambda file: changed(file, version=2), "must be of version 1 of its format, and this is of 2"),
        (lambda file: changed(file, trees=[{"feature": [0]}]), "this lacks 'threshold'"),
        (lambda file: changed(file, features=["los"]), "did you mean 'loss'?"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(text(file))
        error = user_error(detector_of, bad)
        assert part in error
        assert str(bad) in error
        for entry in ("learnt", {"learnt": {"file": 3}}, {"learnt": {"file": str(tmp_path / "none.json")}}):
            assert "`seenset trial --learn`" in user_error(parse, [entry])


def audit_of(make_audit: Callable[..., Path], file: Path | str) -> AuditConfig:
    texts = [sentence(i) for i in range(30)]
    detectors = ["loss", {"learnt": {"file": str(file)}}]
    return load_config(str(make_audit(texts[:20], texts[20:], detectors=detectors, selections=[])))


def test_a_run_scores_with_what_it_began_with(file: Path, tmp_path: Path, make_audit: Callable[..., Path]) -> None:
    own = tmp_path / "learnt.json"
    own.write_text(file.read_text())
    named = f"{tmp_path}/./learnt.json"  # as a configuration beside it has it
    config = audit_of(make_audit, named)
    stage, store = stages_of(config)[-1], Store(config.run)
    shards = reconcile(make_plan(config), {stage.name: stage.fingerprint}, store).shards
    own.write_text(changed(file, baseline=5.0))
    receipts = [event for event in finish_shards(stage, shards, store, workers=1) if isinstance(event, Receipt)]
    tables = [read_filed(store, receipt) for receipt in receipts]
    scores = np.concatenate([table["learnt(file=learnt.json)"].to_numpy() for table in tables])
    assert scores.shape == (30,)
    assert scores.max() < 3  # with the other baseline each is 5 more
    other = stages_of(audit_of(make_audit, named))[-1]
    with pytest.raises(UserError, match=r"with other settings: .*\blearnt\.js.*use another run directory"):
        reconcile(make_plan(config), {other.name: other.fingerprint}, store)


def test_a_feature_of_a_reference_needs_one(file: Path, tmp_path: Path, make_audit: Callable[..., Path]) -> None:
    with_reference = tmp_path / "reference.json"
    with_reference.write_text(changed(file, features=["difference_quantile", "zlib", "loss", "etd"]))
    learnt = learnt_of(str(with_reference))
    assert isinstance(learnt, Learnt)
    assert learnt.same_tokens
    with pytest.raises(UserError, match="detector learnt needs reference_model, which is not given"):
        audit_of(make_audit, with_reference)


def test_workers_elsewhere_receive_the_content_also_of_a_base(file: Path, tmp_path: Path) -> None:
    own = tmp_path / "learnt.json"
    own.write_text(file.read_text())
    entries = ["loss", {"learnt": {"file": [str(own)]}}, {"knockoff": {"base": {"learnt": {"file": str(own)}}}}]
    choice = DetectorChoice.of(entries)
    columns = [one.column for one in parse(entries)]
    own.unlink()
    assert [one.column for one in choice.parse()] == columns
    for entry in ({"learnt": None}, {"learnt": {}}, {"min_k": {"file": str(own)}}):
        assert with_contents(entry) == entry
    assert base_detector(with_contents({"learnt": {"file": str(file)}})).column == f"learnt(file={file})"


def test_the_features_are_added_once_and_what_cannot_be_learnt_from_is_refused(file: Path, tmp_path: Path) -> None:
    config = trial_of(["loss", {"min_k": {"window": [2, 3]}}])
    columns = [one.column for one in parse(with_features("f.json", config, [])[0].detectors)]
    assert columns[:3] == ["loss", "min_k(window=2)", "min_k(window=3)"]
    assert set(columns) == {one.column for one in parse(FEATURES)} | {"min_k(window=3)"}
    compared = with_features("f.json", trial_of(["loss"], reference_model={"path": "m"}), [])[0].detectors
    assert [one.column for one in parse(compared)][-10:] == [one.column for one in parse(FEATURES_OF_REFERENCE)]
    learnt_before = trial_of(["loss", {"learnt": {"file": str(file)}}])
    swept = trial_of(["loss"], sweep={"detectors": [["loss"]]})
    for bad, part in ((learnt_before, "was learnt; leave it out"), (swept, "the sweep changes detectors")):
        with pytest.raises(UserError, match=part):
            with_features("f.json", bad, [])
    assert "writes a local file" in user_error(with_features, str(tmp_path), config, [])
    none = pool_of_scores({"loss": np.zeros(3)}, np.zeros(3, dtype=bool))
    with pytest.raises(UserError, match="none of 3 were trained in"):
        learn(str(tmp_path / "f.json"), trial_of(["loss"]), [none], ["text"])


def test_the_command_learns_a_file_that_another_trial_reads(tmp_path: Path, tiny_model_folder: Path) -> None:
    texts = [sentence(i) for i in range(40)]
    trial = TRIAL | {
        "model": {"path": str(tiny_model_folder), "dtype": "float32"},
        "documents": {"path": write_jsonl(tmp_path / "documents.jsonl", texts), "id": "id"},
        "contaminate": {"share": 0.5, "epochs": 1, "method": "full"},
        "split": {"unseen": 10},
        "detectors": ["loss"],
        "repeats": 2,
        "resources": {"cluster": "local"},
    }
    (tmp_path / "trial.yaml").write_text(json.dumps(trial))
    for name in ("one.json", "two.json"):
        assert ended("trial", tmp_path / "trial.yaml", "--learn", tmp_path / name) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert learnt_of(str(tmp_path / "one.json")).texts == set(map(beginning_key, texts))
    trial["detectors"] = ["loss", {"learnt": {"file": "one.json"}}]
    (tmp_path / "trial.yaml").write_text(json.dumps(trial))
    config, _ = load_trial(str(tmp_path / "trial.yaml"))  # the path is relative to its file, the column as written
    assert [one.column for one in parse(config.detectors)] == ["loss", "learnt(file=one.json)"]
