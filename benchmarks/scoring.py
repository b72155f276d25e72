"""Speed of a forward pass with statistics beside a bare one and beside published code. Prints one JSON line.

Everything is measured in one run, alternating, and reported as medians: on a shared machine only ratios mean anything.

- vs_bare_forward: documents/s with loss, zlib, min_k, min_k_plus_plus over documents/s of `model(ids).logits` on
  the same padded batches; `_all` with m_entropy and every Renyi order added.
- vs_one_at_a_time: against one document at a time, log_softmax and softmax of all its logits in float32.

With `--costs`, instead: the seconds of `min_k_plus_plus` and `etd` over those of `min_k_plus_plus` alone, and of all
columns of `camia` over those of `loss` of the same tokens, each text three times over.

With `--windows`, instead: the speed of texts of four windows over that of as many documents of the length of a window
each, with the same tokens; and the seconds to tokenize a text of 2 MB into windows over those of tokenizing it once.

With `--chats`, instead: the speed of conversations of four turns, rendered by the model's chat template and scored on
their answers, over that of plain texts with the same token ids; and the same of their preparation alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.small_model import fast_type, smollm2_file
from pipeline.config.audit import DetectorEntry
from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import ASSISTANT, Conversation, Turn
from pipeline.corpus.documents import Document
from pipeline.detectors.base import Detector, Evidence, plan_passes
from pipeline.detectors.camia import Signal
from pipeline.detectors.registry import DetectorChoice, parse_detectors
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatSettings, chat_template
from pipeline.models.devices import Device
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.opened import use_fused_attention
from pipeline.models.sharing import Adapters, SharedModels
from pipeline.models.tokens import Cut, repeated, tokenize
from pipeline.models.windows import tokenize_windows
from pipeline.passes.forward import forward
from pipeline.passes.parts import PassSizes, windows_in_parts
from pipeline.stages import SCORE_FOLDER, SCORING
from pipeline.stages.base import Entry, Output, Placement, Stage
from pipeline.stages.chat_scoring import ChatScorer
from pipeline.stages.score import Inputs, Scorer, ScoreSettings, score_schema
from pipeline.stages.worker import longest_first, prepare

BASIC: list[DetectorEntry] = ["loss", "zlib", "min_k", "min_k_plus_plus"]
CAMIA: list[DetectorEntry] = [{"camia": {"signal": list(get_args(Signal)), "of": ["first", "difference"]}}]
ALL: list[DetectorEntry] = [*BASIC, "m_entropy", {"renyi": {"order": [0.5, 1, 2, "inf"]}}]
MAX_TOKENS = 1024
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def wikimia(count: int) -> list[str]:
    """The first texts of WikiMIA, all lengths, in a fixed random order."""
    folder = Path(os.environ.get("SEENSET_SHARED", "../shared")) / "data" / "wikimia"
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"no *.jsonl in {folder}; SEENSET_SHARED names the folder that holds data/wikimia")
    texts = [json.loads(line)["input"] for path in files for line in path.open(encoding="utf-8")]
    return random.Random(0).sample(texts, min(count, len(texts)))


def load(name: str, device: str, dtype: str) -> LanguageModel:
    """The model to measure: SmolLM2's GGUF, a random Llama of 1B parameters with its tokenizer, or a path."""
    if name == "random-1b":
        like = load("smollm2", "cpu", "float32")
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=len(like.tokenizer), max_position_embeddings=8192,
        )  # fmt: skip
        torch.manual_seed(0)
        use_fused_attention(device)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)
        return LanguageModel(model, like.tokenizer, torch.device(device), 8192)
    if name == "smollm2":
        name = str(smollm2_file())
    return open_model(ModelConfig(path=name, dtype=dtype), gpus=0 if device == "cpu" else 1)


