"""The pieces of a text are its tokens, one each, and joined they are what the model saw of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from benchmarks.small_model import WORDS
from pipeline.models.tokens import first_length, split_into_pieces, tokenize


@pytest.fixture(scope="module")
def byte_level(tiny_model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder)


def lowercase_words() -> Any:
    """As of BERT: lower case, blanks dropped, special tokens at both ends."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def metaspace() -> Any:
    """As of Llama 2: a blank belongs to the word behind it, and unknown characters fall back to their bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def cut(tokenizer: Any, text: str, most: int = 1024) -> tuple[list[str], str]:
    """The pieces of a text, and the part of it that the tokens cover."""
    (tokens,) = tokenize(tokenizer, [text], most)
    pieces = split_into_pieces(tokenizer, text, tokens.ids, tokens.kept)
    assert len(pieces) == len(tokens.ids)
    assert "".join(pieces) == text[: tokens.kept]
    return pieces, text[: tokens.kept]


TEXTS = [
    "the river learns",
    " blanks before, behind and  between \n\n\t",
    "été naïve Ünïcode",
    "数据 of 模型, 🏳️‍🌈 and \U0001f469‍\U0001f52c",
    "🙂",
    "\ufffd and \u202e",
    "THE QUIET GARDEN",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("most", [2, 3, 5, 1024])
@pytest.mark.parametrize("make", [lowercase_words, metaspace, ByT5Tokenizer], ids=lambda make: make.__name__)
def test_pieces_join_to_the_text_with_any_kind_of_tokenizer(make: Any, text: str, most: int) -> None:
    cut(make(), text, most)


@given(text=st.text(min_size=1), most=st.integers(2, 12))
def test_pieces_join_to_any_text_that_is_cut_anywhere(byte_level: Any, text: str, most: int) -> None:
    cut(byte_level, text, most)


def test_a_piece_is_what_its_token_says_and_a_character_stands_with_its_first_token(byte_level: Any) -> None:
    pieces, text = cut(byte_level, "the river learns of seven letters")
    assert pieces == [byte_level.decode([token]) for token in byte_level(text)["input_ids"]]
    assert len(pieces) < len(text)
    pieces, _ = cut(byte_level, "a 数 river")
    assert pieces[:6] == ["a", " ", "数", "", "", " "] or pieces[:5] == ["a", " ", "数", "", ""]
    assert cut(byte_level, "数数", most=4) == (["数", "", "", "数"], "数数"), "a character that is cut is kept whole"
    text = "the " * 30 + "seven letters " * 400
    pieces, kept = cut(byte_level, text, most=20)
    assert len(text) > first_length(20) > len(kept)
    assert pieces[3] == " the"
    with pytest.raises(ValueError, match="its tokens have changed"):
        split_into_pieces(byte_level, "the river", [1, 2, 3], 9)
    with pytest.raises(ValueError, match="do not decode to it"):
        split_into_pieces(ByT5Tokenizer(), "the river", [103, 104, 105], 9)


def test_special_tokens_have_no_text_and_dropped_blanks_have_a_place() -> None:
    pieces, _ = cut(lowercase_words(), "  The  river ")
    assert (pieces[0], pieces[-1]) == ("", "")
    assert [piece.strip() for piece in pieces if piece.strip()] == ["The", "river"]
    assert pieces[1:-1] == ["  The", "  river "]
    assert cut(metaspace(), "ab c")[0] == ["", "a", "", "b", " ", "c"], "the blank before it shares the a"
