"""The driver of an audit: its phases in order, with one run directory and one exit status."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.answers.evaluation import Evaluation, evaluate_scores
from pipeline.answers.evaluation_text import worded
from pipeline.answers.select import Answering, select_all
from pipeline.config.audit import AuditConfig
from pipeline.endpoint.api_keys import keys_withdrawn
from pipeline.errors import DamagedError, ExitCode
from pipeline.report.evaluation_page import write_evaluation
from pipeline.report.page import write_report
from pipeline.results.status import Status, read_status
from pipeline.results.summary import Summary, selection_exit_code
from pipeline.run.dtypes import read_arithmetic, with_types
from pipeline.run.plan import Plan, make_plan
from pipeline.run.repair import count_refused
from pipeline.series.claims import file_result, prepare_claim
from pipeline.series.scans import refuse_other_versions
from pipeline.store.files import Store
from ray_jobs.progress import Reporter
from ray_jobs.scoring import scoring
from ray_jobs.terminal import heartbeat


@dataclass(frozen=True, slots=True)
class RunResult:
    """The final status of a run, and the address of its report."""

    status: Status
    report: str

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        if self.status.state != "complete":
            return ExitCode.INCOMPLETE
        return ExitCode(self.status.exit_code or ExitCode.DONE)

    @property
    def selections(self) -> list[Summary]:
        """The answers, in the order of the configuration."""
        return self.status.selections


def run_audit(
    config: AuditConfig,
    reporter: Reporter,
    limit: int | None = None,
    texts: bool = True,
    fail_if_selected: bool = False,
) -> RunResult:
    """Carry out the unfinished parts of an audit: score, select, report. The same call resumes it.

    Args:
        config: the audit's configuration.
        reporter: shows progress.
        limit: the most documents of each role to read; None: all.
        texts: whether answers and the report show the beginning of selected documents.
        fail_if_selected: whether the exit code states that documents were selected.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    refuse_other_versions(config)
    return run_plan(make_plan(config, limit), reporter, texts, fail_if_selected)


def run_plan(
    plan: Plan,
    reporter: Reporter,
    texts: bool = True,
    fail_if_selected: bool = False,
    retried: Collection[str] = (),
) -> RunResult:
    """As `run_audit`, for a plan; documents in quarantine for one of the reasons `retried` are tried again.

    Args:
        plan: plan of the audit, which `run_audit` makes.
        reporter: as in `run_audit`.
        texts: as in `run_audit`.
        fail_if_selected: as in `run_audit`.
        retried: reasons of quarantine.
    """
    retried = _reasons_left(Store(plan.config.run), retried, reporter)
    with keys_withdrawn(plan.config.models), scoring(plan, reporter, retried) as (scored, status, each, reread):
        types = read_arithmetic(scored.store)
        config = plan.config if types is None else with_types(plan.config, types.types)
        reporter.say("selecting")
        heartbeat.phase("selecting")
        claim = prepare_claim(config, scored, plan.limit, reporter.say)
        how = Answering(texts=texts, reread=reread, say=reporter.say, claim=claim)
        summaries = select_all(config, scored, plan.limit, each, how)
        code = selection_exit_code(summaries) if fail_if_selected else ExitCode.DONE
        ended = status.write("complete", code, selections=summaries)
        heartbeat.phase("writing the report")
        report = write_report(scored.store, texts=texts)
        if claim is not None and summaries:
            file_result(config, scored, plan.limit, summaries, reporter.say)
    return RunResult(ended, report)


def _reasons_left(store: Store, reasons: Collection[str], reporter: Reporter) -> Collection[str]:
    """The reasons of a retry; none where the run is complete and no document is in quarantine for one of them."""
    try:
        status = read_status(store) if reasons else None
    except DamagedError:  # the run writes it again
        return reasons
    if status is None or status.state != "complete" or count_refused(store, reasons):
        return reasons
    reporter.say(f"no document of {store.url} is in quarantine for {' or '.join(reasons)}: nothing to try again")
    return ()


def run_evaluation(plan: Plan, reporter: Reporter) -> tuple[Evaluation, str]:
    """Score the missing documents and compare seen with unseen ones. The same call resumes it.

    Args:
        plan: plan of a configuration from `pipeline.plan.description.load_config`, with labelled documents.
        reporter: shows progress.

    Returns:
        The figures, and the address of their page.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    with keys_withdrawn(plan.config.models), scoring(plan, reporter) as (scored, status, *_):
        evaluated = worded(evaluate_scores(plan.config, scored, plan.limit))
        page = write_evaluation(scored.store, evaluated)
        status.write("complete", ExitCode.DONE)
    return evaluated.evaluation, page
