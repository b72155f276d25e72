"""`model: {endpoint: ...}`: a corpus is audited through HTTP, whatever the endpoint does on the way."""

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.config.models import EndpointConfig, ModelConfig
from pipeline.corpus.documents import read_shard, text_digest
from pipeline.detectors.base import FORWARD, LOWERCASE, REFERENCE, Evidence
from pipeline.detectors.registry import parse_detectors
from pipeline.detectors.samia import prefix_and_reference
from pipeline.endpoint.answers import Answers, spent_before
from pipeline.endpoint.client import Usage
from pipeline.errors import ExitCode, StopError
from pipeline.models.load import open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import TokenStatistics, forward
from pipeline.plan.description import load_config
from pipeline.run.plan import make_plan
from pipeline.stages import local
from pipeline.stages.base import Placement, without
from pipeline.stages.events import Advance
from pipeline.stages.local import finish_shards
from pipeline.stages.registry import ANSWER_FOLDERS, open_endpoint, plan_stages
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipts, withdraw_receipt, write_receipt
from tests.helpers.clusters import until
from tests.helpers.commands import ended, user_error
from tests.helpers.finished import rows, run
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.openai_server import openai_server

KEY = "sk-sesame-1f2e3d"
STAGE = "sample/ratio0.5_t1_k50_p1_reference/4"
AUDIT = [sentence(i) for i in range(24)]
UNSEEN = [sentence(1000 + i) for i in range(16)]
REST = dict(map(prefix_and_reference, [*AUDIT, *UNSEEN]))
SETTINGS: dict[str, Any] = {
    "detectors": [{"samia_zlib": {"draws": 4}}],
    "selections": [{"name": "members", "detectors": ["samia_zlib(draws=4)"], "procedure": "bh", "alpha": 0.2}],
    "error_budget": 0.5,
    "resources": {"cluster": "local", "shard_bytes": 1500},
}
FATES = ("answer", "429", "500", "hang", "cut", "json", "empty")
HOPELESS = {"audit-3": "500", "audit-7": "json", "audit-11": "empty", "audit-13": "400", "audit-17": "filter"}


def model(url: str, **settings: Any) -> dict[str, Any]:
    quick = {"backoff": 0.01, "timeout": 60, "attempts": 3, "concurrency": 8}
    return {"endpoint": url, "name": "stub", **quick, **settings}


def recite(prompt: str, seed: int) -> str:
    """What a model says that knows the audited texts and has to guess the others."""
    return f" {REST[prompt]}" if prompt in {prefix_and_reference(text)[0] for text in AUDIT} else f" guess {seed}"


