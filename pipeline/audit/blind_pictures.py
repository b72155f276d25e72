"""What a classifier that never saw the model may know of pictures: thumbnails, colours, and facts of their files.

Published benchmarks of pictures are told apart by such facts alone (arXiv 2504.18349): the one half was kept in another
size, format or quality than the other.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.corpus.pictures import FORMATS, open_picture

CAPTION_FEATURES = 256
"""Counts of hashed words of a caption."""

SIDE = 16
"""Pixels of a thumbnail's side."""

BINS = 8
"""Of the histogram of a colour."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureLooks:
    """What the classifier knows of a picture."""

    features: np.ndarray  # float64, (features,), from `picture_features`
    caption: str = ""  # empty where the corpus has none


def looks_of(data: bytes, caption: str = "") -> PictureLooks:
    """What the classifier knows of a picture, by the bytes of its file."""
    return PictureLooks(picture_features([data])[0], caption)


def caption_features(captions: Sequence[str]) -> np.ndarray:
    """What the classifier knows of captions: float64, (captions, features).

    Of each hashed counts of its words, and how many characters, words, capitals and full stops it has. Scores of a
    caption differ where captions were written by another hand, which the picture does not show.

    Args:
        captions: of pictures, none of them empty.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=CAPTION_FEATURES, alternate_sign=False, norm=None)
    counts = vectorizer.transform(captions).toarray()
    shapes = [[len(c), len(c.split()), sum(map(str.isupper, c)), c.count("."), c[:1].isupper()] for c in captions]
    return np.hstack([counts, np.array(shapes, dtype=np.float64)])


def picture_features(pictures: Sequence[bytes]) -> np.ndarray:
    """What the classifier knows of pictures: float64, (pictures, features).

    Of each a grey thumbnail of 16 x 16 pixels, histograms of its three colours, and of its file the format, the size in
    pixels and in bytes, the quality of a JPEG file (from its tables of quantisation), and what else stands in it. What
    cannot be decoded has zeros for pixels.

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
    """The classifier of the test, not fitted: both kinds count the same, whatever their numbers."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=8, min_samples_leaf=8, class_weight="balanced", early_stopping=False, random_state=0
    )
