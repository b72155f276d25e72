"""Density-ratio weights of documents, from their words: odds of audited against calibration documents.

A run learns its weights once, from a sample, and then writes one file per score shard.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.audit.blind import blocks_of_documents, sample_documents, word_model
from pipeline.audit.halvings import LEAST, Blind, Compared, held_out, interval_of
from pipeline.audit.records import Record, read_part, write_part
from pipeline.audit.scored import Each, Scored
from pipeline.audit.summary import BlindDiagnostic, WeightingDiagnostic
from pipeline.audit.words import used_columns, without_zeros, word_counts
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.documents import Document, id_key, read_shard, text_key
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording.blind import WORDS, weighted_sentence, weights_sentence
from pipeline.report.wording.files import changed as not_written
from pipeline.report.wording.files import made_again_note
from pipeline.selection.conformal import halves, shuffled
from pipeline.selection.weighted import FEWEST_EFFECTIVE, weight_levels
from pipeline.store.receipts import Receipt, read_filed

PARTS = 5
INNER = 3
STRENGTHS = (0.1, 1.0, 10.0)
CLIP = 0.99
_WEIGH = 3  # differs from the hash of a split, with which the same models would weight all documents of one half

_log = logging.getLogger(__name__)

AT_ONCE = 1_000
"""Texts that are weighted at a time, which limits memory."""

WEIGHTS_SCHEMA = pa.schema([("row", pa.int64()), ("weight", pa.int64())])

_FORM = 3  # by halvings, with digests of the files


@dataclass(frozen=True, slots=True, eq=False)
class DensityRatio:
    """Odds of audited against calibration documents, by their words, from classifiers not trained on the document.

    Documents are put into PARTS parts by the hash of their ids; those of a part are weighted by a classifier that was
    trained on the other parts.
    """

    coefficients: np.ndarray  # float64, (parts, features): log odds that each word adds
    intercepts: np.ndarray  # float64, (parts,)
    largest: float  # upper limit of the odds
    seed: int

    def odds(self, words: Any, keys: np.ndarray) -> np.ndarray:
        """The odds of each document before clipping.

        Args:
            words: sparse, (documents, features), from `words.word_counts`.
            keys: int64, (documents,), hashes of their ids.

        Returns:
            float64, (documents,), >= 0.
        """
        part = _part_of(keys, self.seed)
        logs = np.empty(part.size)
        for index in range(PARTS):
            inside = np.flatnonzero(part == index)
            logs[inside] = words[inside] @ self.coefficients[index] + self.intercepts[index]
        return np.asarray(np.exp(np.clip(logs, -40, 40)))

    def weigh(self, texts: Sequence[str], keys: np.ndarray) -> np.ndarray:
        """Weights of documents, int64, (documents,), in 1..LEVELS."""
        if not texts:
            return np.empty(0, dtype=np.int64)
        return weight_levels(self.odds(word_counts(texts), keys), self.largest)


def _part_of(keys: np.ndarray, seed: int) -> np.ndarray:
    return (shuffled(keys, seed, _WEIGH) % np.uint64(PARTS)).astype(np.int64)


def fit_ratio(words: Any, audited: np.ndarray, keys: np.ndarray, seed: int) -> DensityRatio:
    """Learn the weights from documents of both kinds.

    The classifier is that of the blind test. Its penalty, and the slope and intercept of its log odds, are chosen on
    held-out documents, so that uninformative words have no weight. Odds are clipped at the 99th percentile of both
    kinds.

    Args:
        words: sparse, (documents, features), from `words.word_counts`.
        audited: bool, (documents,); the others calibrate.
        keys: int64, (documents,), hashes of their ids.
        seed: seed of the parts.

    Raises:
        UserError: fewer than 20 documents of either kind.
    """
    counts = int((~audited).sum()), int(audited.sum())
    if min(counts) < LEAST:
        raise UserError(
            f"calibration weighted needs at least {LEAST} calibration and {LEAST} audited documents to learn how their "
            f"words differ, got {counts[0]} and {counts[1]}"
        )
    part, used, some = _part_of(keys, seed), used_columns(words), without_zeros(words)
    fitted = [_fit(some[part != index], audited[part != index], seed) for index in range(PARTS)]
    coefficients = np.zeros((PARTS, words.shape[1]))
    coefficients[:, used] = [each[0] for each in fitted]
    ratio = DensityRatio(coefficients, np.array([each[1] for each in fitted]), math.inf, seed)
    return replace(ratio, largest=float(np.quantile(ratio.odds(words, keys), CLIP)))


def _fit(words: Any, audited: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """The log odds that each word adds, and the intercept, without the log odds of the two numbers of documents."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    labels = audited.astype(int)
    folds = StratifiedKFold(INNER, shuffle=True, random_state=seed % 2**32)
    balance = np.where(audited, 0.5 / audited.mean(), 0.5 / (1 - audited.mean()))
    best, loss = (0.0, 0.0, STRENGTHS[0]), math.log(2)  # of uninformative words
    for strength in STRENGTHS:
        model = word_model(strength)
        held_out = cross_val_predict(model, words, labels, cv=folds, method="decision_function")[:, None]
        scale = LogisticRegression(class_weight="balanced").fit(held_out, labels)
        here = log_loss(labels, scale.predict_proba(held_out)[:, 1], sample_weight=balance)
        if here < loss and scale.coef_[0, 0] > 0:
            best, loss = (float(scale.coef_[0, 0]), float(scale.intercept_[0]), strength), here
    slope, level, strength = best
    if slope == 0:
        return np.zeros(words.shape[1]), 0.0
    model = word_model(strength).fit(words, labels)
    return slope * model.coef_[0], slope * float(model.intercept_[0]) + level


