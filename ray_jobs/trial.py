"""The driver of a trial: its audits run as any other audit does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pipeline.trial.config import Point, TrialConfig
from pipeline.trial.trial import TrialOutcome, carry_out
from ray_jobs.audit import run_audit
from ray_jobs.progress import Reporter


def run_trial(
    config: TrialConfig,
    points: Sequence[Point],
    console: Console,
    quiet: bool = False,
    limit: int | None = None,
    results: str | None = None,
) -> TrialOutcome:
    """Do what is not done yet of a trial. The same call again resumes.

    Args:
        config: the trial as written.
        points: the places of its sweep, from `pipeline.trial.config.load_trial`.
        console: where progress goes.
        quiet: no progress.
        limit: only the first documents.
        results: a Parquet file of per-item results whose ranking is to be repaired (`ranking.read_results`).

    Raises:
        UserError: bad input (exit 2), an incomplete audit (3), or a folder that another driver holds (75).
    """
    reporter = Reporter(console, quiet=quiet)
    return carry_out(config, points, lambda audit: run_audit(audit, reporter), reporter.say, limit, results)
