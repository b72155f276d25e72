"""What a killed training goes on from: a checkpoint beside its output folder, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch

from pipeline.training.steps import Updates
from pipeline.training.zero import ZeroUpdates


@dataclass(slots=True)
class Progress:
    """What a training has done so far."""

    losses: list[float] = field(default_factory=list)  # one a step
    tokens: int = 0
    seconds: float = 0.0
    began_at: list[int] = field(default_factory=list)  # steps that were done when an attempt began, one an attempt


class TrainingCheckpoint:
    """The checkpoint of one training, shared by its ranks."""

    def __init__(self, folder: Path, decides: Any, seconds: float) -> None:
        """Open what may be there.

        Args:
            folder: the training's output folder.
            decides: all that decides its weights beside the model and the versions, as JSON takes it.
            seconds: between two checkpoints.
        """
        self.path = folder.with_name(f".{folder.name}.checkpoint")
        said = json.dumps([decides, torch.__version__, peft.__version__])
        self._of = hashlib.sha256(said.encode()).hexdigest()
        self._seconds = seconds
        self._last = time.monotonic()

    def load(self, updates: Updates | ZeroUpdates) -> Progress:
        """Put everything where it was. A checkpoint of other work is ignored.

        Raises:
            RuntimeError: the ranks have not read the same checkpoint; to start again may mend it.
        """
        said = updates.read(self.path, self._of)
        known = Progress.__dataclass_fields__
        progress = Progress() if said is None else Progress(**{k: value for k, value in said.items() if k in known})
        steps = float(len(progress.losses))
        total = updates.ranks.add_up(torch.tensor(steps, device=updates.model.device)).item()
        if total != steps * updates.ranks.size:
            raise RuntimeError(f"this rank read {self.path} at step {steps:g}, another one at another step")
        if said is None and updates.ranks.rank == 0:
            self.remove()  # of other work, or of other ways to hold the weights: nobody will read it
        progress.began_at.append(len(progress.losses))
        return progress

    def save(self, updates: Updates | ZeroUpdates, progress: Progress) -> None:
        """Write a checkpoint, whole or not at all, when the last one is old enough."""
        due = time.monotonic() - self._last >= self._seconds
        if isinstance(updates, ZeroUpdates):  # all ranks write, so the first one's clock counts
            mine = torch.tensor(float(due and updates.ranks.rank == 0), device=updates.model.device)
            due = bool(updates.ranks.add_up(mine).item())
        if not due or not updates.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        updates.write(self.path, {"of": self._of, **asdict(progress)})
        self._last = time.monotonic()

    def remove(self) -> None:
        """Forget it: the training has ended."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)
