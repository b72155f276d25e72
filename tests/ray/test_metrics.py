"""The metrics of actors: what a node of a cluster exports for Prometheus, and the dashboard that asks for it."""

import json
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from ray_jobs.actors import COUNTERS, LABELS, WORKERS, run_label
from tests.helpers.clusters import until
from tests.helpers.finished import run
from tests.helpers.made_up import MakeAudit, sentence

NAMES = {f"ray_{name}_total" for name in COUNTERS} | {f"ray_{WORKERS}"}
NODE_LABEL = "NodeAddress"
"""Ray says of every series on which node it was made."""


def series(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of this project's series that a node exports."""
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in NAMES:
                yield sample.name, sample.labels, sample.value


def totals(label: str) -> dict[str, float]:
    """The sums over all nodes and actors of the counters of a run's scoring."""
    import ray

    sums: dict[str, float] = defaultdict(float)
    for node in ray.nodes():
        for name, labels, value in series(node):
            if labels["run"] == label:
                assert labels["stage"] == "score"
                assert labels[NODE_LABEL] == node["NodeManagerAddress"]
                sums[name] += value
    return sums


@pytest.mark.slow
def test_a_node_exports_what_its_actors_did(
    cluster: None, make_audit: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sentence(i, 40) for i in range(120)]
    folder = tmp_path / 'Überprüfung "1"'
    path = make_audit(
        [*texts, "", " ", 7], run=str(folder), resources={"cluster": "ray", "actors": 2}, error_budget=0.5
    )
    began = time.monotonic()
    run(path)
    seconds = time.monotonic() - began
    receipts = list(read_receipts(Store(str(folder)), "score"))
    expected = {
        "ray_seenset_documents_total": sum(receipt.n_in for receipt in receipts),
        "ray_seenset_tokens_total": sum(receipt.tokens for receipt in receipts),
        "ray_seenset_quarantined_total": 3,
    }
    label = run_label(str(folder))
    assert label.isascii()
    until(lambda: all(totals(label)[name] >= expected[name] for name in expected), pause=0.5)
    sums = totals(label)
    for name, least in expected.items():  # what two actors work on at the same time counts for both
        assert least <= sums[name] < 1.5 * least
    assert sums["ray_seenset_quarantined_total"] == 3  # documents of receipts, of which a shard has one
    assert 0 < sums["ray_seenset_working_seconds_total"] < 2 * seconds
    assert 0 < sums["ray_seenset_waiting_seconds_total"] < 2 * seconds

    run(path)  # finished: nothing is counted again
    for receipt in receipts[:2]:
        Store(str(folder)).remove(f"receipts/score/{receipt.shard}.json")
    run(path)
    more = sum(receipt.n_in for receipt in receipts[:2])
    documents = "ray_seenset_documents_total"
    until(lambda: totals(label)[documents] >= expected[documents] + more, pause=0.5)
    assert expected[documents] + more <= totals(label)[documents] < 1.5 * expected[documents] + 2 * more


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("/home/me/runs/articles", "runs/articles"),
        ("s3://bucket/articles/", "bucket/articles"),
        ("articles", "articles"),
        ("/runs/Prüfung\n\udc80", "runs/Pr\\xfcfung \\u27e8U+DC80\\u27e9"),
    ],
)
def test_a_run_is_named_by_the_end_of_its_path_in_characters_that_ray_takes(url: str, label: str) -> None:
    assert run_label(url) == label


@pytest.fixture
def board() -> dict[str, Any]:
    """The dashboard."""
    return json.loads(files("cluster").joinpath("grafana/seenset.json").read_text(encoding="utf-8"))


def test_the_dashboard_asks_for_the_metrics_that_the_code_makes(board: dict[str, Any]) -> None:
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    text, labels = "\n".join(queries), {*LABELS, NODE_LABEL}
    assert set(re.findall(r"ray_\w+", text)) == NAMES
    assert set(re.findall(r"(\w+)=~", text)) == labels
    assert {name for group in re.findall(r"sum by \(([\w, ]+)\)", text) for name in group.split(", ")} <= labels
    variables = {each["name"] for each in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__all"} <= variables


def test_the_dashboard_is_of_the_current_form_and_its_panels_do_not_overlap(board: dict[str, Any]) -> None:
    assert (board["schemaVersion"], board["uid"], board["title"]) == (42, "seenset", "Seenset")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {panel["type"] for panel in board["panels"]} <= {"stat", "timeseries"}
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        area = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in area) < 24
        assert not cells & area
        cells |= area
