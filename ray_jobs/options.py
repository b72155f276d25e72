"""The arguments and options that the commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from ray_jobs.supervisor import give_as_zero

ConfigPath = Annotated[str, typer.Argument(metavar="AUDIT.YAML", help="Configuration of the audit.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Run directory: local path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N documents of each role.")]
NoText = Annotated[bool, typer.Option("--no-text", help="Leave all texts out of the report and the lists.")]
FailIfSelected = Annotated[
    bool,
    typer.Option(
        "--fail-if-selected",
        help="Exit with 4 if anything is selected, with 5 if a check contradicts a selection that selects anything.",
    ),
]
ExitZeroOn = Annotated[
    str | None,
    typer.Option(
        "--exit-zero-on",
        metavar="CODES",
        callback=give_as_zero,
        is_eager=True,
        expose_value=False,
        help="Exit with 0 instead of these codes, such as 3,4, for schedulers that fail a job on any other code.",
    ),
]


def from_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """A command of typer that makes a record of its arguments and options, and passes it to a function.

    Args:
        command: the function, with a frozen dataclass of the options as its only parameter.
    """
    (record,) = (hint for name, hint in get_type_hints(command).items() if name != "return")
    hints = get_type_hints(record, include_extras=True)

    @wraps(command)
    def call(**given: Any) -> None:
        command(record(**given))

    parameters = [each.replace(annotation=hints[each.name]) for each in inspect.signature(record).parameters.values()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = hints
    return call
