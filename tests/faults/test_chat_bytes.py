"""An audit of chats gives the same bytes after a kill, and for any number of workers of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers import chat_templates as templates
from tests.helpers.chat_runs import chat, chat_audit, save_chat_model, talks
from tests.helpers.commands import ended
from tests.helpers.made_up import sentence, write_corpus

PATIENCE = 240.0
THOUGHT = "<think>\nLet me see\n</think>\n\n"


@pytest.fixture(scope="module")
def given(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configuration of an audit of chats in many shards, with a bad one and one that the template shortens."""
    folder = tmp_path_factory.mktemp("chats")
    model = save_chat_model(tiny_model_folder, folder / "model", templates.QWEN)
    odd = [{"messages": chat("no answer")}, {"messages": chat("Why?", f"{THOUGHT}So.", "And?", sentence(1, 40))}]
    rows = {"audit": [*talks(0, 40), *odd, *talks(100, 40)], "unseen": talks(300, 60)}
    corpus = write_corpus(folder, rows, messages="messages")
    return chat_audit(model, corpus, error_budget=0.5, detectors=["loss", "zlib", "min_k_plus_plus", "lowercase"])


def configured(folder: Path, given: Mapping[str, Any], workers: int) -> Path:
    """The file of a configuration, whose run directory stands beside it."""
    path = folder / f"{workers}.yaml"
    resources = {"cluster": "local", "shard_bytes": 3_000, "actors": workers}
    path.write_text(yaml.safe_dump({**given, "run": str(folder / "run"), "resources": resources}))
    return path


def written(run: Path) -> dict[str, bytes]:
    """The scores of every shard, the answer, and the tokens of its documents, without times."""
    receipts = [json.loads(path.read_text()) for path in sorted((run / "receipts/score").glob("*.json"))]
    made: dict[str, Any] = {}
    for receipt in receipts:
        stable = ("n_in", "n_scored", "n_quarantined", "reasons", "documents", "tokens", "n_truncated", "fingerprint")
        made[receipt["shard"]] = {key: receipt[key] for key in stable} | {"notes": receipt.get("notes")}
        made[f"{receipt['shard']} scores"] = pq.read_table(run / receipt["data"]).to_pylist()
    files = {f"selection/bh/{name}" for name in ("selected.parquet", "evidence.parquet")}
    return {name: repr(value).encode() for name, value in made.items()} | {
        name: (run / name).read_bytes() for name in files
    }


@pytest.fixture(scope="module")
def undisturbed(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ended("run", str(configured(folder, given, 1))) == 0
    made = written(folder / "run")
    assert len(made) > 20, "many shards"
    assert b"removed_pieces" in b"".join(made.values())
    return made


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    tmp_path: Path, given: dict[str, Any], undisturbed: dict[str, bytes], workers: int
) -> None:
    assert ended("run", str(configured(tmp_path, given, workers))) == 0
    assert written(tmp_path / "run") == undisturbed


def test_a_command_that_is_killed_leaves_the_bytes_of_one_that_was_not(
    tmp_path: Path, given: dict[str, Any], undisturbed: dict[str, bytes]
) -> None:
    path, receipts = configured(tmp_path, given, 2), tmp_path / "run/receipts/score"
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("seenset")), "run", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    end = time.monotonic() + PATIENCE
    while len(list(receipts.glob("*.json"))) < 2 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = len(list(receipts.glob("*.json")))
    assert 0 < finished < len([name for name in undisturbed if name.endswith(" scores")]), "in the midst"
    assert ended("run", str(path)) == 0
    assert written(tmp_path / "run") == undisturbed
