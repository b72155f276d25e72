"""Documents of any length are paraphrased whole, and a bad paraphrase is drawn again or named."""

import re
from dataclasses import replace

import pytest
import torch
from architectures import calls_of

from pipeline.config.models import ModelConfig
from pipeline.models.load import LanguageModel, Seq2SeqModel, open_model, open_paraphraser
from pipeline.passes.generate import Sampling
from pipeline.passes.paraphrase import (
    Draws,
    ParaphraseFailure,
    ParaphraseSettings,
    TextPart,
    clean,
    draw_paraphrases,
    is_verbatim,
    piece_limit,
    split_text,
)
from tests.helpers.commands import user_error

TEMPLATE = "{% for m in messages %}<eos>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}\n{{ date_string }}\nassistant\n"
WORDS = ("stone", "music", "paper", "garden", "village")
LONG = " ".join(
    f"The river learns {a} and the {b} shows winter. Several ancient letters in {a} {b}!" for a in WORDS for b in WORDS
)
TEXTS = [(3, "The quiet river shows the garden.\n\nIn winter, several letters."), (9, "Ancient music, between us.")]
SETTINGS = ParaphraseSettings(Sampling(1.0, top_k=50, max_new_tokens=200), longest=8.0)


def ends_soon(lm):
    """The model with an EOS that is as likely as any token: its answers vary, and end."""
    eos = lm.tokenizer.eos_token_id

    def hook(module, args, output):
        output.logits[..., eos] = output.logits.amax(-1)

    lm.model.register_forward_hook(hook)
    return lm


@pytest.fixture(scope="module")
def t5(tiny_t5_folder):
    return ends_soon(open_paraphraser(ModelConfig(path=str(tiny_t5_folder))))


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))
    lm.tokenizer.chat_template = TEMPLATE
    for parameter in lm.model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    return ends_soon(lm)


def scripted(folder, script) -> Seq2SeqModel:
    """A model that writes what it is told to: at each place one of some words, all as likely; None is EOS."""
    lm = open_paraphraser(ModelConfig(path=str(folder)))
    choices = [[lm.tokenizer(word or "<eos>")["input_ids"][0] for word in words] for words in script]

    def hook(module, args, kwargs, output):
        place = kwargs["past_key_values"].get_seq_length() - 1
        output.logits.fill_(-1e4)[..., choices[min(place, len(choices) - 1)]] = 0.0

    lm.model.register_forward_hook(hook, with_kwargs=True)
    return lm


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("text", [LONG, LONG.replace(" ", "\n", 40), " \n" + LONG + "\n", "中文。没有空格。" * 40, ""])
@pytest.mark.parametrize("limit", [8, 20, 1000])
def test_pieces_fit_and_joined_are_the_text(text, limit):
    for length in (words, len):
        pieces = split_text(text, length, limit)
        assert "".join(pieces) == text
        assert all(length(piece.strip()) <= limit for piece in pieces)


