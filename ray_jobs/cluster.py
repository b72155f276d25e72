"""The Ray cluster of a command: joined at RAY_ADDRESS, or started on this machine without access for others.

All private interfaces of Ray that Seenset needs are used here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from pipeline.config.audit import ResourcesConfig
from pipeline.errors import IncompleteError, UserError, error_line
from pipeline.models.devices import gpus_in_sight
from pipeline.models.weight_dtypes import Processor, processor_here
from pipeline.run.machine import ActorShape, Node, places, usable_cores
from ray_jobs import supervisor

CONNECT_SECONDS = 10
STARTS = 3
REASON_CHARACTERS = 200

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise a thread that lost the cluster would start another
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Default settings of Ray."""

UV_VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""With 1, Ray's default, a driver below `uv run` uploads its folder to the cluster, and workers start by `uv run`."""

HEAD_VARIABLE, HEAD_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
HEAD_MARGIN = 20.0
"""Time before Ray abandons a silent head node at which it counts as lost."""

NODE_SECONDS = 2.0
"""Time without an answer after which the node of this process counts as lost."""

PREFIX = "seenset-ray-"
INNER = "ray"
LONGEST_FOLDER = 107 - len(f"/{INNER}/session_2026-11-22_11-32-39_446239_4194304/sockets/plasma_store")
"""Maximum length of a folder, in bytes, such that the path of a Unix socket of Ray fits its 107 bytes."""

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

PROGRAMS = ("ray", "torch", "transformers", "tokenizers", "peft", "bitsandbytes")
PLUGINS = "seenset.detectors"
"""Entry points of packages that compute scores."""

VERSIONS_SECONDS = 30.0
"""Time limit for the versions of a node."""

PROCESSOR_SECONDS = 120.0
"""Time limit for the GPUs or the processor of a node, where a worker process has to start and import torch."""

NODES_BACK = (
    "what is finished is kept: run the same command again when the cluster has its nodes, or on another cluster"
)

NAMED_NODES = 3
NO_ANSWER = "no answer"
"""Start of the line of a node or a check that exceeded its time limit."""


_folder = ""  # folder of the cluster that this process has started
_connections = 0  # clusters that this process has joined or started so far


def shared_address() -> str:
    """The address of the cluster in RAY_ADDRESS; empty where a cluster would be started on this machine."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def is_connected() -> bool:
    """Whether this process is connected to a cluster; does not import Ray."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def cluster_is_named() -> bool:
    """Whether RAY_ADDRESS names a cluster, or this process is connected to one."""
    return bool(shared_address()) or is_connected()


def connection() -> int:
    """The number of the cluster to which this process is connected, another one after each connection."""
    return _connections


