"""A run directory of an earlier version is read, or refused in one line that names the version and what to run."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from answers import decisions
from command import done, here

import seenset as interface

FILED = Path(__file__).with_name("expected") / "run-0.9.0.tar.gz"
REMADE = "(version 0.9.0 wrote no digests): seenset select {run} makes the answer again from the scores"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 40 audited and 60 unseen documents, beside its configuration and corpus; the model is not there."""
    with tarfile.open(FILED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_answers_are_stated_once_they_are_made_again(run: Path, tmp_path: Path) -> None:
    filed = json.loads((run / "selection/members/summary.json").read_text())
    shutil.copytree(run, tmp_path / "other")
    readers = [
        ("status", run),
        ("report", run),
        ("verdict", run),
        ("export", run, "--list"),
        ("compare", run, tmp_path / "other"),
    ]
    for command in readers:
        ended = here(*command)
        assert (ended.code, ended.line.endswith(REMADE.format(run=run))) == (2, True), command
    done(here("select", run))
    done(here("select", tmp_path / "other"))
    for command in readers:
        done(here(*command))
    made = json.loads((run / "selection/members/summary.json").read_text())
    for name in ("n_audit", "n_selected", "alpha", "procedure", "threshold"):
        assert made[name] == filed[name]


def test_another_question_needs_no_model(run: Path) -> None:
    done(here("select", run, "--set", "selections.*.alpha=0.9"))
    assert json.loads((run / "selection/members/summary.json").read_text())["alpha"] == 0.9


def test_scores_of_two_versions_do_not_mix(run: Path, world: Path) -> None:
    ended = here("run", "audit.yaml")
    assert (ended.code, "no model at model" in ended.line) == (2, True)
    shutil.copytree(world / "model", "model")
    for command in (("run", "audit.yaml"), ("run", "audit.yaml", "--set", "seed=7")):
        ended = here(*command)
        assert ended.code == 2
        assert "holds the work of seenset 0.9.0" in ended.line
        assert ended.line.endswith("use another run directory")
    assert json.loads((run / "status.json").read_text())["state"] in ("complete", "failed")


def test_documents_are_not_tried_again_where_none_is_in_quarantine(run: Path) -> None:
    assert "nothing to try again" in done(here("retry", run)).out


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def as_schema_1(run: Path) -> None:
    """Make the answers of a run those of schema 1: no places in the verdicts, no digest of the scores."""
    for file in (run / "selection").glob("*/digests.json"):
        digests = json.loads(file.read_text())
        for name in digests["files"]:
            if "/documents/" in name:
                verdicts = pq.read_table(run / name)
                pq.write_table(verdicts.drop_columns(["source", "row"]), run / name)
                digests["files"][name] = digest_of((run / name).read_bytes())
        del digests["scores"], digests["digest"]
        digests["schema"] = 1
        own = digest_of(json.dumps(digests, sort_keys=True).encode())
        file.write_text(json.dumps({**digests, "digest": own}))


@pytest.fixture
def schema_1(finished: Path, tmp_path: Path) -> Path:
    """The configuration of a finished run of schema 1, which lies in the folder `run` beside it."""
    done(here("verdict", tmp_path / "run"))
    as_schema_1(tmp_path / "run")
    return finished


def test_answers_of_schema_1_are_refused_by_readers_until_they_are_made_again(schema_1: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run, other)
    version = done(here("--version")).out.split()[1]
    items = tmp_path / "items.parquet"
    pq.write_table(pq.read_table(run / "selection/clean/selected.parquet", columns=["doc_id"]), items)
    readers = [
        ("status", run),
        ("status", run, "--watch"),
        ("report", run),
        ("verdict", run),
        ("export", run, tmp_path / "list", "--list", "--selection", "storey"),
        ("export", run, tmp_path / "rest", "--keep", "rest", "--selection", "storey"),
        ("compare", run, other, "--selection", "storey"),
        ("joint", run, other, "--selection", "storey"),
        ("rank", items, "--run", run, "--selection", "clean"),
    ]
    for command in readers:
        ended = here(*command)
        assert ended.code == 2, command
        assert f"digests.json was written by seenset {version} in form 1, and this version reads form 2" in ended.line
        assert ended.line.endswith(f": seenset select {run} makes the answer again from the scores"), command
    with pytest.raises(interface.UserError, match=f"in form 1.*: seenset select {run} makes the answer again"):
        interface.open_run(run)
    assert not (tmp_path / "list").exists()
    assert not (tmp_path / "rest").exists()
    before = decisions(run)
    for folder in (run, other):
        done(here("select", folder))
    for command in readers[:6]:
        done(here(*command))
    made = decisions(run)
    assert {name for name in before if not name.endswith("evidence.parquet")} == made.keys()  # run reads tokens again
    verdicts = {name for name in made if "/documents/" in name}
    assert {name for name in made if made[name] != before[name]} == verdicts
    assert interface.open_run(run).selections["storey"].documents().column_names[-2:] == ["source", "row"]


@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_run_of_schema_1_makes_its_answers_again_without_scoring(
    schema_1: Path, tmp_path: Path, command: str
) -> None:
    run = tmp_path / "run"
    scores = {file: file.stat().st_mtime_ns for file in (run / "scores").iterdir()}
    before = decisions(run)
    done(here("plan", schema_1))
    assert "nothing to try again" in done(here("retry", run)).out
    if command == "run":
        ended = done(here("run", schema_1))
        assert (
            "in form 1, and this version reads form 2; the answer is made again from the scores"
            in ended.out + ended.err
        )
    else:
        interface.audit(schema_1, quiet=True)
    assert {file: file.stat().st_mtime_ns for file in (run / "scores").iterdir()} == scores
    assert {json.loads(file.read_text())["schema"] for file in run.glob("selection/*/digests.json")} == {2}
    made = decisions(run)
    assert made.keys() == before.keys()
    assert {name for name in made if made[name] != before[name]} == {name for name in made if "/documents/" in name}
    done(here("status", run))