def batches(ids: Sequence[list[int]], budget: int) -> list[list[int]]:
    """Indices of documents of like length together, as many as fit the budget of padded tokens."""
    groups: list[list[int]] = []
    for index in sorted(range(len(ids)), key=lambda index: len(ids[index])):
        if groups and len(ids[index]) * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def pad(ids: Sequence[list[int]], device: torch.device) -> torch.Tensor:
    """Right-padded ids, (documents, tokens)."""
    longest = max(map(len, ids))
    return torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in ids], device=device)


@torch.inference_mode()
def bare(lm: LanguageModel, ids: Sequence[list[int]]) -> None:
    """Compute the logits of a batch and nothing else."""
    lm.model(pad(ids, lm.device)).logits  # noqa: B018


def seenset(lm: LanguageModel, detectors: Sequence[Detector], ids: list[list[int]], texts: list[str]) -> torch.Tensor:
    """Scores of a batch, (documents, detectors) float64."""
    ((needed, statistics_read),) = plan_passes(detectors).items()
    evidence = Evidence(texts, {needed: forward(lm, ids, statistics_read)})
    return torch.stack([detector.score(evidence).cpu() for detector in detectors], dim=1)


@torch.inference_mode()
def published(lm: LanguageModel, ids: list[int], text: str) -> torch.Tensor:
    """Scores of one document as the code that came with Min-K%++ computes them, (1, detectors) float64."""
    import zlib

    tokens = torch.tensor([ids], device=lm.device)
    logits = lm.model(input_ids=tokens).logits[0, :-1].float()
    targets = tokens[0, 1:, None]
    probabilities = torch.softmax(logits, dim=-1)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    log_prob = log_probabilities.gather(1, targets).squeeze(1)
    mu = (probabilities * log_probabilities).sum(1)
    sigma = ((probabilities * log_probabilities.square()).sum(1) - mu.square()).clamp_min(1e-12)
    count = max(1, int(0.2 * len(log_prob)))
    loss = log_prob.mean()
    standardised = (log_prob - mu) / sigma.sqrt()
    size = len(zlib.compress(text.encode()))
    scores = [loss, loss / size, log_prob.sort().values[:count].mean(), standardised.sort().values[:count].mean()]
    return torch.stack(scores).double().cpu()[None]


class _Clock:
    """Collects the seconds of named jobs."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, job: Callable[[], Any]) -> Any:
        """Run a job, note its seconds, return its result."""
        if self.cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = job()
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every job on every batch, alternating; a job's seconds are the sum over batches of medians over rounds."""
    texts = wikimia(arguments.texts)
    exact = load(arguments.model, arguments.device, arguments.dtype or "float32")
    ids = [tokens.ids for tokens in tokenize(exact.tokenizer, texts, MAX_TOKENS)]
    basic, every = parse_detectors(BASIC), parse_detectors(ALL)
    groups = batches(ids, arguments.batch_tokens or BATCH_TOKENS[arguments.device])
    both = arguments.dtype is None and fast_type(arguments.device) == "bfloat16"
    half = load(arguments.model, arguments.device, "bfloat16") if both else None
    rounds: list[dict[str, list[float]]] = []
    scores: dict[str, list[torch.Tensor]] = {}
    for number in range(arguments.rounds + 1):
        clock = _Clock(exact.device)
        scores = {"ours": [], "half": [], "published": []}
        for group in groups[-1:] if number == 0 else groups:  # round 0 warms up
            group_ids, group_texts = [ids[i] for i in group], [texts[i] for i in group]
            clock.time("bare", lambda: bare(exact, group_ids))  # noqa: B023 - run at once
            scores["ours"].append(clock.time("ours", lambda: seenset(exact, basic, group_ids, group_texts)))  # noqa: B023
            clock.time("all", lambda: seenset(exact, every, group_ids, group_texts))  # noqa: B023
            one = lambda: torch.cat([published(exact, i, t) for i, t in zip(group_ids, group_texts, strict=True)])  # noqa: B023, E731
            scores["published"].append(clock.time("published", one))
            if half is not None:
                scores["half"].append(clock.time("half", lambda: seenset(half, basic, group_ids, group_texts)))  # noqa: B023
        if number:
            rounds.append(clock.seconds)
    seconds = {
        name: sum(map(statistics.median, zip(*(each[name] for each in rounds), strict=True))) for name in rounds[0]
    }
    return report(arguments, seconds, scores, sum(map(len, ids)))


