"""What a node measures of itself for `cluster.preflight`; whether it is good is for `cluster.checks` to say."""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import psutil

from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.saved import HUB_SPLIT, hub_dataset_info
from pipeline.corpus.shard import InputFile, Shard
from pipeline.detectors.plugins import Plugin, load_plugins
from pipeline.detectors.registry import parse_detectors, plugin_code
from pipeline.errors import UserError, one_line
from pipeline.models.arithmetic import processor_here
from pipeline.models.checkpoints import Kind, check_files, locate_adapter, matching, weight_files
from pipeline.models.load import check_model
from pipeline.models.tokens import TOKENIZER_FILES
from pipeline.store.files import Store

SHARED_MEMORY = "/dev/shm"
EDGE = 1 << 16
WHOLE_BYTES = 1 << 24
"""A file of a model that is no larger is read whole; of a larger one parts are."""

PARTS = 32
MOST_INPUTS = 64
RACERS = 8
PROBE_BYTES = 8 << 20
DRIVER_FILE = "driver"
"""What the machine of the command writes for the nodes to see."""

PROGRAM_SECONDS = 60
_TORCH = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count(), torch.version.cuda)"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a check of a node measured, or why it could not."""

    facts: dict[str, Any]
    problem: str = ""  # one line; empty: it could


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is asked of every node."""

    config: AuditConfig
    inputs: tuple[InputFile, ...]
    shard: Shard | None  # of which a first batch is read
    plugins: tuple[Plugin, ...]
    folder: str  # of this preflight alone, in the run directory


def make_check(check: str, inspection: Inspection, node: str) -> Measurement:
    """Make one check here; whatever goes wrong in it is its answer.

    Args:
        check: a key of `CHECKS`.
        inspection: of all nodes.
        node: the name of this one.
    """
    try:
        return Measurement(CHECKS[check](inspection, node))
    except Exception as error:  # the check is what fails, not the preflight
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return Measurement({}, one_line(f"{kind}{error}")[:300])


class Inspector:
    """An actor that is pinned to a node; its calls run side by side in threads of one process."""

    def __init__(self, inspection: Inspection, node: str) -> None:
        self.inspection = inspection
        self.node = node

    def now(self) -> float:
        """Seconds since 1970 by the clock of the node."""
        return time.time()

    def measure(self, check: str) -> Measurement:
        """Make one check of `CHECKS`."""
        return make_check(check, self.inspection, self.node)

    def clean(self) -> None:
        """Remove what the checks left in the run directory."""
        remove_traces(self.inspection)


def remove_traces(inspection: Inspection) -> None:
    """Remove the folder of a preflight from the run directory."""
    Store(inspection.config.run).remove_folder(inspection.folder)


def _processor(_: Inspection, __: str) -> dict[str, Any]:
    """Flags of the CPU that decide its type of weights, and whether it multiplies bfloat16 natively."""
    here = processor_here()
    return {"flags": list(here.flags), "bfloat16": here.bfloat16}


def _plugins(inspection: Inspection, _: str) -> dict[str, Any]:
    """Load the plugins of the configuration, and give the digests of what scores depend on of them."""
    load_plugins(inspection.plugins)
    code = plugin_code(inspection.config.import_, parse_detectors(inspection.config.detectors))
    return {"digests": code.fingerprint() if code is not None else {}, "names": [p.label for p in inspection.plugins]}


def _gpus(_: Inspection, __: str) -> dict[str, Any]:
    """The cards by the driver, whatever is visible to this process, and what torch sees of them."""
    cards: list[dict[str, Any]] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        if glob.glob("/dev/nvidia[0-9]*"):
            raise UserError("GPUs are here, and nvidia-smi is not: its package is not installed, or not in the image")
        return {"cards": cards, "torch": 0, "cuda": ""}
    fields = "name,driver_version,memory.total,memory.free"
    text = _output([program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    for name, driver, total, free in csv.reader(text.splitlines(), skipinitialspace=True):
        if not (total.isdigit() and free.isdigit()):  # of a card that shares the memory of its machine, or is cut up
            raise UserError(f"nvidia-smi tells no memory of {name} (total {total}, free {free})")
        cards.append({"name": name, "driver": driver, "total": int(total) << 20, "free": int(free) << 20})
    sight, count, cuda = _output([sys.executable, "-c", _TORCH]).split()[-3:]
    return {"cards": cards, "torch": int(count) if sight == "True" else 0, "cuda": cuda}


def _output(command: Sequence[str]) -> str:
    """What a program prints; all cards are visible to it."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, env=environment)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{Path(command[0]).name} ended with {done.returncode}: {lines[-1] if lines else 'no word'}")
    return done.stdout


def _memory(_: Inspection, __: str) -> dict[str, Any]:
    """Memory of the machine, in bytes, within the limit of its container."""
    from ray._common.utils import get_system_memory
    from ray._private.utils import get_used_memory

    total = min(psutil.virtual_memory().total, get_system_memory())
    free = min(psutil.virtual_memory().available, total - get_used_memory())
    return {"total": int(total), "free": max(0, int(free))}


