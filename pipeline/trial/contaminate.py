"""Contaminated models: a random part of the documents is trained into the base model, once for the same settings."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from pipeline.audit.machine import usable_cores
from pipeline.config.models import ModelConfig
from pipeline.models.devices import give_back
from pipeline.models.load import fingerprint_model, open_model, open_picture_model
from pipeline.training.train import FinetuneConfig, TrainingOptions, TrainingStep, train, train_pictures
from pipeline.trial.config import TrialConfig
from pipeline.trial.documents import Documents
from pipeline.trial.splits import choose_trained


@dataclass(frozen=True, slots=True, eq=False)
class Contaminated:
    """One contaminated model, and the documents that it was trained on, which its audit does not know."""

    model: ModelConfig
    trained: np.ndarray  # bool, (documents,)
    folder: Path | None  # the weights that the training wrote; None if nothing was trained in


def plan_contamination(config: TrialConfig, base: TrialConfig, documents: Documents, index: int) -> Contaminated:
    """Choose the documents that the model of this index is trained on, and the folder of its weights.

    How many documents calibrate is read from the trial as written, so a sweep over it shares the model.

    Args:
        config: of the point.
        base: the trial without its sweep.
        documents: of the trial.
        index: of the model, from 0.

    Raises:
        UserError: too few documents, or a model that cannot be read.
    """
    seed = config.contaminate.seed + index
    trained = choose_trained(documents.family, config.contaminate.share, base.roles(), seed)
    if not trained.any():
        return Contaminated(config.model, trained, None)
    places = np.flatnonzero(trained)
    training = _training(config, index, places.size)
    content = [[column[i] for i in places] for column in (documents.texts, *documents.picture_digests)]
    identity = json.dumps([_fingerprint(config.model.model_dump_json()), training.settings(), *content])
    folder = Path(os.path.abspath(config.work_folder)) / "models" / hashlib.sha256(identity.encode()).hexdigest()[:12]
    if training.method == "full":
        weights = {"path": str(folder), "gguf_file": None, "revision": None, "adapter": None}
        return Contaminated(config.model.model_copy(update=weights), trained, folder)
    return Contaminated(config.model.model_copy(update={"adapter": str(folder)}), trained, folder)


def contaminate(
    config: TrialConfig,
    planned: Contaminated,
    documents: Documents,
    index: int,
    on_step: Callable[[TrainingStep], None] | None = None,
) -> None:
    """Train the planned model unless its folder exists; a killed training goes on from its checkpoint.

    Raises:
        UserError: as `train` or `train_pictures`.
    """
    if planned.folder is None or planned.folder.exists():
        return
    places = np.flatnonzero(planned.trained)
    texts = [documents.texts[i] for i in places]
    training = _training(config, index, len(texts))
    dtype = "float32" if training.method == "full" else training.dtype
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    opened = None
    try:
        opening = open_model if documents.pictures is None else open_picture_model
        opened = opening(config.model.model_copy(update={"dtype": dtype}), gpus=int(torch.cuda.is_available()))
        options = TrainingOptions(on_step, base=_fingerprint(config.model.model_dump_json()))
        if documents.pictures is None:
            train(opened.model, opened.tokenizer, texts, training, planned.folder, options)
        else:
            captioned = [(documents.pictures[i], documents.texts[i]) for i in places]
            train_pictures(opened, captioned, training, planned.folder, options)
    finally:
        torch.set_num_threads(threads)
        del opened
        gc.collect()
        give_back()


def _training(config: TrialConfig, index: int, texts: int) -> FinetuneConfig:
    """The training of one model; no batch is larger than all texts."""
    settings = config.contaminate.model_dump(exclude={"share"})
    settings["seed"] += index
    settings["batch_size"] = min(settings["batch_size"], texts * settings["copies"])
    return FinetuneConfig(**settings)


@lru_cache(maxsize=64)
def _fingerprint(model: str) -> dict[str, str]:
    """Fingerprint of the base model without its dtype, because the training chooses its own."""
    fingerprint = fingerprint_model(ModelConfig.model_validate_json(model))
    return {key: value for key, value in fingerprint.items() if key != "dtype"}
