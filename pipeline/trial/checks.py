"""What the words, or the looks of pictures, say of each repeat of a trial: weights, and whether its promise holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.audit.blind import blind_of, word_counts, word_model
from pipeline.audit.blind_pictures import picture_features, picture_model
from pipeline.audit.density_weights import blind_after, fit_weigher, weighted_diagnostic
from pipeline.audit.halvings import Compared, blocks_among, held_out
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.in_memory import Scores, Verdict
from pipeline.selection.weighted import FEWEST_EFFECTIVE, weight_levels


@dataclass(frozen=True, slots=True)
class WordChecks:
    """Whether the words alone tell the calibration documents of each known role from the audited ones."""

    plain: Mapping[Role, bool | None]  # False: they do, None: it cannot be said; a role of too few documents is missing
    weighted: Mapping[Role, bool | None]  # the same with weights; None where it could not be tested

    def supported(self, selection: SelectionConfig, verdict: Verdict) -> bool | None:
        """Whether these checks leave the promise of a verdict; None where they were not made."""
        role, effective = NULL_ROLE[selection.direction], verdict.answer.effective
        if effective is None:
            return self.plain.get(role)
        return False if effective < FEWEST_EFFECTIVE else self.weighted[role]


NO_CHECKS = WordChecks({}, {})


def words_of(texts: Sequence[str]) -> Any:
    """Counts of the words of a trial's documents, `blind.word_counts` without columns that no document has."""
    counts = word_counts(texts)
    return counts[:, np.unique(counts.indices)]


def known_of_documents(texts: Sequence[str], pictures: Sequence[bytes] | None) -> Any:
    """What the classifier of the blind test knows of a trial's documents: (documents, features).

    Args:
        texts: of the documents, as an audit reads them.
        pictures: their files; None where the documents are texts.
    """
    return words_of(texts) if pictures is None else picture_features(pictures)


def weigh_repeat(
    scores: Scores,
    words: Any,
    family: np.ndarray,
    roles: Mapping[Role, np.ndarray],
    selections: Sequence[SelectionConfig],
    seed: int,
) -> tuple[Scores, WordChecks]:
    """The scores of a repeat with the weights that its selections need, and what the words say of it.

    The weights are learnt anew from the documents that calibrate and are audited in this repeat, as an audit does.

    Args:
        scores: of all documents.
        words: from `known_of_documents`, of all documents.
        family: int64, of all documents: near-duplicates have one number.
        roles: role -> int64 positions.
        selections: of the trial.
        seed: of this repeat.

    Raises:
        UserError: fewer than 20 documents of either kind to weigh by.
    """
    plain: dict[Role, bool | None] = {}
    repaired: dict[Role, bool | None] = {}
    weights: dict[Role, np.ndarray] = {}
    weighted = {NULL_ROLE[s.direction] for s in selections if calibration_of(s.calibration).weighted}
    for role in dict.fromkeys(NULL_ROLE[selection.direction] for selection in selections):
        if role not in roles:
            continue
        places = np.concatenate([roles[role], roles["audit"]])
        audited = np.arange(places.size) >= roles[role].size
        some, keys = words[places], scores.keys[places]
        compared = Compared.of(audited, blocks_among(family[places], scores.group_numbers[places], audited))
        model = picture_model() if isinstance(some, np.ndarray) else word_model()
        held = held_out(some, compared, seed, model)
        if held is not None:
            plain[role] = blind_of(held).ok
        if role in weighted:
            weigher = fit_weigher(some, audited, keys, seed)
            levels = weight_levels(weigher.odds(some, keys), weigher.largest)
            weights[role] = np.ones(scores.keys.size, dtype=np.int64)
            weights[role][places] = levels
            repaired[role] = weighted_diagnostic(blind_after(some, compared, keys, seed), role).ok
    return replace(scores, weights=weights or None), WordChecks(plain, repaired)
