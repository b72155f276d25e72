"""Density ratio of documents, from their words: odds of audited against calibration documents, for `matching`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.checks.blind import blocks_of_documents
from pipeline.checks.classifier import word_model
from pipeline.checks.held_out_auc import Compared, held_out
from pipeline.checks.words import used_columns, without_zeros, word_counts
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import Document, id_key
from pipeline.selection.conformal import hash_for

PARTS = 5
INNER = 3
STRENGTHS = (0.1, 1.0, 10.0)
_PART = 3  # differs from the hash of a split, with which the same models would read all documents of one half


@dataclass(frozen=True, slots=True, eq=False)
class DensityRatio:
    """Odds of audited against calibration documents, by their words, from classifiers not trained on the document.

    Documents are put into PARTS parts by the hash of their ids; those of a part get the odds of a classifier that was
    trained on the other parts.
    """

    coefficients: np.ndarray  # float64, (parts, features): log odds that each word adds
    intercepts: np.ndarray  # float64, (parts,)
    seed: int

    def odds(self, words: Any, keys: np.ndarray) -> np.ndarray:
        """The odds of each document.

        Args:
            words: sparse, (documents, features), from `words.word_counts`.
            keys: int64, (documents,), hashes of their ids.

        Returns:
            float64, (documents,), >= 0.
        """
        part = _assign_parts(keys, self.seed)
        logs = np.empty(part.size)
        for index in range(PARTS):
            inside = np.flatnonzero(part == index)
            logs[inside] = words[inside] @ self.coefficients[index] + self.intercepts[index]
        return np.asarray(np.exp(np.clip(logs, -40, 40)))


def _assign_parts(keys: np.ndarray, seed: int) -> np.ndarray:
    return (hash_for(keys, seed, _PART) % np.uint64(PARTS)).astype(np.int64)


def fit_ratio(words: Any, audited: np.ndarray, keys: np.ndarray, seed: int) -> DensityRatio:
    """Learn the density ratio from documents of both kinds.

    The classifier is that of the blind test. Its penalty, and the slope and intercept of its log odds, are chosen on
    held-out documents, so that all odds are equal where words are uninformative.

    Args:
        words: sparse, (documents, features), from `words.word_counts`.
        audited: bool, (documents,), at least `held_out_auc.LEAST` of either kind; the others calibrate.
        keys: int64, (documents,), hashes of their ids.
        seed: seed of the parts.
    """
    part, used, some = _assign_parts(keys, seed), used_columns(words), without_zeros(words)
    fitted = [_fit(some[part != index], audited[part != index], seed) for index in range(PARTS)]
    coefficients = np.zeros((PARTS, words.shape[1]))
    coefficients[:, used] = [each[0] for each in fitted]
    return DensityRatio(coefficients, np.array([each[1] for each in fitted]), seed)


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


def weighted_auc(words: Any, compared: Compared, weights: np.ndarray, seed: int) -> float | None:
    """The AUC of the blind test with weighted calibration documents.

    The classifier is trained with the weights, and its AUC, held out, counts pairs by them.

    Args:
        words: sparse, (documents, features).
        compared: roles and blocks of the documents.
        weights: float, (documents,), > 0; those of audited documents are not read.
        seed: seed of the halvings.

    Returns:
        in [0, 1]; None with too few blocks of a role.
    """
    audited = compared.audited
    counted = np.ones(audited.size)
    counted[~audited] = weights[~audited] * ((~audited).sum() / weights[~audited].sum())
    weighed = Compared.of(audited, compared.block, counted)
    held = held_out(without_zeros(words), weighed, seed, word_model(), weighted=True)
    return None if held is None else held.auc()[0]


@dataclass(frozen=True, slots=True, eq=False)
class LearntRatio:
    """A density ratio and the documents that it was learnt from, calibration documents first."""

    ratio: DensityRatio
    words: Any  # sparse, (documents, features)
    compared: Compared
    keys: np.ndarray  # int64, (documents,), hashes of their ids

    def odds(self) -> np.ndarray:
        """The odds of each document, float64, (documents,)."""
        return self.ratio.odds(self.words, self.keys)


def learn_ratio(known: Sequence[Document], audit: Sequence[Document], config: AuditConfig) -> LearntRatio:
    """Learn the density ratio from texts.

    Args:
        known: documents that calibrate, at least `held_out_auc.LEAST`.
        audit: audited documents, at least as many.
        config: the audit's configuration.
    """
    documents = [*known, *audit]
    words = word_counts([document.text for document in documents])
    audited = np.arange(len(documents)) >= len(known)
    keys = np.array([id_key(document.doc_id) for document in documents], dtype=np.int64)
    compared = Compared.of(audited, blocks_of_documents(documents, audited, config.near_copies))
    ratio = fit_ratio(words, audited, keys, config.seed)
    return LearntRatio(ratio, words, compared, keys)


def effective_number(weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2, in [1, documents]: the number of equal weights that gives a mean the same variance."""
    values = np.asarray(weights, dtype=np.float64)
    return float(values.sum() ** 2 / (values**2).sum())
