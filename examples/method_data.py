"""The inputs of `examples/method.py`: 200 texts, a model that was trained on 50 of them, and the audit for Seenset.

    python -m examples.method_data runs/method

The texts are passages of the documentation in one installed package; the model is a small Llama that is trained from
scratch, in seconds. The folder then holds `audit.jsonl` and `unseen.jsonl` (id, text), `model/`,
`audit.yaml` for `seenset run`, and `trained.json` with the ids of the audited texts that the model was trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from examples.demo.passages import gather_passages
from examples.trials.family import Size, from_scratch
from pipeline.config.training import FinetuneConfig
from pipeline.errors import ExitCode, UserError

PACKAGE = "scikit-learn"
AUDITED, TRAINED, UNSEEN = 100, 50, 100
SIZE = Size(hidden=64, layers=2)
TRAINING = FinetuneConfig(method="full", epochs=12, batch_size=8, learning_rate=4e-3, dtype="float32")


def write_inputs(folder: Path) -> None:
    """Write the texts, the model and the configuration of an audit.

    Raises:
        UserError: the package holds too few passages, or the folder has a model already.
    """
    passages = [passage.text for passage in gather_passages(AUDITED + UNSEEN, 0, [PACKAGE])]
    trained = range(0, AUDITED, AUDITED // TRAINED)  # the passages are in random order
    from_scratch(folder / "model", SIZE, [passages[number] for number in trained], TRAINING)
    roles = {"audit": passages[:AUDITED], "unseen": passages[AUDITED:]}
    for role, texts in roles.items():
        rows = [{"id": f"{role}-{number:03d}", "text": text} for number, text in enumerate(texts)]
        (folder / f"{role}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "trained.json").write_text(json.dumps([f"audit-{number:03d}" for number in trained]), encoding="utf-8")
    audit = {
        "run": "run",
        "model": {"path": "./model", "dtype": "float32"},
        "corpus": {role: {"path": f"{role}.jsonl", "text": "text", "id": "id"} for role in roles},
        "detectors": ["loss"],
        "selections": [
            {"name": procedure, "detectors": ["loss"], "procedure": procedure, "alpha": 0.1}
            for procedure in ("bh", "storey")
        ],
    }
    (folder / "audit.yaml").write_text(yaml.safe_dump(audit, sort_keys=False), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and write the inputs; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.method_data", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/method"), help="default: %(default)s")
    try:
        write_inputs(parser.parse_args(arguments).folder)
    except UserError as error:
        print(f"method_data: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
