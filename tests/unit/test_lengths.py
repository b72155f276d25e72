"""Models whose position embeddings depend on the length of a batch: each text has those of its own length."""

import copy
import dataclasses
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import LLAMA, VOCABULARY
from causal_models import PlainTokenizer
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.models.lengths import length_rule
from pipeline.models.load import open_picture_model
from pipeline.models.opened import LanguageModel
from pipeline.models.picture_prompts import picture_prompt
from pipeline.models.probe import check_causal
from pipeline.models.sharing import own_layers
from pipeline.passes.forward import forward
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.gradient import gradient_norms
from pipeline.passes.parts import PassSizes, versions_in_parts
from pipeline.passes.picture_forward import describe, forward_pictures
from pipeline.passes.shared import HeldPrefixes, forward_behind
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.stages.events import Failure
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt
from pipeline.training.train import train
from tests.helpers.picture_models import random_pictures, save_llava

FEW = 16
"""Tokens up to which the first frequencies hold."""

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 8.0, 16.0, 32.0]}
SIZES = {**LLAMA, "max_position_embeddings": 64}
KINDS: dict[str, Callable[[], Any]] = {
    "Phi-3": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=FEW, rope_parameters={**LONGROPE, "rope_theta": 100.0}
    ),
    "Llama with LongRoPE": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={**LONGROPE, "rope_theta": 100.0, "original_max_position_embeddings": FEW, "factor": 4.0},
    ),
    "Llama with dynamic scaling": lambda: transformers.LlamaConfig(
        **{**SIZES, "max_position_embeddings": FEW},
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 100.0},
    ),
    "Gemma 3, one kind of layer": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {**LONGROPE, "rope_theta": 100.0, "original_max_position_embeddings": FEW, "factor": 4.0},
        },
    ),
    "Gemma 3 with dynamic scaling": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "max_position_embeddings": FEW},
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 100.0},
        },
    ),
}
LENGTHS = (9, 30, 16, 17, 5, 40, 30)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def made(kind: str, tokenizer: Any = None) -> LanguageModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval().requires_grad_(False)
    return LanguageModel(model, tokenizer, torch.device("cpu"), None)


def alone(lm: LanguageModel, read: Callable[[LanguageModel], Tensor]) -> Tensor:
    """What a model that has read nothing else gives."""
    rule = length_rule(lm.model)
    with rule.alone():
        fresh = LanguageModel(copy.deepcopy(lm.model), lm.tokenizer, lm.device, None)
    return read(fresh)


def log_probs(lm: LanguageModel, ids: list[list[int]]) -> list[Tensor]:
    found = forward(lm, ids, frozenset({"log_prob", "mean", "variance"}))
    return [found.log_prob[row, : len(one) - 1] for row, one in enumerate(ids)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_its_log_probabilities_beside_and_after_any_other(kind: str) -> None:
    lm, ids = made(kind), texts()
    plain = [alone(lm, lambda fresh, one=one: fresh.model(input_ids=torch.tensor([one])).logits[0]) for one in ids]
    expected = [
        logits[:-1].log_softmax(1).gather(1, torch.tensor(one[1:])[:, None])[:, 0]
        for logits, one in zip(plain, ids, strict=True)
    ]
    for found in (log_probs(lm, ids), log_probs(lm, ids), [log_probs(lm, [one])[0] for one in ids]):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    padded = torch.tensor([one + [0] * (40 - len(one)) for one in ids])
    mixed = lm.model(input_ids=padded).logits.log_softmax(2)
    assert (mixed[0, :9] - plain[0].log_softmax(1)).abs().max() > 0.05, "frequencies make a difference"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [True, False])
