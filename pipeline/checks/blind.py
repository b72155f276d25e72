"""The blind test: can a classifier that never saw the model distinguish calibration documents from audited ones?

The tail check tests, on the same scores, whether some audited documents are of a kind that calibration lacks.

File properties alone separate the halves of published picture benchmarks (arXiv 2504.18349), whose files differ in
size, format or quality.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.checks.blind_text import OF_CAPTIONED, OF_PICTURES, TOKENS, WORDS, blind_sentence
from pipeline.checks.held_out_auc import (
    HALVINGS,
    LEAST,
    Blind,
    Compared,
    HeldOut,
    auc_interval,
    blocks_among,
    documents_to_decide,
    held_out,
)
from pipeline.checks.words import CHARACTERS, Words, read_words, tokens, without_zeros
from pipeline.config.audit import AuditConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.keys import Keys, keyed
from pipeline.corpus.near_duplicates import near_families
from pipeline.corpus.picture_files import FORMATS, open_picture
from pipeline.corpus.scripts import count_units
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.run.conclusion_text import ONLY_SCORES
from pipeline.run.records import Record
from pipeline.run.summary import BlindDiagnostic
from pipeline.selection.guarantees import Outcome

SAMPLED_TEXTS = 5_000
SAMPLED_SHARDS = 25
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


Shown = str | PictureLooks
"""The classifier's input for a document: its text, or the features of its picture."""


def classifier_input(document: Document) -> Shown:
    """The classifier's input for a document."""
    return document.text if document.picture is None else read_picture_looks(document.picture, document.text)


