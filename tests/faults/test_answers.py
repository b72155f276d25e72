"""Answers of an endpoint that are damaged are asked for again, and what they cost is not forgotten."""

from pathlib import Path

import pytest

from pipeline.endpoint.answers import Answers, spent_before
from pipeline.endpoint.client import Usage
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts, receipt_name
from tests.helpers.finished import rows, run
from tests.helpers.made_up import write_audit
from tests.helpers.openai_server import openai_server

STAGE = "sample/ratio0.5_t1_k50_p1_reference/2"


def test_a_damaged_line_of_answers_is_passed_over(tmp_path: Path) -> None:
    store = Store(str(tmp_path))

    def opened() -> Answers:
        return Answers(store, "samples/x", STAGE, "audit-000000", {"model": "stub"})

    answers = opened()
    for row in range(3):
        answers.add(Usage(1, 5), row=row, texts=["an answer"])
    path = tmp_path / "samples/x/audit-000000.jsonl"
    path.write_text(path.read_text().replace("an answer", "another thing", 1))
    assert [line["row"] for line in opened().before()] == [1, 2]


@pytest.mark.slow
def test_what_damaged_samples_cost_stays_in_the_budget(tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = tmp_path / "run"
    with openai_server(lambda prompt, seed: f" guess {seed} of {len(prompt)}", models=["stub"]) as server:
        model = {"endpoint": server.url, "name": "stub", "backoff": 0.01, "concurrency": 4}
        settings = {"detectors": [{"samia_zlib": {"draws": 2}}], "selections": []}
        path = write_audit(tmp_path, tiny_model_folder, 12, 12, model=model, **settings)
        run(path)
        asked_first, scores = len(server.bodies), rows(folder)
        receipt = next(read_receipts(Store(str(folder)), STAGE))
        sample = folder / receipt.data
        sample.write_bytes(sample.read_bytes()[:-50])
        (folder / receipt_name("score", receipt.shard)).unlink()
        run(path)
        assert len(server.bodies) > asked_first
        assert spent_before(Store(str(folder)), STAGE, ANSWER_FOLDERS).requests == server.requests
        assert rows(folder) == scores