def is_private() -> bool:
    """Whether this process is connected to a cluster that it started itself, which gets no further nodes."""
    return _folder != ""


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine.

    Raises:
        UserError: no cluster answers at RAY_ADDRESS.
        IncompleteError: Ray did not start, several times.
    """
    global _connections
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not shared_address():
        os.environ.setdefault(UV_VARIABLE, "0")  # Ray reads it when it is imported
    import ray
    from ray._private import utils, worker

    # Otherwise reports of a raylet on a lost worker would be mixed with the answer on standard output.
    worker.print_to_stdstream = lambda *lines, **settings: None
    if supervisor.is_listening():  # Ray would handle SIGTERM itself, and exit at any point
        utils.set_sigterm_handler = lambda handler: None
    if is_connected():
        _note_cluster()
        return
    _connections += 1
    _end_private_cluster()  # from an earlier connection
    check_ray_address()
    address, reason = shared_address(), ""
    for attempt in range(1 if address else STARTS):
        time.sleep(attempt)
        supervisor.check()
        try:
            with supervisor.deferred(), _quiet():
                if address:
                    ray.init(log_to_driver=False, logging_level=logging.ERROR)
                else:
                    _start_private_cluster()
                supervisor.handle_signals()
            _note_cluster()
            return
        except UserError:
            raise
        except Exception as error:  # such as a port, a time limit or a lost process
            ray.shutdown()
            reason = error_line(error, REASON_CHARACTERS) or type(error).__name__
    if address:
        raise _no_cluster(address, reason)
    raise IncompleteError(
        f"Ray did not start on this machine in {STARTS} attempts ({reason}); free memory and space in /tmp and run "
        "again, or set resources.cluster: local"
    )


def check_ray_address() -> None:
    """Check that a process listens at RAY_ADDRESS; Ray itself would wait for minutes.

    Raises:
        UserError: no process listens there.
    """
    address = shared_address()
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" or none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at RAY_ADDRESS {address} ({reason}); start it, or unset RAY_ADDRESS to use this "
        "machine alone"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Capture the standard error of Ray's C++ code while it starts, and show it only after a failure."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            messages.seek(0)
            sys.stderr.write(messages.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _note_cluster() -> None:
    """Record the nodes that this process depends on: the head node, and its own, which is not replaced."""
    import ray

    if ray.util.client.ray.is_connected():
        return
    context = ray.get_runtime_context()
    address, here = str(context.gcs_address), context.get_node_id()
    try:
        patience = float(os.environ.get(HEAD_VARIABLE, HEAD_SECONDS))
    except ValueError:
        patience = HEAD_SECONDS
    nodes = {address: max(0.0, patience - HEAD_MARGIN)}
    for node in ray.nodes():
        if node["NodeID"] == here:
            nodes[f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"] = NODE_SECONDS
    supervisor.note_cluster(address, nodes)


def _start_private_cluster() -> None:
    """Start a cluster on this machine that no other process can join, and that joins no other cluster.

    Its files are in a folder of mode 0700, it listens on the loopback interface only, and clients need
    a token in that folder (unless RAY_AUTH_MODE disables it). The folder is removed when the process ends.

    Raises:
        UserError: RAY_TMPDIR is too long for the names of sockets.
        Exception: Ray did not start, for one of many reasons.
    """
    global _folder
    folder = private_folder()
    supervisor.note_folder(folder)
    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(folder, "token")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for workers that train together
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()  # otherwise the token of an earlier cluster is used
    everywhere = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # makes the node's address the loopback one, as always on a Mac
    try:
        ray.init(
            address="local",
            num_cpus=usable_cores(),  # by default Ray counts all CPUs of the machine
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
            _temp_dir=os.path.join(folder, INNER),  # Ray makes it readable for all users, but not the folder around it
        )
    except BaseException:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = everywhere
    _folder = folder
    atexit.register(_end_private_cluster)  # runs before Ray's own, which was registered earlier


def _end_private_cluster() -> None:
    """End the cluster that this process started, and remove its folder."""
    global _folder
    if not _folder:
        return
    import ray

    supervisor.note_cluster("", {})
    ray.shutdown()
    shutil.rmtree(_folder, ignore_errors=True)
    _folder = ""
    supervisor.note_folder("")


def private_folder() -> str:
    """Create a folder of mode 0700 with a token in it, in RAY_TMPDIR or else in the temporary folder.

    Raises:
        UserError: RAY_TMPDIR is too long for the names of sockets.
    """
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    most = LONGEST_FOLDER - len(f"/{PREFIX}12345678")
    if len(os.fsencode(os.path.abspath(base))) > most:
        if os.environ.get("RAY_TMPDIR"):
            raise UserError(f"RAY_TMPDIR may have {most} bytes, for the names of sockets in it, got {base}")
        base = "/tmp"
    path = tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(base))
    with open(os.path.join(path, "token"), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return path


def cluster_warning(resources: ResourcesConfig) -> str | None:
    """A warning if the cluster at RAY_ADDRESS requires no token; None if it does, or does not answer.

    Another process tests it without a token, because Ray would send the user's token in this one.

    Args:
        resources: resources of the audit, which may need no cluster.
    """
    address = shared_address()
    if resources.cluster == "local" or not address or address.startswith("ray://"):
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
        f"warning: the cluster at RAY_ADDRESS {address} requires no token: any client of its ports can run code as its "
        "user, and so read and change this audit; start it with RAY_AUTH_MODE=token"
    )


def alive_nodes() -> dict[str, Mapping[str, Any]]:
    """The nodes of the cluster by name: the address, and the first digits of the id where several share an address."""
    import ray

    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    addresses = [node["NodeManagerAddress"] for node in nodes]
    return {
        address if addresses.count(address) == 1 else f"{address} ({node['NodeID'][:6]})": node
        for address, node in zip(addresses, nodes, strict=True)
    }


def ask_nodes(
    question: Callable[[], Any],
    nodes: Mapping[str, Mapping[str, Any]],
    seconds: float,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Results of a function on each node, by node name, or in one line why there is none.

    A function of this module is sent by value, so that nodes without Seenset, or with another version, answer too.

    Args:
        question: the function to call.
        nodes: nodes from `alive_nodes`.
        seconds: time limit per node.
        options: options of the task, such as its resources.
    """
    if not nodes:
        return {}
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        task: Any = ray.remote(**{"num_cpus": 0, "max_retries": 1, **(options or {})})(lambda question: question())
        pending = {
            name: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                question
            )
            for name, node in nodes.items()
        }
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    ray.wait(list(pending.values()), num_returns=len(pending), timeout=seconds)
    return {name: await_answer(reference, seconds) for name, reference in pending.items()}


def await_answer(reference: Any, seconds: float) -> Any:
    """The result of a task, or in one line why there is none; its time limit has passed."""
    import ray

    try:
        return ray.get(reference, timeout=0.1)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=False)
        return f"{NO_ANSWER} in {seconds:g} s"
    except Exception as error:  # errors of Ray, or of the task
        return failure_reason(getattr(error, "cause", None) or error)


