"""A finished run says of what it was made: the same command again answers from that, and reads no score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, JsonValue

from pipeline.audit.arithmetic import Decided, read_arithmetic
from pipeline.audit.manifest import versions
from pipeline.audit.plan import FINISHED_FILE, Plan, digest_of_sources
from pipeline.audit.records import VersionedRecord, opened, write_record
from pipeline.audit.review import content_of_review
from pipeline.audit.scored import Scored
from pipeline.audit.status import Status
from pipeline.config.yaml import build
from pipeline.corpus.shard import OF_A_SHARD, InputFile
from pipeline.errors import UserError
from pipeline.stages import SCORE_FOLDER, SCORING
from pipeline.store.files import Store

_READ = (f"receipts/{SCORING}", SCORE_FOLDER, "quarantine")
"""Folders that the answers are made of."""

_PASSING = ("lock", FINISHED_FILE)
"""How files of the run directory begin that are no part of the answer."""


class FinishedRecord(VersionedRecord):
    """A run whose questions are answered, what it was asked, and the files that it rests on: `finished.json`."""

    sealed = True

    question: str = Field(
        description="Digest of the configuration, the shards, the flags of the command and the versions."
    )
    fingerprint: dict[str, JsonValue] = Field(description="All that could change a score.")
    types: dict[str, Decided] = Field({}, description="What dtype auto chose, by key of the configuration.")
    files: dict[str, str] = Field(description="Digest of the names, sizes and times of a folder's files, by folder.")
    sources: str = Field("", description="Digest of where the documents come from, and of the limits.")
    inputs: list[InputFile] = Field([], description="The inputs as they were planned.")
    report: str = Field(description="Address of the report.")
    status: Status = Field(description="How the run ended, with its answers.")


def note_finished(
    plan: Plan,
    flags: Sequence[bool],
    scored: Scored,
    status: Status,
    report: str,
) -> None:
    """Write down of what the answers of a run are made. The run's lock must be held.

    Args:
        plan: of the run.
        flags: of the command, whatever changes what it writes.
        scored: its score shards.
        status: how the run ended, with its answers.
        report: address of the report.
    """
    store = scored.store
    adapters = [f"adapters/{name}" for name in store.names("adapters")]
    folders = [*_READ, *_written(status), *adapters]
    fingerprint, types = scored.receipts[0].fingerprint, read_arithmetic(store)
    record = FinishedRecord(
        question=_question(plan, flags),
        fingerprint={key: value for key, value in fingerprint.items() if key not in OF_A_SHARD},
        types={} if types is None else types.types,
        files={folder: store.state(folder, _PASSING) for folder in folders},
        report=report,
        status=status,
        sources=digest_of_sources(plan.config),
        inputs=list(plan.inputs),
    )
    write_record(store, FINISHED_FILE, record)


def read_finished(store: Store, plan: Plan, flags: Sequence[bool]) -> FinishedRecord | None:
    """What a finished run answered, if it was asked the same and its files are as they were; else None.

    Whether the models are the same too, its fingerprint says: their weights have to be read for that.
    """
    try:
        stored = store.read_json(FINISHED_FILE) if plan.finished is None else plan.finished
        record = build(FinishedRecord, opened(stored or {}, FINISHED_FILE))
    except (UserError, TypeError, ValueError):  # none, damaged or of another version: all is done anew
        return None
    if record.question != _question(plan, flags) or not record.files.keys() >= {*_READ, *_written(record.status)}:
        return None
    unchanged = all(store.state(folder, _PASSING) == state for folder, state in record.files.items())
    return record if unchanged else None


def forget_finished(store: Store) -> None:
    """To be called before anything of a finished run is changed."""
    store.remove(FINISHED_FILE)


def _written(status: Status) -> list[str]:
    """Folders with the answers; of a selection's verdicts on single documents, only that they are there."""
    return ["", "report", *(f"selection/{summary.name}" for summary in status.selections)]


def _question(plan: Plan, flags: Sequence[bool]) -> str:
    shards = [{key: value for key, value in shard.to_dict().items() if key != "first_row"} for shard in plan.shards]
    config = plan.config.model_dump(mode="json", by_alias=True)
    stamps = [entry.stamp for entry in plan.inputs]
    content = content_of_review(plan.config)
    review = [] if content is None else [hashlib.sha256(content).hexdigest()]
    return _digest([config, plan.limit, list(flags), versions(), shards, stamps, *review])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
