"""The record of the checks of documents that need no model, and its file in the run directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from pipeline.checks.blind import CHECK as BLIND
from pipeline.checks.blind import BlindTest, blind_file, blind_test, untested
from pipeline.checks.check import Check, SampleCheck
from pipeline.checks.input_findings import InputFindings, Undecodable
from pipeline.checks.registry import SAMPLED
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError, UserError
from pipeline.run.records import VersionedRecord, read_part, read_record, write_part
from pipeline.run.remedies import checked_after, made_again_note
from pipeline.run.scored import Scored
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import Store
from pipeline.store.receipts import json_digest

_log = logging.getLogger(__name__)

_FORM = 3  # version of the checks; a file of an earlier one is not read


class DocumentChecks(VersionedRecord):
    """What was read before scoring; `PreflightChecks` has a field for each check."""

    sealed = True

    schema_: Literal[2] = Field(  # type: ignore[assignment]
        2, alias="schema", description="Version of the form of this file."
    )
    documents: dict[Role, int] = Field(description="Number of documents that were read, by role.")
    whole: bool = Field(description="Whether all documents were read; otherwise a sample of shards drawn at random.")
    damaged: list[str] = Field(description="The first inputs that could not be read to their end, one line each.")
    undecodable: list[Undecodable] = Field([], description="Inputs with documents of another encoding.")
    findings: list[InputFindings] = Field([], description="Documents that cannot be read, and notes, by input.")

    @property
    def scope(self) -> str:
        """The number of documents that were read."""
        count = sum(self.documents.values())
        return f"all {count:,} documents" if self.whole else f"a sample of {count:,} documents"

    def result(self, check: Check) -> Any:
        """The result of a check that is made before scoring, of the type that it declares."""
        assert check.sample is not None
        return getattr(self, check.sample.field)


def _field(before: SampleCheck) -> tuple[Any, Any]:
    """Type and description of the result of a check before scoring."""
    if before.empty is ...:
        return before.record, Field(description=before.description)
    return before.record, Field(
        before.empty, exclude_if=lambda result: result == before.empty, description=before.description
    )


if TYPE_CHECKING:
    PreflightChecks = DocumentChecks  # a type checker sees no field of a check, but `result`
else:
    PreflightChecks = create_model(
        "PreflightChecks",
        __base__=DocumentChecks,
        __module__=__name__,
        __doc__="The checks that need no model: `diagnostics/documents-<inputs>.json`.",
        **{before.field: _field(before) for _, before in SAMPLED},
    )


def stored_preflight(store: Store, shards: Sequence[Shard], seed: int) -> PreflightChecks | None:
    """The stored checks of exactly these documents; None where there are none, or they were changed.

    Raises:
        VersionError: the file is of another version.
    """
    name = checks_file(shards, seed)
    try:
        return read_record(store, name, PreflightChecks, checked_after(name))
    except DamagedError as error:
        _log.warning(made_again_note(error, "the checks are"))
        return None


def checks_file(shards: Sequence[Shard], seed: int) -> str:
    """The name identifies the documents and the version of the checks, so a repaired corpus is read again."""
    content = [replace(shard, name="", path="", first_row=0).to_dict() for shard in shards]
    digest = json_digest([_FORM, seed, content])
    return f"diagnostics/documents-{digest[:12]}.json"


def run_blind_test(scored: Scored, role: Role, config: AuditConfig) -> BlindTest:
    """The blind test of a role, made once per run because the texts may be gone later.

    Raises:
        UserError: the file of an earlier test was written by another version.
    """
    name = blind_file(role)
    try:
        if (earlier := read_part(scored.store, name, BlindTest)) is not None:
            return earlier
    except DamagedError as error:
        _log.warning(made_again_note(error, "the test is"))
    shards = list(scored.shards.values())
    before = stored_preflight(scored.store, shards, config.seed)
    try:
        made = {} if before is None else before.result(BLIND)
        test = made[role] if role in made else blind_test(shards, role, config)
    except UserError as error:
        sentence = untested(role, str(error), config.corpus.units)
        return BlindTest(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=sentence)
    write_part(scored.store, name, test)
    return test
