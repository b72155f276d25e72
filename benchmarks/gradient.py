"""Speed of exact gradient norms beside one backward pass a document. Prints one JSON line.

Measured in one run, alternating, medians over rounds: on a shared machine only ratios mean anything.

- speedup_64, speedup_128: documents/s of a batch over those of one forward and backward pass a document, whose
  gradients are summed up and freed, for WikiMIA texts cut to so many tokens.
- bound_64, bound_128: the same ratio for a batch's forward pass and its backward pass by activations alone, which
  every exact method has to run and which gives no norm yet.
- agreement: the largest relative difference between the two methods, where both add up squares in float64.
- peak_ratio: peak memory beyond the loaded model, at 128 tokens, over that of a plain forward and backward pass of the
  same batch with the gradients of all parameters. Each in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import transformers
from torch.nn import functional

from benchmarks.scoring import load, pad, wikimia
from pipeline.errors import UserError
from pipeline.models.load import LanguageModel
from pipeline.models.tokens import tokenize
from pipeline.passes.gradient import gradient_coverage, gradient_norms

LENGTHS = (64, 128)
TEXTS = 400  # of WikiMIA, among which to find long ones


def backward(lm: LanguageModel, ids: list[list[int]]) -> None:
    """One plain forward and backward pass; the gradients stay on the parameters."""
    padded = pad(ids, lm.device)
    logits = lm.model(input_ids=padded, use_cache=False).logits[:, :-1].float()
    functional.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten()).backward()


def by_activations(lm: LanguageModel, ids: list[list[int]]) -> None:
    """A forward pass, and a backward pass that gives no parameter's gradient."""
    padded = pad(ids, lm.device)
    leaf = lm.model.get_input_embeddings()(padded).requires_grad_()
    logits = lm.model(inputs_embeds=leaf, use_cache=False).logits[:, :-1].float()
    torch.autograd.grad(functional.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten()), leaf)


def one_at_a_time(lm: LanguageModel, ids: list[list[int]], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gradient norms by one plain backward pass a document, (documents,) float64; squares are added in `dtype`."""
    parameters = list(lm.model.parameters())
    document_norms = []
    for parameter in parameters:
        parameter.requires_grad_(True)
    for document in ids:
        backward(lm, [document])
        norms = torch.stack([torch.linalg.vector_norm(p.grad, dtype=dtype) for p in parameters if p.grad is not None])
        document_norms.append(torch.linalg.vector_norm(norms).double())
        for parameter in parameters:
            parameter.grad = None
    for parameter in parameters:
        parameter.requires_grad_(False)
    return torch.stack(document_norms)


def seconds(job: Callable[[], Any]) -> float:
    """Seconds that a job takes."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def batch(lm: LanguageModel, documents: int, length: int) -> list[list[int]]:
    """Token ids of the first texts that are long enough, cut to one length."""
    ids = [tokens.ids for tokens in tokenize(lm.tokenizer, wikimia(TEXTS), length)]
    long_enough = [one for one in ids if len(one) == length][:documents]
    if len(long_enough) < documents:
        raise UserError(f"{len(long_enough)} of {TEXTS} texts have {length} tokens; --documents asks for {documents}")
    return long_enough


def peak_mb(side: str, arguments: argparse.Namespace) -> float:
    """Most resident memory beyond the loaded model while a batch of 128 tokens goes through it, in MiB."""
    lm = load(arguments.model, "cpu", "float32")
    ids = batch(lm, arguments.documents, 128)
    gradient_coverage(lm.model)
    gc.collect()
    process, done, peak = psutil.Process(), threading.Event(), 0
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if side == "plain":
        lm.model.requires_grad_(True)
        backward(lm, ids)
    else:
        gradient_norms(lm, ids)
    done.set()
    watcher.join()
    return (peak - before) / 2**20


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON line."""
    options = [f"--model={arguments.model}", f"--documents={arguments.documents}"]
    peaks = {}
    for side in ("ours", "plain"):
        command = [sys.executable, "-m", "benchmarks.gradient", f"--peak={side}", *options]
        peaks[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lm = load(arguments.model, "cpu", "float32")
    speedups, bounds, milliseconds, agreement = {}, {}, {}, 0.0
    for length in LENGTHS:
        ids = batch(lm, arguments.documents, length)
        gradient_norms(lm, ids[:2])
        one_at_a_time(lm, ids[:1])
        jobs: dict[str, Callable[[], Any]] = {
            "ours": partial(gradient_norms, lm, ids),
            "bound": partial(by_activations, lm, ids),
            "theirs": partial(one_at_a_time, lm, ids),
        }
        spent: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(arguments.rounds):
            for name, job in jobs.items():
                spent[name].append(seconds(job))
        ours, bound, theirs = (statistics.median(spent[name]) for name in jobs)
        expected = one_at_a_time(lm, ids, torch.float64)
        agreement = max(agreement, ((gradient_norms(lm, ids) - expected).abs() / expected).max().item())
        speedups[f"speedup_{length}"] = round(theirs / ours, 2)
        bounds[f"bound_{length}"] = round(theirs / bound, 2)
        milliseconds[str(length)] = round(1000 * ours / len(ids), 1)
    return {
        "benchmark": "gradient",
        "model": arguments.model,
        "device": platform.machine(),
        **speedups,
        **bounds,
        "agreement": float(f"{agreement:.2g}"),
        "peak_ratio": round(peaks["ours"] / peaks["plain"], 2),
        "peak_mb": {side: round(value) for side, value in peaks.items()},
        "ms_per_document": milliseconds,
        "documents": arguments.documents,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=16, help="documents in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2", help="smollm2, random-1b, or a path")
    parser.add_argument("--peak", choices=["ours", "plain"], help="only this peak, in MiB")
    arguments = parser.parse_args()
    try:
        print(json.dumps(measure(arguments)) if arguments.peak is None else peak_mb(arguments.peak, arguments))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