def test_what_a_model_has_read_before_does_not_matter(kind: str, inference: bool) -> None:
    """As one that was opened and used by other software."""
    ids, fresh, used = texts((30, 9, 20)), made(kind), made(kind)
    with torch.inference_mode(inference):
        used.model(input_ids=torch.tensor(texts((40,))))
    for found, expected in zip(log_probs(used, ids), log_probs(fresh, ids), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("few", [4, 11, 13, 15])
def test_the_probe_reads_each_text_with_its_own_frequencies(kind: str, few: int, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "FEW", few)
    lm = LanguageModel(made(kind).model, PlainTokenizer(), torch.device("cpu"), None)
    check_causal(lm, kind)
    ids = texts((9, 30, 10, 3))
    for found, one in zip(log_probs(lm, ids), ids, strict=True):
        expected = alone(made(kind), lambda fresh, one=one: log_probs(fresh, [one])[0])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_norm_is_that_of_the_text_alone(kind: str) -> None:
    lm, ids = made(kind), texts()
    expected = torch.cat([alone(lm, lambda fresh, one=one: gradient_norms(fresh, [one])) for one in ids])
    torch.testing.assert_close(gradient_norms(lm, ids), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_versions_and_texts_behind_a_prefix_are_as_read_whole(kind: str) -> None:
    lm = made(kind)
    beginning, ends = texts((10,))[0], texts((3, 4, 12, 3))
    versions = [[*beginning, *end] for end in ends]
    expected = [alone(lm, lambda fresh, one=one: log_probs(fresh, [one])[0]) for one in versions]
    for some in ([0, 1, 3], [0, 1, 2, 3]):  # without and with one that is too long for the first frequencies
        chosen = [versions[place] for place in some]
        found = versions_in_parts(lm, chosen, frozenset({"log_prob"}), PassSizes())
        behind = forward_behind(lm, beginning, [one[9:] for one in chosen], frozenset({"log_prob"}), HeldPrefixes())
        for row, place in enumerate(some):
            right = expected[place]
            torch.testing.assert_close(found.log_prob[row, : len(right)], right, atol=1e-4, rtol=0)
    assert behind.mask.any()


@pytest.mark.parametrize("kind", ["Phi-3", "Llama with LongRoPE", "Gemma 3, one kind of layer"])
def test_a_continuation_does_not_depend_on_other_prompts(kind: str, tiny_model_folder: Path) -> None:
    lm = made(kind, AutoTokenizer.from_pretrained(tiny_model_folder))
    sampling = Sampling(temperature=2.0, max_new_tokens=12)
    prompts = [Prompt((number,), one, range(2)) for number, one in enumerate(texts((3, 20, 10, 12, 12, 16, 30, 4)))]
    together = continuations(lm, prompts, sampling, seed=1)
    for prompt, drawn in zip(prompts, together, strict=True):
        assert continuations(lm, [prompt], sampling, seed=1) == [drawn]
    assert len({one.ids for drawn in together for one in drawn}) == 2 * len(prompts)


def test_a_continuation_beyond_the_first_frequencies_is_that_of_transformers(tiny_model_folder: Path) -> None:
    """Phi-3 computes keys and values again there; other models with LongRoPE are held to the same."""
    lm = made("Phi-3", AutoTokenizer.from_pretrained(tiny_model_folder))
    model: Any = lm.model
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    for one in texts((10, 16, 20)):
        (drawn,) = continuations(lm, [Prompt((0,), one, [0])], Sampling(temperature=0, max_new_tokens=12), seed=0)
        expected = model.generate(torch.tensor([one]), max_new_tokens=12, do_sample=False)
        assert list(drawn[0].ids) == expected[0, len(one) :].tolist()


@pytest.mark.parametrize("kind", ["Phi-3", "Llama with dynamic scaling"])
@pytest.mark.parametrize("copied", [True, False], ids=["of each thread", "of both threads"])
def test_two_threads_read_the_same_bytes_as_one(kind: str, copied: bool) -> None:
    lm = made(kind)
    short, long = [[one] for one in texts((9,) * 40)], [[one] for one in texts((30, 40) * 20)]
    expected = [[log_probs(lm, batch)[0] for batch in batches] for batches in (short, long)]
    models = [own_layers(lm) if copied else lm for _ in range(2)]
    start = threading.Barrier(2)

    def read(place: int) -> list[Tensor]:
        start.wait()
        return [log_probs(models[place], batch)[0] for batch in (short, long)[place]]

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            for found, right in zip(pool.map(read, range(2)), expected, strict=True):
                assert all(map(torch.equal, found, right))


def test_one_batch_at_a_time_is_read_with_the_weights_of_such_a_model() -> None:
    lm = made("Phi-3")
    models, inside, most = [own_layers(lm), own_layers(lm)], [0], [0]
    counting = threading.Lock()

    def enter(*_: Any) -> None:
        with counting:
            inside[0] += 1
            most[0] = max(most[0], inside[0])

    def leave(*_: Any) -> None:
        with counting:
            inside[0] -= 1

    for one in models:
        one.model.base_model.register_forward_pre_hook(enter)
        one.model.base_model.register_forward_hook(leave)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: [log_probs(one, [text]) for text in texts((9, 30) * 20)], models))
    assert most == [1]
    assert length_rule(models[0].model).turn is length_rule(models[1].model).turn


