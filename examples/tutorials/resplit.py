"""How unusual an answer of the tutorial `finetuned` is: the untrained documents are divided anew, many times.

    python -m examples.tutorials.resplit runs/finetuned --work tutorial

The scores stay as the run has them. Of the documents that were not trained on, as many are audited and as many
calibrate as in the run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from examples.samia.samia import scores
from seenset import select

AUDITED = 80  # untrained documents among the audited ones


def main() -> None:
    """Print the means over all divisions as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials.resplit", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory of the tutorial")
    parser.add_argument("--work", type=Path, default=Path("tutorial"), help="folder of the tutorials' data")
    parser.add_argument("--divisions", type=int, default=2000)
    given = parser.parse_args()
    truth = (given.work / "finetuned/truth.jsonl").read_text(encoding="utf-8")
    trained = {json.loads(line)["id"] for line in truth.splitlines()}
    rows = scores(given.run.resolve())
    members = np.array([row["reference"] for name, row in rows.items() if name in trained])
    others = np.array([row["reference"] for name, row in rows.items() if name not in trained])
    generator = np.random.default_rng(1)
    shares, failed = [], []
    for _ in range(given.divisions):
        drawn = generator.permutation(others)
        answer = select(np.r_[members, drawn[:AUDITED]], drawn[AUDITED:], procedure="storey", alpha=0.1)
        chosen, bound = np.asarray(answer.selected), answer.summary.bound
        wrong = int(chosen[len(members) :].sum())
        shares.append(wrong / max(1, int(chosen.sum())))
        failed.append(bound is not None and (wrong > bound.wrong_at_most or bound.members_at_least > len(members)))
    print(
        json.dumps(
            {
                "divisions": given.divisions,
                "share_wrong": round(float(np.mean(shares)), 4),
                "as_high_as_16_of_56": round(float(np.mean(np.array(shares) >= 16 / 56)), 4),
                "false_bound": round(float(np.mean(failed)), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
