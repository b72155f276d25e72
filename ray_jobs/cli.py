"""The commands seenset init, plan, run, evaluate and trial; the others are in `commands`."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import Abort, TyperException

from pipeline.corpus.reasons import FAULTS, check_reasons
from pipeline.errors import (
    ExitCode,
    UserError,
    instead_of_exit,
    is_full,
    is_of_storage,
    message_of_storage,
)
from pipeline.models.devices import collect_rarely
from ray_jobs import commands, supervisor, terminal
from ray_jobs.commands import (
    AsJson,
    ConfigPath,
    FailIfSelected,
    Limit,
    NoText,
    Overrides,
)
from ray_jobs.terminal import heartbeat

if TYPE_CHECKING:
    from pipeline.config.audit import AuditConfig
    from pipeline.run.plan import Plan


class _Readable:
    """Help in which flags have no type, and required options stand in the usage."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The arguments and options, which the help lists."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage after the command."""
        options, *rest = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        required = [each for each in self.get_params(ctx) if each.required and isinstance(each, TyperOption)]
        arguments = [word.replace("...}", "}") for word in rest]  # "..." follows
        return [options, *(f"{each.opts[0]} {each.metavar}" for each in required), *arguments]


class _Command(_Readable, TyperCommand):
    """A command with this help."""


class _Group(_Readable, TyperGroup):
    """The group of all commands with this help."""


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Which documents was this language model trained on, with at most a fraction alpha of the answer wrong on "
    "average?",
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Which documents was a language model trained on, with at most a fraction alpha of the answer wrong on average?"""
    if version:
        from pipeline import __version__

        print(f"seenset {__version__}")
        raise typer.Exit


def plan(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Limit = None,
    matched: Annotated[
        str | None,
        typer.Option(
            "--matched",
            metavar="FOLDER",
            help="Write the calibration documents whose words resemble those of the audited documents to FOLDER, as "
            "Parquet.",
        ),
    ] = None,
) -> None:
    """Show what a run would do, and the shortest list that it could select. Nothing is written."""
    planned = _planned(config, set_, limit, matched=matched)
    from pipeline.plan.allocation import check_adapters
    from pipeline.plan.forecast import forecast
    from pipeline.plan.matching import write_matched
    from pipeline.plan.plugin_checks import check_plugins
    from pipeline.plan.preflight import plan_checks
    from pipeline.run.dtypes import with_types
    from pipeline.run.plan import describe_model, other_bases
    from pipeline.series.claims import planned_scan
    from pipeline.series.scans import planned_already_audited
    from pipeline.stages.registry import check_stages
    from ray_jobs.cluster import cluster_warning
    from ray_jobs.start import planned_types

    slow: list[str] = []
    types = planned_types(planned, slow.append)
    chosen = types.chosen(planned.config, "model")
    planned = replace(planned, config=with_types(planned.config, types.types))
    audit = planned.config
    planned, series = planned_scan(planned)
    checks = plan_checks(planned)
    model = describe_model(audit.model, audit.corpus.has_pictures)
    if chosen is not None:
        model["chosen"] = chosen.reason
    if audit.reference_model is not None:
        describe_model(audit.reference_model)
    checks["lines"] += [*check_plugins(audit), *check_stages(audit)]
    check_adapters(audit, planned.shards)
    facts = {**forecast(planned, model, checks), "checks": checks, "cluster": cluster_warning(audit.resources)}
    facts["series"], facts["against"] = series, planned_already_audited(audit)
    facts["slow"] = slow + other_bases(audit)
    if matched is not None:
        subsets = write_matched(planned, matched)
        facts["matched"] = [subset.facts() for subset in subsets]
        facts["checks"]["lines"] += [f"matched: {subset.sentence()}" for subset in subsets]
    terminal.show(json_, facts, terminal.print_plan, facts)


def run(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Limit = None,
    no_text: NoText = False,
    fail_if_selected: FailIfSelected = False,
    retry: Annotated[
        list[str] | None,
        typer.Option(
            "--retry",
            metavar="REASON",
            help=f"Score documents again that are in quarantine for REASON, whose fault is over: {', '.join(FAULTS)}, "
            "or all of these. May be repeated.",
        ),
    ] = None,
) -> None:
    """Score, select and write the report. Run the same command again to resume."""
    retried = check_reasons(retry or ())  # before any file is read
    planned = _planned(config, set_, limit)
    from ray_jobs.audit import run_plan
    from ray_jobs.progress import Reporter

    reporter = Reporter(terminal.console(errors=json_))
    outcome = run_plan(planned, reporter, not no_text, fail_if_selected, retried)
    facts = {**outcome.status.plain(), "report": outcome.report}
    terminal.show(json_, facts, terminal.print_outcome, planned.config.run, outcome.status, outcome.report)
    if outcome.exit_code:
        raise typer.Exit(int(outcome.exit_code))


