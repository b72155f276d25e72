"""Which small errors the tests catch: operators and constants are changed at random, one at a time, and tests run.

`python -m benchmarks.mutation` prints one JSON line: how many changes (mutants) were caught, and those that survived.
Places are drawn with a seed, equally many from `pipeline/selection`, `pipeline/passes`, `pipeline/detectors` and
`pipeline/stages`. Each mutant is tried in a copy of the sources by the test files whose imports reach the changed
module by the fewest steps. With `--log FILE` finished mutants are kept, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("selection", "passes", "detectors", "stages")
TESTS = ("golden", "unit", "statistical")
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Kind of an operator -> how it is written, and what takes its place."""

LIMIT = 1200.0
"""Seconds of the tests of one mutant; one that takes longer, such as a loop without an end, counts as caught."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line."""

    path: str  # of the module, below the root
    line: int
    start: int  # of the changed characters in the line
    end: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a mutant."""

    mutant: Mutant
    caught: bool
    by: str  # the first test that failed


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    lines, name = source.splitlines(), str(path.relative_to(ROOT))
    found = []
    for left, right, kind in _operators(ast.parse(source)):
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            before, after = OPERATORS[kind]
            start = left.end_col_offset + between.find(before)
            if before in between:
                found.append(Mutant(name, right.lineno, start, start + len(before), before, after))
    for number, value in _numbers(ast.parse(source)):
        before = ast.get_source_segment(source, number) or ""
        after = repr(value + 1) if isinstance(value, int) else repr(value * 1.5 + 0.1)
        end = number.end_col_offset or 0
        found.append(Mutant(name, number.lineno, number.col_offset, end, before, after))
    ascii_lines = (mutant for mutant in found if lines[mutant.line - 1].isascii())  # offsets count bytes
    return sorted(ascii_lines, key=lambda mutant: (mutant.line, mutant.start))


def _operators(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, type[ast.AST]]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare):
            terms = pairwise([node.left, *node.comparators])
            yield from ((*pair, type(op)) for pair, op in zip(terms, node.ops, strict=True) if type(op) in OPERATORS)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield node.left, node.right, type(node.op)
        elif isinstance(node, ast.BoolOp):
            yield from ((*pair, type(node.op)) for pair in pairwise(node.values))


def _numbers(tree: ast.AST) -> Iterator[tuple[ast.Constant, float]]:
    for node in _code(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node, node.value


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
    """The test files that reach a module by the fewest imports; those named after it first."""
    reaching = {test: reached[ROOT / path] for test, reached in steps.items() if ROOT / path in reached}
    stem = Path(path).stem
    order = sorted(reaching, key=lambda test: (stem not in test.stem, reaching[test], str(test)))
    return [str(test.relative_to(ROOT)) for test in order[:most]]


def tried(mutant: Mutant, copy: Path, tests: Sequence[str]) -> Outcome:
    """Run tests on a copy of the sources with one mutant, until the first fails."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.start] + mutant.after + line[mutant.end :]
    path.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome(mutant, True, f"no end within {LIMIT:.0f} s")
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Outcome(mutant, done.returncode != 0, failed[0].split(" - ")[0] if failed else "")


def drawn(count: int, seed: int) -> list[Mutant]:
    """So many mutants, one package after the other."""
    rng = random.Random(seed)
    chosen = []
    for package in PACKAGES:
        every = [one for path in sorted((ROOT / "pipeline" / package).rglob("*.py")) for one in mutants_of(path)]
        chosen.append(rng.sample(every, -(-count // len(PACKAGES))))
    return [one for row in zip(*chosen, strict=True) for one in row][:count]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=24, help="test files that try a mutant, at most")
    parser.add_argument("--log", type=Path, help="file of finished mutants, one JSON object a line")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    if arguments.log is not None and arguments.log.exists():
        kept = map(json.loads, arguments.log.read_text(encoding="utf-8").splitlines())
        outcomes = [Outcome(Mutant(**one["mutant"]), one["caught"], one["by"]) for one in kept]
    known = {outcome.mutant: outcome for outcome in outcomes}
    tests = [path for kind in TESTS for path in sorted((ROOT / "tests" / kind).glob("test_*.py"))]
    steps = {test: _steps(test) for test in tests}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "main"
        ignored = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        copy.mkdir()
        subprocess.run(["tar", "x"], cwd=copy, input=ignored, check=True)
        for mutant in drawn(arguments.mutants, arguments.seed):
            outcome = known.get(mutant) or tried(mutant, copy, nearest_tests(mutant.path, arguments.files, steps))
            results.append(outcome)
            if mutant not in known and arguments.log is not None:
                with arguments.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(asdict(outcome)) + "\n")
            place = f"{mutant.path}:{mutant.line} {mutant.before} -> {mutant.after}"
            print(f"{place}: {outcome.by if outcome.caught else 'survived'}", file=sys.stderr, flush=True)
    survivors = [asdict(outcome.mutant) for outcome in results if not outcome.caught]
    print(json.dumps({"mutants": len(results), "caught": len(results) - len(survivors), "survivors": survivors}))


if __name__ == "__main__":
    main()
