"""`seenset status` knows a trial's folder, and exits 3 for what stopped before its end."""

from pathlib import Path

import pytest

from pipeline.errors import IncompleteError, UserError
from pipeline.store.files import Store
from pipeline.trial.progress import TrialProgress, trial_status
from tests.helpers.commands import printed


@pytest.mark.parametrize(
    ("error", "state", "code", "message"),
    [
        (IncompleteError("3 of 9 shards"), "incomplete", 3, "3 of 9 shards"),
        (UserError("no such model"), "failed", 2, "no such model"),
        (KeyboardInterrupt(), "incomplete", 130, None),
        (ValueError("odd"), "failed", 1, "ValueError: odd"),
    ],
)
def test_a_trial_that_stopped_exits_3_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, state: str, code: int, message: str | None
) -> None:
    with pytest.raises(type(error)), TrialProgress(Store(str(tmp_path)), audits=3, points=1):
        raise error
    status = trial_status(str(tmp_path))
    assert (status.state, status.exit_code, status.message) == (state, code, message)
    exit_code, out, _ = printed(capsys, "status", str(tmp_path))
    assert exit_code == 3
    assert out == f"trial {state}: audits 0/3, points 0/1\n" + (f"{message}\n" if message else "")
    assert printed(capsys, "status", str(tmp_path), "--json")[0] == 3


def test_a_trial_whose_driver_is_gone_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrialProgress(Store(str(tmp_path)), audits=1, points=1).__enter__()
    code, out, _ = printed(capsys, "status", str(tmp_path))
    assert code == 3
    assert "its driver is gone; the same command resumes" in out


def test_a_work_folder_of_trials_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work/audits/0a1b/run").mkdir(parents=True)
    code, _, error = printed(capsys, "status", str(tmp_path / "work"))
    assert code == 2
    assert error.endswith(f"or a single audit, {tmp_path}/work/audits/0a1b/run\n")
    assert "not a run directory" in printed(capsys, "status", str(tmp_path))[2]
