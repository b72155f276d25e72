"""The driver of an evaluation: scores as any audit, and compares instead of selecting."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.audit.evaluation import Evaluation, evaluate_scores
from pipeline.audit.plan import Plan
from pipeline.config.audit import AuditConfig
from pipeline.errors import ExitCode
from pipeline.report.evaluation_page import write_evaluation
from ray_jobs.audit import scoring
from ray_jobs.progress import Reporter


@dataclass(frozen=True, slots=True)
class EvaluationOutcome:
    """The figures of an evaluation, and the address of its page."""

    evaluation: Evaluation
    page: str


def run_evaluation(
    config: AuditConfig, reporter: Reporter, limit: int | None = None, plan: Plan | None = None
) -> EvaluationOutcome:
    """Score what is not scored yet and compare seen with unseen documents. The same call again resumes.

    Args:
        config: from `pipeline.audit.description.load_evaluation`.
        reporter: shows progress.
        limit: only the first documents of each role.
        plan: of the same configuration and limit, where it has been made.

    Raises:
        UserError: bad input (exit 2), an incomplete run (3) or a run that another driver holds (75).
    """
    with scoring(config, reporter, limit, plan) as (scored, status, *_):
        evaluated = evaluate_scores(config, scored, limit)
        page = write_evaluation(scored.store, evaluated)
        status.write("complete", ExitCode.DONE)
    return EvaluationOutcome(evaluated.evaluation, page)
