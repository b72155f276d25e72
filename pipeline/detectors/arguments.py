"""Arguments of detectors: the check of configured values, from an annotation or a default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from pipeline.errors import UserError

Check = Callable[[Any], Any]
"""Returns the value to use, or raises ValueError with the limit: `must be a number in (0, 1]`."""

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its default, and the check of configured values."""

    default: Any
    check: Check
    names_column: bool = False  # whether its value is the name of the column of scores


@dataclass(frozen=True, slots=True)
class NamesColumn:
    """Annotation of an argument whose value is the name of the column of scores."""


def read_arguments(
    function: Callable[..., Any], checks: Mapping[str, Check], bound: Collection[str] = ()
) -> dict[str, Argument]:
    """The arguments of a detector's function after the evidence.

    An argument without a check is checked by its annotation, or by the type of its default without annotation. As in a
    configuration, True is not a number, a float may be written as an int, and a float is finite.

    Args:
        function: function of the evidence and of arguments with defaults.
        checks: argument -> explicit check.
        bound: arguments that no configuration sets.

    Raises:
        UserError: an argument without a default, a check of an unknown argument, an annotation that cannot be
            checked, or a default that its check refuses.
    """
    who = f"detector {function.__name__}"
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise UserError(f"{who} must take the evidence as its first argument")
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"{who}: a configuration cannot name the arguments of {parameter}")
        if parameter.default is parameter.empty:
            raise UserError(f"{who}: argument {parameter.name} has no default, and a configuration may leave it out")
    settable = {parameter.name: parameter for parameter in parameters[1:] if parameter.name not in bound}
    if unknown := sorted(set(checks) - set(settable)):
        raise UserError(f"{who}: there is a check of {unknown[0]}, which is no argument")
    arguments = {}
    for name, parameter in settable.items():
        if name in checks:
            arguments[name] = Argument(parameter.default, checks[name])
            continue
        try:
            kind = _parameter_type(function, parameter)
            check = _check_of_type(kind)
            names = any(isinstance(one, NamesColumn) for one in getattr(kind, "__metadata__", ()))
            arguments[name] = Argument(check(parameter.default), check, names)
        except (NameError, PydanticUserError):
            kind = parameter.annotation.__name__ if isinstance(parameter.annotation, type) else parameter.annotation
            raise UserError(f"{who}: argument {name} of type {kind} needs a check: checks={{{name!r}: ...}}") from None
        except ValueError as error:
            raise UserError(f"{who}: the default of {name} {error}, got {parameter.default!r}") from None
    return arguments


def _parameter_type(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any if parameter.default is None else type(parameter.default)
    holder = type("Annotated", (), {"__annotations__": {"it": parameter.annotation}})
    return get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)["it"]


def _check_of_type(kind: Any) -> Check:
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    limit = f"must be {_in_words(adapter.json_schema())}"

    def check(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError:
            raise ValueError(limit) from None

    return check


def _in_words(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, as its description or in words: `a number in (0, 1]`."""
    if "description" in schema:
        return str(schema["description"])
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return f"one of {', '.join(map(str, schema.get('enum', [schema.get('const')])))}"
    nouns = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    noun = nouns.get(schema.get("type", ""), schema.get("type", "anything"))
    if schema.get("type") not in ("integer", "number"):
        return noun + (f" that matches {schema['pattern']}" if "pattern" in schema else "")
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if (low, above) != (None, None) and (high, below) != (None, None):
        start = f"({above:g}" if low is None else f"[{low:g}"
        return f"{noun} in {start}, " + (f"{below:g})" if high is None else f"{high:g}]")
    for limit, words in ((low, "of at least"), (above, "above"), (high, "of at most"), (below, "below")):
        if limit is not None:
            return f"{noun} {words} {limit:g}"
    return "a finite number" if schema["type"] == "number" else noun
