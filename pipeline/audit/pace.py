"""How long a forward pass takes on this machine, guessed from a moment of the model's shape: no weights are read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from pipeline.config.models import ModelConfig
from pipeline.models.load import LanguageModel, open_made_up
from pipeline.passes.forward import forward
from pipeline.report.wording.setup import MATRIX_PRODUCT, some_layers

PASS_SECONDS = 0.15  # of one measured pass, about
REPEATS = 3  # after one that warms up
SLOW_SECONDS = 0.6  # of passes, after which no more are measured
SOME = 3  # layers that are built
LONGEST, FEWEST = 512, 32  # tokens of a document, tokens of a batch
BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
MOST_BYTES = 3 << 30  # of made-up weights


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a token in a forward pass."""

    seconds: float  # > 0
    source: str  # what was measured, to be read after "from"


def measure_pace(config: ModelConfig, dtype: str, parameters: int, length: float, statistics: frozenset[str]) -> Pace:
    """Measure a forward pass of a model with made-up weights and 1 and 3 of its layers, and extend it to all of them.

    On a CPU it is measured on one thread, which other work on the machine disturbs least, and taken to be as much
    faster on all of them as a matrix product is. Where that takes too much memory or time, or the shape cannot be
    built, as of a quantised model: 2 floating-point operations a parameter and token, at the speed of a matrix product,
    halved for all that is not a matrix product.

    Args:
        config: of the model.
        dtype: of its weights, such as float32.
        parameters: of the model.
        length: tokens of a document, on average.
        statistics: that the pass measures, of `passes.statistics.STATISTICS`.
    """
    threads = torch.get_num_threads()
    speed = measured_flops(dtype)
    try:
        torch.set_num_threads(1)
        single = speed if torch.cuda.is_available() else measured_flops(dtype)
        rough = Pace(2 * parameters / (max(single, speed) / 2), MATRIX_PRODUCT)
        if config.quantization is not None:
            return rough
        pace = _of_layers(config, dtype, parameters, single / 2, length, statistics)
        return rough if pace is None else replace(pace, seconds=pace.seconds / max(1.0, speed / single))
    except Exception:  # a model's code may need what made-up weights do not give; its real faults show at load
        return rough
    finally:
        torch.set_num_threads(threads)


def _of_layers(
    config: ModelConfig, dtype: str, parameters: int, speed: float, length: float, statistics: frozenset[str]
) -> Pace | None:
    """The pace by layers; None where 3 of them are too many to measure here."""
    made_up = open_made_up(config, dtype, SOME, MOST_BYTES)
    if made_up is None:
        return None
    lm, some, total = made_up
    share = sum(parameter.numel() for parameter in lm.model.parameters()) / parameters
    each = 2 * share * parameters / speed
    tokens = max(FEWEST, min(BATCH_TOKENS[lm.device.type], int(PASS_SECONDS / each)))
    if tokens * each > SLOW_SECONDS:
        return None
    size = max(2, min(LONGEST, round(length), tokens))
    ids = [[1] * size for _ in range(max(1, tokens // size))]
    seconds = _seconds(lm, ids, statistics)
    source = some_layers(some, total)
    by_size = seconds / share
    if some > 1 and (single := open_made_up(config, dtype, 1, MOST_BYTES)) is not None:
        layer = (seconds - _seconds(single[0], ids, statistics)) / (some - 1)
        return Pace(
            max(seconds + (total - some) * layer, by_size / 2) / (size * len(ids)), source
        )  # layer may be noise
    return Pace(by_size / (size * len(ids)), source)


def _seconds(lm: LanguageModel, ids: list[list[int]], statistics: frozenset[str]) -> float:
    """The time of a pass, the best of a few after one that warms up."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= REPEATS and sum(times) < SLOW_SECONDS):
        began = time.perf_counter()
        forward(lm, ids, statistics).log_prob.sum().item()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measured_flops(dtype: str) -> float:
    """Floating-point operations a second of one matrix product on this machine, the median of a few."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 768
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype, torch.float32), device=device)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / median(times)
