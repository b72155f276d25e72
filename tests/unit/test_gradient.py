"""Gradient norms are those of autograd in float64, one document at a time, whatever the batch and the model."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from architectures import GPT2, LLAMA, OPT, SIZES, VOCABULARY, HalvedLogits
from made_up import write_corpus
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.plain_loop import process
from pipeline.audit.forecast import forecast
from pipeline.audit.plan import make_plan
from pipeline.config.audit import AuditConfig
from pipeline.detectors.base import GRADIENT, Evidence, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.models.load import LanguageModel
from pipeline.passes import gradient
from pipeline.passes.gradient import coverage_of, gradient_norms
from pipeline.stages.base import Placement
from pipeline.stages.registry import stages_of
from pipeline.store.files import Store

COVERED = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT)),
    "opt, projected": lambda: OPTForCausalLM(OPTConfig(**OPT, word_embed_proj_dim=24)),
    "phi, bias of the head": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "qwen3, norms of heads": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8)),
    "granite, scaled logits": lambda: GraniteForCausalLM(GraniteConfig(**LLAMA, logits_scaling=4.0)),
}


class Scale(nn.Module):
    """A parameter of a kind that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x * self.size)


class Doubled(nn.Linear):
    """A linear layer whose output is not that of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_a_strange_parameter() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[1].mlp.act_fn = Scale()
    return model


def with_a_layer_used_twice() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[1] = model.model.layers[0]
    return model


def with_a_weight_in_two_layers() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def with_a_layer_that_lies() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[1].mlp.down_proj = Doubled(64, 32, bias=False)
    return model


UNCOVERED = {
    "strange parameter": (with_a_strange_parameter, "no rule covers the parameter model.layers.1.mlp.act_fn.size"),
    "weight in two layers": (with_a_weight_in_two_layers, "model.layers.1.mlp.up_proj.weight"),
    "layer used twice": (with_a_layer_used_twice, "the rule for the parameter model.layers.0"),
    "layer that lies": (with_a_layer_that_lies, "the rule for the parameter model.layers.1.mlp.down_proj.weight"),
    "unknown tail": (lambda: HalvedLogits(LlamaConfig(**LLAMA)), "not a plain linear function"),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**LLAMA, head_dim=8)), "model.embed_tokens.weight"),
}


def wrap(model: nn.Module) -> LanguageModel:
    return LanguageModel(model.eval().requires_grad_(False), None, torch.device("cpu"), None)


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    lm = wrap(COVERED[kind]() if kind in COVERED else UNCOVERED[kind][0]())
    with torch.no_grad():
        for parameter in lm.model.parameters():  # biases of 0 and norms of 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return lm


def documents(lengths=(9, 2, 30, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def autograd(lm: LanguageModel, ids: list[list[int]]) -> Tensor:
    """One document at a time, in float64."""
    model = copy.deepcopy(lm.model).double()
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    found = []
    for document in ids:
        tokens = torch.tensor([document])
        loss = functional.cross_entropy(model(input_ids=tokens, use_cache=False).logits[0, :-1], tokens[0, 1:])
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append(sum(g.square().sum() for g in gradients if g is not None).sqrt())
    return torch.stack(found)


def close(found: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=relative, atol=0)


@pytest.mark.parametrize("lengths", [(9, 2, 7, 5), (9, 2, 30, 60)], ids=["gram", "product"])
@pytest.mark.parametrize("kind", COVERED)
def test_a_batch_has_the_norms_of_autograd_one_at_a_time(kind, lengths):
    lm, ids = make(kind), documents(lengths)
    assert coverage_of(lm.model).method == "batched", coverage_of(lm.model).reason
    found = gradient_norms(lm, ids)
    assert found.dtype == torch.float64
    close(found, autograd(lm, ids))


@pytest.mark.parametrize("kind", UNCOVERED)
def test_a_model_that_the_rules_do_not_fit_goes_one_at_a_time_and_says_why_once(kind, caplog):
    lm, ids = make(kind), documents()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            close(gradient_norms(lm, ids), autograd(lm, ids))
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]
    assert UNCOVERED[kind][1] in message
    assert coverage_of(lm.model).method == "one at a time"


@pytest.mark.parametrize("kind", ["llama, tied", "gpt2", "opt", "strange parameter"])
def test_the_batch_and_its_padding_change_nothing(kind):
    lm, ids = make(kind), documents()
    together = gradient_norms(lm, ids)
    close(torch.cat([gradient_norms(lm, [one]) for one in ids]), together)
    close(gradient_norms(lm, ids[::-1]), together.flip(0))


def test_repeated_tokens_and_those_of_the_padding_count_as_autograd_counts_them():
    lm, ids = make("llama, tied"), [[0, 0, 0, 5, 5], [5, 0], [7, 7, 7, 7, 7, 7, 7]]
    close(gradient_norms(lm, ids), autograd(lm, ids))


@pytest.mark.parametrize("elements", [40, 500, 4000])
@pytest.mark.parametrize("kind", ["llama, tied", "phi, bias of the head", "granite, scaled logits"])
@pytest.mark.parametrize("lengths", [(9, 2, 7, 5), (9, 2, 30, 60)], ids=["gram", "product"])
def test_parts_of_the_vocabulary_and_of_the_batch_change_nothing(kind, elements, lengths, monkeypatch):
    lm, ids = make(kind), documents(lengths)
    whole = gradient_norms(lm, ids)
    monkeypatch.setattr(gradient, "HEAD_ELEMENTS", {"cpu": elements, "cuda": 0})
    close(gradient_norms(lm, ids), whole)


@pytest.mark.parametrize("kind", ["llama", "strange parameter"])
def test_no_gradient_is_left_on_a_parameter(kind):
    lm = make(kind)
    gradient_norms(lm, documents())
    assert all(p.grad is None and not p.requires_grad for p in lm.model.parameters())
    assert not any(module._forward_hooks for module in lm.model.modules())


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


def test_a_model_that_yields_nan_gives_nan_and_no_exception():
    lm = make("llama")
    with torch.no_grad():
        lm.model.lm_head.weight[5] = math.nan
    assert gradient_norms(lm, documents()).isnan().all()


def test_a_model_without_any_gradient_fits_the_batched_pass():
    lm = LanguageModel(COVERED["llama"](), None, torch.device("cpu"), None)
    for parameter in lm.model.parameters():
        parameter.data.zero_()
    assert coverage_of(lm.model).reason == ""
    assert gradient_norms(lm, [[3, 4, 5]]).tolist() == [0.0]


@pytest.mark.parametrize("kind", ["llama", "strange parameter"])
def test_a_document_of_one_token_has_no_gradient(kind):
    lm = make(kind)
    assert gradient_norms(lm, [[3], [4, 5]]).isnan().tolist() == [True, False]
    assert gradient_norms(lm, [[3]]).isnan().all()
    assert gradient_norms(lm, []).shape == (0,)


@pytest.mark.parametrize("kind", ["llama, tied", "llama, biases", "gpt2", "neox", "opt"])
def test_bfloat16_weights_go_in_batches_and_come_near_float32(kind):
    lm, ids = make(kind), documents()
    rounded = wrap(copy.deepcopy(lm.model).bfloat16())
    found = gradient_norms(rounded, ids)
    assert coverage_of(rounded.model).method == "batched", coverage_of(rounded.model).reason
    close(found, autograd(rounded, ids), relative=0.1)


def test_inference_mode_around_it_changes_nothing():
    lm, ids = make("gpt2"), documents()
    with torch.inference_mode():
        inside = gradient_norms(lm, ids)
    close(inside, autograd(lm, ids))


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
    found = coverage_of(lm.model)
    assert (found.method, found.quantised) == ("batched", 6)
    assert found.differentiable == len(list(lm.model.parameters())) - 6
    close(gradient_norms(lm, ids), autograd(lm, ids))


def test_the_detector_is_minus_the_norm():
    (detector,) = parse_detectors(["gradient_norm"])
    assert plan_passes([detector]) == {GRADIENT: frozenset({"norm"})}
    norms = torch.tensor([2.0, math.nan], dtype=torch.float64)
    assert detector.score(Evidence(["", ""], {}, {GRADIENT: norms})).tolist()[0] == -2.0


@pytest.fixture
def config(tmp_path: Path, tiny_model_folder: Path) -> AuditConfig:
    texts = {
        role: [f"the quiet river of {role} {number} " * (number % 4 + 1) for number in range(9)]
        for role in ("audit", "unseen")
    }
    return AuditConfig.model_validate(
        {
            "run": str(tmp_path / "run"),
            "model": {"path": str(tiny_model_folder)},
            "corpus": write_corpus(tmp_path, texts),
            "detectors": ["gradient_norm"],
            "selections": [{"name": "members", "detectors": ["gradient_norm"], "alpha": 0.5}],
        }
    )


def test_a_run_with_nothing_but_gradient_norm_scores_and_its_receipts_say_how(config):
    plan, store = make_plan(config), Store(config.run)
    (stage,) = stages_of(config)
    scorer = stage.make(stage, Placement())
    for shard in plan.shards:
        receipt = process(stage, scorer, shard, store)
        table = pq.read_table(Path(config.run) / receipt.data).to_pylist()
        assert len(table) == 9
        assert all(row["gradient_norm"] < 0 and row["n_tokens"] > 2 for row in table)
        assert receipt.gradient == asdict(coverage_of(scorer.models["target"].model))
        assert receipt.gradient["method"] == "batched"


def test_the_gradient_pass_is_in_the_plan(config):
    facts = forecast(make_plan(config.model_copy(update={"detectors": ["loss", "gradient_norm"]})), {})
    assert [(entry["kind"], entry["statistics"]) for entry in facts["passes"]] == [
        ("forward", ["log_prob"]),
        ("gradient", ["norm"]),
    ]
