"""Random parts of a trial's documents, by seed: those trained in, those that calibrate, those audited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.config.corpus import Role
from pipeline.corpus.near_copies import draw_families
from pipeline.errors import UserError
from pipeline.trial.config import Amount, SplitConfig

_CONTAMINATION, _REPEAT = 1, 2
_KIND = {"unseen": "untrained", "seen": "trained"}
_OTHER_KIND = {"unseen": "trained", "seen": "untrained"}


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The roles of the documents in one repeat: int64 positions, ascending, in no two roles."""

    audit: np.ndarray
    unseen: np.ndarray
    seen: np.ndarray

    def of(self, role: Role) -> np.ndarray:
        """The positions of one role."""
        positions: np.ndarray = getattr(self, role)
        return positions


def generator(seed: int, purpose: int, *numbers: int) -> np.random.Generator:
    """A separate stream of random numbers for each combination of purpose and numbers."""
    return np.random.default_rng([seed, purpose, *numbers])


def choose_trained(family: np.ndarray, share: float, known: Mapping[Role, Amount], seed: int) -> np.ndarray:
    """Choose the documents that are trained in.

    All the documents that calibrate as `seen`, and `share` of those that calibrate in no role.

    Args:
        family: int64, (documents,), from `near_families`.
        share: of the documents that do not calibrate, in [0, 1].
        known: how many documents calibrate in each known role.
        seed: of this contaminated model.

    Returns:
        bool, (documents,).

    Raises:
        UserError: fewer documents than the known roles take: says how many are needed; a share that is no document,
            or near copies, which stay together, and are never as few.
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
    chosen = draw_families(everything, family, count, generator(seed, _CONTAMINATION))
    _check_drawn(chosen, everything, family, count, "contaminate.share")
    return chosen


def draw_split(
    trained: np.ndarray,
    family: np.ndarray,
    known: Mapping[Role, Amount],
    config: SplitConfig,
    seed: int,
    model: int,
    repeat: int,
    finetuned: Mapping[Role, np.ndarray] | None = None,
    lean: np.ndarray | None = None,
) -> Split:
    """Draw the documents that calibrate and those that are audited, in one repeat over one contaminated model.

    Guaranteed where no two documents share a family: given the model and its scores, every choice of the calibration
    documents among the untrained (trained, for `seen`) is equally likely, so the audited nulls are exchangeable with
    them. That is the assumption of every finite-sample guarantee, made true by design, unless `label_noise` breaks it.

    With `lean` it is broken: who calibrates is drawn with odds of exp(lean), and the audited documents lean the other
    way, the trained and the untrained ones alike, because as large a share of either is taken away.

    Args:
        trained: bool, (documents,).
        family: int64, (documents,).
        known: how many documents calibrate in each known role.
        config: the other settings of the split.
        seed: of the trial.
        model: which contaminated model, from 0.
        repeat: which repeat, from 0.
        finetuned: bool, (documents,), for each known role: its documents that the audit's adapters were trained on.
            They are the same in every repeat and get no role in it.
        lean: float, (documents,), of a shift; None for documents that are alike.

    Raises:
        UserError: too few trained or untrained documents: says how many are needed.
    """
    rng = generator(seed, _REPEAT, model, repeat)
    free = np.ones(trained.size, dtype=bool)
    for excluded in (finetuned or {}).values():
        free &= ~excluded
    offered = free.copy()
    roles: dict[str, np.ndarray] = {}
    rights: dict[Role, np.ndarray] = {"unseen": ~trained, "seen": trained}
    for role, right in rights.items():
        count = _number(known.get(role, 0), trained.size)
        if finetuned is not None and role in finetuned:
            count = max(0, count - int(finetuned[role].sum()))
        wrong = round(config.label_noise * count)
        chosen = _take(free & right, family, count - wrong, rng, f"split.{role}", _KIND[role], lean)
        chosen |= _take(free & ~right, family, wrong, rng, f"split.{role} (label noise)", _OTHER_KIND[role], lean)
        _check_drawn(chosen, free & (right if wrong < count else ~right), family, count, f"split.{role}")
        free &= ~chosen
        roles[role] = chosen
    if lean is not None:
        free &= ~_left_out(offered, free, trained, family, lean, rng)
    audited = _audited(free, trained, family, config, rng)
    return Split(*(np.flatnonzero(mask) for mask in (audited, roles["unseen"], roles["seen"])))


def _left_out(
    offered: np.ndarray,
    free: np.ndarray,
    trained: np.ndarray,
    family: np.ndarray,
    lean: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Who gets no role, so that the trained and the untrained that are left lean alike; bool, (documents,)."""
    kinds = [kind for kind in (trained, ~trained) if (offered & kind).any()]
    share = max((offered & ~free & kind).sum() / (offered & kind).sum() for kind in kinds)
    left_out = np.zeros(free.size, dtype=bool)
    for kind in kinds:
        more = round(share * int((offered & kind).sum())) - int((offered & ~free & kind).sum())
        left_out |= draw_families(free & kind, family, max(0, more), rng, lean)
    return left_out


def _audited(
    free: np.ndarray, trained: np.ndarray, family: np.ndarray, config: SplitConfig, rng: np.random.Generator
) -> np.ndarray:
    members, others = free & trained, free & ~trained
    share = config.member_share
    if share is None:
        count = _number(config.audited, int(free.sum()))
        return _take(free, family, count, rng, "split.audited", "other")
    limits = [members.sum() / share] if share > 0 else []
    limits += [others.sum() / (1 - share)] if share < 1 else []
    count = config.audited if isinstance(config.audited, int) else math.floor(config.audited * min(limits) + 1e-9)
    n_members = round(share * count)
    where = f"split.audited {count} at split.member_share {share:g}"
    chosen = _take(members, family, n_members, rng, where, "trained")
    return chosen | _take(others, family, count - n_members, rng, where, "untrained")


def _take(
    pool: np.ndarray,
    family: np.ndarray,
    count: int,
    rng: np.random.Generator,
    setting: str,
    kind: str,
    lean: np.ndarray | None = None,
) -> np.ndarray:
    if count > pool.sum():
        raise UserError(
            f"{setting} needs {count} {kind} documents that nothing else takes, {int(pool.sum())} are there"
        )
    return draw_families(pool, family, count, rng, lean)


def _check_drawn(chosen: np.ndarray, pool: np.ndarray, family: np.ndarray, count: int, setting: str) -> None:
    if count and not chosen.any():
        smallest = int(np.unique(family[pool], return_counts=True)[1].min())
        raise UserError(
            f"{setting} takes {count} documents and can have none: near copies stay together, "
            f"in families of at least {smallest}; give more documents, or keep one of each family"
        )


def _number(amount: Amount, total: int) -> int:
    return amount if isinstance(amount, int) else round(amount * total)
