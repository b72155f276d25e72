"""The blind test: can a classifier that never saw the model tell calibration documents from audited ones?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.audit.blind_pictures import PictureLooks, caption_features, looks_of, picture_model
from pipeline.audit.halvings import LEAST, Blind, Compared, HeldOut, blocks_among, held_out, interval_of, to_settle
from pipeline.audit.summary import BlindDiagnostic
from pipeline.audit.tail import TailTest, tail_test
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.keys import Keys, keyed
from pipeline.corpus.near_copies import near_families
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.report.wording.blind import OF_CAPTIONED, OF_PICTURES, ONLY_SCORES, TOKENS, WORDS, blind_sentence

SAMPLED_TEXTS = 5_000
SAMPLED_SHARDS = 25
CHARACTERS = 20_000
FOLDS = 5
FEATURES = 1 << 16

Shown = str | PictureLooks
"""What the classifier is given of a document: its text, or what it knows of its picture."""


def shown_of(document: Document) -> Shown:
    """What the classifier is given of a document."""
    return document.text if document.picture is None else looks_of(document.picture, document.text)


def blind(
    calibration: Sequence[Shown], audit: Sequence[Shown], seed: int, block: np.ndarray | None = None
) -> Blind | None:
    """A classifier that never saw the model tries to tell calibration from audited documents.

    Hashed bag of words, logistic regression; AUC of documents that the classifier was not trained on, and its 99%
    interval, from random halvings (`halvings.held_out`). Members and non-members that differ in words only by chance
    leave it at 0.5, whatever the share of members. Pictures are told apart by `picture_features`, and
    `caption_features` where all have captions, and boosted trees.

    Args:
        calibration: texts, or looks of pictures, of the null role.
        audit: those of the audited documents.
        seed: of the halvings.
        block: int64, (calibration + audit,), from `blocks_among`; None: documents are independent.

    Returns:
        None with fewer than `halvings.LEAST_BLOCKS` blocks of either role.
    """
    audited = np.arange(len(calibration) + len(audit)) >= len(calibration)
    held = hold_out([*calibration, *audit], Compared.of(audited, block), seed)
    return None if held is None else blind_of(held)


def hold_out(documents: Sequence[Shown], compared: Compared, seed: int) -> HeldOut | None:
    """Scores of documents by classifiers that were trained on others; None with too few blocks.

    Args:
        documents: texts, or looks of pictures.
        compared: the role and block of each.
        seed: of the halvings.
    """
    if not compared.enough:
        return None
    features, model = _known(documents)
    return held_out(features, compared, seed, model)


def blind_of(held: HeldOut) -> Blind:
    """The AUC of held-out scores, with its 99% interval."""
    auc, error = held.auc()
    audited, block = held.compared.audited, held.compared.block
    counts = int((~audited).sum()), int(audited.sum())
    blocks = np.unique(block[~audited]).size, np.unique(block[audited]).size
    return Blind(auc, *interval_of(auc, error), *counts, *(blocks if blocks != counts else (None, None)))


def blind_scores(first: Sequence[Shown], second: Sequence[Shown], seed: int) -> np.ndarray | None:
    """How much the words of each text look like those of the second kind, by a classifier that never read that text.

    Of pictures, how much their `picture_features` do.

    Args:
        first: texts, or files of pictures, of one kind.
        second: those of the other.
        seed: of the folds.

    Returns:
        float64, (first + second,), larger for the second kind; None with fewer than 20 documents of either.
    """
    if min(len(first), len(second)) < LEAST:
        return None
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    labels = np.r_[np.zeros(len(first), dtype=int), np.ones(len(second), dtype=int)]
    known, model = _known([*first, *second])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    guesses = cross_val_predict(model, known, labels, cv=folds, method="decision_function")
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


def blind_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """The record of the test of a role, for summary.json and the report.

    Args:
        test: None where there were too few documents for one.
        role: whose documents calibrate.
        by: what the classifier knows of documents, `WORDS`, `TOKENS`, `OF_PICTURES` or `OF_CAPTIONED`.
    """
    outcome = "inconclusive" if test is None else test.outcome
    return BlindDiagnostic(
        ok=None if test is None else test.ok,
        by=by,
        outcome=outcome,
        sentence=blind_sentence(test, role, by),
        n_to_settle=to_settle() if outcome == "inconclusive" else None,
        **({} if test is None else asdict(test)),
    )


class BlindTest(BlindDiagnostic):
    """The blind test of a role with the tail check of the same scores: `diagnostics/blind-<role>.json`."""

    tail: TailTest | None = Field(None, description="The tail check; null where the test was not made.")

    @property
    def diagnostic(self) -> BlindDiagnostic:
        """The blind test alone."""
        return BlindDiagnostic(**self.model_dump(exclude={"tail"}))


def blind_test(shards: Sequence[Shard], role: str, config: AuditConfig, texts: int = SAMPLED_TEXTS) -> BlindTest:
    """The test of a role against the audited documents, in blocks of groups and families of near-duplicates.

    Args:
        shards: of all roles.
        role: whose documents calibrate.
        config: of the audit.
        texts: most texts of each side.

    Raises:
        UserError: a file is gone or damaged, or documents are scores without texts.
    """
    if not config.corpus.has_text:
        raise UserError(ONLY_SCORES)
    sample = draw_sample(shards, role, config.near_copies, texts)
    held = hold_out(sample.shown, sample.compared, config.seed)
    diagnostic = blind_diagnostic(None if held is None else blind_of(held), role, known_of(shards, role))
    audited = sample.compared.audited
    counts = {"n_calibration": int((~audited).sum()), "n_audit": int(audited.sum())}
    tail = None if held is None else tail_test(held, sample.places)
    return BlindTest(**{**diagnostic.model_dump(), **counts}, tail=tail)


@dataclass(frozen=True, slots=True, eq=False)
class BlindSample:
    """The documents that the test compares, those that calibrate before the audited ones."""

    shown: list[Shown]
    compared: Compared
    places: list[tuple[str, int]]  # shard, and row in it from 0


def draw_sample(shards: Sequence[Shard], role: str, near_copies: float, texts: int = SAMPLED_TEXTS) -> BlindSample:
    """Up to `texts` documents of a role and as many audited ones, with their blocks; memory holds few pictures.

    Args:
        shards: of all roles.
        role: whose documents calibrate.
        near_copies: the share of common runs from which documents are near-duplicates.
        texts: most texts of each role.

    Raises:
        UserError: a file is gone or damaged.
    """
    shown: list[Shown] = []
    kinds: list[bool] = []
    places: list[tuple[str, int]] = []

    def documents() -> Iterator[Document]:
        for kind in (role, "audit"):
            for shard, document in sample_documents([shard for shard in shards if shard.role == kind], texts):
                places.append((shard.id, document.row - shard.first_row))
                shown.append(shown_of(document))
                kinds.append(kind == "audit")
                yield document

    keys = Keys.joined(part for _, part in keyed(documents(), _start_of))
    audited = np.array(kinds, dtype=bool)
    return BlindSample(shown, Compared.of(audited, dependent_blocks(keys, audited, near_copies)), places)


def dependent_blocks(keys: Keys, audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`blocks_among` documents by their keys; one whose content is not known is near no other.

    Args:
        keys: of the documents.
        audited: bool, (documents,).
        near_copies: the share of common runs from which documents are near-duplicates.
    """
    family = np.arange(len(keys))
    read = np.flatnonzero(keys.length)
    if read.size:
        families = near_families(keys.sketch[read], near_copies)
        family[read] = read[np.unique(families, return_index=True)[1]][families]
    return blocks_among(np.unique(family, return_inverse=True)[1], keys.group_numbers(), audited)


