"""What the benchmarks of a device share: random models, documents, a clock, memory and idle time.

Imports torch and transformers and nothing else, so that it runs where nothing can be installed.
"""

from __future__ import annotations

import copy
import random
import resource
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.opened import LanguageModel, use_fused_attention
from pipeline.passes.forward import TokenStatistics

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}
"""Llama-shaped models with tied heads: of SmolLM2-135M's and of Llama-3.2-1B's sizes."""

FOUR = frozenset({"log_prob", "mean", "variance"})
"""What `loss`, `zlib`, `min_k` and `min_k_plus_plus` read."""

TINY = 1e-12


class Numerals:
    """A stand-in for a tokenizer: a token's text is its number."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], **settings: Any) -> str:
        """The numbers of the ids, with blanks between them."""
        return " ".join(map(str, ids))


def random_model(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> LanguageModel:
    """A Llama with random weights, in eval mode and without gradients; no text ever ends it."""
    torch.manual_seed(seed)
    use_fused_attention(device)
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    return LanguageModel(model, Numerals(), torch.device(device), 8192)


def copy_model(lm: LanguageModel, device: str, dtype: torch.dtype) -> LanguageModel:
    """The same weights on another device or in another type."""
    model: Any = copy.deepcopy(lm.model)
    use_fused_attention(device)
    return LanguageModel(model.to(device, dtype), lm.tokenizer, torch.device(device), lm.max_tokens)


def documents(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random token ids of documents whose lengths are spread evenly, on a logarithmic scale, up to the longest."""
    rng = random.Random(seed)
    shortest = max(8, longest // 16)
    lengths = [round(shortest * (longest / shortest) ** rng.random()) for _ in range(count)]
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


def batched(ids: Sequence[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """Documents of like length together, the longest first, with at most `budget` padded tokens in a batch."""
    group: list[list[int]] = []
    for one in sorted(ids, key=len, reverse=True):
        if group and len(group[0]) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(one)
    yield group


def padded(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Right-padded ids, (documents, tokens)."""
    longest = max(map(len, ids))
    return torch.tensor([[*one, *[0] * (longest - len(one))] for one in ids]).to(device)


def scores(statistics_of: TokenStatistics, ids: Sequence[Sequence[int]]) -> Tensor:
    """`loss`, `zlib`, `min_k` and `min_k_plus_plus` as the detectors have them: (documents, 4) float64 on the CPU."""
    mask = statistics_of.mask
    assert statistics_of.mean is not None
    assert statistics_of.variance is not None
    standardised = (statistics_of.log_prob - statistics_of.mean) / statistics_of.variance.clamp_min(TINY).sqrt()
    counts = mask.sum(1)
    taken = torch.tensor([max(1, int(0.2 * (len(one) - 1))) for one in ids], device=mask.device)
    among = torch.arange(mask.shape[1], device=mask.device) < taken[:, None]

    def lowest(values: Tensor) -> Tensor:
        ordered = values.double().where(mask, torch.inf).sort(1).values
        return ordered.where(among, 0.0).sum(1) / taken

    loss = statistics_of.log_prob.double().where(mask, 0.0).sum(1) / counts
    sizes = [len(zlib.compress(Numerals().decode(one).encode(), 6)) for one in ids]
    table = [loss, loss / loss.new_tensor(sizes), lowest(statistics_of.log_prob), lowest(standardised)]
    return torch.stack(table, dim=1).cpu()


def flops(config: dict[str, Any], lengths: Sequence[int]) -> float:
    """Multiplications and additions of the matrix products of a forward pass, of a shape as in `SHAPES`.

    Padding is left out, and attention to later tokens.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = hidden * config["num_key_value_heads"] / config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
    weights = layers * layer + hidden * config["vocab_size"]
    return sum(2 * weights * length + 2 * layers * hidden * length**2 for length in lengths)


@dataclass(frozen=True, slots=True)
class Timing:
    """What runs of one job took."""

    seconds: float  # median over rounds
    rounds: int
    peak_mb: float  # most memory of tensors on the device, the model's weights among it; on a CPU of the process
    idle: float  # share of the time in which the device computed nothing


class Clock:
    """Times jobs on one device."""

    def __init__(self, device: str, deadline: float) -> None:
        """Time on "cpu" or "cuda", with one round of each job in any case and no more after the deadline."""
        self.cuda = device == "cuda"
        self.deadline = deadline

    def seconds(self, job: Callable[[], Any]) -> float:
        """Seconds until the device has done a job."""
        self.wait()
        began = time.perf_counter()
        job()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.cuda:
            torch.cuda.synchronize()

    def time_all(self, jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing | str]:
        """Time jobs in turn, round after round; of a job that needs more memory than there is, that it did."""
        spent: dict[str, list[float]] = {name: [] for name in jobs}
        peaks: dict[str, float] = {}
        failed: dict[str, str] = {}
        for number in range(rounds + 1):  # round 0 warms up
            for name, job in jobs.items():
                if name in failed or (number > 1 and time.monotonic() > self.deadline):
                    continue
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                try:
                    spent[name].append(self.seconds(job))
                except torch.OutOfMemoryError:
                    failed[name] = "out of memory"
                    torch.cuda.empty_cache()
                    continue
                peaks[name] = self.peak_mb()
        return {
            name: failed[name]
            if name in failed
            else Timing(
                statistics.median(spent[name][1:]), len(spent[name]) - 1, peaks[name], self.idle(job, spent[name])
            )
            for name, job in jobs.items()
        }

    def idle(self, job: Callable[[], Any], spent: Sequence[float]) -> float:
        """Share of a job's median time in which no kernel ran, or no thread of the CPU: from one more run of it."""
        if not self.cuda:
            busy = time.process_time()
            wall = self.seconds(job)
            return max(0.0, 1 - (time.process_time() - busy) / (wall * torch.get_num_threads()))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            job()
            self.wait()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return max(0.0, 1 - covered(spans) / 1e6 / statistics.median(spent[1:]))

    def peak_mb(self) -> float:
        """Most memory since the last job began, in MB."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 1e6
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6

    def ceiling(self, size: int, dtype: torch.dtype, products: int = 10) -> float:
        """FLOP/s of a large matrix product, the best of three trials: what the matrix units give at most here."""
        device = "cuda" if self.cuda else "cpu"
        left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        out = torch.empty_like(left)

        def job() -> None:
            for _ in range(products):
                torch.mm(left, right, out=out)

        self.seconds(job)
        return 2 * size**3 * products / min(self.seconds(job) for _ in range(3))


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def facts(device: str) -> dict[str, Any]:
    """The device and the versions, as a figure needs them beside it."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    if device == "cpu":
        return {"device": "cpu", "threads": torch.get_num_threads(), "versions": versions}
    properties = torch.cuda.get_device_properties(0)
    name, memory = properties.name, round(properties.total_memory / 1e9, 1)
    return {"device": name, "memory_gb": memory, "versions": versions}
