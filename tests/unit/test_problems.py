"""What newcomers write in a configuration is answered by what to write instead."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.plan.description import build_config, load_config
from tests.helpers.commands import user_error


def audit(**changed: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "run": "runs/audit",
        "model": {"path": "gpt2"},
        "corpus": {"audit": {"path": "a.jsonl"}, "unseen": {"path": "b.jsonl"}},
        "detectors": ["loss"],
        "selections": [{"name": "members", "detectors": ["loss"]}],
    }
    return {key: value for key, value in {**settings, **changed}.items() if value is not ...}


def source(**settings: Any) -> dict[str, Any]:
    return {"corpus": {"audit": {"path": "a.jsonl", **settings}, "unseen": {"path": "b.jsonl"}}}


def selection(**settings: Any) -> dict[str, Any]:
    return {"selections": [{"name": "members", "detectors": ["loss"], **settings}]}


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({"model": "gpt2"}, "got 'gpt2'; did you mean model: {path: gpt2}?"),
        ({"model": "a: b"}, "; did you mean model: {path: 'a: b'}?"),
        ({"model": "https://host/v1"}, "; did you mean model: {endpoint: https://host/v1, name: NAME}?"),
        ({"reference_model": "gpt2"}, "; did you mean reference_model: {path: gpt2}?"),
        ({"corpus": {"audit": "a.jsonl"}}, "; did you mean audit: {path: a.jsonl}?"),
        ({"corpus": {"audit": ["a.jsonl", "b"]}}, "; did you mean audit: {path: [a.jsonl, b]}?"),
        ({"corpus": "a.jsonl"}, "; did you mean corpus: {audit: {path: a.jsonl}}?"),
        ({"series": "ledger"}, "; did you mean series: {ledger: ledger}?"),
        ({"text_transform": "remove"}, "; did you mean text_transform: {dates: remove}?"),
        ({"resources": "gpu"}, "resources: must be a section with keys of its own, got 'gpu'"),
        ({"detectors": {"loss": None, "zlib": None}}, "; did you mean [loss, zlib]?"),
        ({"detectors": None}, "detectors: input should be a valid list, got None"),
        ({"detectors": []}, "detectors: must have at least one entry, got []"),
        ({"detectors": ["min_k(k=0.2)"]}, "unknown detector 'min_k(k=0.2)'; did you mean {min_k: {k: 0.2}}?"),
        ({"detectors": [{"name": "min_k", "k": 0.2}]}, "name, k; did you mean {min_k: {k: 0.2}}?"),
        ({"selections": {"name": "a", "detectors": ["loss"]}}, "; begin each of its entries with -"),
        ({"run": {"path": "runs/a"}}, "; did you mean runs/a?"),
        ({"run": {"runs": "a"}}, "; YAML reads it as a mapping: put a value with a colon or brackets in quotes"),
        ({"model": {"path": "a", "dtype": "bf16"}}, "got 'bf16'; did you mean bfloat16?"),
        ({"model": {"path": "a", "quantization": "int8"}}, "input should be '8bit' or '4bit', got 'int8'"),
        (selection(direction="member"), "; did you mean members?"),
        (selection(calibration="group"), "; did you mean by_group?"),
        ({"model": {"name": "gpt2"}}, ": add corpus.*.scores, or name weights as model: {path: ...}"),
        (source(delimiter=""), "got ''; put a sign such as | in quotes"),
    ],
)
def test_a_value_in_another_form_is_answered_by_the_form(changed: dict[str, Any], end: str) -> None:
    assert user_error(build_config, audit(**changed)).endswith(end)


@pytest.mark.parametrize(
    ("changed", "start"),
    [
        ({"models": {"path": "a"}, "model": ...}, "unknown key 'models'; did you mean 'model'? known"),
        ({"model": {"id": "a"}}, "unknown key 'model.id'; did you mean 'path'? known"),
        (
            {"model": {"base_url": "http://h", "name": "a"}},
            "unknown key 'model.base_url'; did you mean 'endpoint'? known",
        ),
        (
            {"model": {"endpoint": "http://h", "name": "a", "api_key": "x"}},
            "unknown key 'model.api_key'; keys come from",
        ),
        ({"data": {}, "corpus": ...}, "unknown key 'data'; did you mean 'corpus'? known"),
        ({"audit": {}, "corpus": ...}, "unknown key 'audit'; did you mean 'corpus.audit.path'? known"),
        ({"output": "a", "run": ...}, "unknown key 'output'; did you mean 'run'? known"),
        ({"device": "cuda"}, "unknown key 'device'; did you mean 'resources.gpus_per_actor'? known"),
        ({"batch_size": 8}, "unknown key 'batch_size'; did you mean 'resources.batch_tokens'? known"),
        ({"plugins": ["a.py"]}, "unknown key 'plugins'; did you mean 'import'? known"),
        ({"alpha": 0.1}, "unknown key 'alpha'; did you mean 'selections.*.alpha'? known"),
        (source(limit=5), "unknown key 'corpus.audit.limit'; the commands take --limit N"),
        (source(column="body"), "unknown key 'corpus.audit.column'; did you mean 'text'? known"),
        (source(config="en"), "unknown key 'corpus.audit.config'; did you mean 'subset'? known"),
        (selection(fdr=0.1), "unknown key 'selections.0.fdr'; did you mean 'alpha'? known"),
        ({"zzz": 1}, "unknown key 'zzz'; known: run, model"),
    ],
)
def test_a_key_of_other_programs_is_answered_by_the_setting(changed: dict[str, Any], start: str) -> None:
    assert user_error(build_config, audit(**changed)).startswith(start)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("model=gpt2", "; did you mean model: {path: gpt2}?"),
        ("model.path=data #2", "a # begins a comment: put the value in quotes within those of the shell"),
        ("corpus.audit.path=*.jsonl", "is not a YAML value: put a value that begins with * or & in quotes ("),
        ("corpus.audit.text={a} {b}", "is not a YAML value: put the value in quotes ("),
        ("selections.members.alpha=.1", "selections is a list and has no entry 'members'; its only entry is 0"),
    ],
)
def test_a_value_that_the_shell_passed_is_answered_by_its_quotes(override: str, answer: str) -> None:
    assert answer in user_error(build_config, audit(), [override])


@pytest.mark.parametrize(("alpha", "meant"), [("10", "0.1 (10%)"), ("1.5", "0.015 (1.5%)"), (10, "0.1 (10%)")])
def test_a_number_above_1_may_be_a_percentage_with_and_without_quotes(alpha: Any, meant: str) -> None:
    assert user_error(build_config, audit(**selection(alpha=alpha))).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("written", "meant"), [("min-k++", "min_k_plus_plus"), ("Min-K", "min_k"), ("mink++", "min_k_plus_plus")]
)
def test_a_detector_in_the_spelling_of_its_paper_is_found(written: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in user_error(build_config, audit(detectors=[written], selections=[]))


@pytest.mark.parametrize("sign", ["|", ",", "\t", ";", "#", "*"])
def test_a_sign_that_stands_alone_is_itself(sign: str) -> None:
    config = build_config(audit(), [f"corpus.audit.delimiter={sign}"])
    assert config.corpus.audit is not None
    assert config.corpus.audit.delimiter == sign


def test_brackets_and_an_empty_run_of_a_file_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(yaml.safe_dump(audit()).replace("path: a.jsonl", "{dataset: a/b, split: train[:5]}"))
    assert user_error(load_config, str(path)).startswith(
        f"config {path} is not YAML: on line 3 put a value that holds brackets in quotes ("
    )
    path.write_text(yaml.safe_dump(audit(run="")))
    assert user_error(load_config, str(path)) == "run is empty: name a folder, such as runs/audit"


def test_what_was_removed_is_named_before_a_key_that_is_missing() -> None:
    assert user_error(build_config, audit(), ["series.rule=prds"]).startswith(
        "setting series.rule was removed in 1.0: "
    )
