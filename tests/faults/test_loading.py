"""How weights are held and attention and products are computed on a GPU."""

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.device import random_model
from pipeline.config.models import ModelConfig
from pipeline.models.load import _quantization, fingerprint_model
from pipeline.models.opened import fused_attention, use_fused_attention
from pipeline.passes.gradient import gram
from seenset import score
from tests.helpers.claimed_device import ClaimedDevices, ClaimedTensor, real

IDS = torch.arange(12)[None]


@pytest.fixture
def bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name and version, to which transformers' settings look."""
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("")
    record = tmp_path / "bitsandbytes-0.48.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.48.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_four_bits_are_nf4_and_compute_in_the_dtype_of_the_model(dtype: str) -> None:
    settings = _quantization(ModelConfig(path="m", quantization="4bit"), dtype)
    assert settings.load_in_4bit
    assert settings.bnb_4bit_quant_type == "nf4"
    assert settings.bnb_4bit_compute_dtype == getattr(torch, dtype)


def test_the_fingerprint_names_the_kind_of_four_bits(tiny_model_folder: Path) -> None:
    config = ModelConfig(path=str(tiny_model_folder), quantization="4bit")
    assert fingerprint_model(config)["quantization"] == "4bit nf4"


@pytest.fixture
def registered() -> Iterator[None]:
    """Our attention, until the end of the test."""
    before = AttentionInterface._global_mapping["sdpa"]
    use_fused_attention("cuda")
    yield
    AttentionInterface.register("sdpa", before)


@pytest.mark.parametrize("opened", ["of random weights", "by the caller"])
def test_whatever_opens_a_model_on_a_gpu_has_that_attention(opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", plain)  # put back afterwards
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    if opened == "of random weights":
        random_model("tiny", "cpu", torch.float32)
        assert AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward
        random_model("tiny", "meta", torch.float32)
    else:
        lm = random_model("tiny", "meta", torch.float32)
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        assert score(lm, [], detectors=["loss"]).num_rows == 0
    assert AttentionInterface._global_mapping["sdpa"] is fused_attention


@pytest.mark.parametrize("names", [["default", "out", "dtype", "dtype_out"], ["default", "out"]], ids=["2.8", "2.6"])
def test_half_precision_products_are_float32_with_every_torch(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten.bmm, "_overload_names", names)
    rows = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    with ClaimedDevices(cuda=True) as devices:
        product = gram(ClaimedTensor(rows, torch.device("meta", 0)))
    assert ("aten.bmm.dtype" in devices.operations) == ("dtype" in names)
    assert product.dtype == torch.float32
    torch.testing.assert_close(real(product), torch.bmm(rows.float(), rows.float().mT))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("takes_groups", [False, True])
def test_grouped_heads_reach_a_fused_kernel(takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's answer of a GPU: its flash kernel takes groups in half precision, none of them in float32.
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda *_: takes_groups)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    model.requires_grad_(False)
    expected = model(input_ids=IDS, use_cache=False).logits
    grouped: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def note(query: torch.Tensor, key: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        grouped.append(query.shape[1] != key.shape[1])
        return attention(query, key, *args, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    with ClaimedDevices() as devices:
        claimed = devices.claim(copy.deepcopy(model), lambda name: "meta:0")
        logits = claimed(input_ids=IDS.to("meta:0"), use_cache=False).logits
    assert grouped == [takes_groups]
    torch.testing.assert_close(real(logits), expected)
