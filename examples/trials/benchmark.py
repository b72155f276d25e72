"""A small benchmark of arithmetic and look-up items, models that do it well and badly, and their answers.

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
from pipeline.finetune import FinetuneConfig

ITEMS = 800
SIZE = Size(hidden=128, layers=2, vocabulary=320)
EXERCISES = {"pupil-1": 8_000, "pupil-2": 13_000, "pupil-3": 17_000, "pupil-4": 24_000, "pupil-5": 40_000}
"""The models, by name, and from how many texts of the same kind, none of them an item, each learns."""
TRAINING = FinetuneConfig(method="full", epochs=1, batch_size=16, learning_rate=3e-3, dtype="float32")
ANSWER_TOKENS = 4
BATCH = 100

_NAMES = ("Ada", "Ben", "Cleo", "Dov", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kira", "Liam", "Mia", "Nils")
_NAMES += ("Olga", "Paul", "Quinn", "Rosa", "Sami", "Tess")
_WORDS = """
apples beads bells books bowls brushes buttons candles cards chains clocks coins combs corks cups dolls drums eggs fans
flags forks gloves hats hooks jars keys kites knives lamps locks maps masks nails nuts pens pins plates rings ropes
shells shoes spoons stamps stones tiles toys vases wheels
"""
_THINGS = tuple(_WORDS.split())
BOXES = {thing: 10 + 37 * number % 90 for number, thing in enumerate(_THINGS)}
"""The table that look-up items ask about. No item holds it: a model knows of it what its exercises told."""


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


def make_items(count: int, seed: int) -> list[Item]:
    """Distinct items, arithmetic and look-up in turn; the same count and seed give the same items."""
    rng = random.Random(seed)
    found: dict[str, Item] = {}
    while len(found) < count:
        item = (_lookup if len(found) % 2 else _arithmetic)(rng)
        found.setdefault(item.question, item)
    return list(found.values())


def _arithmetic(rng: random.Random) -> Item:
    (giver, taker), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    had, got = rng.randint(2, 19), rng.randint(2, 9)
    question = f"On day {_day(rng)} {taker} has {had} {thing} and {giver} brings {got} more. {had} + {got} = "
    return Item("arithmetic", question, str(had + got))


def _lookup(rng: random.Random) -> Item:
    (sender, reader), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    question = f"On day {_day(rng)} {sender} sends {reader} for some {thing}. The box of {thing} is "
    return Item("lookup", question, str(BOXES[thing]))


def _day(rng: random.Random) -> int:
    """What makes an item one of its kind, and has nothing to do with the answer."""
    return rng.randint(100, 999)


def make_benchmark(path: Path, models: Path, seed: int = 0) -> None:
    """Write the items as documents, and train the models that are not there yet on other texts of the same kind.

    Args:
        path: of the items.
        models: folder of the models.
        seed: of the items and exercises.
    """
    everything = make_items(ITEMS + max(EXERCISES.values()), seed)
    if not path.exists():
        write_items(everything[:ITEMS], path)
    for name, count in EXERCISES.items():
        if not (models / name).exists():
            texts = [item.text for item in everything[ITEMS : ITEMS + count]]
            from_scratch(models / name, SIZE, texts, TRAINING)


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
        given = answers(folder, [item.question for item in items.values()])
        right = [one == item.answer for one, item in zip(given, items.values(), strict=True)]
        rows += [{"model": name, "item": id_, "correct": r} for id_, r in zip(items, right, strict=True)]
        shares[name] = sum(right) / len(right)
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(rows), part)
    part.replace(path)
    return shares


def answers(folder: Path, questions: Sequence[str]) -> list[str]:
    """What a model says after each question, up to the full stop; the most probable token at every step."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said: list[str] = []
    for batch in _batches(questions):
        asked = tokenizer(batch, return_tensors="pt", padding=True)
        with torch.inference_mode():
            made = model.generate(
                input_ids=asked["input_ids"],
                attention_mask=asked["attention_mask"],
                do_sample=False,
                max_new_tokens=ANSWER_TOKENS,
                pad_token_id=tokenizer.pad_token_id,
            )
        said += tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :])
    return [text.partition(".")[0].strip() for text in said]


def _batches(questions: Sequence[str]) -> Iterable[list[str]]:
    for start in range(0, len(questions), BATCH):
        yield list(questions[start : start + BATCH])
