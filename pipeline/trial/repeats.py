"""Repeats: calibration and audit sets drawn again and again over one model's stored scores, each answer judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import Role
from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.in_memory import Scores, Verdict, answer_all
from pipeline.trial.checks import NO_CHECKS, WordChecks, weigh_repeat
from pipeline.trial.config import TrialConfig
from pipeline.trial.splits import Drawable, Split, draw_split

ROWS_SCHEMA = pa.schema(
    [
        ("model", pa.int64()),
        ("repeat", pa.int64()),
        ("selection", pa.string()),
        ("n_audit", pa.int64()),
        ("n_members", pa.int64()),
        ("n_calibration", pa.int64()),
        ("n_selected", pa.int64()),
        ("n_false", pa.int64()),
        ("n_sought", pa.int64()),
        ("null_proportion", pa.float64()),
        ("null_share", pa.float64()),
        ("strict_selected", pa.int64()),
        ("guarantee", pa.string()),
        ("wrong_at_most", pa.int64()),
        ("sought_at_least", pa.int64()),
        ("effective", pa.float64()),
        ("supported", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The documents of one contaminated model, with what the trial knows and what the audit found.

    Selection sees `scores`; `trained` is for the trial alone.
    """

    ids: list[str]
    family: np.ndarray  # int64, (documents,)
    trained: np.ndarray  # bool, (documents,)
    scored: np.ndarray  # bool, (documents,); False: quarantined, or trained an adapter
    scores: Scores  # of all documents; NaN where not scored
    finetuned: Mapping[Role, np.ndarray] = field(default_factory=dict)  # bool, (documents,): trained adapters; unscored
    places: Mapping[str, np.ndarray] = field(default_factory=dict)  # by of a shift -> `shift.positions`
    words: Any = (
        None  # of all documents, `checks.known_of_documents`; None where no selection weighs and nothing shifts
    )


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """One repeat: the audited documents that have scores, and each selection's verdict on them."""

    number: int
    split: Split
    audited: np.ndarray  # int64 positions in the pool
    quarantined: int
    verdicts: list[Verdict]
    checks: WordChecks


def repeats(pool: Pool, config: TrialConfig, model: int) -> Iterator[Repeat]:
    """Split the pool and answer the trial's selections, `config.repeats` times.

    Raises:
        UserError: too few documents for a split, or a selection that cannot be answered.
    """
    known, shift = config.roles(), config.split.shift
    lean = None if shift is None else shift.strength * pool.places[shift.by]
    documents = Drawable(pool.trained, pool.family, pool.finetuned, lean)
    for number in range(config.repeats):
        drawn = draw_split(documents, known, config.split, config.seed, model, number)
        roles = {role: _scored(pool, drawn.of(role)) for role in ("audit", *known)}
        quarantined = drawn.audit.size - roles["audit"].size
        scores, checks, seed = pool.scores, NO_CHECKS, config.seed + number
        if pool.words is not None and config.reads_words:
            scores, checks = weigh_repeat(scores, pool.words, pool.family, roles, config.selections, seed)
        verdicts = answer_all(config.selections, scores, roles, quarantined, seed)
        yield Repeat(number, drawn, roles["audit"], quarantined, verdicts, checks)


def judge(pool: Pool, selection: SelectionConfig, repeat: Repeat, verdict: Verdict) -> dict[str, object]:
    """Hold one verdict against the truth: a row of the table of repeats.

    A false selection is an untrained document where members are sought, a trained one where clean documents are. The
    null share is that of the audited documents, quarantined ones included: what the estimates of it aim at. The bounds
    are null where there are none.
    """
    members = int(pool.trained[repeat.split.audit].sum())
    audited = int(repeat.split.audit.size)
    chosen = int(verdict.selected.sum())
    trained = int(pool.trained[repeat.audited][verdict.selected].sum())
    sought, false = (members, chosen - trained) if selection.direction == "members" else (audited - members, trained)
    bound = verdict.answer.bound
    return {
        "repeat": repeat.number,
        "selection": selection.name,
        "n_audit": audited,
        "n_members": members,
        "n_calibration": verdict.answer.n_calibration,
        "n_selected": chosen,
        "n_false": false,
        "n_sought": sought,
        "null_proportion": float(verdict.answer.null_proportion),
        "null_share": (audited - sought) / audited,
        "strict_selected": verdict.answer.strict.n_selected,
        "guarantee": verdict.answer.guarantee,
        "wrong_at_most": None if bound is None else bound.wrong_at_most,
        "sought_at_least": None if bound is None else bound.members_at_least,
        "effective": verdict.answer.effective,
        "supported": repeat.checks.supported(selection, verdict),
    }


def measure(pool: Pool, config: TrialConfig, model: int) -> pa.Table:
    """All the repeats of one model, a row for each repeat and selection (`ROWS_SCHEMA`)."""
    rows = []
    for repeat in repeats(pool, config, model):
        for selection, verdict in zip(config.selections, repeat.verdicts, strict=True):
            rows.append({"model": model, **judge(pool, selection, repeat, verdict)})
    return pa.Table.from_pylist(rows, schema=ROWS_SCHEMA)


def _scored(pool: Pool, positions: np.ndarray) -> np.ndarray:
    return np.asarray(positions[pool.scored[positions]])


def pool_of(table: pa.Table, ids: list[str], family: np.ndarray, trained: np.ndarray, columns: list[str]) -> Pool:
    """Line up an audit's scores with the trial's documents.

    Args:
        table: doc_id, id_key, group and the columns, of scored documents in any order.
        ids: of the trial's documents.
        family: int64, (documents,).
        trained: bool, (documents,).
        columns: detector columns.

    Raises:
        UserError: the table holds a document that is none of the trial's.
    """
    place = {doc_id: index for index, doc_id in enumerate(ids)}
    try:
        at = np.array([place[doc_id] for doc_id in table["doc_id"].to_pylist()], dtype=np.int64)
    except KeyError as error:
        raise UserError(f"the audit's scores hold {error}, which is none of the trial's documents") from None
    scored = np.zeros(len(ids), dtype=bool)
    scored[at] = True
    values = {}
    for column in columns:
        values[column] = np.full(len(ids), np.nan)
        values[column][at] = table[column].to_numpy()
    keys = np.zeros(len(ids), dtype=np.int64)
    keys[at] = table["id_key"].to_numpy()
    order = np.zeros(len(ids), dtype=np.int64)
    order[at] = np.arange(at.size)
    groups = table["group"].combine_chunks().take(pa.array(order, mask=~scored))
    return Pool(ids, family, trained, scored, Scores(values, keys, groups))
