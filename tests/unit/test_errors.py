"""Errors hold what their readers need in fields: no code takes a message apart, and every error survives a pickle."""

import ast
import importlib
import inspect
import pickle
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from pipeline.config.corpus import Role
from pipeline.errors import DamagedError, ExitCode, FileError, UserError, VersionError
from tests.unit.test_house import MODULES

FOREIGN = {
    "pipeline.config.yaml.load_yaml": "PyYAML: what it was scanning, and where; Python adds advice on long numbers",
    "pipeline.corpus.formats.jsonl.json_fault": "Python adds advice on long numbers",
    "pipeline.corpus.pictures.picture_problem": "Pillow: the two sizes, before its guess",
    "pipeline.corpus.unpacking.Unpacked._refuse_memory": "zstandard: errors of memory have its only class",
    "pipeline.endpoint.keys.error_without_key": "the only place that shortens the message of a client",
    "pipeline.errors.error_line": "the only place that shortens the message of a library",
    "pipeline.errors.is_full": "libraries in Rust and C++ state a full disk in words alone",
    "pipeline.errors.not_opened": "fsspec: the package that is not installed",
    "pipeline.models.checkpoints.in_one_line": "loaders: many lines, of which the first says most",
    "pipeline.models.devices._is_lost": "torch before 2.8: errors of a device are RuntimeErrors",
    "pipeline.models.devices.out_of_memory": "libraries of kernels: errors of memory are RuntimeErrors",
    "pipeline.models.load.load_adapter": "peft: another base model is a RuntimeError or a ValueError",
    "pipeline.training.memory.explained": "torch: the sizes, before its advice",
    "ray_jobs.actors._as_loss": "Ray: whether an actor failed in its constructor",
}
"""Functions that read the message of an error of another library, which has no fields, and what they read."""

CUTS = {
    *("partition", "rpartition", "split", "rsplit", "splitlines", "removeprefix", "removesuffix", "replace"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "translate"),
}
PATTERNS = {"match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split"}
WORDED = {
    "str",
    "repr",
    "format",
    "error_line",
    "one_line",
    "visible",
    "not_opened",
    "message_of_storage",
    "without_key",
}
"""Functions that return the message of an error, or a message that they are given."""


class Messages:
    """The names in a function that hold errors and their messages."""

    def __init__(self, function: ast.AST) -> None:
        self.errors: set[str] = set()
        self.held: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and node.name:
                self.errors.add(node.name)
            elif isinstance(node, ast.arg) and node.annotation is not None:
                names = (getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node.annotation))
                if any(name.endswith(("Error", "Exception", "Fault", "Refusal")) for name in names):
                    self.errors.add(node.arg)
        while self._follow(function):
            pass

    def _follow(self, function: ast.AST) -> bool:
        """Note the names that are assigned errors or messages; whether there was a new one."""
        before = len(self.errors) + len(self.held)
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
        return len(self.errors) + len(self.held) > before

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part)
        elif isinstance(target, ast.Name) and self.is_error(value):
            self.errors.add(target.id)
        elif isinstance(target, ast.Name) and self.is_message(value):
            self.held.add(target.id)

    def is_error(self, node: ast.AST) -> bool:
        """Whether an expression is an error, or what caused one."""
        if isinstance(node, ast.Attribute):
            return node.attr in ("__cause__", "__context__", "cause") and self.is_error(node.value)
        return isinstance(node, ast.Name) and node.id in self.errors

    def is_message(self, node: ast.AST) -> bool:
        """Whether an expression is the message of an error, or holds it."""
        if isinstance(node, ast.Name):
            return node.id in self.held
        if isinstance(node, ast.Attribute):
            return node.attr == "args" and self.is_error(node.value)
        if isinstance(node, ast.JoinedStr):
            values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            return any(self.is_error(value) or self.is_message(value) for value in values)
        if isinstance(node, ast.BinOp):
            return any(self.is_error(side) or self.is_message(side) for side in (node.left, node.right))
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_message, node.values))
        if isinstance(node, ast.IfExp):
            return self.is_message(node.body) or self.is_message(node.orelse)
        if isinstance(node, (ast.Subscript, ast.NamedExpr)):
            return self.is_message(node.value)
        if isinstance(node, ast.Call):
            given = any(self.is_error(one) or self.is_message(one) for one in node.args)
            if isinstance(node.func, ast.Attribute):
                return self.is_message(node.func.value) or (given and node.func.attr in ("join", "format"))
            return given and getattr(node.func, "id", "") in WORDED
        return False

    def is_cut(self, node: ast.AST) -> bool:
        """Whether an expression takes a message apart, or decides by a part of it."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            matched = node.func.attr in PATTERNS and any(map(self.is_message, node.args))
            return matched or (node.func.attr in CUTS and self.is_message(node.func.value))
        if isinstance(node, ast.Subscript):
            return self.is_message(node.value) and not isinstance(node.value, ast.Attribute)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if isinstance(node.ops[0], (ast.In, ast.NotIn)):
                return self.is_message(sides[1])
            return any(map(self.is_message, sides)) and any(isinstance(getattr(one, "value", 0), str) for one in sides)
        return isinstance(node, ast.Match) and self.is_message(node.subject)


def functions(tree: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, ast.AST]]:
    """Every function and method of a module with its name; the functions in one belong to it."""
    for node in tree.body:
        name = f"{inside}.{getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            yield from functions(node, name)
        else:
            yield name, node


def cuts(tree: ast.Module, module: str) -> dict[str, list[str]]:
    """The expressions that take a message apart, by the function that they are in."""
    found = {}
    for name, function in functions(tree, module):
        messages = Messages(function)
        if lines := [ast.unparse(node) for node in ast.walk(function) if messages.is_cut(node)]:
            found[name] = lines
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_message_of_an_error_is_taken_apart(module: str) -> None:
    """What a reader needs is a field of the error; only errors of libraries have nothing but words."""
    assert {name: lines for name, lines in cuts(MODULES[module], module).items() if name not in FOREIGN} == {}


def test_the_functions_that_read_messages_of_libraries_do_so() -> None:
    """And none of them reads those of this project: it leaves its own errors as they are."""
    assert set(FOREIGN) == {name for module, tree in MODULES.items() for name in cuts(tree, module)}


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


def value_of(hint: Any) -> Any:
    """A value of an argument of an error that is no default."""
    return VALUES[get_args(hint)[0] if isinstance(hint, UnionType) else hint]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_processes_with_all_its_fields(kind: type[Exception]) -> None:
    arguments = ["a message"]
    if inspect.isfunction(kind.__init__):
        hints = get_type_hints(kind.__init__)
        arguments = [value_of(hints[name]) for name in list(inspect.signature(kind.__init__).parameters)[1:]]
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