def blind(
    calibration: Sequence[Shown], audit: Sequence[Shown], seed: int, block: np.ndarray | None = None
) -> Blind | None:
    """Test whether a classifier that never saw the model distinguishes calibration from audited documents.

    Logistic regression on words and characters (`words.read_words`); AUC of documents that the classifier was not
    trained on, with its 99% interval, from random halvings (`halvings.held_out`). The AUC is 0.5 where members and
    non-members differ in words only by chance, whatever the share of members. Pictures take boosted trees on
    `picture_features`, and on `caption_features` where all have captions.

    Args:
        calibration: texts, or `PictureLooks`, of the null role.
        audit: texts, or `PictureLooks`, of the audited documents.
        seed: seed of the halvings.
        block: int64, (calibration + audit,), from `blocks_among`; None: documents are independent.

    Returns:
        None with fewer than `halvings.LEAST_BLOCKS` blocks of either role.
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


def blind_result(held: HeldOut) -> Blind:
    """The AUC of held-out scores, with its 99% interval."""
    auc, error = held.auc()
    return Blind(auc, *auc_interval(auc, error), **count_compared(held.compared), shared=held.shared)


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


SHARES = (0.005, 0.01, 0.02, 0.05)
LEAST_TAIL = 5
"""Minimum number of blocks in a tail."""

TAIL_LEVEL = 0.01
_LEAST_P, _MOST_P = 1e-15, 0.99  # one p-value of .999 would cancel one of .001


class TailTest(Record):
    """The tail check of a role and the places of its documents, whose texts may be gone when an answer is checked."""

    p_value: float = Field(description="P-value of all tails; a small one contradicts that both groups are alike.")
    share: float | None = Field(
        None, description="Share of the compared documents in the tail; null where p is above 0.01."
    )
    compared: dict[str, int] = Field(
        {}, description="Rows at the beginning of each audited shard that were compared; empty where p is above 0.01."
    )
    documents: list[tuple[str, int, float]] = Field(
        [],
        description="Audited documents in the tail, the highest first: shard, row in it from 0, and mean percentile "
        "rank in [0, 1].",
    )

    @property
    def significant(self) -> bool:
        """Whether the tail has more audited documents than chance allows."""
        return self.p_value <= TAIL_LEVEL


def tail_test(held: HeldOut, places: Sequence[tuple[str, int]]) -> TailTest:
    """The tail check of held-out scores.

    Args:
        held: scores of documents by classifiers that were trained on the other half.
        places: shard, and row in it from 0, of each document.
    """
    p_value, tail, ranks = blind_tail(held)
    if p_value > TAIL_LEVEL:
        return TailTest(p_value=p_value)
    compared: dict[str, int] = {}
    for place in np.flatnonzero(held.compared.audited).tolist():
        shard, row = places[place]
        compared[shard] = max(compared.get(shard, 0), row + 1)
    inside = np.flatnonzero(tail & held.compared.audited)
    order = inside[np.argsort(-ranks[inside], kind="stable")].tolist()
    return TailTest(
        p_value=p_value,
        share=float(tail.mean()),
        compared=compared,
        documents=[(*places[place], round(float(ranks[place]), 6)) for place in order],
    )


def blind_tail(held: HeldOut) -> tuple[float, np.ndarray, np.ndarray]:
    """Test the tails of held-out scores: the documents that look most like audited ones.

    In each half blocks are ordered by their mean score. If the roles are exchangeable, the number of audited blocks at
    the top is hypergeometric. The p-values of the top 0.5, 1, 2 and 5% of all halves make one by Cauchy combination.

    Args:
        held: scores of documents by classifiers that were trained on the other half.

    Returns:
        the p-value of all tails together; bool, (documents,), which are in the tail with the least p-value; float64,
        (documents,), the means of their held-out percentile ranks, in [0, 1].
    """
    halves = [_tails(held, places, scores) for places, scores in held.halves()]
    distinct = [p for sizes, p_values, _ in halves for p in dict(zip(sizes, p_values, strict=True)).values()]
    together = [cauchy([p_values[place] for _, p_values, _ in halves]) for place in range(len(SHARES))]
    fewest = float(np.mean([LEAST_TAIL / blocks for *_, blocks in halves]))
    share = min(1.0, max(SHARES[int(np.argmin(together))], fewest))
    ranks = _ranks(held)
    least = np.sort(ranks)[::-1][max(1, round(share * ranks.size)) - 1]
    return cauchy(distinct), ranks >= least, ranks


def _tails(held: HeldOut, places: np.ndarray, scores: np.ndarray) -> tuple[list[int], list[float], int]:
    """Blocks and p-value of the top of one half, ties included, for each of SHARES, and the blocks of the half.

    Blocks of both roles are left out.
    """
    from scipy.stats import hypergeom

    kinds = held.compared.kinds
    block = held.compared.block[places]
    sums, counts = np.bincount(block, scores, kinds.size), np.bincount(block, minlength=kinds.size)
    inside = np.flatnonzero((counts > 0) & (kinds != 3))
    means, audited = sums[inside] / counts[inside], kinds[inside] == 2
    ordered, number = np.sort(means)[::-1], inside.size
    tops = [means >= ordered[min(max(LEAST_TAIL, round(share * number)), number) - 1] for share in SHARES]
    sizes, n_audited = ([int(np.count_nonzero(top & of)) for top in tops] for of in (True, audited))
    total = int(np.count_nonzero(audited))
    p_values = [float(hypergeom.sf(k - 1, number, total, size)) for k, size in zip(n_audited, sizes, strict=True)]
    return sizes, p_values, number


def cauchy(p_values: Sequence[float]) -> float:
    """The Cauchy combination of p-values, each clipped to [1e-15, 0.99] before (Liu & Xie 2020)."""
    clipped = np.clip(np.asarray(p_values, dtype=np.float64), _LEAST_P, _MOST_P)
    statistic = np.mean(1 / np.tan(np.pi * clipped))
    return float(np.arctan2(1.0, statistic) / np.pi)


def _ranks(held: HeldOut) -> np.ndarray:
    """The mean, over the halvings, of the percentile rank of each document in its half; ties get their mid-rank."""
    from scipy.stats import rankdata

    total = np.zeros(held.compared.audited.size)
    for places, scores in held.halves():
        total[places] += (rankdata(scores) - 0.5) / scores.size
    return total / HALVINGS


def blind_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """The record of the test of a role, for summary.json and the report.

    Args:
        test: None where there were too few documents for one.
        role: the role whose documents calibrate.
        by: the classifier's input, `WORDS`, `TOKENS`, `OF_PICTURES` or `OF_CAPTIONED`.
    """
    outcome = Outcome.INCONCLUSIVE if test is None else test.outcome
    decidable = test is None or (test.looked and not test.below)
    return BlindDiagnostic(
        outcome=outcome,
        by=by,
        sentence=blind_sentence(test, role, by),
        n_to_settle=documents_to_decide() if outcome == Outcome.INCONCLUSIVE and decidable else None,
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
        shards: shards of all roles.
        role: the role whose documents calibrate.
        config: the audit's configuration.
        texts: maximum number of texts of each role.

    Raises:
        UserError: a file is missing or damaged, or documents are scores without texts.
    """
    if not config.corpus.has_text:
        raise UserError(ONLY_SCORES)
    sample = draw_sample(shards, role, config.near_copies, texts)
    held = hold_out(sample.shown, sample.compared, config.seed)
    diagnostic = blind_diagnostic(None if held is None else blind_result(held), role, input_kind(shards, role))
    tail = None if held is None else tail_test(held, sample.places)
    return BlindTest(**{**diagnostic.model_dump(), **count_compared(sample.compared)}, tail=tail)


