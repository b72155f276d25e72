"""The training loop with torch and peft: from texts to a folder with an adapter or a whole model.

The base model's weights, which an adapter does not change, may be bfloat16. Trained weights are float32, because
bfloat16 would round away the small steps at the end of a cosine schedule. Several processes of torch.distributed share
each batch and get the same weights as one process.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config.training import FinetuneConfig
from pipeline.corpus.picture_files import open_picture
from pipeline.errors import UserError
from pipeline.models.checkpoints import ADAPTER_CONFIG
from pipeline.models.devices import BUILDING
from pipeline.models.lengths import length_rule
from pipeline.models.load import RECORD, adapter_record
from pipeline.models.merging import refuse_layers_of_adapter
from pipeline.models.opened import LanguageModel, embedding_rows, unknown_id
from pipeline.models.picture_prompts import caption_ids, padded_prompts, picture_prompt
from pipeline.store.files import whole
from pipeline.training.adapter import adapter_config, orthogonality
from pipeline.training.memory import (
    Loss,
    PassSize,
    arithmetic,
    batch_loss,
    explained,
    loss_of_tokens,
    pass_size,
    recomputed,
    split_passes,
    typed,
)
from pipeline.training.steps import ALONE, PART, ProcessGroup, Updates, ZeroUpdates
from pipeline.training.training_documents import ScoredTokens, TrainingDocument, read_tokens

BUCKET_BATCHES = 8
"""Batches per bucket of sorted texts: a larger bucket has less padding, a smaller one more randomness."""

CHECKPOINT_SECONDS = 60.0
"""Approximate maximum work that a killed training loses, in seconds."""

NOT_IN_FULL = (
    "method full trains all the weights, which a GGUF file or 8-bit and 4-bit loading do not give: "
    "use method lora, or a model in safetensors"
)


@dataclass(slots=True)
class Progress:
    """The progress of a training."""

    losses: list[float] = field(default_factory=list)  # one per step
    tokens: int = 0
    seconds: float = 0.0
    began_at: list[int] = field(default_factory=list)  # completed steps at the start of each attempt


class TrainingCheckpoint:
    """The checkpoint of one training, shared by its processes."""

    def __init__(self, folder: Path, work: Any, seconds: float) -> None:
        """Prepare reading and writing; nothing is read yet.

        Args:
            folder: the training's output folder.
            work: everything that determines the weights except the model and the versions, as JSON values.
            seconds: minimum time between two checkpoints.
        """
        self.path = folder.with_name(f".{folder.name}.checkpoint")
        description = json.dumps([work, torch.__version__, version("peft")])
        self._work_digest = hashlib.sha256(description.encode()).hexdigest()
        self._seconds = seconds
        self._last = time.monotonic()

    def load(self, updates: Updates | ZeroUpdates) -> Progress:
        """Restore a training from its checkpoint, if there is one for the same work.

        Raises:
            RuntimeError: the processes read different checkpoints; a restart may succeed.
        """
        if updates.processes.rank == 0:  # left by a process that was killed during a write
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
            self.remove()  # for other work or another distribution of weights
        progress.began_at.append(len(progress.losses))
        return progress

    def save(self, updates: Updates | ZeroUpdates, progress: Progress) -> None:
        """Write a checkpoint atomically if the last one is old enough."""
        due = time.monotonic() - self._last >= self._seconds
        if isinstance(updates, ZeroUpdates):  # all processes write together, by the clock of the first one
            own_vote = torch.tensor(float(due and updates.processes.rank == 0), device=updates.model.device)
            due = bool(updates.processes.add_up(own_vote).item())
        if not due or not updates.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        updates.write(self.path, {"of": self._work_digest, **asdict(progress)})
        self._last = time.monotonic()

    def remove(self) -> None:
        """Remove the checkpoint after the end of the training."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The state of a training after a step."""

    step: int  # 1 .. steps
    steps: int
    loss: float  # mean cross-entropy per token of this step's batch before its update, in nats
    seconds: float  # since the start of the first step
    tokens: int  # number of predicted tokens so far


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The outcome of a training."""

    steps: int
    losses: tuple[float, ...]  # per step, in nats per token
    tokens: int  # number of predicted tokens over all epochs
    seconds: float


@dataclass(frozen=True, slots=True)
class _Lesson:
    """Functions for training documents of one type: texts, or pictures with captions."""

    loss: Loss
    predicted: Callable[[Any], int]  # number of tokens of a document whose loss counts
    files: Any  # tokenizer or processor that is saved with a whole model
    probe: Loss | None = None  # for measuring the memory of a pass, if artificial texts cannot


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of a training that do not affect the weights of one process."""

    on_step: Callable[[TrainingStep], None] | None = None  # called after every step
    processes: ProcessGroup = ALONE  # share each batch and have the same arguments; the first one writes
    zero: Mapping[str, Any] | None = None  # DeepSpeed settings from `read_zero_settings`; None: no process shares state
    base: Mapping[str, str] | None = None  # fingerprint of the base model (`models.fingerprint_model`), for the record
    checkpoint_seconds: float | None = None  # maximum work that a killed training loses; None: CHECKPOINT_SECONDS


