"""A model opens only if it is causal and a text has the same logits each time and beside any other text."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from causal_models import OWN, PlainTokenizer, tiny_config, tiny_model
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import seenset
from pipeline.config.models import ModelConfig
from pipeline.models import probe
from pipeline.models.copies import few_layers
from pipeline.models.load import check_model, open_model, open_paraphraser, open_picture_model
from pipeline.models.opened import LanguageModel
from pipeline.models.probe import check_causal, choose_reader, float32_fault
from tests.helpers.commands import user_error
from tests.helpers.picture_models import SAVE

CAUSAL = (
    "arcee", "bamba", "biogpt", "bloom", "codegen", "cohere", "cohere2", "ctrl", "dbrx", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid",
    "helium", "hunyuan_v1_dense", "jamba", "jetmoe", "lfm2", "llama", "mamba", "mamba2", "minimax", "mistral",
    "mixtral", "modernbert-decoder", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "opt",
    "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "recurrent_gemma", "rwkv",
    "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm", "zamba2",
)  # fmt: skip
MORE_CAUSAL = (
    "afmoe", "apertus", "aria_text", "axk1", "bart", "beam", "bigbird_pegasus", "bitnet", "blenderbot", "cohere2_moe",
    "cwm", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "gemma4_text", "glm4_moe", "glm_moe_dsa", "gpt_neox_japanese", "granitemoeshared", "hrm_text", "hunyuan_v1_moe",
    "hy_v3", "hyperclovax", "jais2", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "marian", "mbart", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "moshi", "mvp", "nanochat", "nemotron_h",
    "olmo_hybrid", "pegasus", "phimoe", "plbart", "qwen3_5_text", "solar_open", "trocr", "vaultgemma", "whisper",
    "xlstm", "youtu", "zamba",
)  # fmt: skip
NOT_CAUSAL = (
    "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
    "xlnet",
)  # fmt: skip


def opened(model: Any) -> LanguageModel:
    return LanguageModel(model, PlainTokenizer(), torch.device("cpu"), 64)


@pytest.mark.parametrize("kind", [*CAUSAL, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_CAUSAL)])
def test_a_causal_architecture_opens_in_float32_and_bfloat16(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(kind)
    check_causal(opened(model), kind)
    small = few_layers(model)
    assert small is not None, "there is a copy to try in the place of half precision"
    assert float32_fault(choose_reader(opened(small))) is None
    assert not [record for record in caplog.records if record.name == probe.__name__]


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_a_model_that_reads_both_directions_is_refused_with_its_class(kind: str) -> None:
    model = tiny_model(kind)
    name = type(model).__name__
    line = user_error(check_causal, opened(model), kind)
    assert line.startswith(f"model {kind}: {name} is no causal language model: another last token moves the logits of")
    told = ["is_decoder: false"] if getattr(model.config, "is_decoder", None) is False else []
    assert [part for part in line.split("; its config.json states ")[1:] if "is_decoder" in part] == told
    small = few_layers(model)
    assert float32_fault(choose_reader(opened(small))) is not None
    assert name in user_error(check_causal, opened(model.to(torch.bfloat16)), kind)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "rembert", "roformer", "camembert", "ernie"])
def test_the_same_architecture_as_a_decoder_opens(kind: str) -> None:
    check_causal(opened(tiny_model(kind, is_decoder=True)), kind)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 4}, "use_bidirectional_attention"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: all"),
        ("llama", {"is_causal": False}, "is_causal: false"),
        ("qwen2", {"is_causal": False}, "is_causal: false"),
    ],
)
def test_a_setting_that_makes_a_causal_architecture_read_both_directions_is_named(
    kind: str, settings: dict[str, Any], told: str
) -> None:
    model = tiny_model(kind, **settings)
    logits = [model(input_ids=torch.tensor([[5, 6, 7, last]])).logits[0, :3] for last in (8, 9)]
    if torch.equal(*logits):  # this release of transformers has no such setting
        check_causal(opened(model), kind)
    else:
        line = user_error(check_causal, opened(model), kind)
        assert told in line
        assert "is no causal language model" in line


class _Changed(LlamaForCausalLM):
    """A Llama whose logits `change` moves."""

    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def forward(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        output = super().forward(input_ids=input_ids, **settings)
        output.logits = type(self).change(output.logits, input_ids)
        return output


def changed(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: float = 1.0) -> Any:
    """A tiny Llama with logits + size * (change - logits)."""
    kind = type("ChangedForCausalLM", (_Changed,), {})
    kind.change = staticmethod(lambda logits, ids: logits + size * (change(logits, ids) - logits))
    torch.manual_seed(0)
    model = kind(tiny_config("llama")).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.weight.normal_(0, 0.2)
    return model


def blocks(size: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Logits that see the later tokens of their block, as those of a model that denoises blocks."""

    def change(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        parts = [part.flip(1).cumsum(1).flip(1) for part in ids.float().split(size, dim=1)]
        return logits + torch.cat(parts, 1)[..., None] / 50

    return change


def noise(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits + torch.randn_like(logits)


def neighbours(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits that see how many texts are read together, as those of experts with a limited capacity."""
    return logits * (1 + 0.1 * (len(ids) - 1))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 32])
def test_a_model_that_reads_blocks_in_both_directions_is_refused(size: int) -> None:
    assert "is no causal language model" in user_error(check_causal, opened(changed(blocks(size))), "blocks")


def above(most: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A model whose logits are changed in texts of more tokens."""
    return changed(lambda logits, ids: change(logits, ids) if ids.shape[1] > most else logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [20, 100])
def test_code_that_reads_longer_texts_in_another_way_is_refused(dtype: torch.dtype, most: int) -> None:
    cases = [
        (blocks(32), "is no causal language model"), (noise, "gives the same text other logits the second time"),
        (neighbours, "gives a text other logits beside a longer one"),
    ]  # fmt: skip
    for change, fault in cases:
        lm = LanguageModel(above(most, change).to(dtype), PlainTokenizer(), torch.device("cpu"), None)
        line = user_error(check_causal, lm, "x")
        assert line.startswith(f"model x: ChangedForCausalLM {fault}")
        assert f"(in a text of up to {probe.MANY} tokens)" in line


def test_code_that_reads_no_long_text_opens() -> None:
    def fail(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise IndexError("more positions than there are")

    check_causal(LanguageModel(above(64, fail), PlainTokenizer(), torch.device("cpu"), None), "x")
    check_causal(opened(above(64, noise)), "x")  # it has 64 positions


def test_attention_in_chunks_is_tried_on_more_than_one_chunk() -> None:
    """Reformer draws its hashes anew at each call, and only for texts that are longer than a chunk."""
    model = tiny_model(
        "reformer", lsh_attn_chunk_length=64, local_attn_chunk_length=64, max_position_embeddings=512
    )  # fmt: skip
    lm = LanguageModel(model, PlainTokenizer(), torch.device("cpu"), 512)
    assert float32_fault(choose_reader(lm)) is None
    assert "ReformerModelWithLMHead " in (line := user_error(check_causal, lm, "reformer"))
    assert "(in a text of up to 150 tokens" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_change_from_time_to_time_or_with_neighbours_are_refused(dtype: torch.dtype) -> None:
    for change, fault in ((noise, "gives the same text other logits the second time"), (neighbours, "beside a longer")):
        line = user_error(check_causal, opened(changed(change).to(dtype)), "x")
        assert line.startswith("model x: ChangedForCausalLM gives ")
        assert fault in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_become_nan_are_named(dtype: torch.dtype) -> None:
    """NaN where a longer text stands beside, as of padding that is divided by 0."""

    def change(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits if len(ids) == 1 else logits * float("nan")

    line = user_error(check_causal, opened(changed(change).to(dtype)), "x")
    assert line.startswith("model x: ChangedForCausalLM gives logits that are NaN")


def test_half_precision_is_held_to_shares_of_the_standard_deviation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no copy in float32 can be tried."""
    monkeypatch.setattr(probe, "few_layers", lambda *_: None)

    def noisy(share: float) -> LanguageModel:
        model = changed(lambda logits, ids: logits + logits.std() * torch.empty_like(logits).uniform_(-1, 1), share)
        return opened(model.to(torch.bfloat16))

    check_causal(noisy(0.005), "x")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_causal(noisy(0.03), "x")
    (record,) = caplog.records
    faults = ("gives the same text other logits", "is no causal language model: another last token moves the logits")
    assert any(f"model x: ChangedForCausalLM {fault}" in record.getMessage() for fault in faults)  # the first of both
    assert "% of their standard deviation" in record.getMessage()
    assert "rounding by at most 10%" in user_error(check_causal, noisy(0.2), "x")


def save(model: Any, folder: Path, tokenizer_folder: Path) -> ModelConfig:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def test_every_way_to_open_a_model_refuses_one_that_is_not_causal(tiny_model_folder: Path, tmp_path: Path) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(tiny_model_folder))
    config = save(tiny_model("roberta", vocab_size=vocabulary), tmp_path / "model", tiny_model_folder)
    line = user_error(check_model, config)  # before weights are read
    assert "RobertaForCausalLM is no causal language model" in line
    assert "(random weights); its config.json states is_decoder: false" in line
    for opener in (open_model, open_paraphraser):
        assert "RobertaForCausalLM is no causal language model" in user_error(opener, config)
    for model in (config, config.path):
        assert "RobertaForCausalLM is no causal language model" in user_error(seenset.score, model, ["a text"])
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**settings, "is_decoder": True}))
    assert seenset.score(config, ["a text of some words"], ["loss"])["problem"].to_pylist() == [None]


@pytest.mark.parametrize("method", ["WordLevel", "Unigram"])
def test_a_model_whose_tokenizer_reads_no_english_opens(method: str, tmp_path: Path) -> None:
    """As of proteins: a text with other letters raises an error, or panics, and is quarantined."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    vocabulary: Any = {letter: number for number, letter in enumerate(letters)}
    model: Any = tokenizers.models.WordLevel(vocabulary, unk_token="?") if method == "WordLevel" else (
        tokenizers.models.Unigram([(letter, -3.0) for letter in letters], None, False)
    )  # fmt: skip
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tiny_model("llama", vocab_size=len(letters), pad_token_id=None).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_model(config)
    table = seenset.score(config, ["MKTAYIAKQR", "a quiet river", "GSHMASMTGG"], ["loss"])
    assert [problem is None for problem in table["problem"].to_pylist()] == [True, False, True]


def test_smollm2_is_within_the_tolerance_alone_again_and_padded(smollm2: LanguageModel) -> None:
    reader = choose_reader(smollm2)
    for texts in reader.attempts:
        moved = probe._differences(reader, texts, repeated=True)
        assert max(moved.changed, moved.again, moved.batched) < moved.limit / 4
    assert len(reader.attempts[0][0]) == probe.LENGTH
    assert float32_fault(reader) is None


def test_smollm2_in_bfloat16_opens_without_a_warning(smollm2_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lm = open_model(ModelConfig(path=str(smollm2_folder), dtype="bfloat16"))
    assert not [record for record in caplog.records if record.name == probe.__name__]
    small = few_layers(lm.model)
    assert small is not None
    assert small.config.num_hidden_layers == 2


def test_a_model_that_was_opened_elsewhere_is_tried_by_score(tiny_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    model = tiny_model("bert", vocab_size=len(tokenizer))
    lm = LanguageModel(model, tokenizer, torch.device("cpu"), 64)
    assert "BertLMHeadModel is no causal language model" in user_error(seenset.score, lm, ["a text"])


def test_a_model_that_fails_on_a_short_text_is_one_line(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = tiny_model("xmod", vocab_size=len(AutoTokenizer.from_pretrained(tiny_model_folder)))
    line = user_error(open_model, save(model, tmp_path / "model", tiny_model_folder))
    assert "XmodForCausalLM cannot read a text of 12 tokens: Input language unknown" in line


@pytest.mark.parametrize("kind", SAVE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_picture_model_is_tried_on_text_behind_a_picture(kind: str, dtype: str, tmp_path: Path) -> None:
    SAVE[kind](tmp_path)
    lm = open_picture_model(ModelConfig(path=str(tmp_path), dtype=dtype))
    reader = choose_reader(lm)
    assert reader.before > 4
    if dtype == "bfloat16":
        assert few_layers(lm.model, None) is not None


def test_a_picture_model_that_reads_its_text_in_both_directions_is_refused(tmp_path: Path) -> None:
    """As PaliGemma does with all text that stands before its answer."""
    SAVE["LLaVA"](tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    gemma = tiny_config("gemma", hidden_size=64, vocab_size=settings["text_config"]["vocab_size"])
    gemma.max_position_embeddings, gemma.pad_token_id = 512, 0
    for both in (False, True):
        gemma.use_bidirectional_attention = both
        config = transformers.LlavaConfig(**{**settings, "text_config": gemma.to_dict()})
        torch.manual_seed(0)
        transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
        if both:
            line = user_error(open_picture_model, ModelConfig(path=str(tmp_path)))
            assert "LlavaForConditionalGeneration is no causal language model" in line
            assert "use_bidirectional_attention: true" in line
        else:
            open_picture_model(ModelConfig(path=str(tmp_path)))


def test_the_table_of_settings_names_tried_architectures_alone() -> None:
    assert set(OWN) <= {*CAUSAL, *MORE_CAUSAL, *NOT_CAUSAL, "reformer"}
    assert len(CAUSAL) >= 60
