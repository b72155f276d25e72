"""What 0.10 had and 1.0 has not is refused in one line that names what to do instead."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import refusal, user_error

from cluster.preflight import check_command
from pipeline.audit.description import build_config
from pipeline.audit.starter import audit_starter
from pipeline.config.corpus import CorpusConfig
from pipeline.config.retired import RETIRED
from pipeline.corpus.inputs import find_inputs
from pipeline.detectors.registry import parse_detectors


@pytest.mark.parametrize(("name", "instead"), RETIRED["detector"].items())
def test_a_retired_detector_is_refused_with_what_to_take(name: str, instead: str) -> None:
    assert user_error(parse_detectors, ["loss", {name: {"share": 0.1}}]) == f"detector {name} left in 1.0: {instead}"
    assert instead in user_error(parse_detectors, [name])


@pytest.mark.parametrize(("option", "instead"), RETIRED["option"].items())
def test_a_retired_option_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], option: str, instead: str
) -> None:
    command, name = option.split()
    if command == "preflight":
        with pytest.raises(SystemExit, match="2"):
            check_command(["any", name, "any"])
        assert capsys.readouterr().err == f"preflight: option {option} left in 1.0: {instead}\n"
        return
    assert refusal(capsys, command, "any", name, "any") == f"seenset: option {option} left in 1.0: {instead}\n"


@pytest.mark.parametrize(("command", "instead"), RETIRED["command"].items())
@pytest.mark.parametrize("more", [[], ["any"], ["any", "--json"]])
def test_a_retired_command_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], command: str, instead: str, more: list[str]
) -> None:
    assert refusal(capsys, command, *more) == f"seenset: command {command} left in 1.0: {instead}\n"


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
        f"setting {path} left in 1.0: {instead}", f"setting {where} left in 1.0: {instead}",
    )  # fmt: skip


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
        assert line.endswith(f"a{suffix}: suffix {suffix} left in 1.0: {instead}")
    (tmp_path / f".hidden{suffix}").write_bytes(b"")
    (tmp_path / f"a{suffix}").rename(tmp_path / "a.arrows.bak")
    assert [entry.name for entry in find_inputs(corpus)] == [str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize(("suffix", "instead"), RETIRED["suffix"].items())
def test_init_names_the_files_of_a_retired_suffix(tmp_path: Path, suffix: str, instead: str) -> None:
    (tmp_path / "unseen.jsonl").write_text('{"text": "A document of some words."}\n' * 3)
    (tmp_path / f"audit{suffix}").write_bytes(b"")
    starter = audit_starter(str(tmp_path))
    (entry,) = (entry for entry in starter.contents if entry.taken_as is None)
    assert f"suffix {suffix} left in 1.0: {instead}" in entry.reason
    assert yaml.safe_load(starter.text)["corpus"]["unseen"]["path"] == "unseen.jsonl"
