"""Settings in YAML: validate files and `a.b=c` overrides, write models with a comment above each key, schemas."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from pipeline.config.misplaced import instead_of_config
from pipeline.config.paths import irregular_kind, named_fields, placed, placed_value, sections_in, split_overrides
from pipeline.config.problems import keys_of, message_of, retired_line
from pipeline.errors import RetiredError, UserError, error_line

MOST_DEPTH = 100
"""Maximum nesting of brackets, or number of keys in `a.b.c`."""

MOST_BYTES = 1 << 22
"""Maximum size of a configuration: this many bytes take a minute to parse."""

MOST_VALUES = 100_000
"""Maximum number of values of a configuration with every alias expanded."""

MOST_REPEATS = 4
"""Maximum number of values per written value in a longer configuration."""


MOST_DIGITS = 100
"""Maximum number of characters of an integer, which are counted before it is constructed."""

MOST_BITS = 64
"""Maximum size of an integer; `seed` may use all bits, and other settings one less."""


class NotYamlError(ValueError):
    """A text is not YAML; the message is one line that begins with what to write instead, if that is known."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _one_size(value: Any) -> Any:
    """Refuse a text that is not a size as a whole: pydantic reads 1,000 as 1."""
    if isinstance(value, str) and not re.fullmatch(r"\s*\d{0,19}\.?\d{1,19}\s*[A-Za-z]*\s*", value):
        raise ValueError("input should be a number of bytes, such as 67108864 or 64 MiB")
    return value


Size = Annotated[ByteSize, BeforeValidator(_one_size), Field(lt=1 << (MOST_BITS - 1))]
"""Bytes: a number, or a text with a unit."""

Model = TypeVar("Model", bound=BaseModel)


def load_yaml(text: str) -> Any:
    """The plain value of a YAML text. The values of expanded aliases are counted before any is constructed.

    Raises:
        NotYamlError: the text is not YAML, is too long or nested too deep, holds an invalid number or date, or has
            aliases that expand to too many values or to themselves, or repeats a key of a mapping.
    """
    depth = 0
    for bracket in re.findall(r"[\[{\]}]", text):  # counted first: the parser takes minutes for very many
        if (depth := depth + (1 if bracket in "[{" else -1)) > MOST_DEPTH:
            raise NotYamlError(f"more than {MOST_DEPTH} brackets within one another")
    if len(text) > MOST_BYTES:
        raise NotYamlError(f"it has more than {MOST_BYTES:,} bytes")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        counts: dict[int, int | None] = {}
        count = 0 if node is None else _values(node, counts)
        most = max(MOST_VALUES, MOST_REPEATS * len(counts))
        if count > most:
            raise NotYamlError(f"its aliases make it {count:,} values; it may have {most:,}")
        if node is None:
            return None
        _check_keys(node, loader, set())
        return loader.construct_document(node)
    except RecursionError:
        raise NotYamlError("its brackets or indents are nested too deeply") from None
    except NotYamlError as error:
        raise NotYamlError(error_line(error)) from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "on ").split())
        remedy = _remedy(reason, text)
        raise NotYamlError(f"{remedy} ({reason})" if remedy else reason) from None
    except (ValueError, OverflowError, AttributeError, TypeError, LookupError) as error:  # number, date, tag
        reason = " ".join(str(error).partition("; use sys.")[0].split())
        raise NotYamlError(f"a value cannot be read: {reason}") from None


def _remedy(reason: str, text: str) -> str | None:
    """What to write in place of a text that the parser refuses; None if that is not known.

    Args:
        reason: error of the parser in one line.
        text: the text.
    """
    numbers = [int(number) for number in re.findall(r"on line (\d+)", reason)]
    remedy = next((advice for part, advice in _REMEDIES.items() if re.search(part, reason)), None)
    if remedy is None or not numbers:
        return remedy
    lines = text.splitlines()
    number = numbers[0 if remedy.startswith("close") else -1]
    if "mapping values are not allowed" in reason:
        before = [place for place in range(1, number) if (line := lines[place - 1].strip()) and line[0] != "#"]
        if before and re.match(r"\s*[\w.-]+:(\s|$)", lines[number - 1]) and not _SETTING.search(lines[before[-1] - 1]):
            shown = lines[before[-1] - 1].strip()[:80]
            return (
                f"line {before[-1]}, {shown!r}, is no setting: write KEY: VALUE, with a colon and a blank, or remove it"
            )
    return f"on line {number} {remedy}" if len(lines) > 1 else remedy


