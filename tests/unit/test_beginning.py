"""What a run begins beside its checks waits for them where it must, and hears of them as soon as they end."""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future

import pytest
from rich.console import Console

from pipeline.errors import UserError
from ray_jobs.beginning import Checks, _begin
from ray_jobs.progress import Reporter


def test_checks_that_are_not_done_stop_nothing_and_what_they_say_is_said_once() -> None:
    output, ended = io.StringIO(), threading.Event()
    checks = Checks(Future(), [], Reporter(Console(file=output)))

    def check() -> None:
        ended.wait(30)
        checks.lines.append("warning: two ids repeat")

    _begin(check, checks.under_way)
    checks.look()
    assert output.getvalue() == ""
    ended.set()
    checks.wait()
    checks.look()
    assert output.getvalue() == "warning: two ids repeat\n"


def test_documents_that_are_no_good_stop_the_run_at_the_next_look() -> None:
    checks = Checks(Future(), [], Reporter(Console(file=io.StringIO())))

    def check() -> None:
        raise UserError("near copies")

    _begin(check, checks.under_way)
    checks.under_way.exception(30)
    with pytest.raises(UserError, match="near copies"):
        checks.look()
