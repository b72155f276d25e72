"""`detectors: [{knockoff: ...}]`: paraphrases are drawn once, scored with the documents, and filtered."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.small_model import save_small_model
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from tests.helpers.commands import refusal, user_error
from tests.helpers.finished import rows, run, written
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.tiny_t5 import save_tiny_t5

DETECTORS = ["loss", {"knockoff": {"base": "loss", "draws": [1, 3]}}]
SELECTIONS = [{"name": "w", "detectors": ["knockoff(base=loss, draws=3)"], "procedure": "ktd", "alpha": 0.2}]


def test_w_is_the_score_less_the_mean_score_of_the_stored_paraphrases(
    make_audit: MakeAudit, tmp_path: Path, paraphraser: dict[str, str], tiny_model_folder: Path
) -> None:
    settings = {"selections": SELECTIONS, "error_budget": 1.0}  # some paraphrases of this model are a single token
    path = make_audit(16, 12, detectors=DETECTORS, paraphraser=paraphraser, **settings)
    outcome = run(path, "resources.actors=1")
    assert outcome.status.scored > 10
    assert outcome.status.scored + outcome.status.quarantined == 28
    folder = tmp_path / "run"
    scored, drawn = rows(folder, "score"), rows(folder, "paraphrase")
    assert scored.keys() <= drawn.keys()
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))

    def loss(text: str) -> float:
        ids = tokenize(lm.tokenizer, [text], 1024)[0].ids
        return float(forward(lm, [ids], frozenset({"log_prob"})).log_prob.double().mean())

    for doc_id in list(scored)[:8]:
        each = [loss(text) for text in drawn[doc_id]["paraphrases"]]
        assert len(set(drawn[doc_id]["paraphrases"])) > 1
        for draws in (1, 3):
            w = scored[doc_id]["loss"] - np.mean(each[:draws])
            assert scored[doc_id][f"knockoff(base=loss, draws={draws})"] == pytest.approx(w, abs=1e-4)
    (summary,) = outcome.selections
    assert summary.diagnostics.sign_symmetry.sentence
    assert summary.strict.guarantee == "finite-sample"
    assert json.loads((folder / "selection/w/scores.json").read_text())["roles"].keys() == {"audit", "unseen"}
    # the same again with two actors, bit for bit; and a resume draws and scores nothing anew
    again = tmp_path / "again"
    run(path, f"run={again}", "resources.actors=auto")
    assert rows(again, "paraphrase") == drawn
    assert rows(again, "score") == scored
    before = written(folder, "paraphrases", "scores")
    run(path, "selections.0.alpha=0.3")
    assert written(folder, "paraphrases", "scores") == before


def test_a_document_without_a_usable_paraphrase_is_quarantined_with_its_reason(
    make_audit: MakeAudit, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mute = tmp_path_factory.mktemp("mute") / "t5"
    save_tiny_t5(mute, mute=True)
    settings = {"paraphraser": {"path": str(mute)}, "error_budget": 1.0}
    outcome = run(make_audit(3, 2, detectors=DETECTORS, selections=[], **settings))
    assert (outcome.status.scored, outcome.status.quarantined) == (0, 5)
    reasons = pq.read_table(tmp_path / "run/quarantine").to_pylist()
    assert {row["reason"] for row in reasons} == {"model_error"}
    assert all("paraphrase" in row["message"] for row in reasons)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"paraphraser": None}, "detector knockoff needs paraphraser, which is not given"),
        ({"detectors": [{"knockoff": {"draws": 0}}]}, "draws must be a whole number of at least 1, got 0"),
        ({"detectors": [{"knockoff": {"base": "los"}}]}, "base must be a detector: unknown detector 'los'"),
        (
            {"selections": [{**SELECTIONS[0], "detectors": ["loss"]}]},
            "procedure ktd needs a signed statistic such as knockoff; loss has one sign",
        ),
        ({"paraphraser": {"path": "/no/such/model"}}, "no model at /no/such/model"),
    ],
)
def test_a_knockoff_that_cannot_be_asked_for_is_one_line(
    make_audit: MakeAudit,
    paraphraser: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    part: str,
) -> None:
    settings = {"detectors": DETECTORS, "selections": [], "paraphraser": paraphraser, **changed}
    audit = make_audit([sentence(1)], [sentence(2)], **settings)
    for command in ("plan", "run"):
        assert part in refusal(capsys, command, audit)


def test_a_paraphraser_that_is_the_audited_model_or_has_no_chat_template_is_refused(
    make_audit: MakeAudit, tmp_path: Path, tiny_model_folder: Path
) -> None:
    save_small_model(tmp_path / "other", hidden=32, seed=5)
    for model, line in ((tiny_model_folder, "is the audited model itself"), (tmp_path / "other", "chat template")):
        path = make_audit([sentence(1)], [sentence(2)], detectors=DETECTORS, paraphraser={"path": str(model)})
        assert line in user_error(run, path)
