"""One process alone and two at once, with OpenMP threads that sleep while they wait and with those that spin.

Prints one JSON line: milliseconds of a training step and of a forward pass of one token, medians, of each policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch  # before pipeline, which sets the policy of a process that has none

from examples.models import smollm2
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model

POLICIES = {"sleep": "passive", "spin": None}  # None: as libgomp has it where nothing is set


def measure(seconds: float) -> dict[str, float]:
    """Both medians of one process that computes with all cores, in milliseconds."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = open_model(ModelConfig(**smollm2())).model
    for parameter in list(model.parameters())[-20:]:  # the last layers
        parameter.requires_grad_()
    ids = torch.randint(0, 40_000, (8, 128), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(ids, labels=ids).loss.backward()

    @torch.no_grad()
    def token() -> None:
        model(ids[:1, :1])

    return {"step": _median_ms(step, seconds), "token": _median_ms(token, seconds)}


def _median_ms(work: Callable[[], None], seconds: float) -> float:
    work()
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    return 1_000 * median(times)


def processes(count: int, policy: str | None, seconds: float) -> dict[str, float]:
    """The means over some processes that run at the same time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    command = [sys.executable, "-m", "benchmarks.threads", "--child", "--seconds", str(seconds)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return {name: sum(one[name] for one in results) / count for name in results[0]}


def main() -> None:
    """Measure alternating, and print the medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="of each kind of work")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.seconds)))
        return
    medians: dict[str, dict[str, list[float]]] = {}
    for _ in range(arguments.rounds):
        for count in (1, 2):
            for name, policy in POLICIES.items():
                for work, value in processes(count, policy, arguments.seconds).items():
                    medians.setdefault(f"{count} x {work}", {}).setdefault(name, []).append(value)
    times = {work: {name: round(median(values), 1) for name, values in of.items()} for work, of in medians.items()}
    ratios = {work: round(of["spin"] / of["sleep"], 2) for work, of in times.items()}
    print(json.dumps({"milliseconds": times, "spin / sleep": ratios, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
