"""What two runs differ in: settings, model, data, versions; only the keys that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, JsonValue

from pipeline.audit.manifest import InputRecord
from pipeline.audit.records import Record
from pipeline.compare.finished_runs import FinishedRun, common_folder
from pipeline.config.corpus import ROLES

ABSENT = "(absent)"
_PLACES = ("run", "resources", "selections")
"""Settings of which none changes an answer, or which are compared as they were asked for."""


class Difference(Record):
    """One thing in which two runs differ."""

    part: str = Field(description="configuration, selection, fingerprint, model, version or input.")
    key: str = Field(description="What differs, as a dotted path.")
    a: JsonValue = Field(description=f"In run A, the first one; {ABSENT} where it has none.")
    b: JsonValue = Field(description=f"In run B, the second one; {ABSENT} where it has none.")


def differences(a: FinishedRun, b: FinishedRun, selections: list[str]) -> list[Difference]:
    """What two runs differ in, part by part, in the order of the keys.

    Args:
        a: the first run.
        b: the second.
        selections: those whose settings are compared, as they were asked for the last time.
    """
    parts = [
        ("configuration", _settings(a), _settings(b)),
        ("selection", _questions(a, selections), _questions(b, selections)),
        ("fingerprint", a.manifest.fingerprint, b.manifest.fingerprint),
        ("model", a.manifest.model.plain(), b.manifest.model.plain()),
        ("version", a.manifest.versions, b.manifest.versions),
        ("input", _inputs(a), _inputs(b)),
    ]
    return [
        Difference(part=part, key=key, a=one, b=other) for part, x, y in parts for key, one, other in _differing(x, y)
    ]


def _settings(run: FinishedRun) -> dict[str, Any]:
    plain = run.manifest.config.model_dump(mode="json", by_alias=True)
    kept = {key: value for key, value in plain.items() if key not in _PLACES}
    return {**kept, "limit": run.manifest.limit}


def _questions(run: FinishedRun, selections: list[str]) -> dict[str, Any]:
    return {name: run.settings(name) for name in selections}


def _inputs(run: FinishedRun) -> dict[str, Any]:
    """The input files by role and name within the role's folder, with what tells that their content changed."""
    files: dict[str, Any] = {}
    for role in ROLES:
        entries = [entry for entry in run.manifest.inputs if entry.role == role]
        folder = common_folder([entry.name for entry in entries])
        files.update({f"{role}: {entry.name.removeprefix(folder)}": _content(entry) for entry in entries})
    return files


def _content(entry: InputRecord) -> dict[str, Any]:
    return {"content": entry.content, "size": entry.size, "rows": entry.rows, "format": entry.format}


def _differing(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted paths of values that differ; a mapping that only one side has is one value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            inner = f"{path}.{key}" if path else str(key)
            yield from _differing(a.get(key, ABSENT), b.get(key, ABSENT), inner)
    elif a != b:
        yield path, a, b
