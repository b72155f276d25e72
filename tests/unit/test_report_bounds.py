"""The report's card: what it says of this one list and of all documents, and that it says nothing without support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_run import amend, amend_checks, build_run, summary_in
from test_report import Page, report

from pipeline.audit.summary import BlindDiagnostic, Summary
from pipeline.config.selection import SelectionConfig
from pipeline.report.contents import Report
from pipeline.report.wording.conclusion import CONTRADICTED
from pipeline.selection.bounds import Bound
from pipeline.selection.procedures.bound import terms_of_bound
from pipeline.store.files import Store

BOUND = Bound(confidence=0.95, wrong_at_most=3, right_at_least=80, members_at_least=91, published_wrong_at_most=5)


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return build_run(tmp_path)


def bounded(store: Store, **changes: Any) -> tuple[Page, Report, Summary]:
    amend(store, "members", bound=BOUND, **changes)
    return *report(store), summary_in(store)


def test_the_first_sentence_says_how_many_of_this_list_are_wrong(run: Store) -> None:
    page, facts, summary = bounded(run, supported=True)
    answer = facts.selections[0].answer
    claim = f"with 95% confidence at most 3 of these {summary.n_selected} are wrong"
    assert answer.headline.endswith(f"; {claim}.")
    assert claim in page.text
    assert answer.bound is not None
    assert "With 95% confidence at least 91 of the 240 audited documents were trained on" in answer.bound
    assert answer.bound in page.text
    assert "On average over repetitions" in answer.terms
    assert any("this one list and these audited documents" in sentence for sentence in facts.not_covered)
    assert "the same by the published bound" in page.text


def test_what_a_check_contradicts_has_no_bound_on_the_page(run: Store) -> None:
    page, facts, _ = bounded(run, supported=False, reasons=["They differ."])
    answer = facts.selections[0].answer
    assert answer.bound == CONTRADICTED
    for claim in ("95% confidence", "at most 3 of these", "at least 91"):
        assert claim not in page.text
        assert claim not in answer.sentence


def test_what_was_not_checked_is_claimed_under_its_condition(run: Store) -> None:
    amend_checks(run, blind=BlindDiagnostic(ok=None, outcome="not tested", sentence="Not tested."))
    _, facts, _ = bounded(run, n_selected=0)
    assert any("was not checked" in caution for caution in facts.selections[0].answer.cautions)


def test_a_selection_without_a_bound_says_nothing_of_one(run: Store) -> None:
    amend(run, "members", bound=None)
    page, facts = report(run)
    assert facts.selections[0].answer.bound is None
    assert "confidence of the bounds" not in page.text
    assert not any("this one list and these audited documents" in sentence for sentence in facts.not_covered)


def test_procedure_bound_promises_of_this_list_and_not_on_average(run: Store) -> None:
    terms = terms_of_bound(SelectionConfig(name="one", detectors=["loss"], confidence=0.9).exact_confidence)
    changes = {"procedure": "bound", "factor": None, "promise": terms.promise, "assumption": terms.assumption}
    _, facts, _ = bounded(run, supported=True, **changes)
    answer = facts.selections[0].answer
    assert answer.terms.startswith("With 90% confidence the share of wrong documents")
    assert "On average" not in answer.terms


def test_an_empty_list_of_procedure_bound_says_what_a_list_would_take(run: Store) -> None:
    page, facts, _ = bounded(run, supported=True, procedure="bound", factor=None, n_selected=0, minimum_selectable=20)
    assert "the shortest possible list has 20 documents" in facts.selections[0].answer.terms
    amend(run, "members", minimum_selectable=1_000)
    assert "nothing could ever have been selected." in report(run)[1].selections[0].answer.terms
    assert "smallest possible p-value" not in page.text
