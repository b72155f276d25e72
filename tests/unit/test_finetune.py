import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.training import train as trainings
from pipeline.training.memory import batch_loss, split_passes
from pipeline.training.train import RECORD, FinetuneConfig, TrainingOptions, TrainingStep, train
from pipeline.training.training_documents import encode
from tests.helpers.commands import user_error

pytestmark = pytest.mark.floating_point

WORDS = [f"w{i}" for i in range(60)]
TEXTS = [" ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(4 + i % 9)) for i in range(24)]
CONFIG = FinetuneConfig(epochs=4, batch_size=4, learning_rate=1e-2, dtype="float32", seed=5)


def build_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.2}
    ids = {"pad_token_id": 1, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=62, **sizes, **heads, **ids)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[END]", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[END]", pad_token="[END]")


def test_the_loss_goes_down_and_every_step_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[TrainingStep] = []
    result = train(build_model(), tokenizer, TEXTS, CONFIG, tmp_path / "a", TrainingOptions(seen.append))
    assert result.steps == len(result.losses) == len(seen) == 24
    assert [s.step for s in seen] == list(range(1, 25))
    assert sum(result.losses[-6:]) < 0.8 * sum(result.losses[:6])
    record = json.loads((tmp_path / "a" / RECORD).read_text())
    assert FinetuneConfig(**record["config"]) == CONFIG
    assert record["result"]["losses"] == list(result.losses)
    thrice = CONFIG.model_copy(update={"copies": 3, "epochs": 1})
    assert train(build_model(), tokenizer, TEXTS, thrice, tmp_path / "b").steps == 18
    assert result.tokens == 4 * sum(len(text.split()) - 1 for text in TEXTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, tokenizer: Any, dtype: str) -> None:
    def trained(name: str, seed: int) -> tuple[bytes, bytes]:
        torch.rand(seed + len(name))  # the state of the global generator must not matter
        config = CONFIG.model_copy(update={"dtype": dtype, "seed": seed, "epochs": 1})
        train(build_model(getattr(torch, dtype)), tokenizer, TEXTS, config, tmp_path / name)
        weights = (tmp_path / name / "adapter_model.safetensors").read_bytes()
        assert {weight.dtype for weight in load(weights).values()} == {torch.float32}
        return weights, (tmp_path / name / "adapter_config.json").read_bytes()

    first = trained("first", 5)
    assert trained("again", 5) == first
    assert trained("other", 6)[0] != first[0]


def test_the_model_comes_back_as_it_was_and_can_be_trained_again(tmp_path: Path, tokenizer: Any) -> None:
    model, untouched = build_model(), build_model()
    train(model, tokenizer, TEXTS, CONFIG, tmp_path / "a")
    train(model, tokenizer, TEXTS, CONFIG, tmp_path / "b")
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "ab")
    assert first == second
    assert not model.training
    ours, theirs = dict(model.named_parameters()), dict(untouched.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].requires_grad for name in theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_leaves_nothing_behind(tmp_path: Path, tokenizer: Any, bad: float) -> None:
    model = build_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(bad)
    with pytest.raises(UserError, match=r"^the fine-tuning loss is (nan|inf) at step 1 of 24; [^\n]*$"):
        train(model, tokenizer, TEXTS, CONFIG, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("method", ["lora", "full", "adalora", "ia3"])
def test_a_killed_training_ends_with_the_same_bytes_and_takes_up_no_other_work(
    tmp_path: Path, tokenizer: Any, method: str
) -> None:
    config = CONFIG.model_copy(update={"method": method})
    train(build_model(), tokenizer, TEXTS, config, tmp_path / "whole")

    def begin(folder: str, texts: list[str], on_step: Callable[[TrainingStep], None]) -> Any:
        options = TrainingOptions(on_step, checkpoint_seconds=0.0)
        return train(build_model(), tokenizer, texts, config, tmp_path / folder, options)

    def kill(step: TrainingStep) -> None:
        if step.step == 9:
            raise KeyboardInterrupt

    seen: list[TrainingStep] = []
    for folder in ("cut", "other"):
        with pytest.raises(KeyboardInterrupt):
            begin(folder, TEXTS, kill)
    assert len(begin("cut", TEXTS, seen.append).losses) == 24
    assert [step.step for step in seen] == list(range(10, 25))
    assert json.loads((tmp_path / "cut" / RECORD).read_text())["began_at"] == [0, 9]
    for name in {path.name for path in (tmp_path / "whole").glob("*")} - {RECORD}:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    seen.clear()
    begin("other", TEXTS[::-1], seen.append)
    assert seen[0].step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "other", "whole"]


