"""Classifiers that never saw the model: their input, and their scores of documents that they were not trained on.

File properties alone separate the halves of published picture benchmarks (arXiv 2504.18349), whose files differ in
size, format or quality.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.checks.held_out_auc import LEAST, Blind, BlindBlock, Compared, HeldOut, auc_interval, held_out
from pipeline.checks.words import Words, read_words, tokens, without_zeros, words_of_parts
from pipeline.corpus.documents import Document
from pipeline.corpus.picture_files import FORMATS, open_picture
from pipeline.corpus.scripts import count_units

FOLDS = 5

CAPTION_FEATURES = 256
"""Number of hashed word counts of a caption."""

SIDE = 16
"""Side of a thumbnail, in pixels."""

BINS = 8
"""Bins in the histogram of a colour channel."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureLooks:
    """The classifier's input for a picture."""

    features: np.ndarray  # float64, (features,), from `picture_features`
    caption: str = ""  # empty where the corpus has none


def read_picture_looks(data: bytes, caption: str = "") -> PictureLooks:
    """The classifier's input for a picture, from the bytes of its file."""
    return PictureLooks(picture_features([data])[0], caption)


def caption_features(captions: Sequence[str]) -> np.ndarray:
    """The classifier's features of captions: float64, (captions, features).

    Hashed word counts of each caption, and its numbers of characters, words, capitals and full stops. Scores of
    captions also differ between authors, which the pictures do not show.

    Args:
        captions: captions of pictures, none of them empty.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=CAPTION_FEATURES, alternate_sign=False, norm=None, analyzer=tokens)
    counts = vectorizer.transform(captions).toarray()
    shapes = [[len(c), count_units(c), sum(map(str.isupper, c)), c.count("."), c[:1].isupper()] for c in captions]
    return np.hstack([counts, np.array(shapes, dtype=np.float64)])


def picture_features(pictures: Sequence[bytes]) -> np.ndarray:
    """The classifier's features of pictures: float64, (pictures, features).

    A grey thumbnail of 16 x 16 pixels and histograms of the three colours; of the file the format, the size in pixels
    and in bytes, the quality of a JPEG file (from its quantisation tables), and the numbers of metadata entries and
    bands. Pixels of a picture that cannot be decoded are zeros.

    Args:
        pictures: the bytes of their files.
    """
    return np.array([[*_pixels(data), *_file_facts(data)] for data in pictures], dtype=np.float64)


def _pixels(data: bytes) -> list[float]:
    try:
        picture = open_picture(data)
    except ValueError:
        return [0.0] * (SIDE * SIDE + 3 * BINS)
    thumbnail = np.asarray(picture.convert("L").resize((SIDE, SIDE)), dtype=np.float64) / 255
    counts = np.array(picture.histogram(), dtype=np.float64).reshape(3 * BINS, -1).sum(axis=1)
    return [*thumbnail.ravel().tolist(), *(counts / max(1.0, counts.sum())).tolist()]


def _file_facts(data: bytes) -> list[float]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                more = len(image.info), len(image.getexif()), len(image.getbands())
                kinds = [{image.format: 1.0}.get(form, 0.0) for form in FORMATS]
                tables = getattr(image, "quantization", None) or {}  # of a JPEG file: larger steps for lower quality
                quantised = float(np.mean(tables[min(tables)])) if tables else 0.0
    except Exception:  # readers of pictures raise whatever their parsers do
        return [math.log(1 + len(data)), *[0.0] * (len(FORMATS) + 8)]
    per_pixel = len(data) / max(1, width * height)
    size = [math.log(1 + len(data)), float(width), float(height), width / max(1, height), per_pixel]
    return [*size, *map(float, more), *kinds, quantised]


def picture_model() -> Any:
    """The classifier of the test, not fitted; both classes have the same total weight."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=8, min_samples_leaf=8, class_weight="balanced", early_stopping=False, random_state=0
    )


@dataclass(frozen=True, slots=True)
class ChatSides:
    """The classifier's input for a conversation."""

    questions: str  # all contents but the answers
    answers: str


Shown = str | PictureLooks | ChatSides
"""The classifier's input for a document: its text, the features of its picture, or the two sides of a conversation."""

BLOCKS = ("questions", "answers", "both together")
"""Inputs of the classifiers that read conversations."""


def classifier_input(document: Document) -> Shown:
    """The classifier's input for a document."""
    if document.chat is not None:
        return ChatSides(*document.chat.sides)
    return document.text if document.picture is None else read_picture_looks(document.picture, document.text)


def blind(
    calibration: Sequence[Shown], audit: Sequence[Shown], seed: int, block: np.ndarray | None = None
) -> Blind | None:
    """Test whether a classifier that never saw the model distinguishes calibration from audited documents.

    Logistic regression on words and characters (`words.read_words`); AUC of documents that the classifier was not
    trained on, with its 99% interval, from random halvings (`held_out_auc.held_out`). The AUC is 0.5 where members and
    non-members differ in words only by chance, whatever the share of members. Pictures take boosted trees on
    `picture_features`, and on `caption_features` where all have captions.

    Args:
        calibration: texts, or `PictureLooks`, of the null role.
        audit: texts, or `PictureLooks`, of the audited documents.
        seed: seed of the halvings.
        block: int64, (calibration + audit,), from `blocks_among`; None: documents are independent.

    Returns:
        None with fewer than `held_out_auc.LEAST_BLOCKS` blocks of either role.
    """
    audited = np.arange(len(calibration) + len(audit)) >= len(calibration)
    held = hold_out([*calibration, *audit], Compared.of(audited, block), seed)
    return None if held is None else blind_result(held)


