"""Adapters before training: layers, peft settings, AdaLoRA's penalty, and the name of the folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError, nearest
from pipeline.training.training_documents import TrainingDocument, document_bytes

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor

ADALORA_START = 1.5
"""Ratio of AdaLoRA's initial rank to its final rank."""

ADALORA_ORTHOGONAL = 0.5
"""Weight of AdaLoRA's penalty on directions that are not orthogonal."""


def linear_modules(model: Any) -> list[str]:
    """Full names of the linear layers of a model, without its output layer."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not output]


def check_targets(model: Any, target_modules: Sequence[str]) -> None:
    """Check that a model has the target layers of an adapter; its weights are not read.

    Raises:
        UserError: a layer is missing.
    """
    modules = linear_modules(model)
    for module in target_modules:
        if not any(name == module or name.endswith(f".{module}") for name in modules):
            short = sorted({name.rsplit(".", 1)[-1] for name in modules})
            raise UserError(f"target_modules: no linear layer {module!r} in the model; {nearest(module, short)}")


def adapter_config(model: Any, config: FinetuneConfig, steps: int) -> PeftConfig:
    """The peft configuration of an adapter for this model.

    AdaLoRA starts at 1.5 times `rank`, keeps it for the first tenth of the steps, and has `rank` in the last three
    tenths. IA3 scales the inputs of the feed-forward output layers that peft lists for this type of model, and the
    outputs of all others.

    Args:
        model: base model.
        config: settings with an adapter method.
        steps: number of steps of the whole training.

    Raises:
        UserError: target_modules that the model does not have, or too few steps for AdaLoRA.
    """
    import peft
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD

    targets: str | list[str] = "all-linear"
    if config.target_modules is not None:
        check_targets(model, config.target_modules)
        targets = list(config.target_modules)
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": targets}
    if config.method == "ia3":
        # As a pattern: a list must be a subset of target_modules, whose names may have another length.
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
    """AdaLoRA's penalty (Zhang et al. 2023, eq. 4): the mean deviation of its directions from orthogonality.

    Args:
        weights: trained weights, by name.

    Returns:
        float32 scalar, >= 0, already weighted.
    """
    import torch

    distances = []
    for name, weight in weights.items():
        if "lora_A" in name or "lora_B" in name:
            products = weight @ weight.T if "lora_A" in name else weight.T @ weight
            identity = torch.eye(products.shape[0], dtype=products.dtype, device=products.device)
            distances.append(torch.linalg.norm(products - identity))
    return ADALORA_ORTHOGONAL * torch.stack(distances).mean()


def adapter_key(base: Mapping[str, str], config: FinetuneConfig, documents: Iterable[TrainingDocument]) -> str:
    """A name for the adapter of a training: a digest of everything that determines its weights.

    Args:
        base: fingerprint of the base model (`models.fingerprint_model`); its dtype is ignored: `config` has another.
        config: settings of the training.
        documents: training documents, in order. The tokens of chats depend on their template and its rendering.

    Returns:
        12 hexadecimal digits.
    """
    identity = {key: base[key] for key in ("model", "tokenizer", "quantization")}
    content = hashlib.sha256(json.dumps([identity, config.settings()]).encode())
    for document in documents:
        data = document_bytes(document)
        content.update(len(data).to_bytes(8, "big") + data)
    return content.hexdigest()[:12]
