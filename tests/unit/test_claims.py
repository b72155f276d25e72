"""A scan of a schedule: it takes one place, keeps it, files its answer; refused where the guarantee would fail."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.audit import AuditConfig
from pipeline.detectors.plugins import load_plugins, read_plugins
from pipeline.results.history import note_answers
from pipeline.selection.schedule import Slot
from pipeline.series import claims
from pipeline.series.claims import check_ledger, claim_slots, file_result, scan_key
from pipeline.series.scans import Schedule, read_schedule
from pipeline.store.files import Store
from pipeline.store.ledger import append_entry, entry_file
from tests.helpers.commands import user_error
from tests.helpers.made_up_scans import scan_config, scan_scores, scan_summary

Config = Callable[..., AuditConfig]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Configurations over one ledger."""
    return lambda **changes: scan_config(str(tmp_path / "ledger"), **changes)


def claim(config: AuditConfig, content: str, lines: list[str] | None = None, **changes: Any) -> dict[str, Slot]:
    scored = scan_scores(config, content, **changes.pop("fingerprint", {}))
    return claim_slots(config, scored, changes.pop("limit", None), ([] if lines is None else lines).append)


def file(config: AuditConfig, content: str, n_selected: int) -> list[str]:
    lines: list[str] = []
    summaries = [scan_summary(config, one.name, n_selected) for one in config.selections]
    file_result(config, scan_scores(config, content), None, summaries, lines.append)
    return lines


def schedule(config: AuditConfig) -> Schedule:
    return read_schedule(Store(config.series.ledger))


def test_the_same_scan_keeps_its_place_and_another_question_takes_another(config: Config) -> None:
    first, again, other = [], [], []
    assert claim(config(), "a", first)["members"].number == 1
    assert claim(config(), "a", again)["members"].number == 1
    assert claim(config(procedure="storey"), "a", other)["members"].number == 2
    assert first[0].startswith("series: scan 1, at level 0.0")
    assert again == ["series: this scan has place 1 already, and keeps it"]
    assert "this run has place 1 too, for other questions or other scores" in other[1]
    sample: list[str] = []
    assert claim(config(), "a", sample, limit=5)["members"].number == 3
    assert any("a sample is a scan too" in line for line in sample)
    elsewhere: list[str] = []
    assert claim(config(run="/runs/two"), "a", elsewhere)["members"].number == 1
    assert "claimed from /runs/one" in elsewhere[0]
    assert claim(config(), "b", fingerprint={"model": "m2"})["members"].number == 4, "another model"
    claim(config(adapter="adapters/second"), "c")
    models = [one.claim.model for one in schedule(config()).scans]
    assert [" with adapter " in one and one.endswith("second") for one in models] == [False] * 4 + [True]


@pytest.mark.usefixtures("forgotten_plugins")
def test_a_changed_procedure_of_a_plugin_takes_another_place(config: Config, tmp_path: Path) -> None:
    plugin = tmp_path / "own_rule.py"
    code = """
from seenset import decision, procedure

@procedure(guarantee="heuristic", assumption="none", promise="none")
def own_rule(counts, alpha):
    return decision("own_rule", counts, alpha, {last})
"""
    keys = []
    for last in (-1, 0):
        plugin.write_text(code.format(last=last))
        load_plugins(read_plugins([str(plugin)]))
        own = config().model_copy(update={"import_": [str(plugin)]})
        own = own.model_copy(update={"selections": [own.selections[0].model_copy(update={"procedure": "own_rule"})]})
        keys.append(scan_key(own, scan_scores(own, "a"), None))
    assert len(set(keys)) == 2
    assert scan_key(own, scan_scores(own, "a"), None) == keys[1]


def test_a_run_that_had_answered_before_its_claim_is_recorded_as_such(config: Config, tmp_path: Path) -> None:
    asked = config(run=str(tmp_path / "run"))
    note_answers(Store(asked.run), asked, "run", [scan_summary(asked, "members", 9)])
    assert claim(asked, "a")["members"].asked_before
    assert schedule(asked).scans[0].claim.asked_before
    assert claim(asked, "a")["members"].asked_before
    assert not claim(config(), "b")["members"].asked_before


def test_an_answer_is_filed_once_and_another_one_and_a_lost_claim_are_told(config: Config, tmp_path: Path) -> None:
    claim(config(), "a")
    assert file(config(), "a", 5) == []
    assert file(config(), "a", 5) == []
    assert "had filed another answer before" in file(config(), "a", 6)[0]
    filing = schedule(config()).scans[0].filing
    assert filing.selections[0].n_selected == 5
    (tmp_path / "ledger" / entry_file(2)).unlink()
    (tmp_path / "ledger" / entry_file(1)).unlink()
    assert "has lost the claim of this scan" in user_error(file, config(), "a", 5)


@pytest.mark.parametrize(
    ("terms", "line"),
    [
        ({"alpha": 0.2}, "series.alpha is 0.2, and ledger .* was opened with 0.1"),
        ({"horizon": 5}, "series.horizon is 5, and ledger .* was opened with null"),
    ],
)
def test_a_ledger_of_other_terms_is_refused(config: Config, terms: dict[str, Any], line: str) -> None:
    claim(config(), "a")
    for problem in (user_error(check_ledger, config(**terms)), user_error(claim, config(**terms), "b")):
        assert re.search(line, problem)
        assert "start a new ledger" in problem
    assert len(schedule(config()).scans) == 1


