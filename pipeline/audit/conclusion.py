"""The conclusion of the checks of an answer, and the rule that decides whether a bound may be stated under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipeline.audit.records import Record
from pipeline.selection.bounds import Bound

Conclusion = Literal["supported", "inconclusive", "contradicted"]

CONTRADICTED = "No bound is stated: a check contradicts what it rests on."
"""Why an answer has no bound that a check contradicts."""

WARNING = "CONTRADICTED, do not act on it"
"""What stands before the reason, and before any number, of an answer that a check contradicts."""

STYLES: dict[Conclusion, str] = {"supported": "green", "inconclusive": "yellow", "contradicted": "bold red"}
"""How a terminal shows the words."""

GROUPED = (
    "This selection states no bound: a bound requires independent documents, and these are grouped or near copies of "
    "each other."
)
"""Why an answer has no bound whose documents depend on each other."""

_UNCONFIRMED = "provided both groups are alike; the test could not confirm this"
_UNCHECKED = "provided both groups are alike; this was not checked"


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
        conclusion: of the checks.
        checked: whether the check that both groups are alike was made; of interest where it is inconclusive.

    Returns:
        None: no bound may be stated. An empty string: it is stated without a condition. Otherwise the condition, which
        is stated with every bound.
    """
    if conclusion == "contradicted":
        return None
    if conclusion == "supported":
        return ""
    return _UNCONFIRMED if checked else _UNCHECKED


def standing(conclusion: Conclusion, checked: bool = True) -> str:
    """The word for a conclusion in tables.

    Args:
        conclusion: of the checks.
        checked: as for `bound_condition`.
    """
    if conclusion == "contradicted":
        return "CONTRADICTED"
    return conclusion if checked or conclusion == "supported" else "inconclusive (not checked)"


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
        """Files of version 0.9.0 have no conclusion."""
        if isinstance(value, dict) and value.get("supported") in (True, False, None):
            return {**value, "conclusion": conclude([value.get("supported")])}
        return value

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with changes, validated, so that the conclusion and the bound agree with the changed values."""
        return type(self).model_validate(super().model_copy(update=update, deep=deep).model_dump(by_alias=True))


class Bounded(Concluded):
    """An answer with a bound, which is there only where it may be stated."""

    bound: Bound | None = Field(
        None,
        description="What holds of this one list and of all audited documents, with a stated confidence, if the "
        "assumption holds; null where no bound may be stated or no theorem covers the selection. The promise is of an "
        "average.",
    )
    bound_withheld: str | None = Field(
        None, description="Why no bound is stated although a theorem covers the selection; null otherwise."
    )

    @model_validator(mode="before")
    @classmethod
    def _withhold(cls, value: Any) -> Any:
        """No answer holds a bound that may not be stated, also where version 0.9.0 wrote one."""
        if not isinstance(value, dict) or value.get("bound") is None:
            return value
        if bound_condition(conclude([value.get("supported")])) is not None:
            return value
        return {**value, "bound": None, "bound_withheld": CONTRADICTED}
