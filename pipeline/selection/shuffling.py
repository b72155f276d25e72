"""The shuffle check: whether published orders and versions look drawn at random, from their texts alone.

No score is read. If every published order or version was drawn uniformly and independently, each test is exact, and all
of them together contradict an honest draw with a probability of at most 2e-6 (Bonferroni within each of two sets).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.corpus.draw_features import (
    ASCENDING,
    DESCENDING,
    EXTREMES,
    FURTHER,
    LETTER,
    NUMBER,
    ORDERED,
    STATED,
    STYLES,
    TEXT,
    UNKNOWN,
    names_answers,
)
from pipeline.selection.version_draws import DrawTable, binomial_tail, largest_cell

LEVEL = 1e-6
"""Largest probability with which each set of tests contradicts an honest draw."""

LEAST_DOCUMENTS = 10
"""Fewest documents of a test."""

MOST_IN_ORDER = 7
"""Most texts all of whose orders have codes of their own."""

FEWEST_NAMED, SHARE_NAMED, SHARE_STATED = 3, 0.5, 0.1
"""Fewest items, and their share, in which a column, or the end of one, names an option."""

_DIRECTIONS = ((ASCENDING, "ascend"), (DESCENDING, "descend"))
_BY = {LETTER: "letter", NUMBER: "number", TEXT: "text", STATED: "letter or number"}
_MOST = ("largest", "smallest"), ("most", "fewest")
_STANDING_OUT = [
    *(f"is {end} by code points" for end in ("last", "first")),
    *(f"alone has the {end} {by}" for by in EXTREMES for end in _MOST[by not in ("length", "first number")]),
]

_STYLED = [f"alone has {some} {by}" for by in STYLES for some in ("some", "no")]

Say = Callable[[int, int, int, int], str]
"""(cell, cells, count, documents) -> what stands where, in words."""


@dataclass(frozen=True, slots=True)
class DrawTest:
    """A test of honest draws."""

    about: str  # what stands where, with the count, such as "options ascend by length in 40 of 41 items"
    documents: int
    p_value: float
    first: bool  # whether it is of the first set of tests, whose level the others do not share


@dataclass(frozen=True, slots=True, eq=False)
class NamingColumn:
    """A column that names one option of most items."""

    name: str  # empty: the ends of columns of the template, such as "Answer: B"
    by: str  # letter, number or text
    items: int  # items in which it names an option
    places: np.ndarray  # int64, (documents,): place of the option, UNKNOWN for none
    in_template: bool  # whether versions hold it
    sure: bool = True  # False: small numbers in a column whose name says nothing

    @property
    def states_place(self) -> bool:
        """Whether versions state the place of the option as published, which does not move with the options."""
        return self.in_template and self.sure and self.by != _BY[TEXT]


@dataclass(frozen=True, slots=True)
class DrawCheck:
    """The shuffle check of some documents."""

    documents: int
    tests: Sequence[DrawTest] = ()
    naming: Sequence[NamingColumn] = ()

    def failed(self) -> list[DrawTest]:
        """The tests that contradict an honest draw, the smallest p-value first."""
        failures = [test for test in self.tests if test.p_value < self.limit(test.first)]
        return sorted(failures, key=lambda test: test.p_value)

    def limit(self, first: bool) -> float:
        """The p-value below which a test of a set contradicts an honest draw."""
        return LEVEL / max(1, sum(test.first == first for test in self.tests))


def check_draws(table: DrawTable | None, drawn_first: bool = False, template: Collection[str] = ()) -> DrawCheck:
    """The shuffle check of documents with independent draws.

    A feature takes part with the documents that it orders (all values are distinct), or of which one text alone has the
    most or the least of it; 10 at least. The first set of tests: the number of items that ascend, or descend, by code
    points, length and first number, with and without their marks; the place of the option that a column names; and the
    index of the published version. The second set: the most frequent order by a feature, orders by how options end and
    by where the other columns hold them, the option or version that stands out, and rows that ascend or descend.

    Args:
        table: features of the documents; None for none.
        drawn_first: whether the drawn version was written first, so that indices show nothing.
        template: columns of the template of items.
    """
    if table is None:
        return DrawCheck(0)
    naming = naming_columns(table, template)
    tests: list[DrawTest] = []
    if table.permuted:
        tests += [*_tests_of_orders(table), *_tests_of_answers(table, naming), *_tests_of_options(table)]
    elif table.orders.shape[1]:
        tests += _tests_of_orders(table)
    else:
        if not drawn_first:
            tests += _tests_of_indices(table)
        tests += _tests_of_versions(table)
    return DrawCheck(len(table.ids), tests, naming)


def _tests_of_orders(table: DrawTable) -> Iterator[DrawTest]:
    """The tests of the published orders of options or rows."""
    what, noun = ("options", "items") if table.permuted else ("rows", "documents")
    columns, size = list(table.orders.T), len(ORDERED)
    named = [(what, by, codes) for by, codes in zip(ORDERED, columns, strict=False)]
    if table.permuted:
        bare = columns[size : 2 * size]
        if any(not np.array_equal(*pair) for pair in zip(columns, bare, strict=False)):
            named += [(f"{what} without their marks", by, codes) for by, codes in zip(ORDERED, bare, strict=True)]
        named += [(what, by, codes) for by, codes in zip(FURTHER, columns[2 * size :], strict=True)]
    for subject, by, every in named:
        known = every != UNKNOWN
        numbers, codes = table.number[known], every[known]
        if codes.size < LEAST_DOCUMENTS:
            continue
        groups = [(int((numbers == k).sum()), 1 / math.factorial(k)) for k in np.unique(numbers).tolist()]
        for code, verb in _DIRECTIONS:
            count = int((codes == code).sum())
            about = f"{subject} {verb} by {by} in {count:,} of {codes.size:,} {noun}"
            yield DrawTest(about, codes.size, binomial_tail(groups, count), first=table.permuted and by in ORDERED)
        few = numbers <= MOST_IN_ORDER
        yield from _cell_tests(_say_order(subject, by, noun), codes[few], numbers[few], first=False, orders=True)


def _tests_of_answers(table: DrawTable, naming: Sequence[NamingColumn]) -> Iterator[DrawTest]:
    """The tests of the place of the option that a column names."""
    for column in naming:
        if column.name and column.sure:
            known = column.places != UNKNOWN
            say = _say_place(f"column {column.name!r} names")
            yield from _cell_tests(say, column.places[known], table.number[known], first=True)


def _tests_of_options(table: DrawTable) -> Iterator[DrawTest]:
    """The tests of the place of the option that stands out."""
    which = [*_STANDING_OUT, "alone occurs in the other columns", *_STYLED]
    for what, places in zip(which, table.places.T, strict=True):
        known = places != UNKNOWN
        yield from _cell_tests(_say_place(what), places[known], table.number[known], first=False)


def _tests_of_indices(table: DrawTable) -> Iterator[DrawTest]:
    """The tests of the published index: for each number of versions, and of the first and the last for all of them."""
    yield from _cell_tests(_say_index, table.published, table.sizes, first=True)
    for what, drawn in (("first", table.published == 0), ("last", table.published == table.sizes - 1)):
        about = f"the published version is the {what} of all versions"
        yield from _share_test(about, drawn, table.sizes)


def _tests_of_versions(table: DrawTable) -> Iterator[DrawTest]:
    """The tests whether the published version stands out among the versions of its document."""
    which = [*_STANDING_OUT, "alone has the most first forms", "alone has the fewest first forms", *_STYLED]
    for what, drawn in zip(which, table.places.T, strict=True):
        known = drawn != UNKNOWN
        yield from _share_test(f"the published version {what}", drawn[known] == 1, table.sizes[known])


def _share_test(about: str, drawn: np.ndarray, sizes: np.ndarray) -> Iterator[DrawTest]:
    """The test of the number of documents whose published version is the one in question; none with fewer than 10."""
    if sizes.size >= LEAST_DOCUMENTS:
        groups = [(int((sizes == k).sum()), 1 / k) for k in np.unique(sizes).tolist()]
        about = f"{about} in {int(drawn.sum()):,} of {sizes.size:,} documents"
        yield DrawTest(about, int(sizes.size), binomial_tail(groups, int(drawn.sum())), first=False)


def _cell_tests(
    say: Say, values: np.ndarray, numbers: np.ndarray, first: bool, orders: bool = False
) -> Iterator[DrawTest]:
    """The test of the fullest cell, over all numbers of cells (Bonferroni); none with fewer than 10 documents.

    Args:
        say: says what stands where.
        values: int64, (documents,): cell of each document.
        numbers: int64, (documents,): number of its cells; with `orders` of texts, whose orders are the cells.
        first: as in `DrawTest`.
        orders: whether cells are orders.
    """
    if values.size < LEAST_DOCUMENTS:
        return
    results, kinds = [], np.unique(numbers).tolist()
    for number in kinds:
        counts = np.bincount(values[numbers == number])
        cell, documents, cells = int(counts.argmax()), int(counts.sum()), math.factorial(number) if orders else number
        p_value = largest_cell(documents, cells, int(counts[cell])) * len(kinds)
        results.append((min(1.0, p_value), say(cell, cells, int(counts[cell]), documents)))
    p_value, about = min(results)
    yield DrawTest(about, int(values.size), p_value, first)


def _say_index(cell: int, cells: int, count: int, documents: int) -> str:
    return f"the published version has index {cell} of {cells} in {count:,} of {documents:,} documents"


def _say_place(which: str) -> Say:
    return lambda cell, cells, count, documents: (
        f"the option that {which} stands at place {cell + 1} of {cells} in {count:,} of {documents:,} items"
    )


def _say_order(subject: str, by: str, noun: str) -> Say:
    return lambda cell, cells, count, documents: (
        f"{subject} stand in one and the same of {cells:,} orders by {by} in {count:,} of {documents:,} {noun}"
    )


def naming_columns(table: DrawTable, template: Collection[str] = ()) -> list[NamingColumn]:
    """The columns that name an option of most items, as a column of right answers does.

    A column of the template may name it by its text or, not the same in all items, by its letter or number. In a column
    whose name says so, such as `answer` or `label`, the letter or number may be the same in all items.

    Args:
        table: features of the items.
        template: columns of the template.
    """
    naming = []
    for name, codes in table.answers.items():
        least = max(FEWEST_NAMED, (SHARE_NAMED if name else SHARE_STATED) * codes.size)
        known = codes[codes != UNKNOWN]
        if known.size < least:
            continue
        kinds, counts = np.unique(known // NUMBER, return_counts=True)
        kind = int(kinds[counts.argmax()]) * NUMBER
        values = np.where((codes >= kind) & (codes < kind + NUMBER), codes - kind, UNKNOWN)
        named = values[values != UNKNOWN]
        hinted = not name or names_answers(name)
        if named.size < least or not (hinted or kind == TEXT or np.unique(named).size > 1):
            continue
        if kind == NUMBER and named.min() > 0:  # from 1
            values = np.where(values == UNKNOWN, UNKNOWN, values - 1)
        values = np.where(values < table.number, values, UNKNOWN)
        sure = hinted or kind != NUMBER
        naming.append(NamingColumn(name, _BY[kind], int(named.size), values, not name or name in template, sure))
    return naming