def evaluate(
    config: ConfigPath,
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Limit = None,
) -> None:
    """Evaluate detectors on labelled data: AUC, TPR and ROC on seen against unseen documents. Nothing is selected."""
    planned = _planned(config, set_, limit, labelled=True)
    from ray_jobs.audit import run_evaluation
    from ray_jobs.progress import Reporter

    evaluation, page = run_evaluation(planned, Reporter(terminal.console(errors=json_)))
    terminal.show(json_, {**evaluation.plain(), "page": page}, terminal.print_evaluation, evaluation, page)


def trial(
    config: Annotated[str, typer.Argument(metavar="TRIAL.YAML", help="Configuration of the trial.")],
    set_: Overrides = None,
    json_: AsJson = False,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Read only the first N documents.")] = None,
    ranking: Annotated[
        str | None,
        typer.Option(
            "--ranking", metavar="RESULTS", help="Results to rank models by (Parquet, CSV: model, item, correct)."
        ),
    ] = None,
) -> None:
    """Test the guarantee on a model whose training data is known: train documents in, audit, compare with the truth."""
    from pipeline.corpus.inputs import check_limit
    from pipeline.run.machine import may_need_cluster
    from pipeline.trial.config import load_trial
    from pipeline.trial.splits import check_shifts
    from pipeline.trial.trial_documents import check_inputs

    described, points = load_trial(config, set_ or ())
    check_limit(limit)
    if ranking is not None:
        from pipeline.trial.ranking import check_ranking

        check_ranking(points, ranking)
    check_inputs(described, points)
    check_shifts(points)
    supervisor.supervise(may_need_cluster(described.resources))
    from pipeline.trial.trial import carry_out
    from ray_jobs.audit import run_audit
    from ray_jobs.progress import Reporter

    reporter = Reporter(terminal.console(errors=json_))
    outcome = carry_out(described, points, lambda audit: run_audit(audit, reporter), reporter.say, limit, ranking)
    facts = {**outcome.facts, "folder": outcome.folder, "reports": outcome.reports, "page": outcome.page}
    terminal.show(json_, facts, terminal.print_trial, outcome)


def init(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder with the data.")] = ".",
    for_trial: Annotated[bool, typer.Option("--trial", help="Write trial.yaml instead of audit.yaml.")] = False,
    json_: AsJson = False,
) -> None:
    """Write a commented starter configuration for the files in a folder."""
    from pipeline.plan.starter import audit_starter, write_starter

    if for_trial:
        from pipeline.trial.starter import trial_starter

    starter = trial_starter(folder) if for_trial else audit_starter(folder)
    path, schema = write_starter(folder, starter)
    contents = [asdict(row) for row in starter.contents]
    facts = {
        "config": path, "schema": schema, "guesses": starter.guesses, "missing": starter.missing, "contents": contents
    }  # fmt: skip
    terminal.show(json_, facts, terminal.print_starter, facts, "trial" if for_trial else "plan")


GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Audit": (init, plan, run, commands.status, commands.select, commands.report),
    "Act": (commands.verdict, commands.export, evaluate),
    "Several runs": (commands.compare, commands.joint, commands.rank, commands.series),
    "Evidence": (commands.mark, commands.pack, commands.verify),
    "Trial": (trial,),
}
"""The commands by group, in the order of the help."""

for _group, _commands in GROUPS.items():
    for _command in _commands:
        app.command(cls=_Command, rich_help_panel=_group)(_command)


