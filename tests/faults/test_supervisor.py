"""A process that Ray ends from a thread of its own, or that a signal ends, has a parent that says so."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.config.audit import ResourcesConfig
from pipeline.run.machine import may_need_cluster
from tests.helpers.clusters import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child dies with its parent on Linux alone")

BEGIN = """
import ctypes, os, signal, sys, time
from ray_jobs import supervisor
supervisor.begin_command(True)
first = os.getpid()
supervisor.supervise()
assert os.getpid() != first
"""
NAMING = f"""
from pipeline.store.attempts import documents_in_flight
from pipeline.store.files import Store
{BEGIN.replace("supervise()", "supervise(documents=lambda run: documents_in_flight(Store(run)))")}
"""
CONNECTED = "supervisor.note_cluster('10.0.0.7:6379', {})\n"
WORKING = """
try:
    print(os.getpid(), flush=True)
    for _ in range(600):  # a signal just before a sleep is handled after it
        time.sleep(0.1)
except KeyboardInterrupt:
    supervisor.fail('stopped', 130)
"""


def begun(code: str, begin: str = BEGIN) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", begin + code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def number_from(process: subprocess.Popen[str]) -> int:
    """The process id that it prints first."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    return process.wait(60), process.stderr.read() if process.stderr else ""


def ended(code: str, begin: str = BEGIN) -> tuple[int, str]:
    return end_of(begun(code, begin))


@pytest.mark.parametrize(
    "end",
    [
        "ctypes.CDLL(None)._exit(1)",
        "os.abort()",
        "import atexit; atexit.register(os._exit, 0)",
        "ctypes.CDLL(None)._exit(0)",
    ],
)
def test_a_process_that_ray_ends_leaves_exit_3_and_one_line(end: str) -> None:
    code, errors = ended(CONNECTED + end)
    assert code == 3
    assert errors.startswith("seenset: the cluster at 10.0.0.7:6379 is lost: ")
    assert "run the same command to go on" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "code", "errors"),
    [
        ("supervisor.finish(0)", 0, ""),
        ("supervisor.finish(4)", 4, ""),
        ("supervisor.fail('no such file', 2)", 2, "seenset: no such file\n"),
        ("supervisor.leave_at_once('the other node', 3)", 3, "seenset: the other node\n"),
        # what is decided stands, whatever ends the process afterwards, and is said once
        ("import atexit; atexit.register(os._exit, 1); supervisor.finish(0)", 0, ""),
        (
            "supervisor._note(code=2, lines='seenset: no such file\\n'); os.kill(os.getpid(), signal.SIGSEGV)",
            2,
            "seenset: no such file\n",
        ),
    ],
)
def test_what_a_command_decides_or_a_signal_ends_is_how_it_ends(end: str, code: int, errors: str) -> None:
    assert ended(CONNECTED + end) == (code, errors)


@pytest.mark.parametrize(
    ("end", "number", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL, "SIGKILL ended this process, as the system does where "
         "memory is short: rerun the command"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", signal.SIGSEGV, "SIGSEGV ended this process: rerun the command"),
        ("exec(compile('def mine():\\n ctypes.string_at(0)\\nmine()', '/home/a/mine.py', 'exec'))", signal.SIGSEGV,
         "SIGSEGV ended this process in mine (mine.py, line 2): correct that code and rerun the command"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", signal.SIGRTMIN + 3, "signal 37 ended this process: rerun the "
         "command"),
    ],
)  # fmt: skip
def test_a_signal_that_ends_a_command_is_named_in_one_line(end: str, number: int, reason: str) -> None:
    assert ended(CONNECTED + end) == (-number, f"seenset: {reason}\n")


