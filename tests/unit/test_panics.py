"""A library in Rust that panics raises what is no Exception: a file is one line, a document goes to quarantine."""

import contextlib
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.config.models import ModelConfig
from pipeline.errors import PanicError, UserError, is_panic
from pipeline.models.load import check_model, open_model
from pipeline.models.tokens import open_tokenizer, plain_ids, tokenize, tokenize_each
from pipeline.training.training_documents import encode
from tests.helpers.commands import ended, user_error

BAD = "Q, the river and a stone"
"""A text at which the tokenizer of `panicking` panics."""
GOOD = "the river and a stone"
NO_LENGTH = {"type": "FixedLength", "length": 0}
MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
AT_THE_START = {"type": "Replace", "pattern": {"Regex": "^(?=Q)"}, "content": "x"}


def changed(folder: Path, **settings: Any) -> Path:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | settings))
    return folder


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


@pytest.fixture
def panicking(folder: Path) -> Path:
    """A model whose tokenizer panics at texts that start with Q."""
    return changed(folder, normalizer=AT_THE_START)


def test_the_tokenizer_panics_at_one_text_alone(panicking: Path) -> None:
    tokenizer = open_tokenizer(ModelConfig(path=str(panicking)))
    with pytest.raises(BaseException, match="index out of bounds") as caught:
        tokenizer([BAD])
    assert is_panic(caught.value)
    assert not is_panic(KeyboardInterrupt())
    assert len(tokenizer([GOOD])["input_ids"][0]) > 2
    for work in (lambda: tokenize(tokenizer, [GOOD, BAD], 9), lambda: plain_ids(tokenizer, BAD)):
        with pytest.raises(PanicError, match="index out of bounds"):
            work()
    good, bad, again = tokenize_each(tokenizer, [GOOD, BAD, GOOD], 9)
    assert good == again
    assert not bad.ids


def prefixed(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    changed(folder, model=model | {"continuing_subword_prefix": "#" * 20})


def with_ids(folder: Path, **ids: int) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    changed(folder, model=model | {"vocab": model["vocab"] | ids})


FILES: dict[str, Callable[[Path], object]] = {
    "an id that would take the memory of 4 billion tokens": lambda folder: with_ids(folder, a=4 * 10**9),
    "a map of characters": lambda folder: changed(folder, normalizer=MAP),
    "a prefix that is longer than its tokens": prefixed,
    "pieces of no length, at every text": lambda folder: changed(
        folder, pre_tokenizer={"type": "FixedLength", "length": 0}
    ),
}


def test_two_tokens_with_one_id_are_one_line_or_can_be_copied(folder: Path) -> None:
    """Its library keeps either of them, and cannot read what it writes if this is a part of another token."""
    with_ids(folder, a=5, e=6, o=7, t=8)
    with contextlib.suppress(UserError):
        tokenizer = open_tokenizer(ModelConfig(path=str(folder)))
        assert tokenize(copy.deepcopy(tokenizer), [GOOD], 9) == tokenize(tokenizer, [GOOD], 9)


@pytest.mark.parametrize("name", FILES)
def test_a_file_at_which_a_tokenizer_panics_is_one_line(folder: Path, name: str) -> None:
    FILES[name](folder)
    for work in (check_model, open_model, open_tokenizer):
        assert "cannot read its tokenizer" in user_error(work, ModelConfig(path=str(folder)))


@pytest.mark.slow
def test_the_command_prints_that_line_alone(folder: Path, make_audit: Callable[..., Path]) -> None:
    changed(folder, normalizer=MAP)
    audit = make_audit(9, 9, model={"path": str(folder)})
    program = "import sys; from ray_jobs.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "plan", str(audit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "cannot read its tokenizer" in result.stderr


def test_a_text_that_is_to_be_learnt_is_named(panicking: Path) -> None:
    tokenizer = open_tokenizer(ModelConfig(path=str(panicking)))
    assert "fine-tuning text 1 cannot be tokenized: index" in user_error(encode, tokenizer, [GOOD, BAD], 9)


def documents(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob(pattern)) for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("settings", [{}, {"detectors": ["loss", {"recall": {"shots": 29}}]}])
def test_a_document_at_which_a_tokenizer_panics_is_quarantined(
    panicking: Path, make_audit: Callable[..., Path], settings: dict[str, Any]
) -> None:
    texts = [f"the number {i} of the winter morning" for i in range(30)]
    audit = make_audit([*texts, BAD], [*(f"a stone {i} between the rivers" for i in range(30)), f"{BAD} in winter"],
                       model={"path": str(panicking)}, **settings)  # fmt: skip
    assert ended("run", audit) in (0, 3, 4)
    rows = documents(audit.parent / "run" / "quarantine", "**/*.parquet")
    assert {row["reason"] for row in rows} == {"model_error"}
    assert len(rows) == 2
    assert all("index out of bounds" in row["message"] for row in rows)
