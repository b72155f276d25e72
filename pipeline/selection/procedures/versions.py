"""Procedures for documents with versions, one of which was drawn at random and published, by ranks among versions.

No other documents calibrate. The guarantee relies only on the draw (`pipeline.selection.version_scores`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np

from pipeline.config.selection import SelectionConfig
from pipeline.errors import UserError
from pipeline.selection.folds import Answer, Basis, Fold, Query, RoleScores
from pipeline.selection.guarantees import ON_AVERAGE, SHARE, Guarantee, StrictAnswer
from pipeline.selection.procedures.record import ByVersions, Procedure, procedure_of
from pipeline.selection.version_scores import (
    MIRROR,
    VersionScores,
    fewest_versions,
    mirrored_list,
    pooled_residuals,
    rank_step_up,
    uniformity_p_value,
    version_ranks,
)

ASSUMPTION = (
    "the published version of each document was drawn uniformly and independently, the other versions and the draw "
    "stayed secret, and the detector, the seed and alpha were fixed before scores were read"
)
_SENTENCE = f"{ASSUMPTION[0].upper()}{ASSUMPTION[1:]}."
_GUARANTEED = f"{SHARE} is at most alpha, for any number of documents and any model. {ON_AVERAGE}"

MARKED = 20
"""Default number of versions that `seenset mark` writes per document."""


def answer_versions(selection: SelectionConfig, seed: int, quarantined: int) -> Query[Answer]:
    """Decide a selection of documents with versions, in one fold that collects the scores of all versions.

    All scores of all versions are held in memory.

    Args:
        selection: selection with a procedure for versions, direction members.
        seed: seed of the run, for hashes that order equal scores and documents.
        quarantined: number of audit documents without scores.

    Raises:
        UserError: no audit documents, or none with scores.
    """
    parts = (yield Fold(lambda batch: [batch.versions])) or []
    by = procedure_of(selection.procedure).versions
    assert by is not None
    if not sum(len(part.scores.ids) for part in parts):
        raise UserError("no audit document has scores of all its versions" if quarantined else "no audit documents")
    scores = pooled_residuals(parts)
    m = sum(len(part.scores.ids) for part in parts) + quarantined
    selected, ranks = by.choose(scores, selection.exact_alpha, seed, m - scores.sizes.size)
    most = int(scores.sizes.max())
    places = {name: place for place, name in enumerate(scores.ids)}
    p = ranks / scores.sizes
    least, sentence = by.fewest(selection.exact_alpha, m, most)
    return Answer(
        judge=partial(_judge, places, p, selected),
        n_calibration=0,
        m=m,
        guarantee=by.terms.guarantee,
        assumption=by.terms.assumption,
        promise=by.terms.promise,
        details={"versions": float(most), "p_uniform_ranks": uniformity_p_value(ranks, scores.sizes)},
        resolution=lambda _: (least, None),
        strict=StrictAnswer(selection.procedure, int(selected.sum()), None, by.terms.guarantee),
        basis=Basis(sentence=sentence),
        versions=most,
    )


def _judge(
    places: dict[str, int], p: np.ndarray, selected: np.ndarray, batch: RoleScores
) -> tuple[np.ndarray, np.ndarray]:
    assert batch.versions is not None
    at = np.array([places.get(name, -1) for name in batch.versions.scores.ids], dtype=np.int64)
    used = at >= 0  # the others are left out, and treated like documents without scores
    return np.where(used, p[at], 1.0), used & selected[at]


_Choice = tuple[np.ndarray, np.ndarray]


def _mirrored(scores: VersionScores, alpha: Fraction, seed: int, quarantined: int) -> _Choice:
    listed = mirrored_list(scores, alpha, seed)
    return listed.selected, listed.ranks


def _fewest_mirrored(alpha: Fraction, m: int, versions: int | None) -> tuple[int, str]:
    least = fewest_versions(alpha, np.array([versions or MARKED]), MIRROR)
    sentence = f"The shortest possible list of procedure versions has {least:,} documents"
    if least <= m:
        return least, f"{sentence}."
    return least, f"{sentence} and only {m:,} are audited, so nothing can be selected: allow a larger alpha."


def _step_up(scores: VersionScores, alpha: Fraction, seed: int, quarantined: int) -> _Choice:
    ranks = version_ranks(scores, seed)
    last = np.ones(quarantined, dtype=np.int64)
    selected = rank_step_up(np.append(ranks, last), np.append(scores.sizes, last), alpha)
    return selected[: ranks.size], ranks


def _fewest_by_step_up(alpha: Fraction, m: int, versions: int | None) -> tuple[int, str]:
    k = versions or MARKED
    least = math.ceil(m / (alpha * k))
    possible = "nothing can be selected: " if least > m else ""
    return least, (
        f"With {k:,} versions of each document the smallest p-value is 1/{k:,}; {possible}the shortest possible list "
        f"of procedure bh has {least:,} of {m:,} documents, and procedure versions can select fewer."
    )


BY_STEP_UP = ByVersions(Guarantee("finite-sample", _SENTENCE, _GUARANTEED), _step_up, _fewest_by_step_up)
VERSIONS = Procedure(
    "versions",
    Guarantee("finite-sample", _SENTENCE, _GUARANTEED),
    versions=ByVersions(Guarantee("finite-sample", _SENTENCE, _GUARANTEED), _mirrored, _fewest_mirrored),
)
