"""A node that is lost before its actors work ends the command with exit code 3, and the same command goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clusters import output_of
from tests.helpers.finished import run, selection_digest
from tests.helpers.made_up import MakeAudit

pytestmark = pytest.mark.slow

LOSING = """
import json, sys, threading, time
from pathlib import Path
import ray
import ray_jobs.nodes
from ray.cluster_utils import Cluster
from rich.console import Console
from pipeline.plan.description import load_config
from pipeline.errors import UserError
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter

audit, folder, line, noticed, then = sys.argv[1:]
ray_jobs.nodes.NO_PLACE_SECONDS = {False: 15.0, True: 15.0}  # in place of minutes
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
node = None if line == "never there" else cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()

class Losing(Reporter):
    def say(self, text):
        self.act(text)
        super().say(text)

    def act(self, text):
        global node
        if node is not None and line in text:
            gone, node = node, None
            cluster.remove_node(gone, allow_graceful=False)
            while noticed == "noticed" and any(n["Alive"] and n["NodeID"] == gone.node_id for n in ray.nodes()):
                time.sleep(0.2)

def ended():
    try:
        settings = [f"run={folder}", "resources.cluster=ray", "resources.actors=auto"]
        return int(run_audit(load_config(audit, settings), Losing(Console(), quiet=True)).exit_code), ""
    except UserError as error:
        return int(error.exit_code), str(error)

def lose_with_training():
    while not list(Path(folder).glob("adapters/.*/documents.parquet")):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)

if line == "training":
    threading.Thread(target=lose_with_training, daemon=True).start()
ends = [ended()]
if then == "back":
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ends.append(ended())
print(json.dumps(ends))
ray.shutdown()
cluster.shutdown()
"""

TRAINED: dict[str, Any] = {
    "detectors": ["loss", {"fsd": {"base": "loss"}}],
    "fsd": {"documents": 10, "epochs": 1},
}


@pytest.mark.parametrize(
    ("line", "noticed", "message"),
    [
        ("never there", "", "the cluster has 1 node and no CPU for an actor: "),
        (
            "the model computes in",
            "noticed",
            "1 of the 2 nodes of the cluster is lost, and resources.cpus_per_actor is",
        ),
        ("starting actors", "noticed", "1 of the 2 nodes of the cluster is lost, and resources.cpus_per_actor is"),
        ("starting actors", "", "the nodes of the cluster have not held an actor for "),
    ],
)
def test_a_node_lost_before_its_actors_work_leaves_an_incomplete_run_that_goes_on(
    make_audit: MakeAudit, tmp_path: Path, line: str, noticed: str, message: str
) -> None:
    path = make_audit(30, 20)
    run(path, f"run={tmp_path / 'here'}")
    arguments = (path, tmp_path / "there", line, noticed, "back")
    printed = output_of(LOSING, *arguments, seconds=400, RAY_AUTH_MODE="disabled").splitlines()[-1]
    (code, first), (again, _) = json.loads(printed)
    assert (code, again) == (3, 0)
    assert first.startswith(message)
    assert "run the same command again" in first
    assert "\n" not in first
    assert selection_digest(tmp_path / "there") == selection_digest(tmp_path / "here")


@pytest.mark.parametrize(
    ("line", "noticed", "message"),
    [
        ("the model computes in", "noticed", "1 of the 2 nodes of the cluster is lost, and "),
        ("training", "", "the nodes of the cluster have not held an actor for "),
    ],
)
def test_a_node_lost_before_a_training_has_workers_leaves_an_incomplete_run(
    make_audit: MakeAudit, tmp_path: Path, line: str, noticed: str, message: str
) -> None:
    path = make_audit(30, 60, **TRAINED)
    arguments = (path, tmp_path / "there", line, noticed, "")
    printed = output_of(LOSING, *arguments, seconds=500, RAY_AUTH_MODE="disabled").splitlines()[-1]
    ((code, first),) = json.loads(printed)
    assert code == 3, first
    assert first.startswith(message)
