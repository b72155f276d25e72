"""What a finished run knows of its inputs: one that a listing shows unchanged is not opened again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from pipeline.audit.manifest import InputRecord
from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import build
from pipeline.corpus.shard import InputFile
from pipeline.errors import UserError
from pipeline.store.files import Store
from pipeline.store.receipts import is_sealed

FINISHED_FILE = "finished.json"


class KnownInput(InputRecord):
    """An input as it was planned, with what its files had to be opened for."""

    files: list[str] = Field(description="Names of the text files of a folder.")
    text_bytes: int = Field(description="Bytes of the text column, decompressed; 0 where metadata do not say.")


def known_record(config: AuditConfig, inputs: Sequence[InputFile]) -> dict[str, Any]:
    """What `finished.json` says of the inputs of a run: `sources` and `inputs`."""
    known = [KnownInput.model_validate(entry, from_attributes=True) for entry in inputs]
    return {"sources": _sources(config), "inputs": known}


@dataclass(frozen=True, slots=True)
class Known:
    """What was read of a finished run before its inputs were looked for."""

    record: dict[str, Any] | None = None  # as it stands in `finished.json`; None where it was not read
    inputs: Mapping[tuple[str, str], InputFile] = field(default_factory=dict)  # by role and path


def read_known(config: AuditConfig) -> Known:
    """The inputs of a finished run; none where its sources were others, or where all are local and cost nothing."""
    if all("://" not in path for _, source in config.corpus.roles() for path in source.paths):
        return Known()
    record: dict[str, Any] = {}
    try:
        record = dict(Store(config.run).read_json(FINISHED_FILE) or {})
        if not is_sealed(record) or record.get("sources") != _sources(config):
            return Known(record)
        entries = [build(KnownInput, dict(entry)) for entry in record["inputs"]]
        inputs = [InputFile(**{**entry.model_dump(), "files": tuple(entry.files)}) for entry in entries]
    except (UserError, OSError, KeyError, TypeError, ValueError):  # damaged, or out of reach: all is opened anew
        return Known(record)
    return Known(record, {(entry.role, entry.path): entry for entry in inputs})


def _sources(config: AuditConfig) -> str:
    described = [config.corpus.model_dump(mode="json"), config.limits.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
