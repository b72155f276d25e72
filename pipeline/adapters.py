"""Adapters: which layers they reach, what their training needs beside a loss, and whose base model they belong to."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.errors import UserError, nearest

if TYPE_CHECKING:
    from pipeline.config import FinetuneConfig

RECORD = "training.json"
"""Beside the weights: the settings, the versions, the base model and the loss of every step."""
ADALORA_START = 1.5
"""AdaLoRA begins with this many times the rank that it ends with."""
ADALORA_ORTHOGONAL = 0.5
"""Weight of AdaLoRA's penalty on directions that are not orthogonal."""


def linear_modules(model: Any) -> list[str]:
    """Full names of the linear layers of a model, without its output layer."""
    output = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not output]


def adapter_config(model: Any, config: FinetuneConfig, steps: int) -> peft.PeftConfig:
    """What peft is told of an adapter for this model.

    AdaLoRA starts at 1.5 times `rank`, keeps that for a tenth of the steps, and is at `rank` for the last three
    tenths. IA3 scales the inputs of the feed-forward output layers that peft knows for this kind of model, and the
    outputs of all others.

    Args:
        model: the base model.
        config: with a method that is an adapter.
        steps: of the whole training.

    Raises:
        UserError: target_modules that the model does not have, or too few steps for AdaLoRA.
    """
    targets: str | list[str] = "all-linear"
    if config.target_modules is not None:
        existing = linear_modules(model)
        for wanted in config.target_modules:
            if not any(name == wanted or name.endswith(f".{wanted}") for name in existing):
                short = sorted({name.rsplit(".", 1)[-1] for name in existing})
                raise UserError(f"target_modules: no linear layer {wanted!r} in the model; {nearest(wanted, short)}")
        targets = list(config.target_modules)
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": targets}
    if config.method == "ia3":
        # As a pattern: a list must be part of target_modules, which may be written in another length.
        names = "|".join(re.escape(name) for name in FEEDFORWARD.get(model.config.model_type, []))
        return peft.IA3Config(feedforward_modules=rf"(.*\.)?({names})" if names else [], **common)
    if config.method == "adalora":
        if steps < 2:
            raise UserError(f"method adalora spreads its ranks over the steps and needs at least 2, got {steps}")
        return peft.AdaLoraConfig(
            init_r=math.ceil(ADALORA_START * config.rank),
            target_r=config.rank,
            tinit=steps // 10,
            tfinal=steps * 3 // 10,
            total_step=steps,
            lora_alpha=config.lora_alpha,
            lora_dropout=0.0,
            orth_reg_weight=ADALORA_ORTHOGONAL,
            **common,
        )
    return peft.LoraConfig(r=config.rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, **common)


def orthogonality(weights: dict[str, Tensor]) -> Tensor:
    """AdaLoRA's penalty (Zhang et al. 2023, eq. 4): the mean distance of its directions from orthogonal ones.

    Args:
        weights: those that are trained, by name.

    Returns:
        float32 scalar, >= 0, already weighted.
    """
    distances = []
    for name, weight in weights.items():
        if "lora_A" in name or "lora_B" in name:
            products = weight @ weight.T if "lora_A" in name else weight.T @ weight
            identity = torch.eye(products.shape[0], dtype=products.dtype, device=products.device)
            distances.append(torch.linalg.norm(products - identity))
    return ADALORA_ORTHOGONAL * torch.stack(distances).mean()


def adapter_key(base: Mapping[str, str], config: FinetuneConfig, texts: Iterable[str]) -> str:
    """A name for the adapter that a training makes: a digest of all that decides its weights.

    Args:
        base: what the base model is (`models.fingerprint_model`); its arithmetic is left out, the training has its own.
        config: how it is trained.
        texts: what it is trained on, in order.

    Returns:
        12 hexadecimal digits.
    """
    said = {key: base[key] for key in ("model", "tokenizer", "quantization")}
    whole = hashlib.sha256(json.dumps([said, config.settings()]).encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:12]


def check_base(folder: Path, base: str, shown: str) -> None:
    """Refuse an adapter that was trained on another base model, where its record says on which.

    Args:
        folder: of the adapter.
        base: SHA-256 of the base model that it is to be used with, as `models.fingerprint_model` gives it.
        shown: the path of that model.

    Raises:
        UserError: it is another.
    """
    try:
        said = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("base") or {}
    except (OSError, ValueError, AttributeError):
        return  # written by other software: what does not fit shows when it is loaded
    trained_on = said.get("model", base)
    if trained_on != base:
        raise UserError(
            f"adapter {folder} is for another base model: trained on weights {trained_on[:12]}, "
            f"model {shown} has {base[:12]}"
        )


def load_adapter(model: Any, folder: Path, shown: str) -> Any:
    """The model with an adapter over it, all of whose weights have found their layer.

    Raises:
        UserError: the adapter is for another base model.
    """
    problem = f"adapter {folder} is for another base model than {shown}"
    try:
        with warnings.catch_warnings():  # of AdaLoRA's rank pattern, which peft heeds and calls ignored
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "size mismatch" in str(error) or "not found in the base model" in str(error):
            raise UserError(f"{problem}: {lines[-1]}") from None
        raise
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as weights:
            written = set(weights.keys())
            unlike = sorted(written ^ peft.get_peft_model_state_dict(adapted).keys())
        if unlike:
            raise UserError(f"{problem}: only one of them has {unlike[0]}")
    return adapted
