"""A full disk: exit 3 in one line, nothing half written, and the same command goes on when there is space."""

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.models import ModelConfig
from pipeline.errors import ExitCode, FullError, UserError
from pipeline.models.load import open_model
from pipeline.store import lock as lock_module
from pipeline.store.attempts import AttemptLog
from pipeline.store.files import Store
from pipeline.store.lock import RunLock, lock_is_live
from pipeline.training.train import FinetuneConfig, TrainingOptions, train
from ray_jobs.finetune import AdapterJob, train_adapters
from tests.helpers.clusters import until
from tests.helpers.finished import run
from tests.helpers.made_up import MakeAudit, sentence


class SmallDisk:
    """A file system of some megabytes, of which a test may take all but so many."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes, in whole blocks."""
        with self.filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"\0" * 4096):
                    pass
            except OSError:
                pass
            file.truncate(max(0, file.tell() - left))

    def empty(self) -> None:
        """Give the space back."""
        self.filler.unlink()

    def files(self) -> list[str]:
        """All files, temporary ones too, but the filler."""
        return sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and path != self.filler
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def check_nothing_is_half_written(disk: SmallDisk) -> None:
    files = disk.files()
    assert [name for name in files if Path(name).name.startswith(".") or name.endswith(".part")] == []
    for name in files:
        if name.endswith(".parquet"):
            pq.read_table(disk.folder / name)
        elif name.endswith(".json"):
            json.loads((disk.folder / name).read_bytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.write("a/new.json", b"x" * 100_000),
        lambda store: store.write("kept.json", b"x" * 100_000),
        lambda store: store.create("a/new.json", b"x" * 100_000),
        lambda store: store.append("a/new.jsonl", b"x" * 100_000),
        lambda store: store.append("grown.jsonl", b"x" * 100_000),
        lambda store: store.write_table("a/new.parquet", pa.table({"n": list(range(100_000))})),
    ],
    ids=["write", "replace", "create", "append", "append more", "table"],
)
@pytest.mark.parametrize("left", [0, 40_960], ids="{} bytes left".format)
def test_a_change_for_which_there_is_no_space_leaves_all_as_it_was(
    disk: SmallDisk, change: Callable[[Store], object], left: int
) -> None:
    store = Store(str(disk.folder))
    store.write("kept.json", b"{}")
    store.append("grown.jsonl", b"{}\n")
    disk.fill(left)
    with pytest.raises(FullError, match=r"^no space left for run directory [^\n]*: free some space") as caught:
        change(store)
    assert caught.value.exit_code == ExitCode.INCOMPLETE == 3
    assert disk.files() == ["grown.jsonl", "kept.json"]
    assert (store.read("kept.json"), store.read("grown.jsonl")) == (b"{}", b"{}\n")


def test_the_lock_beats_on_and_is_given_back_on_a_full_disk(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.05)
    store = Store(str(disk.folder))
    with RunLock(store) as lock:
        disk.fill()
        before = store.read("lock/000001.json")
        until(lambda: store.read("lock/000001.json") != before, 10)
        lock.check()
        with pytest.raises(FullError):
            lock.held.write_json("status.json", {"state": "running"})
    assert not lock_is_live(store)
    assert disk.files() == ["lock/000001.json"]
    with pytest.raises(FullError), RunLock(store):
        pass
    assert disk.files() == ["lock/000001.json"]
    disk.empty()
    with RunLock(store):
        assert lock_is_live(store)


def test_an_attempt_that_a_full_disk_ended_counts_as_no_death_of_its_worker(disk: SmallDisk) -> None:
    store = Store(str(disk.folder))
    AttemptLog(store, "score/one", "one", "driver")
    again = AttemptLog(store, "score/one", "one", "driver")
    again.enter(["work 0"])
    disk.fill()
    with pytest.raises(FullError):
        again.enter(["work 8"])
    again.abandon()
    disk.empty()
    assert AttemptLog(store, "score/one", "one", "driver").record.deaths == {}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("left", [40_960, 81_920], ids="{} bytes left".format)
def test_actors_on_a_full_disk_leave_nothing_half_written(make_audit: MakeAudit, disk: SmallDisk, left: int) -> None:
    path = make_audit(30, run=str(disk.folder / "run"), resources={"cluster": "ray"})
    disk.fill(left)
    with pytest.raises(UserError, match="no space left for run directory") as caught:
        run(path)
    assert caught.value.exit_code == 3
    check_nothing_is_half_written(disk)
    disk.empty()
    assert run(path).exit_code == 0


TRAINING = FinetuneConfig(epochs=2, batch_size=4, learning_rate=1e-3, dtype="float32", rank=4, seed=1)


@pytest.mark.parametrize("left", [8_192, pytest.param(102_400, marks=pytest.mark.slow)], ids="{} bytes left".format)
def test_a_training_on_a_full_disk_leaves_no_half_of_a_checkpoint_or_an_adapter(
    tiny_model_folder: Path, disk: SmallDisk, left: int
) -> None:
    opened = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    texts, options = [sentence(i) for i in range(12)], TrainingOptions(checkpoint_seconds=0.0)
    training = partial(train, opened.model, opened.tokenizer, texts, TRAINING, disk.folder / "adapter", options)
    disk.fill(left)
    with pytest.raises(FullError, match="no space left for"):
        training()
    assert all(name == ".adapter.checkpoint" for name in disk.files())
    disk.empty()
    assert training().steps == 6
    assert all(name.startswith("adapter/") for name in disk.files())


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_training_of_the_cluster_on_a_full_disk_ends_with_3(tiny_model_folder: Path, disk: SmallDisk) -> None:
    texts = [sentence(i) for i in range(12)]
    job = AdapterJob("one", "key", ModelConfig(path=str(tiny_model_folder)), texts, TRAINING, {})
    store = Store(str(disk.folder / "run"))
    disk.fill(24_576)
    with pytest.raises(UserError) as caught:
        list(train_adapters([job], store))
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert disk.files() == []
    disk.empty()
    (adapter,) = train_adapters([job], store)
    assert adapter.steps == 6