def failure_reason(error: BaseException) -> str:
    """The reason of a failure in one line; the type of an error is named unless it is meant for users."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{error_line(error, 300 - len(kind))}"


def versions_here() -> dict[str, str]:
    """Versions of Python, Seenset, libraries behind scores and installed plugins; missing ones are left out."""
    versions = {"python": platform.python_version()}
    with contextlib.suppress(ImportError):  # the comparison reports a missing package
        versions["seenset"] = str(importlib.import_module("pipeline").__version__)
    for name in PROGRAMS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for entry in metadata.entry_points(group=PLUGINS):
        if entry.dist is not None:
            versions[entry.dist.name] = entry.dist.version
    return versions


def version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """The differing versions of another place, as "transformers 5.1.0 (here 5.2.0)"; empty where there are none.

    A build suffix (`+cpu`, `+cu128`) is no difference, because nodes with and without GPUs may share a run,
    nor is the last number of Python's version.

    Args:
        here: versions of the driver.
        there: versions of a node.
    """
    lines = []
    for name in dict.fromkeys([*here, *there]):
        mine, other = here.get(name), there.get(name)
        if _release(name, mine) != _release(name, other):
            lines.append(f"{name} {other or 'missing'} (here {mine or 'missing'})")
    return lines


def _release(name: str, version: str | None) -> str | None:
    if version is None:
        return None
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def check_versions(driver: Mapping[str, str]) -> None:
    """Check in a worker that its programs have the versions of the driver's.

    Raises:
        UserError: the versions differ.
    """
    _compare_versions(driver, {socket.gethostname(): versions_here()})


def check_node_versions() -> None:
    """Check that the other nodes of the connected cluster have the versions of this process.

    A node that does not answer in time is accepted: a run does without it, or its actors check themselves.

    Raises:
        UserError: versions of nodes differ.
    """
    import ray

    mine = ray.get_runtime_context().get_node_id()
    others = {name: node for name, node in alive_nodes().items() if node["NodeID"] != mine}
    _compare_versions(versions_here(), ask_nodes(versions_here, others, VERSIONS_SECONDS))


def _compare_versions(driver: Mapping[str, str], answers: Mapping[str, Any]) -> None:
    """Raise an error of one line that names the nodes with other versions; missing answers are ignored."""
    lines = {name: version_differences(driver, there) for name, there in answers.items() if isinstance(there, Mapping)}
    others = {name: ", ".join(differing) for name, differing in lines.items() if differing}
    if others:
        listed = "; ".join(f"{name} has {differing}" for name, differing in list(others.items())[:NAMED_NODES])
        more = f"; and {len(others) - NAMED_NODES} more" if len(others) > NAMED_NODES else ""
        raise UserError(
            f"{len(others)} node{'s have' if len(others) > 1 else ' has'} other versions, and would score differently: "
            f"{listed}{more}; install the same on all nodes (python -m cluster.preflight shows all)"
        )


def gpus_of_cluster(gpus: float, same: bool) -> tuple[int, str]:
    """The smallest memory of a GPU of the cluster, in nominal bytes, and the model of one; every node is queried.

    Args:
        gpus: number of GPUs of an actor.
        same: whether all GPUs must be of one model.

    Raises:
        UserError: a node does not answer, sees no GPU, or has another model.
        IncompleteError: a node is lost.
    """
    share = min(1.0, gpus)
    nodes = {name: node for name, node in alive_nodes().items() if node["Resources"].get("GPU", 0.0) >= share}
    cards = ask_nodes(gpus_in_sight, nodes, PROCESSOR_SECONDS, {"num_gpus": share})
    if problems := {name: card for name, card in cards.items() if isinstance(card, str)}:
        name, reason = next(iter(problems.items()))
        if name not in alive_nodes():
            raise IncompleteError(f"the node at {name} was lost before its GPUs were known ({reason}): {NODES_BACK}")
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        hint = "; set resources.gpu_memory to start without this query" if reason.startswith(NO_ANSWER) else ""
        raise UserError(f"GPUs of the node at {name}{more} cannot be used: {reason}{hint}")
    names = sorted({name for _, name in cards.values()})
    if same and len(names) > 1:
        raise UserError(
            f"resources.deterministic needs GPUs of one model, the cluster has {', '.join(names)}: "
            "leave the others out, or set it to false"
        )
    return min(memory for memory, _ in cards.values()), names[0]


def processor_of_cluster(shape: ActorShape) -> Processor:
    """The processor of a node for actors, from one task.

    Args:
        shape: resources of an actor.

    Raises:
        UserError: the task fails, or gets no resources in time.
        IncompleteError: the nodes are lost.
    """
    import ray

    task: Any = ray.remote(num_cpus=shape.cpus, num_gpus=shape.gpus, max_retries=1)(processor_here)
    reference = task.remote(shape.gpus)
    ray.wait([reference], timeout=PROCESSOR_SECONDS)
    answer = await_answer(reference, PROCESSOR_SECONDS)
    if isinstance(answer, str):
        nodes = [
            Node(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)) for node in alive_nodes().values()
        ]
        if not places(nodes, shape):
            raise IncompleteError(f"the nodes were lost before their processor was known ({answer}): {NODES_BACK}")
        raise UserError(
            f"no node states its processor: {answer}; state the type with dtype, such as dtype: float32, to start "
            "without asking"
        )
    return answer
