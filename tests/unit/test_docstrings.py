"""Docstrings name what there is: their arguments are parameters, and the names that they quote are in the code."""

import ast
import keyword
import re
from collections.abc import Iterator

import pytest
from test_house import MODULES

FOREIGN = {
    "RowGroupMetaData": "pyarrow",
    "abort": "libc",
    "rope_theta": "settings of transformers",
    "save_to_disk": "datasets",
}
"""Quoted names of other programs, and whose they are."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def stated_arguments(text: str) -> list[str]:
    """The names of the section `Args` of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return [] if section is None else re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    several = [one for one in (given.vararg, given.kwarg) if one is not None]
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("module", MODULES)
def test_the_arguments_of_a_docstring_are_the_parameters(module: str) -> None:
    differing = {
        node.name: (stated, parameters(node))
        for node, text in documented(MODULES[module])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (stated := stated_arguments(text))
        and stated != parameters(node)
    }
    assert differing == {}


def names_in(tree: ast.Module) -> Iterator[str]:
    """The names of the code of a module, without its docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value.strip("-.{}()/")  # a key, a column, an option


NAMES = {name for tree in MODULES.values() for name in names_in(tree)}
NAMES |= {part for module in MODULES for part in module.split(".")} | set(FOREIGN)


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_quotes_names_that_are_in_the_code(module: str) -> None:
    quoted = {name for _, text in documented(MODULES[module]) for name in re.findall(r"`([A-Za-z_][\w.]*)`", text)}
    quoted = {name for name in quoted if not keyword.iskeyword(name) and not name.endswith((".json", ".css"))}
    assert {name for name in quoted if not set(filter(None, name.split("."))) <= NAMES} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_quotes_modules_by_their_place(module: str) -> None:
    quoted = {name for _, text in documented(MODULES[module]) for name in re.findall(r"`(pipeline\.[\w.]+)`", text)}
    homeless = {name for name in quoted if name not in MODULES and name.rpartition(".")[0] not in MODULES}
    assert homeless == set()
