"""A training holds neither all logits of a batch nor more activations than it must, and says what to set otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.small_model import WORDS
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import ExitCode, IncompleteError, LostDeviceError, UserError
from pipeline.models.load import fingerprint_model, open_model
from pipeline.models.sharing import Adapters
from pipeline.training import memory as memory_module
from pipeline.training.memory import (
    PassSize,
    batch_loss,
    bytes_of_token,
    explained,
    hidden_states,
    pass_size,
    recomputed,
    recomputed_layers,
)
from pipeline.training.train import train

TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(5 + i % 9)) for i in range(12)]
CONFIG = FinetuneConfig(epochs=1, batch_size=4, learning_rate=5e-3, dtype="float32", rank=4)
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
WIDE = 8_000
DOCUMENTS = [[(7 * row + 13 * place) % WIDE for place in range(100 - 5 * row)] for row in range(8)]


def llama(vocabulary: int = WIDE, tied: bool = True, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, **{**SIZES, **sizes})
    return LlamaForCausalLM(config).eval()


def gemma(vocabulary: int = WIDE) -> Any:
    """Its logits are capped, which its head alone does not say."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=vocabulary, head_dim=8, final_logit_softcapping=2.0, **{**SIZES, "num_key_value_heads": 4}
    )
    return Gemma2ForCausalLM(config).eval()


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return peft.eval()


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.itemsize)
        return result


def gradients(
    model: Any, elements: int, monkeypatch: pytest.MonkeyPatch, documents: list[list[int]] = DOCUMENTS
) -> tuple[float, dict[str, torch.Tensor], int]:
    """The loss of the documents, the gradients, and the elements of the largest tensor, with so many logits at once."""
    monkeypatch.setitem(memory_module.PIECE_ELEMENTS, "cpu", elements)
    model.zero_grad(set_to_none=True)
    with Largest() as largest:
        loss, count = batch_loss(model, documents)
        loss.backward()
    assert count == sum(len(document) - 1 for document in documents)
    return loss.item(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}, largest.elements


