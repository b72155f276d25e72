"""A fault that outlasts all attempts puts a document into quarantine, and `seenset run --retry` takes it out again."""

import json
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.corpus.reasons import FAULTS, check_reasons
from pipeline.detectors.samia import prefix_and_reference
from pipeline.endpoint.answers import spent_before
from pipeline.errors import ExitCode, StopError
from pipeline.plan.description import load_config
from pipeline.run.manifest import read_run
from pipeline.run.repair import withdraw_refused
from pipeline.stages.registry import ANSWER_FOLDERS, plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from ray_jobs.audit import RunResult
from tests.helpers.commands import ended, refusal
from tests.helpers.finished import rows, run
from tests.helpers.made_up import MakeAudit, sentence, write_audit
from tests.helpers.openai_server import Said, openai_server

AUDIT = [sentence(i) for i in range(20)]
UNSEEN = [sentence(1000 + i) for i in range(14)]
PREFIXES = {prefix_and_reference(text)[0] for text in (AUDIT[3], AUDIT[11], UNSEEN[5])}
FAILING = {"audit-3", "audit-11", "unseen-5"}
SELECTIONS = [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}]
SAMPLED: dict[str, Any] = {
    "detectors": [{"samia": {"draws": 3}}],
    "selections": [{**SELECTIONS[0], "detectors": ["samia(draws=3)"]}],
    "error_budget": 0.5,
}
STAGE = "sample/ratio0.5_t1_k50_p1_reference/3"


def model(url: str) -> dict[str, Any]:
    return {"endpoint": url, "name": "stub", "backoff": 0.01, "attempts": 2, "concurrency": 4, "choices": 2}


@contextmanager
def failing(
    folder: Path, model_folder: Path, prompts: Set[str] = PREFIXES, kept: int = 0, **settings: Any
) -> Iterator[tuple[Said, Path, threading.Event]]:
    """An endpoint that fails at some prompts after so many attempts until it is mended, and the audit that asks it."""
    mended = threading.Event()

    def behave(prompt: str, attempt: int) -> str:
        return "500" if prompt in prompts and attempt > kept and not mended.is_set() else "answer"

    of_server = {key: settings.pop(key) for key in ("most_choices", "log_probs") if key in settings}
    with openai_server(behave=behave, models=["stub"], **of_server) as server:
        asked = {**SAMPLED, **settings}
        yield server, write_audit(folder, model_folder, AUDIT, UNSEEN, model=model(server.url), **asked), mended


def retry(path: Path) -> RunResult:
    return run(path, retried=check_reasons(["model_error", "out_of_memory"]))


def content(folder: Path) -> dict[str, Any]:
    """The digests of all that finished shards and answers hold, by what they are of."""
    store = Store(str(folder))
    stages = {path.parent.relative_to(folder / "receipts").as_posix() for path in folder.glob("receipts/**/*.json")}
    found: dict[str, Any] = {}
    for stage in sorted(stages):
        for receipt in read_receipts(store, stage):
            named = (*receipt.earlier, receipt.data)
            found[f"{stage} {receipt.shard}"] = [receipt.files[name].sha256 for name in named]
    for name in ("selected.parquet", "ranks.parquet", "summary.json"):
        found[name] = (folder / "selection/members" / name).read_bytes()
    return found


