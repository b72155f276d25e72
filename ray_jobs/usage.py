"""What is wrong with a command line, and what to write: the nearest option, command, argument or setting."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from typer.core import TyperOption
from typer.exceptions import TyperException

from pipeline.config.audit import AuditConfig
from pipeline.config.problems import settings_named, settings_of_other_programs
from pipeline.config.retired import retired
from pipeline.errors import number_meant
from pipeline.trial.config import TrialConfig
from pipeline.wording import did_you_mean, listed


def retired_word(error: TyperException, command: str) -> str | None:
    """The refusal of an option or a command that left the command line; None for another error.

    Args:
        error: error of the command line.
        command: its first word without a hyphen.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is not None and context is not None:
        return retired("option", f"{context.info_name} {option}")
    return retired("command", command) if context is not None and context.parent is None else None


_MEANT = {
    **dict.fromkeys(("audit", "score", "start", "resume", "scan", "detect", "test"), "run"),
    **dict.fromkeys(("list", "ls", "show"), "status"),
    "check": "plan",
    "help": "--help",
    "version": "--version",
}
"""Commands of other programs -> that of this one."""


def usage_message(error: TyperException, given: Sequence[str]) -> str:
    """What is wrong with a command line, and what to write in its place."""
    name = next((argument for argument in given if not argument.startswith("-")), "")
    if (retired_one := retired_word(error, name)) is not None:
        return retired_one
    message = str(getattr(error, "format_message", error.__str__)())
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if message.startswith("No such command"):
        names = [] if context is None else sorted(context.command.commands)
        if (meant := _command_meant(name, names, given)) is not None:
            return f"No such command {name!r}. Did you mean 'seenset {meant}'?"
        return message if "Did you mean" in message else f"{message} Known: {', '.join(names)}."
    option = getattr(error, "option_name", None) if message.startswith("No such option") else None
    near = option is not None and context is not None and _near_option(option, context.command, _NEAR)
    setting = None if context is None or near else _setting_meant(error, context.command, given)
    if setting is not None:
        return setting
    if option is not None and context is not None:
        return _unknown_option(option, context, given)
    if "extra argument" in message and (bare := [one for one in _option_values(given, "--set") if "=" not in one]):
        return f"--set takes key=value, got {bare[0]!r}"
    if parameter is not None and message.startswith("Missing argument"):
        return f"{message}{_MISSING.get(str(getattr(parameter, 'metavar', '')), '')}"
    if parameter is not None and message.startswith("Invalid value"):
        value = _value_after(given, parameter.opts)
        return f"{message}{number_meant(value, whole='integer' in message)}"
    return message


_ARGUMENT_OPTIONS = ("--config", "--file", "--path", "--run", "--folder", "--input", "-c", "-f")
"""Options of other programs for what is an argument here."""

_MISSING = {
    "AUDIT.YAML": " 'seenset init FOLDER' writes one for the documents in a folder.",
    "TRIAL.YAML": " 'seenset init FOLDER --trial' writes one for the documents in a folder.",
    "RUN": " It is the folder that the setting run of a configuration names.",
}
"""Name of an argument -> where it comes from."""


def _setting_meant(error: TyperException, command: object, given: Sequence[str]) -> str | None:
    """What to write where a setting of the configuration stands in place of an option or an argument."""
    if not any(parameter.name == "set_" for parameter in getattr(command, "params", ())):
        return None
    message = str(getattr(error, "format_message", error.__str__)())
    option = getattr(error, "option_name", None)
    extra = re.search(r"extra argument\(s\) \(([\w.*-]+)=(\S+?)\)?$", message)
    if option is not None and message.startswith("No such option"):
        name, value = option.lstrip("-"), _value_after(given, [option])
    elif extra is not None:
        name, value = extra[1].lstrip("-"), extra[2]
    else:
        several = "extra argument" in message and "=" in message
        return f"{message}; a setting is changed by --set A.B=C" if several else None
    kind = TrialConfig if getattr(command, "name", None) == "trial" else AuditConfig
    usual = () if option in _ARGUMENT_OPTIONS else settings_of_other_programs(name)
    keys = [name.replace("-", "_"), *(key for key in usual if key != "corpus")]
    named = [name] if "." in name else next(filter(None, (settings_named(kind, key)[:3] for key in keys)), [])
    if not named:
        return None if option is not None else f"{message}; a setting is changed by --set A.B=C"
    meant = " or ".join(f"--set {setting}={value or 'VALUE'}" for setting in named)
    return f"{message.partition(' (Possible')[0]}; a setting is changed by {meant}"


