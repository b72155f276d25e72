"""Speed of every pass on one GPU beside a bare forward pass. Prints one JSON line; meant to end within 8 minutes.

`python -m benchmarks.gpu`, from the root of the sources. It needs torch and transformers, no network, no model's files
and nothing else of what Seenset is installed with: models of 135M and 1B parameters in bfloat16 have random weights,
and documents random tokens. `--tiny` does the same in seconds on a CPU.

Of each model, measured in turn, medians over rounds:

- tokens_per_s: of the documents' tokens without padding; of draws, new tokens. `bare` is `model(ids).logits` alone,
  `four` and `all` the statistics of four detectors and of all, with scores brought to the CPU; `one_at_a_time` one
  document after the other with separate softmaxes in float32, as published code has it.
- ratio: of tokens/s over those of `bare`, on the same batches (gradients: on batches of their own size). Batches hold
  what a run gives them: `batch_tokens`, `gradient_tokens`, `cache_positions`.
- ceiling_share: FLOP/s of the forward pass's matrix products over those of one large matrix product on this device.
- idle: share of the time in which the device runs no kernel (on a CPU: no thread).
- cpu_difference: largest difference of a score from the CPU's, with the same weights; scores are in nats and, the
  last, in standard deviations; of gradient norms the largest relative one. In bfloat16 this is rounding; `float32` is
  the sharper check.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.device import (
    FOUR,
    SHAPES,
    Clock,
    Timing,
    batched,
    copy_model,
    documents,
    facts,
    flops,
    padded,
    random_model,
    scores,
)
from pipeline.models.opened import LanguageModel
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, pass_budget, read_shape
from pipeline.passes.forward import forward
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.gradient import gradient_coverage, gradient_norms
from pipeline.passes.statistics import STATISTICS

SECONDS = 360.0
"""For all models, after which no further round begins: what has begun ends, and the CPU is compared with, after it."""

DRAWS = 10
SINGLES = 6
"""Of so many documents, one is also scored alone: each takes as many kernels as a batch."""


def bare(lm: LanguageModel, batches: Sequence[list[list[int]]]) -> None:
    """Compute the logits of every batch and nothing else."""
    with torch.inference_mode():
        for batch in batches:
            lm.model(padded(batch, lm.device), use_cache=False).logits  # noqa: B018


def score_batches(lm: LanguageModel, batches: Sequence[list[list[int]]], names: frozenset[str]) -> Tensor:
    """Scores of all documents in the order of the batches: (documents, 4) float64."""
    return torch.cat([scores(forward(lm, batch, names), batch) for batch in batches])


def one_at_a_time(lm: LanguageModel, ids: Sequence[list[int]]) -> Tensor:
    """Mean log-probability and standardised one of each document by separate softmaxes, (documents, 2) on the CPU."""
    rows = []
    with torch.inference_mode():
        for one in ids:
            tokens = torch.tensor([one], device=lm.device)
            logits = lm.model(tokens, use_cache=False).logits[0, :-1].float()
            probabilities, log_probabilities = torch.softmax(logits, -1), torch.log_softmax(logits, -1)
            log_prob = log_probabilities.gather(1, tokens[0, 1:, None]).squeeze(1)
            mean = (probabilities * log_probabilities).sum(-1)
            variance = (probabilities * log_probabilities.square()).sum(-1) - mean.square()
            standardised = (log_prob - mean) / variance.clamp_min(1e-12).sqrt()
            rows.append(torch.stack([log_prob.mean(), standardised.mean()]).cpu())
    return torch.stack(rows)


def draw(lm: LanguageModel, prompts: Sequence[list[int]], new_tokens: int, positions: int | None = None) -> int:
    """Sample ten continuations of each prompt; returns the number of new tokens."""
    requests = [Prompt((number,), ids, range(DRAWS)) for number, ids in enumerate(prompts)]
    sampling = Sampling(top_k=50, max_new_tokens=new_tokens)
    answers = continuations(lm, requests, sampling, 0, batch_tokens=positions)
    return sum(len(one.ids) for draws in answers for one in draws)


def gradients(lm: LanguageModel, batches: Sequence[list[list[int]]]) -> Tensor:
    """Gradient norms of all documents, (documents,) float64 on the CPU."""
    return torch.cat([gradient_norms(lm, batch).cpu() for batch in batches])


def cpu_difference(lm: LanguageModel, ids: Sequence[list[int]]) -> dict[str, dict[str, float]]:
    """Largest differences between this device's scores and gradient norms and the CPU's, by type of weights."""
    result = {}
    names = ("loss", "zlib", "min_k", "min_k_plus_plus")
    stored: torch.dtype = next(lm.model.parameters()).dtype
    for dtype in dict.fromkeys((stored, torch.float32)):
        here = lm if dtype is stored else copy_model(lm, lm.device.type, dtype)
        there = copy_model(lm, "cpu", dtype)
        batches = list(batched(ids, 1 << 12))
        pairs = [(score_batches(one, batches, FOUR), gradients(one, batches[-1:])) for one in (here, there)]
        (ours, our_norms), (theirs, their_norms) = pairs
        largest = (ours - theirs).abs().amax(0).tolist()
        relative = float(((our_norms - their_norms).abs() / their_norms).max())
        result[str(dtype).removeprefix("torch.")] = {
            **{name: float(f"{value:.2g}") for name, value in zip(names, largest, strict=True)},
            "gradient_norm": float(f"{relative:.2g}"),
        }
    return result


def budget(lm: LanguageModel, arguments: argparse.Namespace) -> Budget:
    """What a run gives a batch of each pass on this device, unless the command line states it."""
    sizes = CPU_BUDGET
    if lm.device.type == "cuda":
        dtype = str(next(lm.model.parameters()).dtype).removeprefix("torch.")
        sizes = pass_budget(read_shape(lm.model.config, dtype), Card(torch.cuda.mem_get_info()[1]), arguments.longest)
    forward_tokens, gradient_tokens = arguments.batch_tokens, arguments.gradient_tokens
    return Budget(forward_tokens or sizes.forward, gradient_tokens or sizes.gradient, sizes.cache)


def measure_model(shape: str, clock: Clock, ceiling: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    lm = random_model(shape, arguments.device, dtype)
    ids = documents(arguments.documents, arguments.longest, SHAPES[shape]["vocab_size"])
    sizes = budget(lm, arguments)
    batches, small = list(batched(ids, sizes.forward)), list(batched(ids, sizes.gradient))
    prompts = documents(arguments.prompts, 16, SHAPES[shape]["vocab_size"], seed=1)
    singles = ids[: -(-len(ids) // SINGLES)]
    method = gradient_coverage(lm.model)
    jobs: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(lm, batches),
        "four": lambda: score_batches(lm, batches, FOUR),
        "all": lambda: score_batches(lm, batches, STATISTICS),
        "gradient_norm": lambda: gradients(lm, small),
        "draws": lambda: draw(lm, prompts, arguments.new_tokens, sizes.cache),
        "one_at_a_time": lambda: one_at_a_time(lm, singles),
    }
    timings = clock.time_all(jobs, arguments.rounds)
    lengths = {name: [len(one) for one in (singles if name == "one_at_a_time" else ids)] for name in jobs}
    tokens = {name: sum(some) for name, some in lengths.items()}
    tokens["draws"] = len(prompts) * DRAWS * arguments.new_tokens
    result: dict[str, Any] = {"tokens": tokens["bare"], "documents": len(ids), "gradients": method.reason or "batched"}
    result |= {"batch_tokens": sizes.forward, "gradient_tokens": sizes.gradient, "cache_positions": sizes.cache}
    rates = {name: tokens[name] / timing.seconds for name, timing in timings.items() if isinstance(timing, Timing)}
    for name, timing in timings.items():
        if not isinstance(timing, Timing):
            result[name] = timing
            continue
        row: dict[str, Any] = {"tokens_per_s": round(rates[name]), "rounds": timing.rounds}
        if name != "draws" and "bare" in rates:
            row["ratio"] = round(rates[name] / rates["bare"], 3)
        if name not in ("draws", "gradient_norm"):
            work = flops(SHAPES[shape], lengths[name])
            row["ceiling_share"] = round(work / timing.seconds / ceiling, 3)
        result[name] = {**row, "idle": round(timing.idle, 3), "peak_mb": round(timing.peak_mb)}
    short = documents(4, arguments.longest // 16, SHAPES[shape]["vocab_size"], seed=2)
    result["cpu_difference"] = cpu_difference(lm, short)
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON line."""
    clock = Clock(arguments.device, time.monotonic() + arguments.seconds)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    ceiling = clock.ceiling(arguments.matrix, dtype)
    models = {}
    for number, shape in enumerate(arguments.models):
        clock.deadline = time.monotonic() + arguments.seconds / len(arguments.models)
        print(f"{number + 1} of {len(arguments.models)}: {shape}", file=sys.stderr, flush=True)
        models[shape] = measure_model(shape, clock, ceiling, arguments)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    return {
        "benchmark": "gpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **facts(arguments.device),
        "dtype": str(dtype).removeprefix("torch."),
        "ceiling_tflops": float(f"{ceiling / 1e12:.3g}"),
        "models": models,
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["135m", "1b"])
    made.add_argument("--documents", type=int, default=768)
    made.add_argument("--longest", type=int, default=1024, help="tokens of the longest document")
    made.add_argument("--batch-tokens", type=int, help="padded tokens in a batch (default: as in a run)")
    made.add_argument(
        "--gradient-tokens", type=int, help="padded tokens in a batch of gradients (default: as in a run)"
    )
    made.add_argument("--prompts", type=int, default=16, help="each with ten draws")
    made.add_argument("--new-tokens", type=int, default=64, help="of each draw")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--matrix", type=int, default=8192, help="rows and columns of the large product")
    made.add_argument("--seconds", type=float, default=SECONDS, help="after which no further round begins")
    made.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, in seconds")
    return made


TINY_SETTINGS: dict[str, Any] = {
    "device": "cpu", "models": ["tiny"], "documents": 12, "longest": 128, "batch_tokens": 512, "gradient_tokens": 256,
    "prompts": 2, "new_tokens": 4, "rounds": 1, "matrix": 256,
}  # fmt: skip


def main() -> None:
    """Parse the command line, measure, print."""
    made = parser()
    arguments = made.parse_args()
    if arguments.tiny:
        vars(arguments).update(TINY_SETTINGS)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        made.exit(2, "torch sees no GPU here; --device cpu or --tiny measures the CPU\n")
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
