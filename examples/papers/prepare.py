"""WikiMIA and ArxivTection of the hub, parted into what is audited and what is known, of either label."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, nearest

WORK = Path(__file__).parent / "work"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A labelled data set of the hub."""

    dataset: str
    split: str
    text: str  # its column
    label: str  # its column: 1 was trained on, 0 was not


BENCHMARKS = {
    **{
        f"wikimia_{words}": Benchmark("swj0419/WikiMIA", f"WikiMIA_length{words}", "input", "label")
        for words in (32, 64, 128, 256)
    },
    "arxivtection": Benchmark("avduarte333/arXivTection", "train", "Example_A", "Label"),
}


def part_benchmark(name: str, rows: Iterable[Mapping[str, Any]], folder: Path, seed: int = 0) -> dict[str, int]:
    """Write audit.jsonl, unseen.jsonl and seen.jsonl: of either label half is audited, and half known.

    The audited documents keep their label in the column `member`, which an audit does not read.

    Args:
        name: of the benchmark.
        rows: of its data set.
        folder: where the files go.
        seed: of the parting.

    Returns:
        Documents by file.

    Raises:
        UserError: a column is missing, or a label is neither 0 nor 1.
    """
    benchmark = BENCHMARKS[name]
    of_label: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for number, row in enumerate(rows):
        for column in (benchmark.text, benchmark.label):
            if column not in row:
                raise UserError(f"no column {column!r} in {benchmark.dataset}; {nearest(column, row, 'columns')}")
        label = row[benchmark.label]
        if label not in (0, 1):
            raise UserError(f"row {number} of {benchmark.dataset}: {benchmark.label} must be 0 or 1, got {label!r}")
        entry = {"id": f"{name}-{number}", "text": row[benchmark.text], "member": int(label)}
        of_label[int(label)].append(entry)
    return write_parts(of_label.items(), folder, seed)


def write_parts(kinds: Iterable[tuple[int, list[dict[str, Any]]]], folder: Path, seed: int = 0) -> dict[str, int]:
    """Write half of the entries of each kind to audit.jsonl, and the others to unseen.jsonl or seen.jsonl by its label.

    Returns:
        Documents by file.
    """
    parts: dict[str, list[dict[str, Any]]] = {"audit": [], "unseen": [], "seen": []}
    for label, entries in kinds:
        random.Random(seed).shuffle(entries)
        half = len(entries) // 2
        parts["audit"] += entries[:half]
        parts["seen" if label else "unseen"] += entries[half:]
    folder.mkdir(parents=True, exist_ok=True)
    for part, entries in parts.items():
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {part: len(entries) for part, entries in parts.items()}


def main() -> None:
    """Fetch benchmarks from the hub, or read one from a JSONL file of the same columns, and part them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--file", type=Path, help="JSONL with the columns of the data set, instead of the hub")
    arguments = parser.parse_args()
    for name in arguments.names:
        benchmark = BENCHMARKS[name]
        if arguments.file is not None:
            rows: Any = [json.loads(line) for line in arguments.file.read_text(encoding="utf-8").splitlines()]
        else:
            import datasets

            rows = datasets.load_dataset(benchmark.dataset, split=benchmark.split)
        counts = part_benchmark(name, rows, WORK / name)
        print(f"{name}: {', '.join(f'{count} {part}' for part, count in counts.items())} in {WORK / name}")


if __name__ == "__main__":
    main()
