"""Documents with versions in memory: select the learnt ones, without unseen documents. See docs/versions.md."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.sparse import csr_array

from pipeline.checks.shuffle import VersionDraws, table_in_memory, version_draws
from pipeline.config.corpus import NEAR_SHARE, VersionsConfig
from pipeline.config.models import ModelConfig
from pipeline.config.selection import checked_alpha
from pipeline.corpus.draw_features import versions_features
from pipeline.corpus.inputs import DRAWN_TYPES
from pipeline.errors import UserError, error_line
from pipeline.models.load import LanguageModel
from pipeline.run.conclusion_text import WARNING
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.selection.procedures.versions import ASSUMPTION
from pipeline.selection.version_scores import (
    MIRROR,
    VersionScores,
    fewest_versions,
    form_counts,
    mirrored_list,
    preference_residuals,
    redraw_p_value,
    uniformity_p_value,
)
from seenset.notebook import check_model_kind, score
from seenset.runs import UnsupportedWarning


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """Documents, the versions of each, and the index of the published one.

    Raises:
        UserError: a repeated id, fewer than two versions, equal versions, or an index outside the versions.

    Example:
        >>> versions = seenset.Versions(
        ...     ids=("notes", "letter"),
        ...     texts=(("It is a colour.", "It is a color."), ("We do not know.", "We don't know.")),
        ...     published=(1, 0),
        ... )
        >>> versions.texts[0][versions.published[0]]
        'It is a color.'
    """

    ids: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]  # texts of each document's versions
    published: tuple[int, ...]  # index among the document's versions, from 0
    forms: csr_array | None = field(default=None, repr=False)  # (versions, columns): number of sites with each form
    marked: bool = False  # whether `seenset mark` drew the published versions, each by a key of its own

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.texts) == len(self.published):
            counts = f"{len(self.ids)} ids, {len(self.texts)} documents and {len(self.published)} indices"
            raise UserError(f"versions: ids, texts and published must be one per document, got {counts}")
        repeated = [name for name, count in Counter(self.ids).items() if count > 1]
        if repeated:
            raise UserError(f"versions: id {repeated[0]!r} occurs twice")
        for name, texts, index in zip(self.ids, self.texts, self.published, strict=True):
            if len(texts) < 2:
                raise UserError(f"versions: document {name!r} has {len(texts)} version; it needs 2 or more")
            if len(set(texts)) < len(texts):
                raise UserError(f"versions: document {name!r} has two equal versions")
            if not 0 <= index < len(texts):
                raise UserError(f"versions: document {name!r} has index {index}, outside its {len(texts)} versions")

    def kept(self, keep: np.ndarray) -> Versions:
        """A subset of the documents, by bool (documents,)."""
        rows = np.repeat(keep, [len(texts) for texts in self.texts])
        kept = np.flatnonzero(keep).tolist()
        return Versions(
            tuple(self.ids[i] for i in kept),
            tuple(self.texts[i] for i in kept),
            tuple(self.published[i] for i in kept),
            None if self.forms is None else self.forms[np.flatnonzero(rows)],
            self.marked,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class VersionsAnswer:
    """The results on published versions of documents. Its printed form states its guarantee.

    Example:
        >>> versions = seenset.read_versions("marked/private/versions.parquet")
        >>> answer = seenset.audit_versions("my-model", versions)
        >>> answer.documents.column_names
        ['doc_id', 'rank', 'versions', 'selected']
        >>> answer.fewest
        3
    """

    documents: pa.Table  # doc_id, rank of the published version (1: the highest; null: left out), versions, selected
    selected: np.ndarray  # bool, (documents,)
    alpha: float
    p_collection: float  # exact p-value that no document of the collection was learnt
    p_uniform: float  # chi-squared p-value that ranks are uniform
    fewest: int  # minimum length of a non-empty list
    left_out: Mapping[str, str]  # id of a document without an answer -> why
    shuffle: str = ""  # result of the shuffle check; empty where `seenset mark` drew the published versions
    conclusion: ConclusionValue = ConclusionValue.SUPPORTED  # contradicted where the shuffle check failed

    def __repr__(self) -> str:
        return f"VersionsAnswer({self.sentence})"

    @property
    def sentence(self) -> str:
        """The answer and its guarantee, or why a check contradicts it."""
        left = f"; {len(self.left_out):,} were left out" if self.left_out else ""
        if self.conclusion == ConclusionValue.CONTRADICTED:
            counted = f"{int(self.selected.sum()):,} of {self.selected.size:,} documents selected"
            return f"{WARNING}: {self.shuffle} {counted}, guarantee contradicted{left}"
        return (
            f"{int(self.selected.sum()):,} of {self.selected.size:,} documents selected, on average at most a fraction "
            f"{self.alpha:g} of them wrong (finite-sample), if {ASSUMPTION}; that no document of the collection was "
            f"learnt: p = {self.p_collection:.4g}{left}"
        )


def read_versions(path: str | PathLike[str]) -> Versions:
    """Read the versions of documents from Parquet.

    Args:
        path: a file with the columns id, versions (a list of texts) and index, such as `private/versions.parquet` of
            `seenset mark`.

    Raises:
        UserError: not such a file, or the errors of `Versions`.

    Example:
        >>> versions = seenset.read_versions("marked/private/versions.parquet")
        >>> len(versions.ids), len(versions.texts[0])
        (20, 10)
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"versions: cannot read {path}: {error_line(error)}") from None
    missing = [name for name in ("id", "versions", "index") if name not in table.column_names]
    if missing:
        raise UserError(
            f"versions: {path} has no column {missing[0]} (columns: {', '.join(table.column_names)}); seenset mark "
            "writes private/versions.parquet, and its public files hold no versions"
        )
    marked = DRAWN_TYPES.items() <= {column.name: column.type for column in table.schema}.items()
    columns, forms = table.select(["id", "versions", "index"]).to_pydict(), None
    if {"kinds", "forms"} <= set(table.column_names):
        forms = form_counts(*(table[name].combine_chunks() for name in ("kinds", "forms")))
    texts = tuple(map(tuple, columns["versions"]))
    return Versions(tuple(columns["id"]), texts, tuple(columns["index"]), forms, marked)


