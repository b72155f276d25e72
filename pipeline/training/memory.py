"""Memory use of training: logits in pieces, passes of bounded size, and recomputed activations."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from pipeline.config.training import FinetuneConfig
from pipeline.errors import IncompleteError, UserError
from pipeline.models.devices import check_lost, out_of_memory
from pipeline.models.opened import Tail, agree, embedding_rows, stated_tail
from pipeline.models.weight_dtypes import choose_training, processor_here

PIECE_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 27}
"""Maximum number of logits in memory: more than one pass on a CPU has, and half a GiB of float32 on a GPU."""

SHORT_TOKENS = 256
"""Maximum text length for which a full attention matrix takes little memory."""


def batch_loss(
    model: Any, documents: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]] | None = None
) -> tuple[Tensor, int]:
    """Mean cross-entropy of the predicted tokens of a batch (float32 scalar, nats), and the number of these tokens.

    Padding is masked by length, because the pad token of many models also occurs in texts.

    Args:
        model: the model or a wrapper of it.
        documents: token ids of each document.
        scored: of each document, whether the loss of each token from the second on counts; None: all do.
    """
    ids = pad_sequence([torch.tensor(document) for document in documents], batch_first=True)
    mask = pad_sequence([torch.ones(len(document), dtype=torch.long) for document in documents], batch_first=True)
    counted = mask[:, 1:].bool() if scored is None else pad_sequence(list(map(torch.tensor, scored)), batch_first=True)
    return loss_of_tokens(model, {"input_ids": ids, "attention_mask": mask}, counted)


def loss_of_tokens(model: Any, batch: Mapping[str, Tensor], predicted: Tensor) -> tuple[Tensor, int]:
    """Mean cross-entropy of some tokens of a batch (float32 scalar, nats), and the number of these tokens.

    Args:
        model: the model or a wrapper of it.
        batch: arguments of the model, by name, on any device: input_ids and attention_mask (documents, tokens), and
            other inputs such as pictures.
        predicted: bool, (documents, tokens - 1): True before each token whose loss counts.
    """
    batch = {name: value.to(model.device) for name, value in batch.items()}
    predicted = predicted.to(model.device)
    targets = batch["input_ids"][:, 1:][predicted]
    return _mean_loss(model, batch, predicted, targets), len(targets)


def _mean_loss(model: Any, batch: Mapping[str, Tensor], predicted: Tensor, targets: Tensor) -> Tensor:
    ids = batch["input_ids"]
    causal = _causal_model(model)
    limit = PIECE_ELEMENTS.get(ids.device.type, PIECE_ELEMENTS["cuda"])
    vocabulary = causal.config.get_text_config().vocab_size
    if ids.numel() * vocabulary > limit and _may_have_head(causal):
        hidden, last = hidden_states(model, batch)
        tail = _proven_tail(causal, hidden, last)
        if tail is not None:
            rows = hidden[:, :-1][predicted.to(hidden.device)]
            pieces = -(-len(rows) // max(1, limit // vocabulary))
            weights = [w for w in tail.head.parameters() if w.requires_grad] if torch.is_grad_enabled() else []
            total: Tensor = _InPieces.apply(rows, targets.to(rows.device), tail, pieces, *weights)
            return total / len(targets)
    with attention(ids.device, ids.shape[1]):
        logits = model(**batch, use_cache=False).logits[:, :-1]
    return cross_entropy(logits[predicted.to(logits.device)].float(), targets.to(logits.device))


def _causal_model(model: Any) -> Any:
    """The transformers model inside of a peft adapter and a DeepSpeed engine, if any."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run a model for which `_may_have_head` is true up to its head.

    Args:
        model: the model or a wrapper of it.
        batch: arguments of the model, by name: input_ids and attention_mask (documents, tokens), and other inputs.

    Returns:
        The input of its head, (documents, tokens, hidden), and the model's logits of the last column, (documents, 1,
        vocabulary).
    """
    outputs: list[Any] = []
    handle = _causal_model(model).base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    ids = batch["input_ids"]
    try:
        with attention(ids.device, ids.shape[1]):
            logits = model(**batch, use_cache=False, logits_to_keep=1).logits
    finally:
        handle.remove()
    return outputs[-1].last_hidden_state, logits


_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _may_have_head(causal: Any) -> bool:
    """Whether a model can be run up to its head; a model on several devices is always run as a whole."""
    tail = stated_tail(causal) if _proven.get(causal, True) else None
    if tail is None or any(hasattr(weight, "ds_id") for weight in tail.head.parameters()):
        return False
    return "logits_to_keep" in inspect.signature(causal.forward).parameters


def _proven_tail(causal: Any, hidden: Tensor, last: Tensor) -> Tail | None:
    """The tail, if it gives the model's logits of the last column; else None.

    It is applied with gradients enabled: autocast caches cast weights, and would cache them without gradients.
    """
    tail = stated_tail(causal)
    if tail is not None and causal not in _proven:
        _proven[causal] = agree(tail.logits(hidden[:, -1:]).detach(), last.detach().float(), last.dtype)
    return tail if _proven[causal] else None


class _InPieces(torch.autograd.Function):
    """Sum of the cross-entropy of rows; loss and gradient are computed together, piece by piece."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, tail: Tail, pieces: int, *weights: Tensor) -> Tensor:
        """Loss of rows (tokens, hidden) and targets (tokens,); `weights` are the trained weights of the head."""
        total = torch.zeros((), device=rows.device)
        wanted = ctx.needs_input_grad[0] or bool(weights)
        of_rows: list[Tensor] = []
        of_weights = [torch.zeros_like(weight) for weight in weights]
        for some, right in zip(rows.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            with torch.enable_grad():
                piece = some.detach().requires_grad_(wanted)
                loss = cross_entropy(tail.logits(piece), right, reduction="sum")
            total += loss.detach()
            if wanted:
                with torch.autocast(rows.device.type, enabled=False):
                    gradient, *others = torch.autograd.grad(loss, [piece, *weights])
                of_rows.append(gradient)
                for whole, part in zip(of_weights, others, strict=True):
                    whole += part
            del loss
        ctx.save_for_backward(*([torch.cat(of_rows)] if of_rows else []), *of_weights)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, scaled by the gradient of the loss."""
        of_rows, *of_weights = (gradient * outer[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return of_rows, None, None, None, *of_weights


def attention(device: torch.device, longest: int) -> AbstractContextManager[Any]:
    """Context for attention: on a CPU the gradients of the fused kernel take most of the time of short texts.

    Args:
        device: device of the model.
        longest: number of tokens of the longest text of a pass.
    """
    return _plain_attention() if device.type == "cpu" and longest <= SHORT_TOKENS else nullcontext()


def _plain_attention() -> AbstractContextManager[Any]:
    """Attention without a fused kernel."""
    return sdpa_kernel(SDPBackend.MATH)


def _attention_is_plain() -> bool:
    """Whether `_plain_attention` is active."""
    return not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()


CPU_PASS_TOKENS = 256
"""Tokens of one pass on a CPU, including padding: larger passes are not faster there."""

MOST_PASS_TOKENS = 1 << 14
"""Maximum tokens of one pass on other devices."""

PASS_BYTES = 8 << 30
"""Bytes that a pass keeps for gradients on other devices. A constant, so that results do not depend on the GPU."""

PROBES = (16, 48)
"""Tokens of the two texts from which the bytes per additional token are measured."""


Item = TypeVar("Item", bound=Sized)
"""A training document: token ids, or a picture with token ids; its length is the number of tokens."""


@dataclass(frozen=True, slots=True)
class PassSize:
    """The size of the passes of a step."""

    tokens: int | None  # maximum per pass, with padding; a longer document is a separate pass. None: one pass per step
    recomputes: bool  # whether activations inside of layers are recomputed for gradients


Loss = Callable[[Any, Sequence[Any]], tuple[Tensor, int]]
"""Returns the mean cross-entropy of the predicted tokens of some documents, and the number of these tokens."""


def pass_size(model: Any, documents: Sequence[Sized], config: FinetuneConfig, loss: Loss | None = None) -> PassSize:
    """The size of a training's passes.

    It depends on the settings, the type of device, the model and the longest document: the same training gives the same
    bytes on a GPU of any size.

    Args:
        model: model with its trainable weights, on its device.
        documents: token ids, or pictures with token ids.
        config: settings of the training.
        loss: loss for pictures, whose bytes per token are measured on the longest one; None for texts.

    Raises:
        UserError: `recompute` is set for a model whose layers cannot be recomputed.
    """
    if config.recompute and not recomputed_layers(model):
        raise UserError(f"recompute: {type(_causal_model(model)).__name__} has no layers that torch can compute again")
    if model.device.type == "cpu":
        return PassSize(config.pass_tokens or CPU_PASS_TOKENS, bool(config.recompute))
    longest = max(documents, key=len)

    def kept(again: bool) -> float:
        if loss is None:
            return bytes_of_token(model, config, again)
        return bytes_kept(model, config, again, lambda: loss(model, [longest])) / len(longest)

    recomputes = config.recompute
    if recomputes is None:
        recomputes = bool(recomputed_layers(model)) and len(longest) * kept(False) > PASS_BYTES
    if config.pass_tokens is not None:
        return PassSize(config.pass_tokens, recomputes)
    fitting = int(PASS_BYTES // max(1.0, kept(recomputes)))
    return PassSize(max(1, min(MOST_PASS_TOKENS, fitting)), recomputes)


def bytes_of_token(model: Any, config: FinetuneConfig, recomputes: bool) -> float:
    """Bytes that an additional token of a pass keeps for gradients, from the difference of two short texts.

    Args:
        model: with what is trained of it.
        config: how it is trained.
        recomputes: whether activations within a layer are computed again.
    """
    short, long = (bytes_kept(model, config, recomputes, partial(_read_made_up, model, tokens)) for tokens in PROBES)
    return max(0, long - short) / (PROBES[1] - PROBES[0])


def _read_made_up(model: Any, tokens: int) -> Any:
    """The loss of a model for an artificial text of `tokens` tokens."""
    ids = torch.arange(tokens, device=model.device)[None] % embedding_rows(_causal_model(model))
    if _may_have_head(_causal_model(model)):
        return hidden_states(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return batch_loss(model, [ids[0].tolist()])  # including its logits


def bytes_kept(model: Any, config: FinetuneConfig, recomputes: bool, read: Callable[[], Any]) -> int:
    """Bytes of all tensors except weights that a pass keeps for gradients.

    Args:
        model: with what is trained of it.
        config: how it is trained.
        recomputes: whether activations within a layer are computed again.
        read: runs the pass and returns an object that holds its graph.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes: dict[int, int] = {}

    def note(kept: Tensor) -> Tensor:
        storage = kept.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return kept

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with recomputed(model, recomputes), arithmetic(model, config), hooks:
        outputs = read()  # keeps the tensors, so that no address is reused
    del outputs
    return sum(sizes.values())


def recomputed_layers(model: Any) -> list[Any]:
    """The layers of a model that can be recomputed separately."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputed(model: Any, wanted: bool) -> Iterator[None]:
    """Keep only the inputs of every layer and recompute its activations for gradients.

    transformers supports this only in training mode, in which dropout makes weights depend on the split of a batch.
    """
    layers = recomputed_layers(model) if wanted else []
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_run_again, layer.forward)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _run_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer with recomputed activations; the recomputation uses the attention of the first run.

    Its inputs do not determine the attention: layers of a vision tower have another length than the text.
    """
    plain = _attention_is_plain()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _plain_attention() if plain else nullcontext()

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def typed(model: Any, config: FinetuneConfig) -> FinetuneConfig:
    """The settings with a concrete dtype instead of auto, for a training outside of a run."""
    if config.dtype != "auto":
        return config
    processor = processor_here(1 if model.device.type == "cuda" else 0)
    return config.model_copy(update={"dtype": choose_training(processor).dtype})


def arithmetic(model: Any, config: FinetuneConfig) -> Any:
    """The autocast context of a pass."""
    return torch.autocast(model.device.type, dtype=getattr(torch, config.dtype), enabled=config.dtype != "float32")


def split_passes(documents: Sequence[Item], most_tokens: int | None) -> Iterator[list[Item]]:
    """Split documents into passes of at most `most_tokens` including padding, or of one document; None: one pass."""
    some: list[Item] = []
    for document in documents:
        longest = max(len(other) for other in [*some, document])
        if some and most_tokens is not None and longest * (len(some) + 1) > most_tokens:
            yield some
            some = []
        some.append(document)
    yield some


@contextmanager
def explained(config: FinetuneConfig, size: PassSize, documents: Sequence[Sized], alone: bool) -> Iterator[None]:
    """Convert out-of-memory errors of a step to a message with settings to change, and detect a lost device.

    Args:
        config: settings of the training.
        size: size of its passes.
        documents: documents of the step.
        alone: whether no other process waits for this one.

    Raises:
        UserError: out of memory; an IncompleteError if others wait, after which Ray Train stops them too.
        LostDeviceError: the device refuses all further work.
    """
    try:
        yield
        return
    except UserError:
        raise
    except Exception as error:
        check_lost(error)
        if not out_of_memory(error):
            raise
        message = " ".join(str(error).split(". ")[0].split())
    kind = UserError if alone else IncompleteError
    longest = max(map(len, documents))
    raise kind(f"the device ran out of memory in training ({message}); {_advice(config, size, longest)}")


def _advice(config: FinetuneConfig, size: PassSize, longest: int) -> str:
    """Settings that reduce the memory of a pass."""
    changes = []
    if size.tokens is not None and size.tokens > longest:
        changes.append(f"pass_tokens below {size.tokens}")
    if not size.recomputes:
        changes.append("recompute: true")
    changes.append(f"max_tokens below {longest}")
    if config.method == "full":
        changes.append("method lora")
    changes.append("resources.deepspeed to spread the model over several GPUs")
    return f"set {', or '.join(changes)}"
