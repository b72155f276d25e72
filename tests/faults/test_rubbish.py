"""Rubbish in a file of the run directory: one line that names it, or healed; never a traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest
from stores import RUBBISH

from pipeline.errors import UserError
from pipeline.store.attempts import AttemptLog, interrupted_work
from pipeline.store.files import Store
from tests.helpers.commands import ended
from tests.helpers.made_up import write_audit


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The audit.yaml of a finished run."""
    path = write_audit(tmp_path_factory.mktemp("finished"), tiny_model_folder, 20, 9)
    assert ended("run", str(path), "--json") == 0
    return path


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_a_damaged_attempt_log_counts_as_none(tmp_path: Path, rubbish: bytes) -> None:
    store = Store(str(tmp_path))
    store.write("attempts/score/one.json", rubbish)
    assert interrupted_work(store, "score", "local") == set()
    log = AttemptLog(store, "score/one", "one.jsonl", "local")
    assert (log.record.starts, log.record.deaths) == (1, {})
    assert interrupted_work(store, "score", "local") == {"one"}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
@pytest.mark.parametrize("name", ["status.json", "manifest.json", "shards.json"])
def test_rubbish_in_a_file_of_a_run_is_one_line_that_names_it(
    finished: Path, tmp_path: Path, name: str, rubbish: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.parent / "run", run)
    (run / name).write_bytes(rubbish)
    absent = name != "status.json" and rubbish == b"null"
    code = ended("status", str(run))
    errors = capsys.readouterr().err
    if name == "status.json" and rubbish == b"null":
        assert (code, errors) == (3, "")  # as where there is none: not known to be complete
        return
    assert (code, errors.count("\n")) == (2, 1), errors
    assert (name in errors) or absent


def test_a_run_heals_rubbish_and_states_what_it_writes_again(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = finished.parent / "run"
    (run / "attempts/score").mkdir(parents=True, exist_ok=True)
    kept = {
        run / name: (run / name).read_bytes()
        for name in ("manifest.json", "shards.json", "selection/members/summary.json")
    }
    for name, *others in (("manifest.json", "status.json", "attempts/score/audit-000000.json"), ("shards.json",)):
        for rubbish in (name, *others):
            (run / rubbish).write_bytes(b"[" * 20_000)
        assert ended("run", str(finished)) == 0
        assert json.loads((run / "status.json").read_bytes())["state"] == "complete"
        assert re.search(rf"{run}/{name} is damaged: .*[:;] it is written again", caplog.text)
    (run / "shards.json").unlink()
    assert ended("run", str(finished)) == 0
    assert "shards.json is missing" in caplog.text
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    with pytest.raises(UserError, match=r"^cannot read [^\n]*status\.json: Is a directory$"):
        Store(str(tmp_path)).read_json("status.json")
