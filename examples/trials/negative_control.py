"""A negative control: unseen documents alone, split hundreds of times as if one part of them were audited.

Nothing is trained and nothing is true: every list that is not empty, and every count above zero, is a false alarm.
The documents are scored once; each split then runs every registered procedure and the test of the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.table import Table

from examples.demo.demo import ensure_passages
from pipeline.answers.detection import CONFIDENCE
from pipeline.config.models import ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.corpus.documents import id_key
from pipeline.errors import UserError
from pipeline.report.tables import as_text
from pipeline.selection.collection import LEAST_BLOCKS, make_blocks, permutation_test
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.shares import clopper_pearson
from pipeline.trial.config import build_trial
from pipeline.trial.trial_documents import read_documents
from seenset import score

NAME = "negative_control"
SPLITS = 400
ALPHA = Fraction(1, 100)
DETECTORS = ("loss", "zlib", "lowercase", "min_k", "min_k_plus_plus")
"""The last one is that of procedures that take a single detector."""

VERDICT = "permutation test of the verdict"
SCOPE = (
    "A rate is the share of these splits, and its {:.0%} interval (Clopper-Pearson, exact) is of the share of all "
    "splits of these documents, given their scores: splits of one set share its documents, and another set may have "
    "another rate. A random split makes the audited documents exchangeable with those that calibrate: this checks the "
    "procedures, and not whether your audited documents are like your unseen ones, which the blind test does."
)


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """How often one procedure, or the test of the verdict, alarmed over the splits."""

    name: str
    guarantee: str
    lists: int | None  # splits with a list that is not empty; None of the test, which makes none
    verdicts: int | None  # splits whose count is above zero, or whose p-value is at most alpha; None: not defined
    splits: int

    def row(self, allowed: float) -> tuple[str, ...]:
        """The cells of the table."""
        return (
            self.name,
            self.guarantee,
            *(_rate(n, self.splits) for n in (self.lists, self.verdicts)),
            f"{allowed:g}",
        )


def control_selections(detectors: Sequence[str], alpha: Fraction) -> tuple[list[SelectionConfig], list[str]]:
    """A selection of every registered procedure that unseen documents suffice for, and the names of the others.

    Procedures that fuse p-values come with `reconformal` too, and those that learn a score with both ways to step up.
    The bounds, and so the counts of the verdict, hold with confidence 1 - alpha.
    """
    selections, others = [], []
    for name, one in PROCEDURES.items():
        if one.needs_sought or one.signed or one.only_versions:
            others.append(name)
            continue
        variants: list[dict[str, Any]] = [{}]
        variants += [{"reconformal": True}] if one.fuses_p else [{"step_up": "storey"}] if one.learns else []
        for variant in variants:
            settings = {
                "name": "_".join([name, *(str(value) if value is not True else key for key, value in variant.items())]),
                "detectors": list(detectors) if one.several else [detectors[-1]],
                "procedure": name,
                "alpha": float(alpha),
                "confidence": float(1 - alpha),
            }
            selections.append(SelectionConfig(**settings, **variant))
    return selections, others


def exact_size(documents: int, alpha: Fraction) -> int:
    """The most audited documents m whose n = m / alpha - 1 calibrating ones are there too; at least 1.

    With n + 1 = m / alpha every threshold of BH is a p-value that can occur, so that without ties BH on null documents
    selects something with probability alpha exactly (Marandon et al. 2024, theorem 3.1).
    """
    return max(1, int((documents + 1) / (1 + 1 / alpha)))


def count_alarms(
    scores: Scores, selections: Sequence[SelectionConfig], audited: int, unseen: int, splits: int, seed: int = 0
) -> list[FalseAlarms]:
    """Split the documents `splits` times and count the alarms of each selection and of the permutation test.

    Args:
        scores: of unseen documents alone.
        selections: of direction members.
        audited: documents that each split audits.
        unseen: documents that calibrate it.
        splits: how many.
        seed: of the splits and of all that is random in an answer.

    Raises:
        UserError: fewer documents than a split takes.
    """
    if scores.keys.size < audited + unseen:
        raise UserError(f"a split takes {audited + unseen} documents, got {scores.keys.size}")
    matrix = np.stack(list(scores.columns.values()), axis=1)
    lists, counts, below = np.zeros(len(selections), int), np.zeros(len(selections), int), 0
    guarantees, tested = [""] * len(selections), min(audited, unseen) >= LEAST_BLOCKS
    bounded = [True] * len(selections)
    for number in range(splits):
        order = np.random.default_rng([seed, number]).permutation(scores.keys.size)[: audited + unseen]
        roles = {"audit": order[:audited], "unseen": order[audited:]}
        for place, verdict in enumerate(answer_all(selections, scores, roles, 0, seed + number)):
            bound = verdict.answer.bound
            lists[place] += bool(verdict.selected.any())
            counts[place] += bound is not None and bound.members_at_least > 0
            bounded[place], guarantees[place] = bound is not None, verdict.answer.guarantee
        if tested:
            blocks = make_blocks(matrix[order], np.arange(order.size), np.arange(order.size) < audited, seed + number)
            result = permutation_test(blocks, seed + number)
            below += result is not None and result.p_value <= ALPHA
    rows = [
        FalseAlarms(one.name, guarantees[i], int(lists[i]), int(counts[i]) if bounded[i] else None, splits)
        for i, one in enumerate(selections)
    ]
    return [*rows, FalseAlarms(VERDICT, "finite-sample", None, below if tested else None, splits)]


def run_negative_control(
    folder: Path, model: dict[str, str], passages: int, source: dict[str, str] | None, splits: int
) -> int:
    """Score the documents once, split them, and print the tables; scores of an earlier call are used again.

    Args:
        folder: of the scores and tables.
        model: as a configuration names it.
        passages: of the documentation of packages, where no documents are given.
        source: path, id and text of the user's unseen documents; None: passages.
        splits: of each size.

    Raises:
        UserError: too few documents, or as `read_documents` and `score`.
    """
    if splits < 1:
        raise UserError(f"--splits must be at least 1, got {splits}")
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        source = {"path": str(ensure_passages(folder.parent, passages, seed=0)), "id": "id", "text": "text"}
    scores = control_scores(folder / "scores.parquet", model, source)
    selections, others = control_selections(DETECTORS, ALPHA)
    documents = scores.keys.size
    few = exact_size(documents, ALPHA)
    tables = []
    for audited, unseen in ((documents // 2, documents - documents // 2), (few, int(few / ALPHA) - 1)):
        if documents < audited + unseen:
            raise UserError(f"alpha {float(ALPHA):g} takes at least {int(1 / ALPHA)} unseen documents, got {documents}")
        title = f"{splits} splits of {documents} unseen documents: {audited} audited, {unseen} calibrate"
        table = Table(title=title)
        for name in (
            "procedure",
            "guarantee",
            "list not empty",
            f"verdict: count > 0 or p <= {float(ALPHA):g}",
            "allowed",
        ):
            table.add_column(name, justify="left" if name in ("procedure", "guarantee") else "right")
        for row in count_alarms(scores, selections, audited, unseen, splits):
            table.add_row(*row.row(float(ALPHA)))
        tables.append(table)
    notes = f"{SCOPE.format(CONFIDENCE)}\nNot run, as unseen documents do not suffice: {', '.join(others) or 'none'}.\n"
    shown = as_text(tables) + notes
    (folder / "tables.txt").write_text(shown, encoding="utf-8")
    print(shown, end="")
    return 0


def control_scores(path: Path, model: dict[str, str], source: dict[str, str]) -> Scores:
    """The scores of the documents of a source; those at `path`, where model and documents are the same.

    Raises:
        UserError: no document has scores.
    """
    trial = {"run": str(path.parent), "model": model, "documents": source, "detectors": list(DETECTORS)}
    config, _ = build_trial({**trial, "selections": [{"name": "bh", "detectors": [DETECTORS[-1]]}]})
    documents = read_documents(config)
    made_of = {b"model": repr(sorted(model.items())).encode(), b"documents": documents.digest.encode()}
    table = pq.read_table(path) if path.exists() else None
    if table is None or any((table.schema.metadata or {}).get(key) != value for key, value in made_of.items()):
        table = score(ModelConfig(**model), documents.texts, DETECTORS, ids=documents.ids)
        table = table.replace_schema_metadata(made_of)
        pq.write_table(table, path)
    whole = table.filter(pc.is_null(table["problem"]))
    if not len(whole):
        raise UserError(f"no document of {source['path']} has scores")
    columns = {name: whole[name].to_numpy() for name in DETECTORS}
    return Scores(columns, np.array([id_key(doc_id) for doc_id in whole["doc_id"].to_pylist()], dtype=np.int64))


def _rate(events: int | None, splits: int) -> str:
    if events is None:
        return "-"
    low, high = clopper_pearson(events, splits, (1 - CONFIDENCE) / 2)
    return f"{events} ({events / splits:.4f} [{low:.4f}, {high:.4f}])"
