"""A run remembers what it was asked, starts each new question from its own configuration, and hides no failed check."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import seenset
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from pipeline.report.contents import Report
from pipeline.report.page import write_report
from pipeline.results.history import count_questions, read_history
from pipeline.results.status import run_status
from pipeline.results.summary import Summary, selection_exit_code
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.store.files import Store
from ray_jobs import terminal
from ray_jobs.select import select_again
from tests.helpers.commands import ended
from tests.helpers.finished import run, score_run
from tests.helpers.made_up import sentence, write_audit
from tests.helpers.signed import file_blind_test, sign

APART = BlindDiagnostic(outcome=Outcome.FAILED, sentence="Their words differ.", auc=0.9, low=0.85, high=0.95)
ALIKE = BlindDiagnostic(outcome=Outcome.PASSED, sentence="Their words do not differ.", auc=0.5, low=0.45, high=0.55)
UNTESTED = BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, tested=False, sentence="Their words could not be compared.")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """An audit.yaml and its finished run; zlib takes the long half of its texts for members."""
    root = tmp_path_factory.mktemp("history")
    roles = {
        "audit": [sentence(i, 60 if i % 2 else 12) for i in range(60)],
        "unseen": [sentence(1000 + i, 12) for i in range(60)],
    }
    settings = {
        "detectors": ["loss", "zlib"],
        "selections": [{"name": "members", "detectors": ["zlib"], "procedure": "bh", "alpha": 0.2}],
        "evidence": 0,
        "resources": {"shard_bytes": 1 << 20},
    }
    path = write_audit(root, tiny_model_folder, **roles, **settings)
    file_blind_test(score_run(load_config(str(path)))[1], ALIKE)
    run(path)
    return root


@pytest.fixture
def audit(finished: Path, tmp_path: Path) -> Path:
    """The audit.yaml of a copy of that run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    value = yaml.safe_load((finished / "audit.yaml").read_text())
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump({**value, "run": str(tmp_path / "run")}))
    return tmp_path / "audit.yaml"


@pytest.fixture
def store(audit: Path) -> Store:
    return Store(str(audit.parent / "run"))


def select(store: Store, *overrides: str) -> list[Summary]:
    return select_again(store.url, overrides, texts=False)


def report_of(store: Store) -> tuple[Report, str]:
    write_report(store, texts=False)
    report = Report.model_validate(store.read_json("report/report.json"))
    return report, " ".join(store.read("report/report.html").decode().split())


def names_and_alphas(store: Store) -> list[list[tuple[str, float]]]:
    return [[(q.name, q.settings["alpha"]) for q in entry.questions] for entry in read_history(store)]  # type: ignore[misc]


def test_status_report_and_python_show_what_was_asked_last(store: Store) -> None:
    other = [{"name": "other", "detectors": ["zlib"], "procedure": "storey", "alpha": 0.3}]
    select(store, f"selections={json.dumps(other)}")
    assert [summary.name for summary in run_status(store.url).selections] == ["other"]
    assert list(seenset.open_run(store.url).selections) == ["other"]
    report, page = report_of(store)
    assert [selection.summary.name for selection in report.selections] == ["other"]
    assert "not made yet" not in page
    assert "requested later, with <code>seenset select</code>" in page
    assert not store.exists("selection/members")


def test_a_run_that_goes_on_after_a_select_answers_its_own_questions_again(audit: Path, store: Store) -> None:
    first = run(audit).selections
    select(store, "selections.0.alpha=0.05", "selections.0.name=strict")
    assert run(audit).selections == first
    assert run_status(store.url).selections == first
    assert names_and_alphas(store) == [[("members", 0.2)], [("strict", 0.05)], [("members", 0.2)]]
    assert store.names("selection") == ["history.jsonl", "members"]
    assert "with <code>seenset select</code>" not in report_of(store)[1]


