"""Error rate and power of a search for benchmark items in a training corpus: thresholds, and selections at alpha.

    python -m examples.decontamination.trial
    python -m examples.decontamination.trial --write decontamination     # one split, for seenset run

Corpus and items are passages of the documentation of installed packages, no two of which are equal; many resemble one
another, as docstrings do. Half of the audited items are planted in documents of the corpus, changed in one of four
ways; items of the same source that were never planted calibrate. The last column repeats the audits with boilerplate
at the start of a third of the items that were not planted, which the corpus holds and the calibration items lack.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

import seenset
from examples.decontamination.overlap import largest_shares
from examples.demo.passages import candidates
from pipeline.errors import UserError

PASSAGES, PLANTED, NEVER = 10_000, 200, 600
PER_DOCUMENT = 6
SPLITS, AUDITED, CALIBRATING = 100, 100, 200
ALPHA = 0.1
THRESHOLDS = (0.5, 0.8, 1.0)
SELECTED: tuple[tuple[str, Literal["conservative", "random"]], ...] = (
    ("bh", "conservative"),
    ("storey", "conservative"),
    ("storey", "random"),
)
_NO_WORD = re.compile(r"\W")
BOILERPLATE = (
    "permission is granted free of charge to any person who obtains a copy of this software and its documentation to "
    "deal in it without restriction subject to the conditions that follow below"
)

Choice = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""Scores of audited and of calibrating items, and a seed -> whether each audited item is listed."""


def _capitals(words: list[str], rng: random.Random) -> list[str]:
    return [word.upper() if rng.random() < 0.5 else word for word in words]


def _punctuation(words: list[str], rng: random.Random) -> list[str]:
    return [_NO_WORD.sub("", word) + rng.choice(["", ",", " -", ";"]) for word in words]


def _one_word_in_ten(words: list[str], rng: random.Random) -> list[str]:
    return [rng.choice(words) if rng.random() < 0.1 else word for word in words]