def test_the_documents_of_a_run_that_a_signal_ends_are_named(tmp_path: Path) -> None:
    log = f"""
from pipeline.store.attempts import LOCAL_DRIVER, AttemptLog
AttemptLog(Store({str(tmp_path)!r}), "score/audit-000000", "a.jsonl", LOCAL_DRIVER).enter(NAMES)
AttemptLog(Store({str(tmp_path)!r}), "score/audit-000001", "b.jsonl", "another").enter(["work 1"])
supervisor.note_run({str(tmp_path)!r})
os.kill(os.getpid(), signal.SIGBUS)
"""
    for names, documents in (
        (["batch 3+2", "work 3", "work 17"], "one of 2 documents in rows 3 to 17"),
        (["work 17"], "row 17"),
    ):
        assert ended(log.replace("NAMES", repr(names)), NAMING) == (
            -signal.SIGBUS,
            f"seenset: SIGBUS ended this process at {documents} of a.jsonl; finished shards are kept: rerun the "
            "command, which leaves a document out that does so again and again\n",
        )


def test_an_error_of_python_keeps_its_traceback() -> None:
    code, errors = ended(CONNECTED + "supervisor.note_fault()\nraise LookupError('of ours')")
    assert code == 1
    assert errors.endswith("LookupError: of ours\n")
    assert "seenset:" not in errors


def test_a_process_without_a_cluster_ends_as_it_does_by_itself() -> None:
    assert ended("os._exit(1)") == (1, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_reaches_its_child(number: signal.Signals) -> None:
    process = begun(CONNECTED + WORKING)
    assert number_from(process) != process.pid
    process.send_signal(number)
    assert end_of(process) == (130, "seenset: stopped\n")


LISTEN = """
import socket
head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
supervisor.note_cluster(address, {address: 1.0})
head.close()
"""


def test_a_lost_cluster_ends_a_command_that_goes_on_without_it() -> None:
    code, errors = ended(
        LISTEN
        + """
try:
    for _ in range(600):
        time.sleep(0.1)
        supervisor.check()
except supervisor.IncompleteError as error:
    supervisor.fail(str(error), 3)
"""
    )
    assert code == 3
    assert re.fullmatch(
        r"seenset: the cluster at \S+ is lost: its head node has not answered for \d+ s; what is finished .*\n", errors
    )


def test_an_error_of_a_lost_cluster_names_the_loss() -> None:
    code, errors = ended(
        LISTEN
        + """
try:
    with supervisor.cluster_named():
        raise LookupError("of Ray")
except supervisor.IncompleteError as error:
    supervisor.fail(str(error), 3)
"""
    )
    assert (code, errors.count("\n")) == (3, 1)
    assert " is lost: its head node does not answer; " in errors


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "supervisor.leave_at_once('stopped', 130)"])
def test_what_an_abnormal_end_leaves_of_a_cluster_is_removed(tmp_path: Path, end: str) -> None:
    left = f"""
import subprocess
from pathlib import Path
Path({str(tmp_path / "cluster")!r}).mkdir()
supervisor.note_folder({str(tmp_path / "cluster")!r})
agent = subprocess.Popen(["sleep", "60"])
print(agent.pid, flush=True)
"""
    process = begun(left + end)
    agent = number_from(process)
    process.wait(60)
    assert not (tmp_path / "cluster").exists()
    assert not psutil.pid_exists(agent) or psutil.Process(agent).status() == psutil.STATUS_ZOMBIE


def test_a_signal_while_ray_starts_is_an_interruption() -> None:
    process = begun("signal.signal(signal.SIGTERM, signal.SIG_DFL)\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    number_from(process)
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == (130, "seenset: interrupted; the same command goes on from here\n")


def test_a_child_dies_with_its_parent() -> None:
    process = begun(CONNECTED + WORKING)
    child = psutil.Process(number_from(process))
    process.kill()
    process.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 30)


def test_a_run_that_needs_no_cluster_has_no_second_process() -> None:
    assert not may_need_cluster(ResourcesConfig(cluster="local"))
    assert may_need_cluster(ResourcesConfig(cluster="ray"))
    assert may_need_cluster(ResourcesConfig())
