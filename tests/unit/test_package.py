"""The package as a whole: its layering, and the wheel in an environment of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "pipeline").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_under_pipeline_imports_ray(path: Path) -> None:
    assert not imported(path) & {"ray", "ray_jobs"}


def test_importing_all_of_pipeline_loads_no_ray() -> None:
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in sorted((ROOT / "pipeline").rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_wheel_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next(tmp_path.glob("seenset-*.whl"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "torch==2.13.0",
        str(wheel),
        "-c",
        "constraints.txt",
    ]
    done = subprocess.run(install, capture_output=True, text=True, cwd=ROOT)
    if done.returncode and ("Connection" in done.stderr or "No matching distribution" in done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    command = tmp_path / "env" / "bin" / "seenset"
    shown = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert all(name in shown for name in ("plan", "run", "status", "select", "report"))
    code = "import pipeline.report, ray_jobs.audit, pathlib; p = pathlib.Path(pipeline.report.__file__)\n"
    code += "assert 'env' in str(p) and list(p.parent.glob('*.html'))"
    subprocess.run([str(python), "-c", code], check=True, cwd=tmp_path)
