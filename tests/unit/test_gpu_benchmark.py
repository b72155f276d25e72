"""The scripts for a GPU run alone, with torch and transformers; what a CPU can do of them is tried here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.device import FOUR, SHAPES, Numerals, documents, flops, random_model, scores
from benchmarks.first_on_gpu import Check, run_checks
from benchmarks.roofline import MODELS, ratio, table
from pipeline.detectors.base import FORWARD, Evidence
from pipeline.detectors.registry import parse_detectors
from pipeline.passes.forward import forward

ROOT = Path(__file__).parents[2]
BARE_MACHINE = """
import importlib.util, runpy, socket, sys

MISSING = {"ray", "typer", "pydantic", "pydantic_core", "tenacity", "datasets", "gguf", "peft",
           "scipy", "sklearn", "matplotlib", "xxhash", "rich", "deepspeed", "bitsandbytes", "psutil", "hypothesis"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(*arguments):
    raise OSError("no network")

sys.meta_path.insert(0, Missing())
specification_of = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: (
    None if name.partition(".")[0] in MISSING else specification_of(name, *package)
)
socket.socket.connect = socket.getaddrinfo = refuse
for name in MISSING:
    assert name not in sys.modules, name
sys.argv = ["gpu", "--tiny"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
sys.argv = ["first_on_gpu", "--device", "cpu"]
runpy.run_module("benchmarks.first_on_gpu", run_name="__main__")
"""


@pytest.mark.slow
def test_with_torch_and_transformers_alone_and_no_network_both_scripts_run() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE_MACHINE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    first, *checks = done.stdout.splitlines()
    line: dict[str, Any] = json.loads(first)
    model = line["models"]["tiny"]
    assert line["ceiling_tflops"] > 0
    assert line["versions"]["torch"] == torch.__version__
    for job in ("bare", "four", "all", "gradient_norm", "draws", "one_at_a_time"):
        assert model[job]["tokens_per_s"] > 0
        assert 0 <= model[job]["idle"] <= 1
        assert model[job]["peak_mb"] > 0
    assert all({"ratio", "ceiling_share"} <= set(model[job]) for job in ("four", "all"))
    assert set(model["cpu_difference"]["float32"].values()) == {0.0}  # this is the CPU
    assert model["gradients"] == "batched"
    marks = [check.split()[1] for check in checks]
    assert marks == ["PASS"] * 8 + ["SKIP"] * 2
    assert all("must be" in check for check in checks)


def test_the_first_check_that_fails_ends_the_script_and_says_what_it_must_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(device: str) -> tuple[bool, str]:
        raise RuntimeError("CUDA error:\n device-side assert")

    good, wrong = Check("good", "4", lambda device: (True, "4")), Check("wrong", "below 4", lambda device: (False, "5"))
    ended = [run_checks("cpu", checks) for checks in ([good, wrong, good], [Check("broken", "4", broken)], [good])]
    assert ended == [False, False, True]
    assert capsys.readouterr().out.splitlines() == [
        " 1 PASS good: 4; must be 4",
        " 2 FAIL wrong: 5; must be below 4",
        " 1 FAIL broken: RuntimeError: CUDA error: device-side assert; must be 4",
        " 1 PASS good: 4; must be 4",
    ]


def test_the_four_scores_are_those_of_the_detectors() -> None:
    lm = random_model("tiny", "cpu", torch.float32)
    ids = documents(6, 64, SHAPES["tiny"]["vocab_size"])
    statistics = forward(lm, ids, FOUR)
    evidence = Evidence([Numerals().decode(one) for one in ids], {FORWARD: statistics})
    detectors = parse_detectors(["loss", "zlib", "min_k", "min_k_plus_plus"])
    expected = torch.stack([detector.score(evidence) for detector in detectors], dim=1)
    torch.testing.assert_close(scores(statistics, ids), expected.double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_counted_work_of_a_forward_pass_is_what_torch_counts(shape: str) -> None:
    lm = random_model(shape, "meta", torch.bfloat16)
    lm.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        mask = torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16, device="meta")  # made anew, it would be looked into
        lm.model(torch.zeros(1, 256, dtype=torch.long, device="meta"), attention_mask=mask, use_cache=False)
    config = SHAPES[shape]
    all_pairs = 2 * config["num_hidden_layers"] * config["hidden_size"] * 256**2  # eager attention skips no later token
    assert flops(config, [256]) + all_pairs == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_table_of_arithmetic_in_the_docs_is_what_the_formula_gives() -> None:
    page = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page
    section = page[: page.index(table()[0])].rpartition("\n## ")[2]
    assert "arithmetic" in section.partition("\n")[0]
    assert ratio(MODELS["8B, 128k words"], 0) == 1.0