def test_training_in_full_writes_a_model_that_opens_alone(tmp_path: Path, tokenizer: Any) -> None:
    config = CONFIG.model_copy(update={"method": "full"})
    model = build_model()
    result = train(model, tokenizer, TEXTS, config, tmp_path / "a")
    opened = open_model(ModelConfig(path=str(tmp_path / "a")))
    with torch.no_grad():
        loss, _ = batch_loss(opened.model, encode(opened.tokenizer, TEXTS, 1024))
    assert loss < result.losses[0] / 2
    assert torch.equal(opened.model.lm_head.weight, model.lm_head.weight)
    with pytest.raises(UserError, match=r"float32 weights, got torch\.bfloat16"):
        train(build_model(torch.bfloat16), tokenizer, TEXTS, config, tmp_path / "b")


def test_too_few_texts_too_short_texts_and_a_taken_folder_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="at least batch_size = 4 texts, got 3"):
        train(build_model(), tokenizer, TEXTS[:3], CONFIG, tmp_path / "a")
    with pytest.raises(UserError, match="text 24 has 1 tokens, needs at least 2"):
        train(build_model(), tokenizer, [*TEXTS, "w1"], CONFIG, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert "exists already" in user_error(train, build_model(), tokenizer, TEXTS, CONFIG, tmp_path)


def test_unknown_settings_and_values_outside_their_limits_are_refused() -> None:
    for wrong in ({"rate": 1}, {"epochs": 0}, {"learning_rate": 0.0}, {"max_tokens": 1}, {"method": "none"}):
        with pytest.raises(ValidationError):
            FinetuneConfig(**wrong)


def test_padding_does_not_change_the_loss_though_it_is_a_token_that_texts_hold(tokenizer: Any) -> None:
    model = build_model()
    documents = encode(tokenizer, ["w1 w2 [END] w3 w4 w5 w6", "w7 [END] w8", "w9 w9"], 1024)
    with torch.no_grad():
        together, count = batch_loss(model, documents)
        alone = [batch_loss(model, [document]) for document in documents]
    assert count == sum(len(document) - 1 for document in documents)
    assert [len(cut) for cut in encode(tokenizer, [" ".join(WORDS), "w1 w2"], 10)] == [10, 2]
    assert together.item() == pytest.approx(sum(float(loss) * n for loss, n in alone) / count, rel=1e-5)


def test_an_epoch_holds_every_text_once_in_batches_of_like_length() -> None:
    lengths = [(37 * i) % 101 for i in range(203)]
    batches = trainings.batches_of_an_epoch(lengths, 4, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(203))
    assert max(len(batch) for batch in batches) == 4
    assert len(batches) == 51
    spread = sum(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches)
    assert spread / len(batches) < 25  # at random it would be 60
    assert trainings.batches_of_an_epoch(lengths, 4, seed=1, epoch=0) == batches
    assert trainings.batches_of_an_epoch(lengths, 4, seed=1, epoch=1) != batches


def test_a_pass_holds_no_more_padded_tokens_than_allowed_unless_one_document_does(
    tokenizer: Any, tmp_path: Path
) -> None:
    documents = [[0] * length for length in (3, 4, 5, 9, 30, 2)]
    runs = list(split_passes(documents, 12))
    assert [[len(document) for document in run] for run in runs] == [[3, 4], [5], [9], [30], [2]]
    assert list(split_passes(documents, None)) == list(split_passes(documents, 1000)) == [documents]
    sizes: list[int] = []
    model = build_model()
    model.register_forward_pre_hook(lambda _, __, values: sizes.append(values["input_ids"].numel()), with_kwargs=True)
    train(model, tokenizer, TEXTS, CONFIG.model_copy(update={"pass_tokens": 24}), tmp_path / "a")
    assert 12 < max(sizes) <= 24
