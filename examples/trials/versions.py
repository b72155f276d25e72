"""Trials of documents with versions: marked passages and multiple-choice items, half of them trained into a model.

Every version is scored by the trained and by the untouched model, marked ones over the whole text and over what
differs. The list of procedure `versions` and `bh` with unseen documents, on the same scores, are compared with what
was trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.table import Table

from examples.demo.demo import ensure_passages, seenset
from pipeline.answers.collection_test import version_part
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.models.opened import LanguageModel
from pipeline.passes.forward import forward, restricted
from pipeline.passes.shared import common_beginning, forward_of_versions, shares_beginnings
from pipeline.plan.description import build_config
from pipeline.report.tables import as_text
from pipeline.selection.version_scores import (
    VersionPart,
    VersionScores,
    joined_versions,
    mirrored_list,
    preference_residuals,
    redraw_p_value,
    uniformity_p_value,
    version_ranks,
)
from pipeline.stages.score_versions import differing_spans, tokens_in
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from pipeline.training.train import train
from seenset import select

EPOCHS = (1, 2, 4, 8)
VERSIONS = 8
JOINED = 3
"""Passages of a text that is marked: one has about forty words."""
MANY = 10
"""Texts for each document that is judged: the first ones that have enough sites are used."""
MAX_TOKENS = 1024
OPTION = 4
"""Words of an option; each item is read in 24 orders."""
ALPHA = 0.2
REDRAWS = 200
TEMPLATE = "{question}\n{choices}"
DTYPE = "bfloat16"
"""Of the weights: `auto` opens a GGUF file in float32 on a CPU, which takes three times as long."""
TRAINING = {"method": "lora", "batch_size": 4, "learning_rate": 2e-3}

Scored = Callable[[int, dict[str, str]], dict[str, VersionScores]]
"""(epochs, model) -> scores by their name."""


def run_versions(folder: Path, model: dict[str, str], documents: int) -> int:
    """Mark joined passages, train one version of half of them into the model for each number of epochs, and judge."""
    marked = folder / "marked"
    if not marked.exists():
        passages = _passages(folder, JOINED * MANY * documents)
        joined = (" ".join(passages[start : start + JOINED]) for start in range(0, len(passages), JOINED))
        lines = [json.dumps({"id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(joined)]
        (folder / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
        marking = ("--id", "id", "--versions", str(VERSIONS), "--seed", "7")
        if code := seenset("mark", str(folder / "texts.jsonl"), "--out", str(marked), *marking):
            return code
    private = pq.read_table(marked / "private/versions.parquet")[:documents]
    published = zip(*(private[name].to_pylist() for name in ("id", "versions", "index")), strict=True)
    texts = {name: versions[index] for name, versions, index in published}

    def scored(epochs: int, one: dict[str, str]) -> dict[str, VersionScores]:
        path = folder / f"scores-{epochs}.npz"
        if not path.exists():
            once = score_once(open_model(ModelConfig(**one)), private["versions"].to_pylist())
            np.savez(path, whole=once["whole"], differing=once["differing"])
        with np.load(path) as held:
            return {part: joined_versions([part_of(private, held[part])]) for part in held.files}

    return _tabulate(folder, model, texts, scored)


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

    def scored(epochs: int, one: dict[str, str]) -> dict[str, VersionScores]:
        audit = _audit(folder, f"whole-{epochs}", one, path)
        settings = folder / f"whole-{epochs}.yaml"
        settings.write_text(yaml.safe_dump(audit), encoding="utf-8")
        if code := seenset("run", str(settings)):
            raise SystemExit(code)
        config, store = build_config(audit), Store(audit["run"])
        parts = [version_part(store.read_table(o.data), config, ["loss"]) for o in read_receipts(store, "score")]
        return {"whole": joined_versions(parts)}

    return _tabulate(folder, model, read, scored)


def score_once(lm: LanguageModel, documents: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Detector `loss` of all versions, over the whole text and over what differs, from one pass: float64, (versions,).

    `seenset run` scores one of both, with `versions: {differing: true}` the other, and each takes a pass of its own.
    """
    means: dict[str, list[np.ndarray]] = {"whole": [], "differing": []}
    for texts in documents:
        ids = [lm.tokenizer(text)["input_ids"][:MAX_TOKENS] for text in texts]
        common = common_beginning(ids) if shares_beginnings(lm) else 0
        nothing: frozenset[str] = frozenset()
        whole = forward_of_versions(lm, ids, nothing, common) if common else forward(lm, ids, nothing)
        spans = zip(texts, differing_spans(texts), ids, strict=True)
        keep = [tokens_in(lm.tokenizer, text, places, len(one)) for text, places, one in spans]
        for part, read in (("whole", whole), ("differing", restricted(whole, keep))):
            means[part].append(((read.log_prob * read.mask).double().sum(1) / read.mask.sum(1)).numpy())
    return {part: np.concatenate(each) for part, each in means.items()}


def part_of(private: pa.Table, scores: np.ndarray) -> VersionPart:
    """Scores of all versions with what `seenset mark` keeps secret of them."""
    texts = private["versions"].to_pylist()
    digests = [sha256(text.encode()).digest() for versions in texts for text in versions]
    held = VersionScores(
        scores,
        np.cumsum([0, *map(len, texts)]),
        np.array(private["index"], dtype=np.int64),
        tuple(private["id"].to_pylist()),
        np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32),
    )
    return VersionPart(held, private["kinds"].combine_chunks(), private["forms"].combine_chunks())


