"""Every command: keys and types of its --json, its exit codes, and the names of the files that it writes."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from answers import check_recorded, check_same, shape
from command import ROOT, Orders, begin, done, end_of, here, wait_for
from world import ASKED, FEW, REAL, numbered, sentence, texts_from, write_config, write_lines

import seenset as interface

Audit = Callable[..., Path]
COMMANDS = {
    "compare", "evaluate", "export", "init", "joint", "mark", "pack", "plan", "rank", "report",
    "run", "select", "series", "status", "trial", "verdict", "verify",
}  # fmt: skip


@pytest.fixture(scope="session")
def scanned(world: Path) -> Path:
    """A ledger with two scans, the second of which selected documents."""
    question = [{"name": "members", "detectors": ["exact(step=1)"], "procedure": "storey"}]
    schedule = {"ledger": "ledger", "alpha": 0.9, "horizon": 2}
    for name, files in (("first-scan", ["comma.csv"]), ("second-scan", ["lines.jsonl", "table.parquet"])):
        corpus = {"audit": {"path": files, "id": "id"}, "unseen": {"path": "unseen.jsonl", "id": "id"}}
        done(here("run", write_config(world, name, corpus=corpus, selections=question, series=schedule)))
    return world / "ledger"


def recorded(name: str, *arguments: str | Path, code: int = 0) -> Any:
    """What a command prints with --json, whose keys and types are the recorded ones."""
    printed = done(here(*arguments, "--json"), code)
    check_recorded(f"json/{name}", dict(sorted(shape(printed.json).items())))
    return printed.json


def names_in(folder: Path) -> list[str]:
    """The names of all files below a folder, with numbers of shards and marks of attempts left out."""
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    names = {re.sub(r"(audit|unseen|seen)-\d{6}", r"\1-NUMBER", name) for name in names}
    names = {re.sub(r"-[0-9a-f]{8}(?=\.parquet$)", "-ATTEMPT", name) for name in names}
    names = {re.sub(r"^lock/\d{6}", "lock/NUMBER", name) for name in names}
    return sorted({re.sub(r"(documents|arithmetic)-[0-9a-f]{8,}", r"\1-DIGEST", name) for name in names})


def test_the_commands_are_these() -> None:
    shown = done(here("--help")).out
    assert set(re.findall(r"^│ ([a-z]+) ", shown, re.M)) == COMMANDS
    assert re.fullmatch(r"seenset \d+\.\d+\.\d+\S*\n", done(here("--version")).out)


def test_the_python_names_are_these() -> None:
    check_recorded("python", sorted(interface.__all__))


def test_the_options_of_every_command_are_these() -> None:
    options = {name: sorted(set(re.findall(r"--[a-z][a-z-]+", done(here(name, "--help")).out))) for name in COMMANDS}
    check_recorded("options", dict(sorted(options.items())))


def test_a_configuration_is_described_by_the_recorded_settings() -> None:
    settings = {}
    for name in ("audit", "trial"):
        schema = json.loads((ROOT / f"docs/schemas/{name}.schema.json").read_text())
        parts = {"": schema, **schema["$defs"]}
        settings[name] = {part: sorted(parts[part].get("properties", {})) for part in sorted(parts)}
    check_recorded("settings", settings)


def test_json_of_plan_run_and_status(audit: Audit, tmp_path: Path) -> None:
    path, run = audit(), tmp_path / "run"
    recorded("plan", "plan", path)
    assert not run.exists(), "a plan writes nothing"
    printed = recorded("run", "run", path)
    assert printed["state"] == "complete"
    status = recorded("status", "status", run)
    assert (status["state"], status["documents"], status["exit_code"]) == ("complete", 301, 0)
    (last,) = done(here("status", run, "--watch", "--json")).out.splitlines()[-1:]
    assert shape(json.loads(last)).keys() == shape(status).keys()


def test_json_of_select_report_and_verdict(reference: Path, second: Path, contradicted: Path) -> None:
    recorded("select", "select", second)
    recorded("report", "report", second)
    assert recorded("verdict", "verdict", reference)["conclusion"]
    recorded("verdict-contradicted", "verdict", contradicted)
    report = json.loads((reference / "report/report.json").read_text())
    check_recorded("json/report-file", dict(sorted(shape(report).items())))
    summary = json.loads((reference / "selection/storey/summary.json").read_text())
    check_recorded("json/summary-file", dict(sorted(shape(summary).items())))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rest", []),
        ("selected", ["--keep", "selected"]),
        ("list", ["--list"]),
        ("samples", ["--samples", "--task", "bench", "--keep", "rest"]),
        ("huggingface", ["--huggingface"]),
    ],
)
def test_json_and_files_of_export(
    world: Path, second: Path, scanned: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    tables_alone = name in ("samples", "huggingface")  # what is no text at all fits no table
    run, selection = (world / "runs/first-scan", "members") if tables_alone else (second, "storey")
    recorded(f"export-{name}", "export", run, tmp_path / "out", "--selection", selection, *options)
    check_recorded(f"files/export-{name}", names_in(tmp_path / "out"))


def test_json_and_files_of_compare_joint_and_rank(reference: Path, second: Path, tmp_path: Path) -> None:
    recorded("compare", "compare", reference, second, "--output", tmp_path / "compare")
    recorded("joint", "joint", reference, second, "--selection", "clean", "--output", tmp_path / "joint")
    ids = [row["doc_id"] for row in pq.read_table(reference / "selection/clean/documents").to_pylist()]
    right = [
        {"model": m, "item": i, "correct": n % (2 + k) == 0} for k, m in enumerate("ab") for n, i in enumerate(ids)
    ]
    unique = list({(row["model"], row["item"]): row for row in right}.values())
    pq.write_table(pa.Table.from_pylist(unique), tmp_path / "results.parquet")
    output = ["--output", tmp_path / "rank"]
    recorded("rank", "rank", tmp_path / "results.parquet", "--run", reference, "--selection", "clean", *output)
    for name in ("compare", "joint", "rank"):
        check_recorded(f"files/{name}", names_in(tmp_path / name))


def test_json_and_files_of_series(scanned: Path, tmp_path: Path) -> None:
    recorded("series", "series", scanned, "--page", tmp_path / "page")
    check_recorded("files/series", names_in(tmp_path / "page"))
    check_recorded("files/ledger", names_in(scanned))


def test_json_and_files_of_init(world: Path, tmp_path: Path) -> None:
    for name in ("audited", "unseen"):
        write_lines(tmp_path / f"{name}.jsonl", numbered(name, texts_from(50_000, 30)))
    recorded("init", "init", tmp_path)
    check_recorded("files/init", names_in(tmp_path))


def test_json_and_files_of_evaluate(world: Path, audit: Audit, tmp_path: Path) -> None:
    rows = [{"text": sentence(60_000 + i), "in": ["member", "nonmember"][i % 2]} for i in range(60)]
    write_lines(world / "labelled.jsonl", rows)
    path = audit(corpus={"labelled": {"path": "labelled.jsonl", "label": "in"}}, selections=[])
    recorded("evaluate", "evaluate", path)
    check_recorded("files/evaluation", names_in(tmp_path / "run/evaluation"))


def test_json_and_files_of_trial(world: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "documents.jsonl", numbered("document", texts_from(70_000, 60)))
    trial = {
        "run": str(tmp_path / "trial"),
        "model": {"path": str(world / "model")},
        "documents": {"path": "documents.jsonl", "id": "id"},
        "contaminate": {"share": 0.5, "epochs": 1, "dtype": "float32"},
        "repeats": 3,
        "resources": {"cluster": "local"},
        "detectors": ["loss"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.3}],
    }
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(trial))
    recorded("trial", "trial", tmp_path / "trial.yaml")
    recorded("trial-status", "status", tmp_path / "trial")
    names = [name for name in names_in(tmp_path / "trial") if "/" not in name]
    check_recorded("files/trial", names)


def test_files_of_a_finished_run(reference: Path) -> None:
    others = "|".join({*ASKED, *REAL} - {"storey", "clean", "fused"})
    names = [name for name in names_in(reference) if not re.search(f"/({others})[-/]", name) and name != "verdict.json"]
    check_recorded("files/run", names)
    tables = {
        name: pq.read_schema(next(reference.glob(name))).names
        for name in (
            "scores/*.parquet",
            "quarantine/*.parquet",
            "selection/storey/selected.parquet",
            "selection/storey/documents/*.parquet",
            "selection/storey/evidence.parquet",
            "selection/clean/clean.parquet",
        )
    }
    check_recorded("columns", tables)


def test_retry_takes_documents_out_of_quarantine_when_their_fault_is_over(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path
) -> None:
    path, run = audit(error_budget=1.0), tmp_path / "run"
    orders.give(busy=True)
    assert "no calibration documents" in done(here("run", path), 2).line
    orders.give()
    recorded("retry", "run", path, "--retry", "model_error")
    check_same(run, reference, *FEW)


def test_exit_codes_0_2_and_3_of_run_and_status(audit: Audit, reference: Path, tmp_path: Path) -> None:
    path, run = audit(error_budget=0.0), tmp_path / "run"
    assert "no file" in done(here("run", path, "--set", "corpus.audit.path=none.jsonl"), 2).line
    assert done(here("status", tmp_path / "nothing"), 2).line
    assert done(here("nonsense"), 2).err
    assert done(here("run", path), 3).line
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 3)
    assert not (run / "selection").exists()
    done(here("status", run), 3)
    done(here("run", path, "--set", "error_budget=0.2"))
    check_same(run, reference, *FEW)
    done(here("status", run))


def test_exit_codes_4_and_5(world: Path, second: Path, contradicted: Path, scanned: Path, copied: Path) -> None:
    done(here("select", second, "--fail-if-selected"), 4)
    done(here("select", second))
    done(here("select", contradicted, "--fail-if-selected"), 5)
    done(here("verdict", contradicted, "--fail-if-trained"), 5)
    done(here("verdict", copied, "--fail-if-trained"), 4)
    done(here("series", scanned, "--fail-if-new"), 4)
    done(here("run", world / "contradicted.yaml", "--fail-if-selected"), 5)
    assert json.loads((contradicted / "status.json").read_text())["exit_code"] == 5


def test_exit_code_75_of_a_second_driver_while_the_first_goes_on(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path
) -> None:
    orders.give(seconds=0.3)
    path, run = audit(), tmp_path / "run"
    first = begin("run", path)
    wait_for(lambda: list((run / "receipts/score").glob("*.json")), first)
    process = psutil.Process(first.pid)  # with plugins it works in a child
    pids = {str(one.pid) for one in (process, *process.children())}
    for arguments in (("run", path), ("select", run), ("run", path, "--retry", "all")):
        assert pids.intersection(done(here(*arguments), 75).line.split())
    assert done(here("status", run, "--json")).json["state"] == "running"
    orders.give()
    done(end_of(first))
    check_same(run, reference, *FEW)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_exit_code_130_of_a_run_that_goes_on_to_the_same_bytes(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path, number: signal.Signals
) -> None:
    orders.give(seconds=0.3)
    path, run = audit(resources={"actors": 2}), tmp_path / "run"
    process = begin("run", path)
    wait_for(lambda: list((run / "receipts/score").glob("*.json")), process)
    process.send_signal(number)
    assert done(end_of(process), 130).line
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("incomplete", 130)
    orders.give()
    done(here("run", path))
    check_same(run, reference, *FEW)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_watch_that_is_interrupted_ends_with_130_and_leaves_the_run_alone(
    audit: Audit, orders: Orders, tmp_path: Path
) -> None:
    orders.give(seconds=0.3)
    run = begin("run", audit())
    wait_for(lambda: list((tmp_path / "run/receipts/score").glob("*.json")), run)
    watch = begin("status", tmp_path / "run", "--watch", "--json")
    assert watch.stdout is not None
    assert json.loads(watch.stdout.readline())["state"] == "running"
    watch.send_signal(signal.SIGINT)
    done(end_of(watch), 130)
    orders.give()
    done(end_of(run))