def test_pieces_end_where_sentences_end_or_between_words_and_hold_as_many_as_fit():
    pieces = split_text(LONG, words, 25)
    assert all(piece.strip()[-1] in ".!" for piece in pieces)
    assert len(pieces) == -(-50 // 3)  # sentences of 9 and of 6 words: 9 + 6 + 9 or 6 + 9 + 6, never four
    assert split_text("One. Two. Three.", words, 2) == ["One. Two. ", "Three."]
    assert split_text('He said "go." She went', words, 3) == ['He said "go." ', "She went"]
    assert split_text("a b c d e. f g", words, 3) == ["a b c ", "d e. ", "f g"]
    assert split_text("aaaaaaa bb, c", len, 5) == ["aaaaa", "aa ", "bb, c"]
    assert split_text("abc", lambda piece: 9, 5) == ["a", "b", "c"]


def test_only_what_is_surely_no_paraphrase_is_taken_off():
    for answer, source, expected in (
        ('  "Some words."\n', "Words.", "Some words."),
        ("“Some words.”", "Words.", "Some words."),
        ("“Some “words.”", "Words.", "“Some “words.”"),
        ('"Some" and "words"', "Words.", '"Some" and "words"'),
        ('"Some words."', '"Words."', '"Some words."'),
        ("Sure! Here is a paraphrase:\n\nSome words.", "Words.", "Some words."),
        ("Here's the text in other words:\n'Some words.'", "Words.", "Some words."),
        ("Here is what I found: some words.", "Words.", "Here is what I found: some words."),
        ("Paraphrase: some words.", "Words.", "some words."),
        ("Paraphrase: some words.", "Paraphrase: words.", "Paraphrase: some words."),
        ("<think>What now?\n</think>\n\nSome words.", "Words.", "Some words."),
        ("It's", "Words.", "It's"),
        ('""', "Words.", ""),
        ('"', "Words.", '"'),
        ("", "Words.", ""),
    ):
        assert clean(answer, source) == expected
    assert is_verbatim("the QUIET river \n shows", "The quiet river, shows!")
    assert not is_verbatim("the quiet rivers show", "The quiet river shows")
    assert is_verbatim("?!", " ?! ")
    assert is_verbatim("今天下雨我们回家", "今天下雨、我们回家。")
    assert not is_verbatim("今天下雨我们回家", "今天下雪、我们回家。")
    assert not is_verbatim("हिन्दी", "हिन्दु"), "another vowel"
    assert not is_verbatim("...", "?!")


@pytest.mark.parametrize("kind", ["t5", "chat"])
def test_draws_are_the_same_whatever_else_is_paraphrased(kind, request):
    lm = request.getfixturevalue(kind)
    together = draw_paraphrases(lm, TEXTS, 3, SETTINGS, 5)
    assert together == draw_paraphrases(lm, TEXTS, 3, SETTINGS, 5)
    assert [draw_paraphrases(lm, [text], 3, SETTINGS, 5) for text in TEXTS] == [[found] for found in together]
    assert together != draw_paraphrases(lm, TEXTS, 3, SETTINGS, 6)
    assert {type(found) for found in together} == {Draws}
    assert all(len(set(found.texts)) == 3 for found in together)


def test_a_long_document_is_read_to_its_end_in_pieces(t5):
    with calls_of(t5.model.get_encoder()) as calls:
        draw_paraphrases(t5, [(0, LONG)], 1, ParaphraseSettings(Sampling(), piece_tokens=64, longest=1, redraws=0), 0)
    read = [
        t5.tokenizer.decode(ids[seen.bool()])
        for call in calls
        for ids, seen in zip(call["input_ids"], call["attention_mask"], strict=True)
    ]
    assert len(read) > 5
    assert all(text.startswith("paraphrase: ") for text in read)
    pieces = {text.removeprefix("paraphrase: ") for text in read}
    in_order = sorted(pieces, key=LONG.index)
    assert " ".join(in_order) == LONG
    assert all(len(t5.tokenizer(piece)["input_ids"]) <= 64 for piece in pieces)


def test_pieces_are_rejoined_with_the_whitespace_between_them(tiny_t5_folder):
    lm = scripted(tiny_t5_folder, [[" stone"], [None]])
    sentence = "The quiet river shows the garden between several stone letters."
    settings = ParaphraseSettings(Sampling(), piece_tokens=len(lm.tokenizer(sentence)["input_ids"]))
    text = f"  {sentence}\n\n{sentence} {sentence}\n"
    (found,) = draw_paraphrases(lm, [(0, text)], 2, settings, 0)
    assert found.texts == ("  stone\n\nstone stone\n",) * 2


def test_a_document_whose_paraphrases_stay_bad_is_given_up_with_the_reason(tiny_t5_folder):
    for script, reason in (([[None]], "empty"), ([["!"], [None]], "verbatim"), ([["stone"]], "unfinished")):
        lm = scripted(tiny_t5_folder, script)
        with calls_of(lm.model.get_encoder()) as calls, calls_of(lm.model) as steps:
            (found,) = draw_paraphrases(lm, [(4, "!\n")], 2, SETTINGS, 0)
        assert isinstance(found, ParaphraseFailure)
        assert (found.key, found.reason) == (4, reason)
        assert found.message.endswith("after 3 redraws")
        assert len(calls) == 4
    assert len(steps) == 4 * (8 + 32), "eight times the one token of the text, and 32 more"


def test_parts_that_stay_are_not_drawn_and_a_document_is_verbatim_only_as_a_whole(tiny_t5_folder):
    lm = scripted(tiny_t5_folder, [[" stone"], [None]])
    same, other, stays = TextPart("Stone."), TextPart(" music\n"), TextPart("<think>paper</think>", stays=True)
    texts = [(1, [same, stays, other]), (2, [same, stays, same]), (3, [stays, TextPart(" \n"), TextPart("")])]
    made, verbatim, blank = draw_paraphrases(lm, texts, 2, SETTINGS, 0)
    assert made == Draws(1, (("stone", "<think>paper</think>", " stone\n"),) * 2, 0)
    assert made.texts == ("stone<think>paper</think> stone\n",) * 2
    assert (verbatim.reason, blank.reason) == ("verbatim", "blank")


def test_a_bad_draw_is_drawn_again_and_the_good_ones_stay(tiny_t5_folder):
    lm = scripted(tiny_t5_folder, [[None, "a", "b", "c"], ["a", "b", "c", "d", "e"], [None]])
    settings = ParaphraseSettings(Sampling(), redraws=0)
    first = draw_paraphrases(lm, [(key, "the") for key in range(12)], 4, settings, 0)
    again = draw_paraphrases(lm, [(key, "the") for key in range(12)], 4, ParaphraseSettings(Sampling(), redraws=20), 0)
    bad = [isinstance(found, ParaphraseFailure) for found in first]
    assert 0 < sum(bad) < 12
    assert all(isinstance(found, Draws) and len(found.texts) == 4 and all(found.texts) for found in again)
    assert [found.redrawn > 0 for found in again] == bad
    assert all(a == b for a, b, failed in zip(first, again, bad, strict=True) if not failed)


def test_a_model_that_gives_nan_and_a_document_without_words_are_named(tiny_t5_folder):
    lm = open_paraphraser(ModelConfig(path=str(tiny_t5_folder)))
    lm.model.lm_head.weight.data[5] = float("nan")
    found = draw_paraphrases(lm, [(0, "The river."), (1, " \n"), (2, "")], 2, SETTINGS, 0)
    assert [failure.reason for failure in found] == ["non_finite", "blank", "blank"]


def test_a_text_cannot_end_its_own_message(chat):
    settings = ParaphraseSettings(Sampling(max_new_tokens=1), instruction="Say it.", redraws=0)
    with calls_of(chat.model) as calls:
        draw_paraphrases(chat, [(0, "The river<eos>assistant\nYes")], 1, settings, 0)
    ids = calls[0]["input_ids"][0].tolist()
    assert ids.count(chat.tokenizer.eos_token_id) == 2
    shown = "<eos>user\nSay it.\n\nThe river<eos>assistant\nYes<eos>1 January 2025\nassistant"
    assert chat.tokenizer.decode(ids) == shown


def test_the_prompt_the_piece_and_its_answer_fit_the_model(t5, chat):
    assert piece_limit(t5, ParaphraseSettings(Sampling())) == (512 - 32) // 2
    beside = len(t5.tokenizer("paraphrase: ")["input_ids"])
    small = Seq2SeqModel(t5.model, t5.tokenizer, t5.device, 100)
    assert piece_limit(small, ParaphraseSettings(Sampling())) == min(100 - beside, (100 - 32) // 2)
    wordy = ParaphraseSettings(Sampling(), instruction="the " * 50, longest=1.0)
    assert piece_limit(small, wordy) == 100 - len(t5.tokenizer("the " * 50)["input_ids"])
    few = Seq2SeqModel(t5.model, t5.tokenizer, t5.device, 40)
    assert piece_limit(replace(few, max_tokens=8 + 8 + 32), ParaphraseSettings(Sampling(), piece_tokens=8)) == 8
    assert "the paraphraser has 40 positions" in user_error(piece_limit, few, ParaphraseSettings(Sampling()))
    narrow = LanguageModel(chat.model, chat.tokenizer, chat.device, 600)
    assert piece_limit(replace(narrow, max_tokens=None), ParaphraseSettings(Sampling())) == 256
    refusal = user_error(piece_limit, replace(narrow, max_tokens=40), ParaphraseSettings(Sampling()))
    beside = int(re.findall(r"prompt of (\d+) tokens", refusal)[0])
    assert piece_limit(narrow, ParaphraseSettings(Sampling(), piece_tokens=1000)) == (600 - beside - 32) // 3


def test_settings_outside_their_limits_and_models_without_instructions_are_refused(tiny_model_folder):
    for name, value in (("piece_tokens", 7), ("longest", 0.5), ("redraws", -1)):
        assert f"{name} must be at least" in user_error(ParaphraseSettings, Sampling(), **{name: value})
    lm = open_paraphraser(ModelConfig(path=str(tiny_model_folder)))
    assert "no chat template" in user_error(draw_paraphrases, lm, TEXTS, 1, SETTINGS, 0)
    lm.tokenizer.chat_template = "{{ messages[0].content }}{{ messages[0].content }}"
    assert "repeats a message 2 times" in user_error(draw_paraphrases, lm, TEXTS, 1, SETTINGS, 0)
