"""Try a run's quarantined documents again, and go on from there as the run does."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.audit.manifest import read_run
from pipeline.audit.retry import check_reasons, count_refused
from pipeline.audit.status import read_status
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from ray_jobs.audit import Outcome, run_audit
from ray_jobs.progress import Reporter


def retry_run(run: str, reasons: Sequence[str], reporter: Reporter, texts: bool = True) -> Outcome | None:
    """Try documents in quarantine again, of any stage, and answer the run's questions anew.

    Args:
        run: the run directory.
        reasons: why they are there; none for all that another attempt may not meet.
        reporter: shows progress.
        texts: whether the report shows texts.

    Returns:
        How the run ended; None where it is complete and has no such documents.

    Raises:
        UserError: not a run directory, a reason that no attempt changes, or as `run_audit`.
    """
    tried = check_reasons(reasons)
    store = Store(run)
    manifest, _ = read_run(store)
    status = read_status(store)
    if status is not None and status.state == "complete" and not count_refused(store, STAGE, tried):
        reporter.say(f"no document of {run} is in quarantine for {' or '.join(tried)}: nothing to try again")
        return None
    config = manifest.config.model_copy(update={"run": store.url})
    return run_audit(config, reporter, manifest.limit, texts, retried=tried)
