"""Can the guarantee be believed here? Tests of its assumptions on the documents at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline.audit.blind_pictures import PictureLooks, caption_features, looks_of, picture_model
from pipeline.audit.summary import BlindDiagnostic, BlindOutcome
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.shard import Shard
from pipeline.selection.digits import beside

SAMPLED_TEXTS = 5_000
SAMPLED_SHARDS = 25
CHARACTERS = 20_000
FOLDS = 5
FEATURES = 1 << 16
TOLERANCE = 0.03
PASSING = 0.05
"""Above chance: the most that the upper limit of the interval may be for documents to pass as alike."""

CERTAINTY = 1.2815515655446004
"""Standard errors: nine of ten tests are decided with as many documents as the sentence says."""

Z99 = 2.5758293035489004
LEAST = 20


@dataclass(frozen=True, slots=True)
class Blind:
    """How well the words alone tell calibration documents from audited ones."""

    auc: float  # held out, in [0, 1]
    low: float  # of the 99% interval
    high: float
    n_calibration: int  # documents that were compared
    n_audit: int

    @property
    def outcome(self) -> BlindOutcome:
        """Failed if all of the interval lies above 0.53, passed if none lies above 0.55; below 0.5 is chance."""
        if self.low > 0.5 + TOLERANCE:
            return "failed"
        return "passed" if self.high <= 0.5 + PASSING else "inconclusive"

    @property
    def ok(self) -> bool | None:
        """Whether it passed or failed; None where it is inconclusive."""
        return {"passed": True, "failed": False, "inconclusive": None}[self.outcome]


WORDS, OF_PICTURES = "words", "thumbnails, colours and files"
OF_CAPTIONED = "thumbnails, colours, files and captions"
"""What the classifier knows of documents, as sentences say it."""

Shown = str | PictureLooks
"""What the classifier is given of a document: its text, or what it knows of its picture."""


def shown_of(document: Document) -> Shown:
    """What the classifier is given of a document."""
    return document.text if document.picture is None else looks_of(document.picture, document.text)


def blind(calibration: Sequence[Shown], audit: Sequence[Shown], seed: int) -> Blind | None:
    """A classifier that never saw the model tries to tell calibration from audited documents.

    Hashed bag of words, logistic regression, AUC of out-of-fold predictions, 99% interval by Hanley & McNeil (1982).
    Members and non-members that differ in words only by chance leave it at 0.5, whatever the share of members.
    None with fewer than 20 documents on either side: such a test could not fail. Pictures are told apart by
    `picture_features`, and `caption_features` where all have captions, and boosted trees.

    Args:
        calibration: texts, or files of pictures, of the null role.
        audit: those of the audited documents.
        seed: of the folds.
    """
    guesses = blind_scores(calibration, audit, seed)
    return None if guesses is None else auc_interval(guesses[: len(calibration)], guesses[len(calibration) :])


def auc_interval(calibration: np.ndarray, audit: np.ndarray) -> Blind:
    """The AUC of guesses, larger for audited ones, with its 99% interval by Hanley & McNeil (1982).

    Args:
        calibration: guesses of the null role, float64, (n,), of independent documents or blocks of them.
        audit: guesses of the audited ones, float64, (m,).
    """
    from sklearn.metrics import roc_auc_score

    labels = np.r_[np.zeros(len(calibration), dtype=int), np.ones(len(audit), dtype=int)]
    auc = float(roc_auc_score(labels, np.r_[calibration, audit]))
    return Blind(auc, *interval_of(auc, len(audit), len(calibration)), len(calibration), len(audit))


def blind_scores(
    first: Sequence[Shown], second: Sequence[Shown], seed: int, blocks: Sequence[int] | None = None
) -> np.ndarray | None:
    """How much the words of each text look like those of the second kind, by a classifier that never read that text.

    Of pictures, how much their `picture_features` do.

    Args:
        first: texts, or files of pictures, of one kind.
        second: those of the other.
        seed: of the folds.
        blocks: of each document of both kinds, if there are any; then it never read one of the same block either.

    Returns:
        float64, (first + second,), larger for the second kind; None with fewer than 20 documents (blocks) of either.
    """
    numbers = range(len(first) + len(second)) if blocks is None else blocks
    if min(len(set(numbers[: len(first)])), len(set(numbers[len(first) :]))) < LEAST:
        return None
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_predict

    labels = np.r_[np.zeros(len(first), dtype=int), np.ones(len(second), dtype=int)]
    known, model = _known([*first, *second])
    kind = StratifiedKFold if blocks is None else StratifiedGroupKFold
    folds = kind(FOLDS, shuffle=True, random_state=seed % 2**32)
    guesses = cross_val_predict(model, known, labels, groups=blocks, cv=folds, method="decision_function")
    return np.asarray(guesses)


def _known(documents: Sequence[Shown]) -> tuple[Any, Any]:
    """What the classifier knows of documents, and the classifier, not fitted."""
    pictures = [document for document in documents if isinstance(document, PictureLooks)]
    if pictures:
        features = np.stack([picture.features for picture in pictures])
        captions = [picture.caption for picture in pictures if picture.caption]
        if len(captions) == len(pictures):  # scores of captions differ where their words do
            features = np.hstack([features, caption_features(captions)])
        return features, picture_model()
    return word_counts([document for document in documents if isinstance(document, str)]), word_model()


def word_counts(texts: Sequence[str]) -> Any:
    """Hashed counts of the words of each text's beginning: sparse, (documents, FEATURES), rows of length 1."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=FEATURES, alternate_sign=False, norm="l2")
    return vectorizer.transform(text[:CHARACTERS] for text in texts)