def _planned(
    config: str, overrides: list[str] | None, limit: int | None, labelled: bool = False, matched: str | None = None
) -> Plan:
    """The plan of an audit or an evaluation; errors appear before torch is imported, which takes seconds.

    A child process carries out the command where a cluster or foreign code may end its process (`supervisor`).

    Args:
        config: path of the YAML file.
        overrides: values of `--set`.
        limit: the most documents of each role to read; None: all.
        labelled: whether this is an evaluation, whose documents are labelled.
        matched: folder for matched documents, of `plan --matched`; None: none are written.
    """
    from pipeline.endpoint.api_keys import withdraw_keys
    from pipeline.mark.mark import check_scored
    from pipeline.plan.description import load_config
    from pipeline.run.machine import may_need_cluster
    from pipeline.run.plan import check_model_files, make_plan
    from pipeline.series.scans import refuse_other_versions

    supervisor.supervise(_may_import(config, overrides or ()), _documents_in_flight)
    audit = load_config(config, overrides or (), labelled)
    if matched is not None:
        from pipeline.plan.matching import check_matched

        check_matched(audit, matched)
    refuse_other_versions(audit)
    withdraw_keys(audit.models)
    heartbeat.phase("listing the inputs")
    planned = make_plan(audit, limit)
    heartbeat.phase("reading documents before scoring")
    if audit.corpus.has_versions:
        for entry in planned.inputs:
            check_scored(entry.path)
    check_model_files(planned)
    foreign = _runs_foreign_code(audit)
    supervisor.supervise(may_need_cluster(audit.resources, planned) or foreign, _documents_in_flight)
    return planned


def _documents_in_flight(run: str) -> str:
    from pipeline.store.attempts import documents_in_flight
    from pipeline.store.files import Store

    return documents_in_flight(Store(run))


def _may_import(config: str, overrides: Sequence[str]) -> bool:
    """Whether reading a configuration imports plugins, whose code may end its process with os._exit."""
    try:
        if not os.path.isfile(config):
            return False
        with open(config, "rb") as file:
            text = file.read(1 << 20)
    except (OSError, ValueError):  # the error is raised where the configuration is read
        return False
    return re.search(rb"\bimport\b", text) is not None or any(one.startswith("import") for one in overrides)


def _runs_foreign_code(audit: AuditConfig) -> bool:
    """Whether a run executes code of plugins or checkpoints, which may end its process with os._exit."""
    from pipeline.config.models import ModelConfig
    from pipeline.detectors.plugins import GROUP

    models = [model for model in audit.models if isinstance(model, ModelConfig)]
    return bool(audit.import_ or entry_points(group=GROUP)) or any(model.trust_remote_code for model in models)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every user error is one line and an exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # its default pool keeps the memory of sorted tables
    collect_rarely()
    supervisor.begin_command(whole_process=arguments is None)
    terminal.show_all_characters()
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((argument for argument in given if not argument.startswith("-")), "seenset")
    if name != "status":  # a user watches its lines
        heartbeat.begin(sys.stderr if "--json" in given else sys.stdout, name)
    try:
        try:
            with supervisor.cluster_named():
                code = app(args=given, standalone_mode=False)
        finally:
            heartbeat.stop()
            if keys := sys.modules.get("pipeline.endpoint.api_keys"):  # otherwise no command has needed a key
                keys.give_keys_back()
    except UserError as error:
        supervisor.fail(str(error), int(error.exit_code))
    except TyperException as error:
        from ray_jobs.usage import usage_message

        supervisor.fail(usage_message(error, given), int(ExitCode.USER_ERROR))
    except SystemExit as error:  # no command of this package raises it
        if isinstance(error.__context__, BrokenPipeError):  # the reader of the output is gone, as with `| head -1`
            supervisor.finish(1)
        supervisor.fail(str(instead_of_exit(error)), int(ExitCode.INCOMPLETE))
    except (KeyboardInterrupt, Abort):
        code = int(ExitCode.INTERRUPTED)
    except Exception as error:
        if is_full(error):
            supervisor.fail(f"no space left ({error}): free some space and rerun the command", int(ExitCode.INCOMPLETE))
        if not is_of_storage(error):
            supervisor.note_fault()
            raise
        code = ExitCode.INCOMPLETE if getattr(error, "errno", None) == errno.EIO else ExitCode.USER_ERROR
        supervisor.fail(message_of_storage(error), int(code))
    except BaseException as error:
        if (left := instead_of_exit(error)) is error:
            raise
        supervisor.fail(str(left), int(ExitCode.INCOMPLETE))  # a class of a plugin that is no Exception
    if code == ExitCode.INTERRUPTED:  # typer converts a KeyboardInterrupt to this code
        supervisor.leave_at_once(supervisor.INTERRUPTED, code)
    supervisor.finish(code or 0)


if __name__ == "__main__":
    main()
