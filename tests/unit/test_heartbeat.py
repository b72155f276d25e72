"""A command that prints nothing for a while says that it works."""

from __future__ import annotations

import re
import sys
import time

import pytest

from ray_jobs.heartbeat import Heartbeat


def test_a_silent_command_says_what_it_is_at_and_for_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    streams = sys.stdout, sys.stderr
    beat = Heartbeat("plan", first=0.2)
    time.sleep(0.5)
    print("selecting: three questions")
    deadline = time.monotonic() + 60
    while beat.streams[0].last + 0.5 > time.monotonic() and time.monotonic() < deadline:
        time.sleep(0.1)
    beat.end()

    said = capsys.readouterr()
    assert said.out == "selecting: three questions\n"
    assert re.search(r"^plan: still working, 0:00:0\d without output$", said.err, re.M)
    assert re.search(r"^selecting: still working, 0:00:0\d without output$", said.err, re.M)
    assert (sys.stdout, sys.stderr) == streams


def test_a_command_that_prints_is_not_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    beat = Heartbeat("plan", first=5.0)
    for number in range(5):
        print(number)
    beat.end()

    assert capsys.readouterr().err == ""
