"""Random parts of a trial's documents, by seed: trained, calibration and audited documents.

A shift orders documents by a column, or by the direction in which their words differ most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.checks.classifier import PictureLooks, Shown, blind_scores, picture_features
from pipeline.checks.held_out_auc import LEAST
from pipeline.checks.words import tokens
from pipeline.config.corpus import CorpusConfig, Role
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.near_duplicates import draw_families
from pipeline.errors import UserError
from pipeline.trial.config import BY_WORDS, Amount, Point, SplitConfig, TrialConfig
from pipeline.trial.trial_documents import Documents, documents_in

_CONTAMINATION, _REPEAT = 1, 2  # separate random number streams
_KIND = {"unseen": "untrained", "seen": "trained"}
_OTHER_KIND = {"unseen": "trained", "seen": "untrained"}


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The roles of the documents in one repeat: disjoint int64 positions, ascending."""

    audit: np.ndarray
    unseen: np.ndarray
    seen: np.ndarray

    def of(self, role: Role) -> np.ndarray:
        """The positions of one role."""
        positions: np.ndarray = getattr(self, role)
        return positions


def choose_trained(family: np.ndarray, share: float, known: Mapping[Role, Amount], seed: int) -> np.ndarray:
    """Choose the documents to train on.

    All calibration documents of role `seen`, and `share` of the documents that do not calibrate.

    Args:
        family: int64, (documents,), from `near_families`.
        share: share of the documents that do not calibrate, in [0, 1].
        known: number or share of calibration documents of each known role.
        seed: seed of this contaminated model.

    Returns:
        bool, (documents,).

    Raises:
        UserError: too few documents for the known roles, with the required number; a share that amounts to no document;
            or families of near-duplicates that are too large.
    """
    total = family.size
    for role, amount in known.items():
        if amount and not _number(amount, total):
            raise UserError(f"split.{role} {amount:g} of {total} documents is none; give a larger share or a number")
    unseen, seen = (_number(known.get(role, 0), total) for role in ("unseen", "seen"))
    if total < unseen + seen + 1:
        raise UserError(
            f"{total} documents are too few for {unseen} unseen and {seen} seen to calibrate on and some to audit: "
            f"needs at least {unseen + seen + 1}"
        )
    count = seen + round(share * (total - unseen - seen))
    everything = np.ones(total, dtype=bool)
    chosen = draw_families(everything, family, count, np.random.default_rng([seed, _CONTAMINATION]))
    _check_drawn(chosen, everything, family, count, "contaminate.share")
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Drawable:
    """The documents of one contaminated model, for drawing splits."""

    trained: np.ndarray  # bool, (documents,)
    family: np.ndarray  # int64, (documents,)
    finetuned: Mapping[Role, np.ndarray] = field(default_factory=dict)  # bool, (documents,): trained adapters
    lean: np.ndarray | None = None  # float, (documents,), log odds of a shift; None: no shift


def draw_split(
    documents: Drawable, known: Mapping[Role, Amount], config: SplitConfig, seed: int, model: int, repeat: int
) -> Split:
    """Draw the calibration and the audited documents of one repeat over one contaminated model.

    Guaranteed where no two documents share a family: given the model and its scores, every choice of the calibration
    documents among the untrained (trained, for `seen`) is equally likely, so the audited nulls are exchangeable with
    them. That is the assumption of every finite-sample guarantee, made true by design, unless `label_noise` breaks it.

    With `lean` this is broken: calibration documents are drawn with odds of exp(lean), and the audited documents shift
    the other way, the trained and the untrained alike, because an equal share of either is removed.

    Args:
        documents: documents of the model; training documents of the audit's adapters get no role in any repeat.
        known: number or share of calibration documents of each known role.
        config: other settings of the split.
        seed: seed of the trial.
        model: index of the contaminated model, from 0.
        repeat: index of the repeat, from 0.

    Raises:
        UserError: too few trained or untrained documents; the message states the required number.
    """
    draw, trained = _Draw(documents, np.random.default_rng([seed, _REPEAT, model, repeat])), documents.trained
    free = np.ones(trained.size, dtype=bool)
    for excluded in documents.finetuned.values():
        free &= ~excluded
    offered = free.copy()
    roles: dict[str, np.ndarray] = {}
    rights: dict[Role, np.ndarray] = {"unseen": ~trained, "seen": trained}
    for role, right in rights.items():
        count = _number(known.get(role, 0), trained.size)
        if role in documents.finetuned:
            count = max(0, count - int(documents.finetuned[role].sum()))
        wrong = round(config.label_noise * count)
        chosen = draw.take(free & right, count - wrong, f"split.{role}", _KIND[role])
        chosen |= draw.take(free & ~right, wrong, f"split.{role} (label noise)", _OTHER_KIND[role])
        wanted = free & (right if wrong < count else ~right)
        _check_drawn(chosen, wanted, documents.family, count, f"split.{role}")
        free &= ~chosen
        roles[role] = chosen
    if documents.lean is not None:
        free &= ~draw.left_out(offered, free)
    audited = replace(draw, documents=replace(documents, lean=None)).audited(free, config)
    return Split(*(np.flatnonzero(mask) for mask in (audited, roles["unseen"], roles["seen"])))


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One draw, which continues one random number stream."""

    documents: Drawable
    rng: np.random.Generator

    def take(self, pool: np.ndarray, count: int, setting: str, kind: str) -> np.ndarray:
        """Draw `count` documents of a pool in whole families; bool, (documents,)."""
        if count > pool.sum():
            raise UserError(f"{setting} needs {count} {kind} documents without another use, got {int(pool.sum())}")
        return draw_families(pool, self.documents.family, count, self.rng, self.documents.lean)

    def left_out(self, offered: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Documents without a role, such that the remaining trained and untrained documents shift alike."""
        trained = self.documents.trained
        kinds = [kind for kind in (trained, ~trained) if (offered & kind).any()]
        share = max((offered & ~free & kind).sum() / (offered & kind).sum() for kind in kinds)
        left_out = np.zeros(free.size, dtype=bool)
        for kind in kinds:
            more = round(share * int((offered & kind).sum())) - int((offered & ~free & kind).sum())
            left_out |= draw_families(free & kind, self.documents.family, max(0, more), self.rng, self.documents.lean)
        return left_out

    def audited(self, free: np.ndarray, config: SplitConfig) -> np.ndarray:
        """The audited documents."""
        members, others = free & self.documents.trained, free & ~self.documents.trained
        share = config.member_share
        if share is None:
            return self.take(free, _number(config.audited, int(free.sum())), "split.audited", "other")
        limits = [members.sum() / share] if share > 0 else []
        limits += [others.sum() / (1 - share)] if share < 1 else []
        count = config.audited if isinstance(config.audited, int) else math.floor(config.audited * min(limits) + 1e-9)
        n_members = round(share * count)
        where = f"split.audited {count} at split.member_share {share:g}"
        chosen = self.take(members, n_members, where, "trained")
        return chosen | self.take(others, count - n_members, where, "untrained")


