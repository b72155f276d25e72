"""Runs that are scans of a schedule: one place each, whatever dies, and the same bytes from the same place."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError
from rich.console import Console

from pipeline.errors import UserError
from pipeline.plan.description import load_config
from pipeline.results.summary import Summary
from pipeline.series.scans import Schedule, read_schedule
from pipeline.store.files import Store
from pipeline.store.ledger import append_entry
from pipeline.trial.config import TrialConfig
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import select_again
from tests.helpers.commands import here
from tests.helpers.finished import selection_digest
from tests.helpers.made_up import MakeAudit, sentence, write_jsonl

SELECTION = {"name": "members", "detectors": ["loss"], "procedure": "bh"}


@pytest.fixture
def scan(make_audit: MakeAudit, tmp_path: Path) -> MakeAudit:
    """Writes the audit.yaml of a scan; `terms` are of its series."""

    def write(selections: Sequence[dict[str, Any]] = (SELECTION,), **terms: Any) -> Path:
        series = {"ledger": str(tmp_path / "ledger"), "alpha": 0.2, "horizon": 4, **terms}
        return make_audit(20, 40, detectors=["loss"], selections=list(selections), series=series, evidence=0)

    return write


def run(path: Path, *overrides: str) -> tuple[list[Summary], str]:
    """The answers of a run, and what it printed."""
    console = Console(record=True, file=io.StringIO(), width=500)
    outcome = run_audit(load_config(str(path), overrides), Reporter(console))
    return outcome.selections, console.export_text()


def schedule_in(folder: Path, ledger: str = "ledger") -> Schedule:
    schedule = read_schedule(Store(str(folder / ledger)))
    assert schedule is not None
    return schedule


def test_a_run_takes_the_place_of_its_plan_selects_at_its_level_and_files_its_answer(
    scan: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scan()
    text, _ = here(capsys, "plan", path)
    assert "series: this would be scan 1 of 4, at level 0.05 of alpha 0.2" in text
    assert f"series: it would open ledger {tmp_path / 'ledger'}" in text
    assert "selection members (bh, members, alpha 0.05)" in text
    assert not (tmp_path / "ledger").exists()
    (summary,), text = run(path)
    assert "series: scan 1 of 4, at level 0.05" in text
    assert summary.alpha == 0.05
    assert summary.series is not None
    assert summary.series.model_dump(exclude={"ledger"}) == {
        "slot": 1, "horizon": 4, "alpha": 0.2, "level": 0.05,
    }  # fmt: skip
    assert "scan 1 of 4 at level 0.05" in summary.line()
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "scan 1 of 4 at level 0.05" in page
    assert "20% of all that the schedule" in page or "no evidence" in page
    (one,) = schedule_in(tmp_path).scans
    assert one.filing is not None
    assert [answer.name for answer in one.filing.selections] == ["members"]
    assert run(path)[0] == [summary]
    assert len(schedule_in(tmp_path).scans) == 1
    text, _ = here(capsys, "plan", path, "--limit", "5")
    for part in ("this would be scan 2 of 4", "this run has place 1 already", "a sample is a scan too"):
        assert part in text
    folder = str(tmp_path / "run")
    for name in ("00000002.json", "00000001.json"):
        (tmp_path / "ledger" / name).unlink()
    with pytest.raises(UserError, match=r"this run was scan 1 of ledger .*, in which 0 places are taken"):
        select_again(folder, [])


def run_that_dies(path: Path, where: str) -> None:
    """A run that is killed as it calls a function."""
    with mock.patch(where, side_effect=RuntimeError("killed")), pytest.raises(RuntimeError, match="killed"):
        run(path)


@pytest.mark.parametrize(
    "where",
    ["file_result", pytest.param("write_report", marks=pytest.mark.slow)],
)
def test_a_run_that_dies_after_its_answer_is_healed_by_the_same_command(
    scan: MakeAudit, tmp_path: Path, where: str
) -> None:
    run_that_dies(scan(), f"ray_jobs.audit.{where}")
    before = selection_digest(tmp_path / "run")
    run(scan())
    assert selection_digest(tmp_path / "run") == before
    (one,) = schedule_in(tmp_path).scans
    assert one.filing is not None
    assert "has place 1 of 4 already, claimed from" in run(scan(), f"run={tmp_path / 'other'}")[1]
    assert selection_digest(tmp_path / "other") == before, "the same bytes at the same place"


@pytest.mark.slow
def test_a_run_that_dies_before_its_answer_has_spent_its_level_and_goes_on_with_it(
    scan: MakeAudit, tmp_path: Path
) -> None:
    run_that_dies(scan(), "pipeline.answers.select._answer_all")
    assert not (tmp_path / "run" / "selection").exists()
    assert [one.filing for one in schedule_in(tmp_path).scans] == [None]
    assert "has place 1 of 4 already, and keeps it" in run(scan())[1]
    assert schedule_in(tmp_path).scans[0].filing is not None


@pytest.mark.slow
def test_another_question_of_a_run_takes_another_place_and_says_so(scan: MakeAudit, tmp_path: Path) -> None:
    run(scan())
    lines: list[str] = []
    (summary,) = select_again(str(tmp_path / "run"), ["selections.0.procedure=storey"], say=lines.append)
    assert lines[0] == "series: scan 2 of 4, at level 0.05"
    assert lines[1].startswith("series: this run has place 1 too, for other questions or other scores")
    assert summary.series is not None
    assert summary.series.slot == 2
    assert [one.filing is not None for one in schedule_in(tmp_path).scans] == [True, True]
    with pytest.raises(UserError, match=r"selections.0.alpha is 0.5, and in a series"):
        select_again(str(tmp_path / "run"), ["selections.0.alpha=0.5"])
    with pytest.raises(UserError, match="series needs seenset run"):
        select_again(str(tmp_path / "run"), ["series.horizon=9"])


def test_what_is_refused_claims_no_place(scan: MakeAudit, tmp_path: Path) -> None:
    path = scan()
    write_jsonl(tmp_path / "unseen.jsonl", [sentence(i) for i in [*range(5), *range(1000, 1040)]])
    with pytest.raises(UserError, match="near-duplicates") as caught:
        run(path)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run/manifest.json").exists(), "before any model is read"
    assert not (tmp_path / "ledger").exists()


@pytest.mark.slow
def test_a_ledger_of_other_terms_stops_a_run_before_anything_is_scored(scan: MakeAudit, tmp_path: Path) -> None:
    run(scan())
    with pytest.raises(UserError, match=r"was opened with 0\.2"):
        run(scan(alpha=0.3), f"run={tmp_path / 'other'}")
    assert not (tmp_path / "other" / "scores").exists()


def test_a_selection_that_states_alpha_beside_series_is_refused(scan: MakeAudit) -> None:
    for alpha in (0.05, 0.2):
        with pytest.raises(UserError, match=r"selections.0.alpha is .*: leave it out"):
            load_config(str(scan([{**SELECTION, "alpha": alpha}])))
    with pytest.raises(UserError, match="a scan without selections"):
        load_config(str(scan([])))


def test_a_selection_that_a_schedule_does_not_cover_is_refused_before_anything_runs(scan: MakeAudit) -> None:
    with pytest.raises(UserError, match="series does not cover calibration conditional"):
        load_config(str(scan([{**SELECTION, "calibration": "conditional"}])))


def test_a_ledger_of_version_0_10_goes_on_under_the_rule_that_is_left(scan: MakeAudit, tmp_path: Path) -> None:
    """Its entries have the rule, and of each claim what its other rules read."""
    path = scan()
    run(path)
    entries = [Store(str(tmp_path / "ledger")).read_json(f"{n:08}.json")["content"] for n in range(3)]
    entries[1] |= {"before": dict.fromkeys(entries[1].pop("selections"), 7), "scorer": {}, "calibration": {}}
    states = {"supported": True, "inconclusive": None, "contradicted": False}
    answers = [{**answer, "supported": states[answer["conclusion"]]} for answer in entries[2]["selections"]]
    entries[2] |= {"schema": 1, "selections": answers}
    for rule, refused in (("spend", None), ("prds", "this schedule has rule prds"), ("e-lond", "has rule e-lond")):
        ledger = Store(str(tmp_path / rule))
        for content in ({**entries[0], "rule": rule}, *entries[1:]):
            append_entry(ledger, lambda known, content=content: content)
        overrides = [
            f"run={tmp_path / f'run-{rule}'}",
            f"series.ledger={tmp_path / rule}",
            "selections.0.confidence=0.9",
        ]
        if refused is None:
            (summary,), _ = run(path, *overrides)
            assert summary.series is not None
            assert summary.series.slot == 2
            assert [scan.claim.selections for scan in schedule_in(tmp_path, rule).scans] == [["members"]] * 2
        else:
            with pytest.raises(UserError, match=f"{refused}: finish it with version 0.10; a new ledger is a new error"):
                run(path, *overrides)


@pytest.mark.parametrize("setting", ["series", "against"])
def test_an_evaluation_is_no_scan(scan: MakeAudit, tmp_path: Path, setting: str) -> None:
    path = scan()
    overrides = ["series=null", f"against={tmp_path / 'run'}"] if setting == "against" else []
    with pytest.raises(UserError, match=f"{setting} is of a scan that selects, and evaluate selects nothing"):
        load_config(str(path), overrides, labelled=True)


def test_a_ledger_in_the_working_directory_alone_is_not_opened_anew_elsewhere(
    scan: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "weekly").mkdir(parents=True)
    (elsewhere / "weekly" / "00000000.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match=r"series\.ledger: weekly is in the working directory and not beside"):
        load_config(str(scan(ledger="weekly")))


@pytest.mark.parametrize("setting", ["series", "against"])
def test_a_trial_is_no_scan(setting: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?m)^{setting}\n  Extra inputs are not permitted"):
        TrialConfig.model_validate({setting: None})