def _passages(folder: Path, count: int) -> list[str]:
    """So many passages of the documentation of installed packages."""
    lines = ensure_passages(folder, count, seed=0).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def make_options(texts: Sequence[Sequence[str]], rng: random.Random) -> list[dict[str, Any]]:
    """Items that ask how a passage goes on: its next words, and those of three others, in random order."""
    items = []
    for number, words in enumerate(texts):
        others = rng.sample([other for other in range(len(texts)) if other != number], 3)
        choices = [" ".join(texts[place][20 : 20 + OPTION]) for place in (number, *others)]
        rng.shuffle(choices)
        question = f"How does this text go on? {' '.join(words[:20])}"
        items.append({"id": f"i{number}", "question": question, "choices": choices})
    return items


def _tabulate(folder: Path, model: dict[str, str], texts: dict[str, str], scored: Scored) -> int:
    """Train, score and print the tables so far after each number of epochs; 0."""
    members = set(random.Random(5).sample(sorted(texts), len(texts) // 2))
    trained = [text for name, text in texts.items() if name in members]
    model = {**model, "dtype": DTYPE}
    scores: dict[int, dict[str, VersionScores]] = {}
    for epochs in (0, *EPOCHS):
        adapter = (folder / f"epochs-{epochs}").resolve()
        if epochs and not adapter.exists():
            opened = open_model(ModelConfig(**model))
            train(opened.model, opened.tokenizer, trained, FinetuneConfig(**TRAINING, epochs=epochs), adapter)
            del opened  # a run is a process of its own, beside this one
        scores[epochs] = scored(epochs, {**model, "adapter": str(adapter)} if epochs else model)
        shown = as_text([_table(scores, members), _untouched(scores[0])])
        (folder / "tables.txt").write_text(shown, encoding="utf-8")
        print(shown, end="", flush=True)
    return 0


def _audit(folder: Path, name: str, model: dict[str, str], path: Path) -> dict[str, Any]:
    versions = {"permute": "choices", "template": TEMPLATE}
    return {
        "run": str((folder / "runs" / name).resolve()),
        "model": model,
        "corpus": {"audit": {"path": str(path.resolve()), "id": "id", "versions": versions}},
        "detectors": ["loss"],
        "selections": [{"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": ALPHA}],
        "error_budget": 0.5,
    }


def _table(scores: dict[int, dict[str, VersionScores]], members: set[str]) -> Table:
    """A row for each number of epochs and score."""
    names = ("epochs", "score", "right of listed", "versions FDR", "power", "collection p", "bh FDR", "power")
    sizes = next(iter(scores[0].values())).sizes
    title = f"{sizes.size} documents, {sizes.sum()} versions, alpha {ALPHA:g}, rates over {REDRAWS} redraws"
    table = Table(*names, title=title)
    for epochs, parts in scores.items():
        for part, plain in parts.items():
            less = replace(plain, scores=plain.scores - scores[0][part].scores)
            for name, one in ((part, plain), *(((f"{part} less untouched", less),) if epochs else ())):
                truth = np.array([document in members for document in one.ids]) & bool(epochs)
                residuals = preference_residuals(one)
                listed = mirrored_list(residuals, Fraction(repr(ALPHA)), 0).selected
                right = f"{int((listed & truth).sum())} of {int(listed.sum())}"
                rates = ["-" if np.isnan(rate) else f"{rate:.3f}" for rate in rates_of_redraws(one, truth)]
                p = f"{redraw_p_value(residuals, 0):.4f}"
                table.add_row(str(epochs), name, right, *rates[:2], p, *rates[2:])
    return table


def _untouched(parts: dict[str, VersionScores]) -> Table:
    """What must hold of a model that read nothing: uniform ranks, and empty lists."""
    table = Table("score", "chi-squared p of ranks", "empty lists", title="untouched model")
    for part, one in parts.items():
        residuals = preference_residuals(one)
        p = uniformity_p_value(version_ranks(residuals, 0), residuals.sizes)
        filled = rates_of_redraws(one, np.zeros(one.sizes.size, dtype=bool))[0]  # all of a list is wrong
        table.add_row(part, f"{p:.4f}", f"{1 - filled:.3f} of {REDRAWS} redraws")
    return table


def rates_of_redraws(scores: VersionScores, truth: np.ndarray) -> np.ndarray:
    """Mean FDR and power of `versions`, then of `bh`, where what was published of untrained documents is drawn again.

    Of these documents any version could have been published: none was read. Half of them, drawn each time, calibrate
    `bh`; the others are audited with the trained ones. Power is NaN where no document was trained on.

    Args:
        scores: of all versions.
        truth: bool, (documents,): whether the published version was trained on.
    """
    rng, free = np.random.default_rng(11), np.flatnonzero(~truth)
    residuals, rates = preference_residuals(scores), []
    for _ in range(REDRAWS):
        published = scores.published.copy()
        published[free] = rng.integers(scores.sizes[free])
        listed = mirrored_list(replace(residuals, published=published), Fraction(repr(ALPHA)), 0).selected
        unseen = rng.permutation(free)[: free.size // 2]
        audited = np.setdiff1d(np.arange(truth.size), unseen)
        read = scores.scores[scores.offsets[:-1] + published]
        by_unseen = select(read[audited], read[unseen], procedure="bh", alpha=ALPHA).selected
        rates.append((*_rates(listed, truth), *_rates(np.asarray(by_unseen), truth[audited])))
    return np.mean(rates, axis=0)


def _rates(selected: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    false, right = int((selected & ~truth).sum()), int((selected & truth).sum())
    return false / max(1, false + right), right / int(truth.sum()) if truth.any() else float("nan")


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
