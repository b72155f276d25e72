"""The arguments and options that the commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_jobs.supervisor import give_as_zero

ConfigPath = Annotated[str, typer.Argument(metavar="AUDIT.YAML", help="The audit's configuration.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory: local path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N documents of each role.")]
NoText = Annotated[bool, typer.Option("--no-text", help="Leave all texts out of the report and the selected.")]
FailIfSelected = Annotated[
    bool,
    typer.Option(
        "--fail-if-selected",
        help="Exit 4 when anything is selected, and 5 when anything is selected by a selection that a check "
        "contradicts.",
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
        help="Exit codes to end with 0 on, such as 3,4, for schedulers that fail a job on any other.",
    ),
]
