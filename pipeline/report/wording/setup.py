"""What a plan and its configuration state: what is missing, where the work runs, and what a forecast was made from."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.corpus import ROLE_DOCUMENTS, Role

RUN_OR_LEDGER = "the folder of a run or a ledger"
MATRIX_PRODUCT = "a matrix product on it"
"""What the pace of a model was measured by, where the model itself could not be."""

AND_TO_CALIBRATE = ", so that at least one is left to calibrate on"
"""Why an adapter needs one document more than it is trained on."""


def some_layers(some: int, total: int) -> str:
    """What the pace of a model was measured by."""
    return f"a short measurement of a model of the same shape with {some} of {total} layers"


def pictures_with(caption: str, parts: Sequence[str]) -> str:
    """What a pass over pictures reads."""
    return f"pictures with {caption} descriptions ({', '.join(parts)})"


def largest_of(nodes: int) -> str:
    """The node of a cluster that a message is about."""
    return f"the largest of {nodes} nodes"


def not_given(need: str, role: Role) -> str:
    """A role that something needs, and that the configuration does not give."""
    return f"{need} corpus.{role}, which is not given"


def add_role(role: Role) -> str:
    """What to add to a configuration that lacks a role."""
    return f"add corpus.{role}: {{path: ...}}, {ROLE_DOCUMENTS[role]}"


def did_you_mean(name: str) -> str:
    """A guess at what was meant, before what there is."""
    return f"did you mean {name!r}? "


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them."""
    return f"{', '.join(names[:-1])} and {names[-1]}"
