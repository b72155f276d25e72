"""The command on a schedule of scans: seenset series. It asks no model and writes into no run and no ledger."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_jobs import terminal
from ray_jobs.options import AsJson, ExitZeroOn

PAGE_HELP = "Write series.html and series.json into FOLDER, of its own, or the page alone to FILE.html."
NEW_HELP = (
    "Exit 4 when the scan filed last selected a document that none before it had, and 5 when a check contradicts "
    "such a list."
)


def series(
    ledger: Annotated[
        str, typer.Argument(metavar="LEDGER", help="Folder of the scans of a schedule: local path or fsspec URL.")
    ],
    page: Annotated[str | None, typer.Option("--page", metavar="FOLDER|FILE", help=PAGE_HELP)] = None,
    fail_if_new: Annotated[bool, typer.Option("--fail-if-new", help=NEW_HELP)] = False,
    json_: AsJson = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Every scan of a schedule, the error rate over all of them, and what is new since the last one."""
    from pipeline.series.course import read_course
    from pipeline.series.page import check_page_place, write_course

    place = None if page is None else check_page_place(page, ledger)
    course = read_course(ledger)
    address = None if place is None else write_course(place, course)
    if json_:
        terminal.print_json({**course.plain(), "page": address})
    else:
        terminal.print_course(course, address)
    if fail_if_new and (code := course.exit_code()):
        raise typer.Exit(int(code))
