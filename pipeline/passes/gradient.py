"""The gradient pass: the exact norm of each document's gradient over all parameters, for a whole batch at once.

A linear layer with inputs A (tokens, in) and gradients of its outputs B (tokens, out) has the gradient B'A, whose
squared norm is sum((AA') * (BB')): the cheaper of the two products is computed, and no gradient is stored. The gradient
of the logits is softmax minus one-hot, so autograd starts at the last hidden states. The method is verified on each
model with a short input; other models are differentiated one document at a time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import error_line
from pipeline.models.lengths import length_rule
from pipeline.models.opened import LanguageModel, Tail
from pipeline.passes.forward import HEAD_ELEMENTS, find_tail

_log = logging.getLogger(__name__)
_Squares = dict[tuple[int, ...], Tensor]  # ids of parameters -> squared norm of their joint gradient, (documents,)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Method and parameters of a model's gradient norm."""

    method: Literal["batched", "one at a time"]
    reason: str  # why not batched, in one line; empty if batched
    uncovered: tuple[str, ...]  # parameters without a rule in the batched method
    differentiable: int  # number of parameter tensors in the norm
    quantised: int  # number of quantized parameter tensors, which have no gradient


def gradient_norms(
    lm: LanguageModel, ids: Sequence[Sequence[int]], keep: Sequence[Sequence[bool]] | None = None
) -> Tensor:
    """L2 norm of the gradient of each document's mean cross-entropy with respect to all parameters (Hu et al. 2025).

    Args:
        lm: model. Its parameters have no gradients afterwards.
        ids: token ids of each document. Lengths may differ; the batch is padded on the right.
        keep: for each document, whether each token from the second on is in the mean; None: all are.

    Returns:
        (documents,) float64 on the model's device, >= 0; NaN if the model gives NaN or the text has one token. Up to
        rounding, it does not depend on the other documents of the batch.
    """
    if not ids:
        return torch.zeros(0, dtype=torch.float64, device=lm.device)
    norms = partial(_norms, lm, gradient_coverage(lm.model))
    counted = [[True] * (len(one) - 1) for one in ids] if keep is None else keep
    items = list(zip(ids, counted, strict=True))
    return torch.cat(length_rule(lm.model).apply(norms, items, list(map(len, ids))))


_Counted = tuple[Sequence[int], Sequence[bool]]
"""Token ids of a document, and whether each from the second on is in the mean."""


def _norms(lm: LanguageModel, coverage: Coverage, documents: Sequence[_Counted]) -> Tensor:
    if coverage.method == "batched":
        squares = list(_batched(lm.model, documents, lm.device).values())
        return torch.stack(squares).sum(0).sqrt()
    squares_of_documents = [
        sum(_autograd_squares(lm.model, document, lm.device).values()) if any(document[1]) else torch.nan
        for document in documents
    ]
    return torch.tensor(list(map(float, squares_of_documents)), dtype=torch.float64, device=lm.device).sqrt()


_coverages: weakref.WeakKeyDictionary[nn.Module, Coverage] = weakref.WeakKeyDictionary()


def gradient_coverage(model: nn.Module) -> Coverage:
    """Whether the batched method applies to a model, and which parameters are counted; tested once per model."""
    if model not in _coverages:
        with length_rule(model).alone():
            _coverages[model] = result = _examine(model)
        if result.reason:
            _log.warning("gradient_norm takes one backward pass a document: %s", result.reason)
    return _coverages[model]


def _examine(model: nn.Module) -> Coverage:
    counted = [parameter for parameter in model.parameters() if _differentiable(parameter)]
    with torch.inference_mode():
        tail = find_tail(model)
    reason, uncovered = "", tuple(_uncovered(model, tail))
    if uncovered:
        more = f" and {len(uncovered) - 1} more" if len(uncovered) > 1 else ""
        reason = f"no rule covers the parameter {uncovered[0]}{more}"
    elif tail is None or tail.softcap is not None:
        reason = "its logits are not a plain linear function of its hidden states"
    else:
        reason = _mismatch(model)
    method: Literal["batched", "one at a time"] = "one at a time" if reason else "batched"
    return Coverage(method, reason, uncovered, len(counted), sum(1 for _ in model.parameters()) - len(counted))


