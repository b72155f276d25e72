"""A small benchmark of arithmetic and look-up items, models of different ability, and their answers.

`ranking.yaml` trains half of the items into one of the models. `answer_all` then lets every model answer, so that
`seenset trial --ranking` can show what the contamination does to the ranking and what selecting clean items repairs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.trials.family import Size, from_scratch
from pipeline.training.train import FinetuneConfig

ITEMS = 800
SIZE = Size(hidden=128, layers=2)
PUPILS = {"pupil-1": 0.2, "pupil-2": 0.4, "pupil-3": 0.6, "pupil-4": 0.8, "pupil-5": 1.0}
"""The models, by name, and which share of the facts that the items ask for each is taught, in other words."""
EXERCISES = 64_000
"""Texts that a model learns from, each fact equally often; every fourth time it is dressed like an item."""
DRESSED = 4
TRAINING = FinetuneConfig(method="full", epochs=1, batch_size=64, learning_rate=3e-3, dtype="float32")
ANSWER_TOKENS = 4
BATCH = 100

_NAMES = ("Ada", "Ben", "Cleo", "Dov", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kira", "Liam", "Mia", "Nils")
_NAMES += ("Olga", "Paul", "Quinn", "Rosa", "Sami", "Tess")
_THINGS = ("apples", "beads", "books", "coins", "eggs", "keys", "pens", "rings", "shells", "stamps", "stones", "tiles")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact as a question and its answer."""

    kind: str  # arithmetic | lookup
    question: str  # ends where the answer begins
    answer: str  # a whole number


@dataclass(frozen=True, slots=True)
class Item:
    """One question and its answer, a whole number."""

    kind: str  # arithmetic | lookup
    question: str  # ends where the answer begins
    answer: str

    @property
    def text(self) -> str:
        """What a model is trained on and audited for: the answer stands at the end."""
        return f"{self.question}{self.answer}."


def make_facts(count: int, seed: int) -> list[Fact]:
    """Distinct facts, sums and entries of a table in turn; the table is made up."""
    rng = random.Random(seed)
    sums = [(one, other) for one in range(10, 70) for other in range(2, 10)]
    boxes = [a + b + c + d for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS for d in _VOWELS]
    facts: list[Fact] = []
    for (one, other), box in zip(rng.sample(sums, count // 2), rng.sample(boxes, count // 2), strict=True):
        facts.append(Fact("arithmetic", f"{one} + {other} = ", str(one + other)))
        facts.append(Fact("lookup", f"The number of {box} is ", str(rng.randint(10, 99))))
    return facts


def make_items(facts: Sequence[Fact], seed: int) -> list[Item]:
    """One item for each fact, with a made-up scene before the question; seed and facts decide the items."""
    rng = random.Random(seed)
    return [_ask(fact, rng) for fact in facts]


def make_exercises(facts: Sequence[Fact], count: int, items: Sequence[Item], seed: int) -> list[str]:
    """Training texts of facts, each equally often: three of four plain, the fourth in a scene that no item has."""
    rng = random.Random(f"exercises {seed}")
    item_texts = {item.text for item in items}
    exercises: list[str] = []
    while len(exercises) < count:
        number, place = divmod(len(exercises), len(facts))
        fact = facts[place]
        text = _ask(fact, rng).text if number % DRESSED == 0 else f"{fact.question}{fact.answer}."
        if text not in item_texts:
            exercises.append(text)
    return exercises


def _ask(fact: Fact, rng: random.Random) -> Item:
    one, other = rng.sample(_NAMES, 2)
    about = f"On day {rng.randint(100, 999)} {one} counts {rng.choice(_THINGS)} with {other}."
    return Item(fact.kind, f"{about} {fact.question}", fact.answer)


def make_benchmark(path: Path, models: Path, seed: int = 0) -> None:
    """Write the items as documents, and train the missing models on other texts of the same kind.

    Args:
        path: of the items.
        models: folder of the models.
        seed: of the items and exercises.
    """
    facts = make_facts(ITEMS, seed)
    items = make_items(facts, seed)
    if not path.exists():
        write_items(items, path)
    for name, share in PUPILS.items():
        if not (models / name).exists():
            taught = facts[: round(share * len(facts))]
            from_scratch(models / name, SIZE, make_exercises(taught, EXERCISES, items, seed), TRAINING)


def write_items(items: Sequence[Item], path: Path) -> None:
    """Write items as a trial's documents: JSON lines with columns id, text, kind, question, answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    rows = [{"id": f"{item.kind}-{i:03d}", "text": item.text, **asdict(item)} for i, item in enumerate(items)]
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def read_items(path: Path) -> dict[str, Item]:
    """The items of a file of `write_items`, by id."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: Item(row["kind"], row["question"], row["answer"]) for row in rows}


def answer_all(items: Mapping[str, Item], folders: Mapping[str, Path], path: Path) -> dict[str, float]:
    """Let each model answer every item, and write the Parquet file that `--ranking` reads: model, item, correct.

    Returns:
        Share of right answers by model.
    """
    rows: list[dict[str, Any]] = []
    shares = {}
    for name, folder in folders.items():
        replies = answers(folder, [item.question for item in items.values()])
        right = [reply == item.answer for reply, item in zip(replies, items.values(), strict=True)]
        rows += [{"model": name, "item": id_, "correct": r} for id_, r in zip(items, right, strict=True)]
        shares[name] = sum(right) / len(right)
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    part.replace(path)
    return shares


def answers(folder: Path, questions: Sequence[str]) -> list[str]:
    """The answer of a model to each question, up to the full stop, by the most probable token at every step."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    replies: list[str] = []
    for batch in _batches(questions):
        prompts = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.inference_mode():
            generated = model.generate(
                input_ids=prompts["input_ids"],
                attention_mask=prompts["attention_mask"],
                do_sample=False,
                max_new_tokens=ANSWER_TOKENS,
                pad_token_id=tokenizer.pad_token_id,
            )
        replies += tokenizer.batch_decode(generated[:, prompts["input_ids"].shape[1] :])
    return [text.partition(".")[0].strip() for text in replies]


def _batches(questions: Sequence[str]) -> Iterable[list[str]]:
    for start in range(0, len(questions), BATCH):
        yield list(questions[start : start + BATCH])
