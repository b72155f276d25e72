"""Which small errors the tests catch: operators and constants are changed at random, one at a time, and tests run.

`python -m benchmarks.mutation` prints one JSON line: how many changes (mutants) were caught, those that survived, and
those that change no result, with the reason; others are drawn in their place. Places are drawn with a seed, equally
many from `pipeline/selection`, `pipeline/passes`, `pipeline/detectors` and `pipeline/stages`. Each mutant is tried in a
copy of the sources by the test files whose imports reach the changed module by the fewest steps; those on a cluster and
the statistical ones last. A test that also fails without the mutant catches nothing. With `--log FILE` finished mutants
are kept, and the same command goes on from there.

`--trace FOLDER` runs the tests of one process once, in a quarter of an hour, and records which test executes which
line. With `--lines FOLDER` a mutant is tried first by the tests that execute its line.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("selection", "passes", "detectors", "stages")
FIRST, LAST = ("golden", "unit", "contract"), ("ray", "statistical")
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Operator -> how it is written, and what takes its place."""

NUMBER = "a number"
"""Any change of a number of the line."""

EQUIVALENT = ROOT / "benchmarks/equivalent_mutants.jsonl"
"""Changes that no result shows, each with the module, the line, the change and the reason."""

LIBRARIES = ("numpy", "scipy.stats", "pyarrow.parquet", "pydantic", "torch", "transformers", "sklearn", "hypothesis")
"""Imported once; each mutant is tried in a fork, which has them already."""

TEST_LIMIT = 240.0
"""Seconds of one test; one that takes longer, such as a loop without an end, fails."""

LIMIT = 400.0
"""Seconds of the tests of one mutant, which has survived when they are over."""

MOST_TESTS = 200
"""Tests that execute its line which try a mutant, before the nearest test files."""

SLOW_FILES = 2
"""The nearest test files, of which the slow tests try what no other test catches: of kernels that are interpreted."""


@cache
def equivalent_mutants() -> dict[tuple[str, str, str], str]:
    """(module, line, change) -> why no result can show the change."""
    entries = [json.loads(line) for line in EQUIVALENT.read_text(encoding="utf-8").splitlines()]
    for entry in entries:
        if entry["line"] not in (ROOT / entry["module"]).read_text(encoding="utf-8"):
            sys.exit(f"{EQUIVALENT.name}: {entry['module']} has no line {entry['line']}: remove the entry")
    return {(entry["module"], entry["line"], entry["change"]): entry["reason"] for entry in entries}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line."""

    path: str  # of the module, below the root
    line: int
    start: int  # of the changed characters in the line
    end: int
    before: str
    after: str

    @property
    def equivalent(self) -> str | None:
        """Why no result can show it; None where one can."""
        line = (ROOT / self.path).read_text(encoding="utf-8").splitlines()[self.line - 1]
        changes = [f"{self.before} -> {self.after}", *([NUMBER] if self.before[0].isdigit() else [])]
        keys = ((self.path, text.strip(), change) for text in (line, line.split("  # ")[0]) for change in changes)
        reasons = equivalent_mutants()
        return next((reasons[key] for key in keys if key in reasons), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a mutant."""

    mutant: Mutant
    caught: bool
    by: str  # the first test that failed


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    lines, name, tree = source.splitlines(), str(path.relative_to(ROOT)), ast.parse(source)
    every = []
    for left, right, kind in _operators(tree):
        before, after = SWAPS[kind]
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            start = left.end_col_offset + between.find(before)
            if before in between:
                every.append(Mutant(name, right.lineno, start, start + len(before), before, after))
    for node in _code(tree):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            every.append(Mutant(name, node.lineno, node.col_offset, node.col_offset + len("not "), "not ", ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and type(node.value) is not bool:
            before = ast.get_source_segment(source, node) or ""
            after = repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 + 0.1)
            every.append(Mutant(name, node.lineno, node.col_offset, node.end_col_offset or 0, before, after))
    ascii_lines = (mutant for mutant in every if lines[mutant.line - 1].isascii())  # offsets count bytes
    return sorted(ascii_lines, key=lambda mutant: (mutant.line, mutant.start))


def _operators(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, type[ast.AST]]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare):
            terms = pairwise([node.left, *node.comparators])
            yield from ((*pair, type(op)) for pair, op in zip(terms, node.ops, strict=True))
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield node.left, node.right, type(node.op)
        elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
            yield node.target, node.value, type(node.op)
        elif isinstance(node, ast.BoolOp):
            yield from ((*pair, type(node.op)) for pair in pairwise(node.values))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide what is computed: no annotations, messages, or formats of them."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Raise | ast.JoinedStr):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _code(node)


