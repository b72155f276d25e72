"""A command ends once: whoever ends it first prints the line and decides the exit code."""

import pytest

from tests.helpers.clusters import python

RACE = """
import sys, threading
from ray_jobs.supervisor import begin_command, fail, finish, leave_at_once

begin_command(False)
barrier = threading.Barrier(41)

def end(number):
    barrier.wait()
    leave_at_once(f"thread {number}", number)

for number in range(10, 50):
    threading.Thread(target=end, args=(number,)).start()
barrier.wait()
"""
ENDS = {"a failure": "fail('the main thread', 50)", "an end": "finish(51)"}


@pytest.mark.parametrize("end", ENDS)
def test_of_many_threads_that_end_a_command_one_prints_and_decides_the_exit_code(end: str) -> None:
    lines = {f"seenset: thread {number}\n": number for number in range(10, 50)}
    lines |= {"seenset: the main thread\n": 50} if end == "a failure" else {"": 51}
    for _ in range(5):
        done = python(RACE + ENDS[end])
        assert done.stderr in lines, "one line"
        assert done.returncode == lines[done.stderr]


def test_a_line_is_printed_whole_though_another_thread_ends_the_command_meanwhile() -> None:
    code = """
import sys, threading, time
from ray_jobs.supervisor import begin_command, fail, leave_at_once

class Slow:
    def write(self, text):
        for letter in text:
            time.sleep(0.002)
            sys.__stderr__.write(letter)
    def flush(self):
        sys.__stderr__.flush()

begin_command(False)
sys.stderr = Slow()
threading.Timer(0.05, leave_at_once, ("the second", 3)).start()
fail("the first " + "x" * 80, 2)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (2, f"seenset: the first {'x' * 80}\n")
