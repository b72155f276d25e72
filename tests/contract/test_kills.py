"""Kills and faults of every kind, and then the same command: the bytes of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from answers import check_same, quarantine, receipts, rows
from command import Orders, begin, done, end_of, here, seenset, wait_for
from world import FEW, HIGH, numbered, texts_from, write_config, write_lines

from tests.helpers.object_store import BUCKET, object_store

pytestmark = pytest.mark.slow

Audit = Callable[..., Path]
RERUNS = 6
"""Commands at most until a document that ends each of them is known."""


def filed(run: Path) -> list[Path]:
    """The receipts of the run so far."""
    return list((run / "receipts/score").glob("*.json"))


def rerun(path: Path, code: int) -> int:
    """Run the same command until it is done, each before with an exit code; the number of those before."""
    for count in range(RERUNS):
        ended = seenset("run", path)
        if ended.code == 0:
            return count
        assert ended.code == code, f"exit code {ended.code}\n{ended.err[-3000:]}"
    raise AssertionError(f"not done after {RERUNS} commands: {ended.err[-3000:]}")


def with_one_more(world: Path, name: str, text: str) -> dict[str, Any]:
    """The corpus of the reference, and behind it a file of nine documents the fifth of which is another."""
    texts = texts_from(90_000, 9)
    texts[4] += text
    write_lines(world / f"{name}.jsonl", numbered(name, texts))
    corpus: dict[str, Any] = yaml.safe_load(write_config(world, name).read_text())["corpus"]
    corpus["audit"]["path"].append(f"{name}.jsonl")
    return corpus


def check_culprit(run: Path, reference: Path, name: str) -> None:
    """The document alone has no score, and all documents of the reference have the scores that they have there."""
    scored, expected = rows(run), rows(reference)
    assert {key: scored.get(key) for key in expected} == expected
    assert set(scored) - set(expected) == {f"{name}-{i:03d}" for i in range(9) if i != 4}
    why = {key[0]: reason for key, reason in quarantine(run).items() if key[0].startswith(name)}
    assert why == {f"{name}-004": "model_error"}


# --- in the process of the command


def test_a_command_that_is_killed_twice(audit: Audit, orders: Orders, reference: Path, tmp_path: Path) -> None:
    path, run = audit(resources={"actors": 2}), tmp_path / "run"
    orders.give(seconds=0.1)
    for least in (3, 9):
        process = begin("run", path)
        wait_for(lambda least=least: len(filed(run)) >= least, process)
        process.kill()
        process.wait()
    orders.give()
    done(seenset("run", path))
    check_same(run, reference, *FEW)
    assert not list(run.glob("attempts/score/*.json"))


def test_a_document_that_kills_its_process(world: Path, audit: Audit, reference: Path, tmp_path: Path) -> None:
    path = audit(corpus=with_one_more(world, "deadly", " This kills its process."), resources={"actors": 2})
    assert rerun(path, -signal.SIGKILL) == 3
    check_culprit(tmp_path / "run", reference, "deadly")


def test_a_document_that_breaks_the_device(world: Path, audit: Audit, reference: Path, tmp_path: Path) -> None:
    path = audit(corpus=with_one_more(world, "breaking", " This breaks the device."))
    rerun(path, 3)
    check_culprit(tmp_path / "run", reference, "breaking")


def test_a_device_without_memory_for_a_batch(world: Path, audit: Audit, orders: Orders, tmp_path: Path) -> None:
    model = {"path": "./frail", "trust_remote_code": True}
    done(here("run", audit("whole", model=model)))
    orders.give(tokens=120)
    done(here("run", audit("halved", model=model)))
    whole, halved = rows(tmp_path / "whole"), rows(tmp_path / "halved")
    assert {key: row[HIGH] for key, row in halved.items()} == {key: row[HIGH] for key, row in whole.items()}
    assert all(abs(halved[key]["loss"] - row["loss"]) < 1e-5 for key, row in whole.items())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(audit: Audit, orders: Orders, reference: Path, disk: Path) -> None:
    path, run = audit(run=str(disk / "run")), disk / "run"
    orders.give(seconds=0.2)
    process = begin("run", path)
    wait_for(lambda: filed(run), process)
    filler = disk / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4096"], capture_output=True)  # ends when it is full
    ended = done(end_of(process), 3)
    assert str(run) in ended.line or "space" in ended.line
    orders.give()
    filler.unlink()
    done(seenset("run", path))
    check_same(run, reference, *FEW)


def test_an_object_store_that_refuses_a_tenth_of_the_requests(audit: Audit, reference: Path, tmp_path: Path) -> None:
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with object_store() as server:
        server.failures = 0.1
        path = audit(run=f"s3://{BUCKET}/audits/run", resources={"actors": 2})
        done(seenset("run", path, **server.environment))
        server.failures = 0.0
        bucket = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=server.endpoint)
        bucket.get(f"{BUCKET}/audits/run", str(tmp_path / "run"), recursive=True)
    check_same(tmp_path / "run", reference, *FEW)


# --- on a cluster


def on_cluster(audit: Audit, actors: int = 2, **settings: Any) -> Path:
    """The audit with so many actors."""
    return audit(resources={"cluster": "ray", "actors": actors}, **settings)


def test_a_worker_that_is_killed(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path, ray_address: str
) -> None:
    path, run = on_cluster(audit), tmp_path / "run"
    orders.give(seconds=0.2)
    process = begin("run", path, RAY_ADDRESS=ray_address)
    wait_for(lambda: filed(run) and orders.workers(), process)
    os.kill(orders.workers()[-1], signal.SIGKILL)
    orders.give()
    ended = done(end_of(process))
    assert "token attributions of these" not in ended.err, ended.err
    assert "could not be read" not in ended.err, ended.err
    check_same(run, reference, *FEW)


def test_a_driver_of_a_cluster_that_is_killed(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path, ray_address: str
) -> None:
    path, run = on_cluster(audit), tmp_path / "run"
    orders.give(seconds=0.2)
    process = begin("run", path, RAY_ADDRESS=ray_address)
    wait_for(lambda: len(filed(run)) >= 3, process)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()
    orders.give()
    done(seenset("run", path, RAY_ADDRESS=ray_address))
    check_same(run, reference, *FEW)


def test_a_worker_that_is_stopped_holds_up_nothing_but_its_shard(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path, ray_address: str
) -> None:
    path, run = on_cluster(audit), tmp_path / "run"
    orders.give(seconds=0.2)
    process = begin("run", path, RAY_ADDRESS=ray_address)
    wait_for(lambda: len(set(orders.workers())) == 2 and filed(run), process)
    stopped = orders.workers()[-1]
    os.kill(stopped, signal.SIGSTOP)
    orders.give()
    try:
        done(end_of(process))
    finally:
        if psutil.pid_exists(stopped):
            os.kill(stopped, signal.SIGKILL)
    check_same(run, reference, *FEW)


@pytest.mark.parametrize(
    ("name", "text"), [("deadly", " This kills its process."), ("breaking", " This breaks the device.")]
)
def test_a_document_that_ends_workers_of_a_cluster(
    world: Path, audit: Audit, reference: Path, tmp_path: Path, ray_address: str, name: str, text: str
) -> None:
    path = on_cluster(audit, corpus=with_one_more(world, name, text))
    done(seenset("run", path, RAY_ADDRESS=ray_address))
    check_culprit(tmp_path / "run", reference, name)


def test_nodes_that_are_lost_and_then_the_cluster(
    audit: Audit, orders: Orders, reference: Path, tmp_path: Path
) -> None:
    from ray.cluster_utils import Cluster

    path, run = on_cluster(audit), tmp_path / "run"
    orders.give(seconds=0.3)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        leaving = cluster.add_node(num_cpus=1, env_vars={"CONTRACT_NODE": "leaving"})
        process = begin("run", path, RAY_ADDRESS=cluster.address)
        wait_for(lambda: len(set(orders.workers())) == 2 and filed(run), process)
        cluster.remove_node(leaving, allow_graceful=False)
        before = len(filed(run))
        wait_for(lambda: len(filed(run)) > before + 1, process)
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        assert "lost" in done(end_of(process), 3).line
    finally:
        cluster.shutdown()
    orders.give()
    done(seenset("run", path, "--set", "resources.cluster=local"))
    check_same(run, reference, *FEW)
    assert set(receipts(run)) == set(receipts(reference))
