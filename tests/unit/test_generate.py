"""Draws that share a prefill and a batch are those that each prompt would have alone."""

import math
from itertools import chain

import pytest
import torch
from architectures import GPT2, LLAMA, OPT, calls_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.generation import logits_process

from pipeline.errors import UserError
from pipeline.models.load import LanguageModel, Seq2SeqModel
from pipeline.passes.budget import cache_bytes, read_shape
from pipeline.passes.generate import Prompt, Sampling, continuations, sample_tokens, whole_words
from pipeline.passes.shared import make_cache

KINDS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "opt": OPT,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 8},
}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
GREEDY = Sampling(temperature=0, max_new_tokens=24)
SHARP = Sampling(temperature=0.7, top_k=50, max_new_tokens=60)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder):
    return AutoTokenizer.from_pretrained(tiny_model_folder)


def architecture(kind: str, vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
    config = AutoConfig.for_model(kind, **{**KINDS, "bart": BART}[kind] | ids)
    return (AutoModelForCausalLM if kind in KINDS else AutoModelForSeq2SeqLM).from_config(config).eval()


def make(kind: str, tokenizer, t5_folder=None) -> LanguageModel | Seq2SeqModel:
    if kind == "t5":
        model = AutoModelForSeq2SeqLM.from_pretrained(t5_folder).eval()
    else:
        model = architecture(kind, len(tokenizer))
    opened = LanguageModel if kind in KINDS else Seq2SeqModel
    return opened(model.requires_grad_(False), tokenizer, torch.device("cpu"), 128 if kind == "bart" else None)


@pytest.fixture(scope="module")
def llama(tokenizer):
    return make("llama", tokenizer)


def prompts(draws=(0, 1), words=None, lengths=(5, 9, 9, 3, 20, 7)) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 400, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt((key,), each, draws, words) for key, each in enumerate(ids)]


def generated(lm, prompt: Prompt) -> list[int]:
    """What transformers says, of one prompt alone."""
    ids = torch.tensor([prompt.ids])
    settings = {"do_sample": False, "max_new_tokens": GREEDY.max_new_tokens, "eos_token_id": 0}
    found = lm.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    found = found[1:] if isinstance(lm, Seq2SeqModel) else found[len(prompt.ids) :]
    return found[: found.index(0)] if 0 in found else found


@pytest.mark.parametrize("kind", [*KINDS, "t5", "bart"])
def test_the_likeliest_tokens_are_those_of_transformers_one_prompt_at_a_time(kind, tokenizer, tiny_t5_folder):
    lm, asked = make(kind, tokenizer, tiny_t5_folder), prompts()
    wanted = [generated(lm, prompt) for prompt in asked]
    assert len(set(map(tuple, wanted))) > 2
    for some in (slice(None), slice(1, 3)):  # padded, and of one length
        for expected, draws in zip(wanted[some], continuations(lm, asked[some], GREEDY, 0), strict=True):
            assert [list(draw.ids) for draw in draws] == [expected, expected]
            assert draws[0].text == tokenizer.decode(expected)


def test_a_token_that_a_model_forces_at_the_start_is_read_and_not_drawn(tokenizer):
    lm = make("bart", tokenizer)
    lm.model.generation_config.forced_bos_token_id = 3
    for prompt, (draw,) in zip(prompts([0]), continuations(lm, prompts([0]), GREEDY, 0), strict=True):
        expected = generated(lm, prompt)
        assert [3, *draw.ids][: len(expected)] == expected


@pytest.mark.parametrize("top_k", [None, 5, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 1e-6])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.9])
def test_tokens_come_as_often_as_the_distribution_of_transformers_says(temperature, top_k, top_p):
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(3)) * 2
    warpers = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(temperature)])
    warpers.extend([logits_process.TopKLogitsWarper(top_k)] if top_k else [])
    warpers.append(logits_process.TopPLogitsWarper(top_p))
    expected = warpers(None, logits.clone()).softmax(1)[0]
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # each token takes its share of the line
    stated = {} if temperature == 1 else {"temperature": temperature}
    tokens = sample_tokens(logits.expand(count, -1), Sampling(**stated, top_k=top_k, top_p=top_p), uniforms)
    shares = tokens.bincount(minlength=97) / count
    assert (shares - expected).abs().max() <= 1 / count + 1e-6
    assert not shares[expected == 0].any()


