"""What a check declares, and what it looks at: the documents that were read before scoring, or an answer after it.

A check is one module of this package with its computation, its outcome, its sentences and its declaration `CHECK`,
which `registry` finds by its place: the summary of an answer has a field of its name, which holds its record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.checks.dependent_documents import NO_GROUPS, GroupSizes, breaks_bounds
from pipeline.checks.diagnostic import BlindDiagnostic, Diagnostic, NearDuplicates, OverlapDiagnostic
from pipeline.checks.document_sample import DocumentSample
from pipeline.checks.held_out_tail import TailTest
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.kinds import Capability
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.errors import UserError
from pipeline.run.conclusion import SelectionResult
from pipeline.run.scored import Scored
from pipeline.selection.folds import Answer
from pipeline.selection.guarantees import Outcome
from pipeline.store.external_sort import SortedRows

Time = Literal["sample", "scores"]
"""When a check is made: on documents that are read before scoring, or for an answer after it."""

Absent = Literal["never", "null", "left out"]
"""What a summary has in the place of a result where the check does not apply; never: it applies to every answer."""

KNOWN = frozenset({Capability.SINGLE})
KNOWN_TEXTS = KNOWN | {Capability.CONTENTS}
"""Needs of checks that compare known with audited documents."""

LAST = 100
"""The place of a check after all that state their own."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Calibration documents that are near-duplicates of audited ones."""

    diagnostic: OverlapDiagnostic
    n_trained: int  # audited documents that are near-duplicates of one that an adapter was trained on
    keep: np.ndarray  # bool over the calibration documents, without training documents


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AnswerFacts:
    """What the checks of one answer look at; of scores without their run only the first four are known."""

    selection: SelectionConfig
    answer: Answer
    offers: frozenset[Capability]  # of the kind of the documents
    groups: tuple[GroupSizes, GroupSizes] = NO_GROUPS, NO_GROUPS  # audited documents, and those that calibrate
    scored: Scored | None = None
    overlap: Overlap | None = None  # of the null role with the audited documents
    blind: BlindDiagnostic | None = None  # of the null role
    tail: TailTest | None = None  # of the null role
    near: Mapping[Role, NearDuplicates] = field(default_factory=dict)  # of the audited documents and the null role
    near_copies: float = 1.0  # minimum share of common runs of near-duplicates
    selected: SortedRows | None = None  # selected documents; columns doc_id, source and row
    shuffle: Diagnostic | None = None  # of documents with versions
    alone: bool = True  # whether no check contradicts the answer but those of dependent documents

    @property
    def role(self) -> Role:
        """The null role, whose documents calibrate."""
        return NULL_ROLE[self.selection.direction]

    @property
    def near_of_bound(self) -> list[NearDuplicates]:
        """The near-duplicates that can spread the counts of a bound; of one document a block none do."""
        roles: list[Role] = ["audit", *([self.role] if self.selection.calibrate == "all" else [])]
        return [self.near[role] for role in roles if role in self.near]

    @property
    def bounded(self) -> bool:
        """Whether no documents depend on one another so that a bound of independent ones would not hold."""
        return not (breaks_bounds(*self.near_of_bound) or any(sizes.breaks_bounds for sizes in self.groups))

    @property
    def n_selected(self) -> int:
        """The number of selected documents."""
        return 0 if self.selected is None else len(self.selected)

    def among(self, places: Collection[tuple[str, int]]) -> list[tuple[str, int, str]]:
        """Source, row and id of the selected documents at the given places (source and row)."""
        sources, rows = (pa.array({place[side] for place in places}) for side in (0, 1))
        listed = []
        for piece in self.selected.pieces() if places and self.selected is not None else ():
            near = piece.filter(pc.and_(pc.is_in(piece["source"], sources), pc.is_in(piece["row"], rows)))
            named = zip(*(near[name].to_pylist() for name in ("source", "row", "doc_id")), strict=True)
            listed += [one for one in named if one[:2] in places]
        return listed


def first_sentence(diagnostic: Diagnostic, result: SelectionResult) -> str:
    """The short form of a result that did not pass: its first sentence."""
    return diagnostic.sentence.partition(". ")[0].rstrip(".") + "."


def correct_it(diagnostic: Diagnostic, role: Role) -> str:
    """What to do after a check that failed and names what to correct."""
    return "Correct what the failed check names, and make a new run."


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan states of a run, on which the lines of checks before scoring depend beside their results."""

    config: AuditConfig
    documents: Mapping[Role, int]  # planned number, by role; in a refusal the number that was read
    whole: bool  # whether all documents were read


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A line of a plan, or of a run before scoring."""

    outcome: Outcome  # failed: a warning; inconclusive: a note
    sentence: str
    role: Role | None = None  # the known role that it is about, if it is about one


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """How a check is made of documents that were read before scoring."""

    field: str  # of `PreflightChecks`, which holds its result
    record: Any  # type of its result
    description: str  # of its result
    make: Callable[[DocumentSample], Any]
    lines: Callable[[Any, Planned], list[SampleLine]]  # from its result
    about_inputs: Callable[[Any], list[SampleLine]] = lambda result: []  # lines before those of all results
    refuse: Callable[[Any, Planned], UserError | None] = lambda result, read: None  # with the numbers that were read
    empty: Any = ...  # the result that is left out of the file; Ellipsis: none is
    slow: bool = False  # whether it takes seconds; then it is made after others that may refuse the documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The declaration of a check; its module has the computation and the sentences."""

    name: str  # in the summary
    title: str  # its subject, as a short phrase; colour and sentence state the result
    record: type[Diagnostic]  # the form of its result
    description: str  # of its result, in the schema of a summary
    absent: Absent = "null"
    place: int = LAST  # in a summary, and among checks of equal colour on a page; equal places: by name
    on_scores: Callable[[AnswerFacts], Diagnostic | None]  # None: it does not apply
    sample: SampleCheck | None = None  # before scoring; None: only an answer shows it
    finding: Callable[..., Any] | None = None  # what both times call; None: it is made at one time only
    needs: frozenset[Capability] = frozenset()  # of the documents; known ones calibrate those without versions
    unmade: Callable[[AnswerFacts], Diagnostic | None] = lambda facts: None  # where documents lack what it needs
    brief: Callable[[Any, SelectionResult], str] = first_sentence  # why it did not pass, in one line
    next: Callable[[Any, Role], str | None] = correct_it  # what to do where it contradicts an answer, or decides none
    title_of_versions: str | None = None  # its subject where documents have versions, if it differs
    joins: str = ""  # what joins dependent documents, if it is about these; then it is made after the others
    from_counts: bool = False  # whether a plan makes it too, from numbers of documents alone
    recomputed: bool = False  # whether scores and groups alone determine it, as in a bundle
    of_answer: bool = False  # whether it is of one answer; the verdict on the collection has a test of its own

    @property
    def times(self) -> frozenset[Time]:
        """When it can be made."""
        before = self.sample is not None or self.from_counts
        return frozenset({"sample", "scores"}) if before else frozenset({"scores"})

    def make(self, facts: AnswerFacts) -> Diagnostic | None:
        """Make the check of an answer; None where it does not apply."""
        return self.on_scores(facts) if self.needs <= facts.offers else self.unmade(facts)
