"""The conclusion of the checks of an answer, and the rule that decides whether a bound may be stated under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from pipeline.run.conclusion_text import CONTRADICTED, UNCHECKED, UNCONFIRMED
from pipeline.run.records import Record
from pipeline.selection.bounds import Bound
from pipeline.selection.guarantees import ConclusionValue, Outcome

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
