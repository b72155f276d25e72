"""Below `uv run` a private cluster uploads nothing, and a shared one is left to Ray."""

import os
import subprocess
import sys
from pathlib import Path

from ray_jobs.cluster import UV_VARIABLE

PROBE = """
from ray_jobs.cluster import connect
connect()
import os, ray
print(ray.get_runtime_context().runtime_env == {}, ray.get(ray.remote(lambda: os.getcwd()).remote(), timeout=120))
"""

SHARED = f"""
import os
from pipeline.errors import UserError
from ray_jobs.cluster import connect
try:
    connect()
except UserError as error:
    print({UV_VARIABLE!r} in os.environ, error)
"""


def test_a_private_cluster_below_uv_run_uploads_no_folder(tmp_path: Path) -> None:
    """Ray looks for an ancestor with this command line: a shell that runs the script `run` under the name uv."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "run").write_text(f"{sys.executable} probe.py\nexit $?\n")
    with (tmp_path / "larger-than-an-upload.bin").open("wb") as file:
        file.truncate(600 << 20)
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", UV_VARIABLE)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command, shell = ["uv", "run"], "/bin/sh"
    result = subprocess.run(
        command, executable=shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == f"True {tmp_path}\n", result.stderr


def test_a_shared_cluster_keeps_the_default_of_ray() -> None:
    """In a process of its own: in that of the tests Ray may be connected to a cluster."""
    environment = {name: value for name, value in os.environ.items() if name != UV_VARIABLE}
    environment |= {"RAY_ADDRESS": "127.0.0.1:9", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", SHARED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.startswith("False no Ray cluster answers at RAY_ADDRESS"), result.stderr
