"""What 0.10 had and 1.0 has not is refused in one line that names what to do instead."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import seenset
from cluster.preflight import check_command
from pipeline.config.corpus import CorpusConfig
from pipeline.config.retired import RETIRED
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.reasons import check_reasons
from pipeline.detectors.registry import parse_detectors
from pipeline.plan.description import build_config
from pipeline.plan.starter import audit_starter
from pipeline.trial.config import build_trial
from tests.helpers.commands import refusal, user_error


@pytest.mark.parametrize(("name", "instead"), RETIRED["detector"].items())
def test_a_retired_detector_is_refused_with_what_to_take(name: str, instead: str) -> None:
    assert (
        user_error(parse_detectors, ["loss", {name: {"share": 0.1}}])
        == f"detector {name} was removed in 1.0: {instead}"
    )
    assert instead in user_error(parse_detectors, [name])
    corpus = {"audit": {"path": "audit.jsonl"}, "unseen": {"path": "unseen.jsonl"}}
    for column in (name, f"{name}(share=0.1)"):
        selections = [{"name": "members", "detectors": [column]}]
        audit = {"run": "run", "model": {"path": "model"}, "corpus": corpus, "selections": selections}
        line = f"selections.0: detector {name} was removed in 1.0: {instead}"
        assert user_error(build_config, audit) == user_error(build_config, {**audit, "detectors": ["loss"]}) == line


@pytest.mark.parametrize(("option", "instead"), RETIRED["option"].items())
def test_a_retired_option_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], option: str, instead: str
) -> None:
    command, name = option.split()
    if command == "preflight":
        with pytest.raises(SystemExit, match="2"):
            check_command(["any", name, "any"])
        assert capsys.readouterr().err == f"preflight: option {option} was removed in 1.0: {instead}\n"
        return
    assert refusal(capsys, command, "any", name, "any") == f"seenset: option {option} was removed in 1.0: {instead}\n"


@pytest.mark.parametrize(("command", "instead"), RETIRED["command"].items())
@pytest.mark.parametrize("more", [[], ["any"], ["any", "--json"]])
def test_a_retired_command_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], command: str, instead: str, more: list[str]
) -> None:
    assert refusal(capsys, command, *more) == f"seenset: command {command} was removed in 1.0: {instead}\n"


@pytest.mark.parametrize(("module", "instead"), RETIRED["module"].items())
def test_a_retired_module_is_refused_with_what_to_do(module: str, instead: str) -> None:
    for options in ([], ["-W", "ignore"]):
        done = subprocess.run(
            [sys.executable, *options, "-m", module, "apply"],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (2, f"module {module} was removed in 1.0: {instead}\n")


@pytest.mark.parametrize("role", ["seen", "audit"])
@pytest.mark.parametrize("key", ["review", "review_count"])
def test_a_review_of_other_roles_is_answered_as_that_of_unseen_documents(role: str, key: str) -> None:
    corpus = {name: {"path": f"{name}.jsonl"} for name in ("audit", "unseen", "seen")}
    given = {"run": "run", "model": {"path": "model"}, "detectors": ["loss"], "corpus": corpus}
    line = user_error(build_config, given, [f"corpus.{role}.{key}=1"])
    assert line == f"unknown key 'corpus.{role}.{key}'; {RETIRED['setting']['corpus.unseen.review']}"


@pytest.mark.parametrize(("path", "instead"), RETIRED["setting"].items())
def test_a_retired_setting_is_refused_with_what_to_do(path: str, instead: str) -> None:
    given = {
        "run": "run",
        "model": {"path": "model"},
        "corpus": {"audit": {"path": "audit.jsonl"}, "unseen": {"path": "unseen.jsonl"}},
        "detectors": ["loss"],
        "series": {"ledger": "ledger"},
        "selections": [{"name": "members", "detectors": ["loss"]}],
    }
    *sections, key = path.split(".")
    section: Any = given
    for name in sections:
        section = section[name]
    (section[0] if isinstance(section, list) else section)[key] = "any"
    where = path.replace("selections.", "selections.0.")
    assert user_error(build_config, given) in (
        f"setting {path} was removed in 1.0: {instead}", f"setting {where} was removed in 1.0: {instead}",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "instead"), RETIRED["calibration"].items())
def test_a_retired_calibration_is_refused_wherever_it_is_written(name: str, instead: str, tmp_path: Path) -> None:
    line = f"calibration {name} was removed in 1.0: {instead}"
    selections = [{"name": "members", "detectors": ["loss"]}, {"name": "more", "detectors": ["loss"]}]
    corpus = {"audit": {"path": "audit.jsonl"}, "unseen": {"path": "unseen.jsonl"}}
    audit: dict[str, Any] = {"run": "run", "model": {"path": "model"}, "corpus": corpus, "selections": selections}
    override = f"selections.*.calibration={name}"
    assert user_error(build_config, audit, [override]) == line
    assert user_error(build_config, audit) == line  # which the override has changed
    described = {"run": "run", "model": {"path": "model"}, "documents": {"path": "documents.jsonl"}}
    swept = {"selections.*.calibration": ["pooled", name]}
    plain = [{"name": "members", "detectors": ["loss"]}]
    assert user_error(build_trial, {**described, "selections": selections}) == line
    assert user_error(build_trial, {**described, "selections": plain, "sweep": swept}).endswith(f": {line}")
    assert user_error(seenset.select, [1.0], unseen=[0.0], calibration=name) == line


@pytest.mark.parametrize(("name", "instead"), RETIRED["column"].items())
def test_a_retired_column_of_scores_is_refused_and_a_detector_may_have_its_name(name: str, instead: str) -> None:
    scores = {role: pa.table({"loss": [1.0, 2.0], name: [1.0, 1.0]}) for role in ("audit", "unseen")}
    line = f"column {name} was removed in 1.0: {instead}"
    for detectors in (None, ["loss"]):
        assert user_error(seenset.select, scores["audit"], unseen=scores["unseen"], detectors=detectors) == (
            f"audit: {line}"
        )
    plain = scores["audit"].select(["loss"])
    assert user_error(seenset.select, plain, unseen=scores["unseen"]) == f"unseen: {line}"
    for detectors in (["loss", name], [name]):
        asked = {"detectors": detectors, "procedure": "adadetect" if len(detectors) > 1 else "bh"}
        assert seenset.select(scores["audit"], unseen=scores["unseen"], **asked).summary.detectors == detectors


@pytest.mark.parametrize(("reason", "instead"), RETIRED["reason"].items())
def test_a_retired_reason_is_refused_with_its_name_of_today(reason: str, instead: str) -> None:
    line = f"reason {reason} was removed in 1.0: {instead}"
    assert user_error(check_reasons, [reason]) == user_error(check_reasons, ["all", reason]) == line


@pytest.mark.parametrize(("suffix", "instead"), RETIRED["suffix"].items())
def test_a_file_of_a_retired_suffix_is_refused_alone_and_among_others(
    tmp_path: Path, suffix: str, instead: str
) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"")
    (tmp_path / "b.jsonl").write_text('{"text": "A document of some words."}\n')
    for path in (f"a{suffix}", f"*{suffix}", "."):
        corpus = CorpusConfig.model_validate({"audit": {"path": str(tmp_path / path)}})
        line = user_error(find_inputs, corpus)
        assert line.startswith("corpus.audit: ")
        assert line.endswith(f"a{suffix}: suffix {suffix} was removed in 1.0: {instead}")
    (tmp_path / f".hidden{suffix}").write_bytes(b"")
    (tmp_path / f"a{suffix}").rename(tmp_path / "a.arrows.bak")
    assert [entry.name for entry in find_inputs(corpus)] == [str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize(("suffix", "instead"), RETIRED["suffix"].items())
def test_init_names_the_files_of_a_retired_suffix(tmp_path: Path, suffix: str, instead: str) -> None:
    (tmp_path / "unseen.jsonl").write_text('{"text": "A document of some words."}\n' * 3)
    (tmp_path / f"audit{suffix}").write_bytes(b"")
    starter = audit_starter(str(tmp_path))
    (entry,) = (entry for entry in starter.contents if entry.taken_as is None)
    assert f"suffix {suffix} was removed in 1.0: {instead}" in entry.reason
    assert yaml.safe_load(starter.text)["corpus"]["unseen"]["path"] == "unseen.jsonl"
