"""Clusters of several nodes that come, go, and differ in speed: the same bytes, and nobody waits for the slowest."""

import json
from pathlib import Path

import pytest

from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from tests.helpers.clusters import output_of
from tests.helpers.finished import run, selection_digest
from tests.helpers.made_up import MakeAudit

pytestmark = pytest.mark.slow

ASLEEP = 240
"""Seconds that the slow node takes for each batch: longer than all else that these tests do."""

PLUGIN = """
import os, time
from torch import Tensor
from seenset import FORWARD, Evidence, detector

@detector(needs={FORWARD: ["log_prob"]})
def mean_of_all(evidence: Evidence) -> Tensor:
    node = os.environ.get("NODE_OF_TEST")
    if node:
        with open(os.environ["NOTES_OF_TEST"], "a+") as notes:
            notes.write(node + "\\n")
            notes.flush()
            notes.seek(0)
            nodes = set(notes.read().split())
        waits = node != "any" and not {"leaving", "slow", "late"} <= nodes
        time.sleep(float(os.environ["ASLEEP_OF_TEST"]) if node == "slow" else 4 if waits else 0.3)
    tokens = evidence[FORWARD]
    return tokens.log_prob.double().masked_fill(~tokens.mask, 0.0).sum(dim=1)
"""

COME_AND_GO = """
import json, os, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from pipeline.plan.description import load_config
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter

audit, folder = sys.argv[1], Path(sys.argv[2])

def node_named(name):
    return {"num_cpus": 1, "env_vars": {"NODE_OF_TEST": name}}

cluster = Cluster(initialize_head=True, head_node_args={**node_named("head"), "include_dashboard": False})
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")  # on the head: it outlives the others
leaving = cluster.add_node(**node_named("leaving"))
cluster.add_node(**node_named("slow"))
cluster.wait_for_nodes()
lost = []

def receipts():
    return len(list((folder / "receipts" / "score").glob("*.json")))

class Changing(Reporter):
    # Adds a node when the run has begun, and takes another one away when all were used; Ray wants the main thread.

    added = False

    def update(self, counts, last=False):
        notes = Path(os.environ["NOTES_OF_TEST"])
        if not self.added and receipts():
            self.added = True
            cluster.add_node(**node_named("late"))
        elif self.added and not lost and {"leaving", "slow", "late"} <= set(notes.read_text().split()):
            cluster.remove_node(leaving, allow_graceful=False)
            lost.append(receipts())
        super().update(counts, last)

began = time.monotonic()
settings = [f"run={folder}", "resources.cluster=ray", "resources.actors=auto"]
outcome = run_audit(load_config(audit, settings), Changing(Console(), quiet=True))
print(json.dumps({"code": outcome.exit_code, "lost_at": lost, "seconds": time.monotonic() - began}))
ray.shutdown()
cluster.shutdown()
"""


ONLY_HERE = """
import json, os, sys
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from pipeline.plan.description import load_config
from pipeline.errors import UserError
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter

def hide():
    import os
    hidden, exists, is_dir = os.environ.get("HIDDEN_OF_TEST"), os.path.exists, os.path.isdir
    if hidden:
        from pathlib import Path
        stat = os.stat
        def away(path, *rest, **settings):
            if isinstance(path, (str, os.PathLike)) and str(path).startswith(hidden):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return stat(path, *rest, **settings)
        os.stat = away
        for name, function in (("exists", exists), ("isdir", is_dir)):
            setattr(os.path, name, lambda path, function=function: not str(path).startswith(hidden) and function(path))
        Path.stat = lambda self, **settings: away(str(self), **settings)

audit, model = sys.argv[1:]
os.environ["NODE_OF_TEST"] = "head"  # which takes its time: the other node is to be asked
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1, env_vars={"HIDDEN_OF_TEST": model})
cluster.wait_for_nodes()
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR",
         runtime_env={"worker_process_setup_hook": hide})
try:
    run_audit(load_config(audit, ["resources.cluster=ray", "resources.actors=2"]), Reporter(Console(), quiet=True))
    print(json.dumps(None))
except UserError as error:
    print(json.dumps([int(error.exit_code), str(error)]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture
def audit(make_audit: MakeAudit, tmp_path: Path) -> Path:
    """An audit of some thirty shards with a detector that takes its time, and its answer in one process."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    settings = {"detectors": ["loss", "mean_of_all"], "import": [str(tmp_path / "plugin.py")]}
    path = make_audit(90, 60, **settings, resources={"shard_bytes": 500})
    run(path, f"run={tmp_path / 'here'}", "resources.cluster=local")
    return path


def outcome_of(script: str, *arguments: Path) -> dict[str, object]:
    """What a script prints last, as JSON."""
    notes = {"NOTES_OF_TEST": str(arguments[0].parent / "notes"), "ASLEEP_OF_TEST": str(ASLEEP)}
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_reconnect_timeout_s": "25"}
    return json.loads(output_of(script, *arguments, seconds=300, **notes, **ray).splitlines()[-1])  # type: ignore[no-any-return]


def test_a_late_node_is_used_a_lost_one_not_missed_and_the_slowest_not_waited_for(audit: Path, tmp_path: Path) -> None:
    outcome = outcome_of(COME_AND_GO, audit, tmp_path / "there")
    assert outcome["code"] == 0
    assert outcome["lost_at"], "a node was lost in mid-run"
    assert set((tmp_path / "notes").read_text().split()) == {"head", "leaving", "slow", "late"}
    assert float(str(outcome["seconds"])) < ASLEEP
    assert selection_digest(tmp_path / "there") == selection_digest(tmp_path / "here")
    receipts = list(read_receipts(Store(str(tmp_path / "there")), "score"))
    assert sum(receipt.n_scored for receipt in receipts) == 150
    assert not any(receipt.n_quarantined for receipt in receipts)


def test_a_model_that_one_node_lacks_is_one_line_with_the_node_and_the_mend(
    audit: Path, tiny_model_folder: Path
) -> None:
    code, message = outcome_of(ONLY_HERE, audit, tiny_model_folder)  # type: ignore[misc]
    assert code == 3
    assert "\n" not in message
    assert message.startswith("node 1")
    assert str(tiny_model_folder) in message
    assert "every node needs" in message
