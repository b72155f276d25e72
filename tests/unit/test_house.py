"""The rooms of the project stand in one order: a room imports only from rooms above it, and nothing hides an import."""

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
import typer

import seenset
from pipeline.config.selection import CalibrationName
from pipeline.corpus.formats import FORMATS
from pipeline.selection.procedures import PROCEDURES
from pipeline.stages.registry import STAGES
from ray_jobs.cli import app
from tests.unit.error_messages import FOREIGN, cuts

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "ray_jobs", "cluster", "seenset")
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROOMS = (
    "pipeline",
    "pipeline.errors",
    "pipeline.wording",
    *(
        ("pipeline." if inner else "") + name
        for inner, name in re.findall(r"^( {2}|)(\w+)/ {2,}\w", PAGE, re.MULTILINE)
        if name in PACKAGES or inner
    ),
)
"""In the order of the page."""

KINDS = {
    "procedure": {*PROCEDURES},
    "calibration": {*get_args(CalibrationName)},
    "format": {form.name for form in FORMATS.values()},
    "stage": {kind.name for kind in STAGES},
}
REGISTRIES = {"PROCEDURES", "CALIBRATIONS"}
HOMES = {
    "procedure": r"pipeline\.selection\.(procedures|calibrations)",
    "calibration": r"pipeline\.selection\.(procedures|calibrations)",
    "format": r"pipeline\.corpus\.formats",
    "stage": r"pipeline\.stages$",
}
"""Of the records of each kind: no other module asks which one it has, but reads its record."""

FEWEST_LINES, MOST_LINES = 80, 600
"""Of a module."""

ONE_KIND_EACH = (
    "pipeline.compare.harnesses.",
    "pipeline.checks.",
    "pipeline.corpus.formats.",
    "pipeline.detectors.",
    "pipeline.selection.procedures.",
)
"""Packages whose modules register one kind each, which may be short."""

SHORT = {
    "pipeline.mark.paraphrases": "loads a model, and the rest of the package none",
    "pipeline.passes.statistics": "what detectors name of a pass, without torch",
    "pipeline.selection.schedule": "the parts of alpha, which passes and the ledger read",
}
"""Other modules that are shorter, and why; a module that leaves this table never returns to it."""

LAZY = {"ray_jobs.cli", "ray_jobs.commands", "ray_jobs.terminal"}
"""May import in functions, which keeps `seenset --help` quick."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module of this project, line) of every import below a node, also those for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    yield alias.name, node.lineno


def room_of(module: str) -> int:
    parts = module.split(".")
    return max(i for i, room in enumerate(ROOMS) if parts[: room.count(".") + 1] == room.split("."))


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_from_rooms_above_it(module: str) -> None:
    upwards = [f"line {line}: {other}" for other, line in imports(MODULES[module]) if room_of(other) > room_of(module)]
    assert not upwards


def package_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("pipeline.") else 1])


@pytest.mark.parametrize("unit", [str, package_of], ids=["modules", "packages"])
def test_no_circle(unit: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {}
    for module, tree in MODULES.items():
        if module != "pipeline":  # its name stands in every import of a package
            others = graph.setdefault(unit(module), set())
            others |= {unit(other) for other, _ in imports(tree)} - {unit(module)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(set(MODULES) - LAZY))
def test_no_import_of_the_project_hides_in_a_function(module: str) -> None:
    hidden = [
        f"line {line}: {other}"
        for node in ast.walk(MODULES[module])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for other, line in imports(node)
    ]
    assert not hidden


def literals(node: ast.AST) -> set[str]:
    """The strings that an operand is or, as a display of several, holds."""
    values = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def kind_held_by(node: ast.AST) -> str | None:
    """The kind of which a name, attribute or key of an expression says that its value, or what it is of, is one."""
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    held = getattr(node, name) if name else getattr(getattr(node, "slice", None), "value", None)
    if isinstance(held, str) and held.lower() in KINDS:
        return held.lower()
    kind = kind_held_by(node.value) if isinstance(node, ast.Attribute) else None
    return kind if kind == "stage" or held == "name" else None


def kinds_compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, kind) of what compares a kind with a name, a constant or another one, or chooses by its name."""
    records = {name.upper() for kind in ("procedure", "calibration") for name in KINDS[kind]}
    for node in ast.walk(tree):
        kinds: list[str | None] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if isinstance(node.ops[0], (ast.In, ast.NotIn)) and literals(node.left):
                operands = node.comparators  # a key of a mapping is no kind
            texts, ids = set().union(*map(literals, operands)), {getattr(one, "id", "a") for one in operands}
            kinds += [kind for kind in KINDS if kind != "stage" and KINDS[kind] & texts]
            held = [kind for kind in map(kind_held_by, operands) if kind]
            others = len(held) > 1 or any(one.isupper() for one in ids - REGISTRIES)
            kinds += [kind for kind in held if texts or (others and kind in ("procedure", "calibration"))]
            kinds += ["stage"] * bool(ids & {"SCORING", "KIND"})
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and ids & records:
                kinds.append("procedure")
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("startswith", "endswith"):
                kinds.append(kind_held_by(getattr(node.func, "value", node.func)))
                prefixes = {text.rstrip("/") for argument in node.args for text in literals(argument)}
                kinds += ["stage"] * bool(prefixes & KINDS["stage"])
            elif called == "isinstance":
                kinds += [kind_held_by(one) for one in node.args if isinstance(one, ast.Attribute)]
        elif isinstance(node, ast.Match):
            kinds.append(kind_held_by(node.subject))
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            kinds += [kind for kind, names in KINDS.items() if len(keys & names) > 1]
        yield from ((node.lineno, kind) for kind in kinds if kind)


