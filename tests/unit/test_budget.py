"""What a pass needs of a GPU's memory is arithmetic from a model's shape, and the arithmetic is what models do."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.config.models import ModelConfig
from pipeline.models.devices import nominal_memory
from pipeline.models.load import open_picture_model
from pipeline.models.picture_prompts import picture_prompt, picture_token
from pipeline.passes import budget
from pipeline.passes.budget import Budget, Card, pass_budget, read_shape
from pipeline.passes.gradient import _Sweep
from tests.helpers.picture_models import SAVE, random_pictures

GIB = 1 << 30


def _config(kind: Any, *sizes: int, tied: bool = False) -> Any:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    values = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return kind(**values, tie_word_embeddings=tied)


SHAPES = {
    "SmolLM2-135M": _config(transformers.LlamaConfig, 576, 30, 9, 3, 1536, 49152, tied=True),
    "Qwen2-0.5B": _config(transformers.Qwen2Config, 896, 24, 14, 2, 4864, 151936, tied=True),
    "Llama-3.2-1B": _config(transformers.LlamaConfig, 2048, 16, 32, 8, 8192, 128256, tied=True),
    "Llama-2-7B": _config(transformers.LlamaConfig, 4096, 32, 32, 32, 11008, 32000),
    "Llama-3-8B": _config(transformers.LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
    "Llama-3-70B": _config(transformers.LlamaConfig, 8192, 80, 64, 8, 28672, 128256),
}
BATCH, LENGTH = 2, 64


def fused(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **settings: Any) -> tuple[Any, None]:
    """The attention that CUDA takes: it keeps its inputs, in float32 with keys a head, its output, a number a row."""
    if query.dtype == torch.float32:
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True)[0]
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("fused_on_meta", fused)


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that were made inside and live still, and the most that lived at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.weights = {values.untyped_storage()._cdata for values in (*model.parameters(), *model.buffers())}
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self.sizes = {key: entry for key, entry in self.sizes.items() if not entry[0].expired()}
        return sum(size for _, size in self.sizes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.weights:
                self.sizes.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now)
        return result


def on_meta(config: Any, dtype: torch.dtype, layers: int) -> Any:
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="fused_on_meta")
    return model.eval().requires_grad_(False)


def counted_kept(config: Any, dtype: torch.dtype, layers: int) -> float:
    model = on_meta(config, dtype, layers)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    with torch.enable_grad(), Alive(model) as alive:
        sweep = _Sweep(ids, torch.full((BATCH, LENGTH - 1), True, device="meta"))
        handles = [handle for module in model.base_model.modules() for handle in sweep.hook(module)]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        assert hidden.requires_grad
        assert handles
        return alive.now / (BATCH * LENGTH)


def counted_peak(config: Any, dtype: torch.dtype) -> float:
    """Bytes a token at the peak of a forward pass."""
    model = on_meta(config, dtype, 2)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    with torch.inference_mode(), Alive(model) as alive:
        model.base_model(input_ids=ids, use_cache=False)
        return alive.peak / (BATCH * LENGTH)


@cache
def counted(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[float, float]:
    """Bytes a token that a gradient pass keeps and a forward pass needs."""
    config = SHAPES[name]
    few, more = (counted_kept(config, dtype, layers) for layers in (2, 4))
    return few + (config.num_hidden_layers - 2) * (more - few) / 2, counted_peak(config, dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_the_arithmetic_of_passes_weights_and_a_cache_is_what_is_counted_on_meta(name: str) -> None:
    config = SHAPES[name]
    for dtype in (torch.bfloat16, torch.float32):
        shape = read_shape(config, str(dtype).removeprefix("torch."))
        kept, peak = counted(name, dtype)
        assert budget.kept_bytes(shape, LENGTH) == pytest.approx(kept, rel=0.15)
        assert budget.forward_bytes(shape, LENGTH) == pytest.approx(peak, rel=0.15)
    model = on_meta(config, torch.bfloat16, 2)
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / (BATCH * LENGTH)
    two = read_shape(model.config, "bfloat16")
    assert budget.cache_bytes(two) == held
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert two.weights == pytest.approx(2 * numbers, rel=0.01)
    assert read_shape(model.config, "bfloat16", numbers).weights == pytest.approx(2 * numbers, rel=1e-6)


@pytest.mark.parametrize("memory", [16, 24, 40, 80, 141])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_of_the_budget_fits_the_card_and_fills_it(name: str, memory: int) -> None:
    config = SHAPES[name]
    shape = read_shape(config, "bfloat16")
    kept, peak = counted(name)
    found = pass_budget(shape, Card(memory * GIB), LENGTH)
    left = memory * GIB - shape.weights - budget.HEAD_BYTES
    if left < 0.15 * memory * GIB:
        assert found == Budget(0, 0, 0)
        return
    usable = budget.USABLE * memory * GIB - shape.weights - budget.HEAD_BYTES
    for tokens, each in ((found.forward, peak), (found.gradient, kept), (found.cache, budget.cache_bytes(shape))):
        assert 0 < tokens * each < left
        assert tokens >= budget.MOST_TOKENS or tokens * each > usable / 4
    assert found.gradient <= found.forward <= budget.MOST_TOKENS


def test_parts_of_a_card_and_several_cards_divide_the_memory_alike_for_all_drivers() -> None:
    memory, half = 3_600_000_000, replace(WIDE, weights=800_000_000)  # of 85% less 2 GiB and weights 112.5 MB are left
    several = pass_budget(
        replace(WIDE, weights=700_000_000), Card(memory, 2.0), 7, [replace(WIDE, weights=900_000_000)]
    )
    assert several == Budget(forward=7 << 12, gradient=4 << 11, cache=7 << 16)  # of 29,609, 9,488 and 468,818
    for card in (Card(memory), Card(2 * memory, 0.5)):
        assert pass_budget(half, card, 7) == Budget(7 << 12, 4 << 10, 7 << 15)  # of 29,609, 4,744 and 234,409
    assert pass_budget(WIDE, Card(80 * GIB), 7) == Budget(65536, 65536, 4 << 25)
    assert [budget.rounded(tokens) for tokens in (-5.0, 1.9, 7.5, 9.0, 31.0)] == [0, 1, 7, 8, 28]
    shape, large = (read_shape(SHAPES[name], "bfloat16") for name in ("Llama-3-8B", "Llama-3-70B"))
    assert pass_budget(large, Card(80 * GIB), 1024) == Budget(0, 0, 0)
    assert pass_budget(large, Card(80 * GIB, 4), 1024).gradient > 1024
    totals = [85_049_802_752, 85_100_000_000, 84_900_000_000]  # an H100 of 80 GB by several drivers
    assert len({pass_budget(shape, Card(nominal_memory(total)), 1024) for total in totals}) == 1
    assert nominal_memory(3 * GIB + 5) == 3 * GIB


def test_sizes_that_a_configuration_does_not_state_count_as_one() -> None:
    config = transformers.PretrainedConfig(vision_config=transformers.PretrainedConfig())
    config.vocab_size, config.hidden_size = 1000, 0
    shape = read_shape(config, "bfloat16")
    layer = budget.Shape(1, 1, 1, 1, 1, intermediate=4, vocabulary=1000, width=2, weights=0)
    assert replace(shape, tower=None, weights=0) == shape.tower == layer


WIDE = budget.Shape(100, 3, 6, 2, 10, intermediate=500, vocabulary=1000, width=2, weights=0)
NARROW = replace(WIDE, heads=1, key_value_heads=1, intermediate=10)


def test_the_bytes_of_a_token_are_sums_over_what_norms_attention_and_products_hold() -> None:
    for shape, layer, ends, gradients, forward in (
        (WIDE, 1600 + 344 + 4000, 1200, 4600, 800 + 3000),
        (replace(WIDE, width=4, gated=False), 1600 + 984 + 4000, 1600, 8000, 1600 + 4000),
        (replace(WIDE, intermediate=9, attention="quadratic", gated=False), 1600 + 840 + 36, 1200, 1654, 800 + 1140),
        (NARROW, 1600 + 84 + 80, 1200, 1660, 800 + 800),
        (replace(NARROW, tower=NARROW, patches=4), 1600 + 84 + 80, 1200, 1660, 4 * (1600 + 6144)),
    ):
        kept = 3 * layer + ends
        assert (budget.kept_bytes(shape, 7), budget.gradient_bytes(shape, 7)) == (kept, kept + gradients + 12 * 7)
        assert budget.forward_bytes(shape, 7) == forward
    assert budget.layer_parameters(WIDE) == 100 * (2 * 60 + 2 * 20 + 3 * 500)
    config = SHAPES["Llama-3-8B"]
    assert all(read_shape(config, dtype).width == getattr(torch, dtype).itemsize for dtype in budget.WIDTHS)
    eight, four = (read_shape(config, "bfloat16", 10**12, name).weights / 10**12 for name in ("8bit", "4bit"))
    assert 0.5 < four < 0.75 < 1.0 < eight < 1.25
    assert read_shape(config, "bfloat16", 10).weights == 2 * 10


def test_one_key_serves_all_heads_and_a_token_passes_the_experts_that_it_chooses() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    for multi_query, heads in ((True, 1), (False, 4)):
        falcon = transformers.FalconConfig(**sizes, multi_query=multi_query, new_decoder_architecture=False)
        assert read_shape(falcon, "bfloat16").key_value_heads == heads
    assert read_shape(transformers.GPT2Config(n_embd=64, n_head=4), "bfloat16").intermediate == 4 * 64
    assert read_shape(_config(transformers.LlamaConfig, 64, 2, 4, 1, 256, 100), "bfloat16").key_value_heads == 1
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
    qwen = transformers.Qwen2MoeConfig(**sizes, **experts, moe_intermediate_size=48)
    assert read_shape(qwen, "bfloat16").intermediate == 2 * 48
    single = transformers.Qwen2MoeConfig(**sizes, **{**experts, "num_experts_per_tok": 1}, moe_intermediate_size=48)
    assert read_shape(single, "bfloat16").intermediate == 256, "of the layers without experts"
    mixtral = transformers.MixtralConfig(**sizes, num_experts_per_tok=2, intermediate_size=256)
    assert read_shape(mixtral, "bfloat16").intermediate == 2 * 256


def test_other_architectures_are_counted_generously() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    neox = transformers.GPTNeoXConfig(vocab_size=1000, **sizes)
    shape = read_shape(neox, "bfloat16")
    assert not shape.gated
    assert budget.kept_bytes(shape, LENGTH) > 0.9 * counted_kept(neox, torch.bfloat16, 2)
    assert budget.forward_bytes(shape, LENGTH) > 0.9 * counted_peak(neox, torch.bfloat16)
    parameters = on_meta(neox, torch.bfloat16, 2).parameters()
    assert shape.weights == pytest.approx(2 * sum(parameter.numel() for parameter in parameters), rel=0.02)
    assert read_shape(transformers.Gemma2Config(), "bfloat16").attention == "quadratic"


SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
SEES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 336, "patch_size": 14}
TOWERS: dict[str, tuple[Any, Any, int]] = {
    "LLaVA-1.5": (transformers.CLIPVisionConfig(**SEES), transformers.CLIPVisionModel, 1),
    "Idefics3": (transformers.SiglipVisionConfig(**{**SEES, "image_size": 364}), transformers.SiglipVisionModel, 4),
}


@pytest.mark.parametrize("name", TOWERS)
def test_the_tower_of_a_model_of_pictures_needs_no_more_than_is_reckoned_a_token(name: str) -> None:
    config, kind, patches = TOWERS[name]
    config.num_hidden_layers = 2
    config._attn_implementation = "fused_on_meta"
    with torch.device("meta"):
        tower = kind(config).to(torch.bfloat16).eval().requires_grad_(False)
        pixels = torch.zeros(4, 3, config.image_size, config.image_size)
    with torch.inference_mode(), Alive(tower) as alive:
        tower(pixel_values=pixels.to(torch.bfloat16))
    counted = alive.peak / (4 * (config.image_size // config.patch_size) ** 2)
    whole = {"vision_config": config, "text_config": transformers.LlamaConfig(**SMALL)}
    whole |= {"scale_factor": 2} if patches == 4 else {}
    shape = read_shape((transformers.LlavaConfig if patches == 1 else transformers.Idefics3Config)(**whole), "bfloat16")
    assert shape.patches == patches
    assert counted < budget.forward_bytes(shape, LENGTH) / patches < 2 * counted
    text = read_shape(whole["text_config"], "bfloat16")
    assert pass_budget(shape, Card(4 * GIB), LENGTH).forward < pass_budget(text, Card(4 * GIB), LENGTH).forward


@pytest.mark.parametrize("save", SAVE.values(), ids=SAVE)
def test_the_shape_of_a_model_of_pictures_says_how_many_patches_are_a_token(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path)
    lm = open_picture_model(ModelConfig(path=str(tmp_path), dtype="float32"))
    model: Any = lm.model
    shape = read_shape(model.config, "float32", sum(parameter.numel() for parameter in model.parameters()))
    assert (shape.hidden, shape.tower.hidden, shape.tower.layers, shape.tower.heads) == (64, 32, 2, 2)
    assert (shape.tower.head_size, shape.tower.intermediate) == (16, 64)
    prompt = picture_prompt(lm, random_pictures([(56, 56)])[0])
    tokens = prompt.ids.count(picture_token(model.config))
    pixels = prompt.numbers["pixel_values"]
    patches = (
        len(pixels) if pixels.dim() == 2 else pixels[..., 0, :, :].numel() // model.config.vision_config.patch_size**2
    )
    assert patches == tokens * shape.patches
