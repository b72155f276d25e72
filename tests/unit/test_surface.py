"""The surface of Seenset is counted: what is added states here, and in docs/architecture.md, what it replaces."""

import inspect
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import typer
from pydantic import BaseModel

import seenset
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

SURFACE = {
    "commands": 17,
    "YAML keys of audit and trial": 171,
    "detectors": 28,
    "procedures": 16,
    "calibrations": 3,
    "checks": 12,
    "kinds of files of a run": 43,
    "schemas": 5,
    "exit codes": 7,
    "quarantine reasons": 13,
    "pages of docs": 43,
}
RUN_PAGE = PAGES / "run-directory.md"
PLACEHOLDERS = ("SHARD-ATTEMPT", "NUMBER", "STAGE", "SHARD", "DIGEST", "INPUTS", "ROLE", "NAME")


def declared_keys() -> set[tuple[str, str]]:
    """Pairs of the record that declares a setting first, and the key that a user writes."""
    records = {record for root in (AuditConfig, TrialConfig) for record in sections(root)}
    return {
        (declaring_record(record, name), field.alias or name)
        for record in records
        for name, field in record.model_fields.items()
    }


def declaring_record(record: type[BaseModel], name: str) -> str:
    return [base.__name__ for base in record.__mro__ if name in inspect.get_annotations(base)][-1]


def kinds_of_files() -> Iterator[str]:
    """The patterns of the first block of docs/run-directory.md."""
    block = next(block.text for block in blocks(RUN_PAGE) if block.language == "text")
    for line in block.splitlines():
        first, *others = re.split(r" {2,}", line)[0].split(", ")
        folder = first.rpartition("/")[0]
        yield first
        yield from (other if "/" in other or not folder else f"{folder}/{other}" for other in others)


COUNTED: dict[str, Callable[[], int]] = {
    "commands": lambda: len(typer.main.get_command(app).commands),  # type: ignore[attr-defined]
    "YAML keys of audit and trial": lambda: len(declared_keys()),
    "detectors": lambda: len({*detector_names(built_in=True)} - {"from_column"}),
    "procedures": lambda: len(PROCEDURES),
    "calibrations": lambda: len(get_args(CalibrationName)),
    "checks": lambda: len(CHECKS),
    "kinds of files of a run": lambda: len([*kinds_of_files()]),
    "schemas": lambda: len([*(PAGES / "schemas").glob("*.json")]),
    "exit codes": lambda: len(ExitCode),
    "quarantine reasons": lambda: len(Reason),
    "pages of docs": lambda: len([page for page in PAGES.rglob("*.md") if "_build" not in page.parts]),
}


def test_the_surface_is_what_the_table_states() -> None:
    assert {name: count() for name, count in COUNTED.items()} == SURFACE


def test_the_page_on_the_architecture_prints_the_table() -> None:
    page = (PAGES / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \|", page.partition("## Surface")[2], re.MULTILINE)
    assert {name: int(count) for name, count in rows} == SURFACE


def test_every_file_of_a_run_is_of_a_kind_that_the_docs_list(make_audit: Callable[..., Path], tmp_path: Path) -> None:
    seenset.audit(make_audit(audit=60, unseen=60))
    patterns = [re.sub("|".join(PLACEHOLDERS), "*", kind) for kind in kinds_of_files()]
    files = [str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
