"""From the loss of a batch to new weights: in one process, or in several that share each batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from pipeline.store.space import whole

MAX_GRADIENT_NORM = 1.0
BUCKET_ELEMENTS = 8 << 20
"""Gradients that are added up over the processes in one call."""

PART = ".part"
"""End of the name of a checkpoint that is being written. A process writes one of its own: another may not have died."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that train one model together; one alone by default."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def joined() -> ProcessGroup:
        """The process group of torch.distributed, or a single process where it has not been started."""
        if not distributed.is_available() or not distributed.is_initialized():
            return ProcessGroup()
        return ProcessGroup(distributed.get_rank(), distributed.get_world_size())

    def add_up(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the lowest rank that has one, or None. Every process must call this."""
        if self.size == 1:
            return problem
        messages: list[str | None] = [None] * self.size
        distributed.all_gather_object(messages, problem)
        return next((message for message in messages if message is not None), None)


ALONE = ProcessGroup()


def trained_weights(model: Any) -> dict[str, Tensor]:
    """The weights that take gradients, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


class Updates:
    """AdamW over the trained weights. Every process holds all of them and makes the same step."""

    def __init__(self, model: Any, rate: float, processes: ProcessGroup, adalora: Any = None) -> None:
        """`adalora` is peft's AdaLoRA model, which lowers the ranks of its updates by their gradients."""
        self.model = model
        self.processes = processes
        self.weights = trained_weights(model)
        self.writes = processes.rank == 0  # whether this process writes a part of a checkpoint
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=rate, weight_decay=0.0, fused=True)
        self._adalora = adalora

    def accumulate(self, objective: Tensor) -> None:
        """Add the gradient of a part of a step's objective."""
        objective.backward()

    def apply(self, rate: float, step: int) -> None:
        """One update by the gradients of all parts, summed over the processes; `step` counts from 1."""
        self._add_up_gradients()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), MAX_GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._adalora is not None:
            for weight in self.weights.values():  # a layer that the loss does not reach is worth no rank
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._adalora.update_and_allocate(step)
        self._optimizer.zero_grad(set_to_none=True)

    def whole_state(self) -> dict[str, Tensor] | None:
        """None: the model itself holds all of its weights (compare `ZeroUpdates.whole_state`)."""
        return None

    def write(self, path: Path, record: Mapping[str, Any]) -> None:
        """Write the weights, the optimizer's state and `record` to one file, whole or not at all."""
        state = {
            **record,
            **random_state(self.model.device),
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
            The record that `write` was given; None, with nothing changed, if there is no checkpoint of this work.
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
        set_random_state(state, self.model.device)
        return state

    def _add_up_gradients(self) -> None:
        if self.processes.size == 1:
            return
        weights = list(self.weights.values())
        # A weight that no process has used (an expert without tokens) must stay without a gradient, as in one process.
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


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the random number generators that a training draws from."""
    state = {"rng": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators to a state from `random_state`."""
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
