"""The key of an endpoint stays in the memory of one process, whatever an endpoint that knows it does with it."""

import base64
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.models import EndpointConfig
from pipeline.endpoint.api_keys import keys_withdrawn, masked, spellings, withdraw_keys, without_key
from pipeline.endpoint.client import check_endpoint, headers
from pipeline.errors import UserError
from seenset import audit
from tests.helpers.commands import ended, printed
from tests.helpers.finished import rows
from tests.helpers.made_up import MakeAudit
from tests.helpers.openai_server import openai_server

KEY = "sk-sesame+1f/2e=3d~"
CONFIG = EndpointConfig.model_validate({"endpoint": "http://localhost/v1", "name": "stub"})
SETTINGS: dict[str, Any] = {
    "detectors": [{"samia_zlib": {"draws": 2}}],
    "selections": [{"name": "members", "detectors": ["samia_zlib(draws=2)"], "procedure": "bh", "alpha": 0.2}],
    "error_budget": 0.5,
}


def encodings(key: str) -> dict[str, str]:
    """What a hostile endpoint may write for a key, by name."""
    data = key.encode()
    around = [b"", b"x", b"Bearer "]
    return {
        "plain": key,
        "url": quote(key, safe=""),
        "url twice": quote(quote(key, safe=""), safe=""),
        "url in full": "".join(f"%{byte:02x}" for byte in data),
        "hex": data.hex(),
        "HEX": data.hex().upper(),
        "hex in pairs": data.hex(" "),
        "hex with colons": data.hex(":"),
        "escapes": "".join(f"\\x{byte:02x}" for byte in data),
        "numbers": "".join(f"\\u00{byte:02x}" for byte in data),
        **{f"base64 after {b!r}": base64.b64encode(b + data).decode() for b in around},
        **{f"base64 for URLs after {b!r}": base64.urlsafe_b64encode(b + data).decode() for b in around},
        "base64 between": base64.b64encode(b"before " + data + b" and after").decode(),
        "base64 in lines": "\n".join(re.findall(".{1,8}", base64.b64encode(data).decode())),
    }


def copies_of_key(text: str, key: str) -> list[str]:
    """By which of its encodings a text tells a key. In base64 its last bits may mix with what follows."""
    core = {name: code.rstrip("=")[4:-2] if "base64" in name else code for name, code in encodings(key).items()}
    return [name for name, code in core.items() if code in text]


@settings(max_examples=20)
@given(key=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=60))
def test_a_key_is_masked_in_every_encoding(key: str) -> None:
    for name, code in encodings(key).items():
        text = spellings(key).sub("***", f"so {code} it")
        assert text.startswith("so "), name
        assert "***" in text, name
        assert text.endswith(" it"), name
        assert len(text) <= len("so *** it") + 32, f"{name}: {text}"  # what was encoded around it


@settings(max_examples=50)
@given(text=st.text(max_size=300))
def test_nothing_else_is_masked(text: str) -> None:
    assert spellings(KEY).sub("***", text) == text or any(part in text for part in ("sesame", "1f"))


def test_an_answer_is_masked_at_every_place_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    value = {"a": [{"text": f"x {KEY}"}, 3, None, True], KEY: {"b": KEY.encode().hex()}}
    assert masked(value, CONFIG) == {"a": [{"text": "x ***"}, 3, None, True], "***": {"b": "***"}}


def test_a_placeholder_for_a_key_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", "EMPTY")
    assert masked({"text": "The list is EMPTY."}, CONFIG) == {"text": "The list is EMPTY."}
    assert without_key("no EMPTY", CONFIG) == "no ***"
    monkeypatch.setenv("SEENSET_API_KEY", "1")
    assert without_key("no 1, n must be <= 10", CONFIG) == "no ***, n must be <= 10"


def test_short_values_of_headers_are_masked_in_messages_by_the_name_of_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHORT", "8")
    words = "n must be at most 8"
    assert without_key(words, CONFIG.model_copy(update={"headers": {"X-Version": "SHORT"}})) == words
    assert without_key(words, CONFIG.model_copy(update={"headers": {"X-Token": "SHORT"}})) == "n must be at most ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "prompt-caching-2024-07-31"),
        ("X-Title", "Wikipedia"),
        ("X-Region", "us-central1-aiplatform"),
        ("HTTP-Referer", "https://example.com/corpus"),
    ],
)
def test_plain_values_of_headers_stay_in_answers(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    config = CONFIG.model_copy(update={"headers": {name: "PLAIN"}})
    monkeypatch.setenv("PLAIN", value)
    answer = {"choices": [{"text": f"On {value} they met"}]}
    assert masked(answer, config) == answer
    assert without_key(f"On {value}", config) == "On ***"


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("api-key", "harbour-bell", ""),
        ("X-Goog-Api-Key", "harbour-bell", ""),
        ("X-Gate", "0123456789ABCDEF0123456789ABCDEF", ""),
        ("X-Gate", "550e8400-e29b-41d4-a716-446655440000", ""),
        ("X-Gate", "Basic Zm9vOmJhcjpiYXo1MjM0", "Basic "),
    ],
)
def test_keys_in_headers_are_masked_in_answers(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, left: str
) -> None:
    config = CONFIG.model_copy(update={"headers": {name: "HIDDEN"}})
    monkeypatch.setenv("HIDDEN", value)
    assert masked({"text": f"it is {value}."}, config) == {"text": f"it is {left}***."}


