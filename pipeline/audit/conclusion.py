"""The conclusion of the checks of an answer, and the rule that decides whether a bound may be stated under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.audit.records import Record
from pipeline.report.wording.conclusion import CONTRADICTED, UNCHECKED, UNCONFIRMED
from pipeline.selection.bounds import Bound

Conclusion = Literal["supported", "inconclusive", "contradicted"]

STYLES: dict[Conclusion, str] = {"supported": "green", "inconclusive": "yellow", "contradicted": "bold red"}
"""How a terminal shows the words."""


def conclude(checks: Iterable[bool | None]) -> Conclusion:
    """The conclusion of checks that an answer rests on.

    Args:
        checks: False: it failed; True: it passed; None: it was inconclusive, or was not made.
    """
    results = list(checks)
    if False in results:
        return "contradicted"
    return "inconclusive" if None in results else "supported"


def supported_of(conclusion: Conclusion) -> bool | None:
    """The published truth value of a conclusion; None where it is inconclusive."""
    return {"supported": True, "inconclusive": None, "contradicted": False}[conclusion]


def bound_condition(conclusion: Conclusion, checked: bool = True) -> str | None:
    """Whether a bound may be stated, and the condition to state with it. No other function decides this.

    Args:
        conclusion: conclusion of the checks.
        checked: whether the check that both groups are alike was made; relevant where it is inconclusive.

    Returns:
        None: no bound may be stated. An empty string: it is stated without a condition. Otherwise the condition, which
        is stated with every bound.
    """
    if conclusion == "contradicted":
        return None
    if conclusion == "supported":
        return ""
    return UNCONFIRMED if checked else UNCHECKED


class Concluded(Record):
    """An answer with the conclusion of its checks."""

    supported: bool | None = Field(
        description="False: a check contradicts it; true: none does, which is no proof; null: not checked, or the "
        "blind test is inconclusive."
    )
    conclusion: Conclusion = Field(
        "inconclusive",
        description="supported: no check contradicts it; inconclusive: the blind test decided nothing or was not "
        "made; contradicted: a check contradicts it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _conclude(cls, value: Any) -> Any:
        """Set the conclusion that follows from `supported`."""
        if isinstance(value, dict) and value.get("supported") in (True, False, None):
            return {**value, "conclusion": conclude([value.get("supported")])}
        return value

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changes, validated, so that the conclusion and the bound agree with the changed values."""
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
        if bound_condition(conclude([value.get("supported")])) is not None:
            return value
        return {**value, "bound": None, "bound_withheld": CONTRADICTED}
