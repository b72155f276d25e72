"""Fair benchmarks of 2026: one driver over a specification of each.

    python -m examples.papers.fair prepare hubble     # from the hub, parted into audit, unseen and seen
    python -m examples.papers.fair run hubble         # every detector and procedure that its data allow
    python -m examples.papers.fair table hubble       # the paper's column beside ours

An error that the user can fix is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.papers.fair.driver import BENCHMARKS, prepare, print_table, run
from examples.papers.prepare import WORK
from pipeline.errors import ExitCode, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do one of the three steps; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.papers.fair", description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["prepare", "run", "table"])
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--dataset", metavar="PATH", help="prepare: a copy of the data set instead of the hub's")
    parser.add_argument("--work", type=Path, default=WORK, help="folder (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of seenset run")
    given = parser.parse_args(arguments)
    try:
        if given.step == "prepare":
            prepare(given.name, given.work, given.dataset, given.set)
        elif given.step == "run":
            return run(given.name, given.work, given.set)
        else:
            print_table(given.name, given.work)
    except UserError as error:
        print(f"fair: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    return 0


if __name__ == "__main__":
    sys.exit(main())