def picture_model(folder: Path, scaling: dict[str, Any], most: int) -> LanguageModel:
    """LLaVA on a Llama whose position embeddings depend on the length."""
    save_llava(folder)
    settings = json.loads((folder / "config.json").read_text())
    text = transformers.LlamaConfig(**{**settings["text_config"], "max_position_embeddings": most})
    text.rope_parameters = {**scaling, "rope_theta": 100.0}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(**{**settings, "text_config": text.to_dict()})
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return open_picture_model(ModelConfig(path=str(folder), dtype="float32"))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_picture_and_its_description_do_not_depend_on_other_pictures(kind: str, tmp_path: Path) -> None:
    few = 36
    scalings: dict[str, tuple[dict[str, Any], int]] = {
        "longrope": ({**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [4.0, 8.0] * 4,
                      "original_max_position_embeddings": few, "factor": 8.0}, 512),
        "dynamic": ({"rope_type": "dynamic", "factor": 8.0}, few),
    }  # fmt: skip
    lm = picture_model(tmp_path, *scalings[kind])
    (picture,) = random_pictures([(32, 32)])
    prompt, generator = picture_prompt(lm, picture), torch.Generator().manual_seed(0)
    more = torch.randint(5, 250, (40,), generator=generator).tolist()
    prompts = [dataclasses.replace(prompt, ids=[*prompt.ids, *more[:extra]]) for extra in (30, 20, 0, 12)]
    assert len(prompt.ids) < few < len(prompts[-1].ids), "on both sides"
    alone_each = [describe(lm, [one], 12)[0] for one in prompts]
    assert describe(lm, prompts, 12) == alone_each
    assert describe(lm, prompts[::-1], 12) == alone_each[::-1]
    wanted = {"instruction_description": frozenset({"log_prob"})}
    (together,) = forward_pictures(lm, prompts, alone_each, wanted).values()
    for row, (one, written) in enumerate(zip(prompts, alone_each, strict=True)):
        (found,) = forward_pictures(lm, [one], [written], wanted).values()
        length = found.log_prob.shape[1]
        torch.testing.assert_close(together.log_prob[row, :length], found.log_prob[0], atol=1e-4, rtol=0)


def test_a_training_gives_each_text_its_frequencies(tiny_model_folder: Path, tmp_path: Path) -> None:
    """However its batches are divided into passes."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    written = [" ".join(WORDS[(5 * i + 3 * j) % len(WORDS)] for j in range(4 + 9 * (i % 3))) for i in range(8)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in written]
    assert min(lengths) <= FEW < max(lengths)
    losses = []
    for passes in (1, 4096):
        torch.manual_seed(0)
        config = KINDS["Phi-3"]()
        config.vocab_size = len(tokenizer)
        model = transformers.AutoModelForCausalLM.from_config(config)
        settings = FinetuneConfig(epochs=2, batch_size=8, rank=4, learning_rate=1e-2, dtype="float32")
        settings = settings.model_copy(update={"pass_tokens": passes})
        losses.append(train(model, tokenizer, written, settings, tmp_path / f"{passes}").losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_the_rows_of_a_run_are_the_same_bytes_with_two_threads(
    make_audit: Callable[..., Path], tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "phi3"
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(folder)
    config = KINDS["Phi-3"]()
    config.vocab_size, middle = 512, 26
    config.original_max_position_embeddings = config.rope_parameters["original_max_position_embeddings"] = middle
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    resources = {"cluster": "local", "actors": 2, "shard_bytes": 400, "batch_tokens": 256}
    path = make_audit(
        model={"path": str(folder)}, detectors=["loss", "gradient_norm"], selections=[], resources=resources
    )
    plan, tables = make_plan(load_config(str(path))), []
    (stage,) = plan_stages(plan.config)
    for workers in (1, 2, 2):
        store = Store(f"{tmp_path}/run-{len(tables)}")
        events = list(finish_shards(stage, plan.shards, store, workers))
        assert not [event for event in events if isinstance(event, Failure)]
        tables.append({e.shard: store.read_table(e.data) for e in events if isinstance(e, Receipt)})
    assert tables[0] == tables[1] == tables[2]
    counts = [n for table in tables[0].values() for n in table["n_tokens"].to_pylist()]
    assert min(counts) <= middle < max(counts)


def test_other_scalings_have_no_rule() -> None:
    assert length_rule(made("Phi-3").model).two_sets == {FEW}
    assert length_rule(made("Llama with dynamic scaling").model).recomputed == {FEW}
    for scaling in (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ):
        config = transformers.LlamaConfig(**SIZES, rope_parameters={**scaling, "rope_theta": 100.0})
        model = transformers.LlamaForCausalLM(config).eval()
        assert length_rule(model).any_length, scaling
        ids = texts()
        lm = LanguageModel(model, None, torch.device("cpu"), None)
        with torch.inference_mode():
            for found, one in zip(log_probs(lm, ids), ids, strict=True):
                torch.testing.assert_close(found, log_probs(lm, [one])[0], atol=1e-4, rtol=0)
