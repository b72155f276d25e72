"""Windows of a long text: as defined, each token once, and a text of one window as without windows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.detectors.likelihood import moving_average
from pipeline.errors import UserError
from pipeline.models.tokens import plain_ids, tokenize
from pipeline.models.windows import (
    GAP,
    check_room,
    special_tokens,
    tokenize_windows,
    window_pieces,
    window_starts,
    window_values,
)

TEXT = " ".join(f"{WORDS[i % len(WORDS)]} été 数据" for i in range(60))
TEMPLATES = {"bare": "$A", "begins": "<s> $A", "ends": "<s> $A </s>", "begins twice": "<s> <s> $A"}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, tiny_model_folder: Path) -> Any:
    """The tokenizer of the tiny model, with special tokens around a text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=TEMPLATES[request.param], special_tokens=marks
    )
    return tokenizer


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 12))
def test_windows_start_as_defined(tokens: int, room: int, most: int) -> None:
    starts = window_starts(tokens, room, most)
    count = min(most, -(-tokens // room))
    assert len(starts) == count
    if count > 1:
        assert starts == [int(i * (tokens - room) / (count - 1) + 1e-9) for i in range(count)]
        assert starts[-1] + room == tokens
        assert all(after > before for before, after in pairwise(starts))
    if count * room >= tokens:  # nothing is left out
        assert all(after - before <= room for before, after in pairwise(starts))


@pytest.mark.parametrize("most", [2, 3, 50])
def test_each_token_has_its_score_in_the_first_window_that_holds_it(tokenizer: Any, most: int) -> None:
    special, bare = special_tokens(tokenizer), plain_ids(tokenizer, TEXT)
    before, room = len(special.before), 20 - len(special.before) - len(special.after)
    ((tokens,), (kept,)) = tokenize_windows(tokenizer, [TEXT], 20, most)
    seen: set[int] = set()
    at = 0
    for number, cut in enumerate(tokens.cuts):
        ids = tokens.ids[at : at + cut.length]
        last = number == len(tokens.cuts) - 1
        assert tuple(ids) == (*special.before, *bare[cut.start : cut.stop], *(special.after if last else ()))
        scored = {
            cut.start + place - before
            for place in range(1 + cut.skipped, cut.length)
            if before <= place < before + cut.stop - cut.start
        }
        assert not scored & seen
        first = set() if before else {cut.start}  # nothing stands before it
        assert seen | scored | first >= set(range(cut.start, cut.stop))
        seen |= scored
        at += cut.length
    assert at == len(tokens.ids)
    assert [cut.start for cut in tokens.cuts] == window_starts(len(bare), room, most)
    assert tokens.truncated == (most * room < len(bare))
    assert (kept == TEXT) == (not tokens.truncated)


def test_a_text_of_one_window_is_tokenized_as_without_windows(tokenizer: Any) -> None:
    texts = [TEXT[:30], TEXT[:47], ""]
    assert tokenize_windows(tokenizer, texts, 64, 4) == (tokenize(tokenizer, texts, 64), texts)


@pytest.mark.parametrize("most", [2, 3, 50])
def test_shown_pieces_are_the_text_and_have_a_value_each(tokenizer: Any, most: int) -> None:
    tokens, pieces = window_pieces(tokenizer, TEXT, 20, most)
    ((again,), (kept,)) = tokenize_windows(tokenizer, [TEXT], 20, most)
    assert tokens == again
    assert "".join(piece for piece in pieces if piece != GAP) == kept
    scored = [cut.length - 1 - cut.skipped for cut in tokens.cuts]
    values = [float(i) for i in range(sum(scored) + len(scored) - 1)]
    shown = window_values(tokens.cuts, values)
    assert len(shown) == len(pieces)
    assert sum(value is not None for value in shown) == sum(scored)
    assert all(value is None for value, piece in zip(shown, pieces, strict=True) if piece == GAP)


def test_moving_averages_stay_inside_a_window() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0, 9.0, 8.0, 16.0, 32.0], [1.0, 2.0, 4.0, 9.0, 3.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0]]).bool()
    means, whole = moving_average(values, mask, 2)
    assert [row[keep].tolist() for row, keep in zip(means, whole, strict=True)] == [[1.5, 3, 12, 24], [1.5, 6]]
    means, whole = moving_average(values, mask, 3)
    assert means[0][whole[0]].tolist() == pytest.approx([7 / 3, 56 / 3])
    assert means[1][whole[1]].tolist() == [1, 2, 9, 3]  # no window has three


def test_a_window_without_a_score_is_refused(tokenizer: Any) -> None:
    special = special_tokens(tokenizer)
    least = max(2, 1 + len(special.before)) + len(special.after)
    check_room(tokenizer, least)
    with pytest.raises(UserError, match=f"max_tokens must be at least {least} with this tokenizer, got {least - 1}"):
        check_room(tokenizer, least - 1)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"detectors": ["camia"]}, "detector camia needs a text in one piece, and windows above 1 reads .*take .*loss"),
        ({"detectors": ["loss"], "windows": 0}, "windows"),
    ],
)
def test_what_windows_cannot_do_is_refused_in_one_line(
    changes: dict[str, Any], part: str, make_audit: Callable[..., Path]
) -> None:
    from pipeline.plan.description import load_config

    with pytest.raises(UserError, match=part):
        load_config(str(make_audit(**{"audit": 3, "unseen": 3, "windows": 4, **changes})))