@dataclass(frozen=True, slots=True)
class _Training:
    """The checked arguments of one training."""

    documents: Sequence[Any]
    lesson: _Lesson
    config: FinetuneConfig
    folder: Path
    options: TrainingOptions
    checkpoint: TrainingCheckpoint

    @classmethod
    def prepare(
        cls,
        documents: Sequence[Any],
        described: Any,
        lesson: _Lesson,
        config: FinetuneConfig,
        folder: str | Path,
        options: TrainingOptions,
    ) -> _Training:
        """A training with its checkpoint next to the folder; `described`: the documents as JSON values."""
        seconds = CHECKPOINT_SECONDS if options.checkpoint_seconds is None else options.checkpoint_seconds
        checkpoint = TrainingCheckpoint(Path(folder), [config.settings(), described], seconds)
        return cls(documents, lesson, config, Path(folder), options, checkpoint)

    def predicted(self, batch: Sequence[Any]) -> int:
        """Number of tokens of a batch whose loss counts."""
        return sum(map(self.lesson.predicted, batch))


PLAIN = TrainingOptions()


def train(
    model: Any,
    tokenizer: Any,
    documents: Sequence[TrainingDocument],
    config: FinetuneConfig,
    output_folder: str | Path,
    options: TrainingOptions = PLAIN,
) -> TrainingResult:
    """Train on documents and write the result, with `training.json`, atomically to a folder.

    The same model, documents, config and type of device give the same weights, also if the training was killed and
    called again: it resumes from a checkpoint next to the folder. The loss of a step is the mean cross-entropy of its
    tokens, of `ScoredTokens` of those that are scored.
    An adapter method writes an adapter and restores the model (except with DeepSpeed, which takes the model over);
    `full` writes a model with its tokenizer, and `model` is trained in place.

    Args:
        model: causal language model of transformers, on its device; float32 for `full`.
        tokenizer: tokenizer of the model.
        documents: texts of at least 2 tokens or tokens with a scored one, at least `config.batch_size` with copies.
        config: settings of the training.
        output_folder: local folder that does not exist yet, the same for all processes.
        options: options that do not affect the weights.

    Raises:
        UserError: the folder exists, the documents are too few or too short, the weights cannot be trained in full,
            target_modules do not exist, the loss is not finite, or the device is out of memory.
        LostDeviceError: the device refuses all further work of this process.
        FullError: there is no space left for a checkpoint or the result.
    """
    config = typed(model, config)
    _check_job(output_folder, len(documents), config, options.zero)
    read = read_tokens(tokenizer, documents, config.max_tokens)
    for index, document in enumerate(read):
        if (problem := unknown_id(document.ids, embedding_rows(model))) is not None:
            raise UserError(f"fine-tuning text {index}: {problem}")
    read *= config.copies
    described = [document.ids if all(document.scored) else [document.ids, document.scored] for document in read]
    lesson = _Lesson(_loss, lambda document: document.predicted, tokenizer)
    return _carry_on(model, _Training.prepare(read, described, lesson, config, output_folder, options))


