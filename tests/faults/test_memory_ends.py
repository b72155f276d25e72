"""The memory of a device ends in the midst of a shard: its neighbours' scores stay the bytes that they were."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_loop import process
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from tests.helpers.made_up import MakeAudit, sentence

TEXTS = [sentence(seed, 4 + seed % 23) for seed in range(40)]


def test_a_gradient_pass_that_runs_out_changes_no_score_of_another_shard(make_audit: MakeAudit, tmp_path: Path) -> None:
    settings = {"shard_bytes": 1200, "batch_tokens": 256}
    path = make_audit(TEXTS, TEXTS[:1], detectors=["loss", "gradient_norm"], resources=settings)
    config = load_config(path)
    stage, shards = plan_stages(config)[-1], make_plan(config).shards
    assert len(shards) > 3

    def scores(name: str, numbers: list[int], most: int) -> tuple[dict[int, Any], list[tuple[bool, int]]]:
        """The rows of shards that one worker finishes in this order, and the passes: whether with gradients, tokens."""
        worker, store, passes = stage.make(stage, Placement()), Store(str(tmp_path / name)), []

        def full(module: Any, args: Any, kwargs: Any) -> None:
            gradients, tokens = torch.is_grad_enabled(), kwargs["input_ids"].numel()
            if gradients and tokens > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            passes.append((gradients, tokens))

        worker.models["target"].model.model.register_forward_pre_hook(full, with_kwargs=True)
        rows = {}
        for number in numbers:
            receipt = process(stage, worker, shards[number], store)
            assert receipt.n_quarantined == 0
            rows[number] = store.read_table(receipt.data).to_pylist()
        return rows, passes

    every = list(range(len(shards)))
    whole, _ = scores("whole", every, 10**9)
    halved, passes = scores("halved", every, 120)
    assert max(tokens for gradients, tokens in passes if gradients) <= 120
    assert max(tokens for gradients, tokens in passes if not gradients) > 120
    assert scores("backwards", every[::-1], 120)[0] == halved
    for number in every:
        for row, other in zip(whole[number], halved[number], strict=True):
            assert row["loss"] == other["loss"]
            assert abs(row["gradient_norm"] / other["gradient_norm"] - 1) < 1e-5
