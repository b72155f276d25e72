"""Where each document of a trial lies along a shift: by a column, or by what tells documents apart by their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.audit.blind import PictureLooks, Shown, blind_scores, picture_features
from pipeline.audit.halvings import LEAST
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.inputs import find_inputs
from pipeline.errors import UserError
from pipeline.trial.config import BY_WORDS, Point, TrialConfig
from pipeline.trial.documents import Documents, documents_in


def check_shifts(points: Sequence[Point]) -> None:
    """Check that the columns of all shifts are there, by metadata alone.

    Raises:
        UserError: a column that the documents do not have, with those that they have.
    """
    for config in (point.config for point in points):
        shift = config.split.shift
        if shift is not None and shift.by != BY_WORDS:
            try:
                find_inputs(_with_column(config, shift.by), config.limits)
            except UserError as error:
                raise UserError(f"split.shift.by: {error}") from None


def positions(config: TrialConfig, documents: Documents, by: str, limit: int | None = None) -> np.ndarray:
    """Where the documents lie along a shift, in standard deviations of a normal distribution with the same order.

    Args:
        config: of the trial.
        documents: of the trial.
        by: a column whose values are numbers or sort as words do, or `classifier`.
        limit: only the first documents, as they were read.

    Returns:
        float64, (documents,), with mean about 0; equal values are at equal places.

    Raises:
        UserError: no such column, a document without a value there, one value in all, or too few documents.
    """
    from scipy.stats import norm, rankdata  # costs a second, which an error of the configuration must not wait for

    if by != BY_WORDS:
        values = _by_column(config, documents, by, limit)
    elif documents.pictures is not None:
        values = _by_looks(documents.pictures, config.seed)
    else:
        values = _by_words(documents.read(config.text_transform), config.seed)
    return np.asarray(norm.ppf((rankdata(values) - 0.5) / values.size))


def _with_column(config: TrialConfig, column: str) -> CorpusConfig:
    """The documents, with the column in the place of the group, which every format can read."""
    return CorpusConfig(audit=config.documents.model_copy(update={"group": column}))


def _by_column(config: TrialConfig, documents: Documents, column: str, limit: int | None) -> np.ndarray:
    values: dict[str, str] = {}
    for document in documents_in(_with_column(config, column), config, limit):
        if document.group is not None and document.group.strip():
            values.setdefault(document.doc_id, document.group)
    missing = sum(doc_id not in values for doc_id in documents.ids)
    if missing:
        raise UserError(f"split.shift.by {column}: {missing} of {len(documents)} documents have no value there")
    ordered = [values[doc_id] for doc_id in documents.ids]
    if len(set(ordered)) == 1:
        raise UserError(f"split.shift.by {column}: all documents have {ordered[0]!r} there, which tells none apart")
    try:
        return np.array([float(value) for value in ordered])
    except ValueError:
        return np.unique(ordered, return_inverse=True)[1].astype(np.float64)


def _by_words(texts: Sequence[str], seed: int) -> np.ndarray:
    """How much each text looks like one half of the documents, by the classifier of the blind test.

    The halves are those that words set apart most: the two sides of the median along the direction in which their
    weighted counts of words vary most (the second of a singular value decomposition; the first is what all share).
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    _check_enough(len(texts))
    counts: Any = TfidfVectorizer(min_df=2, sublinear_tf=True, stop_words=None).fit_transform(texts)
    along = TruncatedSVD(n_components=2, random_state=seed % 2**32).fit_transform(counts)[:, 1]
    return _like_a_half(texts, along, seed)


def _by_looks(pictures: Sequence[bytes], seed: int) -> np.ndarray:
    """As `_by_words`, of pictures: the halves are two sides of the direction along which their features vary most."""
    _check_enough(len(pictures))
    features = picture_features(pictures)
    spread = features.std(axis=0)
    standard = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    left, _, _ = np.linalg.svd(standard, full_matrices=False)
    along = left[:, 0] * np.sign(left[np.abs(left[:, 0]).argmax(), 0])  # a direction has two ends
    return _like_a_half([PictureLooks(row) for row in features], along, seed)


def _check_enough(documents: int) -> None:
    if documents < 2 * LEAST:
        raise UserError(f"split.shift.by {BY_WORDS} needs at least {2 * LEAST} documents, got {documents}")


def _like_a_half(documents: Sequence[Shown], along: np.ndarray, seed: int) -> np.ndarray:
    """How much each document looks like the upper half of those in order along a direction."""
    order = np.argsort(along, kind="stable")
    first, second = order[: order.size // 2], order[order.size // 2 :]
    guesses = blind_scores([documents[i] for i in first], [documents[i] for i in second], seed)
    assert guesses is not None
    values = np.empty(along.size)
    values[np.concatenate([first, second])] = guesses
    return values
