"""A finished run that has nothing to do says so from a handful of requests, and sees whatever has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.audit.plan import FINISHED_FILE
from ray_jobs.audit import Outcome, run_audit
from ray_jobs.progress import Reporter
from ray_jobs.select import select_again


def audited(path: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> tuple[Outcome, bool]:
    """How a run ended, and whether its earlier answers stood."""
    overrides = flags.pop("overrides", ())
    capsys.readouterr()
    outcome = run_audit(load_config(str(path), overrides), Reporter(Console(stderr=True)), **flags)
    return outcome, "nothing has changed since" in capsys.readouterr().err.replace("\n", " ")


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_finished_run_is_answered_without_a_file_being_written(
    make_audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit()
    first, stood = audited(path, capsys)
    assert not stood
    before = state_of(tmp_path / "run")
    second, stood = audited(path, capsys)
    assert stood
    assert state_of(tmp_path / "run") == before
    assert second == first


def _a_score_file(run: Path) -> None:
    file = next((run / "scores").iterdir())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _a_receipt(run: Path) -> None:
    next((run / "receipts" / "score").iterdir()).unlink()


def _an_answer(run: Path) -> None:
    (run / "selection" / "members" / "selected.parquet").unlink()


def _the_report(run: Path) -> None:
    (run / "report" / "report.html").write_text("another")


def _the_record(run: Path) -> None:
    (run / FINISHED_FILE).write_text("{")


def _the_record_of_another_version(run: Path) -> None:
    (run / FINISHED_FILE).write_text('{"schema": 2}')


def _the_model(run: Path) -> None:
    config = run.parent / "model" / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")


@pytest.mark.parametrize(
    "change",
    [
        _a_score_file,
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in (
                _a_receipt,
                _an_answer,
                _the_report,
                _the_record,
                _the_record_of_another_version,
                _the_model,
            )
        ),
    ],
)
def test_whatever_was_changed_in_a_finished_run_is_seen(
    make_audit: Callable[..., Path],
    tmp_path: Path,
    tiny_model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    path = make_audit(model={"path": str(tmp_path / "model")})
    first, _ = audited(path, capsys)
    change(tmp_path / "run")
    try:
        second, stood = audited(path, capsys)
    except Exception:  # it is refused in one line: other tests say how
        return
    assert not stood
    assert second.selections == first.selections
    assert (tmp_path / "run" / "report" / "report.html").stat().st_size > 1000
    assert audited(path, capsys)[1]


@pytest.mark.slow
def test_other_questions_inputs_and_flags_are_answered_anew(
    make_audit: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_audit()
    audited(path, capsys)
    outcome, stood = audited(path, capsys, overrides=["selections.0.alpha=0.3"])
    assert not stood
    assert outcome.selections[0].alpha == 0.3
    assert not audited(path, capsys)[1]
    assert not audited(path, capsys, texts=False)[1]
    assert not audited(path, capsys)[1]
    select_again(str(tmp_path / "run"), ["selections.0.alpha=0.25"])
    outcome, stood = audited(path, capsys)
    assert not stood
    assert outcome.selections[0].alpha == 0.2
