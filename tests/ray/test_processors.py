"""Two nodes whose processors differ: one decides the type for both, and the other is named."""

from pathlib import Path

import pytest
import torch

from pipeline.models.weight_dtypes import FLAGS_VARIABLE
from pipeline.run.manifest import read_run
from pipeline.store.files import Store
from tests.helpers.made_up import MakeAudit
from tests.helpers.two_nodes import on_two_nodes

pytestmark = pytest.mark.floating_point


@pytest.mark.slow
def test_nodes_that_differ_score_in_one_type_and_are_named(
    tmp_path: Path, tiny_model_folder: Path, make_audit: MakeAudit
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).to(torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(half)
    audit = make_audit(model={"path": str(half)}, resources={"cluster": "ray", "actors": 4})
    decided = {"avx2": "float32", "avx2 avx512f avx512_bf16": "bfloat16"}
    nodes = [{"env_vars": {FLAGS_VARIABLE: words}, "num_cpus": 2} for words in decided]
    ((code, out, err),) = on_two_nodes(*nodes, ["ray_jobs.cli", "run", str(audit)])

    assert code == 0, err
    warnings = [line for line in out.splitlines() if "its CPU has other flags" in line]
    assert len(warnings) == 1
    manifest, _ = read_run(Store(str(audit.parent / "run")))
    wanted = next(words for words in decided if f"not {words})" in warnings[0])
    assert manifest.fingerprint["dtype"] == decided[wanted]