def test_a_used_up_horizon_is_refused_and_says_what_can_be_done(config: Config) -> None:
    for content in "ab":
        claim(config(horizon=2), content)
    assert claim(config(horizon=2), "b")["members"].number == 2
    check_ledger(config(horizon=2))  # this run may have its place already
    for problem in (
        user_error(check_ledger, config(horizon=2, run="/runs/two")),
        user_error(claim, config(horizon=2), "c"),
    ):
        assert "all 2 places of ledger" in problem
        assert "start a new ledger" in problem
        assert "a longer horizon is refused, because" in problem


def test_a_clock_that_runs_backwards_is_told_and_confuses_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(["2026-11-22T10:00:00+00:00"] * 2 + ["2020-01-01T00:00:00+00:00"] + ["2026-11-29T10:00:00+00:00"])
    monkeypatch.setattr(claims, "_now", lambda: next(times))
    lines: list[str] = []
    numbers = [claim(config(), content, lines)["members"].number for content in "abc"]
    assert numbers == [1, 2, 3]
    assert [line for line in lines if "clock" in line] == [
        "series: scan 2 is dated 2020-01-01T00:00:00+00:00, and scan 1 2026-11-22T10:00:00+00:00: a clock was wrong; "
        "scans are ordered by their places"
    ]


def test_entries_that_are_no_schedule_or_in_no_order_of_one_are_named(config: Config, tmp_path: Path) -> None:
    claim(config(), "a")
    file(config(), "a", 1)
    ledger = Store(str(tmp_path / "ledger"))
    opening, claimed, result = (ledger.read_json(entry_file(n))["content"] for n in range(3))
    others = [
        [content] for content in ({"a": 1}, {"kind": "claim"}, {"kind": ["claim"]}, {"kind": "other", "schema": 1})
    ]
    wrong = [*others, [claimed], [opening, result], [opening, claimed, result, result], [opening, claimed, claimed]]
    for number, contents in enumerate(wrong):
        store = Store(str(tmp_path / f"other-{number}"))
        for content in contents:
            append_entry(store, lambda entries, content=content: content)
        assert f"entry {len(contents) - 1} " in (problem := user_error(read_schedule, store))
    assert "entry 2 claims place 1, and the next one is 2" in problem


@pytest.mark.parametrize(
    ("supported", "conclusion"), [(True, "supported"), (None, "inconclusive"), (False, "contradicted")]
)
def test_a_result_of_version_0_10_is_read_with_the_conclusion_that_it_states(
    config: Config, tmp_path: Path, supported: bool | None, conclusion: str
) -> None:
    claim(config(), "a")
    file(config(), "a", 1)
    entries = [Store(str(tmp_path / "ledger")).read_json(entry_file(n))["content"] for n in range(3)]
    bound = {
        "confidence": 0.95,
        "wrong_at_most": 1,
        "right_at_least": 0,
        "members_at_least": 0,
        "published_wrong_at_most": 1,
    }
    (answer,) = entries[2]["selections"]
    for stated in ({"conclusion": answer["conclusion"]}, {}):  # 0.10 wrote both, 0.9 only `supported`
        rest = {key: value for key, value in answer.items() if key != "conclusion"}
        earlier = {
            **entries[2],
            "schema": 1,
            "selections": [{**rest, **stated, "supported": supported, "bound": bound}],
        }
        ledger = Store(str(tmp_path / f"earlier-{len(stated)}"))
        for content in (*entries[:2], earlier):
            append_entry(ledger, lambda known, content=content: content)
        ((read,),) = [scan.filing.selections for scan in read_schedule(ledger).scans]
        assert read.conclusion == conclusion
        assert (read.bound is None) == (conclusion == "contradicted")
    later = Store(str(tmp_path / "later"))
    for content in (*entries[:2], {**entries[2], "schema": 3}):
        append_entry(later, lambda known, content=content: content)
    assert "in another form" in user_error(read_schedule, later)


@pytest.mark.parametrize(
    ("ledger", "run", "line"),
    [
        ("runs/a", "runs/a", "is in run directory"),
        ("runs/a/selection/weekly", "runs/a", "is in run directory"),
        ("link/selection/weekly", "runs/a", "is in run directory"),
        ("runs/old/selection/weekly", "runs/a", "is in run directory"),
        ("runs", "runs/a", "is in it"),
    ],
)
def test_a_ledger_is_in_no_run_directory_and_holds_none(tmp_path: Path, ledger: str, run: str, line: str) -> None:
    """A run would remove it from among its selections, and with it all that was spent."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "old").mkdir()
    (tmp_path / "runs" / "old" / "manifest.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "a")
    config = scan_config(str(tmp_path / ledger), run=str(tmp_path / run))
    assert line in user_error(check_ledger, config)
    assert line in user_error(claim, config, "a")
    check_ledger(scan_config(str(tmp_path / "runs-ledger"), run=str(tmp_path / run)))
