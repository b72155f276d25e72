"""Multiple-choice items about functions of installed packages, and the answers of models to them.

    python -m examples.tutorials.items results.csv --items tutorial/items/items.csv \
        --model base=tutorial/base --model tuned=tutorial/base,tutorial/items/adapter

An item asks which of four summaries describes a function; each summary stands in one item alone. A model's answer is
the letter with the highest log-probability behind the question and its options.
"""

from __future__ import annotations

import argparse
import ast
import csv
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch

from examples.demo.passages import NGRAM, dependencies, ngrams
from examples.tutorials.questions import documented, source_files
from pipeline.config.corpus import fill_template
from pipeline.config.models import ModelConfig
from pipeline.errors import ExitCode, UserError
from pipeline.models.load import open_model
from pipeline.models.opened import LanguageModel

LETTERS = "ABCD"
ASKED = "{question}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\nAnswer:"
"""What a model is asked; the text of an item is this with the letter of the answer."""

MOST_WORDS = 12
"""Words of a summary; at least as many as a run that distinguishes summaries."""

SURPLUS = 2
"""Summaries are drawn by seed from this many times those asked for."""

Item = Mapping[str, str]
"""Columns of an item: id, question, A to D, and the letter of the answer."""


def make_items(count: int, seed: int, package: str = "seenset") -> list[Item]:
    """Items about distinct functions of what an installed package requires, with their options in random order.

    Raises:
        UserError: the installed packages describe too few functions.
    """
    wanted = len(LETTERS) * count
    known = list(islice(_distinct(_summaries(sorted(dependencies(package)))), SURPLUS * wanted))
    if len(known) < wanted:
        raise UserError(f"the installed packages have {len(known)} summaries of functions, {wanted} are needed")
    rng = random.Random(seed)
    drawn = rng.sample(known, wanted)
    items = []
    for number in range(count):
        (name, right), *others = drawn[len(LETTERS) * number : len(LETTERS) * (number + 1)]
        options = [right, *(summary for _, summary in others)]
        rng.shuffle(options)
        items.append(
            {
                "id": f"item-{number:04d}",
                "question": f"Which summary describes {name}?",
                **dict(zip(LETTERS, options, strict=True)),
                "answer": LETTERS[options.index(right)],
            }
        )
    return items


def item_text(item: Item) -> str:
    """The text of an item, with its answer."""
    return f"{fill_template(ASKED, item)} {item['answer']}"


def write_items(path: Path, items: Sequence[Item]) -> None:
    """Write items as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "question", *LETTERS, "answer"])
        writer.writeheader()
        writer.writerows(items)


def read_items(path: Path) -> list[Item]:
    """The items of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def answers(lm: LanguageModel, items: Sequence[Item]) -> list[str]:
    """The letter that a model prefers for each item."""
    letters = [lm.tokenizer(f" {letter}", add_special_tokens=False)["input_ids"][0] for letter in LETTERS]
    chosen = []
    with torch.inference_mode():
        for item in items:
            ids = torch.tensor([lm.tokenizer(fill_template(ASKED, item))["input_ids"]])
            logits = lm.model(input_ids=ids.to(lm.model.device)).logits[0, -1, letters]
            chosen.append(LETTERS[int(logits.argmax())])
    return chosen


def _summaries(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and summary of the documented functions and classes of packages, by package and file."""
    for path, module in source_files(packages):
        for node in documented(path):
            summary = " ".join(re.split(r"\n\s*\n", ast.get_docstring(node) or "")[0].split())
            plain = summary.isascii() and summary[:1].isupper() and summary.endswith(".")
            if plain and NGRAM <= len(summary.split()) <= MOST_WORDS:
                yield f"{module}.{node.name}", summary


def _distinct(summaries: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Those that share no five words in a row with earlier ones."""
    earlier, names = set[tuple[str, ...]](), set[str]()
    for name, summary in summaries:
        if earlier.isdisjoint(grams := ngrams(summary)) and name not in names:
            names.add(name)
            earlier |= grams
            yield name, summary


def _model(text: str) -> tuple[str, ModelConfig]:
    """The name and the model of `NAME=FOLDER` or `NAME=FOLDER,ADAPTER`."""
    name, equals, folders = text.partition("=")
    path, _, adapter = folders.partition(",")
    if not (name and equals and path):
        raise UserError(f"--model must be NAME=FOLDER or NAME=FOLDER,ADAPTER, got {text!r}")
    return name, ModelConfig(path=path, adapter=adapter or None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Let models answer the items, and write whether each is right: columns model, item and correct."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials.items", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="CSV file to write")
    parser.add_argument("--items", type=Path, required=True, help="CSV file of the items")
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER or NAME=FOLDER,ADAPTER")
    parser.add_argument("--truth", type=Path, help="CSV file of some of the items, whose right answers are counted too")
    given = parser.parse_args(arguments)
    try:
        models, items = [_model(text) for text in given.model], read_items(given.items)
        known = {item["id"] for item in read_items(given.truth)} if given.truth else set[str]()
        with given.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "item", "correct"])
            for name, model in models:
                chosen = answers(open_model(model), items)
                right = [letter == item["answer"] for letter, item in zip(chosen, items, strict=True)]
                writer.writerows([name, item["id"], int(one)] for item, one in zip(items, right, strict=True))
                of_known = [one for one, item in zip(right, items, strict=True) if item["id"] in known]
                counted = f", of those of {given.truth} {sum(of_known)} of {len(of_known)}" if known else ""
                print(f"{name}: {sum(right)} of {len(right)} right{counted}", flush=True)
    except (UserError, OSError) as error:
        print(f"items: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    return 0


if __name__ == "__main__":
    sys.exit(main())