def _first_half(words: list[str], rng: random.Random) -> list[str]:
    return words[: len(words) // 2]


EDITS: Mapping[str, Callable[[list[str], random.Random], list[str]]] = {
    "capitals": _capitals,
    "punctuation": _punctuation,
    "one word in ten": _one_word_in_ten,
    "first half": _first_half,
}


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """The largest shares of items in one document of the corpus."""

    planted: dict[str, np.ndarray]  # way of editing -> float64, (items,)
    never: np.ndarray  # float64, (items,): never planted
    boilerplate: np.ndarray  # float64, (items,): the same, with boilerplate at their start
    texts: tuple[list[str], list[str]]  # of the items, planted and not


def search(seed: int) -> Searched:
    """Plant items in a corpus and search it for all of them."""
    rng = random.Random(seed)
    passages = sorted({passage.text for passage in candidates()})
    if len(passages) < PASSAGES:
        raise UserError(f"the installed packages hold {len(passages):,} passages, and {PASSAGES:,} are needed")
    passages = rng.sample(passages, PASSAGES)
    planted, never, others = passages[:PLANTED], passages[PLANTED : PLANTED + NEVER], passages[PLANTED + NEVER :]
    names = [list(EDITS)[number % len(EDITS)] for number in range(PLANTED)]
    inserted = [" ".join(EDITS[name](text.split(), rng)) for name, text in zip(names, planted, strict=True)]
    documents = [others[start : start + PER_DOCUMENT] for start in range(0, len(others), PER_DOCUMENT)]
    for number, text in enumerate([*inserted, *[f"{BOILERPLATE}."] * 5]):
        document = documents[number % len(documents)]
        document.insert(rng.randrange(len(document) + 1), text)
    items = [*planted, *never, *(f"{BOILERPLATE} {text}" for text in never)]
    shares = largest_shares(items, [["\n\n".join(document) for document in documents]])
    of_name = np.array(names)
    return Searched(
        {name: shares[:PLANTED][of_name == name] for name in EDITS},
        shares[PLANTED : PLANTED + NEVER],
        shares[PLANTED + NEVER :],
        (planted, never),
    )


def over(threshold: float) -> Choice:
    """List the items whose share is at least a threshold."""
    return lambda audited, calibrating, seed: audited >= threshold


def selected(procedure: str, ties: Literal["conservative", "random"]) -> Choice:
    """List the items that a procedure selects at alpha, with smoothed ranks."""

    def choose(audited: np.ndarray, calibrating: np.ndarray, seed: int) -> np.ndarray:
        tables = [
            pa.table({"doc_id": [f"{seed}-{role}-{number}" for number in range(len(values))], "share": values})
            for role, values in (("audited", audited), ("never", calibrating))
        ]
        settings: dict[str, Any] = {"procedure": procedure, "alpha": ALPHA, "ranks": "smoothed", "ties": ties}
        answer = seenset.select(tables[0], unseen=tables[1], **settings)
        return np.asarray(answer.selected)

    return choose


def measure(searched: Searched, choose: Choice, boilerplate: bool) -> tuple[list[float], dict[str, list[float]]]:
    """Share of wrong items in each list, and share of the planted items of each edit that it holds, by split."""
    wrong, power = list[float](), {name: list[float]() for name in EDITS}
    for split in range(SPLITS):
        rng = np.random.default_rng(split)
        order = rng.permutation(len(searched.never))
        calibrating = searched.never[order[:CALIBRATING]]
        places = order[CALIBRATING : CALIBRATING + AUDITED]
        nulls = searched.never[places]
        if boilerplate:
            nulls = np.where(np.arange(AUDITED) % 3 == 0, searched.boilerplate[places], nulls)
        members = {name: rng.choice(values, AUDITED // len(EDITS), False) for name, values in searched.planted.items()}
        listed = choose(np.concatenate([*members.values(), nulls]), calibrating, split)
        wrong.append(float(listed[-AUDITED:].sum() / max(1, listed.sum())))
        for name, part in zip(EDITS, np.split(listed[:-AUDITED], len(EDITS)), strict=True):
            power[name].append(float(part.mean()))
    return wrong, power


def write_split(searched: Searched, folder: Path) -> None:
    """Write one split with its texts: audit.jsonl, boilerplate.jsonl (the same with boilerplate) and unseen.jsonl."""
    planted, never = searched.texts
    shares = dict.fromkeys(EDITS, 0)
    rows = []
    for number, text in enumerate(planted[:AUDITED]):
        name = list(EDITS)[number % len(EDITS)]
        rows.append({"id": f"planted{number}", "text": text, "share": float(searched.planted[name][shares[name]])})
        shares[name] += 1
    others = [
        {"id": f"other{number}", "text": text, "share": float(share)}
        for number, (text, share) in enumerate(zip(never, searched.never, strict=True))
    ]
    with_boilerplate = [
        {**row, "text": f"{BOILERPLATE} {row['text']}", "share": float(share)} if number % 3 == 0 else row
        for number, (row, share) in enumerate(zip(others[:AUDITED], searched.boilerplate, strict=False))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "audit": rows + others[:AUDITED],
        "boilerplate": rows + with_boilerplate,
        "unseen": others[AUDITED : AUDITED + CALIBRATING],
    }
    for name, some in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the tutorial, or write one split. Returns the exit code of the process."""
    parser = argparse.ArgumentParser(description="Error rate and power of a search for benchmark items.")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="Write the files of one split, and no table.")
    folder = parser.parse_args(arguments).write
    searched = search(0)
    if folder is not None:
        write_split(searched, folder)
        return 0
    shares = ", ".join(f"{np.mean(searched.never >= threshold):.1%} at least {threshold:g}" for threshold in THRESHOLDS)
    print(
        f"{len(searched.never)} items that were never planted: {np.mean(searched.never == 0):.1%} have share 0, "
        f"{shares}; with boilerplate the median is {np.median(searched.boilerplate):.2f}"
    )
    print(f"{SPLITS} splits: {AUDITED} planted and {AUDITED} other items audited, {CALIBRATING} to calibrate\n")
    print(f"| list | FDR | {' | '.join(f'power, {name}' for name in EDITS)} | FDR with boilerplate |")
    print(f"|---|---|{'---|' * len(EDITS)}---|")
    choices = {f"share at least {threshold:g}": over(threshold) for threshold in THRESHOLDS}
    choices |= {f"`{name}`, ties {ties}, alpha {ALPHA:g}": selected(name, ties) for name, ties in SELECTED}
    for label, choose in choices.items():
        wrong, power = measure(searched, choose, False)
        doubtful, _ = measure(searched, choose, True)
        print(f"| {label} | {_mean(wrong)} | {' | '.join(map(_mean, power.values()))} | {_mean(doubtful)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
