"""A detector of one's own that fails on every document is found by `plan`, and ends a run with its first shards."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.detectors.base import detector_names, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import ExitCode, IncompleteError
from pipeline.plan import plugin_checks
from pipeline.plan.description import build_config
from pipeline.plan.plugin_checks import LENGTHS, check_plugins, made_up_evidence
from pipeline.stages.events import kind_of_message
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.commands import printed, user_error
from tests.helpers.finished import rows
from tests.helpers.made_up import sentence, write_audit

pytestmark = pytest.mark.usefixtures("forgotten_plugins")

HEAD = """
import os, sys, time
import numpy as np
import torch
from seenset import FORWARD, detector, mean_of_all, procedure

@detector(needs={FORWARD: ["log_prob"]})
def mine(evidence):
    t = evidence[FORWARD]
    good = mean_of_all(t.log_prob, t.mask)
"""

FAULTS = {
    "a panic of a library": (
        "raise type('PanicException', (BaseException,), {})('out of bounds')",
        "raised PanicError: out of bounds",
    ),
    "an exception": ("return good / {}['absent']", "detector mine (mine.py, line 11) raised KeyError: 'absent'"),
    "a message of a text": (
        "raise ValueError(evidence.texts[0])",
        "detector mine (mine.py, line 11) raised ValueError: ",
    ),
    "a helper of another module": ("return np.linalg.inv(np.zeros((2, 2)))", "mine.py, line 11) raised LinAlgError: "),
    "one number": ("return good.mean()", "detector mine must return (6,), one score a document, got ()"),
    "another number of documents": (
        "return good[:-1]",
        "detector mine must return (6,), one score a document, got (5,)",
    ),
    "a score a token": ("return t.log_prob", "detector mine must return (6,), one score a document, got (6, 60)"),
    "an array": ("return good.numpy()", "one score a document, got ndarray"),
    "a list": ("return good.tolist()", "one score a document, got list"),
    "nothing": ("pass", "one score a document, got NoneType"),
    "complex numbers": ("return good * 1j", "detector mine must return real numbers, got torch.complex128"),
    "no numbers": ("return good * float('nan')", "gives no finite score for any of 6 made-up documents"),
    "infinities": ("return good / 0", "gives no finite score for any of 6 made-up documents"),
    "a squeezed batch": ("return good.squeeze()", "fails for 1 made-up document: detector mine must return (1,), one"),
    "sys.exit": ("sys.exit(0)", "calls sys.exit(0) for 6 made-up documents"),
    "changes in place": (
        "t.log_prob.clamp_(max=-1)\n    return good",
        "changes its evidence in place (log_prob of the forward pass over the plain text), which other detectors read",
    ),
    "a mask in place": ("t.mask[:, 0] = False\n    return good", "changes its evidence in place (mask of the forward"),
    "a statistic that it does not need": ("return t.mean.double().sum(1)", "raised AttributeError: 'NoneType' object"),
}
ENDS = {
    "os._exit": ("os._exit(0)", "ends its process on made-up input (exit status 0)"),
    "a signal": ("os.kill(os.getpid(), 9)", "ends its process on made-up input (signal 9)"),
}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """(command, body of the detector, settings) -> exit code, output and errors."""

    def finish(name: str, body: str, *arguments: str, code: str = HEAD, **settings: Any) -> tuple[int, str, str]:
        (tmp_path / "mine.py").write_text(f"{code}    {body}\n")
        path = write_audit(
            tmp_path, tiny_model_folder, **{"detectors": ["mine"], "selections": [], **settings},
            **{"import": [str(tmp_path / "mine.py")]},
        )  # fmt: skip
        return printed(capsys, name, path, *arguments)

    return finish


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., list[str]]:
    """(body of the detector or procedure, settings) -> the warnings of trying it."""

    def check(body: str, code: str = HEAD, **settings: Any) -> list[str]:
        (tmp_path / "mine.py").write_text(f"{code}    {body}\n")
        described = {"detectors": ["mine"], "selections": [], **settings, "import": [str(tmp_path / "mine.py")]}
        corpus = {role: {"path": "a.jsonl"} for role in ("audit", "unseen")}
        return check_plugins(build_config({"run": "run", "model": {"path": "m"}, "corpus": corpus, **described}))

    return check


@pytest.mark.parametrize("fault", FAULTS)
def test_a_detector_of_ones_own_is_tried_on_made_up_evidence(tried: Callable[..., list[str]], fault: str) -> None:
    body, message = FAULTS[fault]
    error = user_error(tried, body)
    assert message in error
    assert error.startswith("detector mine ")


def test_plan_tries_them(command: Command) -> None:
    body, message = FAULTS["an exception"]
    code, _, errors = command("plan", body)
    assert (code, message in errors, errors.count("\n")) == (ExitCode.USER_ERROR, True, 1)


@pytest.mark.parametrize("end", ENDS)
def test_a_detector_that_ends_its_process_ends_another_one(tried: Callable[..., list[str]], end: str) -> None:
    body, message = ENDS[end]
    with pytest.raises(IncompleteError, match=re.escape(message)):
        tried(body)


def test_a_detector_that_never_ends_is_waited_for_in_vain(
    tried: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_checks, "SECONDS", 2.0)
    with pytest.raises(IncompleteError, match=r"detector mine \(mine.py\) takes more than 2 s for made-up input"):
        tried("time.sleep(600)")


def test_plan_warns_of_scores_that_would_be_missing_and_prints_nothing_of_a_detector(
    command: Command,
) -> None:
    body = "print('noise', flush=True)\n    return good.where(t.mask.sum(1) > 5, float('nan'))"
    code, output, errors = command("plan", body, "--json")
    assert (code, "noise" in output) == (0, False), errors
    lines = json.loads(output)["checks"]["lines"]
    warned = "warning: detector mine (mine.py) gives no finite score for 1 of 6 made-up documents: such documents are"
    assert any(line.startswith(warned) for line in lines)
    code, output, _ = command("plan", "return good")
    assert (code, "made-up" in output) == (0, False)


PROCEDURE = """
from seenset import decision, procedure

