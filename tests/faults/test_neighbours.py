"""Another user of the machine, or of the network, finds nothing of a run: no port, no file, no key, no way in."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError
from ray_jobs.cluster import PREFIX, cluster_warning, private_folder
from ray_jobs.supervisor import note_cluster
from tests.helpers.clusters import output_of, shared_cluster, until, words_of
from tests.helpers.commands import printed
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.openai_server import openai_server

SEENSET = [sys.executable, "-m", "ray_jobs.cli"]
KEY = "sk-sesame-1f2e3d"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@contextlib.contextmanager
def somebody_else() -> Iterator[tuple[str, list[None]]]:
    """A cluster that another user offers: its address, and an entry a visit."""
    visits: list[None] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def count() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visits.append(server.accept()[0].close())

        threading.Thread(target=count, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", visits


@pytest.mark.slow
def test_a_neighbour_sees_no_port_no_file_and_no_key_of_a_run_on_a_local_cluster(
    make_audit: MakeAudit, short_folder: Path
) -> None:
    """Of a run that asks an endpoint, of a user whose home cannot be written."""
    settings = {"detectors": [{"samia_zlib": {"draws": 2}}], "selections": [], "resources": {"cluster": "ray"}}
    listening: dict[str, set[str]] = defaultdict(set)  # command -> addresses
    children, with_key, modes = set[int](), set[str](), set[int]()

    def look_at(process: psutil.Process) -> None:
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                name = " ".join(member.cmdline())[:80]
                if member.pid != process.pid and member.cmdline() != process.cmdline():  # the command, or its child
                    children.add(member.pid)
                    if KEY.encode() in Path(f"/proc/{member.pid}/environ").read_bytes():
                        with_key.add(name)
                listening[name] |= {port.laddr.ip for port in member.net_connections() if port.status == "LISTEN"}
        modes.update(stat.S_IMODE(path.stat().st_mode) for path in short_folder.glob(f"{PREFIX}*"))

    with openai_server(key=KEY, models=["stub"]) as server, somebody_else() as (address, visits):
        path = make_audit(12, 8, model={"endpoint": server.url, "name": "stub"}, **settings)
        (short_folder / "ray").mkdir()
        (short_folder / "ray/ray_current_cluster").write_text(address)
        hidden = ("RAY_AUTH_MODE", "RAY_ADDRESS", "XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"SEENSET_API_KEY": KEY, "RAY_TMPDIR": str(short_folder), "HOME": "/dev/null"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([*SEENSET, "run", str(path)], env=environment, text=True, **pipes)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                look_at(psutil.Process(process.pid))
            time.sleep(0.2)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert visits == [], "a cluster that a file of anybody names is not joined"
    for name in ("gcs_server", "raylet", "DashboardAgent"):  # the last exports the metrics
        assert any(name in command for command in listening)
    assert {name: sorted(ips - LOOPBACK) for name, ips in listening.items() if ips - LOOPBACK} == {}
    assert (modes, list(short_folder.glob(f"{PREFIX}*"))) == ({0o700}, [])
    assert len(children) > 6, "the cluster's processes and its workers"
    assert with_key == set()
    assert "Traceback" not in output, "no home is needed"
    assert not [line for line in output.splitlines() if line.startswith("seenset:")]


def test_a_temporary_folder_too_long_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 60)
    with pytest.raises(UserError, match=r"RAY_TMPDIR may have \d\d bytes"):
        private_folder()


def test_a_temporary_folder_of_the_system_too_long_for_sockets_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Path(private_folder())
    assert str(folder).startswith(f"/tmp/{PREFIX}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_shared_cluster_without_a_token_is_told_by_plan_and_one_with_it_is_not(
    make_audit: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_audit(9, 9))
    resources = ResourcesConfig()
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    with shared_cluster("--include-dashboard=false", RAY_AUTH_MODE="disabled") as (address, _):
        monkeypatch.setenv("RAY_ADDRESS", address)
        warning = cluster_warning(resources)
        assert warning is not None
        assert f"RAY_ADDRESS {address} requires no token" in warning
        assert warning in printed(capsys, "plan", path, "--set", "resources.cluster=auto")[1]
        assert cluster_warning(resources.model_copy(update={"cluster": "local"})) is None
        ray.shutdown()  # to which `plan` has connected this process: Ray would end it with the cluster
        note_cluster("", {})
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with shared_cluster("--include-dashboard=false", RAY_AUTH_MODE="token") as (address, _):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert cluster_warning(resources) is None


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["head", "gcs_server", "raylet"])
def test_a_lost_head_node_ends_with_exit_3_and_says_how_to_go_on(
    lost: str, make_audit: MakeAudit, tmp_path: Path
) -> None:
    texts = [sentence(i, 60) for i in range(4000)], [sentence(10_000 + i) for i in range(40)]
    path = str(make_audit(*texts, resources={"cluster": "ray", "shard_bytes": 4000, "actors": 2}))
    with shared_cluster("--include-dashboard=false", RAY_AUTH_MODE="disabled") as (address, processes):
        environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
        environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "35"  # a head node counts as lost after 15 s
        driver = subprocess.Popen(
            [*SEENSET, "run", path], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until(lambda: list((tmp_path / "run/receipts/score").glob("*.json")), 180)
        for process in processes:
            if lost == "head" or lost in words_of(process)[0]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        output, errors = driver.communicate(timeout=180)
    assert "requires no token" in output
    assert (driver.returncode, errors.count("\n")) == (3, 1), errors
    assert errors.startswith("seenset: the cluster at ")
    assert "run the same command to go on" in errors
    assert list((tmp_path / "run/receipts/score").glob("*.json")), "what is finished is kept"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sets the CPUs of a process")
def test_a_local_cluster_has_the_cpus_that_the_process_may_use() -> None:
    code = (
        "import os, ray; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from ray_jobs.cluster import connect; connect(); print(int(ray.cluster_resources()['CPU']))"
    )
    assert output_of(code, seconds=120).split()[-1:] == ["1"]
