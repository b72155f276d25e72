"""The rooms of the project stand in one order: a room imports only from rooms above it, and nothing hides an import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from pipeline.config.selection import CalibrationName
from pipeline.corpus.formats import FORMATS
from pipeline.selection.procedures import PROCEDURES
from pipeline.stages.registry import STAGES

ROOT = Path(__file__).parents[2]
ROOMS = (
    "pipeline",
    "pipeline.errors",
    "pipeline.config",
    "pipeline.corpus",
    "pipeline.store",
    "pipeline.models",
    "pipeline.training",
    "pipeline.endpoint",
    "pipeline.passes",
    "pipeline.detectors",
    "pipeline.stages",
    "pipeline.selection",
    "pipeline.audit",
    "pipeline.report",
    "pipeline.export",
    "pipeline.mark",
    "pipeline.bundle",
    "pipeline.compare",
    "pipeline.series",
    "pipeline.trial",
    "ray_jobs",
    "cluster",
    "seenset",
)
PACKAGES = ("pipeline", "ray_jobs", "cluster", "seenset")
BUDGETS = {
    "pipeline.config": 1_746,
    "pipeline.corpus": 5_317,
    "pipeline.store": 1_866,
    "pipeline.models": 2_556,
    "pipeline.training": 1_408,
    "pipeline.endpoint": 756,
    "pipeline.passes": 3_081,
    "pipeline.detectors": 2_203,
    "pipeline.stages": 3_626,
    "pipeline.selection": 5_740,
    "pipeline.audit": 10_817,
    "pipeline.report": 4_790,
    "pipeline.compare": 1_996,
    "pipeline.export": 1_268,
    "pipeline.mark": 1_147,
    "pipeline.bundle": 1_170,
    "pipeline.series": 1_392,
    "pipeline.trial": 2_733,
    "ray_jobs": 4_459,
    "cluster": 1_197,
    "seenset": 903,
}
"""Lines of each room, blank ones too. To raise one takes a commit of its own that says what was removed instead."""

KINDS = {"procedure": tuple(PROCEDURES), "calibration": get_args(CalibrationName)}
REGISTRIES = {"PROCEDURES", "CALIBRATIONS"}
HOMES = ("pipeline.selection.procedures", "pipeline.selection.calibrations")
"""Of the records of procedures and calibrations: no other module asks which one it has, but reads its record."""

FEWEST_LINES, MOST_LINES = 80, 600
"""Of a module."""

ONE_KIND_EACH = ("pipeline.corpus.formats.", "pipeline.detectors.", "pipeline.selection.procedures.")
"""Packages whose modules register one kind each, which may be short."""

SHORT = {
    "pipeline.mark.paraphrases": "loads a model, and the rest of the package none",
    "pipeline.passes.statistics": "what detectors name of a pass, without torch",
    "pipeline.trial.starter": "sentences of a configuration, which trial.config must not hold",
}
"""Other modules that are shorter, and why; a module that leaves this table never returns to it."""

WITHOUT_SENTENCES = ("pipeline.audit", "pipeline.compare", "pipeline.export", "pipeline.series", "pipeline.trial")
"""Packages whose sentences `pipeline.report.wording` holds."""

UNWORDED = {
    "pipeline.trial.starter",  # comments of a configuration that `seenset init` writes
}
"""Modules of these packages that still hold sentences; a module that leaves this set never returns to it."""

FEWEST_WORDS = 4
NO_SENTENCES = r"(Error|Field|Option|Argument|\bread_record)$"
"""Calls whose arguments are no sentences on an answer: of exceptions, of fields and options, and of `read_record`,
which ends its refusal with the remedy that it is given."""

LAZY = {
    "ray_jobs.cli",
    "ray_jobs.commands",
    "ray_jobs.terminal",
}
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


WORDING = "pipeline.report.wording."
"""Each module of it stands in the room of the lowest module that it imports: a room above the report takes from it what
needs only numbers, or records of that room and of those above it."""


def room_of(module: str) -> int:
    parts = module.split(".")
    if module.startswith(WORDING):
        return min(
            ROOMS.index("pipeline.report"), max((room_of(other) for other, _ in imports(MODULES[module])), default=0)
        )
    return max(i for i, room in enumerate(ROOMS) if parts[: room.count(".") + 1] == room.split("."))


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_from_rooms_above_it(module: str) -> None:
    upwards = [f"line {line}: {other}" for other, line in imports(MODULES[module]) if room_of(other) > room_of(module)]
    assert not upwards


def test_no_circle_of_modules() -> None:
    graph = {module: {other for other, _ in imports(tree)} - {module} for module, tree in MODULES.items()}
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
    """`procedure` or `calibration` where a name, attribute or key of an expression says that its value is one."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return kind_held_by(node.value)
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    held = getattr(node, name) if name else getattr(getattr(node, "slice", None), "value", None)
    return held if isinstance(held, str) and held in KINDS else None