@cache
def _imports(path: Path) -> frozenset[Path]:
    """The modules of the project that a module imports."""
    names, source = set(), path.read_text(encoding="utf-8")
    if "iter_modules" in source:  # a registry imports the modules beside it
        names |= {".".join(one.relative_to(ROOT).with_suffix("").parts) for one in path.parent.glob("*.py")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = (ROOT.joinpath(*name.split(".")) for name in names)
    return frozenset(one for file in files for one in (file.with_suffix(".py"), file / "__init__.py") if one.exists())


def _steps(test: Path) -> Mapping[Path, int]:
    """Module -> by how many imports a test file reaches it."""
    steps, at = {test: 0}, [test]
    while at:
        reached = dict.fromkeys(other for one in at for other in sorted(_imports(one)))
        step = steps[at[0]] + 1
        at = [one for one in reached if one not in steps]
        steps |= dict.fromkeys(at, step)
    return steps


def nearest_tests(path: str, most: int, steps: Mapping[Path, Mapping[Path, int]]) -> list[str]:
    """The test files that reach a module by imports: those that write most of its names, then by the fewest imports."""
    reaching = {test: reached[ROOT / path] for test, reached in steps.items() if ROOT / path in reached}
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    written = {test: _words(test) & (names | {Path(path).stem}) for test in reaching}
    order = sorted(reaching, key=lambda test: (-len(written[test]), reaching[test], len(steps[test]), str(test)))
    first = [test for test in order if test.parent.name in FIRST]
    last = [test for kind in LAST for test in [one for one in order if one.parent.name == kind][: most // 4]]
    return [str(test.relative_to(ROOT)) for test in first[:most] + last]


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


class _Lines:
    """A plugin of pytest that records the lines which each test executes, and its seconds."""

    def __init__(self) -> None:
        from coverage import Coverage  # not needed to try mutants

        self.seconds: dict[str, float] = {}
        self.coverage = Coverage(data_file=None, source=["pipeline"], messages=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        begun = time.monotonic()
        outcome = yield
        self.seconds[item.nodeid] = time.monotonic() - begun
        return outcome

    def write(self, path: Path) -> None:
        """Write {"seconds": {test: seconds}, "lines": {module: {line: [tests]}}}."""
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(ROOT))] = {line: [*filter(None, some)] for line, some in by_line.items()}
        path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}), encoding="utf-8")


def trace(test: Path, folder: Path) -> None:
    """Record which tests of a file execute which lines, in a fork; a file that was recorded before is not run again."""
    path = folder / f"{test.parent.name}-{test.stem}.json"

    def record() -> None:
        lines = _Lines()
        pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", str(test)], plugins=[lines])
        lines.write(path)

    if not path.exists():
        process = multiprocessing.get_context("fork").Process(target=record)
        process.start()
        process.join()


def tests_by_line(folder: Path) -> dict[tuple[str, int], list[str]]:
    """(module, line) -> the tests that execute it, the quickest first."""
    tests: dict[tuple[str, int], set[str]] = {}
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        seconds |= recorded["seconds"]
        for module, lines in recorded["lines"].items():
            for line, some in lines.items():
                tests.setdefault((module, int(line)), set()).update(some)
    return {place: sorted(some, key=lambda test: (seconds[test], test)) for place, some in tests.items()}


def first_failure(copy: Path, tests: Sequence[str], options: Sequence[str], marks: str = "not slow") -> str | None:
    """The first test that fails in a copy of the sources, in forks of this process; None where none does."""
    output, end = copy.parent / "output", time.monotonic() + LIMIT
    for _, some in groupby(tests, key=lambda test: test.split("/")[:2]):  # two folders may have files of one name
        arguments = (copy, output, ["-m", marks, *options, *some])
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=arguments)
        process.start()
        process.join(end - time.monotonic())
        if process.pid is not None and process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None
        if process.exitcode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            failed = [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
            return [*failed, f"pytest ended with {process.exitcode}"][0]
    return None


def _pytest(copy: Path, output: Path, arguments: Sequence[str]) -> None:
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), *(one for one in sys.path if Path(one).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(copy)
    sys.modules.pop("benchmarks", None)
    importlib.invalidate_caches()
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        fixed = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT:.0f}"]
        code = int(pytest.main([*fixed, *arguments]))
        sys.stdout.flush()
        os._exit(code)