MAKERS = {
    "adapter": lambda: adapted(llama()),
    "untied": lambda: adapted(llama(tied=False)),
    "full, tied": llama,
    "full, untied": lambda: llama(tied=False),
    "capped": lambda: adapted(gemma()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_logits_of_a_batch_never_exist_at_once_and_loss_and_gradients_are_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = MAKERS[kind](), len(DOCUMENTS) * len(DOCUMENTS[0])
    whole_loss, whole, most = gradients(model, 1 << 40, monkeypatch)
    assert most >= tokens * WIDE
    loss, parts, most = gradients(model, 100 * WIDE, monkeypatch)
    assert most <= max(100 * WIDE, max(weight.numel() for weight in model.parameters()))
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        assert float((parts[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


def test_pieces_of_bfloat16_agree_with_the_whole_as_far_as_bfloat16_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`full` casts the weights of its head in autocast, which keeps what it casts."""
    for model in (adapted(llama().to(torch.bfloat16)), llama(tied=False)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole_loss, whole, _ = gradients(model, 1 << 40, monkeypatch)
            loss, parts, _ = gradients(model, 100 * WIDE, monkeypatch)
        assert loss == pytest.approx(whole_loss, rel=1e-3)
        assert parts.keys() == whole.keys()
        for name, gradient in whole.items():
            assert float((parts[name] - gradient).norm()) <= 2e-2 * float(gradient.norm()), name


def test_a_model_with_another_tail_is_trained_from_its_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(llama(400))

    def sharpen(module: Any, args: Any, output: Any) -> None:
        output.logits = output.logits * 1.5

    model.get_base_model().register_forward_hook(sharpen)
    documents = [[token % 400 for token in document] for document in DOCUMENTS]
    whole_loss, whole, _ = gradients(model, 1 << 40, monkeypatch, documents)
    loss, parts, _ = gradients(model, 400, monkeypatch, documents)
    assert (loss, parts.keys()) == (whole_loss, whole.keys())


@pytest.mark.parametrize("settings", [{"pass_tokens": 16}, {"pass_tokens": 40}, {"recompute": True}])
def test_a_step_taken_apart_or_computed_again_makes_the_same_weights(
    settings: dict[str, Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    def trained(name: str, config: FinetuneConfig) -> dict[str, torch.Tensor]:
        lm = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
        train(lm.model, lm.tokenizer, TEXTS, config, tmp_path / name)
        assert not any("forward" in layer.__dict__ for layer in recomputed_layers(lm.model))
        return load_file(tmp_path / name / "adapter_model.safetensors")

    whole, other = trained("whole", CONFIG), trained("other", CONFIG.model_copy(update=settings))
    for name, weight in whole.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-5)


def test_unset_settings_of_memory_change_no_name_of_an_adapter() -> None:
    assert not {"pass_tokens", "recompute"} & FinetuneConfig().settings().keys()
    assert FinetuneConfig(recompute=False).settings()["recompute"] is False


@contextmanager
def kept_bytes(model: Any) -> Iterator[list[int]]:
    """Bytes that the graph of the block keeps, but for weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes: dict[int, int] = {}
    total: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
    total.append(sum(sizes.values()))


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_a_token_keeps_is_foretold_within_15_percent(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory_module.PIECE_ELEMENTS, "cpu", 100 * 4000)
    monkeypatch.setattr(memory_module, "SHORT_TOKENS", 0)  # attention as on a GPU: no whole matrix of it is kept
    model = adapted(llama(4000, hidden_size=64, intermediate_size=192, num_hidden_layers=4))
    foretold = bytes_of_token(model, CONFIG, recomputes)
    documents = [[place % 4000 for place in range(256)]] * 4
    ids = torch.tensor(documents)
    with kept_bytes(model) as total, recomputed(model, recomputes):
        outputs = hidden_states(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert outputs[0].requires_grad
    assert 1024 * foretold == pytest.approx(total[0], rel=0.15)


def test_a_card_of_any_size_takes_the_passes_that_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        """A model that says that it is on a GPU; the rule asks nothing else of the device."""

        device = torch.device("cuda", 0)

        def __init__(self, model: Any) -> None:
            self.model = model

        def modules(self) -> Any:
            return self.model.modules()

    sizes = []
    for kept in (0.8e6, 6.8e6, 34e6):  # bytes a token of 135M, 8B and 70B weights, about
        monkeypatch.setattr(
            memory_module, "bytes_of_token", lambda m, c, again, kept=kept: kept / 20 if again else kept
        )
        sizes.append(pass_size(OnGpu(llama(400)), [[0] * 1024], CONFIG))
    assert sizes == [PassSize(10737, False), PassSize(1263, False), PassSize(5052, True)]
    assert pass_size(llama(400), [[0] * 1024], CONFIG) == PassSize(256, False)
    assert pass_size(llama(400), [[0] * 9], CONFIG.model_copy(update={"pass_tokens": 7})) == PassSize(7, False)
    assert pass_size(llama(400), [[0] * 9], CONFIG.model_copy(update={"recompute": True})) == PassSize(256, True)


def run_short_of_memory(model_folder: Path, folder: Path, error: Exception) -> None:
    lm = open_model(ModelConfig(path=str(model_folder), dtype="float32"))

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        raise error

    lm.model.register_forward_pre_hook(refuse, with_kwargs=True)
    train(lm.model, lm.tokenizer, TEXTS, CONFIG, folder)


def test_memory_that_ends_in_training_is_said_in_a_line_that_names_what_to_set(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 15 GiB")
    with pytest.raises(
        UserError,
        match=r"^the device ran out of memory in training \(CUDA out of memory\); set pass_tokens below 256, or "
        r"recompute: true, or max_tokens below \d+, or resources\.deepspeed to spread the model over several GPUs$",
    ) as raised:
        run_short_of_memory(tiny_model_folder, tmp_path / "a", error)
    assert raised.value.exit_code == ExitCode.USER_ERROR
    with pytest.raises(IncompleteError), explained(CONFIG, PassSize(None, True), [[0] * 9], alone=False):
        raise error  # other processes wait for this one: Ray Train ends them where it raises
    with pytest.raises(LostDeviceError, match="rerun the command"):
        run_short_of_memory(tiny_model_folder, tmp_path / "b", RuntimeError("CUDA error: device-side assert triggered"))
    assert list(tmp_path.iterdir()) == []


def test_an_id_without_an_embedding_is_refused_before_training(tiny_model_folder: Path, tmp_path: Path) -> None:
    lm = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    lm.tokenizer.add_tokens(["<beyond>"])
    with pytest.raises(UserError, match=r"fine-tuning text 3: token id \d+ has no row in the model's embedding"):
        train(lm.model, lm.tokenizer, [*TEXTS[:3], "the <beyond>", *TEXTS[4:]], CONFIG, tmp_path / "a")


def test_a_model_on_the_cpu_opens_no_gpu_that_torch_sees(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor without a GPU on a node that has some: training, loading and merging an adapter stay on the CPU."""
    opened: list[str] = []

    def refuse() -> None:
        opened.append("cuda")
        raise RuntimeError("this process must not open a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    config = ModelConfig(path=str(tiny_model_folder), dtype="float32")
    lm = open_model(config)
    for method in ("lora", "full"):
        train(lm.model, lm.tokenizer, TEXTS, CONFIG.model_copy(update={"method": method}), tmp_path / method)
    lm, base = open_model(config), fingerprint_model(config)["model"]
    with Adapters(lm, {"one": tmp_path / "lora"}, base, config.path).on("one"):
        batch_loss(lm.model, [[1, 2, 3]])
    open_model(config.model_copy(update={"adapter": str(tmp_path / "lora")}))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").device.type == "cpu"
    assert opened == []
