"""The checks of an answer: the declarations of all modules of this package, made in one loop, and the next step."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import Field, create_model

from pipeline import checks as package
from pipeline.checks.check import KNOWN, AnswerFacts, Check, Planned, SampleCheck, SampleLine
from pipeline.checks.dependent_documents import DependenceDiagnostic, after_dependence
from pipeline.checks.diagnostic import Diagnostic
from pipeline.checks.document_sample import DocumentSample, calibrating
from pipeline.config.corpus import Role
from pipeline.errors import UserError
from pipeline.run.conclusion import conclude
from pipeline.run.records import Record
from pipeline.selection.guarantees import ConclusionValue, Outcome

Result = TypeVar("Result", bound=Diagnostic)


def _declared() -> Iterator[Check]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name != __name__ and (check := getattr(importlib.import_module(module.name), "CHECK", None)):
            yield check


CHECKS: tuple[Check, ...] = tuple(sorted(_declared(), key=lambda check: (check.place, check.name)))
"""In the order of the summary."""

CHECK_NAMED = {check.name: check for check in CHECKS}


class CheckResults(Record):
    """The results of the checks of an answer; `Conclusion` has a field for each check."""

    def by_name(self) -> dict[str, Diagnostic]:
        """The checks that apply, in order."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: diagnostic for name, diagnostic in named.items() if diagnostic is not None}

    def find(self, record: type[Result]) -> Result | None:
        """The result of the one check that has this record; None where it does not apply."""
        (name,) = (check.name for check in CHECKS if check.record is record)
        return cast(Result | None, getattr(self, name))

    def result(self, record: type[Result]) -> Result:
        """The result of the one check that has this record; for a check that applies to every answer."""
        result = self.find(record)
        assert result is not None
        return result

    def failures(self) -> list[str]:
        """The sentences of the failed checks that the guarantee depends on."""
        return [check.sentence for check in self.by_name().values() if check.contradicts]

    @property
    def value(self) -> ConclusionValue:
        """Contradicted where a check that the guarantee rests on failed; else inconclusive where a deciding one is."""
        if self.failures():
            return ConclusionValue.CONTRADICTED
        return conclude(check.outcome for check in self.by_name().values() if check.decides)


def _field(check: Check) -> tuple[Any, Any]:
    """Type and description of the result of a check in a summary."""
    if check.absent == "never":
        return check.record, Field(description=check.description)
    unstated = (lambda result: result is None) if check.absent == "left out" else None
    return check.record | None, Field(None, exclude_if=unstated, description=check.description)


if TYPE_CHECKING:
    Conclusion = CheckResults  # a type checker sees no field of a check: `result(RECORD)` has the type of the record
else:
    Conclusion = create_model(
        "Conclusion",
        __base__=CheckResults,
        __module__=__name__,
        __doc__="The checks of an answer, by name, and what follows from them.",
        **{check.name: _field(check) for check in CHECKS},
    )


def _part_of_plan(check: Check) -> tuple[bool, bool]:
    """Sorts checks into those of single documents, between roles, and of documents that depend on one another."""
    return check.joins != "", check.needs >= KNOWN


SAMPLED: tuple[tuple[Check, SampleCheck], ...] = tuple(
    sorted(
        ((check, check.sample) for check in CHECKS if check.sample is not None),
        key=lambda pair: (*_part_of_plan(pair[0]), pair[1].slow),
    )
)
"""Those that are made before scoring, in the order of a plan."""


def check_sample(sample: DocumentSample) -> dict[str, Any]:
    """The results of the checks before scoring, by field of `PreflightChecks`.

    Raises:
        UserError: documents with which no answer could be given.
    """
    return {before.field: before.make(sample) for _, before in SAMPLED}


def refuse_documents(results: Record, read: Planned) -> UserError | None:
    """Why a selection would refuse the documents after scoring; None where it would not.

    Args:
        results: a record with the fields of `check_sample`.
        read: the configuration, and the documents that were read.
    """
    errors = (before.refuse(getattr(results, before.field), read) for _, before in SAMPLED)
    return next((error for error in errors if error is not None), None)


def lines_about_inputs(results: Record) -> list[SampleLine]:
    """What the checks before scoring show of the inputs; arguments as in `lines_before_scoring`."""
    return [line for _, before in SAMPLED for line in before.about_inputs(getattr(results, before.field))]


def lines_before_scoring(results: Record, planned: Planned) -> list[SampleLine]:
    """What the checks before scoring found; of checks between roles, role by role.

    Args:
        results: a record with the fields of `check_sample`.
        planned: the plan of the run.
    """
    roles: list[Role | None] = [*calibrating(planned.config), None]
    made = [
        (check, line) for check, before in SAMPLED for line in before.lines(getattr(results, before.field), planned)
    ]
    made.sort(key=lambda pair: (*_part_of_plan(pair[0]), roles.index(pair[1].role)))
    return [line for _, line in made]


def make_checks(facts: AnswerFacts, stated: Conclusion | None = None) -> Conclusion:
    """Make the checks of an answer; those of dependent documents last, because they name what another answer selects.

    Args:
        facts: what is known of the answer.
        stated: results that the run of a bundle states, of which only those are made again that scores, groups and
            these results determine; None: all are made.
    """
    made: dict[str, Diagnostic | None] = {}
    for check in sorted(CHECKS, key=lambda check: check.joins != ""):
        if check.joins:
            others = [one for name, one in made.items() if one is not None and not CHECK_NAMED[name].joins]
            facts = replace(facts, alone=not any(one.contradicts for one in others))
        again = stated is None or check.recomputed or check.joins or not check.needs <= facts.offers
        made[check.name] = check.make(facts) if again else getattr(stated, check.name)
    return Conclusion(**made)


def next_step(conclusion: Conclusion, role: Role) -> str | None:
    """What to do next where a check contradicts an answer or leaves it inconclusive, in one sentence; else None.

    Dependent documents come before other failures where these leave bh no remedy, and after a failed blind test.

    Args:
        conclusion: the checks of the answer.
        role: the role whose documents calibrate.
    """
    made = conclusion.by_name()
    failed = {name: one for name, one in made.items() if one.contradicts}
    joined = {CHECK_NAMED[name].joins: one for name, one in failed.items() if isinstance(one, DependenceDiagnostic)}
    others = {name: one for name, one in failed.items() if not CHECK_NAMED[name].joins}
    undecided = {name: one for name, one in made.items() if one.decides and one.outcome == Outcome.INCONCLUSIVE}
    blamed = others and (any(one.decides for one in others.values()) or all(one.bh_stands for one in joined.values()))
    if joined and not blamed:
        return after_dependence(joined, role)
    return next((CHECK_NAMED[name].next(one, role) for name, one in {**others, **undecided}.items()), None)