def _check_drawn(chosen: np.ndarray, pool: np.ndarray, family: np.ndarray, count: int, setting: str) -> None:
    if count and not chosen.any():
        smallest = int(np.unique(family[pool], return_counts=True)[1].min())
        raise UserError(
            f"{setting} takes {count} documents and can have none: near-duplicates stay together, "
            f"in families of at least {smallest}; give more documents, or keep one of each family"
        )


def _number(amount: Amount, total: int) -> int:
    return amount if isinstance(amount, int) else round(amount * total)


def check_shifts(points: Sequence[Point]) -> None:
    """Check that the columns of all shifts exist, by metadata alone.

    Raises:
        UserError: a missing column; the message lists the existing ones.
    """
    for config in (point.config for point in points):
        shift = config.split.shift
        if shift is not None and shift.by != BY_WORDS:
            try:
                find_inputs(_with_column(config, shift.by), config.limits)
            except UserError as error:
                raise UserError(f"split.shift.by: {error}") from None


def positions(config: TrialConfig, documents: Documents, by: str, limit: int | None = None) -> np.ndarray:
    """Positions of documents along a shift, in standard deviations of a normal distribution with the same order.

    Args:
        config: configuration of the trial.
        documents: documents of the trial.
        by: a column whose values are numbers or sortable text, or `classifier`.
        limit: number of first documents that were read; None: all.

    Returns:
        float64, (documents,), with mean about 0; equal values have equal positions.

    Raises:
        UserError: no such column, a document without a value in it, equal values only, or too few documents.
    """
    from scipy.stats import norm, rankdata  # import takes a second, and must not delay an error of the configuration

    if by != BY_WORDS:
        values = _by_column(config, documents, by, limit)
    elif documents.pictures is not None:
        values = _by_looks(documents.pictures, config.seed)
    else:
        values = _by_words(documents.read(config.text_transform), config.seed)
    return np.asarray(norm.ppf((rankdata(values) - 0.5) / values.size))


def _with_column(config: TrialConfig, column: str) -> CorpusConfig:
    """The corpus with the column in place of the group, which every format can read."""
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
        raise UserError(f"split.shift.by {column}: all documents have {ordered[0]!r} there, which distinguishes none")
    try:
        return np.array([float(value) for value in ordered])
    except ValueError:
        return np.unique(ordered, return_inverse=True)[1].astype(np.float64)


def _by_words(texts: Sequence[str], seed: int) -> np.ndarray:
    """Score of each text for one half of the documents, from the classifier of the blind test.

    The halves are those that words separate most: the two sides of the median along the direction in which weighted
    word counts vary most (the second of a singular value decomposition; the first is common to all texts).
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    _check_enough(len(texts))
    try:
        counts: Any = TfidfVectorizer(min_df=2, sublinear_tf=True, analyzer=tokens).fit_transform(texts)
    except ValueError:
        raise UserError(f"split.shift.by {BY_WORDS}: no two documents have a word in common") from None
    along = TruncatedSVD(n_components=2, random_state=seed % 2**32).fit_transform(counts)[:, 1]
    return _like_a_half(texts, along, seed)


def _by_looks(pictures: Sequence[bytes], seed: int) -> np.ndarray:
    """As `_by_words`, for pictures: the halves are the two sides of the direction in which features vary most."""
    _check_enough(len(pictures))
    features = picture_features(pictures)
    spread = features.std(axis=0)
    standard = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    left, _, _ = np.linalg.svd(standard, full_matrices=False)
    along = left[:, 0] * np.sign(left[np.abs(left[:, 0]).argmax(), 0])  # fixes the sign of the direction
    return _like_a_half([PictureLooks(row) for row in features], along, seed)


def _check_enough(documents: int) -> None:
    if documents < 2 * LEAST:
        raise UserError(f"split.shift.by {BY_WORDS} needs at least {2 * LEAST} documents, got {documents}")


def _like_a_half(documents: Sequence[Shown], along: np.ndarray, seed: int) -> np.ndarray:
    """Score of each document for the upper half of the order along a direction."""
    order = np.argsort(along, kind="stable")
    first, second = order[: order.size // 2], order[order.size // 2 :]
    guesses = blind_scores([documents[i] for i in first], [documents[i] for i in second], seed)
    assert guesses is not None
    values = np.empty(along.size)
    values[np.concatenate([first, second])] = guesses
    return values
