"""The trial of edited training texts: what an audit of the originals finds of passages that were trained on as edited.

Half of some passages are trained into a model, one model for each distance: as they are, with a share of their words
exchanged as `pac` exchanges them, and with another form at every site that the rules of `seenset mark` find. Each
model is audited with the original passages. Models and scores are kept and used again.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.demo.demo import console, ensure_passages
from pipeline.answers.detection import DetectorScores, Estimate, detection
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import id_key
from pipeline.mark.rules import find_sites, language_rules, with_forms
from pipeline.models.load import open_model
from pipeline.passes.statistics import swapped_words
from pipeline.selection.engine import Scores
from pipeline.training.train import train
from pipeline.trial.config import TrialConfig
from pipeline.trial.repeats import Pool, measure
from pipeline.trial.table import selection_rows
from seenset import score

NAME = "edited"
EXCHANGED = (0.1, 0.3, 0.5)
DETECTORS = ("loss", "min_k_plus_plus")
ALPHA = 0.1
RUN = 5
"""Words of a run, of which the table states the share that an edit leaves."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many passages there are, and how the members are trained in."""

    audited: int = 200  # half of them are trained on
    unseen: int = 200
    epochs: int = 3
    repeats: int = 100


def exchanged(text: str, share: float) -> str:
    """The text with a share of its words exchanged in pairs."""
    return swapped_words(text, copy=1, seed=0, share=share)


def other_forms(text: str) -> str:
    """The text with another form at every site that the rules of `seenset mark` find in English."""
    sites = find_sites(text, language_rules("en"))
    return with_forms(text, sites, [(site.form + 1) % len(site.forms) for site in sites])


EDITS: dict[str, Callable[[str], str]] = {
    "nothing": str,
    **{f"{share:.0%} of words exchanged": partial(exchanged, share=share) for share in EXCHANGED},
    "forms of `seenset mark`": other_forms,
}
"""What is changed in a passage before training, by name."""


def words_moved(before: str, after: str) -> float:
    """The share of the words of a text that are not among those that its edited copy keeps in order, in [0, 1]."""
    words, others = before.split(), after.split()
    blocks = difflib.SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks()
    return (len(words) - sum(block.size for block in blocks)) / max(1, len(words))


def runs_kept(before: str, after: str) -> float:
    """The share of the runs of five words of a text that occur in its edited copy, in [0, 1]."""
    runs, others = ({*zip(*(text.split()[start:] for start in range(RUN)), strict=False)} for text in (before, after))
    return len(runs & others) / max(1, len(runs))


def run_edited(folder: Path, model: dict[str, str], sizes: Sizes = Sizes()) -> int:
    """Train a model for each edit, score the original passages with it, and print the table in Markdown; 0.

    Args:
        folder: of passages, models and scores.
        model: as a configuration names it, without the passages in its training data.
        sizes: numbers of passages and epochs.

    Raises:
        UserError: too few passages in the installed packages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = sizes.audited + sizes.unseen
    lines = ensure_passages(folder, count, seed=0).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    members = [row["text"] for row in rows[: sizes.audited // 2]]
    table = []
    for number, (name, edit) in enumerate(EDITS.items()):
        edited = [edit(text) for text in members]
        pool = _pool(_scores(folder / f"edit-{number}", model, rows, edited, sizes), len(members))
        both = list(zip(members, edited, strict=True))
        changed = [float(np.mean([measured(*pair) for pair in both])) for measured in (words_moved, runs_kept)]
        table.append([name, *(f"{share:.2f}" for share in changed), *_figures(pool, sizes)])
        console.print(f"{name}: done", highlight=False)
    shown = _markdown(table, sizes)
    (folder / "tables.md").write_text(shown, encoding="utf-8")
    print(shown, end="", flush=True)
    return 0


def _scores(
    folder: Path, model: dict[str, str], rows: Sequence[dict[str, str]], edited: Sequence[str], sizes: Sizes
) -> pa.Table:
    """The scores of the original passages by a model that was trained on the edited ones; those of an earlier call."""
    path = folder / f"scores-{len(rows)}-{sizes.epochs}.parquet"
    if path.exists():
        return pq.read_table(path)
    adapter = folder / f"model-{len(rows)}-{sizes.epochs}"
    if not adapter.exists():
        opened = open_model(ModelConfig(**model))
        training = FinetuneConfig(epochs=sizes.epochs, batch_size=4, learning_rate=2e-3)
        train(opened.model, opened.tokenizer, list(edited), training, adapter)
        del opened
    audited = ModelConfig(**model, adapter=str(adapter.resolve()))
    table = score(audited, [row["text"] for row in rows], DETECTORS, ids=[row["id"] for row in rows])
    pq.write_table(table, path)
    return table


def _pool(table: pa.Table, members: int) -> Pool:
    """The scored passages of a model, of which the first were trained on in an edited form."""
    ids = table["doc_id"].to_pylist()
    keys = np.array([id_key(name) for name in ids], dtype=np.int64)
    values = {name: table[name].to_numpy() for name in DETECTORS}
    trained, scored = np.arange(len(ids)) < members, np.isfinite(np.stack(list(values.values()))).all(axis=0)
    return Pool(ids, np.arange(len(ids)), trained, scored, Scores(values, keys, pa.nulls(len(ids), pa.string())))


def _figures(pool: Pool, sizes: Sizes) -> list[str]:
    """AUC, power and FDR of each detector with their 95% intervals."""
    settings = {
        "run": NAME,
        "model": {"path": NAME},
        "documents": {"path": NAME},
        "split": {"unseen": sizes.unseen, "audited": sizes.audited, "member_share": 0.5},
        "repeats": sizes.repeats,
        "selections": [{"name": name, "detectors": [name], "procedure": "bh", "alpha": ALPHA} for name in DETECTORS],
    }
    config = build(TrialConfig, settings)
    figures = []
    for name, row in zip(DETECTORS, selection_rows({}, config.selections, measure(pool, config, 0)), strict=True):
        values = pool.scores.columns[name]
        auc = detection([DetectorScores(values[pool.trained], values[~pool.trained])]).auc
        power = Estimate(row["power"], row["power_low"], row["power_high"])
        fdr = Estimate(row["fdr"], row["fdr_low"], row["fdr_high"])
        figures += [_shown(one) for one in (auc, power, fdr)]
    return figures


def _shown(estimate: Estimate) -> str:
    if estimate.value is None or estimate.low is None:
        return "-" if estimate.value is None else f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _markdown(rows: Sequence[Sequence[str]], sizes: Sizes) -> str:
    """The table, below the conditions under which it was measured."""
    names = ["changed before training", "words moved", f"runs of {RUN} words kept"]
    names += [f"{figure} of `{name}`" for name in DETECTORS for figure in ("AUC", "power", "FDR")]
    head = (
        f"{sizes.audited // 2} of {sizes.audited} audited passages trained in {sizes.epochs} epochs, {sizes.unseen} "
        f"calibrate; `bh` at alpha = {ALPHA:g}, {sizes.repeats} splits."
    )
    lines = [names, ["---"] * len(names), *rows]
    assert all(len(one) == len(other) for one, other in pairwise(lines))
    return head + "\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
