"""A run through an endpoint that refuses parameters: they are left out, recorded, stated, and asked about once."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.endpoint.answers import spent_before
from pipeline.errors import ExitCode, StopError
from pipeline.stages.registry import ANSWER_FOLDERS
from pipeline.store.files import Store
from tests.helpers.commands import ended, printed
from tests.helpers.finished import rows, run
from tests.helpers.made_up import MakeAudit, sentence
from tests.helpers.openai_server import openai_server

STAGE = "sample/ratio0.5_t1_k50_p1_reference/2"
SETTINGS: dict[str, Any] = {
    "detectors": [{"samia_zlib": {"draws": 2}}],
    "selections": [{"name": "members", "detectors": ["samia_zlib(draws=2)"], "procedure": "bh", "alpha": 0.2}],
    "error_budget": 0.5,
    "resources": {"cluster": "local", "shard_bytes": 1500},
}
REFUSED = {"temperature": None, "max_tokens": "max_completion_tokens", "n": None, "top_k": None}
TEXTS = [sentence(i) for i in range(12)], [sentence(100 + i) for i in range(8)]


def refuse(body: dict[str, Any]) -> Any:
    """One parameter an answer, as OpenAI words it."""
    for name, sent in REFUSED.items():
        if name in body:
            use = f" Use '{sent}' instead." if sent else ""
            return {"error": {"message": f"Unsupported parameter: '{name}' is not supported with this model.{use}"}}
    return None


def log_probs(prompt: str) -> list[float]:
    return [-0.1 * (1 + sum(map(ord, word)) % 50) for word in prompt.split()[1:]]


def model(url: str, **settings: Any) -> dict[str, Any]:
    return {"endpoint": url, "name": "stub", "backoff": 0.01, "attempts": 2, "concurrency": 4, **settings}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_refused_parameters_are_left_out_recorded_and_stated(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    with openai_server(refuse=refuse, models=["stub"]) as server:
        path = make_audit(*TEXTS, model=model(server.url, api=api), **SETTINGS)
        _, output, _ = printed(capsys, "plan", path)
        assert "which parameters of requests the endpoint takes is asked at the start of the run" in output
        assert not server.probes
        with pytest.raises(StopError, match=r"model\.budget\.requests of 9"):
            run(path, "model.budget.requests=9")
        assert (len(server.probes), len(server.bodies)) == (5, 4)
        manifest = json.loads((tmp_path / "run/manifest.json").read_text())
        folder = f"samples/{STAGE.split('/')[1]}"
        assert manifest["models"]["model"]["parameters"] == {folder: REFUSED}
        _, output, _ = printed(capsys, "plan", path)
        assert "model: max_tokens is sent as max_completion_tokens" in output
        run(path)
        assert len(server.probes) == 5, "the record is used"
    assert len(server.bodies) == 40, "without n every draw is a request"
    assert {*server.bodies[0]} - {"messages", "prompt"} == {"model", "max_completion_tokens", "top_p", "seed"}
    store = Store(str(tmp_path / "run"))
    assert spent_before(store, STAGE, ANSWER_FOLDERS).requests == server.requests
    receipt = json.loads(next((tmp_path / "run/receipts").glob(f"{STAGE}/*.json")).read_text())
    assert receipt["fingerprint"]["parameters"] == REFUSED
    assert len(rows(tmp_path / "run", "score")) == 20
    sentence_ = "default temperature applies, which changes what the scores measure"
    _, output, _ = printed(capsys, "status", tmp_path / "run")
    assert sentence_ in " ".join(output.split())
    _, output, _ = printed(capsys, "status", "--json", tmp_path / "run")
    assert len(json.loads(output)["parameters"]) == 4
    assert "parameters" not in json.loads((tmp_path / "run/status.json").read_text())
    report = json.loads((tmp_path / "run/report/report.json").read_text())
    notice = "The endpoint refuses temperature: its default applies, which changes what the scores measure"
    assert f"{notice}, and not the error rate." in report["notices"]
    assert len(report["model"]["requests"]) == 4
    page = (tmp_path / "run/report/report.html").read_text()
    assert "n is refused and left out: every draw is a request of its own" in page


def test_a_parameter_that_is_refused_later_stops_the_run(make_audit: MakeAudit, tmp_path: Path) -> None:
    later = False
    small = {**SETTINGS, "resources": {"cluster": "local", "shard_bytes": 300}}  # a receipt before the refusal

    def refuse(body: dict[str, Any]) -> Any:
        late = later or len(server.bodies) > 12
        return {"error": {"message": "Unknown parameter: 'seed'."}} if late and "seed" in body else None

    with openai_server(refuse=refuse) as server:
        path = make_audit(*TEXTS, model=model(server.url, concurrency=1), **small)
        with pytest.raises(
            StopError, match="refuses seed, which it took at the start of the run: 400 Unknown"
        ) as caught:
            run(path)
        assert caught.value.exit_code == ExitCode.INCOMPLETE
        assert len(server.bodies) < 20
        # a lost manifest is written again with what the receipts hold
        (tmp_path / "run/manifest.json").unlink()
        server.bodies.clear()
        count = len(server.probes)
        assert run(path).status.scored == 20
        assert len(server.probes) == count
        later = True
        path = make_audit(*TEXTS, model=model(server.url), **{**small, "run": str(tmp_path / "again")})
        run(path)
        assert "seed" not in server.bodies[-1]


def limit(body: dict[str, Any]) -> Any:
    """A server that takes two draws at once."""
    return {"error": {"message": "n must be <= 2"}} if body.get("n", 1) > 2 else None


def test_a_run_with_more_draws_keeps_to_the_limit_that_its_start_found(make_audit: MakeAudit, tmp_path: Path) -> None:
    with openai_server(refuse=limit) as server:
        run(make_audit(*TEXTS, model=model(server.url), **SETTINGS))
        count = len(server.probes)
        more = {**SETTINGS, "detectors": [{"samia_zlib": {"draws": 6}}], "selections": []}
        assert run(make_audit(*TEXTS, model=model(server.url), **more)).status.scored == 20
        assert len(server.probes) == count == 2
    assert {body["n"] for body in server.bodies} == {2}


def test_more_choices_than_the_endpoint_takes_stop_a_run_until_they_are_fewer(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    with openai_server(refuse=limit) as server:
        with pytest.raises(StopError, match="requests of 6"):
            run(make_audit(*TEXTS, model=model(server.url, choices=1), **SETTINGS), "model.budget.requests=6")
        more = {**SETTINGS, "detectors": [{"samia_zlib": {"draws": 6}}], "selections": []}
        path = make_audit(*TEXTS, model=model(server.url, choices=6), **more)
        with pytest.raises(StopError, match=r"refuses n of 6: 400 n must be <= 2; .* smaller model\.choices") as caught:
            run(path)
        assert caught.value.exit_code == ExitCode.INCOMPLETE
        assert run(path, "model.choices=2").status.scored == 20


def test_a_reference_model_at_an_endpoint_has_parameters_of_its_own(make_audit: MakeAudit, tmp_path: Path) -> None:
    def refuse_temperature(body: dict[str, Any]) -> Any:
        return {"error": {"message": "temperature must be above 0"}} if body.get("temperature") == 0 else None

    with (
        openai_server(log_probs=log_probs) as audited,
        openai_server(log_probs=log_probs, refuse=refuse_temperature) as other,
    ):
        settings = {**SETTINGS, "detectors": ["reference"], "selections": [], "reference_model": model(other.url)}
        path = make_audit(*TEXTS, model=model(audited.url), **settings)
        assert ended("plan", str(path)) == 0
        run(path)
    models = json.loads((tmp_path / "run/manifest.json").read_text())["models"]
    assert models["model"]["parameters"] == {"log_probs/target-plain": {}}
    assert models["reference_model"]["parameters"] == {"log_probs/reference-plain": {"temperature": None}}
    assert len(rows(tmp_path / "run", "score")) == 20
    assert all("temperature" not in body for body in other.bodies)