def word_model(strength: float = 10.0) -> Any:
    """The classifier of the test, not fitted: both kinds count the same, whatever their numbers.

    Args:
        strength: how far it may follow single words; the inverse of the penalty on their coefficients.
    """
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, class_weight="balanced", max_iter=200, solver="liblinear", random_state=0)


def interval_of(auc: float, positives: int, negatives: int) -> tuple[float, float]:
    """The 99% interval of an AUC (Hanley & McNeil 1982), within [0, 1]."""
    error = Z99 * _hanley_mcneil(auc, positives, negatives)
    return max(0.0, auc - error), min(1.0, auc + error)


def _hanley_mcneil(auc: float, positives: int, negatives: int) -> float:
    """Standard error of an AUC (Hanley & McNeil 1982, eq. 1), at least that of an AUC one document from the end."""
    a = min(max(auc, 1 / (positives + negatives)), 1 - 1 / (positives + negatives))
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    spread = a * (1 - a) + (positives - 1) * (q1 - a * a) + (negatives - 1) * (q2 - a * a)
    return math.sqrt(max(spread, 0.0) / (positives * negatives))


def blind_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """What summary.json and the report say of the test of a role.

    Args:
        test: None where there were too few documents for one.
        role: whose documents calibrate.
        by: what the classifier knows of documents, `WORDS`, `OF_PICTURES` or `OF_CAPTIONED`.
    """
    if test is None:
        sentence = (
            f"Fewer than {LEAST} {role} or audited documents: whether their {by} differ could not be tested. "
            f"{settled_by(role, by=by)}"
        )
        return BlindDiagnostic(ok=None, by=by, sentence=sentence, n_to_settle=to_settle())
    interval = interval_text(test)
    limit, outcome = 0.5 + TOLERANCE, test.outcome
    if outcome == "passed":
        sentence = (
            f"A classifier that knows only their {by} hardly tells the {role} documents from the audited ones: with "
            f"an AUC of at most {0.5 + PASSING:.2f} at 99% confidence ({interval}). It does not prove them alike."
        )
    elif outcome == "inconclusive":
        sentence = (
            f"Inconclusive: whether a classifier that knows only their {by} tells the {role} documents from the "
            f"audited ones cannot be said from so few ({interval}). It would take an AUC above {limit:.2f} or at most "
            f"{0.5 + PASSING:.2f} at 99% confidence. {settled_by(role, by=by)}"
        )
    else:
        sentence = (
            f"A classifier that knows only their {by} tells the {role} documents from the audited ones, with an AUC "
            f"above {limit:.2f} at 99% confidence ({interval}): they differ in more than membership, and the promised "
            "error rate is not supported."
        )
    needed = to_settle() if outcome == "inconclusive" else None
    return BlindDiagnostic(ok=test.ok, by=by, outcome=outcome, sentence=sentence, n_to_settle=needed, **asdict(test))


