"""`seenset run`: shards in, receipts out, and the same answer however it came about."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import ExitCode, IncompleteError, UserError
from pipeline.plan.description import load_config
from pipeline.results.status import run_status
from ray_jobs import start
from ray_jobs.audit import RunResult, run_audit
from ray_jobs.progress import Reporter
from tests.helpers.commands import user_error
from tests.helpers.finished import run, selection_digest
from tests.helpers.made_up import MakeAudit, sentence, write_audit, write_jsonl

Rerun = Callable[..., RunResult]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The folder of an audit that has run: tests that go on with it take a copy."""
    folder = tmp_path_factory.mktemp("audit")
    run(write_audit(folder, tiny_model_folder))
    return folder


@pytest.fixture
def finished(run_once: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """Runs the finished audit again in a copy of its run directory: (*overrides, **arguments) -> outcome."""
    shutil.copytree(run_once / "run", tmp_path / "run")
    return partial(run, run_once / "audit.yaml", f"run={tmp_path / 'run'}")


@pytest.mark.slow
def test_a_large_corpus_is_scored_beside_its_checks_and_stops_where_they_say_so(
    run_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "WAITING_TOKENS", 0)
    here = (f"run={tmp_path / 'beside'}", "resources.actors=2")
    assert run(run_once / "audit.yaml", *here).exit_code == ExitCode.DONE
    assert selection_digest(tmp_path / "beside") == selection_digest(run_once / "run")
    for file in (run_once / "run/diagnostics").iterdir():
        assert (tmp_path / "beside/diagnostics" / file.name).read_bytes() == file.read_bytes()
    both = [f"corpus.unseen.path={run_once / 'audit.jsonl'}", f"run={tmp_path / 'shared'}", "resources.actors=2"]
    with pytest.raises(UserError, match="near-duplicates"):
        run(run_once / "audit.yaml", *both)
    assert json.loads((tmp_path / "shared/status.json").read_text())["state"] == "failed"


def test_another_alpha_is_answered_without_a_word_of_damage(run_once: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_once / "run", folder)
    lines: list[str] = []
    reporter = Reporter(Console(), quiet=True)
    reporter.say = lines.append  # type: ignore[method-assign]
    config = load_config(str(run_once / "audit.yaml"), [f"run={folder}", "selections.0.alpha=0.3"])
    assert run_audit(config, reporter).exit_code == ExitCode.DONE
    assert "selecting" in lines
    assert not [line for line in lines if "damaged" in line]
    summary = folder / "selection/members/summary.json"
    summary.write_text(summary.read_text().replace('"alpha": 0.3', '"alpha": 0.1'))
    run_audit(config, reporter)
    assert [line for line in lines if "summary.json is damaged" in line]


def test_the_blind_test_before_scoring_and_that_of_the_answer_are_one_result(run_once: Path) -> None:
    (before,) = (run_once / "run/diagnostics").glob("documents-*.json")
    after = json.loads((run_once / "run/diagnostics/blind-unseen.json").read_text())
    blind = {key: after[key] for key in after if key not in ("file", "digest")}
    assert json.loads(before.read_text())["blind"]["unseen"] == blind


def test_the_manifest_says_how_gradient_norms_were_taken(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit(detectors=["loss", "min_k", "zlib", "gradient_norm"])
    for _ in range(2):
        assert run(path).exit_code == ExitCode.DONE
        found = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert (found["gradient"]["method"], found["gradient"]["quantised"]) == ("batched", 0)
        assert [each["kind"] for each in found["passes"]] == ["forward", "gradient"]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.dtype=bfloat16", "dtype: float32 then, bfloat16 now"),
        ("max_tokens=8", "max_tokens: 1024 then, 8 now"),
        ("resources.shard_bytes=999", "resources.shard_bytes 1500, now 999"),
    ],
)
def test_a_setting_that_changes_scores_is_refused_on_resume_by_name(finished: Rerun, override: str, field: str) -> None:
    assert field in user_error(finished, override)


def test_an_input_that_changed_is_refused_on_resume(finished: Rerun, run_once: Path) -> None:
    path = run_once / "audit.jsonl"
    text = path.read_text()
    path.write_text(text.replace("Text 0", "Text X"))
    line = user_error(finished)
    path.write_text(text)
    assert re.search(r"rows: .*audit-000000", line)


def test_a_damaged_file_leaves_the_other_shards_scored(make_audit: MakeAudit, tmp_path: Path) -> None:
    path, whole, cut = make_audit(), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl.gz"
    write_jsonl(whole, [sentence(i) for i in range(5000, 7000)])
    packed = gzip.compress(whole.read_bytes())
    cut.write_bytes(packed[: len(packed) * 2 // 3])
    both = f'corpus.audit.path=["{tmp_path}/audit.jsonl", "{tmp_path}/cut.jsonl.gz"]'
    with pytest.raises(IncompleteError, match=r"cut\.jsonl\.gz is damaged after row"):
        run(path, both)
    assert run_status(str(tmp_path / "run")).state == "incomplete"
    cut.write_bytes(gzip.compress(b"".join(whole.read_bytes().splitlines(keepends=True)[:5])))
    assert run(path, both).status.documents == 105


def test_a_sample_says_that_it_is_one_and_cannot_be_mixed_with_the_whole(make_audit: MakeAudit, tmp_path: Path) -> None:
    path = make_audit()
    outcome = run(path, limit=20)
    assert outcome.status.documents == 40
    assert outcome.selections[0].limit == 20
    assert "sample" in (tmp_path / "run/report/report.html").read_text().lower()
    with pytest.raises(UserError, match="--limit 20"):
        run(path)


def test_a_model_that_gives_nan_selects_nothing_and_says_why(
    make_audit: MakeAudit, tiny_model_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nan-model"
    shutil.copytree(tiny_model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = make_audit(model={"path": str(folder)})
    with pytest.raises(UserError, match="documents of stage score so far failed with one message: not a finite number"):
        run(path)
    with pytest.raises(UserError, match="no calibration documents"):
        run(path, "error_budget=1")