def test_each_question_is_kept_with_its_settings_and_what_came_of_it(audit: Path, store: Store) -> None:
    (answered,) = run(audit).selections
    manifest = store.read("manifest.json")
    (again,) = select(store, "selections.0.alpha=0.05", "overlap=drop")
    (renamed,) = select(store, "selections.0.name=other")
    assert renamed.alpha == 0.2, "a select starts from the configuration of the run"
    assert store.read("manifest.json") == manifest
    first, second, _ = history = read_history(store)
    assert count_questions(history) == 2, "another name makes no other question"
    assert (first.command, second.command) == ("run", "select")
    assert (first.overlap, second.overlap) == ("error", "drop")
    assert first.when <= second.when
    (question,) = second.questions
    assert question.settings["alpha"] == 0.05
    assert question.settings["delta"] == 0.1, "every default stands there"
    assert (question.n_audit, question.n_selected, question.conclusion) == (60, again.n_selected, again.conclusion)
    assert first.questions[0].n_selected == answered.n_selected > 0
    assert select(store, "selections=[]") == []
    assert names_and_alphas(store)[3:] == [[]]
    assert run_status(store.url).selections == []
    assert store.names("selection") == ["history.jsonl"]


def test_a_run_without_a_history_shows_the_selections_of_its_configuration(store: Store) -> None:
    store.remove("selection/history.jsonl")
    with pytest.raises(UserError, match=r"selection/history\.jsonl is missing; seenset select"):
        run_status(store.url)
    store = sign(store)  # as a version wrote it that kept no history
    assert [summary.name for summary in run_status(store.url).selections] == ["members"]
    report, page = report_of(store)
    assert report.history is None
    assert "questions that this run was asked" not in page
    select(store)
    assert "Answers from before the start of this list" in report_of(store)[1]


def test_a_question_is_noted_before_its_answer_can_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Store.write

    def dies(store: Store, name: str, data: bytes) -> None:
        if name.endswith("summary.json"):
            raise OSError("the machine is gone")
        write(store, name, data)

    monkeypatch.setattr(Store, "write", dies)
    with pytest.raises(OSError, match="gone"):
        select(store, "selections.0.alpha=0.05")
    assert names_and_alphas(store) == [[("members", 0.2)], [("members", 0.05)]]


def test_the_report_lists_the_questions_and_says_what_asking_several_times_does(store: Store) -> None:
    page = report_of(store)[1]
    assert "The questions that this run was asked" in page
    assert "different questions" not in page
    for alpha in (0.05, 0.3):
        select(store, f"selections.0.alpha={alpha}", "selections.0.ties=random")
    report, page = report_of(store)
    assert (report.history.n_questions, report.history.n_askings) == (3, 3)
    assert [q.settings["alpha"] for q in report.history.questions] == [0.2, 0.05, 0.3]
    assert [q.others for q in report.history.questions] == ["", "ties random", "ties random"]
    assert "This run was asked 3 different questions. An answer, taken by itself, keeps its guarantee if its" in page
    assert "can be larger than the guarantee of any of them" in page
    assert "and not for an answer that was picked among several" in report.selections[0].answer.sentence
    whens = [entry.when for entry in read_history(store)]
    assert report.answered_at == whens[-1]
    others = json.dumps(report.model_copy(update={"answered_at": None}).plain())
    assert not any(when in page or when in others for when in whens), "the page has the date of its answers alone"


def test_several_questions_of_one_configuration_were_asked_at_once(audit: Path, store: Store) -> None:
    both = [{"name": name, "detectors": [name], "alpha": 0.2} for name in ("loss", "zlib")]
    shutil.rmtree(Path(store.url) / "selection")
    run(audit, f"selections={json.dumps(both)}")
    report, page = report_of(store)
    assert "This run was asked 2 different questions." in page
    assert "not all at once" not in report.selections[0].answer.sentence


def test_a_damaged_history_is_named(store: Store) -> None:
    good = store.read("selection/history.jsonl")
    store.write("selection/history.jsonl", good + b"{\n")
    with pytest.raises(UserError, match=r"history\.jsonl is damaged: line 2 is not JSON"):
        run_status(store.url)
    store.write("selection/history.jsonl", good + b"{}\n")
    with pytest.raises(UserError, match=r"history\.jsonl, line 2, is damaged: its content is not what was written"):
        run_status(store.url)


