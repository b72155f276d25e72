"""Messages about a configuration that is refused: one line with the value, the limit and the near miss."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.config.paths import MARK, named_fields, sections_in
from pipeline.config.retired import retired
from pipeline.errors import nearest, number_meant

SHOWN = 200
"""Maximum number of characters of a value in a message."""

_MOST_GUESSES = 3  # in a message about an unknown setting

_WRITTEN = {
    "path": "file files filename filepath source uri location folder dir directory data_files model_path model "
    "name_or_path pretrained pretrained_model_name_or_path model_id hub_id hub repo repo_id id checkpoint name",
    "endpoint": "url base_url api_base api_url host server address",
    "text": "column text_column text_field field content body",
    "headers": "extra_headers http_headers default_headers",
    "query": "extra_query default_query query_params api_version",
    "extra": "extra_body request_body",
    "id": "id_column id_field key doc_id",
    "group": "group_column group_by cluster",
    "image": "images image_column picture pictures",
    "subset": "config config_name configuration name",
    "alpha": "fdr level q threshold target_fdr significance",
    "detectors": "detector attack attacks method methods scores metric metrics feature features",
    "procedure": "method algorithm test",
    "run": "output outputs output_dir out out_dir run_dir directory result results results_dir",
    "corpus": "data dataset datasets inputs documents",
    "model": "models model_name model_path llm lm endpoint",
    "import": "plugin plugins imports modules",
    "actors": "workers num_workers processes",
    "batch_tokens": "batch_size batch",
    "cpus_per_actor": "threads num_threads cpus num_cpus",
    "gpus_per_actor": "device devices gpu gpus num_gpus",
    "max_tokens": "max_length max_seq_len max_seq_length context_length truncate",
    "dtype": "torch_dtype precision",
    "quantization": "load_in_8bit load_in_4bit quantize quantized bits",
    "delimiter": "sep separator",
    "label": "labels",
    "seed": "random_state random_seed",
    "reference_model": "reference ref_model ref",
    "unseen": "nonmembers non_members control controls calibration heldout holdout",
    "seen": "members training train",
    "audit": "candidates candidate target targets suspect suspects test",
}
"""Setting -> names that other programs have for it."""

_MEANT: dict[str, tuple[str, ...]] = {}
for _setting, _names in _WRITTEN.items():
    for _name in _names.split():
        _MEANT[_name] = (*_MEANT.get(_name, ()), _setting)


def settings_of_other_programs(name: str) -> tuple[str, ...]:
    """The settings for which other programs have a name."""
    return _MEANT.get(name.lower().replace("-", "_"), ())


_ELSEWHERE = {
    "review": "unseen documents have to be unseen; remove the others before the run",
    "review_count": "unseen documents have to be unseen; remove the others before the run",
    "limit": "the commands take --limit N: the first N documents of each role",
    "max_documents": "the commands take --limit N: the first N documents of each role",
    "api_key": "keys come from the environment variable that key_variable names, SEENSET_API_KEY by default",
}
"""Name -> what to do in place of a setting."""

_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Problems with a key that a model or a dataclass does not have."""


def retired_line(error: ValidationError) -> str | None:
    """The refusal of the first setting or value of an earlier version; None if there is none."""
    return next((line for problem in error.errors() if (line := _retired(problem)) is not None), None)


def _retired(problem: Any) -> str | None:
    if problem["type"] in _UNKNOWN_KEY:
        return retired("setting", ".".join(part for part in _path_of_key(problem) if not part.isdigit()))
    return retired(_location(problem)[-1], str(problem["input"])) if problem["type"] == "literal_error" else None


def _path_of_key(problem: Any) -> list[str]:
    """The path of a user's key, which never is the name of a union branch."""
    *section, key = problem["loc"]
    return [*(str(part) for part in section if not _is_union_branch(part)), str(key)]


def message_of(error: ValidationError, kind: type[BaseModel], data: Mapping[str, Any]) -> str:
    """One line about the first problem of a configuration: the value, the limit and the near miss.

    Args:
        error: the problems.
        kind: model of the configuration.
        data: the configuration.
    """
    problems = error.errors()
    problem = _decisive(problems)
    location = _location(problem)
    where = ".".join(location) or "config"
    if problem["type"] in _UNKNOWN_KEY:
        return _unknown_key(problem, kind, data)
    if problem["type"] == "missing":
        return f"missing key {where!r}{_what_to_add(kind, problem['loc'])}"
    branches = dict.fromkeys(_message(other) for other in problems if _location(other) == location)
    message = " or ".join([next(iter(branches)), *(b.removeprefix("input should be ") for b in list(branches)[1:])])
    got = "" if "got " in message or isinstance(problem["input"], dict) else f", got {_shown(problem['input'])}"
    guess = _guess(problem, kind) or _number_meant(problem, message, data)
    return f"{where}: {message}{got}{guess}"