def tried(mutant: Mutant, copy: Path, tests: Sequence[str], executing: Sequence[str], unfit: list[str]) -> Outcome:
    """Run tests on a copy of the sources with one mutant, until the first fails that passes without it."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.start] + mutant.after + line[mutant.end :]
    while True:
        path.write_text("".join(lines), encoding="utf-8")
        options = [f"--deselect={test}" for test in unfit]
        failed = first_failure(copy, sorted(executing[:MOST_TESTS]), options) or first_failure(copy, tests, options)
        failed = failed or first_failure(copy, tests[:SLOW_FILES], options, "slow")
        path.write_text(source, encoding="utf-8")
        if failed is None or failed in unfit or not failed.startswith("tests/"):
            return Outcome(mutant, failed is not None, failed or "")
        if first_failure(copy, [failed], [], "slow or not slow") is None:
            return Outcome(mutant, True, failed)
        unfit.append(failed)


def drawn(count: int, seed: int) -> tuple[list[Mutant], list[Mutant]]:
    """So many mutants, one package after the other, and the equivalent ones that others replace."""
    rng = random.Random(seed)
    chosen: list[list[Mutant]] = []
    equivalent: list[Mutant] = []
    for package in PACKAGES:
        every = [one for path in sorted((ROOT / "pipeline" / package).rglob("*.py")) for one in mutants_of(path)]
        rng.shuffle(every)
        taken: list[Mutant] = []
        for mutant in every:
            if len(taken) < -(-count // len(PACKAGES)):
                (equivalent if mutant.equivalent else taken).append(mutant)
        chosen.append(taken)
    return [one for row in zip(*chosen, strict=True) for one in row][:count], equivalent


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--files", type=int, default=8, help="test files that try a mutant, and a quarter of each of the last kinds"
    )
    parser.add_argument("--trace", type=Path, help="folder in which to record which test executes which line")
    parser.add_argument("--lines", type=Path, help="folder that --trace wrote, of these sources")
    parser.add_argument("--log", type=Path, help="file of finished mutants, one JSON object a line")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    if arguments.log is not None and arguments.log.exists():
        kept = map(json.loads, arguments.log.read_text(encoding="utf-8").splitlines())
        outcomes = [Outcome(Mutant(**one["mutant"]), one["caught"], one["by"]) for one in kept]
    known = {outcome.mutant: outcome for outcome in outcomes}
    tests = [path for kind in (*FIRST, *LAST) for path in sorted((ROOT / "tests" / kind).glob("test_*.py"))]
    steps = {test: _steps(test) for test in tests}
    for library in LIBRARIES:
        importlib.import_module(library)
    if arguments.trace is not None:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for test in tests:
            if test.parent.name in FIRST:
                trace(test, arguments.trace)
        return
    by_line = {} if arguments.lines is None else tests_by_line(arguments.lines)
    mutants, equivalent = drawn(arguments.mutants, arguments.seed)
    results: list[Outcome] = []
    unfit: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "main"
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        copy.mkdir()
        subprocess.run(["tar", "x"], cwd=copy, input=archive, check=True)
        for mutant in mutants:
            nearest = nearest_tests(mutant.path, arguments.files, steps)
            executing = by_line.get((mutant.path, mutant.line), [])
            outcome = known.get(mutant) or tried(mutant, copy, nearest, executing, unfit)
            results.append(outcome)
            if mutant not in known and arguments.log is not None:
                with arguments.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(asdict(outcome)) + "\n")
            place = f"{mutant.path}:{mutant.line} {mutant.before} -> {mutant.after}"
            print(f"{place}: {outcome.by if outcome.caught else 'survived'}", file=sys.stderr, flush=True)
    survivors = [asdict(outcome.mutant) for outcome in results if not outcome.caught]
    reasons = [{**asdict(mutant), "reason": mutant.equivalent} for mutant in equivalent]
    totals = {"mutants": len(results), "caught": len(results) - len(survivors)}
    print(json.dumps({**totals, "survivors": survivors, "equivalent": reasons}))


if __name__ == "__main__":
    main()
