"""A finished run that has nothing to do says so from a handful of requests, and sees whatever has changed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import MakeAudit
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.audit.records import FINISHED_FILE
from pipeline.errors import UserError
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


CHANGES: list[tuple[str, Callable[[bytes], bytes] | None]] = [
    ("scores/*.parquet", lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:]),
    ("receipts/score/*.json", None),
    ("selection/members/selected.parquet", None),
    ("report/report.html", lambda data: b"another"),
    (FINISHED_FILE, lambda data: b"{"),
    (FINISHED_FILE, lambda data: b'{"schema": 2}'),
]


def test_whatever_was_changed_in_a_finished_run_is_seen(
    make_audit: MakeAudit, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny_model_folder, model)
    path = make_audit(model={"path": str(model)})
    first, stood = audited(path, capsys)
    assert not stood
    before = state_of(folder)
    assert audited(path, capsys) == (first, True)
    assert state_of(folder) == before, "no file is written"
    for name, change in CHANGES:
        file = next(folder.glob(name))
        file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))
        again, stood = audited(path, capsys)
        assert not stood, name
        assert again.selections == first.selections
        assert (folder / "report/report.html").stat().st_size > 1000
        assert audited(path, capsys)[1], name
    (model / "tokenizer_config.json").open("a").write(" ")
    with pytest.raises(UserError):
        audited(path, capsys)


@pytest.mark.slow
def test_other_questions_inputs_and_flags_are_answered_anew(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
