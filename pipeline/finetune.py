"""One training loop, plain torch and peft: texts in, a folder with an adapter or a whole model out.

An adapter leaves the base model's weights as they are; they may be bfloat16. What is trained is float32, because
at bfloat16 the small steps at the end of a cosine schedule would be rounded away.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from pydantic import Field
from torch import Tensor

from pipeline.errors import UserError
from pipeline.settings import Section

BUCKET_BATCHES = 8
"""Batches that are cut from one sorted bucket: larger wastes less on padding, smaller mixes better."""
MAX_GRADIENT_NORM = 1.0
RECORD = "training.json"
"""Beside the weights: the settings, the versions and the loss of every step."""
CHECKPOINT_SECONDS = 60.0
"""How much work a killed training loses at most, about."""


class FinetuneConfig(Section):
    """How texts are trained into a model."""

    method: Literal["lora", "full"] = Field("lora", description="An adapter of this kind, or all the weights.")
    rank: int = Field(16, ge=1, description="Rank of the update of each weight.")
    lora_alpha: int = Field(32, ge=1, description="The update is scaled by lora_alpha / rank.")
    epochs: int = Field(3, ge=1, description="Times that every text is seen.")
    copies: int = Field(1, ge=1, description="Times that every text stands in an epoch.")
    batch_size: int = Field(8, ge=1, description="Texts in a step; the last step of an epoch may hold fewer.")
    learning_rate: float = Field(1e-3, gt=0, description="Rate of the first step; a cosine takes it to zero.")
    max_tokens: int = Field(1024, ge=2, description="Texts are cut to this many tokens.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Arithmetic; trained weights are float32.")
    seed: int = Field(0, ge=0, description="Seed of an adapter's first weights and of the order of the texts.")


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


def train(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    config: FinetuneConfig,
    output_folder: str | Path,
    on_step: Callable[[TrainingStep], None] | None = None,
) -> TrainingResult:
    """Train on `texts` and write the result, with `training.json`, to a folder that appears whole or not at all.

    The same model, texts, config and kind of device give the same weights, also where the training was killed and
    called again: it goes on from a checkpoint beside the folder. The loss of a step is the mean cross-entropy over
    the tokens of its batch. `lora` writes an adapter, and the model comes back without it, as it was; `full` writes a
    model with its tokenizer, and the model comes back trained.

    Args:
        model: a causal language model of transformers, on its device; float32 for `full`.
        tokenizer: the tokenizer that belongs to it.
        texts: documents, at least `config.batch_size` (copies counted), each of at least 2 tokens.
        config: how to train.
        output_folder: local folder that does not exist yet.
        on_step: called after every step.

    Raises:
        UserError: the folder exists, the texts are too few or too short, the weights cannot be trained in full, or
            the loss is no finite number.
    """
    folder = Path(output_folder)
    if folder.exists():
        raise UserError(f"folder {folder} exists already")
    if len(texts) * config.copies < config.batch_size:
        raise UserError(f"fine-tuning needs at least batch_size = {config.batch_size} texts, got {len(texts)}")
    documents = encode(tokenizer, texts, config.max_tokens) * config.copies
    checkpoint = _Checkpoint(folder, config, documents)
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        torch.manual_seed(config.seed)
        if config.method == "full":
            return _train_fully(model, tokenizer, documents, config, folder, checkpoint, on_step)
        return _train_adapter(model, documents, config, folder, checkpoint, on_step)


def _train_adapter(
    model: Any,
    documents: list[list[int]],
    config: FinetuneConfig,
    folder: Path,
    checkpoint: _Checkpoint,
    on_step: Callable[[TrainingStep], None] | None,
) -> TrainingResult:
    def save(attempt: Path) -> None:
        # "auto" would ask the hub whether the vocabulary has grown.
        adapted.save_pretrained(str(attempt), safe_serialization=True, save_embedding_layers=False)
        _sort_modules(attempt / "adapter_config.json")

    with _as_it_was(model):
        adapted = peft.get_peft_model(model, _adapter_config(config))
        try:
            adapted.train()
            result = _train(adapted, documents, config, checkpoint, on_step)
            _write(save, config, result, folder, checkpoint)
        finally:
            adapted.unload()
    return result


def _train_fully(
    model: Any,
    tokenizer: Any,
    documents: list[list[int]],
    config: FinetuneConfig,
    folder: Path,
    checkpoint: _Checkpoint,
    on_step: Callable[[TrainingStep], None] | None,
) -> TrainingResult:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            "method full trains all the weights, which a GGUF file or 8-bit and 4-bit loading do not give: "
            "use method lora, or a model in safetensors"
        )
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        raise UserError(f"method full trains float32 weights, got {model.dtype}: load the model with dtype float32")

    def save(attempt: Path) -> None:
        model.save_pretrained(str(attempt), safe_serialization=True)
        tokenizer.save_pretrained(str(attempt))

    with _as_it_was(model):
        model.train().requires_grad_(True)
        result = _train(model, documents, config, checkpoint, on_step)
        _write(save, config, result, folder, checkpoint)
    return result


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Give the model its mode back, and each weight whether it takes gradients."""
    was_training = model.training
    needed_gradients = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        model.train(was_training)
        for weight, needed in needed_gradients:
            weight.requires_grad_(needed)


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
    checkpoint: _Checkpoint,
    on_step: Callable[[TrainingStep], None] | None,
) -> TrainingResult:
    lengths = [len(document) for document in documents]
    batches = [
        batch
        for epoch in range(config.epochs)
        for batch in batches_of_an_epoch(lengths, config.batch_size, config.seed, epoch)
    ]
    steps = len(batches)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    losses, tokens, before = checkpoint.load(model, weights, optimizer, schedule)
    start = time.monotonic()
    for batch in batches[len(losses) :]:
        with _arithmetic(model, config):
            loss, predicted = batch_loss(model, [documents[index] for index in batch])
        losses.append(loss.item())
        tokens += predicted
        if not math.isfinite(losses[-1]):
            checkpoint.remove()
            raise UserError(
                f"the fine-tuning loss is {losses[-1]} at step {len(losses)} of {steps}; "
                f"a lower learning_rate than {config.learning_rate} or dtype float32 may mend it"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        seconds = before + time.monotonic() - start
        checkpoint.save(model, weights, optimizer, schedule, losses, tokens, seconds)
        if on_step is not None:
            on_step(TrainingStep(len(losses), steps, losses[-1], seconds))
    return TrainingResult(len(losses), tuple(losses), tokens, before + time.monotonic() - start)


class _Checkpoint:
    """One file beside the output folder from which a killed training goes on, bit for bit."""

    def __init__(self, folder: Path, config: FinetuneConfig, documents: Sequence[Sequence[int]]) -> None:
        self.path = folder.with_name(f".{folder.name}.checkpoint")
        said = json.dumps([config.model_dump(), list(documents), torch.__version__, peft.__version__])
        self.of = hashlib.sha256(said.encode()).hexdigest()
        self._last = time.monotonic()

    def load(
        self, model: Any, weights: Mapping[str, Tensor], optimizer: Any, schedule: Any
    ) -> tuple[list[float], int, float]:
        """Put everything where it was; the losses so far, tokens and seconds. A checkpoint of other work is ignored."""
        if not self.path.exists():
            return [], 0, 0.0
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        if state["of"] != self.of:
            return [], 0, 0.0
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state["weights"][name])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"])
        if model.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], model.device)
        return list(state["losses"]), state["tokens"], state["seconds"]

    def save(
        self,
        model: Any,
        weights: Mapping[str, Tensor],
        optimizer: Any,
        schedule: Any,
        losses: list[float],
        tokens: int,
        seconds: float,
    ) -> None:
        """Write a checkpoint, whole or not at all, when the last one is old enough."""
        if time.monotonic() - self._last < CHECKPOINT_SECONDS:
            return
        state = {
            "of": self.of,
            "weights": {name: weight.detach() for name, weight in weights.items()},
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "losses": losses,
            "tokens": tokens,
            "seconds": seconds,
        }
        if model.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(model.device)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        torch.save(state, part)
        part.replace(self.path)
        self._last = time.monotonic()

    def remove(self) -> None:
        """Forget it: the training has ended."""
        self.path.unlink(missing_ok=True)


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


def _write(
    save: Callable[[Path], None],
    config: FinetuneConfig,
    result: TrainingResult,
    folder: Path,
    checkpoint: _Checkpoint,
) -> None:
    """Write the weights beside their place under a name of their own, and rename the folder when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(attempt)
        versions = {"torch": torch.__version__, "peft": peft.__version__}
        record = {"config": config.model_dump(), "versions": versions, "result": asdict(result)}
        (attempt / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        attempt.chmod(0o755)
        os.rename(attempt, folder)
    except BaseException:
        shutil.rmtree(attempt, ignore_errors=True)
        raise
    checkpoint.remove()


def _sort_modules(path: Path) -> None:
    """Put the adapter's module names, which peft keeps in a set, in an order that no hash seed changes."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = sorted(settings["target_modules"])
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