def audit_versions(
    model: str | PathLike[str] | ModelConfig | LanguageModel,
    versions: Versions,
    detector: str | dict[str, dict[str, Any]] = "loss",
    *,
    reference: str | PathLike[str] | ModelConfig | LanguageModel | None = None,
    alpha: float = 0.1,
    seed: int = 0,
    max_tokens: int = 1024,
    drawn_first: bool = False,
) -> VersionsAnswer:
    """Score all versions of documents with a local model, and select the documents whose published version it learnt.

    A document is left out if any of its versions has no score or reaches `max_tokens`, whichever was published, and as
    in `select_versions`.

    Args:
        model: as in `seenset.score`.
        versions: versions from `read_versions`.
        detector: a detector that reads the model's own passes over a text.
        reference: a model whose scores are subtracted, such as an earlier checkpoint: it has the same natural
            preferences and cannot have learnt the documents.
        alpha: largest share of the selected documents that may be wrong, on average; in (0, 1).
        seed: seed of hashes that order equal scores and of redraws, fixed before scores are read.
        max_tokens: maximum tokens of a version, >= 2.
        drawn_first: as in `select_versions`.

    Raises:
        UserError: the errors of `seenset.score`, or no document can be scored.

    Example:
        >>> versions = seenset.read_versions("marked/private/versions.parquet")
        >>> answer = seenset.audit_versions("my-model", versions, {"min_k": {"k": 0.5}}, alpha=0.2)
        >>> answer.selected.size, len(answer.left_out)
        (20, 0)
    """
    settings = _Settings(_checked_alpha(alpha), seed, MIRROR, drawn_first)
    models = [(1.0, model), *([] if reference is None else [(-1.0, reference)])]
    for _, one in models:
        check_model_kind(one)
    if not versions.ids:
        raise UserError("versions: there is no document; seenset mark leaves out those with fewer than 5 sites")
    values, problems = _score_texts(models, [text for one in versions.texts for text in one], detector, max_tokens)
    sizes = [len(one) for one in versions.texts]
    left_out: dict[str, str] = {}
    for place, problem in zip(np.repeat(np.arange(len(sizes)), sizes), problems, strict=True):
        if problem:
            left_out.setdefault(versions.ids[place], problem)
    keep = np.array([name not in left_out for name in versions.ids], dtype=bool)
    if not keep.any():
        raise UserError(f"versions: no document can be scored ({next(iter(left_out.values()), 'there is none')})")
    kept, scores = versions.kept(keep), values[np.repeat(keep, sizes)]
    answer = _answer(kept, scores, settings, left_out)
    _warn(answer)
    return answer


