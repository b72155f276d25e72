"""The registry of checks: what each declares is what plans and answers do with it."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import yaml
from test_preflight_checks import planned, text

import seenset
from pipeline.checks.check import Check, Planned
from pipeline.checks.diagnostic import Diagnostic
from pipeline.checks.document_sample import read_sample
from pipeline.checks.registry import CHECKS, Conclusion, check_sample, lines_before_scoring, next_step
from pipeline.plan.outlooks import outlooks
from pipeline.plan.preflight import PLAN, check_documents
from pipeline.report.brief import lights
from pipeline.results.summary import Summary
from pipeline.selection.guarantees import Outcome
from tests.helpers.commands import ended
from tests.helpers.made_up import write_audit, write_corpus
from tests.helpers.made_up_items import TEMPLATE, make_items, write_rows
from tests.helpers.marked_runs import versions_audit
from tests.helpers.report_run import build_run, summary_in


def result_of(check: Check, outcome: Outcome) -> Diagnostic:
    """A made-up result in the form of a check's record in the summary."""
    needed: dict[str, Any] = {name: 0 for name, field in check.record.model_fields.items() if field.is_required()}
    return check.record.model_construct(None, **{**needed, "outcome": outcome, "sentence": "It is so. For a reason."})


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """An answer that every check supports."""
    made = summary_in(build_run(tmp_path_factory.mktemp("run")))
    passed = {check.name: result_of(check, Outcome.PASSED) for check in CHECKS}
    return made.model_construct(**{**dict(made), "diagnostics": made.diagnostics.model_copy(update=passed)})


def test_the_names_of_the_checks_are_those_of_the_summary(make_audit: Callable[..., Path], tmp_path: Path) -> None:
    seenset.audit(make_audit(audit=60, unseen=60))
    (file,) = (tmp_path / "run/selection").glob("*/summary.json")
    named = [*json.loads(file.read_text(encoding="utf-8"))["diagnostics"]]
    assert named == [check.name for check in CHECKS if check.absent != "left out"]
    assert [*Conclusion.model_fields] == [check.name for check in CHECKS]


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_has_its_sentences_for_every_outcome(check: Check, outcome: Outcome, summary: Summary) -> None:
    result = result_of(check, outcome)
    changed = summary.diagnostics.model_copy(update={check.name: result})
    (light,) = (
        one
        for one in lights(summary.model_construct(**{**dict(summary), "diagnostics": changed}))
        if one.name == check.name
    )
    assert light.label == check.title
    assert (light.reason is None) == (outcome == Outcome.PASSED)
    step = next_step(changed, "unseen")
    assert (step is not None) == (result.contradicts or (result.decides and outcome != Outcome.PASSED))
    assert all(text[0].isupper() and text.endswith(".") for text in (light.reason, step) if text is not None)


def test_a_plan_makes_the_checks_that_declare_a_sample_and_no_other(tmp_path: Path) -> None:
    texts = [text(seed) for seed in range(40)]
    plan = planned(tmp_path, texts[:20], texts[20:], group_of=lambda role, row: f"{role} {row % 4}")
    results = check_sample(read_sample(plan, PLAN))
    fields = {check.name: check.sample.field for check in CHECKS if check.sample is not None}
    made = {name for name, field in fields.items() if results[field]}
    counts = {role: plan.documents(role)[0] for role, _ in plan.config.corpus.roles()}
    (outlook,) = outlooks(plan.config, {role: {"documents": n, "exact": True} for role, n in counts.items()})
    made |= {check.name for check in CHECKS if check.from_counts and outlook["sentence"]}
    possible = [check for check in CHECKS if check.needs <= plan.config.corpus.kind.offers]
    assert made == {check.name for check in possible if "sample" in check.times}
    assert made == {"blind", "resolution", "overlap", "near_copies", "groups", "duplicates"}
    lines = lines_before_scoring(check_documents(plan, PLAN), Planned(plan.config, counts, whole=True))
    assert len(lines) >= len(made) - 1, "the outlook has its own line"


def codes_called(*command: str | Path) -> set[CodeType]:
    """The code of all functions that a command calls in this process, in whichever thread."""
    called = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert ended(*command) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return called


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, set[CodeType]]:
    """What plans and answers call: of texts in groups, and of documents with versions."""
    called: dict[str, set[CodeType]] = {"sample": set(), "scores": set()}
    texts, versions = (tmp_path_factory.mktemp(name) for name in ("texts", "versions"))
    rows = {
        role: [{"text": text(first + i), "author": f"{role} {i % 9}"} for i in range(40)]
        for role, first in (("audit", 0), ("unseen", 100))
    }
    write_audit(texts, tiny_model_folder, corpus=write_corpus(texts, rows, group="author"))
    permuted = {"permute": "choices", "template": TEMPLATE}
    source = {"path": str(write_rows(versions / "items.jsonl", make_items(40))), "id": "id", "versions": permuted}
    described = versions_audit(versions, tiny_model_folder, source)
    (versions / "audit.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    for folder in (texts, versions):
        called["sample"] |= codes_called("plan", folder / "audit.yaml")
        assert ended("run", folder / "audit.yaml") == 0
        shutil.rmtree(folder / "run/diagnostics", ignore_errors=True)  # what an answer would read instead
        called["scores"] |= codes_called("select", folder / "run")
    return called


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_plans_and_answers_call_one_function(check: Check, called: dict[str, set[CodeType]]) -> None:
    assert (check.finding is not None) == (check.times == {"sample", "scores"})
    if check.finding is not None:
        code = check.finding.__code__
        assert {time for time, codes in called.items() if code in codes} == check.times
