"""Optimizer steps: in one process, in several that share each batch, or with DeepSpeed's ZeRO."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from pipeline.errors import UserError, nearest
from pipeline.store.files import whole

MAX_GRADIENT_NORM = 1.0
BUCKET_ELEMENTS = 8 << 20
"""Number of gradient elements that are summed over the processes in one call."""

PART = ".part"
"""Suffix of a checkpoint that is being written, with a name per process: an earlier process may still be running."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that train one model together; by default one."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def joined() -> ProcessGroup:
        """The process group of torch.distributed, or a single process if it is not initialized."""
        if not distributed.is_available() or not distributed.is_initialized():
            return ProcessGroup()
        return ProcessGroup(distributed.get_rank(), distributed.get_world_size())

    def add_up(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the lowest rank that has one, or None. Collective: every process must call it."""
        if self.size == 1:
            return problem
        messages: list[str | None] = [None] * self.size
        distributed.all_gather_object(messages, problem)
        return next((message for message in messages if message is not None), None)


ALONE = ProcessGroup()


def _trained_weights(model: Any) -> dict[str, Tensor]:
    """The weights that require gradients, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


class Updates:
    """AdamW for the trained weights. Every process holds all of them and makes the same step."""

    def __init__(self, model: Any, rate: float, processes: ProcessGroup, adalora: Any = None) -> None:
        """`adalora` is peft's AdaLoRA model, which reduces the ranks of its updates according to their gradients."""
        self.model = model
        self.processes = processes
        self.weights = _trained_weights(model)
        self.writes = processes.rank == 0  # whether this process writes a part of a checkpoint
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=rate, weight_decay=0.0, fused=True)
        self._adalora = adalora

    def accumulate(self, objective: Tensor) -> None:
        """Add the gradient of a part of a step's objective."""
        objective.backward()

    def apply(self, rate: float, step: int) -> None:
        """Make one update with the gradients of all parts, summed over the processes; `step` counts from 1."""
        self._add_up_gradients()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._adalora is not None:
            for weight in self.weights.values():  # a layer without gradient gets no rank
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._adalora.update_and_allocate(step)
        self._optimizer.zero_grad(set_to_none=True)

    def whole_state(self) -> dict[str, Tensor] | None:
        """None: the model holds all of its weights (see `ZeroUpdates.whole_state`)."""
        return None

    def write(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write the weights, the optimizer's state and `record` atomically to one file."""
        state = {
            **record,
            **_random_state(self.model.device),
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        if self._adalora is not None:
            allocator = self._adalora.rankallocator
            state["importance"] = [allocator.ipt, allocator.exp_avg_ipt, allocator.exp_avg_unc]
            state["rank_pattern"] = allocator.peft_config.rank_pattern
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{PART}")
        with whole(part):
            torch.save(state, part)
            part.replace(path)

    def read(self, path: Path, work: str) -> dict[str, Any] | None:
        """Restore weights, optimizer and random state from a checkpoint.

        Returns:
            The `record` that was written; None, without changes, if there is no checkpoint of this work.
        """
        if not path.is_file():
            return None
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if state["of"] != work:
            return None
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._adalora is not None:
            allocator = self._adalora.rankallocator
            device = self.model.device
            importance = [{n: value.to(device) for n, value in part.items()} for part in state["importance"]]
            allocator.ipt, allocator.exp_avg_ipt, allocator.exp_avg_unc = importance
            allocator.peft_config.rank_pattern = state["rank_pattern"]
        _set_random_state(state, self.model.device)
        return state

    def _add_up_gradients(self) -> None:
        if self.processes.size == 1:
            return
        weights = list(self.weights.values())
        # A weight that no process has used (an expert without tokens) must have no gradient, as in one process.
        used = torch.tensor([float(weight.grad is not None) for weight in weights], device=weights[0].device)
        self.processes.add_up(used)
        with_gradient = [weight for weight, count in zip(weights, used.tolist(), strict=True) if count]
        for weight in with_gradient:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for bucket in _buckets([weight.grad for weight in with_gradient if weight.grad is not None]):
            flat = self.processes.add_up(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the random number generators of a training."""
    state = {"rng": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators to a state from `_random_state`."""
    torch.set_rng_state(state["rng"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"], device)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype and of a bounded total size, in the given order."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.numel() for g in bucket) + gradient.numel() > BUCKET_ELEMENTS
        if bucket and (full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


STAGES = (1, 2, 3)
DECIDED = (
    "optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip
"""Keys that a settings file must not contain: the settings of the training determine them."""

POINTER = "last.json"


def read_zero_settings(path: str) -> dict[str, Any]:
    """Read DeepSpeed settings.

    Args:
        path: path of a JSON file, or the name of packaged settings: zero2, zero3.

    Raises:
        UserError: no such name or file, not JSON, no ZeRO stage, a setting that the training determines, or
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
            raise UserError(f"DeepSpeed settings {path}: remove {key}, which the settings of the training determine")
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
    """The ZeRO stage in settings, if any."""
    zero = settings.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else None


class ZeroUpdates:
    """AdamW for the trained weights. Each process holds a part of its state, and at stage 3 a part of the model."""

    def __init__(
        self, model: Any, rate: float, dtype: str, processes: ProcessGroup, settings: Mapping[str, Any]
    ) -> None:
        """`dtype` is the dtype of computations in a pass. torch.distributed must be initialized."""
        import deepspeed

        if not torch.cuda.is_available():  # its CPU communication needs a minute of compilation; gloo needs none
            deepspeed.ops.__compatible_ops__ = {}
        self.processes = processes
        self.weights = _trained_weights(model)
        self.writes = True
        self._stage = zero_stage(settings)
        self._shared = {"ranks": processes.size, "stage": self._stage}  # a checkpoint requires the same two
        optimizer = torch.optim.AdamW(self.weights.values(), lr=rate, weight_decay=0.0)
        decided: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # not used: the loss is weighted by tokens
            "gradient_clipping": MAX_GRADIENT_NORM,
        }
        if dtype != "float32":
            decided["torch_autocast"] = {"enabled": True, "dtype": dtype}
        self.model, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False, config={**settings, **decided}
        )

    def accumulate(self, objective: Tensor) -> None:
        """Compute the gradient of a step's objective, summed over the processes."""
        self.model.backward(objective * self.processes.size)  # DeepSpeed averages over the processes

    def apply(self, rate: float, step: int) -> None:
        """Make one update with that gradient."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = rate
        self.model.step()

    def whole_state(self) -> dict[str, Tensor] | None:
        """At stage 3 the trained weights, gathered on the first process; else None. Every process must call it."""
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
        """Write the parts of all processes to a folder, then the pointer that makes the checkpoint valid."""
        tag = f"step-{len(record['losses'])}"
        state = {**record, **_random_state(self.model.device)}
        with whole(path / tag):
            self.model.save_checkpoint(
                str(path), tag=tag, client_state={"said": state}, save_latest=False, exclude_frozen_parameters=True
            )
        self.processes.add_up(torch.zeros(1, device=self.model.device))  # waits for all parts
        if self.processes.rank != 0:
            return
        part = path / f"{POINTER}.part"
        part.write_text(json.dumps({"of": record["of"], "tag": tag, **self._shared}), encoding="utf-8")
        part.replace(path / POINTER)
        for older in path.glob("step-*"):
            if older.name != tag:
                shutil.rmtree(older, ignore_errors=True)

    def read(self, path: Path, work: str) -> dict[str, Any] | None:
        """As `Updates.read`; also None for a checkpoint with another number of processes or another ZeRO stage."""
        pointer = path / POINTER
        if not pointer.is_file():
            return None
        last = json.loads(pointer.read_text(encoding="utf-8"))
        if last["of"] != work or {key: last.get(key) for key in self._shared} != self._shared:
            return None
        _, client_state = self.model.load_checkpoint(str(path), tag=last["tag"], load_module_strict=False)
        state: dict[str, Any] = client_state["said"]
        _set_random_state(state, self.model.device)
        return state
