"""DeepSpeed's ZeRO: the same updates where one device cannot hold the weights or the optimizer's state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError, nearest
from pipeline.store.space import whole
from pipeline.training.steps import MAX_GRADIENT_NORM, ProcessGroup, random_state, set_random_state, trained_weights

STAGES = (1, 2, 3)
DECIDED = (
    "optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip
"""Keys that a settings file must not hold: the training's own settings decide them."""

POINTER = "last.json"


def read_zero_settings(path: str) -> dict[str, Any]:
    """Read DeepSpeed settings.

    Args:
        path: of a JSON file, or the name of settings that come with Seenset: zero2, zero3.

    Raises:
        UserError: no such name or file, not JSON, no ZeRO stage in it, a setting that the training decides, or
            DeepSpeed is not installed.
    """
    try:
        settings = json.loads(_settings_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read DeepSpeed settings {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"DeepSpeed settings {path} are not JSON") from None
    stage = zero_stage(settings) if isinstance(settings, dict) else None
    if stage not in STAGES:
        raise UserError(f"DeepSpeed settings {path}: zero_optimization.stage must be 1, 2 or 3, got {stage}")
    for key in DECIDED:
        if key in settings:
            raise UserError(f"DeepSpeed settings {path}: {key} must go, the training's own settings decide it")
    if find_spec("deepspeed") is None:
        raise UserError(f"DeepSpeed settings {path} need DeepSpeed: pip install 'seenset[deepspeed]'")
    return settings


def _settings_file(path: str) -> Traversable:
    """The packaged file of that name, or the file at that path."""
    file = Path(path).expanduser()
    if file.suffix or len(file.parts) != 1 or file.is_file():
        return file
    folder = resources.files("cluster") / "deepspeed"
    names = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    if path not in names:
        raise UserError(f"no DeepSpeed settings {path!r}; {nearest(path, names, 'known names')}, or the path of a file")
    return folder / f"{path}.json"


def zero_stage(settings: Mapping[str, Any]) -> Any:
    """The ZeRO stage that settings ask for, if any."""
    zero = settings.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else None


class ZeroUpdates:
    """AdamW over the trained weights. Each process holds a part of its state, and at stage 3 a part of the model."""

    def __init__(
        self, model: Any, rate: float, dtype: str, processes: ProcessGroup, settings: Mapping[str, Any]
    ) -> None:
        """`dtype` is the arithmetic of a pass. torch.distributed must have been started."""
        import deepspeed

        if not torch.cuda.is_available():  # its communication of CPUs needs a minute of compiling; gloo needs none
            deepspeed.ops.__compatible_ops__ = {}
        self.processes = processes
        self.weights = trained_weights(model)
        self.writes = True
        self._stage = zero_stage(settings)
        self._shared = {"ranks": processes.size, "stage": self._stage}  # a checkpoint fits only the same two
        optimizer = torch.optim.AdamW(self.weights.values(), lr=rate, weight_decay=0.0)
        decided: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # bookkeeping alone: the loss is weighted by tokens
            "gradient_clipping": MAX_GRADIENT_NORM,
        }
        if dtype != "float32":
            decided["torch_autocast"] = {"enabled": True, "dtype": dtype}
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False, config={**settings, **decided}
        )

    def accumulate(self, objective: Tensor) -> None:
        """Take the gradient of a step's objective, summed over the processes."""
        self.model.backward(objective * self.processes.size)  # DeepSpeed takes the mean over the processes

    def apply(self, rate: float, step: int) -> None:
        """One update by that gradient."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = rate
        self.model.step()

    def whole_state(self) -> dict[str, Tensor] | None:
        """At stage 3 the trained weights, gathered on the first process; else None. Every process must call this."""
        if self._stage < 3:
            return None
        import deepspeed

        gathered: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            with deepspeed.zero.GatheredParameters([weight]):
                if self.processes.rank == 0:
                    gathered[name] = weight.detach().cpu().clone()
        return gathered

    def write(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write the part of every process to a folder, then the pointer that makes the checkpoint valid."""
        tag = f"step-{len(record['losses'])}"
        state = {**record, **random_state(self.model.device)}
        with whole(path / tag):
            self.model.save_checkpoint(
                str(path), tag=tag, client_state={"said": state}, save_latest=False, exclude_frozen_parameters=True
            )
        self.processes.add_up(torch.zeros(1, device=self.model.device))  # all parts are there
        if self.processes.rank != 0:
            return
        part = path / f"{POINTER}.part"
        part.write_text(json.dumps({"of": record["of"], "tag": tag, **self._shared}), encoding="utf-8")
        part.replace(path / POINTER)
        for older in path.glob("step-*"):
            if older.name != tag:
                shutil.rmtree(older, ignore_errors=True)

    def read(self, path: Path, work: str) -> dict[str, Any] | None:
        """As `Updates.read`; also None for a checkpoint of another number of processes or another ZeRO stage."""
        pointer = path / POINTER
        if not pointer.is_file():
            return None
        last = json.loads(pointer.read_text(encoding="utf-8"))
        if last["of"] != work or {key: last.get(key) for key in self._shared} != self._shared:
            return None
        _, client_state = self.model.load_checkpoint(str(path), tag=last["tag"], load_module_strict=False)
        state: dict[str, Any] = client_state["said"]
        set_random_state(state, self.model.device)
        return state