def _decisive(problems: Sequence[Any]) -> Any:
    """The problem that a message is about: the first, or an unknown key that may stand for one that is missing."""
    first = problems[0]
    if first["type"] == "missing":
        unknown = (one for one in problems if one["type"] in _UNKNOWN_KEY and one["loc"][:-1] == first["loc"][:-1])
        return next(unknown, first)
    return first


def _unknown_key(problem: Any, kind: type[BaseModel], data: Mapping[str, Any]) -> str:
    """States that a key is unknown, and which one may be meant."""
    key, section = str(problem["loc"][-1]), problem["loc"][:-1]
    where, known = ".".join(_path_of_key(problem)), _keys_at(kind, section)
    if key in _ELSEWHERE:
        return f"unknown key {where!r}; {_ELSEWHERE[key]}"
    meant = [name for name in settings_of_other_programs(key) if name in _all_keys_at(kind, section)]
    if not meant and not section:
        meant = list(dict.fromkeys(_paths_to(kind, data, key, 3)))
        for name in (*settings_of_other_programs(key), key):
            meant = meant or settings_named(kind, name)
    if 0 < len(meant) <= _MOST_GUESSES:
        return f"unknown key {where!r}; did you mean {' or '.join(map(repr, meant))}? known: {', '.join(known)}"
    return f"unknown key {where!r}; {nearest(key, known)}"


def _guess(problem: Any, kind: type[BaseModel]) -> str:
    """The end of a message about a value of another type: how it may be meant; empty if there is no guess."""
    value, problem_type = problem["input"], problem["type"]
    if problem_type in ("model_type", "dataclass_type") and isinstance(value, str | list):
        return _as_section(kind, problem["loc"], value)
    if problem_type == "list_type":
        if isinstance(value, str | int | float):
            return f"; did you mean [{_shown(value, str)}]?"
        if isinstance(value, Mapping) and value:
            names = all(inner is None for inner in value.values())
            return f"; did you mean [{', '.join(map(str, value))}]?" if names else "; begin each of its entries with -"
    if problem_type == "string_type" and value is None:
        return "; nothing stands behind its colon: # begins a comment, and ~ and null are no text without quotes"
    if problem_type == "string_type" and (read_as := _read_as(value)):
        return f"; YAML reads it as {read_as}; put it in quotes"
    if problem_type == "string_type" and isinstance(value, Mapping):
        inner = value.get("path", value.get("name"))
        return (
            f"; did you mean {inner.rpartition(MARK)[2]}?"
            if len(value) == 1 and isinstance(inner, str)
            else ("; YAML reads it as a mapping: put a value with a colon or brackets in quotes")
        )
    if problem_type == "literal_error" and isinstance(value, str):
        near = get_close_matches(value, re.findall("'([^']*)'", problem["ctx"]["expected"]), n=1, cutoff=0.51)
        return f"; did you mean {near[0]}?" if near else ""
    return ""


def _as_section(kind: type[BaseModel], location: Sequence[int | str], value: str | list[Any]) -> str:
    """A value in the place of a section, as the setting of this section that it may be; empty if it may be none."""
    sections = _sections_at(kind, location)
    if not sections:
        return ""
    key, section = str(_location({"loc": location})[-1]), sections[0]
    fields = named_fields(section)
    required = [keys_of(section)[place] for place, field in enumerate(fields.values()) if _is_required(field)]
    if (
        isinstance(value, str)
        and re.match("https?://", value)
        and any("endpoint" in named_fields(one) for one in sections)
    ):
        return f"; did you mean {key}: {{endpoint: {value}, name: NAME}}?"
    if "path" in fields:
        inner = f"path: {_plain(value)}"
    elif len(required) == 1:
        inner = f"{required[0]}: {_plain(value)}"
    else:
        first = next(iter(fields))
        if "path" not in (name for inner in sections_in(fields[first].annotation) for name in named_fields(inner)):
            return ""
        inner = f"{first}: {{path: {_plain(value)}}}"
    return f"; did you mean {key}: {{{inner}}}?"


def _plain(value: str | list[Any]) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return _shown(text.removesuffix("\n").removesuffix("\n..."), str)


def _is_required(field: Any) -> bool:
    return bool(field.is_required()) if hasattr(field, "is_required") else field.default is MISSING