def _score_texts(
    models: Sequence[tuple[float, str | PathLike[str] | ModelConfig | LanguageModel]],
    texts: Sequence[str],
    detector: str | dict[str, dict[str, Any]],
    max_tokens: int,
) -> tuple[np.ndarray, list[str]]:
    """Scores of texts by several models, added up.

    Args:
        models: factor and model.
        texts: the texts.
        detector: the detector.
        max_tokens: a text that reaches this many tokens has no score.

    Returns:
        float64 (texts,), and why a text has no score: an empty string where it has one.

    Raises:
        UserError: the errors of `seenset.score`.
    """
    values, problems = np.zeros(len(texts)), [""] * len(texts)
    for factor, model in models:
        table = score(model, texts, [detector], max_tokens=max_tokens)
        values += factor * table.column(2).to_numpy(zero_copy_only=False)
        for row, (problem, count) in enumerate(
            zip(table["problem"].to_pylist(), table["n_tokens"].to_pylist(), strict=True)
        ):
            cut = f"a version reaches max_tokens {max_tokens}" if count is not None and count >= max_tokens else ""
            problems[row] = problems[row] or problem or cut
    return values, problems


def select_versions(
    versions: Versions,
    scores: Any,
    *,
    alpha: float = 0.1,
    seed: int = 0,
    z: int = MIRROR,
    left_out: Mapping[str, str] | None = None,
    drawn_first: bool = False,
) -> VersionsAnswer:
    """Select documents by scores of their versions in memory: `mirrored_list` of their residuals.

    Natural preferences for one form of a site are removed first by a regression that does not use the index of the
    published version (`preference_residuals`). FDR <= alpha in finite samples (docs/methods.md, section 7).

    As in a run, of equal documents and near-duplicates one is used, and the shuffle check compares texts and published
    indices: `UnsupportedWarning` if it contradicts the draw. Documents that `seenset mark` drew need neither.

    Args:
        versions: the versions of the documents.
        scores: float, (versions,): of all versions of the first document, then of the second; higher is more
            member-like. They must not depend on which versions of other documents were published.
        alpha: as in `audit_versions`.
        seed: as in `audit_versions`.
        z: negative ranks for one positive rank, fixed before scores are read; >= 1.
        left_out: ids of documents without scores, and why.
        drawn_first: whether the drawn version was written first, so that every index is 0: the index is not checked.

    Raises:
        UserError: another number of scores than versions, a score that is not finite, or alpha outside (0, 1).

    Example:
        >>> import numpy as np
        >>> versions = seenset.read_versions("marked/private/versions.parquet")
        >>> noise = np.random.default_rng(3)
        >>> scores = [noise.normal(size=len(texts)) for texts in versions.texts]
        >>> for document in range(12):  # whose published version the model learnt
        ...     scores[document][versions.published[document]] += 8
        >>> answer = seenset.select_versions(versions, np.concatenate(scores), alpha=0.1)
        >>> answer
        VersionsAnswer(12 of 20 documents selected, on average at most a fraction 0.1 of them wrong ...)
        >>> answer.selected.nonzero()[0].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    settings = _Settings(_checked_alpha(alpha), seed, z, drawn_first)
    answer = _answer(versions, scores, settings, dict(left_out or {}))
    _warn(answer)
    return answer


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of `select_versions`."""

    alpha: float  # in (0, 1)
    seed: int
    z: int
    drawn_first: bool