@pytest.mark.parametrize("module", MODULES)
def test_no_kind_is_compared_outside_its_home(module: str) -> None:
    """What differs between the kinds of a procedure, calibration, format or stage is a field of their records."""
    compared = [(line, kind) for line, kind in kinds_compared(MODULES[module]) if not re.match(HOMES[kind], module)]
    assert compared == []


def test_no_message_of_an_error_is_taken_apart() -> None:
    """What a reader needs is a field of the error; only errors of libraries have nothing but words."""
    found = {name: lines for module, tree in MODULES.items() for name, lines in cuts(tree, module).items()}
    assert {name: lines for name, lines in found.items() if name not in FOREIGN} == {}
    assert set(FOREIGN) == set(found), "a function that no longer reads the words of a library"


def test_no_room_is_forgotten_and_no_module_is_too_long_or_too_short() -> None:
    assert {re.match(r"(pipeline\.)?\w+", module)[0] for module in MODULES} <= set(ROOMS)
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name_of(path): lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
    short = {name_of(path) for path in files if lengths[path] < FEWEST_LINES and not path.stem.startswith("__")}
    assert {name for name in short if not name.startswith(ONE_KIND_EACH)} == set(SHORT)


def test_the_reading_path_is_twelve_modules_of_at_most_4000_lines() -> None:
    table = PAGE.partition("## Read these twelve modules")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| .*? \| (.*) \|$", table, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 13))
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for _, path, _ in rows}
    assert sum(text.count("\n") for text in texts.values()) <= 4_000
    named = [(path, name) for _, path, look_for in rows for name in re.findall(r"`@?(\w+)`", look_for)]
    assert len(named) > 8
    assert [(path, name) for path, name in named if not re.search(rf"\b{name}\b", texts[path])] == []


COMMANDS = {one.replace("-", "_") for one in typer.main.get_command(app).commands}  # type: ignore[attr-defined]

MOST_FUNCTION_LINES, MOST_PARAMETERS = 60, 6
"""Of a function, with its docstring; `self` is no parameter."""

SETTINGS = {
    "detector": "a parameter of a detector is a setting of the configuration",
    "triton.jit": "a kernel takes tensors, strides and compile-time constants one by one",
}
"""Decorators of functions that may have more parameters, and why; commands and public functions may too."""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def has_settings(module: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether each parameter is something that a user sets: of a detector, a command or the Python interface."""
    decorators = {ast.unparse(one).partition("(")[0] for one in function.decorator_list}
    if decorators & set(SETTINGS):
        return True
    if module in ("ray_jobs.cli", "ray_jobs.commands"):
        return function.name in COMMANDS
    return function.name in seenset.__all__


def count_parameters(given: ast.arguments) -> int:
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


@pytest.mark.parametrize("module", MODULES)
def test_a_function_is_short_and_has_few_parameters(module: str) -> None:
    long, wide = {}, {}
    for function in functions(MODULES[module]):
        if has_settings(module, function):
            continue
        if (count := count_parameters(function.args)) > MOST_PARAMETERS:
            wide[function.name] = count
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MOST_FUNCTION_LINES:
            long[function.name] = lines
    assert (long, wide) == ({}, {})


SAME_NAMES = {
    "base": "what all kinds of a package have: its name says of which",
    "registry": "the kinds of a package, found by their places",
    "audit select scoring progress": "the driver in ray_jobs, and what it carries out",
    "preflight starter": "of an audit, and of a trial or a cluster",
    "gradient knockoff paraphrase tokens": "a pass or a test, and the detector or stage that uses it",
    "joint": "the statistics of a selection under several models, and the comparison that states it",
    "ranking": "of models by a benchmark: of finished runs, and in a trial",
    "summary": "of a selection, and of a schedule of scans",
    "versions": "the procedure, and the Python interface of documents with versions",
}
"""Names of modules that several packages have, and why each reads well behind the name of its package."""


def test_a_name_of_several_modules_reads_well_with_its_package() -> None:
    names = [module.rpartition(".")[2] for module in MODULES if package_of(module) != module]
    several = {name for name in names if names.count(name) > 1}
    assert several == set(" ".join(SAME_NAMES).split())
