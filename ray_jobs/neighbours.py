"""Who else may reach a cluster: a local one is closed to other users of the machine, a shared one may need no token."""

from __future__ import annotations

import atexit
import fcntl
import glob
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from pipeline.audit.machine import usable_cores
from pipeline.config.audit import ResourcesConfig
from pipeline.errors import UserError
from ray_jobs.supervisor import note_cluster, note_folder

PREFIX = "seenset-ray-"
INNER = "ray"
LONGEST_FOLDER = 107 - len(f"/{INNER}/session_2026-11-22_11-32-39_446239_4194304/sockets/plasma_store")
"""Bytes of a folder in which the path of a Unix socket of Ray still fits its 107 bytes."""

PROBE_SECONDS = 30.0
_PROBE = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=canonicalize_bootstrap_address(sys.argv[1])).internal_kv_get(b"session_name", b"session")
except AuthenticationError:
    print("closed")
else:
    print("open")
"""


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder that only this user may enter, for as long as this process lives."""

    path: str
    lock: int  # descriptor of a file that this process holds locked: whoever can lock it knows that the process is gone


_folders: list[PrivateFolder] = []
_token = secrets.token_hex(32)  # of all clusters that this process starts


def start_private_cluster() -> None:
    """Start a cluster on this machine that nobody else can join, and that joins no other.

    Its files are in a folder of mode 0700, all that listens does so on the loopback interface, and who connects needs
    a token that is in that folder (unless RAY_AUTH_MODE says otherwise). The folder is removed when the process ends,
    or, of a process that was killed, by the next one.

    Raises:
        UserError: RAY_TMPDIR is too long for the names of sockets.
        Exception: of many kinds: Ray did not start.
    """
    folder = _private_folder()
    note_folder(folder.path)
    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(folder.path, "token")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # workers that train together
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()  # else the token of a cluster before this one
    everywhere = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # so the node's address is the loopback one, as it always is on a Mac
    try:
        ray.init(
            address="local",
            num_cpus=usable_cores(),  # Ray counts those of the machine, whatever this process may use
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
            _temp_dir=os.path.join(folder.path, INNER),  # which Ray opens to everybody: the folder around it is closed
        )
    except BaseException:
        ray.shutdown()
        _remove(folder)
        raise
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = everywhere
    _folders.append(folder)
    atexit.register(_end)  # runs before Ray's own, which was registered earlier


def _private_folder() -> PrivateFolder:
    """A new folder with a lock and a token in it."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    most = LONGEST_FOLDER - len(f"/{PREFIX}12345678")
    if len(os.fsencode(os.path.abspath(base))) > most:
        if os.environ.get("RAY_TMPDIR"):
            raise UserError(f"RAY_TMPDIR may have {most} bytes, for the names of sockets in it, got {base}")
        base = "/tmp"
    remove_old_folders(base)
    path = tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(base))  # mode 0700
    lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(os.path.join(path, "token"), "w", encoding="utf-8") as file:
        file.write(_token)
    return PrivateFolder(path, lock)


def remove_old_folders(base: str) -> None:
    """Remove what killed processes of this user left: the private folders in `base` whose lock nobody holds."""
    for path in glob.glob(os.path.join(glob.escape(base), f"{PREFIX}*")):
        try:
            if os.lstat(path).st_uid != os.geteuid() or os.path.islink(path):
                continue
            with open(os.path.join(path, "lock"), encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # held, or just being made or removed
            continue


def _remove(folder: PrivateFolder) -> None:
    shutil.rmtree(folder.path, ignore_errors=True)
    os.close(folder.lock)


def _end() -> None:
    """End the cluster and remove its folder."""
    import ray

    note_cluster("", {})
    ray.shutdown()
    while _folders:
        _remove(_folders.pop())
    note_folder("")


def cluster_warning(resources: ResourcesConfig) -> str | None:
    """One line if the cluster that RAY_ADDRESS names lets anybody in; None if it asks for a token, or cannot be asked.

    It is asked by another process, without a token: in this one Ray would send that of the user.

    Args:
        resources: of the audit, which may need no cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if resources.cluster == "local" or address in ("", "local") or address.startswith("ray://"):
        return None
    hidden = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    command = [sys.executable, "-c", _PROBE, address]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if done.stdout.strip() != "open":
        return None
    return (
        f"warning: the cluster at RAY_ADDRESS {address} asks for no token: whoever reaches its ports runs code as its "
        "user, and so reads and changes this audit; start it with RAY_AUTH_MODE=token"
    )
