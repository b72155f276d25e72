"""The command: seenset init | plan | run | retry | evaluate | status | select | verdict | report | trial | schema."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.exceptions import Abort, TyperException

from pipeline.errors import ExitCode, UserError
from pipeline.models.libraries import collect_rarely
from pipeline.store.space import is_full
from ray_jobs import interrupts, terminal
from ray_jobs.ending import begin_command, fail, finish_command, is_of_storage, leave_at_once, message_of_storage

if TYPE_CHECKING:
    from pipeline.audit.plan import Plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Which documents was this language model trained on, with at most a fraction alpha of the answer wrong?",
)

MAX_REPORTS = 8
FAIL_HELP = (
    "Exit 4 when anything is selected, and 5 when anything is selected by a selection whose promise is not supported."
)
TRAINED_HELP = "Exit 4 when the collection was trained on, and 5 when something says so that is not supported."
ConfigPath = Annotated[str, typer.Argument(metavar="AUDIT.YAML", help="The audit's configuration.")]
TrialPath = Annotated[str, typer.Argument(metavar="TRIAL.YAML", help="The trial's configuration.")]
StatusPath = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory (local path or fsspec URL), or the folder of a trial.")
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory: local path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N documents of each role.")]
NoText = Annotated[bool, typer.Option("--no-text", help="Leave all texts out of the report and the selected.")]
Reasons = Annotated[
    list[str] | None,
    typer.Option(
        "--reason", help="Why they are in quarantine; may be repeated. By default model_error, out_of_memory."
    ),
]
FailIfSelected = Annotated[bool, typer.Option("--fail-if-selected", help=FAIL_HELP)]

MatchedFolder = Annotated[
    str | None,
    typer.Option(
        "--matched",
        metavar="FOLDER",
        help="Write the calibration documents whose words resemble the audited to FOLDER, as Parquet to calibrate on.",
    ),
]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Which documents was this language model trained on, with at most a fraction alpha of the answer wrong?"""
    if version:
        from pipeline import __version__

        print(f"seenset {__version__}")
        raise typer.Exit


@app.command()
def plan(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Limit = None,
    matched: MatchedFolder = None,
) -> None:
    """Say what would run: documents, shards, passes, time; and what alpha could ever select."""
    planned = _planned(config, set_, limit)
    from pipeline.audit.allocation import check_adapters
    from pipeline.audit.apart import write_matched
    from pipeline.audit.forecast import forecast
    from pipeline.audit.plan import describe_model
    from pipeline.audit.precheck import plan_checks
    from pipeline.audit.stages import log_prob_stages
    from pipeline.config.models import weights_of
    from pipeline.stages.ask_log_probs import check_log_probs
    from pipeline.stages.paraphrase import check_paraphraser
    from ray_jobs.beginning import check_actors
    from ray_jobs.neighbours import cluster_warning

    audit = planned.config
    check_actors(planned)
    checks = plan_checks(planned)
    model = describe_model(audit.model)
    if audit.reference_model is not None:
        describe_model(audit.reference_model)
    if audit.paraphraser is not None:
        check_paraphraser(audit.paraphraser, weights_of(audit.model))
    check_log_probs(log_prob_stages(audit))
    check_adapters(audit, planned.shards)
    facts = {**forecast(planned, model), "checks": checks, "cluster": cluster_warning(audit.resources)}
    if matched is not None:
        subsets = write_matched(planned, matched)
        facts["matched"] = [subset.facts() for subset in subsets]
        facts["checks"]["lines"] += [f"matched: {subset.sentence()}" for subset in subsets]
    if json_:
        terminal.print_json(facts)
    else:
        terminal.print_plan(facts)


@app.command()
def run(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Limit = None,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
) -> None:
    """Do all of it: score, select, report. The same command again resumes."""
    planned = _planned(config, set_, limit)
    from ray_jobs.audit import run_audit
    from ray_jobs.progress import Reporter

    reporter = Reporter(terminal.console(errors=json_))
    outcome = run_audit(planned.config, reporter, limit, not no_text, fail_if_selected, planned)
    terminal.print_outcome(planned.config.run, outcome.status, outcome.report, json_)
    if outcome.exit_code:
        raise typer.Exit(int(outcome.exit_code))


