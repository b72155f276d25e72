"""Windows of a long text: as defined, each token once, and a text of one window as without windows."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import seenset
from benchmarks.small_model import WORDS
from pipeline.answers.top_documents import read_attributions
from pipeline.checks.blind import blind_test
from pipeline.config.audit import AuditConfig
from pipeline.detectors.likelihood import moving_average
from pipeline.errors import UserError
from pipeline.models.tokens import plain_ids, tokenize
from pipeline.models.windows import (
    GAP,
    check_room,
    count_windows,
    special_tokens,
    tokenize_windows,
    window_pieces,
    window_starts,
    window_values,
)
from pipeline.plan.description import build_config, load_config
from pipeline.plan.forecast import compare_windows
from pipeline.plan.stage_plan import build_stages
from pipeline.run.plan import make_plan
from pipeline.selection.guarantees import Outcome
from pipeline.stages.local import finish_shards
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt
from tests.helpers.commands import in_a_process
from tests.helpers.made_up import write_corpus

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


ENDPOINT = {"endpoint": "http://127.0.0.1:9/v1", "name": "served"}
OF_KIND = {
    "token ids": {"tokens": "ids"},
    "pictures": {"image": "picture"},
    "chats": {"messages": "messages"},
    "versions": {"versions": {}},
}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        *(
            ({"detectors": [name]}, f"detector {name}.* needs a text in one piece, and windows above 1 .*take .*loss")
            for name in ("camia", "lowercase", "pac", "gradient_norm", "samia", "cdd", "coverage")
        ),
        ({"detectors": ["loss"], "windows": 0}, "windows"),
        ({"detectors": ["loss"], "model": ENDPOINT}, "windows: 4 needs texts whose tokens are known, and served is an"),
        ({"detectors": ["reference"], "reference_model": ENDPOINT}, "needs"),
    ],
)
def test_what_windows_cannot_do_is_refused_in_one_line(
    changes: dict[str, Any], part: str, make_audit: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=part) as caught:
        load_config(str(make_audit(**{"audit": 3, "unseen": 3, "windows": 4, **changes})))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", OF_KIND)
def test_windows_are_of_texts_alone(kind: str) -> None:
    source = {"path": "documents.jsonl", **OF_KIND[kind]}
    corpus = {"audit": source} if kind == "versions" else {"audit": source, "unseen": source}
    detector: Any = {"loss": {"part": "description"}} if kind == "pictures" else "loss"
    described = {"run": "run", "model": {"path": "m"}, "corpus": corpus, "detectors": [detector]}
    build_config(described)
    with pytest.raises(
        UserError, match=r"windows: 2 needs texts whose tokens are known, and .*: leave it out, or give t"
    ):
        build_config({**described, "windows": 2})


def test_the_tokens_of_a_page_give_the_score_of_all_windows(make_audit: Callable[..., Path]) -> None:
    texts = [long_texts(role, [60] * 30) for role in ("audit", "unseen")]
    selection = {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}
    path = make_audit(*texts, detectors=["loss"], selections=[selection], max_tokens=20, windows=2)
    seenset.audit(path, quiet=True)
    shown = read_attributions(Store(str(path.parent / "run")), "members")
    assert shown
    for one in shown.values():
        values = [value for value in one.values if value is not None]
        assert one.score == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert len(values) < len(one.pieces) == len(one.values)
        first, last = "".join(one.pieces).split(GAP)
        assert any(text.startswith(first) and text.endswith(last) for text in texts[0])
    assert "2 windows of 20 tokens" in (path.parent / "run/report/report.html").read_text(encoding="utf-8")


def test_tokens_are_shown_by_the_windows_of_a_reference_model_with_fewer_positions(
    make_audit: Callable[..., Path], tiny_model_folder: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_model_folder, short)
    described = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 12}))
    texts = [long_texts(role, [60] * 30) for role in ("audit", "unseen")]
    selection = {"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}
    settings = {"detectors": ["loss", "reference"], "selections": [selection], "max_tokens": 20, "windows": 2}
    seenset.audit(make_audit(*texts, reference_model={"path": str(short)}, **settings), quiet=True)
    shown = read_attributions(Store(str(tmp_path / "run")), "members")
    assert shown
    for one in shown.values():
        values = [value for value in one.values if value is not None]
        assert one.score == pytest.approx(sum(values) / len(values), abs=1e-5)
        assert len(values) <= 24


def long_texts(role: str, lengths: Sequence[int]) -> list[str]:
    """Texts of some numbers of words, which are those of every role."""
    draws = [np.random.default_rng([len(role), number]) for number in range(len(lengths))]
    return [
        " ".join(WORDS[i] for i in draw.integers(len(WORDS), size=length))
        for draw, length in zip(draws, lengths, strict=True)
    ]


def config_of(folder: Path, model: Path, lengths: Mapping[str, Sequence[int]], **settings: Any) -> AuditConfig:
    corpus = write_corpus(folder, {role: long_texts(role, some) for role, some in lengths.items()})
    given = {"max_tokens": 16, "windows": 3, "detectors": ["loss", {"min_k_plus_plus": {"window": 2}}], **settings}
    return build_config({"run": str(folder / "run"), "model": {"path": str(model)}, "corpus": corpus, **given})


LENGTHS = {"audit": [4 + 3 * i for i in range(30)], "unseen": [5 + 3 * i for i in range(30)]}


def scored_files(config: AuditConfig, workers: int, url: str, most: int | None = None) -> dict[str, bytes]:
    """Shard -> the bytes of its scores; `most`: the process is killed behind so many shards."""
    shards, store = make_plan(config).shards, Store(url)
    (stage,) = build_stages(config, shards).stages
    missing = [shard for shard in shards if read_receipt(store, stage.name, shard.id) is None]
    for number, _ in enumerate(e for e in finish_shards(stage, missing, store, workers) if isinstance(e, Receipt)):
        if number + 1 == most:
            os.kill(os.getpid(), signal.SIGKILL)
    receipts = {shard.id: read_receipt(store, stage.name, shard.id) for shard in shards}
    return {shard: Path(url, receipt.data).read_bytes() for shard, receipt in receipts.items() if receipt is not None}


def test_bytes_do_not_depend_on_workers_or_a_kill(tmp_path: Path, tiny_model_folder: Path) -> None:
    resources = {"shard_bytes": 300, "batch_tokens": 40}
    config = config_of(tmp_path, tiny_model_folder, LENGTHS, resources=resources)
    alone = scored_files(config, 1, str(tmp_path / "alone"))
    assert len(alone) > 6
    assert scored_files(config, 3, str(tmp_path / "several")) == alone
    killed = str(tmp_path / "killed")
    assert in_a_process(lambda: scored_files(config, 2, killed, most=3)) == -signal.SIGKILL
    assert 3 <= len(list(Path(killed, "receipts/score").glob("*.json"))) < len(alone)
    assert scored_files(config, 2, killed) == alone


def test_scores_do_not_depend_on_the_size_of_batches(tmp_path: Path, tiny_model_folder: Path) -> None:
    tables = []
    for tokens in random.Random(0).sample([1, 17, 40, 90, 300, 5000], 6):
        config = config_of(tmp_path, tiny_model_folder, LENGTHS, resources={"batch_tokens": tokens})
        shards, store = make_plan(config).shards, Store(str(tmp_path / f"run{tokens}"))
        (stage,) = build_stages(config, shards).stages
        done = [event for event in finish_shards(stage, shards, store, 1) if isinstance(event, Receipt)]
        rows = pa.concat_tables([store.read_table(one.data) for one in done]).to_pylist()
        tables.append(
            [[row["loss"], row["min_k_plus_plus(window=2)"]] for row in sorted(rows, key=itemgetter("doc_id"))]
        )
        assert max(row["n_tokens"] for row in rows) == 48
    assert np.array(tables) == pytest.approx(np.array([tables[0]] * 6), abs=1e-5)


def test_windows_are_counted_without_the_end_of_a_book(tokenizer: Any) -> None:
    texts = [*long_texts("audit", [1, 5, 9, 20, 40, 61, 90, 300]), "x" * 3000]
    for most in (2, 3, 7):
        read, _ = tokenize_windows(tokenizer, texts, 20, most)
        assert count_windows(tokenizer, texts, 20, most) == [max(1, len(one.cuts)) for one in read]


def test_the_blind_test_reads_the_number_of_windows(tmp_path: Path, tiny_model_folder: Path) -> None:
    draw = np.random.default_rng(0)
    lengths = {role: draw.integers(14, 20, 80).tolist() for role in ("audit", "unseen")}
    lengths["audit"] = [48 + length for length in lengths["audit"]]
    config = config_of(tmp_path, tiny_model_folder, lengths)
    shards = make_plan(config).shards
    with_number, without = (
        blind_test(shards, "unseen", config.model_copy(update={"windows": most})) for most in (3, 1)
    )
    assert with_number.auc is not None
    assert without.auc is not None
    assert with_number.auc > max(0.99, without.auc)
    assert with_number.outcome == Outcome.FAILED
    line = compare_windows(make_plan(config))
    assert re.match(r"warning: windows: .* audit [\d.]+, unseen [\d.]+; the roles differ", line)


def test_a_plan_states_numbers_of_windows_without_a_warning_where_they_are_alike(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    config = config_of(tmp_path, tiny_model_folder, LENGTHS)
    assert compare_windows(make_plan(config)).startswith("windows: of at most 3 a document has on average: audit 2.")
