"""Commands on a cluster of two nodes for real."""

import json
from typing import Any

from tests.helpers.clusters import output_of

SCRIPT = """
import json, os, subprocess, sys
from ray.cluster_utils import Cluster

head, other, commands = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
cluster.add_node(include_dashboard=False, **other)
cluster.wait_for_nodes()
environment = {**os.environ, "RAY_ADDRESS": cluster.address, "COLUMNS": "250"}
for command in commands:
    words = [sys.executable, "-m", *command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    print(json.dumps([done.returncode, done.stdout, done.stderr]))
cluster.shutdown()
"""


def on_two_nodes(
    head: dict[str, Any], other: dict[str, Any], *commands: list[str], **environment: str
) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each command, beside nodes of these settings."""
    lines = output_of(SCRIPT, json.dumps([head, other, commands]), seconds=550, **environment).splitlines()
    return [tuple(json.loads(line)) for line in lines if line.startswith("[")]
