"""DeepSpeed's ZeRO: the same updates where one device holds neither the base model nor the optimizer's state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.training.steps import MAX_GRADIENT_NORM, Ranks, random_state, set_random_state, trained_weights

STAGES = (1, 2, 3)
DECIDED = (
    "optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip
"""What a settings file must leave to the training's own settings."""

POINTER = "last.json"


def read_zero_settings(path: str) -> dict[str, Any]:
    """The settings of a DeepSpeed JSON file such as `cluster/deepspeed/zero2.json`.

    Raises:
        UserError: no such file, not JSON, no ZeRO stage in it, a setting that the training decides, or DeepSpeed is
            not installed.
    """
    try:
        settings = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
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


def zero_stage(settings: Mapping[str, Any]) -> Any:
    """The ZeRO stage that settings ask for, if any."""
    zero = settings.get("zero_optimization")
    return zero.get("stage") if isinstance(zero, Mapping) else None


class ZeroUpdates:
    """AdamW over the trained weights, whose state (and at stage 3 the model's weights) the ranks hold in parts."""

    def __init__(self, model: Any, rate: float, dtype: str, ranks: Ranks, settings: Mapping[str, Any]) -> None:
        """`dtype` is the arithmetic of a pass. torch.distributed must have been started."""
        import deepspeed

        self.ranks = ranks
        self.weights = trained_weights(model)
        self.writes = True
        self._stage = zero_stage(settings)
        self._shared = {"ranks": ranks.size, "stage": self._stage}  # between whom, and what of it
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

    def apply(self, objective: Tensor, rate: float, step: int) -> None:
        """One update by the gradient of `objective`, summed over the ranks."""
        for group in self.model.optimizer.param_groups:
            group["lr"] = rate
        self.model.backward(objective * self.ranks.size)  # DeepSpeed takes the mean over the ranks
        self.model.step()

    def whole_state(self) -> dict[str, Tensor] | None:
        """The trained weights, gathered on the first rank, where the ranks hold them in parts; every rank must ask."""
        if self._stage < 3:
            return None
        import deepspeed

        gathered: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            with deepspeed.zero.GatheredParameters([weight]):
                if self.ranks.rank == 0:
                    gathered[name] = weight.detach().cpu().clone()
        return gathered

    def write(self, path: Path, said: Mapping[str, Any]) -> None:
        """Write every rank's part to a folder, then the pointer that makes it count."""
        tag = f"step-{len(said['losses'])}"
        state = {**said, **random_state(self.model.device)}
        self.model.save_checkpoint(
            str(path), tag=tag, client_state={"said": state}, save_latest=False, exclude_frozen_parameters=True
        )
        self.ranks.add_up(torch.zeros(1, device=self.model.device))  # all parts are there
        if self.ranks.rank != 0:
            return
        part = path / f"{POINTER}.part"
        part.write_text(json.dumps({"of": said["of"], "tag": tag, **self._shared}), encoding="utf-8")
        part.replace(path / POINTER)
        for older in path.glob("step-*"):
            if older.name != tag:
                shutil.rmtree(older, ignore_errors=True)

    def read(self, path: Path, of: str) -> dict[str, Any] | None:
        """Put everything where it was and return what was said; None if it is `of` other work or other ranks."""
        pointer = path / POINTER
        if not pointer.is_file():
            return None
        last = json.loads(pointer.read_text(encoding="utf-8"))
        if last["of"] != of or {key: last.get(key) for key in self._shared} != self._shared:
            return None
        _, state = self.model.load_checkpoint(str(path), tag=last["tag"], load_module_strict=False)
        said: dict[str, Any] = state["said"]
        set_random_state(said, self.model.device)
        return said
