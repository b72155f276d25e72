"""The measurements of a node for `cluster.preflight`; `cluster.checks` judges them."""

from __future__ import annotations

import csv
import glob
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import psutil
import torch

from pipeline.audit.machine import ActorShape
from pipeline.config.audit import AuditConfig, DetectorEntry
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.saved import HUB_SPLIT, hub_dataset_info
from pipeline.corpus.shard import InputFile, Shard
from pipeline.detectors.plugins import Plugin, load_plugins
from pipeline.detectors.registry import parse_detectors, plugin_code
from pipeline.errors import UserError, one_line
from pipeline.models.arithmetic import processor_here
from pipeline.models.checkpoints import Kind, check_files, locate_adapter
from pipeline.models.devices import CPU, Device, cap_memory, gpus_in_sight
from pipeline.models.files import adapter_files
from pipeline.models.load import check_model
from pipeline.stages.base import Output, Placement, Wanted
from pipeline.stages.registry import served_before_scoring, stages_of
from pipeline.stages.worker import longest_first
from pipeline.store.files import Store
from ray_jobs.cluster import NO_ANSWER, reason_of

SHARED_MEMORY = "/dev/shm"
EDGE = 1 << 16
WHOLE_BYTES = 1 << 24
"""Maximum size of a model file that is read whole; of a larger one, parts are read."""

PARTS = 32
MOST_INPUTS = 64
RACERS = 8
ALONE = "storage"
"""The check that runs alone, after all others."""

PROBE_BYTES = 8 << 20
DOCUMENTS = 64
NO_CONTENT = {"model": "unread", "tokenizer": "unread", "dtype": "unread", "quantization": "unread"}
"""Replaces a fingerprint, which would read all weights; no file depends on it."""

DRIVER_FILE = "driver"
"""The file that the machine of the command writes for the nodes to see."""

PROGRAM_SECONDS = 60
_TORCH = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda)"


Answer = dict[str, Any] | str
"""The facts of a check of a node, or in one line why there are none."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The request to every node."""

    config: AuditConfig
    inputs: tuple[InputFile, ...]
    shard: Shard | None  # shard of the first batch
    plugins: tuple[Plugin, ...]
    folder: str  # folder of this preflight in the run directory
    seconds: float = 120.0  # time limit of the checks of a node, and of the storage check
    batch_seconds: float = 900.0  # time limit of a first batch
    shape: ActorShape | None = None  # resources of an actor; None: no first batch is scored
    every: bool = False  # whether every node scores a first batch, not only one of each kind


def measured(measure: Callable[[], dict[str, Any]]) -> Answer:
    """The facts that a function returns, or in one line why it fails."""
    try:
        return measure()
    except Exception as error:  # only the check fails, not the preflight
        return reason_of(error)


def measured_within(measures: Mapping[str, Callable[[], dict[str, Any]]], seconds: float) -> dict[str, Answer]:
    """The measurements of functions by name, in parallel threads; a thread that hangs is abandoned.

    Args:
        measures: the functions.
        seconds: time limit.
    """
    answers: dict[str, Answer] = {}

    def answer(name: str) -> None:
        answers[name] = measured(measures[name])

    threads = [threading.Thread(target=answer, args=(name,), daemon=True) for name in measures]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {name: answers.get(name, f"{NO_ANSWER} in {seconds:g} s") for name in measures}


def inspect_node(inspection: Inspection) -> dict[str, Answer]:
    """All of `CHECKS` on this node, by name; the storage check runs when no other is running."""
    measures = {check: partial(measure, inspection) for check, measure in CHECKS.items()}
    alone = {ALONE: measures.pop(ALONE)}
    return {**measured_within(measures, inspection.seconds), **measured_within(alone, inspection.seconds)}


def remove_traces(inspection: Inspection) -> None:
    """Remove the folder of a preflight from the run directory."""
    Store(inspection.config.run).remove_folder(inspection.folder)


def _plugins(inspection: Inspection) -> dict[str, Any]:
    """Load the plugins of the configuration; returns the digests of the parts that scores depend on."""
    load_plugins(inspection.plugins)
    code = plugin_code(inspection.config.import_, parse_detectors(inspection.config.detectors))
    return {"digests": code.fingerprint() if code is not None else {}, "names": [p.label for p in inspection.plugins]}


