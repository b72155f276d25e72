"""Detectors of the target and its reference are their formulas, and want the same tokens of both models."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.small_model import smollm2_file
from pipeline.config.audit import AuditConfig
from pipeline.config.models import ModelConfig
from pipeline.detectors.base import FORWARD, REFERENCE, Evidence, plan_passes
from pipeline.detectors.pairs import token_differences
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.passes.forward import TokenStatistics, forward
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import check_stages, plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed
from tests.helpers.commands import user_error
from tests.helpers.made_up import write_corpus

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "of", "the", "model", "text"]
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 2 + i * 3 % 61)) for i in range(1, 41)]
STATISTICS = frozenset({"log_prob", "renyi_inf"})
PAIRS = ("ez", "wbc")


def ez_of(target: list[float], other: list[float], best: list[float]) -> float:
    """A transcription of arXiv 2601.12104, r / (1 + r) of its ratio r."""
    gained = lost = 0.0
    for t, r, top in zip(target, other, best, strict=True):
        if t < top:
            gained, lost = gained + max(t - r, 0), lost + max(r - t, 0)
    ratio = gained / (lost + 1e-12) if lost else math.inf
    return ratio / (1 + ratio) if lost else 1.0


def wbc_of(target: list[float], other: list[float]) -> float:
    """A transcription of arXiv 2601.02751."""
    shares = []
    for window in (2, 3, 4, 6, 9, 13, 18, 25, 32, 40):
        w = min(window, len(target))
        starts = range(len(target) - w + 1)
        above = [math.fsum(target[i : i + w]) > math.fsum(other[i : i + w]) for i in starts]
        shares.append(sum(above) / len(above))
    return sum(shares) / len(shares)


def evidence_of(targets: list[list[float]], others: list[list[float]], bests: list[list[float]]) -> Evidence:
    longest = max(map(len, targets))
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in targets])

    def table(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[math.nan] * (longest - len(row))] for row in rows])  # padding is never read

    target = TokenStatistics(table(targets), mask, renyi={"inf": -table(bests)})
    return Evidence(["text"] * len(targets), {FORWARD: target, REFERENCE: TokenStatistics(table(others), mask)})


def finite_scores(evidence: Evidence) -> list[list[float]]:
    return [one.score(evidence).tolist() for one in parse_detectors(list(PAIRS))]


def test_they_are_their_transcriptions() -> None:
    generator = np.random.default_rng(3)
    # Eighths: sums are exact, and windows tie.
    drawn = [-generator.integers(0, 40, (3, n)) / 8 for n in (1, 2, 3, 5, 11, 39, 40, 41, 90)]
    targets, others = ([row[i].tolist() for row in drawn] for i in (0, 1))
    bests = [np.maximum(row[0], row[2]).tolist() for row in drawn]
    ez, wbc = finite_scores(evidence_of(targets, others, bests))
    assert ez == pytest.approx(list(map(ez_of, targets, others, bests)))
    assert wbc == pytest.approx(list(map(wbc_of, targets, others)))


def test_rounding_of_one_small_loss_changes_no_ez_and_the_order_is_that_of_the_paper() -> None:
    """In float32 the same document has another last digit in another batch: its one loss may be 4e-7, 1e-7 or 0."""
    gains, last_digit = [-2.0, -3.0, -1.5], 2.0**-22
    scores = []
    for losses in (0, 1, 2, 4):
        target = [*gains, -1.0 - losses * last_digit]
        scores.append(finite_scores(evidence_of([target], [[-4.0, -4.0, -4.0, -1.0]], [[-0.5] * 4]))[0][0])
    np.testing.assert_allclose(scores, 1.0, rtol=1e-6)
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    drawn = np.random.default_rng(4).normal(-9, 1, (2, 300, 30)).astype(np.float32).astype(float)
    made = finite_scores(evidence_of(*drawn.tolist(), np.full((300, 30), -0.01).tolist()))[0]
    difference = drawn[0] - drawn[1]
    ratio = difference.clip(0).sum(1) / (-difference.clip(max=0).sum(1) + 1e-12)
    assert np.array_equal(np.argsort(made, kind="stable"), np.argsort(ratio, kind="stable"))


def test_what_is_no_number_is_nan_in_its_document_alone() -> None:
    for place, bad in product((0, 1), (math.nan, -math.inf)):
        given = [[[-1.0, -2.0], [-1.0, -2.0]], [[-2.0, -1.0], [-2.0, -1.0]]]
        given[place][1][0] = bad
        for scores in finite_scores(evidence_of(given[0], given[1], [[-0.5, -0.5]] * 2)):
            assert [math.isnan(score) for score in scores] == [False, True]
    passes = evidence_of([[-1.0, -2.0]], [[-1.0, -2.0]], [[-1.0, -1.0]]).passes
    shorter = evidence_of([[-1.0]], [[-1.0]], [[-1.0]]).passes
    first, second = (evidence_of(rows, rows, rows).passes for rows in ([[-1.0], [-1.0] * 2], [[-1.0] * 2, [-1.0]]))
    for one, other in ((passes, shorter), (first, second)):
        with pytest.raises(ValueError, match="different numbers of tokens"):
            finite_scores(Evidence(["text"], {FORWARD: one[FORWARD], REFERENCE: other[REFERENCE]}))
    assert token_differences(Evidence(["text"], first))[0].tolist() == [[0.0] * 2] * 2, "0 where there is no token"
    planned = plan_passes(parse_detectors(["loss", "reference", *PAIRS]))
    assert planned == {FORWARD: STATISTICS, REFERENCE: frozenset({"log_prob"})}, "those of loss and reference"


@pytest.fixture(scope="module")
def other_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("pairs") / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(folder)
    return folder


def described(tmp_path: Path, model: Path, other: Path | None, **settings: Any) -> dict[str, Any]:
    rows = [{"id": str(i), "text": text} for i, text in enumerate(settings.pop("texts", TEXTS))]
    reference = {} if other is None else {"reference_model": {"path": str(other), "dtype": "float32"}}
    return {
        "run": str(tmp_path / f"run{settings.pop('run', '')}"),
        "model": {"path": str(model), "dtype": "float32"},
        **reference,
        "corpus": write_corpus(tmp_path, {"audit": rows}),
        "detectors": list(PAIRS),
        **settings,
    }


def scored(config: AuditConfig) -> pa.Table:
    """The rows of all shards, scored in this process."""
    shards, store = make_plan(config).shards, Store(config.run)
    events = finish_shards(plan_stages(config)[-1], shards, store, workers=1)
    return pa.concat_tables([read_filed(store, event) for event in events if isinstance(event, Receipt)])


def test_scores_of_a_run_do_not_depend_on_batches(tmp_path: Path, tiny_model_folder: Path, other_folder: Path) -> None:
    models = [open_model(ModelConfig(path=str(path), dtype="float32")) for path in (tiny_model_folder, other_folder)]
    alone = [[forward(lm, [lm.tokenizer(text)["input_ids"]], STATISTICS) for text in TEXTS] for lm in models]
    target, other = ([one.log_prob[0].double().tolist() for one in row] for row in alone)
    best = [(-one.renyi["inf"][0]).double().tolist() for one in alone[0]]
    expected = np.transpose([list(map(ez_of, target, other, best)), list(map(wbc_of, target, other))])
    assert len(np.unique(expected[:, 1])) > 5
    assert len(np.unique(expected[:, 0])) > 5

    for tokens in (1, 256, 4096):
        resources = {"batch_tokens": tokens}
        config = build_config(described(tmp_path, tiny_model_folder, other_folder, run=tokens, resources=resources))
        check_stages(config)
        rows = scored(config)
        rows = rows.take(np.argsort([int(name) for name in rows["doc_id"].to_pylist()]))
        np.testing.assert_allclose(np.transpose([rows[name].to_numpy() for name in PAIRS]), expected, rtol=1e-4)


def test_a_text_cut_between_two_line_ends_is_compared_by_the_tokens_of_the_target(tmp_path: Path) -> None:
    """Read again, the text that the first tokens cover ends in one token for both."""
    tokenizer = open_tokenizer(ModelConfig(path=str(smollm2_file())))
    folders = [tmp_path / "target", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    models = [open_model(ModelConfig(path=str(folder), dtype="float32")) for folder in folders]
    text, most = "The quiet river\n\n= 7", 5
    (cut,) = tokenize(models[0].tokenizer, [text], most)
    assert tokenize(models[1].tokenizer, [text[: cut.kept]], most)[0].ids != cut.ids
    settings = described(tmp_path, *folders, texts=[text], detectors=[*PAIRS, "reference"], max_tokens=most)
    rows = scored(build_config(settings))
    target, other = (forward(lm, [cut.ids], STATISTICS) for lm in models)
    log_probs = [one.log_prob[0].double().tolist() for one in (target, other)]
    assert rows["wbc"].to_pylist() == pytest.approx([wbc_of(*log_probs)])
    assert rows["reference"].to_pylist() == pytest.approx([np.mean(log_probs[0]) - np.mean(log_probs[1])], rel=1e-4)


def test_other_tokenizers_are_refused(tmp_path: Path, tiny_model_folder: Path, other_folder: Path) -> None:
    """Before a run, and in a worker of one."""
    changes: dict[str, Callable[[Any], None]] = {
        "'zzz' has id none and ": lambda tokenizer: tokenizer.add_tokens(["zzz"]),
        "they make ids": lambda one: setattr(one.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    }
    for differs, change in changes.items():
        folder = tmp_path / differs.split()[0]
        AutoModelForCausalLM.from_pretrained(other_folder).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(other_folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)
        config = build_config(described(tmp_path, tiny_model_folder, folder, detectors=["loss", "wbc"]))
        events = finish_shards(plan_stages(config)[-1], make_plan(config).shards, Store(config.run), 1)
        for message in (user_error(check_stages, config), user_error(list, events)):
            assert message.startswith("detector wbc compares model ")
            for part in (differs, str(tiny_model_folder), str(folder)):
                assert part in message


@pytest.mark.parametrize("name", PAIRS)
def test_what_cannot_be_compared_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"detector {name} needs reference_model, which is not given"):
        build_config(described(tmp_path, tmp_path / "model", None, detectors=[name]))
    endpoint = {"endpoint": "http://localhost:1/v1", "name": "served"}
    for key in ("model", "reference_model"):
        with pytest.raises(
            UserError, match=f"detector {name} needs two models that read the same tokens, and served is an endpoint"
        ):
            build_config({**described(tmp_path, tmp_path / "m", tmp_path / "o", detectors=[name]), key: endpoint})