def blocks_of_documents(documents: Sequence[Document], audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`dependent_blocks` documents that are all texts or all pictures, by what the classifier reads of them."""
    keys = Keys.joined(part for _, part in keyed(documents, _start_of))
    return dependent_blocks(keys, audited, near_copies)


def _start_of(document: Document) -> str:
    """What the classifier reads of a text."""
    return document.text[:CHARACTERS]


def known_of(shards: Sequence[Shard], role: str) -> str:
    """What the classifier knows of the documents of shards: `WORDS`, `TOKENS`, `OF_PICTURES` or `OF_CAPTIONED`."""
    if not any(shard.pictures for shard in shards):
        return TOKENS if any(shard.token_ids for shard in shards) else WORDS
    compared = [shard for shard in shards if shard.role in ("audit", role)]
    return OF_CAPTIONED if all(shard.caption_column is not None for shard in compared) else OF_PICTURES


def sample_documents(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> Iterator[tuple[Shard, Document]]:
    """Up to `texts` readable documents, about, with their shards: the first of at most SAMPLED_SHARDS shards.

    Of pictures a fifth as many, which tell as much and are decoded. One document is in memory at a time.

    Raises:
        UserError: a file is gone or damaged.
    """
    if not shards:
        return
    if shards[0].pictures:
        texts = -(-texts // 5)
    places = np.linspace(0, len(shards) - 1, min(SAMPLED_SHARDS, len(shards)))
    some = [shards[place] for place in sorted({round(place) for place in places})]
    share = -(-texts // len(some))
    for shard in some:
        readable = (document for document in read_shard(shard) if document.problem is None)
        for document in islice(readable, share):
            yield shard, document