def costs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of seconds, medians over the rounds, of two detectors that should cost next to nothing."""
    texts = wikimia(arguments.texts)
    lm = load(arguments.model, arguments.device, arguments.dtype or "float32")
    ids = [tokens.ids for tokens in tokenize(lm.tokenizer, texts, MAX_TOKENS)]
    thrice = [repeated(one, MAX_TOKENS, lm.tokenizer.bos_token_id) for one in ids]
    jobs = {
        "min_k_plus_plus": (["min_k_plus_plus"], ids),
        "etd": (["min_k_plus_plus", "etd"], ids),
        "loss": (["loss"], thrice),
        "camia": (CAMIA, thrice),
    }
    groups = batches(thrice, arguments.batch_tokens or BATCH_TOKENS[arguments.device])
    ratios: dict[str, list[float]] = {"etd": [], "camia": []}
    for number in range(arguments.rounds + 1):
        clock = _Clock(lm.device)
        for group in groups[-1:] if number == 0 else groups:  # round 0 warms up
            for name, (entries, read) in jobs.items():
                given = parse_detectors(entries), [read[i] for i in group], [texts[i] for i in group]
                clock.time(name, lambda: seenset(lm, *given))  # noqa: B023 - run at once
        if number:
            seconds = {name: sum(values) for name, values in clock.seconds.items()}
            ratios["etd"].append(seconds["etd"] / seconds["min_k_plus_plus"])
            ratios["camia"].append(seconds["camia"] / seconds["loss"])
    medians = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
    return {"benchmark": "scoring", "texts": len(texts), "tokens": sum(map(len, ids)), "costs": medians}


WINDOWS, WINDOW_TOKENS, BOOK_CHARACTERS = 4, 256, 2_000_000


def windows(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of seconds, medians over the rounds, of texts in windows and of their tokens in other forms."""
    words = " ".join(wikimia(10_000))
    lm = load(arguments.model, arguments.device, arguments.dtype or "float32")
    book = words * -(-BOOK_CHARACTERS // len(words))
    book = book[:BOOK_CHARACTERS]
    long, size = arguments.texts // WINDOWS, WINDOWS * WINDOW_TOKENS
    ids = lm.tokenizer(words, verbose=False)["input_ids"][: long * size]
    if len(ids) < long * size:
        raise UserError(f"--texts must be at most {len(ids) // WINDOW_TOKENS}, got {arguments.texts}")
    pieces = [ids[start : start + WINDOW_TOKENS] for start in range(0, len(ids), WINDOW_TOKENS)]
    cuts = [Cut(start, start + WINDOW_TOKENS, WINDOW_TOKENS, 0) for start in range(0, size, WINDOW_TOKENS)]
    detectors = parse_detectors([entry for entry in BASIC if entry != "zlib"])
    ((needed, names),) = plan_passes(detectors).items()
    budget = arguments.batch_tokens or BATCH_TOKENS[arguments.device]
    together, parts = max(WINDOWS, budget // WINDOW_TOKENS // WINDOWS * WINDOWS), PassSizes()

    def scored(some: Sequence[list[int]], of: Sequence[Sequence[Cut]]) -> None:
        tokens = windows_in_parts(lm, some, of, names, parts, budget)
        evidence = Evidence([""] * len(some), {needed: tokens})
        torch.stack([detector.score(evidence).cpu() for detector in detectors])

    def plain() -> None:
        for start in range(0, len(pieces), together):
            some = pieces[start : start + together]
            scored(some, [()] * len(some))

    def windowed() -> None:
        for start in range(0, len(pieces), together):
            some = [
                ids[at * WINDOW_TOKENS : at * WINDOW_TOKENS + size] for at in range(start, start + together, WINDOWS)
            ]
            some = [one for one in some if one]
            scored(some, [cuts] * len(some))

    jobs: dict[str, Callable[[], Any]] = {
        "documents": plain,
        "windows": windowed,
        "once": lambda: lm.tokenizer([book], verbose=False)["input_ids"],
        "book": lambda: tokenize_windows(lm.tokenizer, [book], MAX_TOKENS, WINDOWS),
    }
    rounds: list[dict[str, list[float]]] = []
    for number in range(arguments.rounds + 1):
        clock = _Clock(lm.device)
        for name, job in jobs.items():
            clock.time(name, job)
        if number:  # round 0 warms up
            rounds.append(clock.seconds)
    speed = statistics.median(one["documents"][0] / one["windows"][0] for one in rounds)
    tokenizing = statistics.median(one["book"][0] / one["once"][0] for one in rounds)
    return {
        "benchmark": "scoring",
        "windows": long * WINDOWS,
        "tokens": len(ids),
        "vs_documents_of_a_window": round(speed, 3),
        "tokenizing_vs_once": round(tokenizing, 3),
        "rounds": arguments.rounds,
    }


TURNS = 4


def conversations(texts: Sequence[str]) -> list[Conversation]:
    """Conversations of `TURNS` turns: each text is a question, its first half, and an answer."""
    halves = [part for text in texts for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    turns = [Turn(ASSISTANT if place % 2 else "user", part) for place, part in enumerate(halves)]
    return [Conversation(tuple(turns[start : start + TURNS])) for start in range(0, len(turns), TURNS)]


def chats(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of seconds, medians over the rounds, of plain texts and of conversations with the same token ids."""
    model = ModelConfig(path=str(smollm2_file()), dtype=arguments.dtype or "float32")
    gpus, shared = int(arguments.device == "cuda"), SharedModels(alone=True)
    opened = shared.copy_model(open_model, model, gpus)
    settings = ChatSettings({"target": chat_template(opened.tokenizer, model)})
    made = conversations(wikimia(arguments.texts // 2 * 2))
    rendering = settings.open("target", opened.tokenizer)
    rendered = [rendering.rendered(chat).text for chat in made]  # type: ignore[union-attr]
    columns = [detector.column for detector in parse_detectors(BASIC)]
    tokens = arguments.batch_tokens or BATCH_TOKENS[arguments.device]

    def scorer(kind: type[Scorer], chat: ChatSettings | None) -> Scorer:
        of = ScoreSettings(
            model, None, DetectorChoice(tuple(BASIC)), None, None, MAX_TOKENS, tokens, tokens, Device(gpus).mark,
            chat=chat,
        )  # fmt: skip
        stage = Stage(SCORING, SCORE_FOLDER, score_schema(columns), of, None, 0, kind, lambda _: {"model": ""})
        one = kind(stage, Placement(gpus, torch.get_num_threads(), shared))
        one.adapters = Adapters(opened, {}, "", "")
        return one

    jobs = {
        "plain": (scorer(Scorer, None), [Document(row, str(row), text, None) for row, text in enumerate(rendered)]),
        "chats": (
            scorer(ChatScorer, settings),
            [Document(row, str(row), chat.text, None, chat=chat) for row, chat in enumerate(made)],
        ),
    }
    clocks, read = [_Clock(opened.device) for _ in range(arguments.rounds + 1)], dict[str, int]()
    for number, clock in enumerate(clocks):
        batches_of: dict[str, list[list[Entry]]] = {}
        outputs = {name: Output() for name in jobs}
        for name, (worker, documents) in jobs.items():
            prepared = lambda: prepare(worker, documents, Inputs("audit"), outputs[name])  # noqa: B023, E731
            entries = clock.time(f"{name}, preparation", prepared)
            batches_of[name] = list(longest_first(entries, worker.batch_size))
        for place, pair in enumerate(zip(*batches_of.values(), strict=True)):
            both = list(zip(jobs, pair, strict=True))
            for name, batch in both[:: 1 if (number + place) % 2 else -1]:
                clock.time(name, lambda: jobs[name][0].work(batch, outputs[name]))  # noqa: B023
        if refused := [one.refused for one in outputs.values() if one.refused]:
            raise UserError(f"a document is refused: {next(iter(refused[0].values()))}")
        read = {name: output.tokens for name, output in outputs.items()}
    if len({*read.values()}) > 1:
        raise UserError(f"the tokens differ: {read}")
    seconds = {  # round 0 warms up
        name: sum(map(statistics.median, zip(*(clock.seconds[name] for clock in clocks[1:]), strict=True)))
        for name in clocks[0].seconds
    }
    whole = {name: seconds[name] + seconds[f"{name}, preparation"] for name in jobs}
    return {
        "benchmark": "scoring",
        "chats": len(made),
        "turns": TURNS,
        "tokens": read["chats"],
        "vs_plain_texts": round(whole["plain"] / whole["chats"], 3),
        "vs_plain_texts_preparation": round(seconds["plain, preparation"] / seconds["chats, preparation"], 3),
        "preparation_share": round(seconds["chats, preparation"] / whole["chats"], 4),
        "rounds": arguments.rounds,
    }


def report(
    arguments: argparse.Namespace, seconds: dict[str, float], scores: dict[str, list[torch.Tensor]], tokens: int
) -> dict[str, Any]:
    """The content of the JSON line."""

    def ratio(other: str, ours: str) -> float | None:
        return round(seconds[other] / seconds[ours], 3) if ours in seconds else None

    def spearman(ours: str) -> list[float] | None:
        if not scores[ours]:
            return None
        a, b = torch.cat(scores[ours]), torch.cat(scores["published"])
        return [round(float(spearmanr(a[:, i], b[:, i]).statistic), 4) for i in range(a.shape[1])]

    dtype = arguments.dtype or "float32"
    return {
        "benchmark": "scoring",
        "model": arguments.model,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "texts": arguments.texts,
        "tokens": tokens,
        "vs_bare_forward": ratio("bare", "ours"),
        "vs_bare_forward_all": ratio("bare", "all"),
        f"vs_one_at_a_time_{dtype}": ratio("published", "ours"),
        **({"vs_one_at_a_time_bfloat16": ratio("published", "half")} if scores["half"] else {}),
        f"spearman_{dtype}": spearman("ours"),
        **({"spearman_bfloat16": spearman("half")} if scores["half"] else {}),
        "tokens_per_s": {name: round(tokens / spent, 1) for name, spent in seconds.items()},
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


TEXTS: dict[Callable[[argparse.Namespace], dict[str, Any]], int] = {windows: 16, chats: 24}
"""Texts, or windows, of a job by default; of others 256."""


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--texts", type=int, help="texts of WikiMIA; 256, with --chats 24, and 16 windows with --windows"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="smollm2, random-1b, or a path")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="one type; default: float32, and bfloat16 where it is native"
    )
    parser.add_argument("--batch-tokens", type=int, help="padded tokens in a batch")
    parser.add_argument("--costs", action="store_true", help="of etd and camia alone")
    parser.add_argument("--windows", action="store_true", help="of texts in windows alone")
    parser.add_argument("--chats", action="store_true", help="of conversations alone")
    given = parser.parse_args()
    job = windows if given.windows else chats if given.chats else costs if given.costs else measure
    given.texts = given.texts or TEXTS.get(job, 256)
    try:
        print(json.dumps(job(given)))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
