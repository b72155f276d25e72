"""What to do next where a check contradicts an answer or leaves it inconclusive, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol

from pipeline.run.conclusion_text import ONLY_SCORES
from pipeline.selection.guarantees import Outcome

WHICH = {
    "unseen": "documents like the audited ones that the model cannot have seen, such as drafts or unpublished ones of "
    "the same authors and years",
    "seen": "documents of the training data that are of the same source, kind and years as the audited ones",
}
"""The calibration documents that would do, by role."""

MATCHABLE = ("words", "tokens")
"""Inputs of a blind test by which documents can be matched; pictures cannot."""

MATCHED = (
    "; seenset plan AUDIT.YAML --matched FOLDER keeps those of the present ones whose {by} resemble the audited ones"
)

AS_DRAWN = (
    "Take out of the texts what the shuffle check names, audit only documents whose published order or version was "
    "drawn at random, or mark what you publish from now on with seenset mark"
)
"""After a shuffle check that failed."""

_ONE_PER_BLOCK = "Select with calibrate: one_per_block, which calibrates on one {role} document of each block"
_BH_OR_STOREY = "procedure bh or storey, whose lists need no independent audited documents"

_DEPENDENT = {
    "near_copies": "family of near-duplicates, which diagnostics/near-copies-*.parquet list,",
    "groups": "group",
}
"""What joins documents, by the check that fails where documents depend on one another."""

_REMEDIES = {
    "tail": "Leave the named documents out of the audit, or add {role} documents of their kind, and make a new run",
    "families": "Leave the named family out of the audit, or add {role} documents like it, and make a new run",
    "sign_symmetry": "Rank the same statistic against unseen documents: select by procedure bh or storey",
    "shuffle": AS_DRAWN,
}
"""By other check that failed; the blind test has `after_blind`. The first that failed names the step."""


class _Check(Protocol):
    """What a step depends on of a `Diagnostic`."""

    about_power: ClassVar[bool]

    @property
    def outcome(self) -> Outcome: ...


class _BlindCheck(Protocol):
    """What a step depends on of a `BlindDiagnostic`."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def tested(self) -> bool: ...
    @property
    def sentence(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def n_to_settle(self) -> int | None: ...
    @property
    def looked(self) -> bool: ...
    @property
    def below(self) -> bool: ...
    @property
    def n_calibration(self) -> int | None: ...
    @property
    def n_audit(self) -> int | None: ...
    @property
    def n_calibration_blocks(self) -> int | None: ...
    @property
    def n_audit_blocks(self) -> int | None: ...


def next_step(checks: Mapping[str, _Check], blind: _BlindCheck, role: str) -> str | None:
    """The next step of a selection; None where no check contradicts it or leaves it inconclusive.

    Args:
        checks: checks of the selection by name.
        blind: that on the words.
        role: the role whose documents calibrate.
    """
    if blind.outcome == Outcome.FAILED:
        return after_blind(blind, role)
    failed = [name for name, check in checks.items() if check.outcome == Outcome.FAILED and not check.about_power]
    dependent = [name for name in failed if name in _DEPENDENT]
    others = [name for name in failed if name not in _DEPENDENT]
    if dependent and (not others or not _bh_stands([checks[name] for name in dependent])):
        return _after_dependence({name: checks[name] for name in dependent}, role)
    for name in [*(name for name in _REMEDIES if name in others), *others]:
        remedy = _REMEDIES.get(name, "Correct what the failed check names, and make a new run")
        return remedy.format(role=role) + "."
    return after_blind(blind, role) if blind.outcome == Outcome.INCONCLUSIVE else None


def _bh_stands(checks: Iterable[_Check]) -> bool:
    """Whether no calibration documents depend on one another by more than the checks allow."""
    return all(getattr(check, "bh_stands", True) for check in checks)


def _after_dependence(checks: Mapping[str, _Check], role: str) -> str:
    """The step where dependent documents contradict a selection; `checks` are those of `_DEPENDENT` that failed."""
    if _bh_stands(checks.values()):
        kept = _DEPENDENT[next(iter(checks))]
        return f"Select by {_BH_OR_STOREY}, or keep one document of each {kept} and make a new run."
    unsafe = any(getattr(check, "n_selected_by_bh", None) is not None for check in checks.values())
    return f"{_ONE_PER_BLOCK.format(role=role)}{f', and by {_BH_OR_STOREY}' if unsafe else ''}."


def after_blind(blind: _BlindCheck, role: str) -> str | None:
    """The next step after a blind test; None where it passed.

    Args:
        blind: the test, its numbers included.
        role: the role whose documents calibrate.
    """
    if blind.outcome == Outcome.PASSED:
        return None
    if blind.outcome == Outcome.FAILED:
        return f"Calibrate on {WHICH[role]}{MATCHED.format(by=blind.by) if blind.by in MATCHABLE else ''}."
    if not blind.tested:
        if ONLY_SCORES in blind.sentence:
            return "Give the texts beside the scores, and make a new run: then the blind test is made."
        return "Repeat the selection where the texts can be read: then the blind test is made."
    return _undecided(blind, role)


def _undecided(blind: _BlindCheck, role: str) -> str:
    """States that a test stays inconclusive with so few documents, and how many would decide it."""
    audited, known, needed = blind.n_audit, blind.n_calibration, blind.n_to_settle
    blocks = blind.n_audit_blocks, blind.n_calibration_blocks
    once = ", where documents of one group and near-duplicates count once," if blocks != (None, None) else ""
    counts = [of if of is not None else n for of, n in zip(blocks, (audited, known), strict=True)]
    given = (
        f"With {audited:,} audited and {known:,} {role} documents compared,"
        if audited and known
        else "With so few documents"
    )
    stated = "or state the answer with its condition"
    if blind.below:
        return f"Draw the {role} documents at random, not each beside an audited one, {stated}."
    if not blind.looked:
        return f"Give longer documents, or more of their kind, so that they have {blind.by} in common, {stated}."
    if needed and min((n for n in counts if n is not None), default=0) >= needed:
        return (
            f"{given} the blind test is inconclusive where most decide, so the {blind.by} may differ a little: "
            f"calibrate on documents closer to the audited ones, {stated}."
        )
    decide = f"about {needed:,} of each{once} decide" if needed else "more decide"
    return (
        f"{given} the blind test stays inconclusive, which is normal ({decide} nine of ten tests if their {blind.by} "
        f"are alike): give more of both, {stated}."
    )