def test_whatever_an_endpoint_does_every_document_ends_once(
    make_audit: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    monkeypatch.setattr(local, "TICK_SECONDS", 0.1)
    prefixes = [prefix_and_reference(text)[0] for text in [*AUDIT, *UNSEEN]]
    hopeless = {prefixes[int(name.removeprefix("audit-"))]: fate for name, fate in HOPELESS.items()}

    def behave(prompt: str, attempt: int) -> str:
        fate = FATES[prefixes.index(prompt) % len(FATES)]
        return hopeless.get(prompt, fate if attempt == 1 else "answer")

    with openai_server(recite, behave, key=KEY, models=["stub"], most_choices=3, hang=4) as server:
        path = make_audit([*AUDIT, "alone"], UNSEEN, model=model(server.url, timeout=2), **SETTINGS)
        ended("run", str(path))
    folder = tmp_path / "run"
    drawn, scored = rows(folder, STAGE), rows(folder, "score")
    assert drawn.keys() == {f"audit-{i}" for i in range(25)} | {f"unseen-{i}" for i in range(16)}
    bad = {row["doc_id"]: row for row in pq.read_table(folder / "quarantine").to_pylist()}
    assert bad.keys() == {*HOPELESS, "audit-24"}
    assert scored.keys() == drawn.keys() - bad.keys()
    reasons = {fate: "no_answer" if fate in ("empty", "filter") else "model_error" for fate in HOPELESS.values()}
    assert {name: bad[name]["reason"] for name in HOPELESS} == {name: reasons[fate] for name, fate in HOPELESS.items()}
    words = {"500": "500 failed with Bearer ***", "json": "not JSON", "empty": "4 without text"}
    words |= {"400": "because of 400", "filter": "4 stopped by a filter"}
    assert all(words[fate] in bad[name]["message"] for name, fate in HOPELESS.items())
    assert bad["audit-24"]["reason"] == "too_short"
    assert all(len(drawn[name]["continuations"]) == 4 for name in scored)
    assert all(scored[name]["samia_zlib(draws=4)"] > 30 for name in scored if name.startswith("audit"))
    # 3 choices come of 4 that are asked for: a second request brings the last, and none is paid twice
    good = {prefixes[int(n.split("-")[1]) + (24 if n.startswith("unseen") else 0)] for n in scored}
    empty = {prefix for number, prefix in enumerate(prefixes) if FATES[number % len(FATES)] == "empty"}
    assert server.answered == Counter({prefix: 3 if prefix in empty else 4 for prefix in good}), (
        "an empty one is a draw"
    )
    assert 2**30 <= max(body["seed"] for body in server.bodies) < 2**31, "as many bits as every server takes"
    assert spent_before(Store(str(folder)), STAGE, ANSWER_FOLDERS).requests == server.requests
    assert "answers" in capfd.readouterr().out, "progress, also while no shard has ended"
    assert not list((folder / "samples").rglob("*.jsonl"))


def test_a_run_that_its_budget_or_a_kill_stopped_goes_on_and_pays_for_nothing_twice(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    with openai_server(recite, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, choices=2), **SETTINGS)
        beside = len(EndpointConfig.model_fields["instruction"].default) + 64  # the prompt, and two continuations
        costs = "|".join(str(beside + len(prefix) + 2 * (16 + len(rest) // 3)) for prefix, rest in REST.items())
        with pytest.raises(StopError, match=r"has 9 left, and the next request may cost \d+;"):
            run(path, "model.budget.tokens=9")
        with pytest.raises(StopError, match=f"has {220 - 24} left, and the next request may cost ({costs});"):
            run(path, "model.budget.tokens=220")  # the search for refused parameters takes 24
        for limit in (21, 22):
            with pytest.raises(StopError, match=rf"model\.budget\.requests of {limit}") as caught:
                run(path, f"model.budget.requests={limit}")
            assert caught.value.exit_code == ExitCode.INCOMPLETE
            assert server.requests == limit
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("incomplete", 3)
        journal = next((tmp_path / "run/samples").rglob("*.jsonl"))
        with journal.open("ab") as file:
            file.write(b'{"row": 0, "draw": 2, "te')  # as a killed driver leaves it
        outcome = run(path, "model.budget.requests=null")
        assert outcome.status.scored == 40
        assert set(server.answered.values()) == {4}
        assert (len(server.bodies), len(server.probes)) == (80, 1)
        spent = spent_before(store := Store(str(tmp_path / "run")), STAGE, ANSWER_FOLDERS)
        assert (spent.requests, spent.tokens) == (81, sum(receipt.tokens for receipt in read_receipts(store, STAGE)))
        before = rows(tmp_path / "run", "score")
        # more draws pay for those alone, other n-grams and fewer draws for nothing
        run(path, "detectors=[{samia: {draws: [2, 5], n: 2}}]", "selections=[]")
        assert (len(server.bodies), set(server.answered.values())) == (120, {5})
        # what was answered of a larger number that was given up is neither lost nor forgotten in the budget
        seven = "detectors=[{samia: {draws: 7}}]"
        with pytest.raises(StopError, match=r"model\.budget\.requests of 130 is spent"):
            run(path, seven, "selections=[]", "model.budget.requests=130")
        run(path, "detectors=[{samia: {draws: 3}}]", "selections=[]")
        assert server.requests == 130 == spent_before(Store(str(tmp_path / "run")), STAGE, ANSWER_FOLDERS).requests
        run(path, seven, "selections=[]")
        assert (len(server.bodies), set(server.answered.values())) == (160, {7})
        assert spent_before(Store(str(tmp_path / "run")), STAGE, ANSWER_FOLDERS).requests == 161
        # a run of its own, at another speed, comes to the same
        run(path, f"run={tmp_path / 'again'}", "model.concurrency=1")
        assert rows(tmp_path / "again", "score") == before


def test_ctrl_c_while_an_endpoint_answers_leaves_a_run_that_goes_on(make_audit: MakeAudit, tmp_path: Path) -> None:
    with openai_server(recite, models=["stub"], seconds=0.3) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, concurrency=2), **SETTINGS)
        command = [sys.executable, "-m", "ray_jobs.cli", "run", str(path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until(lambda: len(server.bodies) >= 4)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("incomplete", 130)
        assert run(path).status.scored == 40
        assert len(server.bodies) <= 40 + 2, "only what was under way is asked for again"


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo"])
def test_an_endpoint_that_tells_log_probabilities_gives_the_scores_of_its_weights(
    make_audit: MakeAudit, tmp_path: Path, tiny_model_folder: Path, way: str
) -> None:
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))

    def read(text: str) -> TokenStatistics:
        return forward(lm, [tokenize(lm.tokenizer, [text], 512)[0].ids], frozenset())

    detectors = ["loss", "zlib", "lowercase", "min_k", "reference"]
    with openai_server(log_probs=lambda text: read(text).log_prob[0].tolist(), way=way) as server:
        by_weights = way == "echo"
        other = {"path": str(tiny_model_folder)} if by_weights else model(server.url)
        asked = {"detectors": [*detectors, {"samia": {"draws": 1}}], "reference_model": other, "selections": []}
        settings = {**SETTINGS, **asked}
        path = make_audit(AUDIT[:6], UNSEEN[:6], model=model(server.url), **settings)
        run(path)
        count = len(server.bodies)
        run(path)
        assert len(server.bodies) == count  # an answer is kept
    found = rows(tmp_path / "run", "score")
    assert len(found) == 12
    for name, row in found.items():
        role, number = name.split("-")
        text = (AUDIT if role == "audit" else UNSEEN)[int(number)]
        evidence = Evidence([text], {FORWARD: read(text), LOWERCASE: read(text.lower()), REFERENCE: read(text)})
        expected = {detector.column: detector.score(evidence).item() for detector in parse_detectors(detectors)}
        assert {column: row[column] for column in detectors} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert 0 <= row["samia(draws=1)"] <= 1
        assert row["n_tokens"] == 1 + read(text).log_prob.shape[1]


def words(prompt: str) -> list[float]:
    return [-0.1 * (1 + sum(map(ord, word)) % 50) for word in prompt.split()[1:]]


def test_documents_with_incredible_log_probabilities_are_quarantined_and_asked_once(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    """-9999 for -inf in the reference made members of documents that only it had never seen."""
    spoilt = {AUDIT[1]: -9999.0, AUDIT[2]: float("nan"), AUDIT[5]: 0.5, UNSEEN[0]: -float("inf"), UNSEEN[4]: -1e400}

    def log_probs(prompt: str) -> list[float]:
        return [*words(prompt)[:-1], spoilt[prompt]] if prompt in spoilt else words(prompt)

    with openai_server(log_probs=log_probs) as server:
        settings = {**SETTINGS, "detectors": ["loss"], "selections": []}
        run(make_audit(AUDIT, UNSEEN, model=model(server.url), **settings))
        assert {server.attempts[text] for text in spoilt} == {1}
    bad = {row["doc_id"]: row for row in pq.read_table(tmp_path / "run/quarantine").to_pylist()}
    assert bad.keys() == {"audit-1", "audit-2", "audit-5", "unseen-0", "unseen-4"}
    assert {row["reason"] for row in bad.values()} == {"non_finite_score"}
    assert "log-probability 14 of 14 is -9999, outside (-1000, 0]" in bad["audit-1"]["message"]
    assert rows(tmp_path / "run").keys() == rows(tmp_path / "run", "log_probs/target-plain").keys() - bad.keys()


@pytest.mark.parametrize("count", [60, 10])
def test_an_endpoint_without_values_stops_the_run_which_goes_on_when_it_is_mended(
    make_audit: MakeAudit, tmp_path: Path, count: int
) -> None:
    spoilt = True

    def log_probs(prompt: str) -> list[float]:
        return [*words(prompt)[:-1], -9999.0] if spoilt and prompt.startswith("Text") else words(prompt)

    texts = [sentence(i) for i in range(count)]
    with openai_server(log_probs=log_probs) as server:
        settings = {**SETTINGS, "detectors": ["loss"], "selections": []}
        path = make_audit(texts, UNSEEN[:3], model=model(server.url), **settings)
        with pytest.raises(StopError) as caught:
            run(path)
        assert caught.value.exit_code == ExitCode.INCOMPLETE
        stage = "log_probs/target-plain so far" if count == 60 else "score"
        assert f"documents of stage {stage} failed with one message: endpoint: log-probability " in str(caught.value)
        asked = len(server.bodies)
        assert asked < 60
        spoilt = False
        assert run(path).status.scored == count + 3
        spent = spent_before(Store(str(tmp_path / "run")), "log_probs/target-plain", ANSWER_FOLDERS)
        assert spent.requests == server.requests, "the first requests are paid"


def test_answers_that_a_version_without_these_checks_recorded_are_asked_again(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    with openai_server(log_probs=words) as server:
        settings = {**SETTINGS, "detectors": ["loss"], "selections": []}
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **settings)
        config = load_config(str(path))
        store, (stage, _), shards = Store(config.run), plan_stages(config), make_plan(config).shards
        for shard in shards:
            earlier = without(stage.identity(shard), "checks")
            answers = Answers(store, stage.folder, stage.name, shard.id, earlier)
            for document in read_shard(shard):
                digest = text_digest(document.text)
                answers.add(Usage(1, 7), row=document.row, text=digest, log_probs=[-9999.0] * 3)
        run(path)
        assert {server.attempts[text] for text in [*AUDIT, *UNSEEN]} == {1}
        spent = spent_before(store, stage.name, ANSWER_FOLDERS)
        assert spent.requests == server.requests + 40, "what was paid stays in the budget"
        found = rows(tmp_path / "run", "log_probs/target-plain")
        assert all(min(row["log_probs"]) > -6 for row in found.values())
        # and a finished shard of such a version is not continued
        receipt = next(iter(read_receipts(store, stage.name)))
        withdraw_receipt(store, stage.name, receipt.shard)
        write_receipt(store, stage.name, replace(receipt, fingerprint=without(receipt.fingerprint, "checks")))
        line = user_error(run, path)
        assert "holds the work of stage log_probs/target-plain with other settings: checks" in line


@pytest.mark.parametrize(
    ("server", "changed", "part"),
    [
        ({"models": ["stab"]}, {}, "has no model 'stub'; did you mean 'stab'?"),
        ({}, {"detectors": ["samia_zlib", "loss", "zlib"]}, "detectors loss, zlib need prompt log-probabilities"),
        (
            {},
            {"detectors": ["min_k_plus_plus"]},
            "detector min_k_plus_plus needs the distribution of each token, and stub is an endpoint",
        ),
    ],
)
def test_an_endpoint_that_cannot_serve_stops_at_once_in_one_line(
    make_audit: MakeAudit, server: dict[str, Any], changed: dict[str, Any], part: str
) -> None:
    with openai_server(**server) as said:
        settings = {**SETTINGS, "selections": [], **changed}
        path = make_audit(AUDIT[:3], UNSEEN[:3], model=model(said.url), **settings)
        assert part in user_error(run, path)
        assert len(said.bodies) <= 6


def test_the_plan_says_what_an_endpoint_would_cost(make_audit: MakeAudit, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(models=["stub"]) as server:
        budget = {"budget": {"requests": 100}, "price": {"prompt": 1000.0, "answer": 2000.0}}
        path = make_audit(AUDIT, UNSEEN, model=model(server.url, choices=1, **budget), **SETTINGS)
        assert ended("plan", str(path)) == 0
        text = capsys.readouterr().out
        assert "160 requests" in text
        assert "warning: model.budget.requests is 100, less than that" in text
        assert ended("plan", str(path), "--json") == 0
        found = json.loads(capsys.readouterr().out)["endpoint"]
        assert not server.bodies
    sizes = [len(text.encode()) for text in [*AUDIT, *UNSEEN]]
    assert found["prompt_tokens"] == pytest.approx(4 * sum(sizes) / 2 / 4, rel=0.25)  # 4 requests of half a text each
    assert found["price"] == pytest.approx(
        (found["prompt_tokens"] * 1000 + found["answer_tokens"] * 2000) / 1e6, abs=0.01
    )


def test_a_chat_is_asked_to_go_on_with_the_text(make_audit: MakeAudit) -> None:
    with openai_server(recite) as server:
        settings = {**SETTINGS, "detectors": [{"samia_zlib": {"draws": 2, "top_k": None}}], "selections": []}
        config = load_config(str(make_audit(AUDIT[:4], UNSEEN[:4], model=model(server.url, api="chat"), **settings)))
        stage, _ = plan_stages(config)
        store, shards = Store(config.run), make_plan(config).shards
        events = list(finish_shards(stage, shards, store, 2, Placement(endpoint=open_endpoint(stage, store))))
    assert set(server.answered.values()) == {2}
    body = server.bodies[0]
    assert body["messages"][0]["content"].startswith("Continue the following text")
    assert "top_k" not in body
    assert body["max_tokens"] > 16
    receipts = [event for event in events if isinstance(event, Receipt)]
    assert sum(receipt.n_scored for receipt in receipts) == 8
    tokens = {event.shard: event.tokens for event in events if isinstance(event, Advance)}
    assert tokens == {receipt.shard: receipt.tokens for receipt in receipts}


def test_an_endpoint_is_asked_from_within_an_event_loop_as_a_notebook_has_one(make_audit: MakeAudit) -> None:
    async def inside(path: Path) -> int:
        return run(path).status.scored

    with openai_server(recite, models=["stub"]) as server:
        path = make_audit(AUDIT, UNSEEN, model=model(server.url), **{**SETTINGS, "selections": []})
        assert asyncio.run(inside(path)) == 40


def test_texts_without_blanks_are_continued_within_the_positions_of_an_endpoint(
    make_audit: MakeAudit, tmp_path: Path, shared_folder: Path
) -> None:
    """A document of 25,000 Chinese characters was one word, of which 4,096 positions hold no half."""
    lines = (shared_folder / "cases" / "zh_long.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rest = dict(prefix_and_reference(text[:2_048]) for text in texts)

    def behave(prompt: str, attempt: int) -> str:
        tokens = len(prompt) + server.bodies[-1]["max_tokens"]  # a character of Han is about a token
        return "answer" if tokens <= 4_096 else "400"

    with openai_server(lambda prompt, seed: rest[prompt][::-1], behave, models=["stub"]) as server:
        described = model(server.url, concurrency=1)
        ended("run", str(make_audit(texts[:16], texts[16:], model=described, max_tokens=2_048, **SETTINGS)))
    scored = rows(tmp_path / "run", "score")
    assert len(scored) == len(texts)
    assert not (tmp_path / "run/quarantine").exists()
    assert max(map(len, rest)) == 1_024
    for row in scored.values():
        assert row["samia_zlib(draws=4)"] > 100, "all characters of the rest, in another order"
