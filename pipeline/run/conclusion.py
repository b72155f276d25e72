"""The result of a selection, the conclusion of its checks, and the rule that decides whether a bound may be stated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.selection import Direction
from pipeline.run.conclusion_text import CONTRADICTED, UNCHECKED, UNCONFIRMED, smoothed_ranks
from pipeline.run.records import Record, VersionedRecord
from pipeline.selection.bounds import Bound
from pipeline.selection.guarantees import ConclusionValue, GroupWeight, GuaranteeKind, Outcome, StrictAnswer
from pipeline.selection.smoothing import OtherDraws

STYLES: dict[ConclusionValue, str] = {
    ConclusionValue.SUPPORTED: "green",
    ConclusionValue.INCONCLUSIVE: "yellow",
    ConclusionValue.CONTRADICTED: "bold red",
}
"""How a terminal shows the words."""


def conclude(outcomes: Iterable[Outcome]) -> ConclusionValue:
    """The conclusion of checks that an answer rests on."""
    return weakest(_CONCLUSIONS[outcome] for outcome in outcomes)


_CONCLUSIONS = {
    Outcome.PASSED: ConclusionValue.SUPPORTED,
    Outcome.INCONCLUSIVE: ConclusionValue.INCONCLUSIVE,
    Outcome.FAILED: ConclusionValue.CONTRADICTED,
}


def weakest(conclusions: Iterable[ConclusionValue]) -> ConclusionValue:
    """The conclusion of what rests on several answers: contradicted where one is, else inconclusive where one is."""
    values = list(conclusions)
    for value in (ConclusionValue.CONTRADICTED, ConclusionValue.INCONCLUSIVE):
        if value in values:
            return value
    return ConclusionValue.SUPPORTED


def bound_condition(conclusion: ConclusionValue, checked: bool = True) -> str | None:
    """Whether a bound may be stated, and the condition to state with it. No other function decides this.

    Args:
        conclusion: conclusion of the checks.
        checked: whether the check that both groups are alike was made; relevant where it is inconclusive.

    Returns:
        None: no bound may be stated. An empty string: it is stated without a condition. Otherwise the condition, which
        is stated with every bound.
    """
    if conclusion == ConclusionValue.SUPPORTED:
        return ""
    if conclusion == ConclusionValue.INCONCLUSIVE:
        return UNCONFIRMED if checked else UNCHECKED
    return None


class Concluded(Record):
    """An answer with the conclusion of its checks."""

    conclusion: ConclusionValue = Field(
        description="supported: no check contradicts it, which is no proof; inconclusive: the blind test decided "
        "nothing or was not made; contradicted: a check contradicts it."
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changes, validated, so that the bound agrees with the changed conclusion."""
        return type(self).model_validate(super().model_copy(update=update, deep=deep).model_dump(by_alias=True))


class Bounded(Concluded):
    """An answer with a bound, present only where it may be stated."""

    bound: Bound | None = Field(
        None,
        description="What holds of this one list and of all audited documents, with a stated confidence, if the "
        "assumption holds; null where no bound may be stated or no theorem covers the selection. The guarantee "
        "covers an average.",
    )
    bound_withheld: str | None = Field(
        None, description="Why no bound is stated although a theorem covers the selection; null otherwise."
    )

    @model_validator(mode="before")
    @classmethod
    def _withhold(cls, value: Any) -> Any:
        """Remove a bound that may not be stated."""
        if not isinstance(value, dict) or value.get("bound") is None:
            return value
        stated: Any = value.get("conclusion")
        if bound_condition(stated) is not None:
            return value
        return {**value, "bound": None, "bound_withheld": CONTRADICTED}


class SmoothedRanks(Record):
    """How the list of a selection by smoothed ranks depends on the numbers that are drawn from the run."""

    n_whole: int = Field(description="Documents that the same procedure selects with whole ranks.")
    others: OtherDraws | None = Field(
        description="Lists of the same ranks under 20 other draws; null where too many documents of different groups "
        "are near the limit."
    )

    def sentence(self, n_selected: int) -> str:
        """That the list of `n_selected` documents depends on a draw, and by how much."""
        return smoothed_ranks(n_selected, self.n_whole, self.others)


class SelectionResult(Bounded, VersionedRecord):
    """The result of one selection; `Summary` adds the checks, whose sentences read this part."""

    schema_: Literal[3] = Field(  # type: ignore[assignment]
        3, alias="schema", description="Version of the form of this file."
    )
    name: str = Field(description="Name of the selection, and of its folder under selection/.")
    procedure: str = Field(description="The procedure that chose the selected.")
    direction: Direction = Field(description="members: selects documents that were trained on; clean: that were not.")
    alpha: float = Field(
        description="Largest share of the selected that may be wrong, as requested, in (0, 1); of a scan of a "
        "schedule, its level there."
    )
    detectors: list[str] = Field(description="Score columns that the selection reads.")
    calibration: str = Field(description="How p-values were calibrated: pooled, by_group or conditional.")
    n_audit: int = Field(description="Audited documents, quarantined ones included.")
    n_calibration: int = Field(description="Documents of known membership that the p-values were calibrated on.")
    n_quarantined: int = Field(
        description="Audited documents that could not be scored; each counts as a hypothesis with p = 1."
    )
    n_selected: int = Field(description="Documents selected.")
    threshold: float | None = Field(
        description="The largest p-value selected, divided by the weight of its group where there is one; null where "
        "nothing is, or where p-values do not decide. With smoothed ranks, the limit of the smoothed p-values that are "
        "selected."
    )
    null_proportion: float = Field(
        description="Share of the audited documents taken to be nulls: non-members (with direction clean, members); in "
        "(0, 1]."
    )
    factor: float | None = Field(
        description="R documents are selected if their p-values are at most alpha R / (factor n_audit); null: no such "
        "rule."
    )
    groups: list[GroupWeight] | None = Field(
        None,
        exclude_if=lambda groups: groups is None,
        description="The weights that p-values are divided by, of each group with audited documents; left out where "
        "they are not divided.",
    )
    weights: list[float] | None = Field(description="Weight of each detector in a fusion; null for one detector.")
    learn: Literal["pool"] | None = Field(
        None,
        exclude_if=lambda source: source is None,
        description="pool: adadetect learnt its score from the unordered pool of calibration and audited documents; "
        "left out elsewhere, also where it learnt from half of the calibration documents.",
    )
    guarantee: GuaranteeKind = Field(
        description="finite-sample: proved for any number of documents; asymptotic: as numbers grow; heuristic: not "
        "proved."
    )
    assumption: str = Field(description="The assumption of the guarantee.")
    promise: str = Field(description="The guarantee under the assumption.")
    reasons: list[str] = Field(description="Why the guarantee is not supported, one line each; empty where it is.")
    next: str | None = Field(
        None,
        exclude_if=lambda step: step is None,
        description="What to do next, in one sentence, where a check contradicts the answer or leaves it "
        "inconclusive; left out where none does.",
    )
    minimum_selectable: int = Field(description="The fewest documents that could have been selected, if any.")
    strict: StrictAnswer = Field(
        description="The answer of a procedure with a finite-sample guarantee: this one if it has it."
    )
    details: dict[str, float] = Field(description="Further numbers of the procedure, by name.")
    smoothed: SmoothedRanks | None = Field(
        None,
        exclude_if=lambda ranks: ranks is None,
        description="How the list depends on the numbers that smooth the ranks; left out where ranks are whole.",
    )
