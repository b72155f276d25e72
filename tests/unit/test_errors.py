"""Errors hold what their readers need in fields: no code takes a message apart, and every error survives a pickle."""

import ast
import importlib
import inspect
import pickle
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from pipeline.config.corpus import Role
from pipeline.errors import DamagedError, ExitCode, FileError, UserError, VersionError
from tests.unit.error_messages import cuts
from tests.unit.test_house import MODULES


@pytest.mark.parametrize(
    "expression",
    [
        "str(error).partition('; ')[0]",
        "str(error).rpartition('; ')",
        "str(error).split()",
        "' '.join(str(error).split())",
        "str(error).removeprefix('corpus.audit: ')",
        "str(error).removesuffix(f'; {remedy}')",
        "str(error).replace('run directory', 'folder')",
        "str(error)[:200]",
        "one_line(str(error))[4:]",
        "error_line(error)[:-1]",
        "f'{error}'[:200]",
        "f'{kind}: {error}'.split(':')",
        "('adapter: ' + str(error)).split(':')",
        "error.args[0].split(':')",
        "error.args[0][:10]",
        "str(error.__cause__).split(':')",
        "'size mismatch' in str(error)",
        "str(error).startswith('cannot')",
        "str(error) == 'no memory'",
        "re.search('a', str(error))",
        "PATTERN.sub('', f'{error}')",
        "(str(error) or 'nothing').split(':')",
    ],
)
def test_every_way_to_take_a_message_apart_is_found(expression: str) -> None:
    handled = "try:\n  work()\nexcept UserError as error:\n  "
    given = "def f(error: UserError):\n  "
    kept = f"{handled}message = str(error)\n  "
    for text in (handled + expression, given + expression, kept + expression.replace("str(error)", "message")):
        assert cuts(ast.parse(text), "m"), text


@pytest.mark.parametrize(
    "text",
    [
        "def f(error):\n  str(error).split(':')",
        "def f(one: 'list[UserError]'):\n  str(one[0]).split(':')",
        "def f(*given: UserError):\n  str(given[0]).split(':')",
        "def f(given: list[UserError]):\n  for one in given:\n    str(one).split(':')",
        "def f(given: list[UserError]):\n  return [str(one).split(':') for one in given]",
        "def f(one):\n  if isinstance(one, UserError):\n    str(one).split(':')",
        "def f(future):\n  failed = future.exception()\n  str(failed).split(':')",
        "def f(self):\n  str(self.error).split(':')",
        "split = lambda error: str(error).split(':')",
        "def f(error):\n  str.partition(str(error), ':')",
        "def f(error):\n  textwrap.shorten(str(error), 20)",
        "def f(error):\n  error.__str__().split(':')",
        "def f(error):\n  message, = error.args\n  message.split(':')",
    ],
)
def test_an_error_is_known_wherever_it_comes_from(text: str) -> None:
    assert cuts(ast.parse(text), "m")


@pytest.mark.parametrize(
    "expression",
    [
        "raise UserError(f'{name}: {error}') from None",
        "error.problem.split(':')",
        "error_line(error, 200)",
        "lines = [str(error)]\n  lines[0]",
        "found[0] = str(error)",
        "problem = str(error)\n  problem is not None and problem != earlier and problem in problems",
        "isinstance(error, OSError) and error.errno in KNOWN",
    ],
)
def test_a_message_that_is_passed_on_whole_is_not_refused(expression: str) -> None:
    assert cuts(ast.parse(f"try:\n  work()\nexcept UserError as error:\n  {expression}"), "m") == {}


def error_classes() -> list[type[Exception]]:
    """All exceptions that the packages define."""
    names, found = {"Exception", "RuntimeError", "ValueError", "Error"}, []
    for _ in range(4):  # a class before or after its base, in any module
        for tree in MODULES.values():
            for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
                if any(getattr(base, "id", getattr(base, "attr", "")) in names for base in node.bases):
                    names.add(node.name)
    for module, tree in MODULES.items():
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
        found += [getattr(importlib.import_module(module), name) for name in defined]
    return found


VALUES = {str: "text\nof lines", int: 7, float: 0.25, bool: False, ExitCode: ExitCode.BUSY, Role: "unseen"}


def pattern_value(hint: Any) -> Any:
    """A value of an argument of an error that is no default."""
    return VALUES[get_args(hint)[0] if isinstance(hint, UnionType) else hint]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_processes_with_all_its_fields(kind: type[Exception]) -> None:
    arguments = ["a message"]
    if inspect.isfunction(kind.__init__):
        hints = get_type_hints(kind.__init__)
        arguments = [pattern_value(hints[name]) for name in list(inspect.signature(kind.__init__).parameters)[1:]]
    error = kind(*arguments)
    read = pickle.loads(pickle.dumps(error))
    assert type(read) is kind
    assert (str(read), read.args, vars(read)) == (str(error), error.args, vars(error))
    assert "a message" in str(read) or "text" in str(read) or "7" in str(read)


@pytest.mark.parametrize("kind", [FileError, DamagedError, VersionError])
def test_a_fault_of_a_file_is_stated_with_its_remedy_or_without(kind: type[FileError]) -> None:
    bare = kind("run/a.json", "is missing")
    assert (str(bare), bare.problem) == ("run/a.json is missing", "run/a.json is missing")
    error = bare.with_remedy("run again")
    assert type(error) is kind
    assert (str(error), error.problem) == ("run/a.json is missing; run again", bare.problem)
    assert str(kind("run/a.json", "is missing", "run again", ": ")) == "run/a.json is missing: run again"
    assert isinstance(error, UserError)