def _gpus(_: Inspection) -> dict[str, Any]:
    """The cards from the driver, regardless of what is visible to this process, and the devices that torch sees."""
    cards: list[dict[str, Any]] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        if glob.glob("/dev/nvidia[0-9]*"):
            raise UserError("this node has GPUs but no nvidia-smi: its package is not installed, or not in the image")
        return {"cards": cards, "torch": 0, "cuda": ""}
    fields = "name,driver_version,memory.total,memory.free"
    text = _output([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    for name, driver, total, free in csv.reader(text.splitlines(), skipinitialspace=True):
        if not (total.isdigit() and free.isdigit()):  # a card with shared memory, or a partitioned one
            raise UserError(f"nvidia-smi states no memory of {name} (total {total}, free {free})")
        cards.append({"name": name, "driver": driver, "total": int(total) << 20, "free": int(free) << 20})
    sight, count, cuda = _output([sys.executable, "-c", _TORCH]).split()[-3:]
    return {"cards": cards, "torch": int(count) if sight == "True" else 0, "cuda": cuda}


def _output(command: Sequence[str]) -> str:
    """The output of a program to which all cards are visible."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, env=environment)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{Path(command[0]).name} ended with {done.returncode}: {lines[-1] if lines else 'no word'}")
    return done.stdout


def _memory(_: Inspection) -> dict[str, Any]:
    """Memory of the machine, in bytes, within the limit of its container."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import get_used_memory

    total = min(psutil.virtual_memory().total, get_system_memory())
    free = min(psutil.virtual_memory().available, total - get_used_memory())
    return {"total": int(total), "free": max(0, int(free))}


def _models(inspection: Inspection) -> dict[str, Any]:
    """Marks of the files behind the fingerprint of each model, by the model's path and the file's name."""
    config = inspection.config
    marks: dict[str, Any] = {}
    for model in (config.model, config.reference_model, config.paraphraser):
        if isinstance(model, ModelConfig):
            kind: Kind = "pictures" if config.corpus.has_pictures and model is config.model else "causal"
            check_model(model, "rewriter" if model is config.paraphraser else kind)
            marks[model.shown] = file_marks(model)
    return {"models": marks}


def file_marks(model: ModelConfig) -> dict[str, list[Any]]:
    """[bytes, digest] of the files behind a model's fingerprint; large ones are read in parts.

    Weights that are not yet downloaded from the hub are left out.

    Raises:
        UserError: a file is missing.
    """
    files = [check_files(model).files]
    if model.adapter is not None:
        files.append(adapter_files(locate_adapter(model), model.adapter_shown))
    places = {name: each.places[name] for each in files if each is not None for name in each.hashed}
    return {name: [path.stat().st_size, _mark(path)] for name, path in places.items()}


def _mark(path: Path) -> str:
    """A digest of a file: of all of it, or of its ends and of equally spaced parts."""
    size = path.stat().st_size
    total = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            total.update(file.read())
        else:
            for part in range(PARTS + 1):
                file.seek(part * (size - EDGE) // PARTS)
                total.update(file.read(EDGE))
    return total.hexdigest()[:16]


def _inputs(inspection: Inspection) -> dict[str, Any]:
    """Marks of up to 64 equally spaced inputs by name; a missing input has none."""
    step = max(1, -(-len(inspection.inputs) // MOST_INPUTS))
    marks: dict[str, Any] = {}
    for entry in inspection.inputs[::step]:
        try:
            marks[entry.name] = _input_mark(entry, inspection)
        except (OSError, UserError) as error:
            marks[entry.name] = one_line(f"cannot be read: {error}")[:200]
    return {"marks": marks, "of": len(inspection.inputs)}


def _input_mark(entry: InputFile, inspection: Inspection) -> list[Any]:
    """The number of rows for a dataset of the hub; otherwise bytes and a digest of the first ones."""
    form = format_named(entry.format)
    if not form.has_path:
        source = inspection.config.corpus.source(entry.role)
        assert source is not None
        return [hub_dataset_info(entry.path, source.subset, source.split or HUB_SPLIT, source.revision).rows]
    fs, path = fsspec.core.url_to_fs(entry.path)
    fs.invalidate_cache()
    files = [f"{path}/{name}" if name else path for name in entry.files] or [path]
    if form.is_folder:
        files = sorted(fs.find(path))
    sizes = sum(int(fs.size(file) or 0) for file in files)
    return [sizes, hashlib.sha256(fs.cat_file(files[0], start=0, end=EDGE)).hexdigest()[:16]]


def _run_directory(inspection: Inspection) -> dict[str, Any]:
    """Create files in the run directory: one name for all nodes, and one name for all threads of this node.

    Returns:
        "seen": whether the file of the driver exists; "won": whether this node created the shared name; "holder": the
        mark of the node that did; "winners": threads that created the second name, where only 1 is correct; "second":
        whether the name could be created again.
    """
    store = Store(inspection.config.run)
    seen = store.exists(f"{inspection.folder}/{DRIVER_FILE}")
    mark = uuid.uuid4().hex
    shared, alone = f"{inspection.folder}/shared", f"{inspection.folder}/{mark}"
    won = store.create(shared, mark.encode())
    holder = store.read(shared).decode()
    start = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        start.wait()
        return store.create(alone, str(number).encode())

    with ThreadPoolExecutor(RACERS) as pool:
        winners = sum(pool.map(race, range(RACERS)))
    second = store.create(alone, b"second")
    store.remove(alone)
    return {"seen": seen, "won": won, "holder": holder, "winners": winners, "second": second}


def _storage(inspection: Inspection) -> dict[str, Any]:
    """Bytes per second for writing a file to the run directory, and for reading it back."""
    store = Store(inspection.config.run)
    name, data = f"{inspection.folder}/{uuid.uuid4().hex}", os.urandom(PROBE_BYTES)
    begin = time.perf_counter()
    store.write(name, data)
    written = time.perf_counter()
    same = store.read(name) == data
    end = time.perf_counter()
    store.remove(name)
    return {"write": PROBE_BYTES / (written - begin), "read": PROBE_BYTES / (end - written), "same": same}


CHECKS: dict[str, Callable[[Inspection], dict[str, Any]]] = {
    "processor": lambda _: asdict(processor_here()),
    "plugins": _plugins,
    "gpus": _gpus,
    "memory": _memory,
    "/dev/shm": lambda _: shutil.disk_usage(SHARED_MEMORY)._asdict(),
    "model": _models,
    "input": _inputs,
    "run directory": _run_directory,
    "storage": _storage,
}
"""The measurements of every node, in addition to versions, its clock and a first batch."""


def first_batch(inspection: Inspection) -> dict[str, Any]:
    """Load the models as an actor does and score the fullest batch of the first documents, without writing anything.

    Raises:
        UserError: no document can be scored.
        Exception: various errors of a model's code or a device.
    """
    assert inspection.shape is not None
    gpus = inspection.shape.gpus
    cap_memory(gpus)
    load_plugins(inspection.plugins)
    config, shard = inspection.config, inspection.shard
    if shard is None:
        raise UserError("no documents to make a batch of")
    begin = time.perf_counter()
    detectors = scored_alone(config)
    plain = config.model_copy(update={"detectors": detectors, "paraphraser": None})
    stage = stages_of(Wanted(plain, _device(plain, gpus), lambda _: NO_CONTENT, {}))[-1]
    worker = stage.make(stage, Placement(gpus, inspection.shape.cpus))
    loaded = time.perf_counter()
    output = Output()
    rows = worker.open(shard, Store(config.run), output)
    readable = (document for document in read_shard(shard) if document.problem is None)
    entries = worker.prepare(list(itertools.islice(readable, DOCUMENTS)), rows, output)
    if not entries:
        raise UserError(f"none of the first {DOCUMENTS} documents of {shard.name} can be scored")
    batch = max(longest_first(entries, worker.batch_size), key=lambda entries: sum(entry.tokens for entry in entries))
    worker.work(batch, output)
    if gpus:
        torch.cuda.synchronize()
    end = time.perf_counter()
    return {
        "load": loaded - begin,
        "batch": end - loaded,
        "documents": len(batch),
        "tokens": sum(entry.tokens for entry in batch),
        "peak": torch.cuda.max_memory_allocated() if gpus else 0,
    }


def scored_alone(config: AuditConfig) -> list[DetectorEntry]:
    """The detectors that need only plain passes of the models; where there is none, a default one."""
    any_of_kind: DetectorEntry = (
        {"renyi": {"part": "image", "caption": "given"}} if config.corpus.has_pictures else "loss"
    )
    return [entry for entry in config.detectors if _reads_passes_alone([entry], config)] or [any_of_kind]


def _reads_passes_alone(entries: Sequence[DetectorEntry], config: AuditConfig) -> bool:
    needs = [needed for detector in parse_detectors(list(entries)) for needed in detector.needs]
    return not any(needed.adapter or served_before_scoring(needed, config) for needed in needs)


def _device(config: AuditConfig, gpus: float) -> Device:
    if not gpus:
        return CPU
    stated = config.resources.gpu_memory
    memory, name = gpus_in_sight()
    fixed = config.resources.deterministic
    return Device(gpus, memory if stated == "auto" else int(stated), name if fixed else "", fixed)
