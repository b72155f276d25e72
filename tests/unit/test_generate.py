"""Draws that share a prefill and a batch are those that each prompt would have alone."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.errors import UserError
from pipeline.models.load import LanguageModel, Seq2SeqModel
from pipeline.passes.budget import cache_bytes, shape_of
from pipeline.passes.generate import Prompt, Sampling, continuations, sample_tokens, whole_words
from pipeline.passes.shared import cache_of

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "initializer_range": 0.4,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.4}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
    "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 3, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
MAKERS = {
    "llama": lambda v: LlamaForCausalLM(LlamaConfig(vocab_size=v, **SIZES, **IDS)),
    "gpt2": lambda v: GPT2LMHeadModel(GPT2Config(vocab_size=v, **GPT2, **IDS)),
    "opt": lambda v: OPTForCausalLM(OPTConfig(vocab_size=v, **OPT, init_std=0.4, max_position_embeddings=128, **IDS)),
    "bloom": lambda v: BloomForCausalLM(BloomConfig(vocab_size=v, hidden_size=32, n_layer=2, n_head=4, **IDS)),
    "gemma2": lambda v: Gemma2ForCausalLM(Gemma2Config(vocab_size=v, **SIZES, head_dim=8, sliding_window=8, **IDS)),
}
GREEDY = Sampling(temperature=0, max_new_tokens=24)
SHARP = Sampling(temperature=0.7, top_k=50, max_new_tokens=60)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder):
    return AutoTokenizer.from_pretrained(tiny_model_folder)


def make(kind: str, tokenizer) -> LanguageModel:
    torch.manual_seed(0)
    model = MAKERS[kind](len(tokenizer)).eval().requires_grad_(False)
    return LanguageModel(model, tokenizer, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def llama(tokenizer):
    return make("llama", tokenizer)


@pytest.fixture(scope="module")
def t5(tiny_t5_folder, tokenizer):
    model = T5ForConditionalGeneration.from_pretrained(tiny_t5_folder).eval()
    return Seq2SeqModel(model, tokenizer, torch.device("cpu"), None)


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


@pytest.mark.parametrize("kind", MAKERS)
def test_the_likeliest_tokens_are_those_of_transformers_one_prompt_at_a_time(kind, tokenizer):
    lm, asked = make(kind, tokenizer), prompts()
    wanted = [generated(lm, prompt) for prompt in asked]
    assert len(set(map(tuple, wanted))) > 4
    for some in (slice(None), slice(1, 3)):  # padded, and of one length
        for expected, draws in zip(wanted[some], continuations(lm, asked[some], GREEDY, 0), strict=True):
            assert [list(draw.ids) for draw in draws] == [expected, expected]
            assert draws[0].text == tokenizer.decode(expected)


def test_so_are_those_of_encoder_decoder_models(t5, tokenizer):
    torch.manual_seed(0)
    bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **BART))
    for lm in (t5, Seq2SeqModel(bart.eval(), tokenizer, torch.device("cpu"), 128)):
        wanted = [generated(lm, prompt) for prompt in prompts()]
        assert len(set(map(tuple, wanted))) > 2
        for expected, draws in zip(wanted, continuations(lm, prompts(), GREEDY, 0), strict=True):
            assert [list(draw.ids) for draw in draws] == [expected, expected]


def test_a_token_that_a_model_forces_at_the_start_is_read_and_not_drawn(tokenizer):
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **BART))
    model.generation_config.forced_bos_token_id = 3
    lm = Seq2SeqModel(model.eval(), tokenizer, torch.device("cpu"), 128)
    for prompt, (draw,) in zip(prompts([0]), continuations(lm, prompts([0]), GREEDY, 0), strict=True):
        expected = generated(lm, prompt)
        assert [3, *draw.ids][: len(expected)] == expected


@pytest.mark.parametrize("top_k", [None, 5, 200])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 1e-6])
@pytest.mark.parametrize("temperature", [0.5, 1.9])
def test_tokens_come_as_often_as_the_distribution_of_transformers_says(temperature, top_k, top_p):
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(3)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers.extend([TopKLogitsWarper(top_k)] if top_k else [])
    warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits.clone()).softmax(1)[0]
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # each token takes its share of the line
    tokens = sample_tokens(logits.expand(count, -1), Sampling(temperature, top_k, top_p), uniforms)
    shares = tokens.bincount(minlength=97) / count
    assert (shares - expected).abs().max() <= 1 / count + 1e-6
    assert not shares[expected == 0].any()


def test_the_edges_of_the_random_numbers_give_tokens_that_can_come():
    logits = torch.tensor([[-math.inf, 0.0, 1.0, 2.0, -math.inf]])
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.9)):
        for uniform in (0.0, math.nextafter(1, 0)):
            token = sample_tokens(logits, sampling, torch.tensor([uniform], dtype=torch.float64)).item()
            assert token in (1, 2, 3)


def test_logits_that_are_not_numbers_give_no_token():
    logits = torch.zeros(3, 7)
    logits[0, 2], logits[2, 3] = math.nan, math.inf
    uniforms = torch.full((3,), 0.5, dtype=torch.float64)
    for sampling in (Sampling(), Sampling(0), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=3, top_p=0.5)):
        tokens = sample_tokens(logits, sampling, uniforms)
        assert tokens.ge(0).tolist() == [False, True, False]


def test_a_model_that_gives_nan_ends_its_draws_and_raises_nothing(tokenizer):
    lm = make("llama", tokenizer)
    lm.model.lm_head.weight[5] = math.nan
    assert {draw.end for draws in continuations(lm, prompts(), SHARP, 0) for draw in draws} == {"non_finite"}


def test_the_same_call_gives_the_same_draws_and_another_seed_others(llama):
    first = continuations(llama, prompts(range(4)), SHARP, 7)
    assert first == continuations(llama, prompts(range(4)), SHARP, 7)
    other = continuations(llama, prompts(range(4)), SHARP, 8)
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert all(len({draw.ids for draw in draws}) == 4 for draws in first)


def test_a_draw_is_the_same_whatever_else_is_drawn(llama, t5):
    for lm in (llama, t5):
        asked = prompts(range(6), words=5)
        together = continuations(lm, asked, SHARP, 7)
        assert together == continuations(lm, asked, SHARP, 7, batch_tokens=1)
        alone = continuations(lm, [asked[3]], SHARP, 7)
        assert alone == [together[3]]
        some = continuations(lm, [Prompt((3,), asked[3].ids, (5, 2), 5)], SHARP, 7)
        assert some == [[together[3][5], together[3][2]]]


def test_a_draw_ends_as_soon_as_its_words_are_whole(llama):
    whole = continuations(llama, prompts(range(4)), SHARP, 7)
    cut = continuations(llama, prompts(range(4), words=4), SHARP, 7)
    ends = set()
    for long, short in zip(chain(*whole), chain(*cut), strict=True):
        ends.add(short.end)
        assert long.ids[: len(short.ids)] == short.ids
        if short.end == "words":
            assert whole_words(short.text) == 4
            assert whole_words(llama.tokenizer.decode(short.ids[:-1])) < 4
            assert short.text.split()[:4] == long.text.split()[:4]
    assert "words" in ends


def test_words_are_counted_next_when_as_many_tokens_as_words_were_missing_have_come(llama):
    counted: list[tuple[int, int]] = []

    class Counting:
        def __getattr__(self, name):
            return getattr(llama.tokenizer, name)

        def decode(self, ids, **settings):
            text = llama.tokenizer.decode(ids, **settings)
            counted.append((len(ids), whole_words(text)))
            return text

    lm, gaps = LanguageModel(llama.model, Counting(), llama.device, None), []
    for prompt in prompts((0,), words=4):
        counted.clear()
        continuations(lm, [prompt], SHARP, 7)
        assert counted[0][0] == 5, "four words are whole after five tokens at the earliest"
        steps = pairwise([one for one in counted if one[0] < counted[-1][0]])
        gaps += [(after[0] - before[0], 4 - before[1]) for before, after in steps]
    assert gaps
    assert all(gap == missing for gap, missing in gaps)


def test_a_draw_ends_at_eos_or_at_its_limit(llama):
    found = [draw for draws in continuations(llama, prompts(range(20)), SHARP, 7) for draw in draws]
    assert {(draw.end, len(draw.ids) < 60) for draw in found} == {("eos", True), ("tokens", False)}
    assert not any(0 in draw.ids for draw in found)
    limited = [Prompt(p.key, p.ids, p.draws, max_new_tokens=3 + p.key[0]) for p in prompts(range(3))]
    for prompt, draws in zip(limited, continuations(llama, limited, SHARP, 7), strict=True):
        assert all(len(draw.ids) == prompt.max_new_tokens or draw.end == "eos" for draw in draws)
        assert any(draw.end == "tokens" for draw in draws)


def test_a_prompt_is_read_once_and_finished_draws_leave_the_batch(llama):
    asked: list[torch.Size] = []
    hook = llama.model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        found = continuations(llama, prompts(range(10), words=4), SHARP, 7)
    finally:
        hook.remove()
    assert asked[0] == (6, 20)
    assert asked[1][0] > asked[-1][0]
    needed = sum(len(draw.ids) + (draw.end == "eos") - 1 for draws in found for draw in draws)
    computed = sum(rows for rows, _ in asked[1:])
    assert needed <= computed <= needed / 0.75 + 60  # a quarter of a batch may be done, and the last few rows


def test_a_limit_holds_the_batch_and_one_prompt_is_the_least(llama):
    rows: list[int] = []
    hook = llama.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    try:
        continuations(llama, prompts((0, 1)), Sampling(0, max_new_tokens=2), 7, batch_tokens=4 * (9 + 2))
    finally:
        hook.remove()
    assert max(rows) == 4
    assert len(rows) == 2 * 4  # 3+5, 7+9, 9, 20 tokens; two forward passes each


def test_bfloat16_models_are_drawn_from_in_float32(tokenizer):
    lm = make("llama", tokenizer)
    lm.model.bfloat16()
    found = continuations(lm, prompts(), SHARP, 7)
    assert found == continuations(lm, prompts(), SHARP, 7)


def test_what_cannot_be_done_is_said_in_one_line(llama, tokenizer):
    small = LanguageModel(llama.model, tokenizer, llama.device, 20)
    with pytest.raises(UserError, match="20 tokens leaves no room in a model of 20 positions"):
        continuations(small, prompts(), SHARP, 0)
    assert all(len(draw.ids) <= 11 for draw in continuations(small, prompts()[1:2], SHARP, 0)[0])
    with pytest.raises(UserError, match="has no token"):
        continuations(llama, [Prompt((0,), [], [0])], SHARP, 0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(UserError, match="takes no past_key_values"):
        continuations(LanguageModel(mamba, tokenizer, llama.device, None), prompts(), SHARP, 0)
    for bad in ({"temperature": -1}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0}, {"max_new_tokens": 0}):
        with pytest.raises(UserError, match=f"{next(iter(bad))} must be"):
            Sampling(**bad)


def test_nothing_asked_for_is_nothing_drawn(llama):
    assert continuations(llama, [], SHARP, 0) == []
    assert continuations(llama, prompts(draws=()), SHARP, 0) == [[]] * 6


@pytest.mark.parametrize(("text", "words"), [("", 0), (" a", 0), ("a b", 1), ("a b ", 2), (" \n", 0), ("a\n\nb c", 2)])
def test_a_word_is_whole_when_whitespace_is_behind_it(text, words):
    assert whole_words(text) == words


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_keys_and_values_are_written_in_place_and_the_numbers_are_those_of_copies(kind: str) -> None:
    torch.manual_seed(0)
    model = MAKERS[kind](60).eval()
    prompts, steps = torch.randint(1, 60, (2, 5)), torch.randint(1, 60, (6, 4))
    chosen = {0: torch.tensor([0, 0, 1, 1, 1, 0]), 3: torch.tensor([1, 2, 5])}
    caches = cache_of(model, 5 + 4), DynamicCache(config=model.config)
    places: list[set[int]] = []
    with torch.inference_mode():
        for cache in caches:
            model(input_ids=prompts, past_key_values=cache, use_cache=True)
        for step in range(4):
            if step in chosen:
                steps = steps[: len(chosen[step])]
                for cache in caches:
                    cache.reorder_cache(chosen[step])
                places.append(set())
            ours, theirs = (
                model(input_ids=steps[:, step, None], past_key_values=cache, use_cache=True).logits for cache in caches
            )
            assert torch.equal(ours, theirs)
            places[-1].add(caches[0].layers[-1].keys.data_ptr())
    if kind != "gemma2":  # whose last layer looks at a window
        assert [len(place) for place in places] == [1, 1], "the room is taken when rows are chosen, and kept"


def test_the_room_of_a_batch_is_what_its_budget_counts() -> None:
    model = MAKERS["llama"](60).eval()
    cache = cache_of(model, 5 + 4)
    with torch.inference_mode():
        model(input_ids=torch.ones(2, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([0, 0, 1]))
    room = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    assert room == 3 * (5 + 4) * cache_bytes(shape_of(model.config, "float32"))
