"""The package as a whole: its layering, and the wheel in an environment of its own."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SHIPPED = ("pipeline", "ray_jobs", "cluster", "seenset")
OPTIONAL = {"triton", "ipython"}
"""What needs them is imported only where they are: triton comes with torch for a GPU, IPython with a notebook."""


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_pipeline_imports_no_ray_and_commands_on_a_finished_run_load_no_torch() -> None:
    assert [path for path in (ROOT / "pipeline").rglob("*.py") if imported(path) & {"ray", "ray_jobs"}] == []
    modules = "ray_jobs.select, ray_jobs.commands, pipeline.report.page, pipeline.answers.verdict"
    heavy = {"torch", "transformers", "ray", "matplotlib.pyplot"}
    code = f"import sys, {modules}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(("given", "expected"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_that_wait_sleep_unless_the_user_decides_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    code = "import sys, seenset, os, pipeline; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", expected]


def test_everything_imported_comes_with_a_declared_package() -> None:
    """An import that works here only because a test's package brings it would fail at a user's."""
    places = packages_distributions()
    shipped = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    names = set().union(*map(imported, shipped)) - set(sys.stdlib_module_names) - {*SHIPPED, "__future__"}
    extras = PROJECT["project"]["optional-dependencies"]
    users = (line for name in ("deepspeed", "inspect", "quantization", "s3", "gs") for line in extras[name])
    declared = packages_in([*PROJECT["project"]["dependencies"], *users]) | OPTIONAL
    missing = {name for name in names if not {_plain(each) for each in places.get(name, [name])} & declared}
    assert missing == set()


def packages_in(lines: Iterable[str]) -> set[str]:
    """The names of the packages in lines of requirements."""
    return {_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}


@pytest.mark.parametrize(("package", "extra"), [("s3fs", "s3"), ("gcsfs", "gs")])
def test_a_missing_package_of_an_extra_is_named_with_the_extra(package: str, extra: str) -> None:
    url = f"{extra}://bucket/run"
    code = f"import sys; sys.modules[{package!r}] = None; from ray_jobs.cli import main; main(['status', {url!r}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    line = f"seenset: cannot open run directory {url}: {package} is not installed: pip install 'seenset[{extra}]'"
    assert (done.returncode, done.stderr.strip()) == (2, line)


def test_the_page_of_an_installation_states_the_size_of_every_package() -> None:
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    table = page[page.index("| package | MB |") :]
    stated = [name for row in re.findall(r"^\| (`[^|]+)\|", table, re.MULTILINE) for name in re.findall("`(.+?)`", row)]
    assert sorted(stated) == sorted(packages_in(PROJECT["project"]["dependencies"]))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_the_wheel_holds_all_that_it_runs_with(tmp_path: Path) -> None:
    """Installed alone beside the packages that it needs, away from the sources."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next(tmp_path.glob("seenset-*.whl"))
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True, cwd=tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    # A path file's lines are plain folders: the editable project of the other environment is not among them.
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
        return done.stdout

    assert "status" in run(tmp_path / "env" / "bin" / "seenset", "--help")
    code = "import pathlib, pipeline.report, ray_jobs.audit, seenset; p = pathlib.Path(pipeline.report.__file__)\n"
    code += "assert 'env' in p.parts and list(p.parent.glob('*.html')) and list(p.parent.glob('*.css'))"
    run(python, "-c", code)


def test_the_wheel_names_every_package() -> None:
    """One that is missing works from the sources, and nowhere else."""
    named = PROJECT["tool"]["setuptools"]["packages"]
    roots = ("cluster", "pipeline", "ray_jobs", "seenset")
    found = {".".join(path.parent.relative_to(ROOT).parts) for root in roots for path in (ROOT / root).rglob("*.py")}
    assert set(named) == found