def is_record(node: ast.AST) -> bool:
    """Whether an expression is, by its name, the record of a procedure or calibration, such as BH."""
    return (
        isinstance(node, ast.Name) and node.id.isupper() and any(node.id.lower() in names for names in KINDS.values())
    )


def kinds_compared(tree: ast.AST) -> Iterator[int]:
    """Lines that compare a procedure or calibration with a name, a constant or another one, or choose by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if isinstance(node.ops[0], (ast.In, ast.NotIn)) and literals(node.left):
                operands = node.comparators  # a key of a mapping is no kind
            named = any(literals(operand) & {*names} for operand in operands for names in KINDS.values())
            constant = any(
                getattr(operand, "id", "a").isupper() and operand.id not in REGISTRIES for operand in operands
            )
            held = [operand for operand in operands if kind_held_by(operand)]
            other = constant or any(map(literals, operands)) or len(held) > 1
            same = isinstance(node.ops[0], (ast.Is, ast.IsNot)) and any(map(is_record, operands))
            if named or same or (held and other):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith") and kind_held_by(node.func.value):
                yield node.lineno
        elif isinstance(node, ast.Match) and kind_held_by(node.subject):
            yield node.lineno
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if any(len(keys & {*names}) > 1 for names in KINDS.values()):
                yield node.lineno


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(HOMES)])
def test_no_procedure_or_calibration_is_compared_outside_its_home(module: str) -> None:
    assert list(kinds_compared(MODULES[module])) == []


@pytest.mark.parametrize(
    "code",
    [
        'selection.procedure == "a plugin"',
        'row["calibration"] != "pooled"',
        'name in ("td4eval", "adadetect")',
        "selection.procedure in FUSING",
        'match selection.procedure:\n    case "ktd":\n        pass',
        '{"by": 1, "ebh": 2}[name]',
        "strict.procedure == summary.procedure",
        "summary.procedure != self.procedure.name",
        "inner is BH",
        'procedure.startswith("k")',
    ],
)
def test_a_comparison_of_kinds_is_noticed(code: str) -> None:
    assert list(kinds_compared(ast.parse(code))) == [1]


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("pipeline.corpus.formats")])
def test_only_the_formats_know_one_from_another(module: str) -> None:
    """What differs between formats is a field of `Format`: nothing else compares a format with a literal."""
    names = {form.name for form in FORMATS.values()}
    compared = []
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            literals = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            of_format = any(getattr(side, "attr", getattr(side, "id", None)) == "format" for side in sides)
            if literals & names or (of_format and literals):
                compared.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not compared


STAGE_NAMES = {kind.name for kind in STAGES}


def is_of_stage(node: ast.AST) -> bool:
    """Whether an expression is, by its name, a stage or an attribute of one."""
    held = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    named = held is not None and getattr(node, held).lower() == "stage"
    return named or (isinstance(node, ast.Attribute) and is_of_stage(node.value))


def stages_compared(tree: ast.AST) -> Iterator[int]:
    """Lines that ask which stage there is: by its name, its kind or its settings, or by a table of names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            named = any(is_of_stage(operand) for operand in operands) and any(map(literals, operands))
            if named or any(getattr(operand, "id", "") in ("SCORING", "KIND") for operand in operands):
                yield node.lineno
        elif isinstance(node, ast.Match) and is_of_stage(node.subject):
            yield node.lineno
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            prefixes = {text.rstrip("/") for argument in node.args for text in literals(argument)}
            if (called == "startswith" and prefixes & STAGE_NAMES) or (
                called == "isinstance" and any(isinstance(one, ast.Attribute) and is_of_stage(one) for one in node.args)
            ):
                yield node.lineno
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & STAGE_NAMES) > 1:
                yield node.lineno


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"pipeline.stages"}))
def test_no_stage_is_asked_which_one_it_is(module: str) -> None:
    """What differs between stages is in the record of each, and in the columns of its rows."""
    assert list(stages_compared(MODULES[module])) == []


