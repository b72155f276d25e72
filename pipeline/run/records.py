"""JSON files of a run directory as typed records, with a version, a description of every field, and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.config.yaml import build
from pipeline.errors import DamagedError, RetiredError, UserError, VersionError
from pipeline.run.remedies import UNKNOWN_VERSION
from pipeline.store.files import Store, to_json
from pipeline.store.receipts import DIGEST, is_sealed, sealed

MANIFEST_FILE = "manifest.json"
SHARDS_FILE = "shards.json"
VERDICT_FILE = "verdict.json"

AUDITED_RECORD = "judged.json"
"""The runs that `against` counted, and the digest of the keys of the texts that they have audited."""

KEYS_FILE = "adapters/documents.parquet"
"""The keys of the documents that adapters were trained on."""

DUPLICATES = "quarantine/duplicate_id.parquet"
"""The documents of a run whose id occurs in an earlier shard, which only all shards together determine."""


class Record(BaseModel):
    """A JSON file of a run directory, or a part of one; validated when it is read, and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def plain(self) -> dict[str, Any]:
        """Plain values, as in the file."""
        return self.model_dump(mode="json", by_alias=True)


class VersionedRecord(Record):
    """A whole file, which states the version of its format."""

    sealed: ClassVar[bool] = False
    """Whether the file holds the SHA-256 of its other keys under `digest`."""

    schema_: Literal[1] = Field(1, alias="schema", description="Version of the form of this file.")


PartRecord = TypeVar("PartRecord", bound=Record)
WholeRecord = TypeVar("WholeRecord", bound=VersionedRecord)


def read_record(
    store: Store, name: str, kind: type[WholeRecord], remedy: str, remade: str | None = None
) -> WholeRecord | None:
    """Read a file that states the version of its format.

    Args:
        store: the run directory.
        name: file name.
        kind: type of the record.
        remedy: what the user can do about a file of another version.
        remade: the command that writes a damaged file again; None: not stated.

    Returns:
        The record, or None where there is no such file.

    Raises:
        DamagedError: a damaged file; the message names the key where it is known.
        VersionError: a file of another version, or with a setting that this one has not; the message names the
            program that wrote it.
    """
    try:
        return _read_record(store, name, kind, remedy)
    except DamagedError as error:
        raise error if remade is None else error.with_remedy(remade) from None


def _read_record(store: Store, name: str, kind: type[WholeRecord], remedy: str) -> WholeRecord | None:
    value = store.read_json(name)
    if value is None:
        return None
    where = f"{store.url}/{name}"
    if not isinstance(value, dict):
        raise DamagedError(where, "is damaged: not a mapping of keys to values")
    field = kind.model_fields["schema_"]
    version = value.get(field.alias)
    if version != field.default:
        form = "an older form" if version is None else f"form {version}"
        fault = f"was written by seenset {_writer(store)} in {form}, and this version reads form {field.default}"
        raise VersionError(where, fault, remedy, ": ")
    if kind.sealed:
        value = opened(value, where)
    try:
        return build(kind, dict(value))
    except RetiredError as error:
        raise VersionError(where, f"was written by seenset {_writer(store)}, and {error}", remedy) from None
    except UserError as error:
        raise DamagedError(where, f"is damaged: {error}") from None


def write_record(store: Store, name: str, record: VersionedRecord) -> str:
    """Write a file that states the version of its format; returns the SHA-256 of the file, hexadecimal.

    A file that has these bytes is left untouched.
    """
    return store.keeping().write_json(name, sealed_values(record.plain()) if record.sealed else record.plain())


def sealed_values(value: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values with their digest, as read back: a file holds no lone surrogate."""
    return sealed(json.loads(to_json(value)))


def opened(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of a sealed record without its digest.

    Args:
        value: content of the file.
        where: location, for messages.

    Raises:
        DamagedError: the content was changed.
    """
    if not is_sealed(value):
        raise DamagedError(where, "is damaged: its content is not what was written")
    return {key: value[key] for key in value if key != DIGEST}


def write_part(store: Store, name: str, part: Record) -> None:
    """Write a record without a version of its own; the file holds its name and a digest."""
    store.write_json(name, sealed_values({"file": name, **part.plain()}))


def read_part(store: Store, name: str, kind: type[PartRecord]) -> PartRecord | None:
    """Read what `write_part` wrote; None where there is no such file.

    Raises:
        DamagedError: the content was changed, or was written under another name.
    """
    value = store.read_json(name)
    if value is None:
        return None
    where = f"{store.url}/{name}"
    if not isinstance(value, dict) or not is_sealed(value) or value.get("file") != name:
        raise DamagedError(where, "is damaged: its content is not what was written")
    return parse_part(kind, {key: value[key] for key in value if key not in ("file", DIGEST)}, where)


def parse_part(kind: type[PartRecord], value: Any, where: str) -> PartRecord:
    """Read a part of a file, without a version of its own.

    Raises:
        DamagedError: the part is damaged; the message names the key.
    """
    try:
        return build(kind, value)
    except UserError as error:
        raise DamagedError(where, f"is damaged: {error}") from None


def _writer(store: Store) -> str:
    """The version of the program that planned the run, from its manifest."""
    manifest = store.read_json(MANIFEST_FILE)
    versions = manifest.get("versions") if isinstance(manifest, dict) else None
    version = versions.get("seenset") if isinstance(versions, dict) else None
    return str(version) if version else UNKNOWN_VERSION
