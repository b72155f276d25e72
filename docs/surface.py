"""Count the surface of Seenset, and write the table of it into docs/architecture.md.

python -m docs.surface
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import typer
from pydantic import BaseModel

from docs.blocks import PAGES, blocks
from docs.reference import sections
from pipeline.checks.registry import CHECKS
from pipeline.config.audit import AuditConfig
from pipeline.config.selection import CalibrationName
from pipeline.corpus.reasons import Reason
from pipeline.detectors.base import detector_names
from pipeline.errors import ExitCode
from pipeline.selection.procedures import PROCEDURES
from pipeline.trial.config import TrialConfig
from ray_jobs.cli import app

PAGE = Path(__file__).parent / "architecture.md"
RUN_PAGE = PAGES / "run-directory.md"
HEAD = "| thing | count | counted by |\n|---|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(\|[^\n]*\n)*")


@dataclass(frozen=True, slots=True)
class Counted:
    """What can be combined with other things, and how many there are."""

    thing: str
    count: Callable[[], int]
    by: str


SURFACE = (
    Counted("commands", lambda: len(typer.main.get_command(app).commands), "`seenset --help`"),  # type: ignore[attr-defined]
    Counted(
        "YAML keys of audit and trial",
        lambda: len(declared_keys()),
        "pairs of the declaring record and the key, below `AuditConfig` and `TrialConfig`",
    ),
    Counted(
        "detectors",
        lambda: len({*detector_names(built_in=True)} - {"from_column"}),
        "the registry, without `from_column`",
    ),
    Counted("procedures", lambda: len(PROCEDURES), "`PROCEDURES`"),
    Counted("calibrations", lambda: len(get_args(CalibrationName)), "`CalibrationName`"),
    Counted("checks", lambda: len(CHECKS), "`pipeline/checks/registry.py`, in the order of a summary"),
    Counted(
        "kinds of files of a run",
        lambda: len([*kinds_of_files()]),
        "the first list of [the run directory](run-directory.md), checked against a run",
    ),
    Counted("schemas", lambda: len([*(PAGES / "schemas").glob("*.json")]), "`docs/schemas/`"),
    Counted("exit codes", lambda: len(ExitCode), "`ExitCode`"),
    Counted("quarantine reasons", lambda: len(Reason), "`Reason`"),
    Counted(
        "pages of docs",
        lambda: len([page for page in PAGES.rglob("*.md") if "_build" not in page.parts]),
        "`docs/`",
    ),
)
"""In the order of the table."""


def declared_keys() -> set[tuple[str, str]]:
    """Pairs of the record that declares a setting first, and the key that a user writes."""
    records = {record for root in (AuditConfig, TrialConfig) for record in sections(root)}
    return {
        (_declaring_record(record, name), field.alias or name)
        for record in records
        for name, field in record.model_fields.items()
    }


def _declaring_record(record: type[BaseModel], name: str) -> str:
    return [base.__name__ for base in record.__mro__ if name in inspect.get_annotations(base)][-1]


def kinds_of_files() -> Iterator[str]:
    """The patterns of the first block of docs/run-directory.md."""
    block = next(block.text for block in blocks(RUN_PAGE) if block.language == "text")
    for line in block.splitlines():
        first, *others = re.split(r" {2,}", line)[0].split(", ")
        folder = first.rpartition("/")[0]
        yield first
        yield from (other if "/" in other or not folder else f"{folder}/{other}" for other in others)


def page() -> str:
    """The page with the table."""
    table = HEAD + "".join(f"| {one.thing} | {one.count()} | {one.by} |\n" for one in SURFACE)
    return _TABLE.sub(lambda _: table, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
