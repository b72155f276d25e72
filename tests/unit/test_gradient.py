"""Gradient norms are those of autograd in float64, one document at a time, whatever the batch and the model."""

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import GPT2, LLAMA, OPT, SIZES, HalvedLogits, documents
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipeline.detectors.base import GRADIENT, Evidence
from pipeline.detectors.registry import parse_detectors
from pipeline.models.load import LanguageModel
from pipeline.passes import gradient
from pipeline.passes.gradient import gradient_coverage, gradient_norms
from pipeline.plan.description import load_config
from pipeline.plan.forecast import forecast
from pipeline.store.receipts import read_receipts
from tests.helpers.finished import score_run

COVERED = {
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "gpt2": ("gpt2", GPT2),
    "neox": ("gpt_neox", SIZES),
    "opt": ("opt", OPT),
    "opt, projected": ("opt", {**OPT, "word_embed_proj_dim": 24}),
    "phi, bias of the head": ("phi", SIZES),
    "qwen3, norms of heads": ("qwen3", {**LLAMA, "head_dim": 8}),
    "granite, scaled logits": ("granite", {**LLAMA, "logits_scaling": 0.625}),
}


class Doubled(nn.Linear):
    """A linear layer whose output is not that of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.02 * super().forward(x)


Model = Callable[[], nn.Module]


def changed(place: str, part: Callable[[nn.ModuleList], nn.Module | nn.Parameter]) -> Model:
    """Makes a Llama with another part of its second layer, made of the layers."""

    def make_it() -> nn.Module:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        holder, _, name = f"1.{place}".rstrip(".").rpartition(".")
        setattr(model.model.layers.get_submodule(holder), name, part(model.model.layers))
        return model

    return make_it


UNCOVERED: dict[str, tuple[Model, str]] = {
    "strange parameter": (
        changed("mlp.act_fn", lambda layers: nn.PReLU()),
        "no rule covers the parameter model.layers.1.mlp.act_fn.weight\n",
    ),
    "weight in two layers": (
        changed("mlp.up_proj.weight", lambda layers: layers[0].mlp.up_proj.weight),
        "model.layers.1.mlp.up_proj.weight",
    ),
    "layer used twice": (changed("", lambda layers: layers[0]), "the rule for the parameter model.layers.0"),
    "layer that lies": (
        changed("mlp.down_proj", lambda layers: Doubled(64, 32, bias=False)),
        "the rule for the parameter model.layers.1.mlp.down_proj.weight",
    ),
    "unknown tail": (lambda: HalvedLogits(LlamaConfig(**LLAMA)), "not a plain linear function"),
    "gemma2": (lambda: covered("gemma2", {**LLAMA, "head_dim": 8}), "model.embed_tokens.weight\n"),
    "by frequency": (lambda: covered(*COVERED["llama"]), "model.embed_tokens.weight\n"),
}


def covered(kind: str, settings: dict[str, Any]) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


def wrap(model: nn.Module) -> LanguageModel:
    return LanguageModel(model.eval().requires_grad_(False), None, torch.device("cpu"), None)


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    lm = wrap(covered(*COVERED[kind]) if kind in COVERED else UNCOVERED[kind][0]())
    lm.model.get_input_embeddings().scale_grad_by_freq = kind == "by frequency"
    with torch.no_grad():
        for parameter in lm.model.parameters():  # biases of 0 and norms of 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return lm


def autograd(lm: LanguageModel, ids: list[list[int]], of: str = "mean") -> Tensor:
    """One document at a time, in float64."""
    model = copy.deepcopy(lm.model).double()
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    found = []
    for document in ids:
        tokens = torch.tensor([document])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, tokens[0, 1:], reduction=of)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append(sum(g.square().sum() for g in gradients if g is not None).sqrt())
    return torch.stack(found)


def close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=relative, atol=0)


@pytest.mark.parametrize("lengths", [(9, 2, 7, 5), (9, 2, 30, 60)], ids=["gram", "product"])
@pytest.mark.parametrize("kind", COVERED)
def test_a_batch_has_the_norms_of_autograd_one_at_a_time(kind, lengths):
    lm, ids = make(kind), documents(lengths)
    assert gradient_coverage(lm.model).method == "batched", gradient_coverage(lm.model).reason
    found = gradient_norms(lm, ids)
    assert found.dtype == torch.float64
    close(found, autograd(lm, ids))


@pytest.mark.parametrize("kind", ["llama, tied", "gpt2", "strange parameter"])
def test_the_sum_of_the_tokens_has_the_norm_of_autograd_in_a_batch_of_any_lengths(kind):
    lm, ids = make(kind), documents((9, 2, 7, 30))
    evidence = Evidence(
        [""] * len(ids), {}, {GRADIENT: gradient_norms(lm, ids)}, predicted={GRADIENT: torch.tensor([8, 1, 6, 29])}
    )
    (detector,) = parse_detectors([{"gradient_norm": {"of": "sum"}}])
    close(-detector.score(evidence), autograd(lm, ids, "sum"))


@pytest.mark.parametrize("kind", UNCOVERED)
def test_a_model_that_the_rules_do_not_fit_goes_one_at_a_time_and_says_why_once(kind, caplog):
    lm, ids = make(kind), documents()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            close(gradient_norms(lm, ids), autograd(lm, ids))
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]
    assert UNCOVERED[kind][1] in f"{message}\n"
    assert gradient_coverage(lm.model).method == "one at a time"


def test_repeated_tokens_and_those_of_the_padding_count_as_autograd_counts_them():
    lm, ids = make("llama, tied"), [[0, 0, 0, 5, 5], [5, 0], [7, 7, 7, 7, 7, 7, 7]]
    with torch.inference_mode():  # as a caller may have it
        inside = gradient_norms(lm, ids)
    close(inside, autograd(lm, ids))


@pytest.mark.parametrize("elements", [40, 500, 4000])
@pytest.mark.parametrize("kind", ["llama, tied", "phi, bias of the head", "granite, scaled logits"])
@pytest.mark.parametrize("lengths", [(9, 2, 7, 5), (9, 2, 30, 60)], ids=["gram", "product"])
def test_parts_of_the_vocabulary_and_of_the_batch_change_nothing(kind, elements, lengths, monkeypatch):
    lm, ids = make(kind), documents(lengths)
    whole = gradient_norms(lm, ids)
    monkeypatch.setattr(gradient, "HEAD_ELEMENTS", {"cpu": elements, "cuda": 0})
    close(gradient_norms(lm, ids), whole)


@pytest.mark.parametrize("kind", ["llama, tied", "strange parameter"])
def test_nan_stays_in_its_document(kind):
    lm, ids = make(kind), [[5, 6, 7], [5, 50, 7, 8], [9, 10]]
    whole = gradient_norms(lm, ids)
    with torch.no_grad():
        lm.model.model.embed_tokens.weight[50] = math.nan
        if "tied" in kind:  # the head would spread it
            lm.model.lm_head.weight = nn.Parameter(lm.model.lm_head.weight.nan_to_num(), requires_grad=False)
    lm = wrap(copy.deepcopy(lm.model))
    found = gradient_norms(lm, ids)
    assert found.isnan().tolist() == [False, True, False]
    if "tied" not in kind:
        close(found[[0, 2]], whole[[0, 2]])


def test_a_model_without_any_gradient_fits_the_batched_pass():
    lm = LanguageModel(covered(*COVERED["llama"]), None, torch.device("cpu"), None)
    for parameter in lm.model.parameters():
        parameter.data.zero_()
    assert gradient_coverage(lm.model).reason == ""
    assert gradient_norms(lm, [[3, 4, 5]]).tolist() == [0.0]


@pytest.mark.parametrize("kind", ["llama", "strange parameter"])
def test_a_document_of_one_token_has_no_gradient_and_none_is_left_on_a_parameter(kind):
    lm = make(kind)
    assert gradient_norms(lm, [[3], [4, 5]]).isnan().tolist() == [True, False]
    assert gradient_norms(lm, [[3]]).isnan().all()
    assert gradient_norms(lm, []).shape == (0,)
    assert all(p.grad is None and not p.requires_grad for p in lm.model.parameters())
    assert not any(module._forward_hooks for module in lm.model.modules())


@pytest.mark.parametrize("kind", ["llama, tied", "llama, biases", "gpt2", "neox", "opt"])
def test_bfloat16_weights_go_in_batches_and_come_near_float32(kind):
    lm, ids = make(kind), documents()
    rounded = wrap(copy.deepcopy(lm.model).bfloat16())
    found = gradient_norms(rounded, ids)
    assert gradient_coverage(rounded.model).method == "batched", gradient_coverage(rounded.model).reason
    close(found, autograd(rounded, ids), relative=0.1)


class Int8Linear(nn.Linear):
    """A quantised layer as bitsandbytes makes them: integers that nothing can be differentiated by."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.scale = layer.weight.abs().max().item() / 127
        self.weight = nn.Parameter((layer.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def test_quantised_weights_are_left_out_and_counted():
    lm, ids = make("llama, biases"), documents()
    for layer in lm.model.model.layers:
        for name, old in list(layer.mlp.named_children()):
            if isinstance(old, nn.Linear):
                setattr(layer.mlp, name, Int8Linear(old))
    found = gradient_coverage(lm.model)
    assert (found.method, found.quantised) == ("batched", 6)
    assert found.differentiable == len(list(lm.model.parameters())) - 6
    close(gradient_norms(lm, ids), autograd(lm, ids))


@pytest.mark.parametrize(
    ("detectors", "statistics"),
    [(["gradient_norm"], ["norm"]), (["gradient_norm", {"gradient_norm": {"of": "sum"}}], ["norm", "tokens"])],
)
def test_a_run_with_nothing_but_gradient_norm_scores(
    make_audit: Callable[..., Path], detectors: list[Any], statistics: list[str]
) -> None:
    plan, store = score_run(load_config(str(make_audit(detectors=detectors, selections=[]))))
    assert [(entry["kind"], entry["statistics"]) for entry in forecast(plan, {})["passes"]] == [
        ("gradient", statistics)
    ]
    for receipt in read_receipts(store, "score"):
        table = store.read_table(receipt.data).to_pylist()
        assert len(table) == receipt.n_in
        assert all(row["gradient_norm"] < 0 and row["n_tokens"] > 2 for row in table)
        for row in table if len(detectors) > 1 else ():
            assert row["gradient_norm(of=sum)"] == row["gradient_norm"] * (row["n_tokens"] - 1)