def interval_text(test: Blind) -> str:
    """The AUC and its interval in words, its ends on the side of the limit that each is held against."""
    low, high = beside(test.low, 0.5 + TOLERANCE), beside(test.high, 0.5 + PASSING)
    return f"AUC {test.auc:.2f}, 99% interval {low} to {high}; 0.50 is chance"


def settled_by(first: str, second: str = "audited", by: str = WORDS) -> str:
    """How many documents of two kinds would decide the test, in words."""
    return (
        f"About {to_settle():,} {first} and as many {second} documents would settle it: if their {by} are alike, nine "
        "of ten tests then pass."
    )


@cache
def to_settle() -> int:
    """The fewest documents of each kind with which nine of ten tests pass where the words are alike.

    A test passes if the AUC and 2.58 standard errors are at most 0.55. An AUC of 0.5 is drawn above itself by more than
    1.28 standard errors in one of ten tests.
    """
    count = LEAST
    while (Z99 + CERTAINTY) * _hanley_mcneil(0.5, count, count) > PASSING:
        count += 1
    return count


def blind_test(shards: Sequence[Shard], role: str, seed: int, texts: int = SAMPLED_TEXTS) -> BlindDiagnostic:
    """The test of a role against the audited documents.

    Args:
        shards: of all roles.
        role: whose documents calibrate.
        seed: of the folds.
        texts: most texts of each side.

    Raises:
        UserError: a file is gone or damaged.
    """
    calibration, audit = ([shard for shard in shards if shard.role == r] for r in (role, "audit"))
    test = blind(sample_shown(calibration, texts), sample_shown(audit, texts), seed)
    return blind_diagnostic(test, role, known_of(shards, role))


def known_of(shards: Sequence[Shard], role: str) -> str:
    """What the classifier knows of the documents of shards: `WORDS`, `OF_PICTURES` or `OF_CAPTIONED`."""
    if not any(shard.pictures for shard in shards):
        return WORDS
    compared = [shard for shard in shards if shard.role in ("audit", role)]
    return OF_CAPTIONED if all(shard.caption_column is not None for shard in compared) else OF_PICTURES


def sample_shown(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> list[Shown]:
    """Up to `texts` readable documents, about, spread evenly over at most SAMPLED_SHARDS shards.

    Of pictures a fifth as many, which tell as much and are decoded.

    Raises:
        UserError: a file is gone or damaged.
    """
    return [shown for _, _, shown in sampled(shards, texts)]


def sampled(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> Iterator[tuple[Shard, int, Shown]]:
    """Shard, row and what the classifier is given of the documents of `sample_shown`; one is in memory at a time.

    Raises:
        UserError: a file is gone or damaged.
    """
    for shard, document in _sampled(shards, texts):
        yield shard, document.row, shown_of(document)


def sample_documents(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> list[tuple[Shard, Document]]:
    """The documents of `sample_shown`, each with its shard.

    Raises:
        UserError: a file is gone or damaged.
    """
    return list(_sampled(shards, texts))


def _sampled(shards: Sequence[Shard], texts: int) -> Iterator[tuple[Shard, Document]]:
    if not shards:
        return
    if shards[0].pictures:
        texts = -(-texts // 5)
    places = np.linspace(0, len(shards) - 1, min(SAMPLED_SHARDS, len(shards)))
    some = [shards[place] for place in sorted({round(place) for place in places})]
    share = -(-texts // len(some))
    for shard in some:
        for document in _first_documents(shard, share):
            yield shard, document


def _first_documents(shard: Shard, count: int) -> Iterator[Document]:
    for document in read_shard(shard):
        if document.problem is None:
            yield document
            count -= 1
            if count == 0:
                return