@procedure(guarantee="heuristic", assumption="None.", promise="None.")
def halves(counts, alpha):
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return counts.missing", "procedure halves (mine.py) raised AttributeError"),
        ("return 3", "procedure halves (mine.py) must return decision(...), got 3"),
        ("return decision('halves', counts, alpha, 101)", "procedure halves (mine.py) raised IndexError: index"),
        ("return decision('halves', counts, alpha, -1)", "procedure halves (mine.py) returns rank -1, which must be"),
        ("return decision('halves', counts, alpha, 2.0)", "procedure halves (mine.py) "),
        ("raise SystemExit", "procedure halves (mine.py) raised SystemExit"),
        ("return decision('halves', counts, alpha, 2)", ""),
    ],
)
def test_a_procedure_of_ones_own_is_tried_on_made_up_counts(
    tried: Callable[..., list[str]], body: str, message: str
) -> None:
    selections = [{"name": "members", "detectors": ["loss"], "procedure": "halves", "alpha": 0.2}]
    settings = {"code": PROCEDURE, "detectors": ["loss"], "selections": selections}
    if message:
        assert user_error(tried, body, **settings).startswith(message)
    else:
        assert tried(body, **settings) == []


BUILT_IN = [name for name in detector_names() if name not in ("from_column", "fsd")]


@pytest.mark.parametrize("name", [*BUILT_IN, "fsd"])
def test_made_up_evidence_is_such_as_every_built_in_detector_can_score(name: str) -> None:
    detectors = parse_detectors([{name: {"base": "loss"}} if name == "fsd" else name])
    for documents in (range(len(LENGTHS)), [2]):
        evidence = made_up_evidence(plan_passes(detectors), documents)
        assert detectors[0].score(evidence).isfinite().all()


RUNS = {
    "local": {"resources": {"shard_bytes": 1500}},
    "one shard": {"resources": {"shard_bytes": 1 << 20}},
    "two workers": {"resources": {"shard_bytes": 1500, "actors": 2}},
}


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("local", "an exception"),
        ("local", "a message of a text"),
        ("one shard", "no numbers"),
        ("two workers", "sys.exit"),
        ("local", "one number"),
    ],
)
def test_a_run_whose_first_documents_all_fail_alike_stops_and_states_the_cause(
    command: Command, tmp_path: Path, where: str, fault: str
) -> None:
    body, _ = FAULTS[fault]
    audit, unseen = ([sentence(start + i) for i in range(300)] for start in (0, 1000))
    code, _, errors = command("run", body, audit=audit, unseen=unseen, **RUNS[where])
    cause = {
        "an exception": "detector mine (mine.py, line 11) raised KeyError: 'absent'",
        "a message of a text": "detector mine (mine.py, line 11) raised ValueError: Text ",
        "no numbers": "not a finite number: mine",
        "sys.exit": "sys.exit(0) was called",
        "one number": "detector mine must return (1,), one score a document, got ()",
    }[fault]
    assert code == ExitCode.USER_ERROR
    assert errors.count("\n") == 1
    assert f"documents of stage score so far failed with one message: {cause}" in errors
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", ExitCode.USER_ERROR)
    assert cause in status["message"]
    assert status["documents"] + status["under_way"] < 150, "of 600"
    assert not list(read_receipts(Store(str(tmp_path / "run")), "score"))


