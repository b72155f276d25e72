"""Settings as a YAML file with the sentence of each setting above it, and their JSON schema for editors."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from pipeline.config.paths import fields_of, sections_in

WIDTH = 110
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Written:
    """One setting as a file has it."""

    key: str
    value: Any  # a plain value, or the settings of a section, or a list of these
    notes: tuple[str, ...] = ()  # comments below the setting's own sentence
    off: bool = False  # a comment as a whole


def commented(kind: type[BaseModel], settings: Sequence[Written]) -> str:
    """Settings as YAML. Above each stands its description, the first time that it appears.

    Args:
        kind: what the settings describe.
        settings: of it, in the order of the file.
    """
    described: set[tuple[type, str]] = set()
    blocks = [list(_lines(kind, setting, described, "")) for setting in settings]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def config_schema(kind: type[BaseModel], procedures: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a configuration, by which editors complete and check it.

    Args:
        kind: the configuration.
        procedures: those that are registered, which an editor offers; a plugin's name is accepted too.
    """
    schema = kind.model_json_schema()
    procedure = schema["$defs"]["SelectionConfig"]["properties"]["procedure"]
    procedure["anyOf"] = [{"enum": list(procedures), "type": "string"}, {"type": procedure.pop("type")}]
    return {"$schema": DIALECT, **schema}


def comment(text: str, indent: str = "") -> Iterator[str]:
    """A text as lines of comment. Names of files and columns stand in it: none may end the comment."""
    sign = f"{indent}# "
    yield from textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=sign,
        subsequent_indent=sign,
        break_long_words=False,
        break_on_hyphens=False,
    )


def printable(text: str) -> str:
    """A text in one line without control characters."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def _lines(kind: type, setting: Written, described: set[tuple[type, str]], indent: str) -> Iterator[str]:
    field = next(field for name, field in fields_of(kind).items() if (field.alias or name) == setting.key)
    section = next(sections_in(field.annotation), None)
    if (kind, setting.key) not in described:
        described.add((kind, setting.key))
        yield from comment(field.description or _first_line(section), indent)
    for note in setting.notes:
        yield from comment(note, indent)
    if not setting.off:
        yield from _value_lines(setting, section, described, indent)
        return
    for line in _value_lines(setting, section, set(described), indent):
        if not line.lstrip().startswith("#"):  # a setting that is off needs no comments within the comment
            yield f"{indent}# {line[len(indent) :]}"


def _value_lines(
    setting: Written, section: type | None, described: set[tuple[type, str]], indent: str
) -> Iterator[str]:
    inner = setting.value
    if section is not None and isinstance(inner, list) and inner and isinstance(inner[0], Written):
        yield f"{indent}{setting.key}:"
        for one in inner:
            yield from _lines(section, one, described, f"{indent}  ")
    elif section is not None and isinstance(inner, tuple):  # a list of sections
        yield f"{indent}{setting.key}:"
        for entry in inner:
            lines = [line for one in entry for line in _lines(section, one, described, f"{indent}    ")]
            first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
            lines[first] = f"{indent}  - {lines[first].lstrip()}"
            yield from lines
    else:
        yield f"{indent}{setting.key}: {_plain(inner)}"


def _plain(value: Any) -> str:
    """A value in one line of YAML."""
    if not all(str(one).isprintable() for one in (value if isinstance(value, list) else [value])):
        return json.dumps(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _first_line(section: type | None) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split()) if section is not None else ""