def blind_weighted(words: Any, compared: Compared, weights: np.ndarray, seed: int) -> tuple[float, float, int] | None:
    """The blind test, repeated with weighted calibration documents.

    The classifier is trained with the weights, and its AUC, held out, counts pairs by them.

    Args:
        words: sparse, (documents, features).
        compared: roles and blocks of the documents.
        weights: float, (documents,), > 0; those of audited documents are not read.
        seed: seed of the halvings.

    Returns:
        the AUC, its standard error and the effective number of calibration documents; None with too few blocks of a
        role.
    """
    audited = compared.audited
    counted = np.ones(audited.size)
    counted[~audited] = weights[~audited] * ((~audited).sum() / weights[~audited].sum())
    weighed = Compared.of(audited, compared.block, counted)
    held = held_out(without_zeros(words), weighed, seed, word_model(), weighted=True)
    return None if held is None else (*held.auc(), max(2, math.floor(effective_number(counted[~audited]))))


def blind_after(words: Any, compared: Compared, keys: np.ndarray, seed: int) -> Blind | None:
    """Test whether words distinguish the two kinds after weighting, on documents that the weights were not learnt from.

    Weights learnt on each half of the blocks are tested on the other half with `blind_weighted`; the AUC and its
    standard error are the means of the two. On their training documents, weights look better than they are: in
    simulations the AUC was then below 0.5.

    Args:
        words: sparse, (documents, features).
        compared: roles and blocks of the documents.
        keys: int64, (documents,), hashes of their ids.
        seed: seed of the halves and halvings.

    Returns:
        the test, with the effective number of calibration documents in place of their number; None with fewer than 20
        documents, or fewer than `halvings.LEAST_BLOCKS` blocks, of either kind in a half.
    """
    audited = compared.audited
    order = np.lexsort((keys, compared.block))
    firsts = order[np.unique(compared.block[order], return_index=True)[1]]
    first = halves(keys[firsts], seed)[compared.block]
    tests: list[tuple[float, float, int]] = []
    for taught, tested in ((first, ~first), (~first, first)):
        if min((role & half).sum() for role in (audited, ~audited) for half in (taught, tested)) < LEAST:
            return None
        ratio = fit_ratio(words[taught], audited[taught], keys[taught], seed)
        weights = np.minimum(ratio.odds(words[tested], keys[tested]), ratio.largest)
        test = blind_weighted(words[tested], compared.part(tested), weights, seed)
        if test is None:
            return None
        tests.append(test)
    auc, error = (float(np.mean(values)) for values in list(zip(*tests, strict=True))[:2])
    return Blind(auc, *interval_of(auc, error), sum(test[2] for test in tests), int(audited.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class LearntWeights:
    """A density ratio and the documents that it was learnt from, calibration documents first."""

    ratio: DensityRatio
    words: Any  # sparse, (documents, features)
    compared: Compared
    keys: np.ndarray  # int64, (documents,), hashes of their ids
    seed: int
    by: str  # "words" or "tokens"

    def odds(self) -> np.ndarray:
        """The odds of each document before clipping, float64, (documents,)."""
        return self.ratio.odds(self.words, self.keys)

    def tested(self, role: Role) -> BlindDiagnostic:
        """The blind test with the weights; `role` is the role of the calibration documents."""
        return weighted_diagnostic(blind_after(self.words, self.compared, self.keys, self.seed), role, self.by)


def learn_weights(known: Sequence[Document], audit: Sequence[Document], config: AuditConfig) -> LearntWeights:
    """Learn the weights from texts.

    Args:
        known: documents that calibrate.
        audit: audited documents.
        config: the audit's configuration.

    Raises:
        UserError: fewer than 20 documents of either kind.
    """
    documents = [*known, *audit]
    words = word_counts([document.text for document in documents])
    audited = np.arange(len(documents)) >= len(known)
    keys = np.array([id_key(document.doc_id) for document in documents], dtype=np.int64)
    compared = Compared.of(audited, blocks_of_documents(documents, audited, config.near_copies))
    ratio = fit_ratio(words, audited, keys, config.seed)
    return LearntWeights(ratio, words, compared, keys, config.seed, config.corpus.units)


def effective_number(weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2, in [1, documents]: the number of equal weights that gives a mean the same variance."""
    values = np.asarray(weights, dtype=np.float64)
    return float(values.sum() ** 2 / (values**2).sum())


def weighted_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """The diagnostic that replaces the blind test where calibration documents are weighted.

    Args:
        test: result of `blind_after`.
        role: the role whose documents calibrate.
        by: `WORDS` or `TOKENS`.
    """
    if test is None:
        return BlindDiagnostic(ok=None, by=by, sentence=weighted_sentence(None, role, None, by), n_to_settle=4 * LEAST)
    ok = None if test.ok and test.n_calibration < FEWEST_EFFECTIVE else test.ok
    outcome = "inconclusive" if ok is None else test.outcome
    sentence = weighted_sentence(test, role, ok, by)
    return BlindDiagnostic(ok=ok, by=by, outcome=outcome, sentence=sentence, **asdict(test))


def weighting_diagnostic(
    effective: float,
    n: int,
    role: str,
    before: BlindDiagnostic | None = None,
    after: BlindDiagnostic | None = None,
    by: str = WORDS,
) -> WeightingDiagnostic:
    """The effective number of calibration documents after weighting, and whether it suffices.

    Args:
        effective: effective number of calibration documents.
        n: number of calibration documents.
        role: the role whose documents calibrate.
        before: the blind test without weights; None where there were no texts.
        after: the same with weights.
        by: `WORDS` or `TOKENS`.
    """
    first, second = (None if test is None else test.auc for test in (before, after))
    return WeightingDiagnostic(
        ok=effective >= FEWEST_EFFECTIVE,
        sentence=weights_sentence(effective, FEWEST_EFFECTIVE, n, role, first, second, by),
        effective=effective,
        auc_before=first,
        auc_after=second,
    )


class Weighting(Record):
    """The weighting of the documents of a run, with its blind test: `diagnostics/weights-<role>.json`."""

    seed: int = Field(description="Seed of the run when the documents were weighted.")
    blind: BlindDiagnostic = Field(description="The blind test with the weights.")
    form: int = Field(1, description="Form of the test; weights with a test of another form are made again.")
    files: dict[str, str] = Field({}, description="SHA-256 of each file of weights, by its name in the run directory.")


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The weights of the audited documents and of those of a known role, in files of the run."""

    scored: Scored
    role: Role
    blind: BlindDiagnostic  # the blind test with the weights

    def of(self, table: pa.Table, receipt: Receipt) -> np.ndarray:
        """Weights of documents of a score shard, int64, in their order; the table has their column `row`."""
        weighed = self.scored.store.read_table(_file(self.role, receipt))
        rows, weights = weighed["row"].to_numpy(), weighed["weight"].to_numpy()
        order = np.argsort(rows, kind="stable")
        places = order[np.searchsorted(rows, table["row"].to_numpy(), sorter=order)]
        return np.asarray(weights[places])

    def of_role(self) -> np.ndarray:
        """Weights of all documents of the known role, int64, in the order of `Scored.batches`."""
        parts = [self.of(self.scored.table(receipt, ["row"]), receipt) for receipt in self.scored.of(self.role)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def weigh_run(scored: Scored, role: Role, config: AuditConfig, each: Each) -> RunWeights:
    """Weight the audited documents of a run and those of a known role, once; a later selection reads the files.

    The classifier is trained here, on the texts of the blind test; it then weights each shard by itself. So the
    weights do not depend on the number of workers, and memory holds few texts at a time.

    Args:
        scored: the score shards.
        role: the role whose documents calibrate.
        config: configuration of the run.
        each: a function of every shard.

    Raises:
        UserError: fewer than 20 documents of either role, or texts that are missing or changed since they were scored.
    """
    name, seed = weights_record_file(role), config.seed
    try:
        weighting = read_part(scored.store, name, Weighting)
    except DamagedError as error:
        _log.warning(made_again_note(error, "the weights are"))
        weighting = None
    if weighting is not None and (weighting.seed, weighting.form) == (seed, _FORM):
        changed = _changed_file(scored, role, weighting, each)
        if changed is None:
            return RunWeights(scored, role, weighting.blind)
        _log.warning(made_again_note(not_written(f"{scored.store.url}/{changed}"), "the weights are"))
    scored.store.remove(name)
    learnt = _learn(scored, role, config)
    blind = learnt.tested(role)

    def weigh(receipt: Receipt) -> tuple[str, str]:
        file = _file(role, receipt)
        return file, scored.store.write_table(file, _weights_of(scored, receipt, learnt.ratio))

    files = dict(sorted(each(_weighed(scored, role), weigh)))
    write_part(scored.store, name, Weighting(seed=seed, blind=blind, form=_FORM, files=files))
    return RunWeights(scored, role, blind)


def _weighed(scored: Scored, role: Role) -> list[Receipt]:
    """The score shards whose documents have weights."""
    return [*scored.of("audit"), *scored.of(role)]


def _changed_file(scored: Scored, role: Role, weighting: Weighting, each: Each) -> str | None:
    """A file of weights that is missing or was changed since it was written; None where there is none."""

    def compare(receipt: Receipt) -> str | None:
        file = _file(role, receipt)
        return None if scored.store.digest(file) == weighting.files.get(file, "") else file

    return min(filter(None, each(_weighed(scored, role), compare)), default=None)


def weights_record_file(role: Role) -> str:
    """Path of the weighting record of a role in a run directory."""
    return f"diagnostics/weights-{role}.json"


def _file(role: Role, receipt: Receipt) -> str:
    return f"weights/{role}/{receipt.shard}.parquet"


def _learn(scored: Scored, role: Role, config: AuditConfig) -> LearntWeights:
    """The density ratio, from a sample of the texts."""
    shards = scored.shards.values()
    kinds: tuple[Role, Role] = (role, "audit")
    samples = (sample_documents([shard for shard in shards if shard.role == kind]) for kind in kinds)
    known, audit = ([document for _, document in sample] for sample in samples)
    return learn_weights(known, audit, config)


def _weights_of(scored: Scored, receipt: Receipt, ratio: DensityRatio) -> pa.Table:
    """The weights of a shard's scored documents, by row."""
    table = read_filed(scored.store, receipt, ["row", "id_key", "text_key"])
    columns = (table[name].to_pylist() for name in table.column_names)
    wanted = {row: (key, of_text) for row, key, of_text in zip(*columns, strict=True)}
    rows: list[int] = []
    weights = [np.empty(0, dtype=np.int64)]
    shard = scored.shards[receipt.shard]
    readable = (document for document in read_shard(shard, wanted=wanted) if document.problem is None)
    while some := list(islice(readable, AT_ONCE)):
        if any(text_key(document.text) != wanted[document.row][1] for document in some):
            break
        rows += [document.row for document in some]
        keys = np.array([wanted[document.row][0] for document in some], dtype=np.int64)
        weights.append(ratio.weigh([document.text for document in some], keys))
    if len(rows) < len(wanted):
        raise UserError(
            f"calibration weighted reads the texts again, and those of {shard.name} are not the ones that were scored"
        )
    return pa.table({"row": rows, "weight": np.concatenate(weights)}, schema=WEIGHTS_SCHEMA)
