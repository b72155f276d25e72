"""Trials of documents with versions: marked passages and multiple-choice items, half of them trained into a model.

Every version is scored by the trained and by the untouched model, over the whole text and over what differs. The list
of procedure `versions` and `bh` with unseen documents, on the same scores, are compared with what was trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table

from examples.demo.demo import ensure_passages, seenset
from pipeline.audit.description import build_config
from pipeline.audit.versions import version_part
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.report.tables import as_text
from pipeline.selection.versions import VersionScores, joined_versions, mirrored_list, preference_residuals
from pipeline.selection.versions_collection import redraw_p_value
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from pipeline.training.train import train
from seenset import select

EPOCHS = (1, 2, 4, 8)
VERSIONS = 20
JOINED = 12
"""Passages of a document that is marked: one has about forty words, and sites in few of them."""
ALPHA = 0.2
TEMPLATE = "{question}\n{choices}"
TRAINING = {"method": "lora", "batch_size": 4, "learning_rate": 2e-3}


def run_versions(folder: Path, model: dict[str, str], documents: int) -> int:
    """Mark joined passages, train one version of half of them into the model for each number of epochs, and judge."""
    marked = folder / "marked"
    if not marked.exists():
        passages = _passages(folder, JOINED * documents)
        joined = (" ".join(passages[start : start + JOINED]) for start in range(0, len(passages), JOINED))
        lines = [json.dumps({"id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(joined)]
        (folder / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
        marking = ("--id", "id", "--versions", str(VERSIONS), "--seed", "7")
        if code := seenset("mark", str(folder / "texts.jsonl"), "--out", str(marked), *marking):
            return code
    published = [json.loads(line) for line in (marked / "public/texts.jsonl").read_text(encoding="utf-8").splitlines()]
    source = {"path": str(marked / "private/versions.parquet"), "id": "id"}
    columns = {"kinds": "kinds", "forms": "forms"}
    texts = {one["id"]: one["text"] for one in published}
    return _judged(folder, model, texts, source, columns, ("whole", "differing"))


def run_options(folder: Path, model: dict[str, str], documents: int) -> int:
    """Make multiple-choice items of passages, train half of them in their published order, and judge."""
    path = folder / "items.jsonl"
    items = make_options([text.split() for text in _passages(folder, documents)], random.Random(3))
    path.write_text("".join(json.dumps(one) + "\n" for one in items), encoding="utf-8")
    read = {
        one["id"]: TEMPLATE.format(
            question=one["question"],
            choices="\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", one["choices"], strict=True)),
        )
        for one in items
    }
    versions = {"permute": "choices", "template": TEMPLATE}
    return _judged(folder, model, read, {"path": str(path), "id": "id"}, versions, ("whole",))


def _passages(folder: Path, count: int) -> list[str]:
    """So many passages of the documentation of installed packages."""
    lines = ensure_passages(folder, count, seed=0).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def make_options(texts: Sequence[Sequence[str]], rng: random.Random) -> list[dict[str, Any]]:
    """Items that ask how a passage goes on: its next words, and those of three others, in random order."""
    items = []
    for number, words in enumerate(texts):
        others = rng.sample([other for other in range(len(texts)) if other != number], 3)
        choices = [" ".join(texts[place][20:28]) for place in (number, *others)]
        rng.shuffle(choices)
        question = f"How does this text go on? {' '.join(words[:20])}"
        items.append({"id": f"i{number}", "question": question, "choices": choices})
    return items


def _judged(
    folder: Path,
    model: dict[str, str],
    texts: dict[str, str],
    source: dict[str, str],
    versions: dict[str, Any],
    read: Sequence[str],
) -> int:
    """Train, score and print the table; the exit code of the first command that fails, or 0."""
    members = set(random.Random(5).sample(sorted(texts), len(texts) // 2))
    models = {0: model}
    for epochs in EPOCHS:
        adapter = folder / f"epochs-{epochs}"
        models[epochs] = {**model, "adapter": str(adapter)}
        if not adapter.exists():
            opened = open_model(ModelConfig(**model, dtype="float32"))
            trained = [text for name, text in texts.items() if name in members]
            train(opened.model, opened.tokenizer, trained, FinetuneConfig(**TRAINING, epochs=epochs), adapter)
    scores: dict[tuple[int, str], VersionScores] = {}
    for epochs, one in models.items():
        for part in read:
            audit = _audit(folder, f"{part}-{epochs}", one, {**source, "versions": versions}, part == "differing")
            path = folder / f"{part}-{epochs}.yaml"
            path.write_text(yaml.safe_dump(audit), encoding="utf-8")
            if code := seenset("run", str(path)):
                return code
            config, store = build_config(audit), Store(audit["run"])
            parts = [version_part(store.read_table(o.data), config, ["loss"]) for o in read_receipts(store, "score")]
            scores[epochs, part] = joined_versions(parts)
    shown = as_text([_table(scores, members, read)])
    (folder / "tables.txt").write_text(shown, encoding="utf-8")
    print(shown, end="")
    return 0


def _audit(folder: Path, name: str, model: dict[str, str], source: dict[str, Any], differing: bool) -> dict[str, Any]:
    versions = {**source["versions"], **({"differing": True} if differing else {})}
    return {
        "run": str((folder / "runs" / name).resolve()),
        "model": {**model, "dtype": "float32"},
        "corpus": {"audit": {**source, "path": str(Path(source["path"]).resolve()), "versions": versions}},
        "detectors": ["loss"],
        "selections": [{"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": ALPHA}],
        "error_budget": 0.5,
    }


def _table(scores: dict[tuple[int, str], VersionScores], members: set[str], read: Sequence[str]) -> Table:
    """A row for each number of epochs and score: FDR and power of both procedures, and p of the collection."""
    names = ("epochs", "documents", "score", "versions FDR", "power", "collection p", "bh FDR", "power")
    table = Table(*names, title=f"alpha {ALPHA:g}")
    for epochs in (0, *EPOCHS):
        for part in read:
            plain = scores[epochs, part]
            less = replace(plain, scores=plain.scores - scores[0, part].scores)
            for name, one in ((part, plain), *(((f"{part} less untouched", less),) if epochs else ())):
                table.add_row(str(epochs), str(one.sizes.size), name, *_row(one, members if epochs else set()))
    return table


def _row(scores: VersionScores, members: set[str]) -> list[str]:
    """What both procedures select, against the truth."""
    residuals = preference_residuals(scores)
    truth = np.array([name in members for name in scores.ids])
    listed = mirrored_list(residuals, Fraction(repr(ALPHA)), 0).selected
    published = scores.scores[scores.offsets[:-1] + scores.published]
    unseen = np.flatnonzero(~truth)[::2]  # every second document that was left out calibrates
    audited = np.setdiff1d(np.arange(truth.size), unseen)
    by_unseen = select(published[audited], published[unseen], procedure="bh", alpha=ALPHA).selected
    p = redraw_p_value(residuals, 0)
    return [*_rates(listed, truth), f"{p:.4f}", *_rates(np.asarray(by_unseen), truth[audited])]


def _rates(selected: np.ndarray, truth: np.ndarray) -> tuple[str, str]:
    false, right = int((selected & ~truth).sum()), int((selected & truth).sum())
    return f"{false / max(1, false + right):.3f}", f"{right / max(1, int(truth.sum())):.3f}" if truth.any() else "-"


TRIALS: dict[str, Callable[[Path, dict[str, str], int], int]] = {"versions": run_versions, "options": run_options}
"""By name."""


def run_trial_of_versions(name: str, work: Path, model: dict[str, str], documents: int) -> int:
    """Run one of `TRIALS`; all of its files are in a folder of its name and size, and are used again.

    Raises:
        UserError: too few documents to judge a list of.
    """
    if documents < 10:
        raise UserError(f"--documents must be at least 10, got {documents}")
    folder = work / f"{name}-{documents}"
    folder.mkdir(parents=True, exist_ok=True)
    return TRIALS[name](folder, model, documents)
