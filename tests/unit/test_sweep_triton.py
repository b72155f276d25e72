"""The Triton kernel gives the statistics of the present sweep, compiles for GPUs, and is left out where it cannot run.

No GPU is needed: Triton interprets its kernels on the CPU (`interpreted_sweep.py`, in a process of its own, since
Triton decides at its import), and it compiles them for a GPU that is not there.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from architectures import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.load import LanguageModel
from pipeline.models.opened import Tail
from pipeline.passes import forward as module
from pipeline.passes.forward import STATISTICS, forward, multiplies_into_float32, proven_kernel

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it is in the dev extra")


@pytest.mark.slow
@needs_triton
def test_the_kernel_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "interpreted_sweep.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"\b[4-9]\d passed", run.stdout), run.stdout[-500:]
    assert "skipped" not in run.stdout


@needs_triton
@pytest.mark.parametrize(("capability", "dtype"), [(75, "fp16"), (80, "fp32"), (90, "bf16")])
def test_the_kernel_compiles_for_a_gpu_reads_128_bits_at_a_time_and_spills_nothing(capability, dtype):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pipeline.passes.sweep_triton import BLOCK, _sweep_row

    names = _sweep_row.arg_names
    kinds = [f"*{dtype}", "*i64", "*fp32", *["i32"] * 3, *["fp32"] * 2, *["constexpr"] * 8]
    constants = {(at,): value for at, value in enumerate([True] * 7 + [BLOCK], start=8)}
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 2, 4, 5)}  # pointers, columns and stride
    source = ASTSource(_sweep_row, dict(zip(names, kinds, strict=True)), constants, aligned)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    code = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in code
    assert ".f64" not in code
    assert "ld.local" not in code
    assert compiled.asm["cubin"]


def test_a_cpu_has_no_use_for_the_kernel_nor_for_products_in_float32(caplog):
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval().bfloat16()
    forward(LanguageModel(model, None, torch.device("cpu"), None), [[1, 2, 3]], STATISTICS)
    assert not caplog.records
    assert proven_kernel(torch.zeros(1, 9), STATISTICS, 1.0, None, lambda *_: {}) is None
    assert not any(multiplies_into_float32(torch.device(kind), torch.bfloat16) for kind in ("cpu", "meta"))


def test_logits_of_half_precision_weights_are_float32_where_torch_can(monkeypatch):
    monkeypatch.setattr(module, "multiplies_into_float32", lambda device, dtype: dtype == torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        head = torch.nn.Linear(8, 50, dtype=dtype, device="meta")
        apply = module._head(head.requires_grad_(False))
        for rows in (7, 5):
            logits = apply(torch.empty(rows, 8, dtype=dtype, device="meta"))
            assert (logits.dtype, logits.shape) == (torch.float32, (rows, 50))


def test_tiles_of_any_dtype_give_one_row_of_statistics_each(monkeypatch):
    monkeypatch.setattr(module, "TILE_ELEMENTS", {"cpu": 300, "cuda": 0})
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(7)
    tail = Tail(torch.nn.Identity(), torch.nn.Identity(), 0.5, 2.0)
    swept = module._swept(logits.clone(), targets, STATISTICS, tail)
    expected = module._sweep(tail.finish(logits.double()), targets, STATISTICS)
    for name in STATISTICS:
        torch.testing.assert_close(swept[name].double(), expected[name], rtol=1e-4, atol=1e-5)
