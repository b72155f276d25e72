"""JSON files of a run directory as typed records: a version, a sentence under every field, one line when damaged."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.config.yaml import build
from pipeline.errors import UserError
from pipeline.store.files import Store

MANIFEST_FILE = "manifest.json"
VERDICT_FILE = "verdict.json"


class Record(BaseModel):
    """A JSON file of a run directory, or a part of one: checked when it is read, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def plain(self) -> dict[str, Any]:
        """Plain values, as the file holds them."""
        return self.model_dump(mode="json", by_alias=True)


class VersionedRecord(Record):
    """A whole file, which says the version of its form."""

    schema_: Literal[1] = Field(1, alias="schema", description="Version of the form of this file.")


PartRecord = TypeVar("PartRecord", bound=Record)
WholeRecord = TypeVar("WholeRecord", bound=VersionedRecord)


def read_record(store: Store, name: str, kind: type[WholeRecord], remedy: str) -> WholeRecord | None:
    """Read a file that says the version of its form.

    A file without a version was written before there were any. It is read if it holds all that is needed.

    Args:
        store: the run directory.
        name: of the file.
        kind: what the file holds.
        remedy: what the user can do about a file of another version.

    Returns:
        The record, or None where there is no such file.

    Raises:
        UserError: in one line, a damaged file and its key, or the program that wrote a file of another version.
    """
    value = store.read_json(name)
    if value is None:
        return None
    where = f"{store.url}/{name}"
    if not isinstance(value, dict):
        raise UserError(f"{where} is damaged: not a mapping of keys to values")
    field = kind.model_fields["schema_"]
    version = value.get(field.alias)
    if version not in (None, field.default):
        raise UserError(
            f"{where} was written by seenset {_writer(store)} in form {version}, and this version reads form "
            f"{field.default}: {remedy}"
        )
    try:
        return build(kind, dict(value))
    except UserError as error:
        if version is None:
            message = f"{where} was written by seenset {_writer(store)} in an older form ({error}): {remedy}"
        else:
            message = f"{where} is damaged: {error}"
        raise UserError(message) from None


def parse_part(kind: type[PartRecord], value: Any, where: str) -> PartRecord:
    """A part of a file, without a version of its own.

    Raises:
        UserError: in one line, where it is damaged.
    """
    try:
        return build(kind, value)
    except UserError as error:
        raise UserError(f"{where} is damaged: {error}") from None


def _writer(store: Store) -> str:
    """The version of the program that planned the run, as its manifest says."""
    manifest = store.read_json(MANIFEST_FILE)
    versions = manifest.get("versions") if isinstance(manifest, dict) else None
    version = versions.get("seenset") if isinstance(versions, dict) else None
    return str(version) if version else "of an unknown version"
