"""A driver that is killed while an endpoint works has paid for what was under way: it counts in the budget."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.endpoint.answers import Answers, spent_before
from pipeline.endpoint.client import Usage
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from tests.helpers.clusters import until
from tests.helpers.openai_server import openai_server

STAGE = "sample/half/2"
ASKING = """
import asyncio, sys
from pipeline.config.models import EndpointConfig
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, run_concurrently
from pipeline.store.files import Store

url, folder = sys.argv[1:]
config = EndpointConfig(endpoint=url, name="stub", concurrency=3, timeout=60, backoff=0.01)
answers = Answers(Store(folder), "samples/half", "sample/half/2", "audit-000000", {})

async def one(prompt):
    question = answers.ask()
    body = {"model": "stub", "prompt": prompt}
    await endpoint.ask("/completions", body, 50, lambda value: value["choices"], question.spent, question.book)
    question.finish(row=int(prompt), draw=0, texts=["x"])

async def ask():
    global endpoint
    async with Endpoint(config) as endpoint:
        await run_concurrently(map(str, range(9)), one, 6)

asyncio.run(ask())
"""


def test_requests_under_way_when_a_driver_is_killed_are_in_the_budget(tmp_path: Path) -> None:
    """One is answered, one failed and waits for another attempt, three hang, and others wait for a place."""

    def behave(prompt: str, attempt: int) -> str:
        return {"0": "500", "1": "answer"}.get(prompt, "hang")

    with openai_server(behave=behave, hang=60) as server:
        command = [sys.executable, "-c", ASKING, server.url, str(tmp_path)]
        driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        until(lambda: len(server.bodies) >= 5 and server.busy >= 3)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert len(server.bodies) == 5
    store = Store(str(tmp_path))
    spent = spent_before(store, STAGE, ANSWER_FOLDERS)
    assert spent.requests == 5
    answered = spent.tokens - 4 * 50  # a question that has not ended counts with the most that it can cost
    assert 0 < answered < 50
    again = Answers(store, "samples/half", STAGE, "audit-000000", {})
    assert (again.spent, len(list(again.before()))) == (spent, 1)


def test_a_line_that_a_kill_cut_leaves_the_request_in_the_budget(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    answers = Answers(store, "samples/half", STAGE, "audit-000000", {})
    question = answers.ask()
    question.book(Usage(1, 50))
    spent = question.spent
    spent += Usage(1, 7)
    whole = (tmp_path / "samples/half/audit-000000.jsonl").read_bytes()
    question.finish(row=0, draw=0, texts=["x"])
    assert spent_before(store, STAGE, ANSWER_FOLDERS) == Usage(1, 7)
    path = tmp_path / "samples/half/audit-000000.jsonl"
    path.write_bytes(path.read_bytes()[: len(whole) + 30])
    assert spent_before(store, STAGE, ANSWER_FOLDERS) == Usage(1, 50)


def test_ended_attempts_count_with_their_cost_and_the_one_under_way_with_the_most(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    answers = Answers(store, "samples/half", STAGE, "audit-000000", {})
    answers.ask().finish()
    assert not list(tmp_path.rglob("*.jsonl")), "a question that was never sent costs nothing"
    question = answers.ask()
    spent = question.spent
    for ended in (Usage(1, 0), Usage(1, 9)):
        question.book(Usage(1, 50))
        spent += ended
    question.book(Usage(1, 50))
    assert spent_before(store, STAGE, ANSWER_FOLDERS) == Usage(3, 59)