def _shared_memory(_: Inspection, __: str) -> dict[str, Any]:
    """Bytes of /dev/shm."""
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"total": usage.total, "free": usage.free}


def _models(inspection: Inspection, _: str) -> dict[str, Any]:
    """Marks of the files that the fingerprint of each model is made of, by the model's path and the file's name."""
    config = inspection.config
    marks: dict[str, Any] = {}
    for model in (config.model, config.reference_model, config.paraphraser):
        if isinstance(model, ModelConfig):
            kind: Kind = "pictures" if config.corpus.has_pictures and model is config.model else "causal"
            check_model(model, "rewriter" if model is config.paraphraser else kind)
            marks[model.shown] = file_marks(model)
    return {"models": marks}


def file_marks(model: ModelConfig) -> dict[str, list[Any]]:
    """[bytes, digest] of the files that a model's fingerprint is made of; large ones are read in parts.

    Weights that the hub has yet to send are left out.

    Raises:
        UserError: a file is missing.
    """
    source = check_files(model)
    names = [source.gguf] if source.gguf else [*weight_files(model, source), "config.json", *TOKENIZER_FILES]
    paths = matching(source.folder, [*names, *(["*.py"] if model.trust_remote_code else [])])
    if model.adapter is not None:
        paths += matching(locate_adapter(model), ["adapter_*"])
    return {path.name: [path.stat().st_size, _mark(path)] for path in paths}


def _mark(path: Path) -> str:
    """A digest of a file: of all of it, or of its ends and of parts at equal distances."""
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


def _inputs(inspection: Inspection, _: str) -> dict[str, Any]:
    """Marks of the inputs by their names, of at most 64 at equal distances; an input that is not there has none."""
    step = max(1, -(-len(inspection.inputs) // MOST_INPUTS))
    marks = {}
    for entry in inspection.inputs[::step]:
        try:
            marks[entry.name] = _input_mark(entry, inspection)
        except (OSError, UserError) as error:
            marks[entry.name] = one_line(f"cannot be read: {error}")[:200]
    return {"marks": marks, "of": len(inspection.inputs)}


def _input_mark(entry: InputFile, inspection: Inspection) -> list[Any]:
    """Rows of a dataset of the hub; else bytes and a digest of the first of them."""
    form = format_named(entry.format)
    if not form.has_path:
        source = inspection.config.corpus.source(entry.role)
        assert source is not None
        return [hub_dataset_info(entry.path, source.subset, source.split or HUB_SPLIT)[1]]
    fs, path = fsspec.core.url_to_fs(entry.path)
    fs.invalidate_cache()
    files = [f"{path}/{name}" if name else path for name in entry.files] or [path]
    if form.is_folder:
        files = sorted(fs.find(path))
    sizes = sum(int(fs.size(file) or 0) for file in files)
    return [sizes, hashlib.sha256(fs.cat_file(files[0], start=0, end=EDGE)).hexdigest()[:16]]


def _run_directory(inspection: Inspection, node: str) -> dict[str, Any]:
    """Create files in the run directory: one name that all nodes try, and one that threads of this node race for.

    Returns:
        "seen": whether the file of the driver is there; "won": whether this node created the shared name; "holder": the
        node that the file there names; "winners": of the race, whose only right number is 1; "second": whether the name
        could be created once more.
    """
    store = Store(inspection.config.run)
    seen = store.exists(f"{inspection.folder}/{DRIVER_FILE}")
    shared, alone = f"{inspection.folder}/shared", f"{inspection.folder}/{random.SystemRandom().getrandbits(64):x}"
    won = store.create(shared, node.encode())
    holder = store.read(shared).decode()
    start, outcomes = threading.Barrier(RACERS), []

    def race() -> None:
        start.wait()
        outcomes.append(store.create(alone, threading.current_thread().name.encode()))

    threads = [threading.Thread(target=race) for _ in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    second = store.create(alone, b"second")
    store.remove(alone)
    if len(outcomes) < RACERS:
        raise UserError(f"{RACERS - len(outcomes)} of {RACERS} attempts to create one file failed with an error")
    return {"seen": seen, "won": won, "holder": holder, "winners": sum(outcomes), "second": second}


def _storage(inspection: Inspection, _: str) -> dict[str, Any]:
    """Bytes a second of writing a file to the run directory, and of reading it back."""
    store = Store(inspection.config.run)
    name, data = f"{inspection.folder}/{random.SystemRandom().getrandbits(64):x}", os.urandom(PROBE_BYTES)
    begin = time.perf_counter()
    store.write(name, data)
    written = time.perf_counter()
    same = store.read(name) == data
    end = time.perf_counter()
    store.remove(name)
    return {"write": PROBE_BYTES / (written - begin), "read": PROBE_BYTES / (end - written), "same": same}


CHECKS: dict[str, Callable[[Inspection, str], dict[str, Any]]] = {
    "processor": _processor,
    "plugins": _plugins,
    "gpus": _gpus,
    "memory": _memory,
    "/dev/shm": _shared_memory,
    "model": _models,
    "input": _inputs,
    "run directory": _run_directory,
    "storage": _storage,
}
"""What is measured on every node, beside versions, its clock and a first batch."""