def _command_meant(name: str, names: Sequence[str], given: Sequence[str]) -> str | None:
    """The command that may be meant by a word in its place; None if there is no guess."""
    following = given[given.index(name) + 1 :][:1]
    if name == "help" and following and following[0] in names:
        return f"{following[0]} --help"
    if name.lower() in names:
        return name.lower()
    if name.endswith((".yaml", ".yml")):
        return f"plan {name}"
    if os.path.isdir(name):
        return f"{'status' if os.path.isfile(os.path.join(name, 'manifest.json')) else 'init'} {name}"
    if os.path.isfile(name):
        return f"init {os.path.dirname(name) or '.'}"
    return _MEANT.get(name)


_INSTEAD = {
    **dict.fromkeys(("--resume", "--continue"), "the same command goes on where it stopped"),
    **dict.fromkeys(("--dry-run", "--dryrun"), "seenset plan shows what a run would do"),
    **dict.fromkeys(
        ("--force", "--overwrite"), "a run directory is never overwritten: name another one by --set run=FOLDER"
    ),
    **dict.fromkeys(("--verbose", "--debug", "-v"), "seenset status RUN --watch shows the progress"),
}
"""Options of other programs -> what to do instead."""

_NEAR = 0.8  # similarity of an option that goes before a setting of that name


def _options(command: Any) -> list[str]:
    """The long options of a command."""
    named = [name for one in command.params if isinstance(one, TyperOption) for name in one.opts]
    return [*(name for name in named if name.startswith("--")), "--help"]


def _near_option(option: str, command: Any, cutoff: float) -> str | None:
    names = {name.lstrip("-"): name for name in _options(command)}
    near = get_close_matches(option.lstrip("-").lower().replace("_", "-"), names, n=1, cutoff=cutoff)
    return names[near[0]] if near else None


def _unknown_option(option: str, context: Any, given: Sequence[str]) -> str:
    """What a command takes in place of an option that it has not: an argument, or the nearest of its options."""
    command, start = context.command, "seenset" if context.parent is None else f"seenset {context.info_name}"
    arguments = [one for one in command.params if not isinstance(one, TyperOption)]
    names = [{str(one.name), str(one.metavar).lower().strip(".")} for one in arguments]
    place = next((at for at, known in enumerate(names) if option.lstrip("-").lower() in known), None)
    if place is None and arguments and option in _ARGUMENT_OPTIONS:
        place = 0
    if place is not None:
        before = "".join(f" {one.metavar}" for one in arguments[:place])
        value = _value_after(given, [option]) or ("PATH" if option in _ARGUMENT_OPTIONS else arguments[place].metavar)
        return f"No such option: {option}; its value is given without it: {start}{before} {value}"
    near = _near_option(option, command, 0.5)
    guess = "" if near is None else did_you_mean(near)
    if near is None and option in _INSTEAD and any(one.name == "set_" for one in command.params):
        return f"No such option: {option}; {_INSTEAD[option]}"
    if near is None and context.parent is None:
        return (
            f"No such option: {option}; a configuration names model and documents: 'seenset init FOLDER' writes one; "
            "'seenset --help' lists the commands"
        )
    line = f"No such option: {option}; {guess}{start} takes: {', '.join(_options(command))}"
    others = (
        []
        if context.parent is None
        else sorted(name for name, other in context.parent.command.commands.items() if option in _options(other))
    )
    if not others:
        return line
    return f"{line}; {option} is an option of seenset {listed(others) if len(others) > 1 else others[0]}"


def _option_values(given: Sequence[str], option: str) -> list[str]:
    return [value for name, value in pairwise(given) if name == option]


def _value_after(given: Sequence[str], options: Sequence[str]) -> str:
    """The value of the first of some options on a command line; empty where there is none."""
    for place, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if name in options:
            following = given[place + 1] if place + 1 < len(given) else ""
            return value if equals else following
    return ""
