"""One adapter's training loop, plain torch and peft: texts in, a folder with the adapter out.

The base model's weights are never changed; they may be bfloat16. The adapter's weights are float32, because
at bfloat16 the small steps at the end of a cosine schedule would be rounded away.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pipeline.errors import UserError

BUCKET_BATCHES = 8
"""Batches that are cut from one sorted bucket: larger wastes less on padding, smaller mixes better."""
MAX_GRADIENT_NORM = 1.0
RECORD = "training.json"
"""Beside the adapter's files: the settings, the versions and the loss of every step."""


class FinetuneConfig(BaseModel):
    """How an adapter is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["lora"] = Field("lora", description="Kind of adapter.")
    rank: int = Field(16, ge=1, description="Rank of the update of each weight.")
    lora_alpha: int = Field(32, ge=1, description="The update is scaled by lora_alpha / rank.")
    epochs: int = Field(3, ge=1, description="Times that every text is seen.")
    batch_size: int = Field(8, ge=1, description="Texts in a step; the last step of an epoch may hold fewer.")
    learning_rate: float = Field(1e-3, gt=0, description="Rate of the first step; a cosine takes it to zero.")
    max_tokens: int = Field(1024, ge=2, description="Texts are cut to this many tokens.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Arithmetic; the adapter is float32.")
    seed: int = Field(0, ge=0, description="Seed of the adapter's first weights and of the order of the texts.")


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """How far a training has come."""

    step: int  # 1 .. steps
    steps: int
    loss: float  # mean cross-entropy a token of this step's batch, before its update, in nats
    seconds: float  # since the first step began


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training did."""

    steps: int
    losses: tuple[float, ...]  # one a step, nats a token
    tokens: int  # that were predicted, over all epochs
    seconds: float


def train_adapter(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    config: FinetuneConfig,
    output_folder: str | Path,
    on_step: Callable[[TrainingStep], None] | None = None,
) -> TrainingResult:
    """Train one adapter on `texts` and write it, with `training.json`, to a folder that appears complete or not at all.

    The same model, texts, config and kind of device give the same adapter. The loss of a step is the mean
    cross-entropy over the tokens of its batch. The model comes back without the adapter, as it was.

    Args:
        model: a causal language model of transformers, on its device.
        tokenizer: the tokenizer that belongs to it.
        texts: documents, at least `config.batch_size`, each of at least 2 tokens.
        config: how to train.
        output_folder: local folder that does not exist yet.
        on_step: called after every step.

    Raises:
        UserError: the folder exists, the texts are too few or too short, or the loss is no finite number.
    """
    folder = Path(output_folder)
    if folder.exists():
        raise UserError(f"adapter folder {folder} exists already")
    if len(texts) < config.batch_size:
        raise UserError(f"fine-tuning needs at least batch_size = {config.batch_size} texts, got {len(texts)}")
    documents = encode(tokenizer, texts, config.max_tokens)
    was_training = model.training
    needed_gradients = [(weight, weight.requires_grad) for weight in model.parameters()]
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        torch.manual_seed(config.seed)
        adapted = peft.get_peft_model(model, _adapter_config(config))
        try:
            adapted.train()
            result = _train(adapted, documents, config, on_step)
            _write(adapted, config, result, folder)
        finally:
            adapted.unload()
            model.train(was_training)
            for weight, needed in needed_gradients:
                weight.requires_grad_(needed)
    return result


def encode(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The token ids of each text, cut to `max_tokens`.

    Raises:
        UserError: a text has fewer than 2 tokens, so that there is nothing to predict.
    """
    documents = [tokenizer(text)["input_ids"][:max_tokens] for text in texts]
    for index, document in enumerate(documents):
        if len(document) < 2:
            raise UserError(f"fine-tuning text {index} has {len(document)} tokens, needs at least 2")
    return documents


def batches_of_an_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Every index once, in batches of texts of like length, in an order that seed and epoch decide.

    The texts are shuffled, cut into buckets of a few batches, sorted by length inside a bucket and cut into batches;
    then the batches are shuffled.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    size = BUCKET_BATCHES * batch_size
    batches: list[list[int]] = []
    for start in range(0, len(order), size):
        bucket = sorted(order[start : start + size], key=lambda index: lengths[index])
        batches += [bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size)]
    rng.shuffle(batches)
    return batches


def batch_loss(model: Any, documents: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
    """Mean cross-entropy over the predicted tokens of a batch (a float32 scalar, nats), and how many they are.

    Padding is known from the lengths: in many models the pad token is a token that texts hold too.
    """
    longest = max(len(document) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
        mask[row, : len(document)] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    predicted = mask[:, 1:].bool()
    loss = torch.nn.functional.cross_entropy(logits[predicted].float(), ids[:, 1:][predicted])
    return loss, int(predicted.sum())


def _train(
    model: Any,
    documents: list[list[int]],
    config: FinetuneConfig,
    on_step: Callable[[TrainingStep], None] | None,
) -> TrainingResult:
    lengths = [len(document) for document in documents]
    steps = config.epochs * math.ceil(len(documents) / config.batch_size)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    losses: list[float] = []
    tokens = 0
    start = time.monotonic()
    for epoch in range(config.epochs):
        for batch in batches_of_an_epoch(lengths, config.batch_size, config.seed, epoch):
            with _arithmetic(model, config):
                loss, predicted = batch_loss(model, [documents[index] for index in batch])
            losses.append(loss.item())
            tokens += predicted
            if not math.isfinite(losses[-1]):
                raise UserError(
                    f"the fine-tuning loss is {losses[-1]} at step {len(losses)} of {steps}; "
                    f"a lower learning_rate than {config.learning_rate} or dtype float32 may mend it"
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if on_step is not None:
                on_step(TrainingStep(len(losses), steps, losses[-1], time.monotonic() - start))
    return TrainingResult(len(losses), tuple(losses), tokens, time.monotonic() - start)


def _adapter_config(config: FinetuneConfig) -> peft.PeftConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
    )


def _arithmetic(model: Any, config: FinetuneConfig) -> AbstractContextManager[Any]:
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(model.device.type, dtype=getattr(torch, config.dtype))


def _cuda_devices(model: Any) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []


def _write(model: Any, config: FinetuneConfig, result: TrainingResult, folder: Path) -> None:
    """Write the adapter beside its place under a name of its own, and rename it when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # "auto" would ask the hub whether the vocabulary has grown.
        model.save_pretrained(str(attempt), safe_serialization=True, save_embedding_layers=False)
        _sort_modules(attempt / "adapter_config.json")
        versions = {"torch": torch.__version__, "peft": peft.__version__}
        record = {"config": config.model_dump(), "versions": versions, "result": asdict(result)}
        (attempt / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        attempt.chmod(0o755)
        os.rename(attempt, folder)
    except BaseException:
        shutil.rmtree(attempt, ignore_errors=True)
        raise


def _sort_modules(path: Path) -> None:
    """Put the adapter's module names, which peft keeps in a set, in an order that no hash seed changes."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = sorted(settings["target_modules"])
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