def hold_out(documents: Sequence[Shown], compared: Compared, seed: int) -> HeldOut | None:
    """Scores of documents by classifiers that were trained on others; None with too few blocks.

    Args:
        documents: texts, or `PictureLooks`.
        compared: the role and block of each.
        seed: seed of the halvings.
    """
    if not compared.enough:
        return None
    return hold_out_known(read_known(documents), compared, seed)


def hold_out_known(known: Known, compared: Compared, seed: int) -> HeldOut | None:
    """`hold_out` of documents by the classifier's input, from `read_known`."""
    features, model = _prepared(known)
    held = held_out(features, compared, seed, model)
    return replace(held, shared=known.shared) if held is not None and isinstance(known, Words) else held


def hold_out_sides(documents: Sequence[Shown], compared: Compared, seed: int, both: HeldOut) -> dict[str, HeldOut]:
    """Held-out scores of conversations by their questions, by their answers, and by both; of other documents none.

    Args:
        documents: the documents, as in `hold_out`.
        compared: the role and block of each.
        seed: seed of the halvings.
        both: scores of the same documents by a classifier of all of their words.
    """
    chats = [document for document in documents if isinstance(document, ChatSides)]
    if not chats:
        return {}
    sides = [chat.questions for chat in chats], [chat.answers for chat in chats]
    made = [hold_out_known(read_words(side), compared, seed) for side in sides]
    return {name: held for name, held in zip(BLOCKS, [*made, both], strict=True) if held is not None}


def blind_result(held: HeldOut, sides: Mapping[str, HeldOut] | None = None) -> Blind:
    """The AUC of held-out scores, with its 99% interval.

    Args:
        held: scores by a classifier of everything.
        sides: scores of conversations, from `hold_out_sides`: then the intervals hold together at 99%, and the AUC is
            that of the input which decides.
    """
    counts = count_compared(held.compared)
    if not sides:
        auc, error = held.auc()
        return Blind(auc, *auc_interval(auc, error), **counts, shared=held.shared)
    blocks = []
    for name, one in sides.items():
        auc, error = one.auc()
        blocks.append(BlindBlock(name, auc, *auc_interval(auc, error, len(sides))))
    decisive = max(blocks, key=BlindBlock.decides)
    return Blind(decisive.auc, decisive.low, decisive.high, **counts, shared=held.shared, blocks=tuple(blocks))


def count_compared(compared: Compared) -> dict[str, Any]:
    """The fields of `Blind` with the documents of each role and, where these differ, their blocks."""
    audited, block = compared.audited, compared.block
    counts = int((~audited).sum()), int(audited.sum())
    blocks = np.unique(block[~audited]).size, np.unique(block[audited]).size
    shown: tuple[int | None, int | None] = (None, None) if blocks == counts else blocks
    names = "n_calibration", "n_audit", "n_calibration_blocks", "n_audit_blocks"
    return dict(zip(names, (*counts, *shown), strict=True))


def blind_scores(first: Sequence[Shown], second: Sequence[Shown], seed: int) -> np.ndarray | None:
    """Score how much the words of each text resemble the second kind, by a classifier not trained on that text.

    Pictures are scored by their `picture_features`.

    Args:
        first: texts, or files of pictures, of one kind.
        second: texts, or files of pictures, of the other kind.
        seed: seed of the folds.

    Returns:
        float64, (first + second,), larger for the second kind; None with fewer than 20 documents of either.
    """
    if min(len(first), len(second)) < LEAST:
        return None
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    labels = np.r_[np.zeros(len(first), dtype=int), np.ones(len(second), dtype=int)]
    features, model = _prepared(read_known([*first, *second]))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    guesses = cross_val_predict(model, features, labels, cv=folds, method="decision_function")
    return np.asarray(guesses)


Known = Words | np.ndarray
"""The classifier's input for documents: of pictures float64, (documents, features)."""


def read_known(documents: Sequence[Shown]) -> Known:
    """The classifier's input for texts, or for pictures."""
    pictures = [document for document in documents if isinstance(document, PictureLooks)]
    chats = [document for document in documents if isinstance(document, ChatSides)]
    if chats:
        sides = [chat.questions for chat in chats], [chat.answers for chat in chats]
        return words_of_parts([read_words(side) for side in sides])
    if not pictures:
        return read_words([document for document in documents if isinstance(document, str)])
    features = np.stack([picture.features for picture in pictures])
    captions = [picture.caption for picture in pictures if picture.caption]
    if len(captions) == len(pictures):  # scores of captions differ where their words do
        features = np.hstack([features, caption_features(captions)])
    return features


def _prepared(known: Known) -> tuple[Any, Any]:
    """The features of documents, and the classifier, not fitted."""
    return (without_zeros(known.features), word_model()) if isinstance(known, Words) else (known, picture_model())


def word_model(strength: float = 10.0) -> Any:
    """The classifier of the test, not fitted; both classes have the same total weight.

    Args:
        strength: inverse of the penalty on the coefficients of words.
    """
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, class_weight="balanced", max_iter=200, solver="liblinear", random_state=0)