@dataclass(frozen=True, slots=True, eq=False)
class BlindSample:
    """The documents that the test compares, calibration documents first."""

    shown: list[Shown]
    compared: Compared
    places: list[tuple[str, int]]  # shard, and row in it from 0


def draw_sample(shards: Sequence[Shard], role: str, near_copies: float, texts: int = SAMPLED_TEXTS) -> BlindSample:
    """Up to `texts` documents of a role and as many audited ones, with their blocks; memory holds few pictures.

    Args:
        shards: shards of all roles.
        role: the role whose documents calibrate.
        near_copies: minimum share of common runs of near-duplicates.
        texts: maximum number of texts of each role.

    Raises:
        UserError: a file is missing or damaged.
    """
    shown: list[Shown] = []
    kinds: list[bool] = []
    places: list[tuple[str, int]] = []

    def documents() -> Iterator[Document]:
        for kind in (role, "audit"):
            for shard, document in sample_documents([shard for shard in shards if shard.role == kind], texts):
                places.append((shard.id, document.row - shard.first_row))
                shown.append(classifier_input(document))
                kinds.append(kind == "audit")
                yield document

    keys = Keys.joined(part for _, part in keyed(documents(), _start_of))
    audited = np.array(kinds, dtype=bool)
    return BlindSample(shown, Compared.of(audited, dependent_blocks(keys, audited, near_copies)), places)


def dependent_blocks(keys: Keys, audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`blocks_among` documents by their keys; a document of unknown content is near no other.

    Args:
        keys: keys of the documents.
        audited: bool, (documents,).
        near_copies: minimum share of common runs of near-duplicates.
    """
    family = np.arange(len(keys))
    read = np.flatnonzero(keys.length)
    if read.size:
        families = near_families(keys.sketch[read], near_copies)
        family[read] = read[np.unique(families, return_index=True)[1]][families]
    return blocks_among(np.unique(family, return_inverse=True)[1], keys.group_numbers(), audited)


def blocks_of_documents(documents: Sequence[Document], audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`dependent_blocks` of documents that are all texts or all pictures, by the classifier's input."""
    keys = Keys.joined(part for _, part in keyed(documents, _start_of))
    return dependent_blocks(keys, audited, near_copies)


def _start_of(document: Document) -> str:
    """The beginning of a text, which the classifier reads."""
    return document.text[:CHARACTERS]


def input_kind(shards: Sequence[Shard], role: str) -> str:
    """The classifier's input for documents of shards: `WORDS`, `TOKENS`, `OF_PICTURES` or `OF_CAPTIONED`."""
    if not any(shard.pictures for shard in shards):
        return TOKENS if any(shard.token_ids for shard in shards) else WORDS
    compared = [shard for shard in shards if shard.role in ("audit", role)]
    return OF_CAPTIONED if all(shard.caption_column is not None for shard in compared) else OF_PICTURES


def sample_documents(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> Iterator[tuple[Shard, Document]]:
    """Up to about `texts` readable documents, with their shards: the first of at most SAMPLED_SHARDS shards.

    Of pictures a fifth as many, because they must be decoded. One document is in memory at a time.

    Raises:
        UserError: a file is missing or damaged.
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
