"""The worked examples of CONTRIBUTING.md run, on a cluster whose workers cannot see the user's file."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from pipeline.config.models import ModelConfig
from pipeline.errors import ExitCode, IncompleteError, StopError, UserError
from pipeline.models.load import open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from pipeline.plan.description import load_config
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter
from ray_jobs.supervisor import note_cluster
from tests.helpers.clusters import start_cluster
from tests.helpers.finished import rows, run
from tests.helpers.made_up import MakeAudit, write_audit

pytestmark = pytest.mark.usefixtures("forgotten_plugins")

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
ALPHA = ["selections.0.alpha=0.48"]  # lets some of these documents be selected
COLUMNS = ["log_prob_quantile(share=0.05)", "log_prob_quantile(share=0.1)"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", CONTRIBUTING.read_text(), re.S)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """A cluster of two nodes of one CPU each, and no more room on the first than on the second."""
    import ray
    from ray.cluster_utils import Cluster

    session = ray.is_initialized()
    if session:
        ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    note_cluster("", {})  # the runs of other tests do not depend on it
    ray.shutdown()
    cluster.shutdown()
    if session:  # the tests after these go on with the session's cluster
        start_cluster()


def example(folder: Path, model: Path) -> Path:
    """The file of the worked example, and an audit as its YAML says."""
    (folder / "elsewhere").mkdir()
    plugin = folder / "elsewhere" / "my_detectors.py"
    plugin.write_text("\n\n".join(blocks("python")))
    settings: dict[str, Any] = {}
    for block in blocks("yaml"):
        settings |= yaml.safe_load(block)
    settings["import"] = [str(plugin)]
    return write_audit(folder, model, **settings, resources={"cluster": "ray", "shard_bytes": 500, "actors": 2})


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_plugin_that_a_worker_cannot_import_is_one_line(tmp_path: Path, tiny_model_folder: Path) -> None:
    path = example(tmp_path, tiny_model_folder)
    plugin = tmp_path / "elsewhere" / "my_detectors.py"
    driver = f"import os\nif os.getpid() != {os.getpid()}:\n    import only_on_the_driver\n"
    plugin.write_text(driver + plugin.read_text())
    with pytest.raises(IncompleteError) as caught:
        run(path, "resources.actors=1")
    message = str(caught.value)
    assert "\n" not in message
    assert f"import: {plugin}, line 3: cannot be imported: ModuleNotFoundError" in message


LEAVING = """
import sys
from seenset import FORWARD, detector

@detector(needs={FORWARD: ["log_prob"]})
def leaving(evidence):
    sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_detector_that_exits_on_an_actor_ends_the_run_with_its_first_documents(
    tmp_path: Path, make_audit: MakeAudit
) -> None:
    (tmp_path / "mine.py").write_text(LEAVING)
    settings = {"detectors": ["leaving"], "selections": [], "import": [str(tmp_path / "mine.py")]}
    path = make_audit(**settings, resources={"cluster": "ray"})
    with pytest.raises(StopError, match=r"failed with one message: sys\.exit\(0\) was called; correct") as caught:
        run(path)
    assert caught.value.exit_code == ExitCode.USER_ERROR
    assert json.loads((tmp_path / "run/status.json").read_text())["message"] == str(caught.value)
    (tmp_path / "mine.py").write_text(LEAVING.replace("sys.exit(0)", "return evidence[FORWARD].log_prob.sum(1)"))
    assert run(path).status.scored == 100, "in the same directory"


@pytest.mark.slow
@pytest.mark.usefixtures("two_nodes")
def test_the_worked_example_runs_on_two_nodes_that_do_not_have_the_file(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    path = example(tmp_path, tiny_model_folder)
    plugin = tmp_path / "elsewhere" / "my_detectors.py"
    source = plugin.read_text()
    config = load_config(str(path), ALPHA)
    plugin.unlink()
    assert run_audit(config, Reporter(Console(), quiet=True)).exit_code == ExitCode.DONE

    scored = rows(tmp_path / "run")
    assert len(scored) == 100
    model = open_model(ModelConfig(path=str(tiny_model_folder)))
    document = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[7])
    ids = [tokens.ids for tokens in tokenize(model.tokenizer, [document["text"]], 1024)]
    log_prob = forward(model, ids, frozenset({"log_prob"})).log_prob.double()
    for column, share in zip(COLUMNS, (0.05, 0.1), strict=True):
        expected = torch.quantile(log_prob, share).item()
        assert scored[document["id"]][column] == pytest.approx(expected, rel=1e-5)

    summary = json.loads((tmp_path / "run" / "selection" / "members" / "summary.json").read_text())
    assert (summary["procedure"], summary["guarantee"], summary["null_proportion"]) == ("bh_half", "finite-sample", 0.5)
    assert "at most half of the audited documents are nulls" in summary["assumption"]
    documents = pq.read_table(tmp_path / "run" / "selection" / "members" / "documents").to_pylist()
    p = sorted(row["p_value"] for row in documents)
    chosen = max([k for k in range(1, 61) if p[k - 1] <= 0.48 * k / (0.5 * 60)], default=0)
    assert summary["n_selected"] == sum(row["selected"] for row in documents) == chosen > 0
    assert (tmp_path / "run" / "report" / "report.html").exists()

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["import"] == [str(plugin)]
    assert list(manifest["fingerprint"]["plugins"]) == ["my_detectors.py"]

    plugin.write_text(source + "\n# another text\n")
    with pytest.raises(UserError, match="other settings: plugins: "):
        run(path, *ALPHA)
    plugin.write_text(source)
    assert run(path, *ALPHA).exit_code == ExitCode.DONE
