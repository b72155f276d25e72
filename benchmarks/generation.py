"""Speed of sampled continuations beside transformers' `generate`. Prints one JSON line.

Everything is measured in one run, alternating, and reported as medians: on a shared machine only ratios mean anything.
Ratios are of new tokens a second; nothing ends before its last token, so that all do the same work. On a CPU each
ratio comes a second time by CPU seconds, which other programs disturb less.

- vs_num_return_sequences: prompts of 128 tokens, 10 draws each, against `generate(num_return_sequences=10)` on the
  same batch of prompts; `_one_prompt` against a call for each prompt, as published code has it.
- vs_one_call_a_draw: prefixes of 64 tokens, 10 draws each, against a call of `generate` for each draw. A call
  costs what the one before it cost, so 3 of them are timed.
- endpoint: the client against a local stub that answers after 200 ms, 64 requests at a time: its share of the 320
  requests a second that this allows, and how much its memory grows from the first fifth of the requests to the last.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.endpoint import measure_client
from benchmarks.scoring import load, wikimia
from benchmarks.small_model import fast_type
from pipeline.errors import UserError
from pipeline.models.load import LanguageModel
from pipeline.models.tokens import tokenize
from pipeline.passes.generate import Prompt, Sampling, continuations

DRAWS = 10
LONG, SHORT = 128, 64  # tokens of a prompt
CALLS = 3
TOP_K = 50


def without_eos(lm: LanguageModel) -> LanguageModel:
    """Remove the EOS from the model and its tokenizer, so that every draw runs to its limit."""
    model: Any = lm.model
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = lm.tokenizer.pad_token_id or 0
    lm.tokenizer.eos_token = None
    return lm


def ours(lm: LanguageModel, ids: Sequence[list[int]], new_tokens: int) -> int:
    """Make all draws of all prompts; returns the number of new tokens."""
    prompts = [Prompt((number,), each, range(DRAWS)) for number, each in enumerate(ids)]
    answers = continuations(lm, prompts, Sampling(top_k=TOP_K, max_new_tokens=new_tokens), 0)
    return sum(len(draw.ids) for draws in answers for draw in draws)


def theirs(lm: LanguageModel, ids: Sequence[list[int]], new_tokens: int, sequences: int) -> int:
    """Make one call of `generate` and decode its texts; returns the number of new tokens."""
    prompts = torch.tensor(ids, device=lm.device)
    model: Any = lm.model
    with torch.inference_mode():
        new_ids: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=TOP_K,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=new_tokens,
            num_return_sequences=sequences,
        )[:, prompts.shape[1] :]
    lm.tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return new_ids.numel()


def rates(lm: LanguageModel, job: Callable[[], int]) -> tuple[float, float]:
    """New tokens of a job, per second of the clock and per CPU second of this process."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    began, busy = time.perf_counter(), time.process_time()
    tokens = job()
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - busy)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every job once a round, alternating, and take medians."""
    dtype = arguments.dtype or fast_type(arguments.device)
    lm = load(arguments.model, arguments.device, dtype)
    token_ids = [tokens.ids for tokens in tokenize(lm.tokenizer, wikimia(1024), LONG)]
    long = [ids for ids in token_ids if len(ids) == LONG][: arguments.prompts]
    short = [ids[:SHORT] for ids in long]
    lm, new = without_eos(lm), arguments.new_tokens
    jobs: dict[str, Callable[[], int]] = {
        "ours_long": lambda: ours(lm, long, new),
        "num_return_sequences": lambda: theirs(lm, long, new, DRAWS),
        "num_return_sequences_one_prompt": lambda: theirs(lm, long[:1], new, DRAWS),
        "ours_short": lambda: ours(lm, short, new),
        "one_call_a_draw": lambda: sum(theirs(lm, short[:1], new, 1) for _ in range(CALLS)),
    }
    ours(lm, long[:1], 2), theirs(lm, long[:1], 2, 2)
    rounds = [{name: rates(lm, job) for name, job in jobs.items()} for _ in range(arguments.rounds)]

    def ratios(clock: int) -> dict[str, float]:
        pairs = {
            name: "ours_short" if name == "one_call_a_draw" else "ours_long" for name in jobs if "ours" not in name
        }
        return {
            f"vs_{other}": round(statistics.median(each[job][clock] / each[other][clock] for each in rounds), 3)
            for other, job in pairs.items()
        }

    return {
        "benchmark": "generation",
        "model": arguments.model,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "prompts": len(long),
        "draws": DRAWS,
        "new_tokens": new,
        **ratios(0),
        **({"by_cpu_seconds": ratios(1)} if arguments.device == "cpu" else {}),
        "tokens_per_s": {name: round(statistics.median(each[name][0] for each in rounds), 1) for name in jobs},
        "endpoint": measure_client(arguments.requests),
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32, help="of each draw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6400, help="to the stub of an endpoint")
    parser.add_argument("--model", default="smollm2", help="smollm2, random-1b, or a path")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: what dtype auto takes")
    try:
        print(json.dumps(measure(parser.parse_args())))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