def _loss(model: Any, documents: Sequence[ScoredTokens]) -> tuple[Tensor, int]:
    """The mean loss of the scored tokens of some documents, and their number."""
    return batch_loss(model, [document.ids for document in documents], [document.scored for document in documents])


def _check_job(output_folder: str | Path, documents: int, config: FinetuneConfig, zero: Any = None) -> None:
    """Check the requirements of a training before anything is read.

    Raises:
        UserError: the folder exists, too few documents, or settings that exclude each other.
    """
    if Path(output_folder).exists():
        raise UserError(f"folder {output_folder} exists already")
    if documents * config.copies < config.batch_size:
        raise UserError(f"fine-tuning needs at least batch_size = {config.batch_size} texts, got {documents}")
    if zero is not None and config.method == "adalora":
        raise UserError("method adalora needs whole gradients, which DeepSpeed takes apart: use lora or ia3 with it")


def _carry_on(model: Any, work: _Training) -> TrainingResult:
    """Train from the start or from a checkpoint; the arguments have been checked."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(work.config.seed)
        if work.config.method == "full":
            return _train_fully(model, work)
        return _train_adapter(model, work)


def _train_adapter(model: Any, work: _Training) -> TrainingResult:
    def save(attempt: Path, state: dict[str, Tensor] | None) -> None:
        # "auto" queries the hub for the size of the vocabulary.
        arguments: dict[str, Any] = {} if state is None else {"state_dict": state}
        adapted.save_pretrained(str(attempt), safe_serialization=True, save_embedding_layers=False, **arguments)
        _sort_modules(attempt / ADAPTER_CONFIG)

    refuse_layers_of_adapter(model, "a training")
    batches = _batches(work)
    with _restored_after(model):
        from peft import get_peft_model  # slow import, only needed for training

        with BUILDING:
            adapted = get_peft_model(model, adapter_config(model, work.config, len(batches)))
        try:
            adapted.eval()  # dropout would make the weights depend on the split of a batch
            result = _train(adapted, batches, work, save)
        finally:
            if work.options.zero is None:
                adapted.unload()
    return result


def _train_fully(model: Any, work: _Training) -> TrainingResult:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(NOT_IN_FULL)
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        raise UserError(f"method full trains float32 weights, got {model.dtype}: load the model with dtype float32")

    def save(attempt: Path, state: dict[str, Tensor] | None) -> None:
        if not torch.cuda.is_available():  # else DeepSpeed, imported by saving, prints that there is none
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        model.save_pretrained(str(attempt), safe_serialization=True, state_dict=state)
        work.lesson.files.save_pretrained(str(attempt))

    with _restored_after(model):
        model.eval().requires_grad_(True)  # no dropout, as for an adapter
        return _train(model, _batches(work), work, save)


@contextmanager
def _restored_after(model: Any) -> Iterator[None]:
    """Restore, after the block, the model's mode and which of its weights require gradients."""
    was_training = model.training
    needed_gradients = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        model.train(was_training)
        for weight, needed in needed_gradients:
            weight.requires_grad_(needed)


