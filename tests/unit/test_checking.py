"""The documents are checked in a process of its own, which imports, answers and ends beside the one that waits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.small_model import WORDS
from pipeline.audit.description import load_config
from pipeline.audit.plan import Plan, make_plan
from pipeline.audit.precheck import RUN, CheckProcess, check_documents

HEAVY = ("datasketch", "pandas", "scipy", "sklearn", "torch", "transformers")
CHECK = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts into the background without
from pipeline.audit.description import load_config
from pipeline.audit.plan import make_plan
from pipeline.audit.precheck import RUN, CheckProcess
config, heavy, blocked = json.loads(sys.argv[1])
plan = make_plan(load_config(config, ()))
if blocked:
    os.unlink(blocked)
    os.mkfifo(blocked)
record = CheckProcess(plan, RUN).result()
print(json.dumps([record.plain(), sorted(set(heavy) & set(sys.modules))]))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An audit whose roles share two documents, and whose audited documents repeat an id."""
    texts = [" ".join(WORDS[(7 * row + step * step) % len(WORDS)] for step in range(30 + row % 9)) for row in range(90)]
    for name, some in (("audit", texts[:52]), ("unseen", texts[50:])):
        rows = [{"id": f"{name}-{max(row, 1)}", "text": text} for row, text in enumerate(some)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "audit.yaml"
    path.write_text(
        f"run: {tmp_path}/run\nmodel: {{path: ./model}}\ndetectors: [loss]\n"
        f"corpus: {{audit: {{path: {tmp_path}/audit.jsonl, id: id}}, unseen: {{path: {tmp_path}/unseen.jsonl}}}}\n"
    )
    return path


def plan_of(config: Path) -> Plan:
    return make_plan(load_config(str(config), ()))


def starter(config: Path, blocked: str = "") -> subprocess.Popen[str]:
    arguments = json.dumps([str(config), HEAVY, blocked])
    return subprocess.Popen([sys.executable, "-c", CHECK, arguments], stdout=subprocess.PIPE, text=True)


def test_the_record_is_the_same_and_the_waiting_process_imports_nothing_large(config: Path) -> None:
    with starter(config) as process:
        output, _ = process.communicate(timeout=120)
    record, imported = json.loads(output)
    here = check_documents(plan_of(config), RUN)
    assert here.overlap["unseen"].n_calibration
    assert here.duplicates.count
    assert json.dumps(record) == json.dumps(here.plain())
    assert not imported


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/true", "/bin/false"])
def test_without_a_process_the_documents_are_checked_here(
    executable: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    plan = plan_of(config)
    assert CheckProcess(plan, RUN).result() == check_documents(plan, RUN)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_the_one_that_waits_for_it(number: signal.Signals, config: Path) -> None:
    with starter(config, str(config.with_name("unseen.jsonl"))) as process:
        waiting = psutil.Process(process.pid)
        while not (children := waiting.children()):
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
