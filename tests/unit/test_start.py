"""A run waits for the checks of its documents where it must, and stops at them as soon as they end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from made_up import sentence
from rich.console import Console

from pipeline.audit.description import load_config
from pipeline.audit.plan import make_plan
from pipeline.audit.preflight import RUN, begin_checks
from pipeline.store.files import Store
from ray_jobs.progress import Reporter
from ray_jobs.start import Checks


def checks_of(path: Path, output: io.StringIO) -> Checks:
    plan = make_plan(load_config(str(path), ()))
    reporter = Reporter(Console(file=output, width=400))
    return Checks(plan, Store(plan.config.run), reporter, begin_checks(plan, RUN))


def test_checks_that_are_not_done_stop_nothing_and_what_they_say_is_said_once(make_audit: Callable[..., Path]) -> None:
    output = io.StringIO()
    checks = checks_of(make_audit([sentence(1)] * 2 + [sentence(i) for i in range(9)]), output)
    checks.look()
    assert output.getvalue() == ""
    checks.wait()
    checks.look()
    assert output.getvalue().count("are near-duplicates of") == 1
