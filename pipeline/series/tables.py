"""The course of a schedule as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from pipeline.audit.conclusion import STYLES
from pipeline.report.wording.conclusion import standing
from pipeline.series.course import Course

_STYLES = {"no result": "bold red", **{standing(conclusion): style for conclusion, style in STYLES.items()}}


def course_table(course: Course) -> Table:
    """Every answer of every scan, in a row of its own; a scan without a result has one too."""
    of = "" if course.horizon is None else f" of {course.horizon:,}"
    title = f"{len(course.scans):,}{of} scans, alpha {course.alpha:g} ({course.rule})"
    table = Table("scan", "date", "model", "selection", title=title)
    for name in ("documents", "level", "selected", "wrong at most"):
        table.add_column(name, justify="right")
    table.add_column("promise")
    for row in course_rows(course):
        *cells, word = row
        table.add_row(*map(Text, cells), Text(word, style=_STYLES.get(word, "")))
    return table


def course_rows(course: Course) -> Iterator[tuple[str, ...]]:
    """(scan, date, model, selection, documents, level, selected, wrong at most, promise) of each answer."""
    for scan in course.scans:
        head, level = (f"{scan.slot:,}", scan.at[:16].replace("T", " "), scan.model), f"{scan.level:.3g}"
        if scan.filed_at is None:
            yield (*head, "-", "-", level, "-", "-", "no result")
        for answer in scan.answers:
            bound = answer.bound
            word = standing(answer.conclusion)
            if answer.doubt is not None and answer.conclusion != "contradicted":
                word = answer.guarantee if answer.guarantee != "finite-sample" else "not promised"
            yield (
                *head,
                answer.name,
                f"{answer.n_audit:,}",
                level,
                f"{answer.n_selected:,}",
                "-" if bound is None else f"{bound.wrong_at_most:,}",
                word,
            )
