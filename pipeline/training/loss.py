"""The loss of a batch and its gradient, a piece of the tokens at a time: the logits never exist all at once."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from pipeline.models.opened import Tail, agree, stated_tail

PIECE_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 27}
"""Logits that exist at a time: what a CPU trains on in one pass stays below, and a GPU has half a GiB in float32."""

SHORT_TOKENS = 256
"""Up to this length of a text a whole matrix of attention costs little memory."""


def batch_loss(model: Any, documents: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
    """Mean cross-entropy over the predicted tokens of a batch (float32 scalar, nats), and the number of these tokens.

    Padding is masked by length, because in many models the pad token occurs in texts too.
    """
    ids = pad_sequence([torch.tensor(document) for document in documents], batch_first=True)
    mask = pad_sequence([torch.ones(len(document), dtype=torch.long) for document in documents], batch_first=True)
    return loss_of_tokens(model, {"input_ids": ids, "attention_mask": mask}, mask[:, 1:].bool())


def loss_of_tokens(model: Any, batch: Mapping[str, Tensor], predicted: Tensor) -> tuple[Tensor, int]:
    """Mean cross-entropy over some tokens of a batch (float32 scalar, nats), and the number of these tokens.

    Args:
        model: or what it is within.
        batch: what it is called with, by name, on any device: input_ids and attention_mask (documents, tokens), and
            what else it reads, such as pictures.
        predicted: bool, (documents, tokens - 1): True at a place before a token whose loss counts.
    """
    batch = {name: value.to(model.device) for name, value in batch.items()}
    predicted = predicted.to(model.device)
    targets = batch["input_ids"][:, 1:][predicted]
    return _mean_loss(model, batch, predicted, targets), len(targets)


def _mean_loss(model: Any, batch: Mapping[str, Tensor], predicted: Tensor, targets: Tensor) -> Tensor:
    ids = batch["input_ids"]
    causal = causal_model(model)
    limit = PIECE_ELEMENTS.get(ids.device.type, PIECE_ELEMENTS["cuda"])
    vocabulary = causal.config.get_text_config().vocab_size
    if ids.numel() * vocabulary > limit and may_have_head(causal):
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


def causal_model(model: Any) -> Any:
    """The model of transformers within an adapter of peft and an engine of DeepSpeed, if it is in one."""
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run a model that `may_have_head` up to its head.

    Args:
        model: or what it is within.
        batch: what it is called with, by name: input_ids and attention_mask (documents, tokens), and what else it
            reads.

    Returns:
        The hidden states that its head reads, (documents, tokens, hidden), and the model's logits of the last column,
        (documents, 1, vocabulary).
    """
    outputs: list[Any] = []
    handle = causal_model(model).base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    ids = batch["input_ids"]
    try:
        with attention(ids.device, ids.shape[1]):
            logits = model(**batch, use_cache=False, logits_to_keep=1).logits
    finally:
        handle.remove()
    return outputs[-1].last_hidden_state, logits


_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def may_have_head(causal: Any) -> bool:
    """Whether a model can be run up to its head; one that another device holds a part of is used as a whole."""
    tail = stated_tail(causal) if _proven.get(causal, True) else None
    if tail is None or any(hasattr(weight, "ds_id") for weight in tail.head.parameters()):
        return False
    return "logits_to_keep" in inspect.signature(causal.forward).parameters


def _proven_tail(causal: Any, hidden: Tensor, last: Tensor) -> Tail | None:
    """The tail, if it gives the logits that the model itself gave of the last column; else the model has another.

    It is applied with gradients at hand: autocast keeps what it casts, and would keep it without them.
    """
    tail = stated_tail(causal)
    if tail is not None and causal not in _proven:
        _proven[causal] = agree(tail.logits(hidden[:, -1:]).detach(), last.detach().float(), last.dtype)
    return tail if _proven[causal] else None


class _InPieces(torch.autograd.Function):
    """Sum of the cross-entropy of rows, with the gradient taken piece by piece while the loss is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, tail: Tail, pieces: int, *weights: Tensor) -> Tensor:
        """Of rows (tokens, hidden) and targets (tokens,); `weights` are those of the head that are trained."""
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
        """The gradients by the loss's own."""
        of_rows, *of_weights = (gradient * outer[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return of_rows, None, None, None, *of_weights


def attention(device: torch.device, longest: int) -> AbstractContextManager[Any]:
    """How attention is computed: on a CPU the fused kernel's gradients take most of its time on short texts.

    Args:
        device: of the model.
        longest: tokens of the longest text of a pass.
    """
    return plain_attention() if device.type == "cpu" and longest <= SHORT_TOKENS else nullcontext()


def plain_attention() -> AbstractContextManager[Any]:
    """Attention without a fused kernel."""
    return sdpa_kernel(SDPBackend.MATH)


def attention_is_plain() -> bool:
    """Whether `plain_attention` is in force."""
    return not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