@app.command()
def retry(run: RunPath, reason: Reasons = None, json_: AsJson = False, no_text: NoText = False) -> None:
    """Try documents in quarantine again that a fault put there, and answer anew; all else is kept."""
    _check_run(run)
    from ray_jobs.progress import Reporter
    from ray_jobs.retry import retry_run

    outcome = retry_run(run, reason or (), Reporter(terminal.console(errors=json_)), not no_text)
    if outcome is None:
        return terminal.print_json({"retried": 0}) if json_ else None
    terminal.print_outcome(run, outcome.status, outcome.report, json_)


@app.command()
def evaluate(config: ConfigPath, set_: Overrides = None, json_: AsJson = False, limit: Limit = None) -> None:
    """Labelled data: AUC, TPR and ROC of every detector on seen against unseen documents; nothing is selected."""
    planned = _planned(config, set_, limit, labelled=True)
    from ray_jobs.evaluate import run_evaluation
    from ray_jobs.progress import Reporter

    outcome = run_evaluation(planned.config, Reporter(terminal.console(errors=json_)), limit, planned)
    if json_:
        terminal.print_json({**outcome.evaluation.plain(), "page": outcome.page})
    else:
        terminal.print_evaluation(outcome.evaluation)
        terminal.print_line(f"page: {outcome.page}")


@app.command()
def status(run: StatusPath, json_: AsJson = False) -> None:
    """Say how far a run or a trial is, from storage alone. Exit 3 where it is not running and not complete."""
    from pipeline.audit.status import run_status
    from pipeline.trial.progress import trial_status

    if (of_trial := trial_status(run)) is not None:
        terminal.print_trial_status(of_trial, json_)
        _exit_with(of_trial.state)
    status = run_status(run)
    if json_:
        terminal.print_json(status.plain())
        _exit_with(status.state)
    terminal.print_line(
        f"{status.state}: shards {status.shards_done}/{status.shards}, documents {status.documents:,}, "
        f"scored {status.scored:,}, quarantined {status.quarantined:,}"
    )
    if status.state == "running":
        eta = "-" if status.eta_s is None else f"{status.eta_s:.0f} s"
        rates = f"{status.documents_per_s:,.1f} documents/s, {status.tokens_per_s:,.0f} tokens/s"
        terminal.print_line(f"{rates}, ETA {eta}")
    if status.message:
        terminal.print_line(status.message)
    terminal.print_summaries(status.selections)
    terminal.print_history(run)
    _exit_with(status.state)


@app.command()
def select(
    run: RunPath,
    set_: Overrides = None,
    json_: AsJson = False,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
) -> None:
    """Ask a finished run its own questions anew, or with --set other ones; no model is touched, all are remembered."""
    _check_run(run, set_)
    from pipeline.audit.summary import exit_code_of, unsupported
    from ray_jobs.select import select_again

    summaries = select_again(run, set_ or (), not no_text)
    if json_:
        answers = [summary.plain() for summary in summaries]
        terminal.print_json({"selections": answers, "unsupported": unsupported(summaries)})
    else:
        terminal.print_summaries(summaries)
        terminal.print_history(run)
    if fail_if_selected and (code := exit_code_of(summaries)):
        raise typer.Exit(int(code))


@app.command()
def verdict(
    run: RunPath,
    blocks: Annotated[
        str | None,
        typer.Option("--blocks", metavar="group|family", help="What the permutation test moves whole."),
    ] = None,
    json_: AsJson = False,
    fail_if_trained: Annotated[bool, typer.Option("--fail-if-trained", help=TRAINED_HELP)] = False,
) -> None:
    """Was this collection trained on? At least so many of its documents, and a test of it as a whole."""
    _check_run(run)
    from pipeline.audit.collection import block_kind
    from ray_jobs.verdict import give_verdict

    answer = give_verdict(run, block_kind(blocks))
    if json_:
        terminal.print_json(answer.plain())
    else:
        terminal.print_verdict(answer)
    if fail_if_trained and answer.exit_code:
        raise typer.Exit(int(answer.exit_code))


@app.command()
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


@app.command()
def trial(
    config: TrialPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N documents.")] = None,
    ranking: Annotated[
        str | None,
        typer.Option(
            "--ranking", metavar="RESULTS", help="Per-item results (Parquet: model, item, correct) to rank models by."
        ),
    ] = None,
) -> None:
    """Verify the promise on a model whose training data is known: train documents in, audit, compare with the truth."""
    from pipeline.trial.config import load_trial
    from pipeline.trial.documents import check_inputs
    from pipeline.trial.shift import check_shifts

    described, points = load_trial(config, set_ or ())
    check_inputs(described, points)
    check_shifts(points)
    from ray_jobs.trial import run_trial

    console = terminal.console(errors=json_)
    outcome = run_trial(described, points, console, False, limit, ranking)
    if json_:
        terminal.print_json(
            {**outcome.facts, "folder": outcome.folder, "reports": outcome.reports, "page": outcome.page}
        )
        return
    for table in outcome.tables:
        console.print(table)
    terminal.print_line(f"trial: {outcome.folder} (tables.txt, *.json, *.parquet, figures/)")
    for report in outcome.reports[:MAX_REPORTS]:
        terminal.print_line(f"report: {report}")
    terminal.print_line(f"page: {outcome.page}")