@pytest.mark.parametrize(
    "code",
    [
        'stage.name == "score"',
        'status.stage != "score"',
        "written.stage == SCORING",
        'earlier.name.startswith("sample/")',
        "isinstance(stage.settings, LogProbSettings)",
        '{"sample": 1, "log_probs": 2}[name]',
    ],
)
def test_a_comparison_of_stages_is_noticed(code: str) -> None:
    assert list(stages_compared(ast.parse(code))) == [1]


def sentences(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings of four or more words that a user may read; placeholders are no words."""
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return  # a refusal, a docstring
    if isinstance(node, ast.Call) and re.search(NO_SENTENCES, ast.unparse(node.func)):
        return
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = " ".join(str(part.value) for part in parts if isinstance(part, ast.Constant) and part.kind is None)
        if sum(bool(re.search("[A-Za-z]", word)) for word in text.split()) >= FEWEST_WORDS:
            yield node.lineno, text
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from sentences(child)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(WITHOUT_SENTENCES) and m not in UNWORDED])
def test_what_a_user_reads_of_an_answer_is_worded_in_the_report(module: str) -> None:
    """The modules that compute hold numbers; `pipeline.report.wording` holds the sentences."""
    assert [f"line {line}: {text}" for line, text in sentences(MODULES[module])] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('"""A docstring of four words."""', 0),
        ('lines.append("one two three four")', 1),
        ('lines.append(f"{one} of {two} are wrong, {three}")', 0),
        ('lines.append(f"at most {wrong} of these are wrong")', 1),
        ('raise UserError(f"one two three four {five}")', 0),
        ('x: int = Field(1, description="one two three four")', 0),
        ('{"key": "one two " "three four"}', 1),
    ],
)
def test_a_sentence_in_a_module_that_computes_is_noticed(code: str, found: int) -> None:
    assert len(list(sentences(ast.parse(code)))) == found


def test_no_room_is_forgotten() -> None:
    found = {
        ".".join(module.split(".")[:2]) if module.startswith("pipeline.") else module.split(".")[0]
        for module in MODULES
    }
    assert found <= set(ROOMS)


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_its_budget_of_lines(room: str) -> None:
    files = sorted((ROOT / room.replace(".", "/")).rglob("*.py"))
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) <= BUDGETS[room]


def test_every_room_has_a_budget_and_no_module_is_too_long() -> None:
    assert set(BUDGETS) == set(ROOMS) - {"pipeline", "pipeline.errors"}
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lengths = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_a_module_is_not_too_short() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not path.stem.startswith("__")]
    short = {name_of(path) for path in files if path.read_text(encoding="utf-8").count("\n") < FEWEST_LINES}
    assert {name for name in short if not name.startswith(ONE_KIND_EACH)} == set(SHORT)


def test_the_page_on_the_architecture_states_the_budgets() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    stated = re.findall(r"^( {2}|)(\w+)/ +([\d,]+)  ", page, re.MULTILINE)
    rooms = {("pipeline." if inner else "") + name: int(lines.replace(",", "")) for inner, name, lines in stated}
    assert rooms == BUDGETS
