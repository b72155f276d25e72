"""Training checkpoints: a killed training goes on from the one beside its output folder, with the same result."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.training.steps import PART, Updates
from pipeline.training.zero import ZeroUpdates


@dataclass(slots=True)
class Progress:
    """What a training has done so far."""

    losses: list[float] = field(default_factory=list)  # one a step
    tokens: int = 0
    seconds: float = 0.0
    began_at: list[int] = field(default_factory=list)  # for each attempt, the steps that were done when it began


class TrainingCheckpoint:
    """The checkpoint of one training, shared by its processes."""

    def __init__(self, folder: Path, work: Any, seconds: float) -> None:
        """Prepare to read and write it; nothing is read yet.

        Args:
            folder: the training's output folder.
            work: all that decides the weights apart from the model and the versions; JSON values.
            seconds: between two checkpoints.
        """
        self.path = folder.with_name(f".{folder.name}.checkpoint")
        description = json.dumps([work, torch.__version__, version("peft")])
        self._work_digest = hashlib.sha256(description.encode()).hexdigest()
        self._seconds = seconds
        self._last = time.monotonic()

    def load(self, updates: Updates | ZeroUpdates) -> Progress:
        """Restore a training from its checkpoint, if there is one of the same work.

        Raises:
            RuntimeError: the processes read different checkpoints; a restart may succeed.
        """
        if updates.processes.rank == 0:  # of a process that was killed while it wrote
            for part in self.path.parent.glob(f"{escape(self.path.name)}.*{PART}"):
                part.unlink(missing_ok=True)
        state = updates.read(self.path, self._work_digest)
        fields = Progress.__dataclass_fields__
        progress = Progress() if state is None else Progress(**{k: value for k, value in state.items() if k in fields})
        steps = float(len(progress.losses))
        total = updates.processes.add_up(torch.tensor(steps, device=updates.model.device)).item()
        if total != steps * updates.processes.size:
            raise RuntimeError(f"this process read {self.path} at step {steps:g}, another one at another step")
        if state is None and updates.processes.rank == 0:
            self.remove()  # of other work, or of other ways to hold the weights: nobody will read it
        progress.began_at.append(len(progress.losses))
        return progress

    def save(self, updates: Updates | ZeroUpdates, progress: Progress) -> None:
        """Write a checkpoint if the last one is old enough. It appears whole or not at all."""
        due = time.monotonic() - self._last >= self._seconds
        if isinstance(updates, ZeroUpdates):  # all processes write together, so the clock of the first one decides
            own_vote = torch.tensor(float(due and updates.processes.rank == 0), device=updates.model.device)
            due = bool(updates.processes.add_up(own_vote).item())
        if not due or not updates.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        updates.write(self.path, {"of": self._work_digest, **asdict(progress)})
        self._last = time.monotonic()

    def remove(self) -> None:
        """Remove the checkpoint: the training has ended."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)
