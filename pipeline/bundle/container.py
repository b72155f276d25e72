"""The file of a bundle: a zip with stored members; names and contents determine every byte.

docs/evidence.md defines the layout. `unpack` rebuilds the headers and compares them, so that every bit of the file is
checked.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from pipeline.answers.verdict import BlockKind
from pipeline.config.selection import RecordedSelection
from pipeline.config.yaml import build
from pipeline.errors import ExitCode, UserError
from pipeline.run.records import Record, VersionedRecord, sealed_values
from pipeline.store.files import to_json
from pipeline.store.receipts import DIGEST, is_sealed

INDEX = "bundle.json"
COMMENT = b"seenset evidence bundle"
MOST_BYTES = 4_000_000_000
"""Maximum size of all members: offsets in the headers have 32 bits."""

FORM = 4
"""Version of the format of bundles."""

_DATE = 1 << 5 | 1  # 1980-01-01, the earliest date of a zip
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")


class RefutedError(UserError):
    """A bundle is damaged, or states something that its scores contradict."""

    exit_code = ExitCode.UNSUPPORTED


class Member(Record):
    """A file in a bundle."""

    name: str = Field(description="Its name.")
    size: int = Field(ge=0, description="Bytes.")
    sha256: str = Field(description="SHA-256, hexadecimal.")


class BundleIndex(VersionedRecord):
    """The content of a bundle and the questions of its answers: `bundle.json`, its first member."""

    sealed = True

    schema_: Literal[4] = Field(  # type: ignore[assignment]
        4, alias="schema", description="Version of the form of bundles; earlier ones had other checks and columns."
    )
    format: Literal["seenset evidence bundle"] = Field("seenset evidence bundle", description="Type of the file.")
    seenset: str = Field(description="Version of the program that wrote it.")
    selections: list[RecordedSelection] = Field(description="The questions that the answers are for.")
    columns: list[str] = Field([], description="Score columns that the verdict reads, in order; empty without one.")
    blocks: BlockKind | None = Field(None, description="Units that the verdict permutes; null without one.")
    texts: bool = Field(description="Whether the documents have their texts.")
    several: str | None = Field(None, description="Note on other questions of the run; null where there are none.")
    members: list[Member] = Field(description="The other members, in their order.")


def pack_members(index: Mapping[str, Any], contents: Mapping[str, bytes]) -> bytes:
    """The bytes of a bundle.

    Args:
        index: the keys of `BundleIndex` except `members`.
        contents: contents of the other members, in order.

    Raises:
        UserError: a bundle of more than 4 GB.
    """
    listed = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()
    ]
    record = build(BundleIndex, {**index, "members": listed})
    files = {INDEX: to_json(sealed_values(record.plain())), **contents}
    if sum(map(len, files.values())) > MOST_BYTES:
        raise UserError("a bundle holds at most 4 GB, and this one would be larger; pack a run of fewer documents")
    heads, tail = _headers(files)
    return b"".join(part for pair in zip(heads, files.values(), strict=True) for part in pair) + tail


def unpack(data: bytes, name: str) -> tuple[BundleIndex, dict[str, bytes]]:
    """The index and the members of a bundle, after a check of every bit.

    Args:
        data: content of the file.
        name: name of the file, for messages.

    Raises:
        UserError: not a bundle, or one of another version.
        RefutedError: a damaged bundle; the message names the damaged member, or "the container" for other parts.
    """
    head = _LOCAL.size + len(INDEX)
    if data[_LOCAL.size : head] != INDEX.encode() and not data.endswith(COMMENT):
        raise UserError(f"{name} is not a bundle: seenset pack RUN writes one")
    sizes = _LOCAL.unpack_from(data.ljust(_LOCAL.size))[7:9] if len(data) >= head else (0,)
    opening = next((text for size in sizes if (text := _opened(data[head : head + size])) is not None), None)
    if opening is None:
        raise RefutedError(f"{name}: {INDEX} is damaged")
    value, size = opening
    if value.get("schema") != FORM:
        writer = value.get("seenset")
        raise UserError(
            f"{name} is a bundle of version {value.get('schema')}, written by seenset {writer}; this version reads "
            f"version {FORM}: verify it with seenset {writer}"
        )
    try:
        index = build(BundleIndex, {key: value[key] for key in value if key != DIGEST})
    except UserError as error:
        raise RefutedError(f"{name}: {INDEX} has invalid content: {error}") from None
    members, place = {INDEX: data[head : head + size]}, head + size
    for member in index.members:
        place += _LOCAL.size + len(member.name.encode())
        content = data[place : place + member.size]
        if hashlib.sha256(content).hexdigest() != member.sha256:
            raise RefutedError(f"{name}: {member.name} is damaged")
        members[member.name] = content
        place += member.size
    heads, tail = _headers(members)
    place = 0
    for header, content in zip(heads, members.values(), strict=True):
        if data[place : place + len(header)] != header:
            raise RefutedError(f"{name}: the container is damaged")
        place += len(header) + len(content)
    if data[place:] != tail or len(members) != len(index.members) + 1:
        raise RefutedError(f"{name}: the container is damaged")
    return index, members


def _opened(text: bytes) -> tuple[dict[str, Any], int] | None:
    """The index in these bytes, and its length; None where it was changed."""
    try:
        value = json.loads(text)
        intact = isinstance(value, dict) and is_sealed(value) and to_json(value) == text
    except (ValueError, RecursionError):
        return None
    return (value, len(text)) if intact else None


def _headers(files: Mapping[str, bytes]) -> tuple[list[bytes], bytes]:
    """The header before each member, and the data after all of them."""
    heads, directory, place = [], b"", 0
    for name, data in files.items():
        label, crc, size = name.encode(), zlib.crc32(data), len(data)
        about = (20, 1 << 11, 0, 0, _DATE, crc, size, size, len(label), 0)  # version, UTF-8 name, stored
        heads.append(_LOCAL.pack(b"PK\x03\x04", *about) + label)
        directory += _CENTRAL.pack(b"PK\x01\x02", 20, *about, 0, 0, 0, 0, place) + label
        place += len(heads[-1]) + size
    count = len(heads)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), place, len(COMMENT))
    return heads, directory + end + COMMENT
