"""The commands that read what a run has left: seenset retry | status | select | verdict | report | export.

Only retry asks a model.
"""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from pipeline.errors import ExitCode, UserError
from ray_jobs import terminal
from ray_jobs.options import (
    TRAINED_HELP,
    AsHuggingFace,
    AsJson,
    AsList,
    AsSamples,
    Every,
    ExitZeroOn,
    FailIfSelected,
    Kept,
    NoText,
    OutPath,
    Overrides,
    Reasons,
    RunPath,
    SelectionName,
    StatusPath,
    TaskName,
    UnsupportedToo,
    Watch,
    WithoutQuarantined,
)
from ray_jobs.supervisor import supervise


def retry(
    run: RunPath,
    reason: Reasons = None,
    json_: AsJson = False,
    no_text: NoText = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Try documents in quarantine again that a fault put there, and answer anew; all else is kept."""
    check_run(run)
    from ray_jobs.progress import Reporter
    from ray_jobs.retry import retry_run

    outcome = retry_run(run, reason or (), Reporter(terminal.console(errors=json_)), not no_text)
    if outcome is None:
        return terminal.print_json({"retried": 0}) if json_ else None
    terminal.print_outcome(run, outcome.status, outcome.report, json_)


def status(
    run: StatusPath,
    json_: AsJson = False,
    watch: Watch = False,
    every: Every = None,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Say how far a run or a trial is, from storage alone. Exit 3 where it is not running and not complete."""
    if every is not None and not watch:
        raise UserError("--every says how often --watch looks: give both, or neither")
    from pipeline.audit.status import Status
    from ray_jobs.watch import read_progress, watch_progress

    status = watch_progress(run, json_, every) if watch else read_progress(run)
    if json_:
        if not watch:
            terminal.print_json(status.plain())
    elif not isinstance(status, Status):
        for line in terminal.trial_lines(status):
            terminal.print_line(line)
    else:
        for line in terminal.status_lines(status):
            terminal.print_line(line)
        terminal.print_summaries(status.selections)
        terminal.print_history(run)
    _exit_with(status.state)


def select(
    run: RunPath,
    set_: Overrides = None,
    json_: AsJson = False,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Ask a finished run its own questions anew, or with --set other ones; no model is touched, all are remembered."""
    check_run(run, set_)
    from pipeline.audit.summary import exit_code_of, unsupported
    from ray_jobs.progress import Reporter
    from ray_jobs.select import select_again

    summaries = select_again(run, set_ or (), not no_text, Reporter(terminal.console(errors=json_)).say)
    if json_:
        answers = [summary.plain() for summary in summaries]
        terminal.print_json({"selections": answers, "unsupported": unsupported(summaries)})
    else:
        terminal.print_summaries(summaries)
        terminal.print_history(run)
    if fail_if_selected and (code := exit_code_of(summaries)):
        raise typer.Exit(int(code))


def verdict(
    run: RunPath,
    blocks: Annotated[
        str | None,
        typer.Option("--blocks", metavar="group|family", help="What the permutation test moves whole."),
    ] = None,
    json_: AsJson = False,
    fail_if_trained: Annotated[bool, typer.Option("--fail-if-trained", help=TRAINED_HELP)] = False,
    exit_zero_on: ExitZeroOn = None,
) -> None:
    """Was this collection trained on? At least so many of its documents, and a test of it as a whole."""
    check_run(run)
    from pipeline.audit.collection import block_kind
    from ray_jobs.verdict import give_verdict

    answer = give_verdict(run, block_kind(blocks))
    if json_:
        terminal.print_json(answer.plain())
    else:
        terminal.print_verdict(answer)
    if fail_if_trained and answer.exit_code:
        raise typer.Exit(int(answer.exit_code))


def report(run: RunPath, json_: AsJson = False, no_text: NoText = False) -> None:
    """Write the report of a run anew."""
    from pipeline.audit.manifest import read_run
    from pipeline.store.files import Store

    store = Store(run)
    read_run(store)
    from pipeline.report import write_report

    path = write_report(store, texts=not no_text)
    if json_:
        terminal.print_json({"report": path})
    else:
        terminal.print_line(f"report: {path}")


def export(
    run: RunPath,
    out: OutPath = None,
    selection: SelectionName = None,
    keep: Kept = None,
    as_list: AsList = False,
    samples: AsSamples = False,
    task: TaskName = None,
    huggingface: AsHuggingFace = False,
    without_quarantined: WithoutQuarantined = False,
    unsupported_too: UnsupportedToo = False,
    json_: AsJson = False,
) -> None:
    """Write the cleaned data, the corpus without the selected, or what to remove, in the format that came in."""
    from pipeline.export.export import write_export
    from pipeline.export.request import ExportRequest, form_of

    form = form_of({"list": as_list, "samples": samples, "huggingface": huggingface})
    request = ExportRequest(run, out, selection, keep, form, task, not without_quarantined, unsupported_too)
    exported = write_export(request)
    if json_:
        terminal.print_json(exported.plain())
    else:
        terminal.print_export(exported)


def _exit_with(state: str) -> NoReturn:
    """End with 3 where a run or a trial has stopped before its end, so that a script need not read the text."""
    raise typer.Exit(int(ExitCode.INCOMPLETE if state in ("incomplete", "failed") else ExitCode.DONE))


def check_run(run: str, overrides: list[str] | None = None) -> None:
    """Show what is wrong with a run directory or with new settings for it, as early as `_planned`."""
    from pipeline.audit.description import build_config
    from pipeline.audit.machine import may_need_cluster
    from pipeline.audit.manifest import read_run
    from pipeline.store.files import Store

    manifest, _ = read_run(Store(run))
    if manifest.config.corpus.audit is None:
        raise UserError(
            f"{run} compares documents of known membership, and asks nothing: the same seenset evaluate goes on with it"
        )
    build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides or ())
    supervise(may_need_cluster(manifest.config.resources))