_SETTING = re.compile(r":([ \t]|$)|^\s*-(\s|$)|[\[\]{}]")
"""Lines that are settings, entries or parts of them."""


class _Loader(yaml.SafeLoader):
    """A loader that refuses numbers of base 60 and 8, which YAML 1.1 makes of values such as 1:30 and 010."""


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    base = 60 if ":" in node.value else 8 if re.fullmatch("[-+]?0[0-7_]+", node.value) else 10
    if base != 10:
        mark = node.start_mark
        line = mark.line + 1
        if before := re.search(r"(?<![\w.,])\d+,$", (mark.buffer or "")[: mark.pointer]):  # {alpha: 0,05}
            written, number = before[0] + node.value, f"{before[0][:-1]}.{node.value}"
            raise NotYamlError(f"{written} on line {line}: a comma ends a value; write {number}, or quotes around both")
        raise NotYamlError(f"{node.value} on line {line} is a number of base {base} in YAML: put it in quotes")
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


def _construct_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    if node.style is None and _TYPOGRAPHIC.fullmatch(node.value):
        line, inner = node.start_mark.line + 1, node.value[1:-1]
        raise NotYamlError(
            f"{node.value} on line {line} has typographic quotes, which are letters in YAML: write {inner!r}"
        )
    return loader.construct_scalar(node)


_TYPOGRAPHIC = re.compile("[\u201c\u201d\u201e\u00ab\u2018\u2019\u201a].*[\u201c\u201d\u00bb\u2018\u2019]")

_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_number)


def _check_keys(node: yaml.Node, loader: yaml.SafeLoader, checked: set[int]) -> None:
    """Check that no mapping has a key twice: the last value would count, without a word.

    Args:
        node: a node, in which each alias is the node that it refers to.
        loader: loader of the document.
        checked: identities of the nodes that are checked.

    Raises:
        NotYamlError: a key occurs twice; the message names both lines. Merge keys (`<<`) are no keys.
    """
    if id(node) in checked or isinstance(node, yaml.ScalarNode):
        return
    checked.add(id(node))
    if not isinstance(node, yaml.MappingNode):
        for part in node.value:
            _check_keys(part, loader, checked)
        return
    lines: dict[Any, int] = {}
    for key, value in node.value:
        _check_keys(value, loader, checked)
        if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
            continue  # a key that is a list or a mapping is refused when it is constructed
        name, line = loader.construct_object(key), key.start_mark.line + 1
        if name in lines:
            raise NotYamlError(f"key {name!r} stands twice in a section, on lines {lines[name]} and {line}: remove one")
        lines[name] = line