def _checked_alpha(alpha: float) -> float:
    """The error rate. Raises UserError if it is outside (0, 1)."""
    try:
        return checked_alpha(alpha)
    except ValueError as error:
        raise UserError(f"alpha {error}") from None


def _answer(versions: Versions, scores: Any, settings: _Settings, left_out: dict[str, str]) -> VersionsAnswer:
    """The answer for some documents with scores. Raises UserError as `select_versions`."""
    values = np.asarray(scores, dtype=np.float64)
    sizes = np.array([len(texts) for texts in versions.texts], dtype=np.int64)
    if values.shape != (int(sizes.sum()),):
        raise UserError(f"scores must be one per version, got shape {values.shape} for {int(sizes.sum())} versions")
    draws = _draws(versions, settings.drawn_first)
    used = np.array([name not in draws.left_out for name in versions.ids], dtype=bool)
    scored = preference_residuals(_scores(versions.kept(used), values[np.repeat(used, sizes)]))
    exact = Fraction(repr(float(settings.alpha)))
    answer = mirrored_list(scored, exact, settings.seed, settings.z)
    ranks, selected = np.zeros(used.size, dtype=np.int64), np.zeros(used.size, dtype=bool)
    ranks[used], selected[used] = answer.ranks, answer.selected
    columns = {
        "doc_id": list(versions.ids),
        "rank": pa.array(ranks, mask=~used),
        "versions": sizes,
        "selected": selected,
    }
    return VersionsAnswer(
        pa.table(columns),
        selected,
        float(settings.alpha),
        redraw_p_value(scored, settings.seed),
        uniformity_p_value(answer.ranks, scored.sizes),
        fewest_versions(exact, scored.sizes, settings.z),
        {**left_out, **draws.independent.left_out},
        "" if draws.diagnostic is None else draws.diagnostic.sentence,
        _conclusion(draws),
    )


def _draws(versions: Versions, drawn_first: bool) -> VersionDraws:
    """The independent documents and their shuffle check; neither reads scores."""
    drawn = [] if versions.marked else list(zip(versions.texts, versions.published, strict=True))
    features = [(index, len(texts), versions_features(texts, index)) for texts, index in drawn]
    table = table_in_memory(versions.ids, features) if features else None
    return version_draws(table, VersionsConfig(drawn_first=drawn_first), NEAR_SHARE)


def _conclusion(draws: VersionDraws) -> ConclusionValue:
    """Contradicted where the shuffle check failed, the only check of such an answer."""
    failed = draws.diagnostic is not None and draws.diagnostic.outcome == Outcome.FAILED
    return ConclusionValue.CONTRADICTED if failed else ConclusionValue.SUPPORTED


def _scores(versions: Versions, values: np.ndarray) -> VersionScores:
    digests = [sha256(text.encode("utf-8", "surrogatepass")).digest() for texts in versions.texts for text in texts]
    return VersionScores(
        values,
        np.concatenate(([0], np.cumsum([len(texts) for texts in versions.texts]))).astype(np.int64),
        np.array(versions.published, dtype=np.int64),
        versions.ids,
        np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32),
        versions.forms,
    )


def _warn(answer: VersionsAnswer) -> None:
    """Warn, with the caller of the public function as origin, of an answer that the shuffle check contradicts."""
    if answer.conclusion == ConclusionValue.CONTRADICTED:
        warnings.warn(answer.sentence, UnsupportedWarning, stacklevel=3)
