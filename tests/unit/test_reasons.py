"""The reasons of quarantine are one enum, from which pages, messages and docs take their sentences."""

import re
from pathlib import Path

import pytest
from rich.text import Text

from pipeline.corpus.reasons import FAULTS, Reason, check_reasons
from tests.helpers.commands import here, user_error
from tests.helpers.made_up import MakeAudit

ROOT = Path(__file__).parents[2]


def test_there_are_16_reasons_and_the_code_writes_each_by_its_name() -> None:
    assert len(Reason) == 16
    files = [path for path in (ROOT / "pipeline").rglob("*.py") if path.name != "reasons.py"]
    code = "\n".join(path.read_text() for path in files)
    assert {Reason[name] for name in re.findall(r"\bReason\.([A-Z_]+)", code)} == set(Reason)
    for reason in Reason:
        assert not re.search(rf"(refuse|Unreadable)\([^\n]*\"{reason}\"", code), reason


def test_the_docs_list_each_reason_with_its_sentence() -> None:
    section = (
        (ROOT / "docs/data.md").read_text().partition("## Documents that cannot be scored")[2].partition("\n## ")[0]
    )
    listed = re.findall(r"^- `(\w+)`: (.+?)(?=^- |^$)", section, re.MULTILINE | re.DOTALL)
    assert {name: " ".join(sentence.split()) for name, sentence in listed} == {r: r.sentence for r in Reason}


def test_the_help_names_the_reasons_that_another_attempt_may_not_meet(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(Text.from_ansi(here(capsys, "run", "--help")[0]).plain.replace("\u2502", " ").split())
    assert ", ".join(FAULTS) in said


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in FAULTS])
def test_a_reason_that_another_attempt_meets_again_is_refused_with_its_sentence(reason: Reason) -> None:
    line = user_error(check_reasons, [reason.value])
    assert f"got '{reason}' ({reason.sentence[:-1]}): others would recur" in line


def test_a_page_states_what_a_reason_means(make_audit: MakeAudit, tmp_path: Path) -> None:
    from tests.helpers.finished import run

    run(make_audit([" ", *(f"A text of number {n} and of some words." for n in range(30))], 20, error_budget=0.5))
    page = (tmp_path / "run/report/report.html").read_text()
    assert f'<li>empty: <span class="meta">{Reason.EMPTY.sentence}</span></li>' in page