def _values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Number of values of a node with its aliases expanded.

    Raises:
        yaml.YAMLError: an alias refers to itself.
    """
    if isinstance(node, yaml.ScalarNode):
        _check_integer(node)
        counts[id(node)] = 1
        return 1
    if id(node) in counts:
        count = counts[id(node)]
        if count is None:
            raise yaml.YAMLError(f"an alias refers to itself{node.start_mark}")
        return count
    counts[id(node)] = None
    pairs = isinstance(node, yaml.MappingNode)
    inner = [part for pair in node.value for part in pair] if pairs else node.value
    count = counts[id(node)] = 1 + sum(_values(part, counts) for part in inner)
    return count


def _check_integer(node: yaml.ScalarNode) -> None:
    """Check that an integer has at most `MOST_BITS`; hexadecimal, octal and sexagesimal ones may have any length.

    Raises:
        NotYamlError: it has more.
    """
    if node.tag != "tag:yaml.org,2002:int":
        return
    long = len(node.value) > MOST_DIGITS
    if long or yaml.constructor.SafeConstructor().construct_yaml_int(node).bit_length() > MOST_BITS:
        start = f"{node.value[:20]}..." if len(node.value) > 20 else node.value
        raise NotYamlError(
            f"line {node.start_mark.line + 1}: the number {start} has more than {MOST_BITS} bits; a text that looks "
            "like a number needs quotes"
        )


def read_mapping(path: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Read a YAML file that holds a mapping. Its relative paths are relative to its folder (`pipeline.config.paths`).

    Raises:
        UserError: no such file, not YAML, not a mapping, or a path that exists only in the working directory.
    """
    try:
        if (irregular := irregular_kind(path) or ("a folder" if os.path.isdir(path) else None)) is not None:
            raise UserError(f"config {path} is {irregular}, not a file{_instead(path)}")
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read config {path}: {error.strerror}{_instead(path)}") from None
    except UnicodeDecodeError:
        raise UserError(f"config {path} is not UTF-8 text{_instead(path)}") from None
    except ValueError as error:  # raised for the path
        raise UserError(f"cannot read config {path}: {error}") from None
    try:
        data = load_yaml(text)
    except NotYamlError as error:
        reason = _instead(path) or f": {error}"
        raise UserError(f"config {path} is not YAML{reason}") from None
    if not isinstance(data, dict):
        instead = _instead(path) or f" with keys {', '.join(keys_of(kind))}"
        raise UserError(f"config {path} must be a mapping{instead}")
    if not {"run", "corpus", "documents"} & set(map(str, data)) and (instead := _instead(path)):
        raise UserError(f"config {path} holds no settings{instead}")
    return placed(kind, data, os.path.realpath(Path(path).parent), path)


def _instead(path: str) -> str:
    """The end of a message about a file that is no configuration."""
    instead = instead_of_config(path)
    return f"; {instead}" if instead else ""


_REMEDIES = {
    r"character '`'": "leave out the marks of a code block",
    r"while scanning a quoted scalar.* found unexpected end of stream": "close the quote that opens there",
    r"unknown escape character|escape sequence of": "a backslash in double quotes begins an escape: write paths with /",
    r"character '\\t' that cannot start": "indent with spaces, not with tabs",
    r"cannot start any token": "put the value in quotes",
    r"scanning an? (alias|anchor)|undefined alias": "put a value that begins with * or & in quotes",
    r"mapping values are not allowed": "put a value that holds a colon and a space in quotes",
    r"but got '[\[{]'": "put a value that holds brackets in quotes",
    r"expected ',' or '[\]}]'": "close the bracket that opens there",
    r"while parsing a block collection.* expected <block end>, but found '\?'": "do not mix entries (-) and keys",
    r"expected <block end>, but found '<block (mapping|sequence) start>'": "give the keys of a section one indent",
    r"could not determine a constructor for the tag": "leave out the tag, which begins with !",
    r"expected '<document start>'": "put the value in quotes",
    r"expected the node content": "put a sign that stands alone in quotes",
}
"""Part of an error of the parser -> what to write."""


def _override(raw: str) -> Any:
    """The value of `--set`: YAML, in which a sign that stands alone is itself, as a delimiter is.

    Raises:
        NotYamlError: not YAML, or a part of it would be a comment.
    """
    if len(raw) == 1 and not raw.isalnum() and raw not in "~ ":
        return raw
    value = load_yaml(raw)
    if raw.count("#") > json.dumps(value, default=str).count("#"):
        raise NotYamlError("a # begins a comment: put the value in quotes within those of the shell")
    return value


def build(kind: type[Model], data: dict[str, Any], overrides: Sequence[str] = ()) -> Model:
    """Validate a plain mapping as a model. The `a.b=c` overrides are first applied to the mapping, in place.

    Relative paths in overrides are relative to the working directory.

    Raises:
        UserError: an unknown key (with the nearest known one), a value outside its limits, or an override that undoes
            an earlier one; `RetiredError` for those of an earlier version.
    """
    for path, raw in split_overrides(overrides):
        try:
            value = _override(raw)
        except NotYamlError as error:
            raise UserError(f"--set {path}: {raw!r:.200} is not a YAML value: {error}") from None
        set_at(data, path, placed_value(kind, path, value, os.path.realpath(os.getcwd())), "--set")
    _check_sizes(data, ())
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        if (line := retired_line(error)) is not None:
            raise RetiredError(line) from None
        raise UserError(message_of(error, kind, data)) from None


