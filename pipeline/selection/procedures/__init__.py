"""The selection procedures: decisions with their guarantees from rank counts.

A procedure is one record (`record.Procedure`). To add one, add a module with its record to this package. Plugins use
`@procedure`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from typing import get_args

from pipeline.config.selection import SelectionConfig
from pipeline.detectors.plugins import BUILT_IN, display_module, load_installed
from pipeline.errors import ForeignError, UserError, error_line, foreign_as_errors, nearest
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.conformal import RankCounts
from pipeline.selection.guarantees import Guarantee, GuaranteeKind
from pipeline.selection.procedures.record import (
    PROCEDURES,
    Decision,
    Given,
    Procedure,
    decision,
    estimates_share,
    procedure_of,
)

__all__ = [
    "PROCEDURES",
    "Decision",
    "check_known",
    "check_settings",
    "decision",
    "procedure",
    "procedure_of",
    "why_unbounded",
    "why_whole",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    for _record in vars(importlib.import_module(_module.name)).values():
        if isinstance(_record, Procedure):
            PROCEDURES.register(_record.name, _record, BUILT_IN)

Decide = Callable[[RankCounts, Fraction], Decision]


_USUAL_NAMES = {
    "benjaminihochberg": "bh",
    "fdrbh": "bh",
    "benjaminiyekutieli": "by",
    "fdrby": "by",
    "storeybh": "storey",
    "qvalue": "storey",
}
"""Names of procedures in other programs, as their letters."""


def check_known(name: str, where: str = "") -> None:
    """Refuse a procedure that is not registered.

    Raises:
        UserError: names the nearest known procedure, after `where`.
    """
    if name not in PROCEDURES:
        usual = _USUAL_NAMES.get("".join(filter(str.isalpha, name.lower())), name)
        raise UserError(f"{where}unknown procedure {name!r}; {nearest(usual, PROCEDURES)}")


def why_unbounded(selection: SelectionConfig) -> str | None:
    """Why no bound is known for a selection, as a phrase after "because"; None if there is one.

    Ranks of calibration `conditional` are those of `pooled`. The score of adadetect and td4eval with `reconformal` is
    invariant when a null document and a calibration document swap places, so their ranks have a bound too.
    """
    name, chosen = selection.procedure, procedure_of(selection.procedure)
    if chosen.signed or chosen.only_versions:
        return f"procedure {name} does not select by ranks among calibration documents"
    if not chosen.is_valid(selection.reconformal):
        return f"procedure {name} has one only with reconformal: true"
    if calibration_of(selection.calibration).grouped:
        return f"calibration {selection.calibration} does not rank all documents among the same ones"
    if selection.ties == "random":
        return "ties: random places equal documents independently of one another, which the theorem does not cover"
    return None


def procedure(*, guarantee: GuaranteeKind, assumption: str, promise: str) -> Callable[[Decide], Decide]:
    """Register a function `(counts, alpha) -> Decision` as a procedure for selections.

    Its guarantee is shown in the report with every answer and is not verified. The function returns `decision(...)`,
    with the last selected rank.

    Args:
        guarantee: finite-sample, asymptotic or heuristic.
        assumption: one sentence with the condition of the guarantee.
        promise: the guarantee.

    Raises:
        UserError: another guarantee, an empty sentence, or a name that is already registered.

    Example:
        >>> @seenset.procedure(
        ...     guarantee="finite-sample",
        ...     assumption="Audited documents that were not trained on are exchangeable with the unseen ones.",
        ...     promise="The expected share of wrong documents among the selected is at most half of alpha.",
        ... )
        ... def half_bh(counts, alpha):
        ...     return seenset.decision("half_bh", counts, alpha, seenset.step_up(counts, alpha / 2))
        >>> answer = seenset.select([9.0, 8.0, 0.5], unseen=range(-50, 7), procedure="half_bh", alpha=0.2)
        >>> answer.selected.tolist()
        [True, True, False]
    """
    if guarantee not in get_args(GuaranteeKind):
        raise UserError(f"guarantee {guarantee!r} is unknown; {nearest(str(guarantee), get_args(GuaranteeKind))}")
    if not assumption.strip() or not promise.strip():
        raise UserError("a procedure needs a sentence that says what it assumes, and one that says what it guarantees")

    def register(function: Decide) -> Decide:
        name, module = function.__name__, function.__module__
        if procedure_of(name).built_in:
            raise UserError(f"procedure {name}: the name is built in; rename the function")

        @wraps(function)
        def checked(given: Given) -> Decision:
            try:
                with foreign_as_errors():
                    result = function(given.counts, given.alpha)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                line = error_line(error)
                text = line if isinstance(error, ForeignError) else f"{type(error).__name__}: {line}"
                raise UserError(f"procedure {name} ({display_module(module)}) raised {text}") from None
            if not isinstance(result, Decision):
                raise UserError(
                    f"procedure {name} ({display_module(module)}) must return decision(...), got {result!r}"
                )
            return result

        PROCEDURES.register(name, Procedure(name, Guarantee(guarantee, assumption, promise), checked), module)
        return function

    return register


def check_settings(selection: SelectionConfig, where: str) -> None:
    """Check a selection's settings against its procedure.

    Args:
        selection: the selection to check.
        where: its key in the configuration, for errors.

    Raises:
        UserError: an unknown procedure, or settings that it does not support.
    """
    if selection.procedure not in PROCEDURES:
        load_installed()
    check_known(selection.procedure, f"{where}: ")
    chosen, fusing = procedure_of(selection.procedure), [name for name, one in PROCEDURES.items() if one.several]
    twice = next((name for name, count in Counter(selection.detectors).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{where}: detectors names {twice!r} twice: name it once")
    first, *others = selection.detectors
    companion = chosen.companion(first) if chosen.companion else None
    if others and others != [companion] and not (chosen.several or chosen.only_versions):
        scaled = f" and {companion!r} behind it" if companion else ""
        count = len(selection.detectors)
        raise UserError(f"{where}: procedure {selection.procedure} takes 1 detector{scaled}, got {count}")
    refuses = {**({} if chosen.is_valid(selection.reconformal) else chosen.refuses_heuristic), **chosen.refuses}
    if (refused := refuses.get(selection.calibration)) is not None:
        raise UserError(f"{where}: procedure {selection.procedure} {refused}")
    _check_boost(selection, where)
    estimates, step_up = estimates_share(selection), procedure_of(selection.step_up)
    if step_up.estimates and not chosen.several:
        raise UserError(
            f"{where}: step_up {selection.step_up} is for procedures {' and '.join(fusing)}; "
            f"got procedure {selection.procedure}" + (", which estimates by itself" if estimates else "")
        )
    if selection.learn is not None and not chosen.learns:
        learning = [name for name, one in PROCEDURES.items() if one.learns]
        raise UserError(
            f"{where}: learn {selection.learn} is for procedure {' and '.join(learning)}; got procedure "
            f"{selection.procedure}, which learns no score: learn must be null"
        )
    if selection.lambda_ is not None and not (estimates or step_up.estimates):
        raise UserError(
            f"{where}: lambda is of Storey's estimate, and procedure {selection.procedure} makes none; take procedure "
            "storey" + (" or step_up storey" if chosen.several else "")
        )
    if chosen.signed and selection.direction != "members":
        raise UserError(f"{where}: procedure {selection.procedure} takes direction members, got {selection.direction}")
    if selection.ranks != "whole" and (why := why_whole(selection)) is not None:
        raise UserError(f"{where}: ranks smoothed {why}")
    _check_bound(selection, where)


def why_whole(selection: SelectionConfig) -> str | None:
    """Why there is no proof for smoothed ranks with the other settings of a selection; None if there is one."""
    chosen = procedure_of(selection.procedure)
    if calibration_of(selection.calibration).conditional:
        return f"takes calibration pooled or by_group, got {selection.calibration}"
    if not chosen.smooths:
        proved = ", ".join(name for name, one in PROCEDURES.items() if one.smooths)
        return (
            f"has no proof for procedure {selection.procedure}; take {proved} (td4eval with reconformal: true), or "
            "ranks: whole"
        )
    if not chosen.is_valid(selection.reconformal):
        return f"takes procedure {selection.procedure} with reconformal: true, got reconformal: false"
    return None


def _check_boost(selection: SelectionConfig, where: str) -> None:
    """Check that weights of groups have groups, and a proof for the procedure."""
    if selection.boost is None:
        return
    if not calibration_of(selection.calibration).grouped:
        raise UserError(
            f"{where}: boost group weighs the groups of calibration by_group, got calibration {selection.calibration}"
        )
    if not procedure_of(selection.procedure).weighs:
        *proved, last = (name for name, one in PROCEDURES.items() if one.weighs)
        raise UserError(
            f"{where}: boost group takes procedure {', '.join(proved)} or {last}, got {selection.procedure}: for "
            "others no guarantee with weights is proved"
        )


def _check_bound(selection: SelectionConfig, where: str) -> None:
    """Check that a requested bound has a proof."""
    why = why_unbounded(selection)
    if why is None:
        return
    if procedure_of(selection.procedure).per_list:
        raise UserError(f"{where}: procedure {selection.procedure} is not available, because {why}")
    if selection.confidence != SelectionConfig.model_fields["confidence"].default:
        raise UserError(f"{where}: no bound at confidence {selection.confidence:g} is available, because {why}")
