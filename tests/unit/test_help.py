"""The help of the command: its groups and their order, flags without a type, and required options."""

import re

import pytest
from typer.main import get_command

from ray_jobs.cli import GROUPS, app
from tests.helpers.commands import here

ORDER = {
    "Audit": ["init", "plan", "run", "status", "select", "report"],
    "Act": ["verdict", "export", "evaluate"],
    "Several runs": ["compare", "joint", "rank", "series"],
    "Evidence": ["mark", "pack", "verify"],
    "Trial": ["trial"],
}
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
WIDTHS = ["60", "80", "200"]


def test_every_command_is_in_one_group() -> None:
    assert {group: [command.__name__ for command in commands] for group, commands in GROUPS.items()} == ORDER
    assert sorted(name for names in ORDER.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_help_shows_the_groups_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown, _ = here(capsys, "--help")
    panels = re.findall(r"^╭─ ([A-Z][a-z ]+) ─", shown, re.MULTILINE)
    assert panels == ["Options", *ORDER]
    for panel, text in zip(panels, re.split(r"^╭─ .*$", shown, flags=re.MULTILINE)[1:], strict=True):
        if panel in ORDER:
            assert re.findall(r"^│ ([a-z]+) ", text, re.MULTILINE) == ORDER[panel]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_flag_has_no_type_and_what_is_required_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown, _ = here(capsys, *([name] if name else []), "--help")
    assert "bool" not in shown
    assert "[[" not in shown
    usage = " ".join(shown.split("\n\n")[0].split())
    for parameter in COMMANDS[name].params if name else ():
        marked = re.search(rf"^│ \*? +{re.escape(parameter.opts[0])} ", shown, re.MULTILINE)
        if parameter.required and parameter.opts[0].startswith("--"):
            assert marked is not None
            assert marked[0].startswith("│ *")
            assert f"{parameter.opts[0]} {parameter.metavar}" in usage
        elif marked is not None:
            assert not marked[0].startswith("│ *")
    assert shown.count("[required]") == sum(each.required for each in (COMMANDS[name].params if name else ()))


def test_the_required_options_are_these() -> None:
    required = {
        (name, parameter.opts[0])
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.required and parameter.opts[0].startswith("--")
    }
    assert required == {("mark", "--out"), ("rank", "--run")}