def test_an_endpoint_that_echoes_the_key_leaves_it_in_no_file_and_no_line(
    make_audit: MakeAudit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    codes = list(encodings(KEY).values())

    def echo(prompt: str, seed: int) -> str:
        return f" you said {codes[sum(map(ord, prompt)) % len(codes)]} and {' '.join(codes)} in all"

    def behave(prompt: str, attempt: int) -> str:
        return "500" if prompt.startswith("Text 3 ") else "answer"

    other = "az;harbour-49&bell"
    monkeypatch.setenv("AZURE_KEY", other)
    codes += encodings(other).values()
    with openai_server(echo, behave, key=KEY, models=["stub"]) as server:
        model = {"endpoint": server.url, "name": "stub", "backoff": 0.01, "attempts": 2}
        model |= {"headers": {"api-key": "AZURE_KEY"}}
        code, output, errors = printed(capsys, "run", make_audit(20, 10, model=model, **SETTINGS))
    assert code == 0, errors
    assert server.keys == {f"Bearer {KEY}"}
    (stage,) = (tmp_path / "run/receipts").glob("sample/*/*")
    drawn = rows(tmp_path / "run", str(stage.relative_to(tmp_path / "run/receipts")))
    assert all("***" in text for row in drawn.values() for text in row["continuations"])
    written = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {sent["api-key"] for sent in server.headers} == {other}
    for secret in (KEY, other):
        assert {file.name: copies_of_key(_text_of(file), secret) for file in written} == {
            file.name: [] for file in written
        }
        assert copies_of_key(output + errors + caplog.text, secret) == []


def _text_of(file: Path) -> str:
    """What is in a file, of Parquet its values: there they are compressed."""
    if file.suffix == ".parquet":
        return json.dumps(pq.read_table(file).to_pylist(), default=lambda data: data.decode("latin-1"))
    return file.read_bytes().decode("latin-1")


def test_an_endpoint_whose_list_of_models_or_broken_answer_holds_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    with openai_server(key=KEY, models=[KEY, KEY.encode().hex()]) as server:
        config = CONFIG.model_copy(update={"endpoint": server.url})
        with pytest.raises(UserError, match=r"has no model 'stub'; known: \*\*\*, \*\*\*"):
            check_endpoint(config)


def test_no_child_of_a_run_gets_the_key_and_the_caller_has_it_again(
    make_audit: MakeAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    monkeypatch.setenv("AZURE_KEY", KEY[::-1])
    seen: list[str] = []

    def look(prompt: str, seed: int) -> str:
        command = [sys.executable, "-c", "import os; print(*map(os.environ.get, ['SEENSET_API_KEY', 'AZURE_KEY']))"]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        return " some words of an answer"

    with openai_server(look, key=KEY, models=["stub"]) as server:
        model = {"endpoint": server.url, "name": "stub", "headers": {"api-key": "AZURE_KEY"}}
        audit(make_audit(2, 2, model=model, **SETTINGS), quiet=True)
    assert set(seen) == {"None None"}
    assert (os.environ["SEENSET_API_KEY"], os.environ["AZURE_KEY"]) == (KEY, KEY[::-1])


def test_a_key_that_was_withdrawn_is_still_sent_and_forgotten_when_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    with keys_withdrawn([CONFIG]), keys_withdrawn([CONFIG]):
        assert "SEENSET_API_KEY" not in os.environ
        assert headers(CONFIG) == {"Authorization": f"Bearer {KEY}"}
    monkeypatch.delenv("SEENSET_API_KEY")
    assert headers(CONFIG) == {}


def test_a_process_that_runs_a_command_has_its_keys_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEENSET_API_KEY", KEY)
    withdraw_keys([CONFIG])
    ended("status", str(tmp_path))
    assert os.environ["SEENSET_API_KEY"] == KEY
    monkeypatch.delenv("SEENSET_API_KEY")
    assert headers(CONFIG) == {}
