"""Write configuration.md, the reference of every setting, from the sentences under the fields themselves.

    python -m docs.reference

One list a section: name with default, values, sentence. A test holds that the page on disk is what this writes.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.audit import AuditConfig
from pipeline.trial.config import TrialConfig

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """\
# Configuration

An audit and a trial are one YAML file each. This page lists every setting with its default. [Data](data.md),
[models](models.md) and the pages of the detectors have examples.

- An unknown key is refused in one line that names the nearest known one.
- [`--set a.b=c`](commands.md#options) changes a setting for one call. A number is a place
  in a list (`--set selections.0.alpha=0.05`), `*` stands for every entry of it.
- Relative paths are relative to the file that names them; those of `--set`, and those of a `dict` in Python, to the
  folder in which the command runs. `~` and fsspec URLs (`s3://`, `gs://`) work. A model is a path if it begins with
  `./` or `../`, ends in `.gguf`, or names a folder beside the file; otherwise it is a hub id.
- `manifest.json` keeps a relative path as `FOLDER/./PATH`, and ids of documents begin with `PATH`.
- A setting without a value is `null`: not set. Parentheses hold other values and limits; numbers without limits are
  positive.
"""
FIRST = (
    "run",
    "model.path",
    "model.revision",
    "model.adapter",
    "model.dtype",
    "reference_model",
    "corpus.audit",
    "corpus.unseen",
    "corpus.audit.path",
    "corpus.audit.text",
    "corpus.audit.id",
    "corpus.audit.group",
    "detectors",
    "max_tokens",
    "selections.name",
    "selections.detectors",
    "selections.procedure",
    "selections.alpha",
    "selections.direction",
    "resources.cluster",
)
"""The settings that most audits need, in the order in which one writes them."""
SECTION_HEADS = {"audit": "Audit", "trial": "Trial"}
NOUNS = {
    "ModelConfig": "weights",
    "EndpointConfig": "an endpoint",
    "ScoredModel": "a name",
    "ScoreConfig": "scores",
    "SourceConfig": "source",
    "LabelledConfig": "labelled source",
}
WORDS = {"string": "text", "boolean": "`true`, `false`", "object": "mapping"}
MISSING = object()
"""The default of a setting that has none."""
LIMITS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def sections(root: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """Every section below a configuration, in the order of the page, and the keys under which it stands."""
    places: dict[type[BaseModel], list[str]] = {}
    waiting = [("", root)]
    while waiting:
        path, section = waiting.pop(0)
        places.setdefault(section, []).append(path)
        if len(places[section]) > 1:
            continue
        for name, field in section.model_fields.items():
            key = f"{path}.{name}" if path else name
            waiting += [(key, inner) for inner in _sections_in(field.annotation)]
    return places


def page() -> str:
    """The whole page."""
    lines: list[str] = []
    known: dict[type[BaseModel], str] = {}
    rows: dict[str, str] = {}  # row -> title of the section that it stands in
    for kind, root in (("audit", AuditConfig), ("trial", TrialConfig)):
        everywhere = sections(root)
        places = {section: paths for section, paths in everywhere.items() if _listed_as(section) is section}
        titles = {section: _title(kind, paths, section, places) for section, paths in places.items()}
        new = {section: title for section, title in titles.items() if section not in known}
        known |= {section: _anchor(title) for section, title in new.items()}
        known |= {section: known[_listed_as(section)] for section in everywhere}
        for section, title in new.items():
            level = "##" if section is root else "###"
            sentence = _first_paragraph(section)
            shown = any(row.endswith(f": {sentence}") for row in rows)  # beside the setting that it describes
            lines += [
                f"{level} {title}",
                "",
                *([] if shown else [sentence, ""]),
                *_settings(section, title, known, rows),
                "",
            ]
    return "\n".join([HEAD, *_first(known), "", *lines]).rstrip() + "\n"


def _listed_as(section: type[BaseModel]) -> type[BaseModel]:
    """The section whose list has the settings of a section: its base, where both have the same keys."""
    base = section.__mro__[1]
    same = issubclass(base, BaseModel) and base.model_fields.keys() == section.model_fields.keys()
    return base if same else section


def _first(anchors: Mapping[type[BaseModel], str]) -> Iterator[str]:
    """The section of the settings that most audits need, each under its whole key."""
    yield "## Settings that most audits need"
    yield ""
    sections_of = {path: section for section, paths in sections(AuditConfig).items() for path in paths[::-1]}
    of_model = next(section for section in sections(AuditConfig) if section.__name__ == "ModelConfig")
    for key in FIRST:
        path, _, name = key.rpartition(".")
        section = of_model if path == "model" else sections_of[path]
        yield _rows(section, anchors)[name].replace(f"`{name}", f"`{key}", 1)


def _title(kind: str, paths: list[str], section: type[BaseModel], places: Mapping[type[BaseModel], list[str]]) -> str:
    if paths == [""]:
        return f"{SECTION_HEADS[kind]}"
    shown = ", ".join(f"`{path}`" for path in dict.fromkeys(paths))
    shared = [other for other, others in places.items() if other is not section and others[0] == paths[0]]
    return f"{shown}: {NOUNS[section.__name__]}" if shared else shown


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _first_paragraph(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _settings(
    section: type[BaseModel], title: str, anchors: Mapping[type[BaseModel], str], rows: dict[str, str]
) -> Iterator[str]:
    """The settings of a section; those that stand in a list above as well, by their names alone."""
    own: list[str] = []
    shared: dict[str, list[str]] = {}
    for name, row in _rows(section, anchors).items():
        earlier = rows.setdefault(row, title)
        if earlier == title:
            own.append(row)
        else:
            shared.setdefault(earlier, []).append(f"`{name}`")
    yield from own
    for earlier, names in shared.items():
        yield ""
        yield f"As of [{earlier}](#{_anchor(earlier)}): {', '.join(names)}."


def _rows(section: type[BaseModel], anchors: Mapping[type[BaseModel], str]) -> dict[str, str]:
    """Name of each setting -> its entry of the list."""
    rows: dict[str, str] = {}
    schema = section.model_json_schema()
    others = [one.model_json_schema()["properties"] for one in section.__subclasses__() if _listed_as(one) is section]
    targets = {inner.__name__: f"#{anchors[inner]}" for inner in sections(section)}
    nouns = {inner.__name__: NOUNS.get(_listed_as(inner).__name__, "settings") for inner in sections(section)}
    links = {name: f"[{nouns[name]}]({target})" for name, target in targets.items()}
    required = set(schema.get("required", ()))
    for field_name, field in section.model_fields.items():
        name = field.alias or field_name
        entries = [properties[name] for properties in (schema["properties"], *others)]
        entry = next((one for one in entries if one.get("type") != "null"), entries[0])
        default = MISSING if name in required else field.get_default(call_default_factory=True)
        plain = default is None or default is MISSING or isinstance(default, BaseModel)
        setting = f"`{name}`" if plain else _with_default(name, default)
        kinds = [kind for kind in _alternatives(entry) if kind.get("type") != "null"]
        referred = {targets.get(_reference(kind), "") for kind in kinds}
        only = _reference(kinds[0]) if len(referred) == 1 else ""
        if only:  # the name leads to the section
            setting = f"[{setting}]({targets[only]})"
        values = "" if only else _values(kinds, default, links)
        hint = "; ".join(part for part in ("required" if default is MISSING else "", values) if part)
        sentence = " ".join((field.description or _sentence_of(field.annotation)).split())
        rows[name] = f"- {setting}{f' ({hint})' if hint else ''}: {sentence}"
    return rows


def _sentence_of(annotation: Any) -> str:
    """The sentence of a section that stands for a field without one of its own."""
    return next((_first_paragraph(section) for section in _sections_in(annotation)), "")


def _alternatives(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The JSON schemas that a value may have."""
    several = entry.get("anyOf") or entry.get("oneOf") or entry.get("allOf")
    return [one for other in several for one in _alternatives(other)] if several else [entry]


def _reference(kind: Mapping[str, Any]) -> str:
    """The section that a JSON schema, or its list, refers to; empty: none."""
    return str(kind.get("$ref") or kind.get("items", {}).get("$ref", "")).rsplit("/", 1)[-1]


def _values(kinds: list[Mapping[str, Any]], default: Any, links: Mapping[str, str]) -> str:
    """The values that a setting may have, as far as its default and its sentence do not show them."""
    alone = len(kinds) == 1
    words = list(dict.fromkeys(filter(None, (_value(kind, default, links, alone) for kind in kinds))))
    shown = "or " if isinstance(default, str) and words else ""
    return shown + ", ".join([*words[:-2], " or ".join(words[-2:])])


def _value(kind: Mapping[str, Any], default: Any, links: Mapping[str, str], alone: bool) -> str:
    """A JSON schema in words; empty where it is the only one and its type shows."""
    if "$ref" in kind:
        return links[_reference(kind)]
    if "enum" in kind or "const" in kind:
        return ", ".join(f"`{value}`" for value in kind.get("enum", [kind.get("const")]) if value != default)
    name = str(kind.get("type", ""))
    if name == "array":
        inner = [links[name] for name in map(_reference, _alternatives(kind.get("items", {}))) if name]
        return " of ".join(["list", *inner]) if inner or not isinstance(default, list) else ""
    if name in ("integer", "number"):
        shown = alone and isinstance(default, int | float)
        return " ".join(filter(None, ("" if shown else name, _limits(kind))))
    return "" if (name == "string" and alone) or isinstance(default, bool | dict) else WORDS[name]


def _limits(kind: Mapping[str, Any]) -> str:
    """The least and the largest number; empty where it is positive and no more."""
    if {"minimum", "maximum"} <= kind.keys():
        return f"{kind['minimum']:g} to {kind['maximum']:g}"
    limits = ", ".join(f"{sign} {kind[key]:g}" for key, sign in LIMITS if key in kind)
    return "" if limits in ("≥ 1", "> 0") else limits


def _with_default(name: str, value: Any) -> str:
    """A setting with its default, as a file has them."""
    return f"`{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a type speaks of, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections_in(inner)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