def batches_of_an_epoch(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of the texts of one epoch, by index: each text once, grouped by similar length.

    The texts are shuffled, split into buckets of a few batches, sorted by length in each bucket and split into batches;
    then the batches are shuffled. Seed and epoch determine the order.
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


def _batches(work: _Training) -> list[list[int]]:
    """The documents of every step, over all epochs."""
    config, lengths = work.config, [len(document) for document in work.documents]
    return [
        batch
        for epoch in range(config.epochs)
        for batch in batches_of_an_epoch(lengths, config.batch_size, config.seed, epoch)
    ]


def _train(
    model: Any,
    batches: list[list[int]],
    work: _Training,
    save: Callable[[Path, dict[str, Tensor] | None], None],
) -> TrainingResult:
    config, steps = work.config, len(batches)
    size = PassSize(None, bool(config.recompute))
    if work.options.zero is None:
        size = pass_size(model, work.documents, config, work.lesson.probe)
    updates = _updates(model, work)
    progress = work.checkpoint.load(updates)
    start, before = time.monotonic(), progress.seconds
    for step in range(len(progress.losses) + 1, steps + 1):
        batch = [work.documents[index] for index in batches[step - 1]]
        with recomputed(model, size.recomputes), explained(config, size, batch, work.options.processes.size == 1):
            loss = _accumulate(updates, batch, size, work)
        progress.losses.append(loss)
        progress.tokens += work.predicted(batch)
        if not math.isfinite(loss):
            raise _diverged(work, f"the fine-tuning loss is {loss} at step {step} of {steps}")
        rate = config.learning_rate * (0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
        updates.apply(rate, step)
        progress.seconds = before + time.monotonic() - start
        work.checkpoint.save(updates, progress)
        if work.options.on_step is not None:
            work.options.on_step(TrainingStep(step, steps, loss, progress.seconds, progress.tokens))
    finite = all(bool(torch.isfinite(weight).all()) for weight in updates.weights.values())
    if work.options.processes.add_up(torch.tensor(float(not finite), device=updates.model.device)).item():
        raise _diverged(work, f"the fine-tuned weights are no finite numbers after step {steps} of {steps}")
    result = TrainingResult(steps, tuple(progress.losses), progress.tokens, progress.seconds)
    state = updates.whole_state()
    if work.options.processes.rank == 0:
        _write(save, state, result, progress.began_at, work)
    return result


def _diverged(work: _Training, problem: str) -> UserError:
    """The error of a training that diverged; its checkpoint is removed."""
    work.checkpoint.remove()
    return UserError(
        f"{problem}; a lower learning_rate than {work.config.learning_rate} or dtype float32 may prevent it"
    )


def _updates(model: Any, work: _Training) -> Updates | ZeroUpdates:
    if work.options.zero is not None:
        return ZeroUpdates(
            model, work.config.learning_rate, work.config.dtype, work.options.processes, work.options.zero
        )
    adalora = model.base_model if work.config.method == "adalora" else None
    return Updates(model, work.config.learning_rate, work.options.processes, adalora)


def _accumulate(updates: Updates | ZeroUpdates, batch: Sequence[Any], size: PassSize, work: _Training) -> float:
    """Accumulate the gradients of this process's part of a batch; returns the loss of the whole batch."""
    processes, rule = work.options.processes, length_rule(updates.model)
    total = torch.zeros((), device=updates.model.device)
    # A process without a document takes part in the passes of the others with weight 0.
    passes = [
        (some, bool(documents))
        for group in rule.groups(batch)
        for documents in [group[processes.rank :: processes.size]]
        for some in split_passes(documents or group[:1], size.tokens)
    ]
    for number, (some, counts) in enumerate(passes, 1):
        with rule.alone():
            with arithmetic(updates.model, work.config):
                loss, predicted = work.lesson.loss(updates.model, some)
            part = loss * ((predicted if counts else 0) / work.predicted(batch))
            total += part.detach()
            if number == len(passes) and work.config.method == "adalora":
                part = part + orthogonality(updates.weights) / processes.size
            updates.accumulate(part)
    return processes.add_up(total).item()


def _write(
    save: Callable[[Path, dict[str, Tensor] | None], None],
    state: dict[str, Tensor] | None,
    result: TrainingResult,
    began_at: list[int],
    work: _Training,
) -> None:
    """Write the weights to a temporary folder next to the output folder, and rename it when it is complete."""
    folder = work.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    with whole(attempt):
        save(attempt, state)
        record = {
            "config": work.config.model_dump(),
            "base": None if work.options.base is None else dict(work.options.base),
            "versions": {"torch": torch.__version__, "peft": version("peft")},
            "result": asdict(result),
            "began_at": began_at,
        }
        written = json.dumps(adapter_record(attempt, record), indent=1) + "\n"
        (attempt / RECORD).write_text(written, encoding="utf-8")
        attempt.chmod(0o755)
        _place(attempt, folder)
    work.checkpoint.remove()


def _place(attempt: Path, folder: Path) -> None:
    """Rename a complete folder, unless another process has finished the same training before."""
    try:
        os.rename(attempt, folder)
    except OSError:
        if not (folder / RECORD).exists():
            raise
        shutil.rmtree(attempt, ignore_errors=True)


def _sort_modules(path: Path) -> None:
    """Sort the adapter's module names, which peft keeps in a set, so that they do not depend on the hash seed."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = sorted(settings["target_modules"])
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _CaptionedPicture:
    """A picture with its caption as a training document."""

    picture: bytes  # encoded
    ids: list[int]  # token ids of the prompt, including all picture tokens, and of the caption
    first: int  # index of the caption's first token, >= 1

    def __len__(self) -> int:
        return len(self.ids)


def train_pictures(
    lm: LanguageModel,
    pictures: Sequence[tuple[bytes, str]],
    config: FinetuneConfig,
    output_folder: str | Path,
    options: TrainingOptions = PLAIN,
) -> TrainingResult:
    """Train on pictures with captions and write the result atomically to a folder.

    A document is a prompt for a description, with the picture, and the caption as the answer; only the tokens of the
    caption count in the loss. As in `train`, the same model, pictures, config and type of device give the same weights,
    also if the training was killed and called again.

    Args:
        lm: model from `open_picture_model`, on its device; float32 for method `full`.
        pictures: valid encoded pictures, each with its caption; at least `config.batch_size`.
        config: settings of the training. `max_tokens` truncates the caption.
        output_folder: local folder that does not exist yet.
        options: options that do not affect the weights, for one process.

    Raises:
        UserError: as `train`; or a model without a processor, no caption, or a picture that fills all positions.
        LostDeviceError: the device refuses all further work of this process.
        FullError: there is no space left for a checkpoint or the result.
    """
    if lm.processor is None:
        raise UserError("pictures are trained into a vision-language model, and this model reads texts alone")
    config = typed(lm.model, config)
    _check_job(output_folder, len(pictures), config)
    documents = [
        _captioned(lm, index, picture, caption, config.max_tokens) for index, (picture, caption) in enumerate(pictures)
    ] * config.copies

    def loss(model: Any, some: Sequence[_CaptionedPicture]) -> tuple[Tensor, int]:
        captions = [one.ids[one.first :] for one in some]
        prompts = [picture_prompt(lm, open_picture(one.picture)) for one in some]
        batch, mask = padded_prompts(lm, prompts, captions)
        places = torch.arange(1, mask.shape[1], device=mask.device)
        firsts = torch.tensor([one.first for one in some], device=mask.device)
        predicted = mask[:, 1:].bool() & (places >= firsts[:, None])
        return loss_of_tokens(model, {**batch, "attention_mask": mask}, predicted)

    described = [[hashlib.sha256(one.picture).hexdigest(), one.ids, one.first] for one in documents]
    lesson = _Lesson(loss, lambda one: len(one) - one.first, lm.processor, loss)
    return _carry_on(lm.model, _Training.prepare(documents, described, lesson, config, output_folder, options))


def _captioned(lm: LanguageModel, index: int, picture: bytes, caption: str, max_tokens: int) -> _CaptionedPicture:
    prompt, answer = picture_prompt(lm, open_picture(picture)).ids, caption_ids(lm, caption)
    if not answer or not caption.strip():
        raise UserError(f"fine-tuning picture {index} has no caption: {caption!r}")
    most = max_tokens if lm.max_tokens is None else min(max_tokens, lm.max_tokens - len(prompt))
    if most < 1:
        raise UserError(
            f"fine-tuning picture {index} and the instruction are {len(prompt)} tokens, and the model has "
            f"{lm.max_tokens} positions: none is left for a caption"
        )
    ids = [*prompt, *answer[:most]]
    if (problem := unknown_id(ids, embedding_rows(lm.model))) is not None:
        raise UserError(f"fine-tuning picture {index}: {problem}")
    return _CaptionedPicture(picture, ids, len(prompt))
