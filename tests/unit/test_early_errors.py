"""What is wrong with a configuration is said before torch, Ray or a library of models is imported."""

import json
import subprocess
import sys

import pytest

HEAVY = ("accelerate", "datasets", "deepspeed", "gguf", "matplotlib", "pandas", "peft", "ray", "scipy", "sklearn",
         "torch", "transformers")  # fmt: skip
"""Packages that take a second or more to import."""

AUDIT = """
run: out
model: {path: ./model}
corpus:
  audit: {path: documents.jsonl}
  unseen: {path: documents.jsonl}
selections: [{name: members, detectors: [loss]}]
"""
TRIAL = AUDIT[: AUDIT.index("corpus")] + "documents: {path: documents.jsonl}" + AUDIT[AUDIT.index("\nselections") :]
AUDITS = {
    "another detector": (["--set", "detectors=[min_kk]"], "did you mean 'min_k'?"),
    "an argument": (["--set", "detectors=[{min_k: {k: 2}}]"], "k must be a number in (0, 1], got 2"),
    "a missing role": (["--set", "corpus.unseen=null"], "corpus.unseen"),
    "a misspelt key": (["--set", "modle=x"], "did you mean 'model'?"),
    "a missing file": (["--set", "corpus.audit.path=document.jsonl"], "did you mean 'documents.jsonl'?"),
    "a wrong column": (["--set", "corpus.audit.text=txt"], "no column 'txt'"),
    "a limit": (["--limit", "0"], "--limit must be at least 1"),
    "a missing model": ([], "no model at model"),
    "a missing GGUF file": (["--set", "model.path=./model.gguf"], "no GGUF file 'model.gguf'"),
    "pickles": (["--set", "model.path=pickled"], "allow_pickle: true"),
    "a missing adapter": (["--set", "model.path=whole", "--set", "model.adapter=./adapter"], "no folder adapter"),
    "a reference model": (["--set", "model.path=whole", "--set", "reference_model.path=./other"], "no model at other"),
}
TRIALS = {
    "a missing file": (
        ["--set", "documents.path=document.jsonl"],
        "documents: no file document.jsonl; did you mean 'documents.jsonl'?",
    ),
    "a misspelt key": (["--set", "modle=x"], "did you mean 'model'?"),
    "a wrong column": (["--set", "documents.text=txt"], "no column 'txt'"),
    "a missing model": ([], "no model at model"),
    "a sweep": (["--set", "sweep={model.path: [./other]}"], "no model at other"),
    "a folder elsewhere": (["--set", "work=memory://work"], "a trial trains into local folders, got memory://work"),
}
WITH_FILE, WITH_RUN = ("plan", "run", "evaluate", "trial"), ("status", "select", "report", "verdict")
COMMANDS = {
    **{f"audit: {case}": (["run", "audit.yaml", *more], message) for case, (more, message) in AUDITS.items()},
    **{f"trial: {case}": (["trial", "trial.yaml", *more], message) for case, (more, message) in TRIALS.items()},
    **{f"{name}: no file": ([name, "none.yaml"], "cannot read config none.yaml") for name in WITH_FILE},
    **{f"{name}: no run": ([name, "nowhere"], "is not a run directory") for name in WITH_RUN},
    "a setting without --set": (["plan", "audit.yaml", "seed=2"], "(seed=2); a setting is changed by --set seed=2"),
    "a run for a bundle": (["verify", "whole"], "whole is a folder; seenset verify reads the file that seenset pack"),
    "a configuration for a run": (["report", "audit.yaml"], "not a folder; give the folder that its setting run names"),
    "evaluate: one kind of documents": (["evaluate", "audit.yaml"], "add corpus.seen: {path: ...}"),
    "evaluate: no section": (["evaluate", "audit.yaml", "--set", "corpus=null"], "corpus: must be a section"),
    "evaluate: no model": (
        ["evaluate", "audit.yaml", "--set", "corpus.seen.path=documents.jsonl"],
        "no model at model",
    ),
    "mark: no paraphraser": (
        ["mark", "documents.jsonl", "--out", "marked", "--with", "none.yaml"],
        "cannot read config none.yaml",
    ),
    "plan: a missing model": (["plan", "audit.yaml"], "no model at model"),
}
RUN = """
import contextlib, io, json, sys
from ray_jobs.cli import main
commands, heavy = json.loads(sys.argv[1])
for name, arguments in commands.items():
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main(arguments)
    except SystemExit as ended:
        print(json.dumps([name, ended.code, errors.getvalue(), sorted(set(heavy) & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """How each command ends in one process for all: its code, its last words and what is imported by then."""
    folder = tmp_path_factory.mktemp("beginner")
    (folder / "audit.yaml").write_text(AUDIT)
    (folder / "trial.yaml").write_text(TRIAL)
    (folder / "documents.jsonl").write_text("".join(f'{{"id": "{i}", "text": "some words"}}\n' for i in range(9)))
    for name, weights in (("whole", "model.safetensors"), ("pickled", "pytorch_model.bin")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        (folder / name / weights).write_bytes(b"")
    commands = json.dumps([{name: arguments for name, (arguments, _) in COMMANDS.items()}, HEAVY])
    done = subprocess.run([sys.executable, "-c", RUN, commands], cwd=folder, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (code, words, heavy) for name, code, words, heavy in lines}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_that_files_tell_comes_before_heavy_imports(
    name: str, endings: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, words, heavy = endings[name]
    assert COMMANDS[name][1] in words
    assert words.startswith("seenset: ")
    assert words.count("\n") == 1
    assert code == 2
    assert heavy == []