def test_the_page_states_the_cause_and_a_corrected_detector_goes_on_in_its_directory(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("run", FAULTS["an exception"][0])[0] == ExitCode.USER_ERROR
    run = str(tmp_path / "run")
    assert printed(capsys, "report", run)[0] == 0
    page = json.loads((tmp_path / "run/report/report.json").read_text())
    assert any("raised KeyError: 'absent'" in notice for notice in page["notices"])
    assert "raised KeyError: &#39;absent&#39;" in (tmp_path / "run/report/report.html").read_text()
    assert printed(capsys, "report", run, "--no-text")[0] == 0
    assert "KeyError" not in (tmp_path / "run/report/report.html").read_text()
    code, output, errors = printed(capsys, "status", run)
    assert (code, "raised KeyError: 'absent'" in output) == (ExitCode.INCOMPLETE, True)
    code, _, errors = command("run", "return good")
    assert (code, errors) == (0, "")
    assert len(rows(tmp_path / "run")) == 100


def test_a_few_documents_that_all_fail_alike_state_the_cause_too(command: Command) -> None:
    code, _, errors = command("run", "1 / 0", audit=[sentence(0), sentence(1)], unseen=[sentence(7)])
    assert code == ExitCode.USER_ERROR
    assert "all 3 documents of stage score failed with one message: detector mine (mine.py, line 11) raised" in errors


def test_documents_that_are_too_short_are_no_fault_and_one_score_is_enough_to_go_on(
    command: Command, tmp_path: Path
) -> None:
    """The first 60 documents fail alike; short ones before them prove nothing, and one that is scored everything."""
    body = "if any('poison' in text for text in evidence.texts):\n        raise ValueError('poison')\n    return good"
    texts = ["a", *[f"{sentence(i)} poison" for i in range(60)]]
    code, _, errors = command("run", body, audit=texts, unseen=40, error_budget=0.9, **RUNS["one shard"])
    assert code == ExitCode.USER_ERROR
    assert "documents of stage score so far failed with one message: detector mine" in errors
    code, _, errors = command("run", body, "--set", f"run={tmp_path / 'other'}", audit=[sentence(99), *texts],
                              unseen=40, error_budget=0.9, **RUNS["one shard"])  # fmt: skip
    assert (code, errors) == (0, "")
    code, _, errors = command("run", body, audit=texts, unseen=40, error_budget=1.0, **RUNS["one shard"])
    assert (code, errors) == (0, ""), "an error budget of 1 allows all to fail"


def test_a_resumed_run_stops_again_and_messages_of_several_kinds_do_not_stop_it(
    command: Command, tmp_path: Path
) -> None:
    body = "raise (ValueError if len(evidence.texts[0]) % 2 else TypeError)('odd')"
    code, _, errors = command("run", body)
    assert code == ExitCode.INCOMPLETE
    assert "100 of 100 documents were quarantined (model_error 100), more than error_budget 0.01 allows; " in errors
    assert "of them: detector mine (mine.py, line 11) raised " in errors
    quarantined = pq.read_table(tmp_path / "run/quarantine").to_pylist()
    assert {row["message"] for row in quarantined} == {
        f"detector mine (mine.py, line 11) raised {kind}: odd" for kind in ("ValueError", "TypeError")
    }
    for _ in range(2):
        code, _, errors = command("run", "1 / 0", "--set", f"run={tmp_path / 'again'}")
        assert (code, "raised ZeroDivisionError" in errors) == (ExitCode.USER_ERROR, True)


def test_messages_are_of_one_kind_up_to_numbers_and_what_is_said_of_a_text() -> None:
    assert kind_of_message("12 tokens at 0x7f3a") == kind_of_message("7 tokens at 0xb") == "# tokens at #"
    raised = "detector mine(k=0.1) (mine.py, line 3) raised ValueError"
    assert kind_of_message(f"{raised}: a text") == kind_of_message(f"{raised}: another") == kind_of_message(raised)
    assert kind_of_message("no text") != kind_of_message("no picture")