def test_the_edges_of_the_random_numbers_give_tokens_that_can_come():
    logits = torch.tensor([[-math.inf, 0.0, 1.0, 2.0, -math.inf]])
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.9)):
        for uniform in (0.0, math.nextafter(1, 0)):
            token = sample_tokens(logits, sampling, torch.tensor([uniform], dtype=torch.float64)).item()
            assert token in (1, 2, 3)
    tokens = sample_tokens(torch.zeros(9, 4), Sampling(top_p=0.5), torch.linspace(0, 0.99, 9, dtype=torch.float64))
    assert len(set(tokens.tolist())) == 2, "two of four tokens have half of the probability"


def test_logits_that_are_not_numbers_give_no_token():
    logits = torch.zeros(3, 7)
    logits[0, 2], logits[2, 3] = math.nan, math.inf
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    for sampling in (Sampling(), Sampling(0), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=3, top_p=0.5)):
        tokens = sample_tokens(logits, sampling, uniforms)
        assert tokens.eq(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("kind", ["llama", "llama in bfloat16", "t5"])
def test_a_draw_is_the_same_whatever_else_is_drawn_and_another_under_another_seed(kind, tokenizer, tiny_t5_folder):
    lm, asked = make(kind.split()[0], tokenizer, tiny_t5_folder), prompts(range(6), words=5)
    if "bfloat16" in kind:
        lm.model.bfloat16()
    together = continuations(lm, asked, SHARP, 7)
    assert together == continuations(lm, asked, SHARP, 7)
    assert all(a != b for a, b in zip(together, continuations(lm, asked, SHARP, 8), strict=True))
    assert all(len({draw.ids for draw in draws}) > 3 for draws in together)
    assert all(len({draw.ids[:1] for draw in draws}) > 1 for draws in together)
    if "bfloat16" not in kind:  # whose products depend on the batch where the processor lacks it
        assert together == continuations(lm, asked, SHARP, 7, batch_tokens=1)
        alone = continuations(lm, [Prompt((3,), asked[3].ids, (5, 2), 5)], SHARP, 7)
        assert alone == [[together[3][5], together[3][2]]]
    assert continuations(lm, [], SHARP, 0) == []
    assert continuations(lm, prompts(draws=()), SHARP, 0) == [[]] * 6


@pytest.mark.parametrize("words", [1, 4])
def test_a_draw_ends_as_soon_as_its_words_are_whole(llama, words):
    whole = continuations(llama, prompts(range(4)), SHARP, 7)
    cut = continuations(llama, prompts(range(4), words=words), SHARP, 7)
    ends = set()
    for long, short in zip(chain(*whole), chain(*cut), strict=True):
        ends.add(short.end)
        assert long.ids[: len(short.ids)] == short.ids
        if short.end == "words":
            assert whole_words(short.text) == words
            assert whole_words(llama.tokenizer.decode(short.ids[:-1])) < words
            assert short.text.split()[:words] == long.text.split()[:words]
    assert "words" in ends


def test_a_draw_ends_at_eos_or_at_its_limit(llama):
    found = [draw for draws in continuations(llama, prompts(range(20)), SHARP, 7) for draw in draws]
    assert {(draw.end, len(draw.ids) < 60) for draw in found} == {("eos", True), ("tokens", False)}
    assert not any(0 in draw.ids for draw in found)
    limited = [Prompt(p.key, p.ids, p.draws, max_new_tokens=3 + p.key[0]) for p in prompts(range(3))]
    for prompt, draws in zip(limited, continuations(llama, limited, SHARP, 7), strict=True):
        assert all(len(draw.ids) == prompt.max_new_tokens or draw.end == "eos" for draw in draws)
        assert any(draw.end == "tokens" for draw in draws)


def test_a_prompt_is_read_once_and_finished_draws_leave_the_batch(llama):
    with calls_of(llama.model) as calls:
        found = continuations(llama, prompts(range(10), words=4), SHARP, 7)
    asked = [call["input_ids"].shape for call in calls]
    assert asked[0] == (6, 20)
    assert asked[1][0] > asked[-1][0]
    needed = sum(len(draw.ids) + (draw.end == "eos") - 1 for draws in found for draw in draws)
    computed = sum(rows for rows, _ in asked[1:])
    assert needed <= computed <= needed / 0.75 + 60  # a quarter of a batch may be done, and the last few rows


@pytest.mark.parametrize(("limit", "rows", "batches"), [(4 * (9 + 2), 4, 4), (1, 2, 6)])
def test_a_limit_holds_the_batch_and_one_prompt_is_the_least(llama, limit, rows, batches):
    with calls_of(llama.model) as calls:
        continuations(llama, prompts((0, 1)), Sampling(0, max_new_tokens=2), 7, batch_tokens=limit)
    assert max(len(call["input_ids"]) for call in calls) == rows
    assert len(calls) == 2 * batches  # of 3+5, 7+9, 9, 20 tokens; two forward passes each


def test_what_cannot_be_done_is_said_in_one_line(llama, tokenizer):
    small = LanguageModel(llama.model, tokenizer, llama.device, 20)
    with pytest.raises(UserError, match="20 tokens leaves no room in a model of 20 positions"):
        continuations(small, prompts(), SHARP, 0)
    for length, drawn in ((n, continuations(small, prompts(lengths=(n,)), SHARP, 0)[0]) for n in (9, 19)):
        assert all(len(draw.ids) <= 20 - length for draw in drawn)
    bart = make("bart", tokenizer)
    assert len(continuations(bart, prompts(lengths=(128,)), GREEDY, 0)[0]) == 2
    with pytest.raises(UserError, match="129 tokens leaves no room in a model of 128 positions"):
        continuations(bart, prompts(lengths=(129,)), GREEDY, 0)
    with pytest.raises(UserError, match="has no token"):
        continuations(llama, [Prompt((0,), [], [0])], SHARP, 0)
    settings = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **settings))
    with pytest.raises(UserError, match="takes no past_key_values"):
        continuations(LanguageModel(mamba, tokenizer, llama.device, None), prompts(), SHARP, 0)
    limits = {"temperature": (-1, math.nan, math.inf), "top_k": (0,), "top_p": (0, 1.1), "max_new_tokens": (0,)}
    for name, bad in ((name, value) for name, values in limits.items() for value in values):
        with pytest.raises(UserError, match=f"{name} must be"):
            Sampling(**{name: bad})
    assert continuations(llama, prompts((), lengths=(1,)), Sampling(top_k=1), 0) == [[]]


@pytest.mark.parametrize(("text", "words"), [("", 0), (" a", 0), ("a b", 1), ("a b ", 2), (" \n", 0), ("a\n\nb c", 2)])
def test_a_word_is_whole_when_whitespace_is_behind_it(text, words):
    assert whole_words(text) == words


def test_the_room_of_a_batch_is_what_its_budget_counts_and_is_written_in_place() -> None:
    model = architecture("llama", 60)
    cache = make_cache(model, 5 + 4)
    with torch.inference_mode():
        model(input_ids=torch.ones(2, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([0, 0, 1]))
        places = set()
        for _ in range(4):
            model(input_ids=torch.ones(3, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
            places.add(cache.layers[-1].keys.data_ptr())
    assert len(places) == 1, "the room is taken when rows are chosen, and kept"
    room = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    assert room == 3 * (5 + 4) * cache_bytes(read_shape(model.config, "float32"))
