"""How right the answers of the tutorial `chats` are: those of its runs, and on average over many divisions.

    python -m examples.tutorials.divide runs/chats runs/chats-all --work tutorial

The scores stay as the runs have them. In each division 100 of the 220 untrained conversations are audited beside the 80
trained ones, and the 120 others calibrate, as in the runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from examples.samia.samia import scores
from pipeline.trial.repeats import mean_interval
from seenset import open_run, select

AUDITED = 100  # untrained conversations among the audited ones
DETECTORS = ("min_k_plus_plus", "loss", "reference")


def divide(
    rows: Mapping[str, Mapping[str, Any]], trained: set[str], detector: str, divisions: int, audited: int = AUDITED
) -> dict[str, Any]:
    """Mean share of wrong conversations among the selected and of found ones among the trained, with 95% intervals.

    Args:
        rows: scores by id.
        trained: ids of the trained conversations.
        detector: column of the scores.
        divisions: number of divisions.
        audited: untrained documents that are audited in each division.
    """
    members, others = sorted(trained & rows.keys()), sorted(rows.keys() - trained)
    generator, wrong, listed = np.random.default_rng(1), [], []
    for number in range(divisions):
        drawn = [others[place] for place in generator.permutation(len(others))]
        parts = (members + drawn[:audited], drawn[audited:])
        # other names, and with them other draws of the smoothed ranks
        names = [[f"{name}/{number}" for name in part] for part in parts]
        tables = [
            pa.table({"doc_id": some, "score": [rows[name][detector] for name in part]})
            for some, part in zip(names, parts, strict=True)
        ]
        chosen = np.asarray(select(*tables, procedure="storey", ranks="smoothed", alpha=0.1).selected)
        wrong.append(chosen[len(members) :].sum() / max(1, chosen.sum()))
        listed.append(chosen[: len(members)].mean())
    return {"fdr": _shown(wrong), "power": _shown(listed)}


def _shown(values: Sequence[float]) -> str:
    low, high = mean_interval(np.asarray(values))
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Print one JSON line a run and detector."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials.divide", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of the tutorial")
    parser.add_argument("--work", type=Path, default=Path("tutorial"), help="folder of the tutorials' data")
    parser.add_argument("--divisions", type=int, default=400)
    given = parser.parse_args()
    truth = (given.work / "chats/truth.jsonl").read_text(encoding="utf-8")
    trained = {json.loads(line)["id"] for line in truth.splitlines()}
    for run in given.runs:
        for name, selection in open_run(run.resolve()).selections.items():
            ids = selection.table()["doc_id"].to_pylist()
            counts = {"selected": len(ids), "wrong": len({*ids} - trained)}
            print(json.dumps({"run": run.name, "selection": name, **counts}), flush=True)
        rows = scores(run.resolve())
        for detector in (name for name in DETECTORS if name in next(iter(rows.values()))):
            line = {"run": run.name, "detector": detector, "divisions": given.divisions}
            print(json.dumps({**line, **divide(rows, trained, detector, given.divisions)}), flush=True)


if __name__ == "__main__":
    main()