def _shown(value: Any, text: Callable[[Any], str] = repr) -> str:
    """A value in a message."""
    shown = str(value) if isinstance(value, datetime.date) else text(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def _read_as(value: Any) -> str:
    """What YAML has made of a text without quotes; empty where it is none of these."""
    kinds = {bool: "true or false", int: "a number", float: "a number", datetime.date: "a date"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "")


def _number_meant(problem: Any, message: str, data: Mapping[str, Any]) -> str:
    """The number that a refused value may mean: a percentage, a fraction, or one with a decimal comma."""
    value = problem["input"]
    share = "(0, 1" in message or any((problem.get("ctx") or {}).get(limit) == 1 for limit in ("lt", "le"))
    if isinstance(value, str):
        numeric = "number" in message or "integer" in message
        one = "(0, 1)" not in message and (problem.get("ctx") or {}).get("lt") != 1
        meant = number_meant(value, problem["type"].startswith("int"), share, one) if numeric else ""
        if meant or not (share and re.fullmatch(r"\d{1,3}(\.\d{1,9})?", value.strip())):
            return meant
        value = float(value)  # a number in quotes
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    section: Any = data
    for part in problem["loc"][:-1]:
        if isinstance(section, Mapping):
            section = section.get(part, section)
        elif isinstance(section, list) and isinstance(part, int):
            section = section[part]
    entries = section.items() if isinstance(section, Mapping) else ()
    digits = [key for key, empty in entries if isinstance(key, int) and empty is None]
    if digits:  # {alpha: 0,1} is alpha: 0 and a key 1
        return f"; did you mean {value}.{digits[0]}? A comma ends a value"
    return f"; did you mean {value / 100:g} ({value:g}%)?" if share and 1 < value < 100 else ""


def _paths_to(kind: Any, value: Any, key: str, depth: int) -> Iterator[str]:
    """Paths, as `--set` takes them, at which a key is valid in the sections of a configuration."""
    if not isinstance(value, Mapping):
        return
    for name, field in named_fields(kind).items():
        inner = value.get(getattr(field, "alias", None) or name)
        for section in sections_in(getattr(field, "annotation", None)):
            path, entry = (f"{name}.*", next(iter(inner), None)) if isinstance(inner, list) else (name, inner)
            if isinstance(entry, Mapping):
                if key in keys_of(section):
                    yield f"{path}.{key}"
                if depth > 1:
                    yield from (f"{path}.{rest}" for rest in _paths_to(section, entry, key, depth - 1))


def settings_named(kind: type[BaseModel], key: str, depth: int = 3) -> list[str]:
    """The settings of a configuration with a name, as `--set` takes them, those of fewer keys first.

    Args:
        kind: model of the configuration.
        key: name of a setting at any depth; a section with a path stands for its path.
        depth: most keys of a setting.
    """
    paths: list[str] = []
    for name, field in named_fields(kind).items():
        annotation = getattr(field, "annotation", None)
        named, sections = getattr(field, "alias", None) or name, list(sections_in(annotation))
        inner = f"{named}.0" if get_origin(annotation) is list else named
        if named == key:
            paths.append(f"{inner}.path" if any("path" in named_fields(section) for section in sections) else named)
        if depth > 1:
            paths += [f"{inner}.{rest}" for section in sections for rest in settings_named(section, key, depth - 1)]
    paths = [path for path in paths if not path.startswith("series.")] or paths  # of few configurations
    return sorted(dict.fromkeys(paths), key=lambda path: path.count("."))


def _what_to_add(kind: type[BaseModel], location: Sequence[int | str]) -> str:
    """How to write a missing section that has a path."""
    model: Any = kind
    for part in location:
        fields = named_fields(model)
        sections = list(sections_in(getattr(fields.get(part), "annotation", None)))
        if not sections:
            return ""
        model = sections[0]
    return f"; add {'.'.join(map(str, location))}: {{path: ...}}" if "path" in named_fields(model) else ""


def _location(problem: Any) -> list[str]:
    return [str(part) for part in problem["loc"] if not _is_union_branch(part)]


def _message(problem: Any) -> str:
    if problem["type"] in ("model_type", "dataclass_type"):  # pydantic's message names a class of this package
        return "must be a section with keys of its own"
    if problem["type"] in ("byte_size", "byte_size_unit"):
        return "input should be a number of bytes, such as 67108864 or 64 MiB"
    if problem["type"] == "too_short":
        return "must have at least one entry"
    message: str = problem["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        part in {"int", "float", "str", "ScoreConfig"} or "[" in part or part.startswith(("literal", "constrained"))
    )


def _keys_at(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of a model at a location such as ('corpus', 'audit'), or ('model', 'model[EndpointConfig]')."""
    sections = _sections_at(kind, location)
    branch = str(location[-1]) if location else ""
    return keys_of(next((one for one in sections if branch.endswith(f"[{one.__name__}]")), sections[0]))


def _all_keys_at(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys of all models that a section may be."""
    return [key for section in _sections_at(kind, location) for key in keys_of(section)]


def _sections_at(kind: type[BaseModel], location: Sequence[int | str]) -> list[type]:
    """The models that a section at a location may be; empty for a location that is no section."""
    model: Any = kind
    sections: list[type] = [kind]
    for part in location:
        if _is_union_branch(part):
            model = next((s for s in sections if str(part).endswith(f"[{s.__name__}]")), model)
        elif part in named_fields(model):
            sections = list(sections_in(named_fields(model)[part].annotation))
            model = sections[0] if sections else model
    return sections


def keys_of(kind: Any) -> list[str]:
    """The keys of a model or a dataclass in a configuration."""
    return [getattr(field, "alias", None) or name for name, field in named_fields(kind).items()]