@app.command()
def init(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder with the data.")] = ".",
    for_trial: Annotated[bool, typer.Option("--trial", help="Write trial.yaml instead of audit.yaml.")] = False,
    json_: AsJson = False,
) -> None:
    """Write a commented starter configuration for the files that a folder holds; nothing is asked."""
    from pipeline.audit.starter import audit_starter, write_starter

    if for_trial:
        from pipeline.trial.starter import trial_starter

    starter = trial_starter(folder) if for_trial else audit_starter(folder)
    path, schema = write_starter(folder, starter)
    if json_:
        facts = {"config": path, "schema": schema, "guesses": starter.guesses, "missing": starter.missing}
        terminal.print_json(facts)
    else:
        terminal.print_starter(path, starter.guesses, starter.missing, "trial" if for_trial else "plan")


@app.command()
def schema(
    for_trial: Annotated[bool, typer.Option("--trial", help="Of a trial instead of an audit.")] = False,
) -> None:
    """Print the JSON schema of a configuration, by which editors complete and check it."""
    from pipeline.config.audit import AuditConfig
    from pipeline.config.commented import config_schema

    if for_trial:
        from pipeline.trial.config import TrialConfig

    terminal.print_json(config_schema(TrialConfig if for_trial else AuditConfig))


def _exit_with(state: str) -> NoReturn:
    """End with 3 where a run or a trial has stopped before its end, so that a script need not read the text."""
    raise typer.Exit(int(ExitCode.INCOMPLETE if state in ("incomplete", "failed") else ExitCode.DONE))


def _planned(config: str, overrides: list[str] | None, limit: int | None, labelled: bool = False) -> Plan:
    """The plan of an audit or an evaluation; what is wrong shows here, before torch is imported for seconds."""
    from pipeline.audit.description import load_config, load_evaluation
    from pipeline.audit.plan import check_model_files, make_plan
    from pipeline.endpoint.keys import withdraw_keys

    audit = (load_evaluation if labelled else load_config)(config, overrides or ())
    withdraw_keys(audit.models)
    planned = make_plan(audit, limit)
    check_model_files(planned.config)
    return planned


def _check_run(run: str, overrides: list[str] | None = None) -> None:
    """Show what is wrong with a run directory or with new settings for it, as early as `_planned`."""
    from pipeline.audit.description import build_config
    from pipeline.audit.manifest import read_run
    from pipeline.store.files import Store

    manifest, _ = read_run(Store(run))
    build_config(manifest.config.model_dump(mode="json", by_alias=True), overrides or ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every error that a user can mend is one line and an exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its usual one keeps what sorted tables leave
    collect_rarely()
    interrupts.listen()
    begin_command()
    terminal.show_all_characters()
    try:
        try:
            code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        finally:
            if keys := sys.modules.get("pipeline.endpoint.keys"):  # else no command has needed one
                keys.give_keys_back()
    except UserError as error:
        fail(str(error), int(error.exit_code))
    except TyperException as error:
        fail(_message_of(error), int(ExitCode.USER_ERROR))
    except (KeyboardInterrupt, Abort):
        code = int(ExitCode.INTERRUPTED)
    except Exception as error:
        if is_full(error):
            fail(f"no space left ({error}): make room, and the same command goes on", int(ExitCode.INCOMPLETE))
        if not is_of_storage(error):
            raise
        passing = getattr(error, "errno", None) == errno.EIO
        fail(message_of_storage(error), int(ExitCode.INCOMPLETE if passing else ExitCode.USER_ERROR))
    if code == ExitCode.INTERRUPTED:  # typer turns a KeyboardInterrupt into this code itself
        leave_at_once("interrupted; the same command goes on from here", code)
    finish_command(code or 0)


def _message_of(error: TyperException) -> str:
    return str(getattr(error, "format_message", error.__str__)())


if __name__ == "__main__":
    main()
