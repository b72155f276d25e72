"""The tables of the documentation say what the code does: names, defaults, guarantees and what can be selected."""

import re
from fractions import Fraction
from pathlib import Path

from pipeline.detectors import registry
from pipeline.detectors.base import detector_names
from pipeline.selection.calibrations import simes_grid
from pipeline.selection.conformal import Grid
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.step_up import dependence_factor, harmonic_bound, minimum_selectable

PAGES = Path(__file__).parents[2] / "docs"
TENTH = Fraction(1, 10)


def table(page: str, heading: str) -> list[list[str]]:
    """The rows, without the head, of the table whose head begins so."""
    lines = (PAGES / page).read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    assert rows
    return rows


def plain(cell: str) -> str:
    return cell.strip("`")


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_the_fewest_that_can_be_selected_are_those_of_the_page() -> None:
    for n, *cells in table("procedures.md", "calibration documents | of 100 audited"):
        fewest = [minimum_selectable(number(n), m, TENTH) for m in (100, 1_000, 10_000, 1_000_000)]
        assert [number(cell) for cell in cells] == fewest
    for calibration, *cells in table("procedures.md", "calibration documents | `bh`"):
        n, m = number(calibration), 1_000
        grid = Grid.uniform(n)
        factors = (Fraction(1), dependence_factor(grid, m, TENTH), harmonic_bound(m))
        fewest = [minimum_selectable(grid, m, TENTH, factor) for factor in factors]
        assert [number(cell) for cell in cells] == [*fewest, minimum_selectable(simes_grid(n, TENTH), m, TENTH)]


def test_every_procedure_stands_on_the_page_with_its_guarantee() -> None:
    guarantees = {name: one.terms.guarantee for name, one in PROCEDURES.items()}
    rows = table("procedures.md", "procedure | detectors")
    for names, *_, stated in rows:
        for name in re.findall(r"`(\w+)`", names.removesuffix(", `members` only")):
            assert stated.startswith("finite-sample" if "reconformal" in names else guarantees[name]), name
    named = {name for names, *_ in rows for name in re.findall(r"`(\w+)`", names.removesuffix(", `members` only"))}
    assert named == {name for name, one in PROCEDURES.items() if one.built_in}
    for label, names, *_ in table("guarantee.md", "`guarantee`"):
        for name in re.findall(r"`(\w+)`", names.partition(" with ")[0]):
            if name != "td4eval":  # of two guarantees
                assert guarantees[name] == plain(label)


def test_every_detector_is_on_one_page_with_its_defaults() -> None:
    pages = {path.stem for path in (PAGES / "detectors").glob("*.md")} - {"index", "choosing"}
    listed = {plain(row[0].split("]")[0].strip("[")): row[2] for row in table("detectors/index.md", "family")}
    assert set(listed) == pages
    every = [name for names in listed.values() for name in re.findall(r"`(\w+)`", names)]
    assert sorted(every) == sorted({*detector_names(built_in=True)} - {"from_column"})  # a section of docs/data.md
    parsed = registry.parse_detectors(every)
    row = next(row for row in table("procedures.md", "procedure | detectors") if row[0].startswith("`ktd`"))
    assert set(re.findall(r"`(\w+)`", row[1])) == {detector.name for detector in parsed if detector.signed}
    for family, names in listed.items():
        rows = {plain(row[0].split(" (")[0]): row for row in table(f"detectors/{family}.md", "detector")}
        assert set(rows) == set(re.findall(r"`(\w+)`", names))
        for name in rows:
            (detector,) = registry.parse_detectors([name])
            if family == "samia":
                arguments = table("detectors/samia.md", "argument")
                given = {plain(argument): plain(default) for argument, default, _ in arguments}
                assert all(given.get(key, str(value)) == str(value) for key, value in detector.arguments.items()), name
                continue
            given = dict(re.findall(r"`(\w+)`: [^;]*?default `?([\w.]+)`?", rows[name][2]))
            assert given.keys() == detector.arguments.keys(), name
            for key, value in detector.arguments.items():
                assert given[key] == str(value) or float(given[key]) == value, f"{name}: {key}"