def _check_sizes(value: Any, keys: tuple[str, ...]) -> None:
    """Check that integers have 64 bits, which is also so of those that no YAML text contained.

    Raises:
        UserError: one has more; the key names it.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check_sizes(entry, (*keys, str(key) if isinstance(key, str) else "..."))
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            _check_sizes(entry, (*keys, str(place)))
    elif isinstance(value, int) and value.bit_length() >= MOST_BITS + (keys[-1:] == ("seed",)):
        raise UserError(
            f"{'.'.join(keys) or 'config'}: input should be an integer of less than {MOST_BITS} bits, got one of "
            f"{value.bit_length():,}"
        )


def set_at(data: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set `a.b.0.c` in place; missing sections are created. `*` means every entry of a list.

    Args:
        data: a plain mapping.
        path: keys and list positions, joined by dots.
        value: the new value.
        source: for errors: `--set` or `sweep`.

    Raises:
        UserError: the path leads through a value without keys, beyond the end of a list, or too deep.
    """
    keys = path.split(".")
    if len(keys) > MOST_DEPTH:
        raise UserError(f"{source} {path[:50]}...: a setting has at most {MOST_DEPTH} keys, got {len(keys):,}")
    _set(data, keys, 0, value, f"{source} {path if len(path) <= 200 else f'{path[:50]}...'}")


def _set(node: Any, keys: Sequence[str], depth: int, value: Any, source: str) -> None:
    key, last = keys[depth], depth == len(keys) - 1
    if isinstance(node, list):
        if key != "*" and key not in map(str, range(len(node))):
            where, last_one = ".".join(keys[:depth]), len(node) - 1
            several = f"its entries are 0 to {last_one}, or * for all"
            places = several if last_one > 0 else "its only entry is 0" if last_one == 0 else "it is empty"
            raise UserError(f"{source}: {where} is a list and has no entry {key[:50]!r}; {places}")
        for index in range(len(node)) if key == "*" else [int(key)]:
            if last:
                node[index] = value
            else:
                _set(node[index], keys, depth + 1, value, source)
    elif isinstance(node, dict):
        if last:
            node[key] = value
        else:
            node[key] = {} if node.get(key) is None else node[key]
            _set(node[key], keys, depth + 1, value, source)
    else:
        raise UserError(f"{source}: {'.'.join(keys[:depth])} holds no keys")


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


WIDTH = 110
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Written:
    """One setting as written in a file."""

    key: str
    value: Any  # a plain value, or the settings of a section, or a list of these
    notes: tuple[str, ...] = ()  # comments below the description
    off: bool = False  # commented out


def commented(kind: type[BaseModel], settings: Sequence[Written]) -> str:
    """Settings as YAML. The first occurrence of each has its description above it.

    Args:
        kind: model or dataclass of the settings.
        settings: settings of this kind, in the order of the file.
    """
    described: set[tuple[type, str]] = set()
    blocks = [list(_lines(kind, setting, described, "")) for setting in settings]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def config_schema(kind: type[BaseModel], procedures: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a configuration, with which editors complete and check it.

    Args:
        kind: the configuration.
        procedures: registered procedures, which an editor offers; the name of a plugin's is accepted too.
    """
    schema = described_schema(kind)
    procedure = schema["$defs"]["SelectionConfig"]["properties"]["procedure"]
    procedure["anyOf"] = [{"enum": list(procedures), "type": "string"}, {"type": procedure.pop("type")}]
    return {"$schema": DIALECT, **schema}


def described_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, with the first paragraph of its docstring: an example in Python is no part of it."""
    return {**kind.model_json_schema(), "description": _first_line(kind)}


def comment(text: str, indent: str = "") -> Iterator[str]:
    """A text as lines of comment, which no file or column name in the text can end."""
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
    field = next(field for name, field in named_fields(kind).items() if (field.alias or name) == setting.key)
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
        if not line.lstrip().startswith("#"):  # no comments within a setting that is commented out
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
    """A value as one line of YAML."""
    if not all(str(one).isprintable() for one in (value if isinstance(value, list) else [value])):
        return json.dumps(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _first_line(section: type | None) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split()) if section is not None else ""
