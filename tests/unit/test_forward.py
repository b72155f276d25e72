"""Token statistics are those of float64 brute force, whatever the batch and the model."""

import math
from typing import Any

import pytest
import torch
import transformers
from architectures import GPT2, LLAMA, OPT, VOCABULARY, HalvedLogits, documents, found_of, plain_statistics

from pipeline.models.load import LanguageModel
from pipeline.models.opened import Tail
from pipeline.passes import forward as module
from pipeline.passes.forward import STATISTICS, forward, from_log_probs

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "gpt2": ("GPT2", GPT2),
    "opt": ("OPT", {**OPT, "word_embed_proj_dim": 24}),
    "gemma2": ("Gemma2", {**LLAMA, "head_dim": 8, "final_logit_softcapping": 3.0}),
    "cohere": ("Cohere", {**LLAMA, "logit_scale": 0.25}),
    "granite": ("Granite", {**LLAMA, "logits_scaling": 4.0}),
}
UNKNOWN = "of unknown tail"


def make(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    if kind == UNKNOWN:
        model = HalvedLogits(transformers.LlamaConfig(**LLAMA))
    else:
        name, settings = KINDS[kind]
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**settings))
    return LanguageModel(model.eval().requires_grad_(False), None, torch.device("cpu"), None)


def brute_force(lm: LanguageModel, ids: list[int]) -> dict[str, torch.Tensor]:
    return plain_statistics(lm.model(input_ids=torch.tensor([ids])).logits[0, :-1], ids[1:])


@pytest.mark.parametrize("kind", [*KINDS, UNKNOWN])
def test_every_statistic_is_that_of_float64_brute_force(kind):
    lm, ids = make(kind), documents()
    statistics = forward(lm, ids, STATISTICS)
    for row, document in enumerate(ids):
        for name, expected in brute_force(lm, document).items():
            found = found_of(statistics, name)[row, : len(document) - 1].double()
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_known_models_go_by_their_hidden_states_and_unknown_tails_do_not(kind):
    with torch.inference_mode():
        assert module.find_tail(make(kind).model) is not None
        assert module.find_tail(make(UNKNOWN).model) is None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", UNKNOWN])
def test_the_batch_changes_nothing(kind):
    lm, ids = make(kind), documents()
    together = forward(lm, ids, STATISTICS)
    for row, document in enumerate(ids):
        alone = forward(lm, [document], STATISTICS)
        for name in STATISTICS:
            here = found_of(together, name)[row]
            torch.testing.assert_close(here[: len(document) - 1], found_of(alone, name)[0], rtol=1e-4, atol=1e-5)
            assert (here[len(document) - 1 :] == 0).all()


@pytest.mark.parametrize("kind", ["llama", UNKNOWN])
def test_chunks_and_tiles_change_nothing(kind, monkeypatch):
    lm, ids = make(kind), documents()
    whole = forward(lm, ids, STATISTICS)
    monkeypatch.setattr(module, "HEAD_ELEMENTS", {"cpu": 11 * VOCABULARY, "cuda": 0})
    monkeypatch.setattr(module, "TILE_ELEMENTS", {"cpu": 3 * VOCABULARY, "cuda": 0})
    tail = Tail(torch.nn.Identity(), torch.nn.Linear(8, VOCABULARY).requires_grad_(False), 1.0, None)
    for rows, chunks in ((25, [9, 8, 8]), (11, [11])):
        assert [len(some) for some, _ in module.logits_of_rows(lm.model, tail, torch.ones(rows, 8))] == chunks
    pieces = forward(lm, ids, STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(found_of(pieces, name), found_of(whole, name), rtol=1e-4, atol=1e-5)


def test_a_row_without_a_token_is_measured_at_its_likeliest_and_no_other_is():
    logits, targets = torch.eye(3), torch.tensor([-1, 0, -1])
    swept = module.sweep_rows([(logits[:2], None), (logits[2:], None)], targets, frozenset({module.OWN_BEST, "token"}))
    assert swept["token"].tolist() == [0, 0, 2]


def test_a_head_that_a_hook_changes_is_called():
    lm, ids = make("llama"), documents((9,))
    head: Any = lm.model.lm_head
    plain, head._hf_hook = head.forward, "as accelerate sets it"
    head.forward = lambda rows: plain(rows) / 4
    expected = brute_force(lm, ids[0])["log_prob"].float()
    torch.testing.assert_close(forward(lm, ids, STATISTICS).log_prob[0], expected, rtol=2e-4, atol=2e-5)


def test_the_mask_comes_from_lengths_even_where_tokens_equal_the_padding():
    statistics = forward(make("llama"), [[0, 0, 0, 0], [5, 0]], frozenset({"log_prob"}))
    assert statistics.mask.tolist() == [[True, True, True], [True, False, False]]
    assert (statistics.log_prob[0] < 0).all()
    assert forward(make("llama"), [[3], [4]], STATISTICS).log_prob.shape == (2, 0)
    both, alone = (forward(make("llama"), ids, STATISTICS) for ids in ([[3], [4, 5]], [[4, 5]]))
    assert both.mask.tolist() == [[False], [True]]
    torch.testing.assert_close(both.log_prob[1:], alone.log_prob)


def test_what_is_not_asked_for_is_not_there_and_changes_nothing():
    lm, together = make("llama"), forward(make("llama"), documents(), STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(found_of(forward(lm, documents(), {name}), name), found_of(together, name))
    statistics = forward(make("llama"), documents(), frozenset({"log_prob", "renyi_2"}))
    assert statistics.mean is statistics.variance is statistics.m_entropy is None
    assert set(statistics.renyi) == {"2"}
    with pytest.raises(ValueError, match="unknown statistics"):
        forward(make("llama"), documents(), frozenset({"renyi_3"}))


def test_bfloat16_weights_give_float32_statistics_near_those_of_float32():
    lm, ids = make("llama"), documents()
    exact = forward(lm, ids, frozenset({"log_prob"}))
    rounded = forward(LanguageModel(lm.model.bfloat16(), None, lm.device, None), ids, STATISTICS)
    assert rounded.log_prob.dtype == rounded.variance.dtype == torch.float32
    assert (rounded.log_prob - exact.log_prob).abs().mean() < 0.1


def test_certainty_overflows_nowhere():
    logits = torch.full((3, VOCABULARY), -25.0)
    logits[:, 7] = 25.0
    logits[1:, 8] = -math.inf  # a vocabulary masked by the model
    found = module._sweep(logits, torch.tensor([7, 7, 9]), STATISTICS)
    assert all(values.isfinite().all() for values in found.values())
    torch.testing.assert_close(found["m_entropy"][2].item(), 50.0 + 50.0 - math.log(95), rtol=1e-4, atol=0)
    assert (found["variance"] < 1e-12).all()
    assert all((found[f"renyi_{order}"] < 1e-6).all() for order in ("0.5", "1", "2", "inf"))


def test_a_model_that_yields_nan_gives_nan_and_no_exception():
    lm = make("llama")
    lm.model.lm_head.weight[5] = math.nan
    statistics = forward(lm, documents(), STATISTICS)
    assert all(found_of(statistics, name)[statistics.mask].isnan().all() for name in STATISTICS)


def test_given_log_probabilities_of_unequal_length_are_padded_and_masked() -> None:
    statistics = from_log_probs([[-1.0, -2.0, -3.0], [-4.0]])
    assert statistics.mask.tolist() == [[True, True, True], [True, False, False]]
    assert statistics.log_prob.tolist() == [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