def test_documents_that_an_endpoint_failed_are_asked_again_alone_to_the_same_bytes(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    with failing(tmp_path, tiny_model_folder) as (server, path, mended):
        run(path)
        folder = tmp_path / "run"
        assert rows(folder, "score").keys() == rows(folder, STAGE).keys() - FAILING
        assert retry(path).status.state == "complete", "the endpoint fails still: they stay in quarantine"
        assert rows(folder, "score").keys() == rows(folder, STAGE).keys() - FAILING
        before = len(server.bodies)
        mended.set()
        outcome = retry(path)
        assert outcome.status.state == "complete"
        assert len(server.bodies) == before + 2 * len(FAILING), "three draws, two at a time"
        assert spent_before(Store(str(folder)), STAGE, ANSWER_FOLDERS).requests == server.requests, (
            "the failed ones are paid as before"
        )
        assert not list((folder / "samples").rglob("*.jsonl"))
        run(path, f"run={tmp_path / 'never failed'}")
    assert content(folder) == content(tmp_path / "never failed")


@pytest.mark.slow
def test_draws_that_a_document_had_before_its_fault_are_kept(tmp_path: Path, tiny_model_folder: Path) -> None:
    """The second of three draws fails; and two of the draws stand in a file of an earlier question."""
    with failing(tmp_path, tiny_model_folder, kept=1, most_choices=1) as (server, path, mended):
        run(path, "detectors=[{samia: {draws: 1}}]", "selections=[]")
        run(path)
        folder = tmp_path / "run"
        assert {len(rows(folder, STAGE)[name]["continuations"]) for name in FAILING} == {1}
        before = len(server.bodies)
        mended.set()
        retry(path)
        assert len(server.bodies) == before + 2 * len(FAILING)
        whole = tmp_path / "never failed"
        run(path, f"run={whole}", "detectors=[{samia: {draws: 1}}]", "selections=[]")
        run(path, f"run={whole}")
    again, never = content(folder), content(whole)
    assert again == never


def test_log_probabilities_that_failed_are_asked_again(tmp_path: Path, tiny_model_folder: Path) -> None:
    def log_probs(prompt: str) -> list[float]:
        return [-0.1 * (1 + sum(map(ord, word)) % 50) for word in prompt.split()[1:]]

    prompts, settings = {AUDIT[3], AUDIT[11], UNSEEN[5]}, {"detectors": ["loss"], "selections": SELECTIONS}
    with failing(tmp_path, tiny_model_folder, prompts, log_probs=log_probs, **settings) as (server, path, mended):
        run(path)
        folder = tmp_path / "run"
        assert len(rows(folder)) == 31
        before = len(server.bodies)
        mended.set()
        retry(path)
        assert len(rows(folder)) == 34
        assert len(server.bodies) == before + len(FAILING) + 2, "and the way in which it tells them is tried"
        run(path, f"run={tmp_path / 'never failed'}")
    assert content(folder) == content(tmp_path / "never failed")


@pytest.mark.slow
def test_a_retry_that_is_stopped_at_any_step_goes_on_as_the_run_does(tmp_path: Path, tiny_model_folder: Path) -> None:
    with failing(tmp_path, tiny_model_folder) as (server, path, mended):
        run(path)
        folder = tmp_path / "run"
        store, config = Store(str(folder)), load_config(str(path))
        stages = plan_stages(config)
        before, asked = len(server.bodies), server.requests
        mended.set()
        # killed once the receipts were withdrawn, and later on in the midst of asking
        assert withdraw_refused(stages, read_run(store)[1], store, ["model_error"]) > 1
        assert spent_before(store, STAGE, ANSWER_FOLDERS).requests == asked
        with pytest.raises(StopError, match="budget"):
            run(path, f"model.budget.requests={before + 1}")
        assert spent_before(store, STAGE, ANSWER_FOLDERS).requests == before + 1
        run(path)
        assert len(server.bodies) == before + 2 * len(FAILING)
        run(path, f"run={tmp_path / 'never failed'}")
    assert content(folder) == content(tmp_path / "never failed")


def times_of(folder: Path) -> dict[Path, int]:
    """When each file was written that a repeated run leaves untouched: all but its progress and its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "lock"]
    return {path: path.stat().st_mtime_ns for path in files if path.name != "status.json"}


def test_what_no_attempt_changes_is_not_tried_again(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit([*AUDIT, ""], UNSEEN, error_budget=0.5)
    run(path)
    folder = tmp_path / "run"
    before = times_of(folder)
    assert ended("run", path, "--retry", "model_error", "--retry", "out_of_memory") == ExitCode.DONE
    output = " ".join(capsys.readouterr().out.split())
    assert "is in quarantine for model_error or out_of_memory: nothing to try again" in output
    assert ended("run", path, "--retry", "all", "--json") == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["state"] == "complete"
    assert before == times_of(folder)


@pytest.mark.parametrize("reasons", [["empty"], ["model_error", "emtpy"], [""], ["all", "empty"]])
def test_a_reason_that_would_recur_is_refused(
    make_audit: MakeAudit, capsys: pytest.CaptureFixture[str], reasons: list[str]
) -> None:
    line = refusal(
        capsys, "run", make_audit(AUDIT, UNSEEN), *(word for reason in reasons for word in ("--retry", reason))
    )
    assert f"--retry must be one of model_error, out_of_memory, non_finite_score, all, got {reasons[-1]!r}" in line


def test_all_is_every_reason_that_may_not_recur() -> None:
    assert check_reasons(["all"]) == check_reasons(["model_error", "all"]) == FAULTS
    assert check_reasons(["out_of_memory", "model_error", "out_of_memory"]) == ("out_of_memory", "model_error")
    assert check_reasons([]) == ()


def test_a_retry_of_a_run_that_does_not_exist_yet_is_the_run(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit(AUDIT, UNSEEN)
    assert ended("run", path, "--retry", "all") == ExitCode.DONE
    assert len(rows(tmp_path / "run")) == len(AUDIT) + len(UNSEEN)
