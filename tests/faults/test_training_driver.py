"""Trainings: a lost leading process is replaced; a driver that slept leaves the files of its successor alone."""

import json
import threading
from pathlib import Path

import psutil
import pytest

from pipeline.config.models import ModelConfig
from pipeline.errors import BusyError
from pipeline.models.load import RECORD
from pipeline.store.files import Store
from pipeline.training.train import FinetuneConfig
from ray_jobs import finetune
from ray_jobs.finetune import AdapterJob, train_adapters
from tests.helpers.clusters import output_of
from tests.helpers.finished import files_in
from tests.helpers.made_up import sentence

TEXTS = [sentence(i) for i in range(12)]
CONFIG = FinetuneConfig(epochs=3, batch_size=4, learning_rate=1e-3, dtype="float32", rank=4, seed=1)


def job_of(model_folder: Path, config: FinetuneConfig) -> AdapterJob:
    return AdapterJob("one", "key", ModelConfig(path=str(model_folder)), TEXTS, config, {}, checkpoint_seconds=0.0)


def test_a_driver_that_slept_removes_no_temporary_file_of_its_successor(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "PROGRESS_SECONDS", 0.0)
    job = job_of(tiny_model_folder, CONFIG)
    store = Store(str(tmp_path))
    asleep, awake, lost = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def sleep(_: str) -> None:
        asleep.set()
        awake.wait()

    def check() -> None:
        if lost.is_set():
            raise BusyError("taken over")

    def first() -> None:
        try:
            list(train_adapters([job], store, sleep, check=check, here=True))
        except BaseException as error:
            errors.append(error)

    sleeper = threading.Thread(target=first)
    sleeper.start()
    asleep.wait()
    seen: list[list[str]] = []

    def wake(_: str) -> None:
        if not seen:
            lost.set()
            seen.append(files_in(tmp_path))
            awake.set()
            sleeper.join()
            seen.append(files_in(tmp_path))

    (adapter,) = train_adapters([job], store, wake, here=True)
    assert [str(error) for error in errors] == ["taken over"]
    assert any("documents.parquet" in name for name in seen[0])
    assert seen[0] == seen[1]
    assert {name.split("/")[1] for name in files_in(tmp_path)} == {Path(adapter.folder).name}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_training_whose_leading_process_is_killed_goes_on(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "PROGRESS_SECONDS", 0.1)
    config = CONFIG.model_copy(update={"epochs": 60})
    killed: list[int] = []

    def kill_once(_: str) -> None:
        if not killed:
            drivers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::_fit")]
            killed.extend(p.pid for p in drivers)
            for p in drivers:
                p.kill()

    job = job_of(tiny_model_folder, config)
    (adapter,) = train_adapters([job], Store(str(tmp_path)), kill_once)
    assert len(killed) == 1
    first, *later = json.loads((Path(adapter.folder) / RECORD).read_text())["began_at"]
    assert first == 0
    assert later
    assert later[-1] > 0
    assert adapter.steps == 180
    assert {name.split("/")[1] for name in files_in(tmp_path)} == {Path(adapter.folder).name}


LOSE_NODE = """
import json, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from pipeline.config.models import ModelConfig
from pipeline.models.load import RECORD
from pipeline.store.files import Store
from pipeline.training.train import FinetuneConfig
from ray_jobs import finetune
from ray_jobs.finetune import AdapterJob, train_adapters

finetune.PROGRESS_SECONDS = 0.1
folder, model, texts, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
class Busy:
    def where(self):
        return ray.get_runtime_context().get_node_id()

head = ray.get_runtime_context().get_node_id()
here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(head, soft=False)
busy = Busy.options(scheduling_strategy=here).remote()  # so that the task begins on the other node
assert ray.get(busy.where.remote()) == head
lost = []

def lose_node(progress):
    if not lost:
        lost.append(progress)
        cluster.add_node(num_cpus=1)
        cluster.remove_node(node, allow_graceful=False)

job = AdapterJob("one", "key", ModelConfig(path=model), texts, FinetuneConfig(**config), {}, checkpoint_seconds=0.0)
(adapter,) = train_adapters([job], Store(str(folder)), lose_node)
record = json.loads((Path(adapter.folder) / RECORD).read_text())
print(json.dumps({"lost": lost, "began_at": record["began_at"], "steps": adapter.steps}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_training_whose_node_dies_goes_on_on_another(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 120}).model_dump(mode="json")
    arguments = [str(tmp_path), str(tiny_model_folder), json.dumps(TEXTS), json.dumps(config)]
    lines = output_of(LOSE_NODE, *arguments, seconds=500).splitlines()
    outcome = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    assert outcome["lost"], outcome
    assert outcome["began_at"][0] == 0 < outcome["began_at"][-1], outcome
    assert outcome["steps"] == 360