def _differentiable(parameter: Tensor | None) -> bool:
    """Whether a parameter has a gradient. Quantized weights are integers, or subclasses with packed integers."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point()


def _uncovered(model: Any, tail: Tail | None) -> Iterator[str]:
    """Names of the parameters without a rule: those of unknown modules, and those shared by two modules."""
    head = tail.head if tail is not None else model.get_output_embeddings()
    tied = {id(model.get_input_embeddings().weight), id(getattr(head, "weight", None))}
    inside = set(tail.base.modules()) if tail is not None else set(model.modules())
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        rule: tuple[str, ...] = ("weight", "bias") if type(module) is nn.Linear and module is head else ()
        if module in inside and module is not head:
            rule = _COVERED[kind] if (kind := _kind(module)) is not None else ()
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not _differentiable(parameter):
                if module is head:
                    yield name
                continue
            shared = id(parameter) in seen and id(parameter) not in tied
            seen.add(id(parameter))
            if shared or name.rpartition(".")[2] not in rule:
                yield name


_Kind = Literal["linear", "embedding", "layer_norm", "rms_norm"]
_COVERED: dict[_Kind, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "embedding": ("weight",),
    "layer_norm": ("weight", "bias"),
    "rms_norm": ("weight",),
}


def _kind(module: nn.Module) -> _Kind | None:
    """The rule for a module, chosen by its type; `_mismatch` detects a wrong choice."""
    name = type(module).__name__
    if isinstance(module, nn.Linear) or (name == "Conv1D" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        return "embedding" if type(module) is nn.Embedding or _has_offset(module) else None
    if type(module) is nn.LayerNorm:
        return "layer_norm"
    return "rms_norm" if name.endswith("RMSNorm") and _epsilon(module) is not None else None


def _has_offset(module: nn.Module) -> bool:
    return isinstance(getattr(module, "offset", None), int)  # OPT's position embedding


def _epsilon(module: Any) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(value) if isinstance(value, float) else None


def _mismatch(model: Any) -> str:
    """Compare the batched method with autograd on two short documents; the first difference in one line, or ""."""
    table = model.get_input_embeddings().weight
    size = model.config.get_text_config().vocab_size
    ids: list[_Counted] = [
        ([token % size for token in range(*ends)], [True] * (ends[1] - ends[0] - 1)) for ends in ((0, 9), (7, 12))
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        batched = _batched(model, ids, table.device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an unsupported architecture may raise anything
        return f"the batched pass fails with {type(error).__name__}: {error_line(error, 200)}"
    # Autograd's float32 norm of a parameter has a relative error of up to 4e-4 (SmolLM2, one thread), which varies
    # with the number of threads; the batched norm of the same parameter has 1.2e-4.
    relative, floor = (5e-4, 1e-5) if table.dtype == torch.float32 else (0.1, 0.02)
    for row, document in enumerate(ids):
        expected = _autograd_squares(model, document, table.device)
        total = sum(expected.values()) ** 0.5
        for key in [*batched, *((one,) for one in expected.keys() - {one for some in batched for one in some})]:
            expected_norm = sum(expected.get(one, 0.0) for one in key) ** 0.5
            norm = batched[key][row].sqrt().item() if key in batched else 0.0
            tolerance = relative * expected_norm + floor * total
            if abs(norm - expected_norm) > tolerance:  # False for NaN, which is inconclusive
                return f"the rule for the parameter {names[key[0]]} gives {norm:.6g}, autograd {expected_norm:.6g}"
    return ""


def _autograd_squares(model: Any, document: _Counted, device: torch.device) -> dict[int, float]:
    """Squared norm of the gradient with respect to each parameter (by id), from autograd, for one document.

    Each gradient is freed as soon as its norm is known.
    """
    squares: dict[int, float] = {}

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares[id(parameter)] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).item() ** 2
        parameter.grad = None

    counted = [parameter for parameter in model.parameters() if _differentiable(parameter)]
    before = [parameter.requires_grad for parameter in counted]
    handles = []
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for parameter in counted:
                parameter.requires_grad_(True)
                handles.append(parameter.register_post_accumulate_grad_hook(note))
            ids, counted_tokens = document
            tokens = torch.tensor([list(ids)], device=device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            left_out = ~torch.tensor(list(counted_tokens), device=logits.device)
            functional.cross_entropy(logits, tokens[0, 1:].to(logits.device).masked_fill(left_out, -100)).backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter, needed_gradient in zip(counted, before, strict=True):
            parameter.grad = None
            parameter.requires_grad_(needed_gradient)
    return squares


def _batched(model: Any, documents: Sequence[_Counted], device: torch.device) -> _Squares:
    """Squared norms of the gradients by (groups of) parameters; each (documents,) float64."""
    tail = find_tail(model)
    assert tail is not None
    ids = [one for one, _ in documents]
    longest = max(2, *map(len, ids))
    counted = [[*kept, *[False] * (longest - 1 - len(kept))] for _, kept in documents]
    table = model.get_input_embeddings()
    with torch.inference_mode(False), torch.enable_grad():
        # padded with a token of the document: another token could give NaN in a damaged model
        padded = torch.tensor([[*one, *[one[-1]] * (longest - len(one))] for one in ids], device=device)
        sweep = _Sweep(padded, torch.tensor(counted, device=device))
    try:
        _sweep_batch(tail, table, sweep)
    finally:
        sweep.release()
    return sweep.squares


def _sweep_batch(tail: Tail, table: nn.Module, sweep: _Sweep) -> None:
    """Run a batch forwards and backwards and sum its squared norms."""
    with torch.inference_mode(False), torch.enable_grad():
        handles = [handle for module in tail.base.modules() for handle in sweep.hook(module)]
        try:
            hidden = tail.base(input_ids=sweep.padded, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        head: Any = tail.head
        with torch.no_grad():
            tied = head.weight is table.weight
            of_head = _head_gradient(head, tail.factor, hidden.detach(), sweep.padded, sweep.shares, tied)
            sweep.add((head.weight,), of_head.weight)
            if of_head.bias is not None:
                sweep.add((head.bias,), of_head.bias)
        leaves = [leaf for _, _, leaf in sweep.embedded]
        gradients = torch.autograd.grad(hidden, leaves, of_head.hidden, allow_unused=True)
    with torch.no_grad():
        sweep.embeddings(gradients, table, of_head.by_token)
        sweep.close_all()


class _Group:
    """Linear layers with a common input, whose Gram matrix is computed once."""

    __slots__ = ("inputs", "key", "out_features", "outer", "waiting", "weights")

    def __init__(self, inputs: Tensor) -> None:
        self.key = id(inputs)
        self.inputs: Tensor | None = inputs
        self.outer: Tensor | None = None  # Gram matrix of the gradients of the outputs, summed over the layers
        self.weights: list[Tensor] = []
        self.out_features = 0
        self.waiting = 0

    def release(self) -> None:
        """Release large tensors: autograd's graph may hold the group, and its inputs the graph.

        Nothing is computed, so that this works when no memory is left.
        """
        self.outer = self.inputs = None


class _Sweep:
    """One batch: keeps layer inputs until the gradients of the outputs are available, and sums squared norms."""

    def __init__(self, padded: Tensor, counted: Tensor) -> None:
        self.padded = padded
        self.documents = len(padded)
        # weights of positions in the mean; NaN without positions
        self.shares = counted.float() / counted.sum(1, keepdim=True)
        self.squares: _Squares = {}
        self.groups: dict[int, _Group] = {}
        self.embedded: list[tuple[nn.Embedding, Tensor, Tensor]] = []  # ids and vectors (leaves)

    def add(self, parameters: Sequence[Tensor], squares: Tensor) -> None:
        """Add squared norms, (documents,), of the gradient with respect to these parameters."""
        key = tuple(map(id, parameters))
        squares = squares.to(self.padded.device, torch.float64)
        self.squares[key] = self.squares[key] + squares if key in self.squares else squares

    def hook(self, module: nn.Module) -> Iterator[Any]:
        """Register a forward hook on a module with direct trainable parameters; yields the hook's handle."""
        if not any(_differentiable(parameter) for parameter in module.parameters(recurse=False)):
            return
        kind = _kind(module)
        if kind == "embedding":
            yield module.register_forward_hook(self._embed, with_kwargs=True)
        elif kind == "linear":
            yield module.register_forward_hook(self._linear)
        elif kind is not None:
            yield module.register_forward_hook(partial(self._norm, kind))

    def _rows(self, values: Tensor) -> Tensor:
        """Reshape to (documents, rows, features); some models flatten documents and tokens."""
        return values.reshape(self.documents, -1, values.shape[-1])

    def _embed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if type(module) is nn.Embedding:
            ids = args[0] if args else kwargs["input"]
        else:
            ids = kwargs["position_ids"] + module.offset
        shape = (self.documents, *output.shape[-2:])  # position embeddings are shared by all documents
        leaf = output.expand(shape).detach().requires_grad_()
        self.embedded.append((module, ids.expand(shape[:2]), leaf))
        return leaf

    def _norm(self, kind: _Kind, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self._norm_gradient, kind, module, args[0].detach()))

    def _norm_gradient(self, kind: _Kind, module: Any, inputs: Tensor, gradient: Tensor) -> None:
        x, g = inputs.to(gradient.device).float(), gradient.float()
        if kind == "layer_norm":
            x = functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
        else:
            x = functional.rms_norm(x, x.shape[-1:], None, _epsilon(module))
        if _differentiable(module.weight):
            self.add((module.weight,), square(self._rows(x.mul_(g)).sum(1)))
        if _differentiable(getattr(module, "bias", None)):
            self.add((module.bias,), square(self._rows(g).sum(1)))

    def _linear(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        group = self.groups.setdefault(id(args[0]), _Group(args[0]))
        group.out_features += output.shape[-1]
        group.waiting += 1
        output.register_hook(partial(self._linear_gradient, module, group))

    def _linear_gradient(self, module: Any, group: _Group, gradient: Tensor) -> None:
        out = self._rows(gradient)
        if _differentiable(module.bias):
            self.add((module.bias,), square(out.sum(1, dtype=torch.float32)))
        group.waiting -= 1
        if _differentiable(module.weight) and group.inputs is not None:
            inputs = self._rows(group.inputs.detach()).to(out.device)
            if _gram_is_cheaper(out.shape[1], inputs.shape[2], group.out_features):
                product = gram(out)
                group.outer = product if group.outer is None else group.outer.add_(product.to(group.outer.device))
                group.weights.append(module.weight)
            else:
                self.add((module.weight,), _product_squares(inputs, out))
        if group.waiting == 0:
            self._close(group)

    def _close(self, group: _Group) -> None:
        if group.outer is not None and group.inputs is not None:
            inputs = self._rows(group.inputs.detach()).to(group.outer.device)
            self.add(group.weights, inner(gram(inputs), group.outer))
        self.groups.pop(group.key)
        group.release()

    def close_all(self) -> None:
        """Close the groups that still wait for a layer whose output was not used."""
        for group in list(self.groups.values()):
            self._close(group)

    def release(self) -> None:
        """Release the activations, also after a failed pass.

        Hooks in the graph hold the groups, whose inputs hold the graph: a cycle that Python's collector cannot detect.
        """
        for group in self.groups.values():
            group.release()
        self.groups.clear()
        self.embedded.clear()

    def embeddings(self, gradients: Sequence[Tensor | None], table: nn.Module, by_token: Tensor | None) -> None:
        """Add the squared norms of the embeddings, from the gradients of their vectors, (documents, tokens, hidden).

        `by_token` holds the rows of the tied head's gradient that belong to the documents' tokens, or is None.
        """
        for (module, ids, _), gradient in zip(self.embedded, gradients, strict=True):
            if gradient is None:
                continue
            ids = ids.to(gradient.device)
            if module.padding_idx is not None:
                gradient = gradient.masked_fill((ids == module.padding_idx)[..., None], 0)  # as in autograd
            same = ids[:, :, None] == ids[:, None, :]
            squares = inner(gram(gradient), same)
            if module is table and by_token is not None:
                squares = squares + 2 * inner(by_token.to(gradient.device), gradient)
            self.add((module.weight,), squares)


PRODUCT_ELEMENTS = 1 << 26
"""Maximum number of elements of a product in memory."""


@dataclass(frozen=True, slots=True)
class _HeadGradient:
    """Gradients of a batch at the head."""

    hidden: Tensor  # gradient with respect to the hidden states, (documents, tokens, hidden), in their dtype
    weight: Tensor  # squared norm of the gradient with respect to the weight, (documents,) float64
    bias: Tensor | None  # the same for the bias, if there is one
    by_token: Tensor | None  # rows of the weight's gradient for the documents' tokens, (documents, tokens, hidden)


def _head_gradient(
    head: nn.Linear, factor: float, hidden: Tensor, tokens: Tensor, shares: Tensor, tied: bool
) -> _HeadGradient:
    """Gradients of each document's mean cross-entropy with respect to the inputs of its logits head(hidden) * factor.

    Args:
        head: head with weight (vocabulary, hidden).
        factor: factor of the logits.
        hidden: last hidden states, (documents, tokens, hidden).
        tokens: token ids, (documents, tokens).
        shares: weights of all positions but the last in the loss, (documents, tokens - 1) float32; 0 on padding.
        tied: whether to return `by_token`.
    """
    device = head.weight.device
    rows, tokens, shares = hidden[:, :-1].to(device).contiguous(), tokens.to(device), shares.to(device) * factor
    together = max(1, _budget(head) // (rows.shape[1] * len(head.weight)))
    parts = [
        _part_of_batch(head, factor, *some, tied)
        for some in zip(rows.split(together), tokens.split(together), shares.split(together), strict=True)
    ]
    return _HeadGradient(
        functional.pad(torch.cat([part.hidden for part in parts]), (0, 0, 0, 1)).to(hidden.device),
        torch.cat([part.weight for part in parts]),
        torch.cat([part.bias for part in parts if part.bias is not None]) if head.bias is not None else None,
        torch.cat([part.by_token for part in parts if part.by_token is not None]) if tied else None,
    )


def _part_of_batch(
    head: nn.Linear, factor: float, rows: Tensor, tokens: Tensor, shares: Tensor, tied: bool
) -> _HeadGradient:
    """As `_head_gradient`, for a few documents; `rows` are their hidden states without the last position."""
    positions, features = rows.shape[1:]
    by_gram = _gram_is_cheaper(positions, features, len(head.weight))
    weighted = rows.float() * shares[..., None]
    hidden = torch.zeros_like(rows, dtype=torch.float32)
    by_token = torch.zeros(*tokens.shape, features, device=rows.device) if tied else None
    outer: Tensor | None = None
    products, bias = (torch.zeros(len(rows), dtype=torch.float64, device=rows.device) for _ in range(2))
    for start, p in _differences(head, factor, rows, tokens):
        stop = start + p.shape[2]
        hidden += (p.flatten(0, 1) @ head.weight[start:stop]).view_as(rows)
        if by_gram:
            outer = gram(p) if outer is None else outer.add_(gram(p))
        else:
            products += _product_squares(weighted, p)
        if head.bias is not None:
            bias += square(torch.bmm(shares[:, None], p.float()).squeeze(1))
        if by_token is not None:
            inside = (tokens >= start) & (tokens < stop)
            columns = (tokens - start).clamp(0, stop - start - 1)[:, None].expand(-1, positions, -1)
            by_token += torch.bmm(p.gather(2, columns).float().mT, weighted).where(inside[..., None], 0.0)
    if outer is not None:
        products = inner(outer, gram(weighted))
    return _HeadGradient((hidden * shares[..., None]).to(rows.dtype), products, bias, by_token)


def _budget(head: nn.Linear) -> int:
    """Maximum number of elements of the logits in memory, on the device of the head."""
    return HEAD_ELEMENTS.get(head.weight.device.type, HEAD_ELEMENTS["cuda"])


def _differences(head: nn.Linear, factor: float, rows: Tensor, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Softmax minus one-hot for successive parts of the vocabulary: start, and (documents, positions, part).

    In the weight's dtype, as autograd passes it to the head; the next part overwrites it.
    """
    vocabulary, flat = len(head.weight), rows.flatten(0, 1)  # flat: faster in torch
    width = min(vocabulary, max(1, _budget(head) // (rows.shape[0] * rows.shape[1])))

    def logits(start: int) -> Tensor:
        bias = None if head.bias is None else head.bias[start : start + width]
        values = functional.linear(flat, head.weight[start : start + width], bias).float()
        return (values.mul_(factor) if factor != 1.0 else values).view(*rows.shape[:2], -1)

    starts = range(0, vocabulary, width)
    total: Tensor | None = None
    if width < vocabulary:
        for start in starts:
            part = logits(start).logsumexp(2, keepdim=True)
            total = part if total is None else torch.logaddexp(total, part)
    targets = tokens[:, 1:, None]
    for start in starts:
        p = logits(start)
        p = torch.softmax(p, 2, out=p) if total is None else p.sub_(total).exp_()
        inside = (targets >= start) & (targets < start + p.shape[2])
        p.scatter_add_(2, (targets - start).clamp(0, p.shape[2] - 1), -inside.float())
        yield start, p.to(head.weight.dtype)


def square(values: Tensor) -> Tensor:
    """Squared norm of each document's vector: (documents, features) -> (documents,) float64."""
    return values.square().sum(1, dtype=torch.float64)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each document's two matrices, (documents,) float64."""
    return (left * right).flatten(1).sum(1, dtype=torch.float64)


def gram(rows: Tensor) -> Tensor:
    """Inner products of each document's rows: (documents, rows, features) -> (documents, rows, rows) float32."""
    return _product(rows, rows.mT)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Products of each document's matrices, in float32; a GPU multiplies 16-bit matrices without conversion."""
    halves = left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
    if halves and "dtype" in torch.ops.aten.bmm.overloads():  # torch >= 2.8
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _gram_is_cheaper(rows: int, inputs: int, outputs: int) -> bool:
    """Whether two Gram matrices of `rows` rows are cheaper than the product (outputs, inputs) of each document."""
    return rows * (inputs + outputs) < inputs * outputs


def _product_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Squared norm of outputs' inputs for each document: (documents, rows, *) twice -> (documents,) float64.

    A large product is computed in bands; on a CPU also by document, whose product stays in its cache.
    """
    size = inputs.shape[2] * outputs.shape[2]
    together = max(1, PRODUCT_ELEMENTS // size) if inputs.is_cuda else 1
    bands = -(-size // PRODUCT_ELEMENTS)
    squares = [
        sum(
            torch.linalg.vector_norm(_product(band.mT, a).flatten(1), dim=1).double().square()
            for band in b.tensor_split(bands, dim=2)
        )
        for a, b in zip(inputs.split(together), outputs.split(together), strict=True)
    ]
    return torch.cat([torch.as_tensor(value) for value in squares])
