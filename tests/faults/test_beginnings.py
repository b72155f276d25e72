"""Only the beginning of a long text is tokenised, and its kept tokens and text are those of the whole text."""

import random
import time
from functools import cache

import pytest
from bounded_memory import run_within
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.small_model import WORDS
from pipeline.models import tokens
from pipeline.models.load import LanguageModel
from pipeline.models.tokens import Vocabulary, describe_vocabulary, first_length, tokenize

WORDS_AND_SIGNS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
CL100K = WORDS_AND_SIGNS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"


def corpus() -> list[str]:
    rng = random.Random(1)
    return [" ".join(rng.choices([*WORDS, "12", "345", "x=1;", "\n", "   ", "été"], k=30)) for _ in range(200)]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers of the makes that language models have, trained on made-up words."""
    if kind == "unigram":  # T5, XLNet
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "</s>"])
    elif kind == "wordpiece":  # BERT
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"])
    elif kind in ("llama2", "across words"):  # SentencePiece's byte-pair encoding of the text as one word
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"])
        if kind == "llama2":  # is trained on words, and used without splitting
            tokenizer.normalizer = None
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:  # GPT-2, Llama 3, Qwen: byte-level
        tokenizer = Tokenizer(models.BPE())
        if kind == "gpt2":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            rule = CL100K if kind == "llama3" else DIGITS_FROM_THE_RIGHT
            parts = [pre_tokenizers.Split(Regex(rule), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator([*corpus(), *["77 777"] * 99], trainer)
    if kind == "llama2":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind in ("unigram", "llama2"):  # adds tokens of its own at both ends
        ends = [("</s>", tokenizer.token_to_id("</s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


KINDS = ["gpt2", "llama3", "llama2", "unigram", "wordpiece", "across words", "digits from the right"]

SIGNS = [" ", "  ", "\n", "\t \n", "1", "23", "4567", "a", "é", "e\u0301", "中文", "🙂", ".", "...", "<unk>", "</s>"]
PIECES = st.lists(st.sampled_from([*WORDS[:6], *SIGNS]), min_size=1, max_size=12)
TEXTS = st.builds(
    lambda part, times, gap: gap.join(part * times), PIECES, st.integers(1, 40), st.sampled_from(["", " "])
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), max_tokens=st.integers(1, 12))
def test_kept_tokens_are_those_of_the_whole_text(kind: str, texts: list[str], max_tokens: int) -> None:
    """With every bound as tight as it may be, so that both proofs are called for."""
    tokenizer = tokenizer_of(kind)
    whole = tokens._encode(tokenizer, max_tokens, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "CHARACTERS_A_TOKEN", 2)
        patch.setattr(tokens, "WHOLE_CHARACTERS", 0)
        assert tokenize(tokenizer, texts, max_tokens) == whole
    assert tokenize(tokenizer, texts, max_tokens) == whole


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are tokenised from here on."""
    lengths: list[int] = []
    encode = tokens._encode

    def count(tokenizer: object, max_tokens: int, texts: list[str]) -> list[tokens.Tokens]:
        lengths.extend(map(len, texts))
        return encode(tokenizer, max_tokens, texts)

    monkeypatch.setattr(tokens, "_encode", count)
    return lengths


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "unigram", "wordpiece"])
def test_of_a_long_text_with_words_one_beginning_is_tokenised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(kind)
    assert describe_vocabulary(tokenizer).splits_at_blanks
    text = " ".join(corpus())
    (whole,) = tokens._encode(tokenizer, 64, [text])
    lengths = counted(monkeypatch)
    assert tokenize(tokenizer, [text], 64) == [whole]
    assert lengths == [first_length(64)] == [1024]
    assert len(text) > 20_000


def test_of_text_without_blanks_no_more_than_its_beginning_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("gpt2")
    text = "".join(random.Random(2).choices("abcdefgh", k=1 << 21))
    lengths = counted(monkeypatch)
    (entry,) = tokenize(tokenizer, [text], 64)
    assert max(lengths) == first_length(64)
    assert len(lengths) == 1 + describe_vocabulary(tokenizer).longest
    assert text.startswith(tokenizer.decode(entry.ids))
    assert not describe_vocabulary(tokenizer_of("across words")).splits_at_blanks, (
        "blanks inside of entries prove nothing"
    )


def test_the_end_of_a_text_may_decide_its_first_token() -> None:
    """Digits grouped from the right: no beginning tells the first group, so the whole text is tokenised."""
    tokenizer = tokenizer_of("digits from the right")
    firsts = [tokenizer.decode(tokenize(tokenizer, ["7" * count], 1)[0].ids) for count in (3000, 3001, 3002)]
    assert len(set(firsts)) > 1
    for count in (3000, 3001, 3002):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokens, "WHOLE_CHARACTERS", 0)
            kept = tokenize(tokenizer, ["7" * count], 4)
        assert kept == tokens._encode(tokenizer, 4, ["7" * count])


def test_the_models_of_the_benchmarks_split_at_blanks(smollm2: LanguageModel, tiny_model_folder: object) -> None:
    found = describe_vocabulary(smollm2.tokenizer)
    assert found == Vocabulary(found.longest, True, True)
    text = " ".join(corpus()) + "".join(random.Random(3).choices("abc \n中", k=5000))
    for part in (text, text[::-1], text.replace(" ", "")):
        for limit in (16, 64):
            assert tokenize(smollm2.tokenizer, [part], limit) == tokens._encode(smollm2.tokenizer, limit, [part])


@pytest.mark.slow
def test_a_document_of_16_megabytes_is_tokenised_at_once_in_little_memory(tiny_model_folder: object) -> None:
    imports = """
    import random
    from transformers import AutoTokenizer
    from pipeline.corpus.documents import text_key
    from pipeline.corpus.near_duplicates import sketch
    from pipeline.models.tokens import tokenize
    sketch("warm up")
    """
    code = f"""
    tokenizer = AutoTokenizer.from_pretrained({str(tiny_model_folder)!r})
    for text in ("the quiet river " * 2**20, "x" * 2**24, "0123456789abcdef" * 2**20):
        (tokens,) = tokenize(tokenizer, [text], 1024)
        sketch(text), text_key(text)
        print(len(tokens.ids), tokens.truncated, text.startswith(tokenizer.decode(tokens.ids)))
    """
    began = time.monotonic()
    assert run_within(1200, imports, code, 120).splitlines() == ["1024 True True"] * 3
    assert time.monotonic() - began < 100
