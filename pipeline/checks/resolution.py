"""Whether there are enough calibration documents for a small selection: the check and its sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.selection.folds import Basis
from pipeline.selection.guarantees import Outcome
from pipeline.wording import documents


def _reaches(least: int, m: int) -> Outcome:
    """Whether anything can be selected of m documents, where only the length of the shortest list is known."""
    return Outcome.PASSED if least <= m else Outcome.FAILED


def resolution(n: int, m: int, needed: int, enough: int | None, role: str, basis: Basis) -> dict[str, Any]:
    """Whether n calibration documents suffice to select some of m documents (docs/methods.md, section 3.11).

    `outcome` is failed where nothing can be selected, passed where as few as 1% can, and inconclusive in between, as
    in most audits, where the number is a fact and not a fault.

    Args:
        n: number of calibration documents.
        m: number of audited documents.
        needed: minimum number that can be selected.
        enough: number of documents of the role for a selection of 1%; None where it does not matter.
        role: role of the calibration documents.
        basis: the basis of the numbers.
    """
    fewest = max(1, m // 100)
    outcome = Outcome.FAILED if needed > m else Outcome.PASSED if needed <= fewest else Outcome.INCONCLUSIVE
    sentence = basis.sentence
    if sentence is None:
        sentence = shortest_list(ResolutionFacts(n, m, role, basis), needed, outcome, enough)
    return {
        "minimum_selectable": needed,
        "calibration_for_1_percent": enough,
        "outcome": outcome,
        "sentence": sentence,
    }


@dataclass(frozen=True, slots=True)
class ResolutionFacts:
    """The documents of a shortest possible list."""

    n: int  # calibration documents
    m: int  # audited documents
    role: str  # the calibration role
    basis: Basis

    def __str__(self) -> str:
        """The first clause of a sentence."""
        if self.basis.one_of_each:
            half = f", {'half of one document' if self.basis.halved else 'one'} of each block,"
        else:
            half = ", half of those that are known," if self.basis.halved else ""
        share = "" if self.basis.share is None else f" at an estimated null share of {self.basis.share:.3g}"
        return f"With {self.n:,} {self.role} documents to calibrate on{half} and {self.m:,} to judge{share}"

    def for_a_hundredth(self, enough: int) -> str:
        """States the number of known documents for a selection of 1% of the audited ones."""
        half = ", half of which calibrate," if self.basis.halved else ""
        group = " of one group" if self.basis.grouped else ""
        if self.basis.one_of_each:
            group += " of different blocks"
        few = "as few as 1% of the audited documents" if self.m >= 200 else "a single document"
        return f" With {enough:,} {self.role} documents{group}{half} {few} can be selected"


def shortest_list(given: ResolutionFacts, needed: int, outcome: Outcome, enough: int | None) -> str:
    """States the shortest possible list.

    Args:
        given: the documents.
        needed: number of documents of the list.
        outcome: failed where `needed` exceeds the audited documents; passed where as few as 1% can be selected.
        enough: number of known documents for a selection of 1%; None where it does not matter.
    """
    text = f"{given}, the shortest possible list has {documents(needed)}."
    if outcome == Outcome.FAILED:
        text = f"{given}, nothing can be selected: the shortest possible list would have {documents(needed)}."
    return text if outcome == Outcome.PASSED or enough is None else f"{text}{given.for_a_hundredth(enough)}."


def shortest_list_by_share(given: ResolutionFacts, lengths: tuple[int, int, int], outcome: Outcome, enough: int) -> str:
    """States the shortest possible list where the procedure estimates the share of nulls.

    Args:
        given: the documents.
        lengths: lengths of the list at a share of 1, at 0.5, and at the smallest share that can be estimated.
        outcome: as in `shortest_list`, at a share of 1.
        enough: number of known documents for a selection of 1% at a share of 1.
    """
    needed, half, best = lengths
    if best > given.m:
        text = (
            f"{given}, nothing can be selected at any estimated null share: the shortest possible list would have "
            f"{best:,} documents."
        )
    else:
        text = (
            f"{given}, the length of the shortest possible list depends on the estimated null share: {needed:,} at a "
            f"share of 1, {half:,} at 0.5, never fewer than {best:,}."
        )
    if outcome == Outcome.PASSED:
        return text
    were = "were" if given.role == "unseen" else "were not"
    return f"{text}{given.for_a_hundredth(enough)}; fewer suffice if part of the audited documents {were} trained on."


def shortest_list_of_plugin(given: ResolutionFacts, needed: int, procedure: str) -> str:
    """States the shortest list for a plugin's procedure, for which only that of bh is known."""
    return (
        f"{given}, the shortest possible list of procedure bh has {documents(needed)}; that of {procedure}, a plugin's "
        "procedure, is not known."
    )


def before_pass(sentence: str, at_most: bool) -> str:
    """Adapt a sentence on the shortest list to documents that are not read yet.

    Args:
        sentence: a sentence that starts with "With".
        at_most: whether adapters take documents of a group, which may be fewer.
    """
    return sentence.replace("With ", "With at most ", 1) if at_most else sentence
