"""Weights of documents by their words: how much more often such words are audited than known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipeline.audit.blind import blocks_of_documents, word_counts, word_model
from pipeline.audit.halvings import LEAST, Blind, Compared, held_out, interval_of
from pipeline.audit.summary import BlindDiagnostic, WeightingDiagnostic
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.documents import Document, id_key
from pipeline.errors import UserError
from pipeline.report.wording.blind import WORDS, weighted_sentence, weights_sentence
from pipeline.selection.conformal import halves, shuffled
from pipeline.selection.weighted import FEWEST_EFFECTIVE, weight_levels

PARTS = 5
INNER = 3
STRENGTHS = (0.1, 1.0, 10.0)
CLIP = 0.99
_WEIGH = 3  # a hash of its own: with that of a split, documents of one half would all be weighed by the same models


@dataclass(frozen=True, slots=True, eq=False)
class Weigher:
    """The odds of audited against calibration documents by their words; no document is weighed by what it taught.

    Documents are put into PARTS parts by the hash of their ids, and those of a part are weighed by a classifier that
    the other parts taught.
    """

    coefficients: np.ndarray  # float64, (parts, features): log odds that a word adds
    intercepts: np.ndarray  # float64, (parts,)
    largest: float  # odds that larger ones are clipped to
    seed: int

    def odds(self, words: Any, keys: np.ndarray) -> np.ndarray:
        """The odds of each document before they are clipped.

        Args:
            words: sparse, (documents, features), from `blind.word_counts`.
            keys: int64, (documents,), of their ids.

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


def fit_weigher(words: Any, audited: np.ndarray, keys: np.ndarray, seed: int) -> Weigher:
    """Learn the weights from documents of both kinds.

    The classifier of the blind test; how far it may follow single words, and the slope and level of its log odds,
    come from decisions on documents that it was not taught with, so that words that tell nothing weigh nothing. Odds
    are clipped at the 99th percentile of both kinds.

    Args:
        words: sparse, (documents, features), from `blind.word_counts`.
        audited: bool, (documents,); the others calibrate.
        keys: int64, (documents,), of their ids.
        seed: of the parts.

    Raises:
        UserError: fewer than 20 documents of either kind.
    """
    counts = int((~audited).sum()), int(audited.sum())
    if min(counts) < LEAST:
        raise UserError(
            f"calibration weighted needs at least {LEAST} calibration and {LEAST} audited documents to learn how their "
            f"words differ, got {counts[0]} and {counts[1]}"
        )
    part = _part_of(keys, seed)
    fitted = [_fit(words[part != index], audited[part != index], seed) for index in range(PARTS)]
    weigher = Weigher(np.stack([each[0] for each in fitted]), np.array([each[1] for each in fitted]), math.inf, seed)
    return replace(weigher, largest=float(np.quantile(weigher.odds(words, keys), CLIP)))


def _fit(words: Any, audited: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """The log odds that each word adds, and those of no word, without the log odds of the two numbers of documents."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    labels = audited.astype(int)
    folds = StratifiedKFold(INNER, shuffle=True, random_state=seed % 2**32)
    balance = np.where(audited, 0.5 / audited.mean(), 0.5 / (1 - audited.mean()))
    best, loss = (0.0, 0.0, STRENGTHS[0]), math.log(2)  # of words that tell nothing
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
    """The blind test over again, with calibration documents that count by their weights.

    The classifier is trained with the weights, and its AUC, held out, counts pairs by them.

    Args:
        words: sparse, (documents, features).
        compared: roles and blocks of the documents.
        weights: float, (documents,), > 0; those of audited documents are not read.
        seed: of the halvings.

    Returns:
        the AUC, its standard error and the effective number of calibration documents; None with too few blocks of a
        role.
    """
    audited = compared.audited
    counted = np.ones(audited.size)
    counted[~audited] = weights[~audited] * ((~audited).sum() / weights[~audited].sum())
    held = held_out(words, Compared.of(audited, compared.block, counted), seed, word_model(), weighted=True)
    return None if held is None else (*held.auc(), max(2, math.floor(effective_number(counted[~audited]))))


def blind_after(words: Any, compared: Compared, keys: np.ndarray, seed: int) -> Blind | None:
    """Whether words tell the two kinds apart after weighting, by documents that taught the weights nothing.

    Each half of the blocks weighs the other, and `blind_weighted` tests that other half; the AUC and its standard error
    are the means of the two. Tested on what taught them, weights look better than they are: in simulations the AUC then
    lay below 0.5.

    Args:
        words: sparse, (documents, features).
        compared: roles and blocks of the documents.
        keys: int64, (documents,), of their ids.
        seed: of the halves and halvings.

    Returns:
        the test, with the effective number of calibration documents for their number; None with fewer than 20
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
        weigher = fit_weigher(words[taught], audited[taught], keys[taught], seed)
        weights = np.minimum(weigher.odds(words[tested], keys[tested]), weigher.largest)
        test = blind_weighted(words[tested], compared.part(tested), weights, seed)
        if test is None:
            return None
        tests.append(test)
    auc, error = (float(np.mean(values)) for values in list(zip(*tests, strict=True))[:2])
    return Blind(auc, *interval_of(auc, error), sum(test[2] for test in tests), int(audited.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class LearntWeights:
    """A weigher and the documents that it was learnt from, calibration documents first."""

    weigher: Weigher
    words: Any  # sparse, (documents, features)
    compared: Compared
    keys: np.ndarray  # int64, (documents,), of their ids
    seed: int
    by: str  # "words" or "tokens"

    def odds(self) -> np.ndarray:
        """The odds of each document before they are clipped, float64, (documents,)."""
        return self.weigher.odds(self.words, self.keys)

    def tested(self, role: Role) -> BlindDiagnostic:
        """The blind test with the weights; `role` is of the documents that calibrate."""
        return weighted_diagnostic(blind_after(self.words, self.compared, self.keys, self.seed), role, self.by)


def learn_weights(known: Sequence[Document], audit: Sequence[Document], config: AuditConfig) -> LearntWeights:
    """Learn the weights from texts.

    Args:
        known: documents that calibrate.
        audit: audited documents.
        config: of the audit.

    Raises:
        UserError: fewer than 20 documents of either kind.
    """
    documents = [*known, *audit]
    words = word_counts([document.text for document in documents])
    audited = np.arange(len(documents)) >= len(known)
    keys = np.array([id_key(document.doc_id) for document in documents], dtype=np.int64)
    compared = Compared.of(audited, blocks_of_documents(documents, audited, config.near_copies))
    weigher = fit_weigher(words, audited, keys, config.seed)
    return LearntWeights(weigher, words, compared, keys, config.seed, config.corpus.units)


def effective_number(weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2: as many documents of one weight leave as much chance in a mean; in [1, documents]."""
    values = np.asarray(weights, dtype=np.float64)
    return float(values.sum() ** 2 / (values**2).sum())


def weighted_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """What stands in the place of the blind test where calibration documents are weighted.

    Args:
        test: from `blind_after`.
        role: whose documents calibrate.
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
    """What the weights leave of the calibration documents, and whether that is enough.

    Args:
        effective: number of calibration documents, by their weights.
        n: their number.
        role: whose documents calibrate.
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
