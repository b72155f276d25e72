"""What the tests of the contract share: a folder with model and corpus, and one finished run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.register_assert_rewrite("answers", "command")

from command import Orders, done, here  # noqa: E402
from world import ASKED, REAL, make_world, numbered, questions, write_config, write_lines  # noqa: E402

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of one process that wait must not spin: others need the core


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, the corpus and the plugin."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def reference(world: Path) -> Path:
    """A finished run that was asked every question, made by one worker of this process."""
    done(here("run", write_config(world, "reference", selections=questions(*ASKED, *REAL))))
    return world / "runs/reference"


@pytest.fixture(scope="session")
def second(world: Path) -> Path:
    """A finished run over the same documents under other settings."""
    done(here("run", write_config(world, "second", max_tokens=512, selections=questions("storey", "clean"))))
    return world / "runs/second"


@pytest.fixture(scope="session")
def contradicted(world: Path) -> Path:
    """A finished run whose unseen documents have other words than the audited ones."""
    write_lines(world / "other.jsonl", numbered("other", [f"hexagonal {'lorem ' * (i % 7)}{i}" for i in range(99)]))
    corpus = yaml.safe_load(write_config(world, "contradicted").read_text())["corpus"]
    corpus = {"audit": corpus["audit"], "unseen": {"path": "other.jsonl", "id": "id"}}
    question = {**questions("bh")[0], "name": "members", "alpha": 0.9}
    done(here("run", write_config(world, "contradicted", corpus=corpus, selections=[question])))
    return world / "runs/contradicted"


@pytest.fixture(scope="session")
def plain(world: Path) -> Path:
    """A finished run that was asked what runs with faults are asked; for copies."""
    done(here("run", write_config(world, "plain")))
    return world / "runs/plain"


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """A copy of that run, in the folder `run` of the test."""
    return Path(shutil.copytree(plain, tmp_path / "run"))


@pytest.fixture
def finished(copied: Path, audit: Callable[..., Path]) -> Path:
    """The YAML of that copy."""
    return audit()


@pytest.fixture(scope="session")
def orders_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plugin looks for orders, also on a cluster that started before a test."""
    file = tmp_path_factory.mktemp("orders") / "orders.json"
    os.environ["CONTRACT_ORDERS"] = str(file)
    return file


@pytest.fixture(scope="session")
def ray_address(orders_file: Path) -> Iterator[str]:
    """The address of a cluster with four CPUs, which many runs may join."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def orders(orders_file: Path) -> Iterator[Orders]:
    """Orders for the plugin in all commands that the test starts."""
    given = Orders(orders_file)
    given.give()
    yield given
    for file in (orders_file, Path(f"{orders_file}.notes")):
        file.unlink(missing_ok=True)


@pytest.fixture
def audit(world: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes an audit of the corpus with a run directory of the test's own: (**settings) -> path of the YAML."""

    def write(name: str = "run", **settings: Any) -> Path:
        own = f"{tmp_path.parent.name}-{tmp_path.name}-{name}"
        return write_config(world, own, **{"run": str(tmp_path / name), **settings})

    return write