def test_a_history_is_kept_where_a_store_cannot_append(store: Store) -> None:
    remote = Store("memory://run")
    for path in sorted(Path(store.url).rglob("*")):
        if path.is_file():
            remote.write(str(path.relative_to(store.url)), path.read_bytes())
    select(remote, "selections.0.alpha=0.05")
    assert names_and_alphas(remote) == [[("members", 0.2)], [("members", 0.05)]]
    assert remote.names("selection", ".jsonl") == ["history.jsonl"]


def test_on_exit_code_4_every_list_that_there_is_may_be_acted_on(audit: Path) -> None:
    (summary,) = run(audit).selections
    supported, inconclusive, refuted = ConclusionValue
    some, untested, contradicted, empty, void = (
        (3, supported),
        (3, inconclusive),
        (1, refuted),
        (0, supported),
        (0, refuted),
    )
    for answers, code in (
        ([[], [empty, void]], 0),
        ([[some], [untested], [some, void]], 4),
        ([[some, contradicted], [empty, contradicted]], 5),
    ):
        for lists in answers:
            changed = [{"n_selected": count, "conclusion": conclusion} for count, conclusion in lists]
            assert selection_exit_code([summary.model_copy(update=one) for one in changed]) == code, lists


@pytest.mark.parametrize(
    ("command", "outcome", "conclusion"),
    [
        ("run", APART, "CONTRADICTED"),
        ("select", APART, "CONTRADICTED"),
        ("status", APART, "CONTRADICTED"),
        ("status", ALIKE, "supported"),
        ("status", UNTESTED, "inconclusive (not checked)"),
    ],
)
def test_the_terminal_says_what_a_guarantee_is_worth(
    audit: Path, store: Store, command: str, outcome: BlindDiagnostic, conclusion: str, capsys: Any, monkeypatch: Any
) -> None:
    file_blind_test(store, outcome)
    summaries = run(audit).selections
    assert ended(command, str(audit) if command == "run" else store.url) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("│ members")]
    assert conclusion in row
    contradicted = "members: CONTRADICTED, do not act on it: Their words differ."
    assert ("CONTRADICTED" in printed, contradicted in printed) == (outcome is APART, outcome is APART)
    assert (f"members: Not checked: {UNTESTED.sentence}" in printed) == (outcome is UNTESTED)
    ended(command, str(audit) if command == "run" else store.url, "--json")
    assert json.loads(capsys.readouterr().out)["unsupported"] == ["members"] * (outcome is APART)
    monkeypatch.setattr(terminal, "console", lambda: terminal.VisibleConsole(width=80))
    terminal.print_summaries(summaries)
    narrow = capsys.readouterr().out
    assert ("│ CONTRADICTED │" in narrow) == (outcome is APART), "whole on a narrow terminal"
    table = [line for line in narrow.splitlines() if line.startswith(("┃", "│"))]
    assert max(map(len, table)) <= 80
    assert "…" not in "".join(table)
    assert {"selection", "alpha", "audited", "selected", "checks", "guarantee"} <= {*re.findall(r"[a-z]+", table[0])}


def test_the_terminal_says_when_a_run_was_asked_again(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("select", store.url) == 0
    assert "different questions" not in capsys.readouterr().out
    assert ended("select", store.url, "--set", "selections.0.alpha=0.05") == 0
    assert (
        "This run was asked 2 different questions, and not all at once: the guarantee of an answer holds if its "
        "question was fixed before any answer was seen"
    ) in " ".join(capsys.readouterr().out.split())


def test_python_warns_of_what_is_not_supported_and_prints_it_first(audit: Path, store: Store) -> None:
    file_blind_test(store, APART)
    run(audit)
    for opening in (lambda: seenset.audit(audit, quiet=True), lambda: seenset.open_run(store.url)):
        with pytest.warns(seenset.UnsupportedWarning, match="members: CONTRADICTED") as caught:
            answer = opening().selections["members"]
        assert caught[0].filename == __file__, "the line of the caller is the one that is named"
    assert repr(answer).startswith("RunSelection(members: CONTRADICTED, do not act on it: Their words differ.")
    assert f"{answer.n_selected} of 60 selected (bh, alpha 0.2; guarantee contradicted)" in repr(answer)
