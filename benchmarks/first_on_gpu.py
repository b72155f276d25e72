"""The first ten checks on a new device, in order: what each must print, what it printed, PASS or FAIL.

`python -m benchmarks.first_on_gpu`, from the root of the sources, before the first run on a kind of GPU that nobody has
tried. It needs torch and transformers, no network and no model's files, and takes about a minute. It ends with 1 at the
first failure: the later checks rest on the earlier ones. `--device cpu` does what a CPU can do and skips the rest.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.device import SHAPES, Clock, copy_model, documents, padded, random_model, scores
from benchmarks.gpu import draw
from pipeline.models.devices import cap_memory
from pipeline.models.opened import LanguageModel
from pipeline.passes.forward import forward
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.gradient import gradient_coverage, gradient_norms
from pipeline.passes.statistics import STATISTICS

Finding = tuple[bool, str]
"""Whether a check passed, and what was seen."""

MOST_SYNCHRONISATIONS = 4
"""Of a batch: each lets the device run dry."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the ten."""

    name: str
    must: str  # what it has to print
    run: Callable[[str], Finding]  # of the device
    gpu_only: bool = False


def small(device: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The tiny model; on every device with the same weights."""
    return copy_model(random_model("tiny", "cpu", torch.float32), device, dtype)


def texts() -> list[list[int]]:
    """Eight documents of 8 to 128 tokens."""
    return documents(8, 128, SHAPES["tiny"]["vocab_size"])


def sees_device(device: str) -> Finding:
    """Name, memory and abilities of the device."""
    if device == "cpu":
        return True, f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}"
    properties = torch.cuda.get_device_properties(0)
    half = torch.cuda.is_bf16_supported()
    line = (
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, capability {properties.major}.{properties.minor}"
    )
    return half, f"{line}, bfloat16 {half}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def multiplies(device: str) -> Finding:
    """A product in bfloat16 against float64, and its speed."""
    size = 4096 if device == "cuda" else 256
    left, right = (torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = left.bfloat16().double() @ right.bfloat16().double()
    product = (left.to(device, torch.bfloat16) @ right.to(device, torch.bfloat16)).double().cpu()
    error = float((product - exact).abs().max() / exact.abs().max())
    rate = Clock(device, 0.0).ceiling(size, torch.bfloat16)
    return error < 1e-2, f"{error:.1e} of the largest entry, {rate / 1e12:.3g} TFLOP/s"


def gives_logits(device: str) -> Finding:
    """Logits of the tiny model against the CPU's."""
    ids = texts()
    with torch.inference_mode():
        pair = [lm.model(padded(ids, lm.device), use_cache=False).logits.cpu() for lm in (small(device), small("cpu"))]
    largest = float((pair[0] - pair[1]).abs().max())
    return largest < 1e-3, f"{largest:.1e}"


def sweeps(device: str) -> Finding:
    """Every statistic against its definition in float64."""
    ids, lm = texts(), small(device)
    here = forward(lm, ids, STATISTICS)
    with torch.inference_mode():
        logits = lm.model(padded(ids, lm.device), use_cache=False).logits[:, :-1].double()
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    mean = (p * log_p).sum(-1)
    exact = {
        "log_prob": log_p.gather(2, padded(ids, lm.device)[:, 1:, None]).squeeze(2),
        "mean": mean,
        "variance": (p * log_p.square()).sum(-1) - mean.square(),
        "renyi_1": -mean,
        "renyi_inf": -log_p.amax(-1),
        "renyi_2": -p.square().sum(-1).log(),
    }
    tables = {"log_prob": here.log_prob, "mean": here.mean, "variance": here.variance}
    tables |= {f"renyi_{order}": table for order, table in here.renyi.items() if f"renyi_{order}" in exact}
    largest = max(float((tables[name] - exact[name])[here.mask].abs().max()) for name in exact)
    return largest < 1e-3, f"{largest:.1e}"


def ignores_neighbours(device: str) -> Finding:
    """Scores of documents in one batch against those of each alone."""
    ids, lm = texts(), small(device)
    together = scores(forward(lm, ids, STATISTICS), ids)
    alone = torch.cat([scores(forward(lm, [one], STATISTICS), [one]) for one in ids])
    largest = float((together - alone).abs().max())
    return largest < 1e-3, f"{largest:.1e}"


def differentiates(device: str) -> Finding:
    """Gradient norms by the batched method against the CPU's, which was held against autograd."""
    ids, lm, there = texts(), small(device), small("cpu")
    method = gradient_coverage(lm.model)
    norms, expected = gradient_norms(lm, ids).cpu(), gradient_norms(there, ids)
    largest = float(((norms - expected) / expected).abs().max())
    return method.method == "batched" and largest < 1e-3, f"{method.method}, {largest:.1e} {method.reason}"


def draws(device: str) -> Finding:
    """Continuations twice, and on the CPU."""
    prompts = [Prompt((number,), ids[:8], range(4)) for number, ids in enumerate(texts())]

    def tokens(lm: LanguageModel) -> list[int]:
        answers = continuations(lm, prompts, Sampling(max_new_tokens=16), 0)
        return [token for each in answers for one in each for token in one.ids]

    first, second, there = tokens(small(device)), tokens(small(device)), tokens(small("cpu"))
    same = sum(a == b for a, b in zip(first, there, strict=True)) / len(first)
    return (
        first == second and same > 0.95,
        f"twice {'the same' if first == second else 'different'}, {same:.1%} as there",
    )


def repeats(device: str) -> Finding:
    """Scores of the same batch twice, in bfloat16, to the byte."""
    ids, lm = texts(), small(device, torch.bfloat16)
    first, second = (scores(forward(lm, ids, STATISTICS), ids) for _ in range(2))
    equal = first.numpy().tobytes() == second.numpy().tobytes()
    return equal, "the same bytes" if equal else f"{float((first - second).abs().max()):.1e} apart"


def seldom_waits(device: str) -> Finding:
    """Synchronisations of a warm batch, as torch reports them."""
    ids, lm = texts(), small(device)
    forward(lm, ids, STATISTICS)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forward(lm, ids, STATISTICS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return len(lines) <= MOST_SYNCHRONISATIONS, f"{len(lines)}: {', '.join(lines)}"


def recovers_memory(device: str) -> Finding:
    """A share of the memory is a limit; what goes beyond it is an error that leaves nothing behind."""
    lm, ids = small(device), texts()
    draw(lm, ids[:1], 4), gradient_norms(lm, ids)
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    refused = False
    cap_memory(0.5)
    try:
        torch.empty(int(0.6 * total), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        refused = True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gradient_norms(lm, ids)
    left = (torch.cuda.memory_allocated() - before) / 1e6
    return refused and left < 1, f"{'refused' if refused else 'not refused'}, {left:.1f} MB left behind"


CHECKS = (
    Check("device", "the device's name and memory, and bfloat16 True", sees_device),
    Check("product", "below 1e-02 of the largest entry; the speed is beside it", multiplies),
    Check("logits", "below 1e-03: the largest difference from the CPU, float32", gives_logits),
    Check("statistics", "below 1e-03: the largest difference from float64", sweeps),
    Check("neighbours", "below 1e-03: scores of a document in a batch and alone", ignores_neighbours),
    Check("gradient norms", "batched, and below 1e-03 of the CPU's", differentiates),
    Check("draws", "twice the same, and more than 95% as on the CPU", draws),
    Check("repetition", "the same bytes of the same batch in bfloat16", repeats),
    Check("synchronisations", f"at most {MOST_SYNCHRONISATIONS} a batch, and their lines", seldom_waits, gpu_only=True),
    Check("memory", "refused beyond a share, and less than 1 MB left behind", recovers_memory, gpu_only=True),
)


def run_checks(device: str, checks: Sequence[Check] = CHECKS) -> bool:
    """Run checks in order and print a line of each, up to the first that fails; whether none did."""
    for number, check in enumerate(checks, 1):
        if check.gpu_only and device == "cpu":
            print(f"{number:2} SKIP {check.name}: needs a GPU; must be {check.must}", flush=True)
            continue
        try:
            passed, seen = check.run(device)
        except Exception as error:  # of many kinds: the check fails, and says with what
            passed, seen = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{number:2} {'PASS' if passed else 'FAIL'} {check.name}: {seen}; must be {check.must}", flush=True)
        if not passed:
            return False
    return True


def main() -> None:
    """Parse the command line, check, end with 1 at a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "torch sees no GPU here; --device cpu does what a CPU can do\n")
    sys.exit(0 if run_checks(arguments.device) else 1)


if __name__ == "__main__":
    main()
