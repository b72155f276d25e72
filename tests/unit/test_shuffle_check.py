"""The shuffle check: what contradicts an honest draw, by which feature, and what does not."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, poisson_binom

from pipeline.config.corpus import VersionsConfig
from pipeline.config.yaml import build
from pipeline.corpus.draw_features import ASCENDING, DESCENDING, UNKNOWN, order_code
from pipeline.errors import UserError
from pipeline.plan.preflight import plan_checks
from pipeline.selection.version_draws import binomial_tail, largest_cell
from tests.helpers.made_up_items import (
    TEMPLATE,
    Row,
    draws_of_items,
    draws_of_versions,
    make_items,
    make_versions,
    name,
    plan_of,
    preview_in,
    preview_of,
    write_rows,
)
from tests.helpers.marked_runs import write_items

PERMUTED = {"permute": "choices", "template": TEMPLATE}
LETTERS = "ABCD"


def place(row: Row) -> int:
    return row["choices"].index(row["right"])


def right_first(rows: list[Row]) -> list[Row]:
    return [{**row, "choices": sorted(row["choices"], key=lambda text: text != row["right"])} for row in rows]


def changed(rows: list[Row], change: Callable[[Row], Any]) -> list[Row]:
    return [{**row, **change(row)} for row in rows]


# --- exact probabilities


def test_the_tail_of_the_poisson_binomial_is_exact() -> None:
    groups = [(5, 1 / 2), (7, 1 / 6), (30, 1 / 24), (3, 1 / 5040)]
    law = poisson_binom([chance for count, chance in groups for _ in range(count)])
    for count in range(46):
        assert binomial_tail(groups, count) == pytest.approx(law.sf(count - 1), rel=1e-9)
    assert binomial_tail([(10, 1 / 24)], 11) == 0
    assert binomial_tail([(60, 1 / 24)], 60) == pytest.approx(24.0**-60, rel=1e-9)


def test_the_p_value_of_the_fullest_cell_is_that_of_methods() -> None:
    assert largest_cell(100, 2, 70) == pytest.approx(2 * binom.sf(69, 100, 0.5))
    assert largest_cell(40, 4, 40) == pytest.approx(4 * 0.25**40)
    assert largest_cell(20, 2, 10) == 1


def test_codes_of_orders_are_one_to_one_and_ties_have_none() -> None:
    import itertools

    for size in (2, 3, 4, 5):
        codes = {order_code(order) for order in itertools.permutations(range(size))}
        assert codes == set(range(math.factorial(size)))
    assert (order_code([1, 2, 3]), order_code([3, 2, 1]), order_code([1, 1, 2])) == (ASCENDING, DESCENDING, UNKNOWN)
    assert order_code([*range(1, 9), 0]) == 2


# --- options


@pytest.mark.parametrize(
    ("feature", "key"),
    [
        ("ascend by code points", lambda text: text),
        ("ascend by length", len),
        ("ascend by first number", None),
    ],
)
@pytest.mark.parametrize("descending", [False, True])
def test_sorted_options_contradict_the_draw_by_the_feature_that_sorts_them(
    feature: str, key: Callable[[str], Any] | None, descending: bool
) -> None:
    rng = random.Random(1)
    rows = make_items(60)
    for row in rows:
        if key is None:
            numbers = sorted(rng.sample(range(2, 99), 4), reverse=descending)
            row["choices"] = [f"{number} {text}" for number, text in zip(numbers, row["choices"], strict=True)]
        else:
            row["choices"].sort(key=key, reverse=descending)
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    wanted = feature.replace("ascend", "descend") if descending else feature
    assert any(wanted in test.about for test in found.check.failed())


def test_ten_items_take_part_at_least_and_nine_contradict_nothing() -> None:
    rows = changed(make_items(10), lambda row: {"choices": sorted(row["choices"])})
    ten, nine = draws_of_items(rows), draws_of_items(rows[:9])
    assert ten.diagnostic is not None
    assert nine.diagnostic is not None
    assert (ten.diagnostic.outcome, nine.diagnostic.outcome) == ("failed", "inconclusive")
    assert "9 items can be compared, and a test takes 10" in nine.diagnostic.sentence


def test_options_of_equal_length_leave_their_item_out_of_that_feature() -> None:
    """A stable sort on the published order would take equal lengths for ascending ones."""
    rows = changed(make_items(60), lambda row: {"choices": [text[:5] for text in row["choices"]]})
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "passed"
    assert not any("by length" in test.about for test in found.check.tests)


@pytest.mark.parametrize("form", ["{}- ", "({})", "{}.", "«{}» ", r"\item[{}] ", "<td>{}</td> ", "{} | ", "{} "])
def test_marks_in_a_form_that_is_not_recognised_contradict_the_draw(form: str) -> None:
    rows = changed(
        make_items(40),
        lambda row: {"choices": [form.format(one) + text for one, text in zip(LETTERS, row["choices"], strict=True)]},
    )
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    assert "options ascend by code points in 40 of 40 items" in found.diagnostic.sentence
    assert "take these out of the options" in found.diagnostic.sentence


@pytest.mark.parametrize(
    "marks", [" (A) (B) (C) (D)", "① ② ③ ④", "A B C D", " (a):ends (b):ends (c):ends (d):ends", "¹ ² ³ ⁴"]
)
def test_marks_behind_options_contradict_the_draw(marks: str) -> None:
    """With a blank before them, without one, and with words behind them."""
    ends = [("" if marks[0] != " " else " ") + one.replace(":", " ") for one in marks.split()]
    rows = changed(
        make_items(40),
        lambda row: {"choices": [text + end for text, end in zip(row["choices"], ends, strict=True)]},
    )
    found = draws_of_items(rows)
    assert any("options ascend by last" in test.about for test in found.check.failed())


@pytest.mark.parametrize("words", ["First Second Third Fourth", "uno dos tres cuatro", "甲 乙 丙 丁"])
def test_numbering_in_words_and_scripts_without_order_contradicts_the_draw_too(words: str) -> None:
    rows = changed(
        make_items(40),
        lambda row: {"choices": [f"{one} - {text}" for one, text in zip(words.split(), row["choices"], strict=True)]},
    )
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    assert any("one and the same of 24 orders by code points" in test.about for test in found.check.failed())


PROSE: dict[str, Callable[[str, int], str]] = {
    "the last ends in a full stop, the others in a semicolon": lambda text, place: text + ";;;."[place],
    "the last ends in nothing, the others in a blank": lambda text, place: text + " " * (place < 3),
    "the first begins with a blank": lambda text, place: " " * (place == 0) + text,
    "two blanks within the last": lambda text, place: text.replace(" ", "  ") if place == 3 else text,
    "the first begins with a capital": lambda text, place: text.capitalize() if place == 0 else text.lower(),
    "the last begins with or": lambda text, place: "or " * (place == 3) + text,
    "the last begins with oder": lambda text, place: "oder " * (place == 3) + text,
}


@pytest.mark.parametrize("style", PROSE)
def test_options_that_are_written_as_a_list_in_prose_contradict_the_draw(style: str) -> None:
    """A model that has read no item prefers the published order, in which capital and full stop stand in place."""
    rows = changed(
        make_items(40), lambda row: {"choices": [PROSE[style](text, i) for i, text in enumerate(row["choices"])]}
    )
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    assert any("alone has " in test.about for test in found.check.failed())
    rng = np.random.default_rng(1)
    shuffled = draws_of_items(changed(rows, lambda row: {"choices": rng.permutation(row["choices"]).tolist()}))
    assert not shuffled.check.failed(), "the same options after an honest shuffle"


def test_names_that_are_sorted_by_surname_contradict_the_draw() -> None:
    rows = changed(make_items(40), lambda row: {"choices": sorted(row["choices"], key=lambda text: text.split()[-1])})
    found = draws_of_items(rows)
    assert any("options ascend by last word" in test.about for test in found.check.failed())


@pytest.mark.parametrize("form", ["{text} ({mark})", "{text} [{mark}]", "{text} \\textbf{{{mark}}}"])
def test_marks_behind_the_options_contradict_the_draw(form: str) -> None:
    rows = changed(
        make_items(40),
        lambda row: {"choices": [form.format(text=t, mark=m) for m, t in zip(LETTERS, row["choices"], strict=True)]},
    )
    found = draws_of_items(rows)
    assert any("options ascend by last word in 40 of 40" in test.about for test in found.check.failed())


def test_options_that_are_sorted_behind_their_marks_contradict_the_draw() -> None:
    rows = changed(
        make_items(40),
        lambda row: {"choices": [f"({m}) {text}" for m, text in zip(LETTERS, sorted(row["choices"]), strict=True)]},
    )
    found = draws_of_items(rows)
    assert found.check.failed()[0].about.startswith("options without their marks ascend by code points in 40 of 40")


RIGHT_FIRST = {
    "answer": lambda row: place(row),
    "label": lambda row: str(place(row)),
    "answerKey": lambda row: LETTERS[place(row)],
    "correct_number": lambda row: place(row) + 1,
    "gold": lambda row: row["right"],
    "labels": lambda row: [int(text == row["right"]) for text in row["choices"]],
}


@pytest.mark.parametrize("column", RIGHT_FIRST)
def test_right_answers_first_contradict_the_draw_where_a_column_names_them(tmp_path: Path, column: str) -> None:
    """The column is not in the template: it is read for the check alone."""
    honest = changed(make_items(60), lambda row: {column: RIGHT_FIRST[column](row)})
    first = changed(right_first(make_items(60)), lambda row: {column: RIGHT_FIRST[column](row)})
    for rows, outcome in ((honest, "passed"), (first, "failed")):
        rows = [{key: value for key, value in row.items() if key != "right"} for row in rows]
        shuffle = preview_of(tmp_path / "items.jsonl", rows, PERMUTED, id="id").shuffle
        assert shuffle.outcome == outcome
    assert f"the option that column '{column}' names stands at place 1 of 4 in 60 of 60 items" in shuffle.sentence


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("first", [True, False])
def test_options_and_right_answers_may_be_fields_of_an_object(tmp_path: Path, suffix: str, first: bool) -> None:
    """As in benchmarks that list texts beside a 1 among zeros, the right answer always first."""
    rows = []
    for row in right_first(make_items(40)) if first else make_items(40):
        labels = [int(text == row["right"]) for text in row["choices"]]
        mc1 = {"choices": row["choices"], "labels": labels}
        rows.append({"id": row["id"], "question": row["question"], "mc1": mc1})
    path = write_items(tmp_path, suffix, rows)
    versions = {"permute": "mc1.choices", "template": "{question}\n{mc1.choices}"}
    shuffle = preview_in(path, versions, id="id").shuffle
    assert shuffle.outcome == ("failed" if first else "passed")
    if first:
        assert "the option that column 'mc1.labels' names stands at place 1 of 4 in 40 of 40 items" in shuffle.sentence


def test_right_answers_first_contradict_the_draw_without_a_column_where_longest() -> None:
    found = draws_of_items(right_first(make_items(60)))
    assert any("has the largest length stands at place 1 of 4" in test.about for test in found.check.failed())


@pytest.mark.parametrize("column", ["answer", "answerKey", "x"])
def test_a_template_column_that_states_the_place_contradicts_an_honest_shuffle(tmp_path: Path, column: str) -> None:
    """A model that knows the answers prefers the orders in which the letter is right."""
    rows = changed(make_items(40), lambda row: {column: place(row) if column == "answer" else LETTERS[place(row)]})
    versions = {**PERMUTED, "template": f"{TEMPLATE}\n{{{column}}}"}
    shuffle = preview_of(tmp_path / "items.jsonl", rows, versions, id="id").shuffle
    assert shuffle.outcome == "failed"
    assert f"Column '{column}' of the template names an option by its" in shuffle.sentence
    assert f"leave {{{column}}} out of versions.template" in shuffle.sentence


def test_a_template_column_that_names_the_right_text_is_warned_of_and_moves_with_it(tmp_path: Path) -> None:
    versions = {**PERMUTED, "template": f"{TEMPLATE}\n{{right}}"}
    preview = preview_of(tmp_path / "items.jsonl", make_items(40), versions, id="id")
    assert preview.shuffle.outcome == "passed"
    assert preview.warnings == [
        "Column 'right' of the template names an option by its text in 40 of 40 items, as a column of right answers "
        "does: leave {right} out of versions.template."
    ]


def test_numbers_in_a_column_whose_name_says_nothing_are_warned_of(tmp_path: Path) -> None:
    rows = changed(make_items(40), lambda row: {"level": place(row)})
    preview = preview_of(tmp_path / "items.jsonl", rows, {**PERMUTED, "template": f"{TEMPLATE}\n{{level}}"}, id="id")
    assert preview.shuffle.outcome == "passed"
    assert preview.warnings[0].startswith("Column 'level' of the template holds the number of an option in 40 of 40")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda row: f"Answer: {LETTERS[place(row)]}", "state an option by its letter or number"),
        (lambda row: f"The correct answer is ({LETTERS[place(row)]}), as you see.", "state an option by its letter"),
        (lambda row: "; ".join(row["choices"]), "options ascend by first occurrence in the other columns"),
    ],
)
def test_a_question_that_states_the_published_order_contradicts_the_draw(
    said: Callable[[Row], str], words: str
) -> None:
    rows = changed(make_items(40), lambda row: {"question": f"{row['question']} {said(row)}"})
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    assert words in found.diagnostic.sentence


@pytest.mark.parametrize(
    "said", [lambda row: row["right"], lambda row: "; ".join(sorted(row["choices"])), lambda row: "Answer in a letter."]
)
def test_a_question_that_holds_options_in_no_published_order_contradicts_nothing(said: Callable[[Row], str]) -> None:
    rows = changed(make_items(60), lambda row: {"question": f"{row['question']} {said(row)}"})
    found = draws_of_items(rows)
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "passed"


# --- marks of a whole collection


def with_marks(rows: list[Row]) -> list[Row]:
    return changed(
        rows, lambda row: {"choices": [f"({m}) {text}" for m, text in zip(LETTERS, row["choices"], strict=True)]}
    )


def test_one_mark_in_100_out_of_place_leaves_its_item_out_and_two_leave_all_out() -> None:
    rows = [*with_marks(make_items(100)), *changed(make_items(50, seed=1), lambda row: {"id": f"u{row['id']}"})]
    for count, used in ((0, 150), (1, 149), (2, 50)):
        some = changed(rows, lambda row: {"choices": list(row["choices"])})
        for row in some[:count]:
            row["choices"].reverse()
        found = draws_of_items(some)
        assert found.check.documents == used
        assert found.diagnostic is not None
        assert found.diagnostic.outcome == "passed"
        if count:
            assert f"{count} of 100 items with marks such as (A)" in found.diagnostic.sentence


def test_plan_states_how_many_items_lose_marks_and_prints_three(tmp_path: Path) -> None:
    rows = [*with_marks(make_items(12)), *changed(make_items(5, seed=1), lambda row: {"id": f"u{row['id']}"})]
    lines = preview_of(tmp_path / "items.jsonl", rows, PERMUTED, id="id").lines
    assert lines[0].startswith("12 of 17 items have marks of places before their options, which stay in place")
    assert len(lines) == 4
    assert all(" -> " in line and "(A) " in line for line in lines[1:])


def test_marks_none_keeps_marks_with_their_options_and_the_check_still_reads_both(tmp_path: Path) -> None:
    preview = preview_of(tmp_path / "items.jsonl", with_marks(make_items(40)), {**PERMUTED, "marks": "none"}, id="id")
    assert preview.shuffle.outcome == "failed"
    assert preview.lines == []
    names = ["A. Smith", "B. Jones", "C. Brown"]
    rng = random.Random(0)
    rows = [{**row, "choices": [f"{n} {name(rng)}" for n in rng.sample(names, 3)]} for row in make_items(40)]
    assert (
        preview_of(tmp_path / "names.jsonl", rows, {**PERMUTED, "marks": "none"}, id="id").shuffle.outcome == "passed"
    )


# --- versions of one's own


@pytest.mark.parametrize(
    ("published", "words"),
    [
        (lambda rng, texts: 0, "is the first of all versions in 200 of 200 documents"),
        (lambda rng, texts: 5, "has index 5 of 6 in 200 of 200"),
        (lambda rng, texts: max(range(6), key=lambda i: len(texts[i])), "alone has the largest length"),
        (lambda rng, texts: min(range(6), key=lambda i: len(texts[i])), "alone has the smallest length"),
        (lambda rng, texts: min(range(6), key=texts.__getitem__), "is first by code points"),
        (lambda rng, texts: max(range(6), key=texts.__getitem__), "is last by code points"),
    ],
)
def test_a_published_version_that_text_or_index_betrays_contradicts_the_draw(
    published: Callable[[random.Random, list[str]], int], words: str
) -> None:
    found = draws_of_versions(make_versions(200, published))
    assert found.diagnostic is not None
    assert found.diagnostic.outcome == "failed"
    assert words in found.diagnostic.sentence


def test_a_published_original_among_copies_without_punctuation_contradicts_the_draw() -> None:
    rng, rows = random.Random(2), make_versions(60, lambda rng, texts: rng.randrange(6))
    for row in rows:
        row["versions"][row["index"]] += f", \N{LEFT DOUBLE QUOTATION MARK}{name(rng)}\N{RIGHT DOUBLE QUOTATION MARK}"
    found = draws_of_versions(rows)
    assert any("alone has the most non-ASCII characters" in test.about for test in found.check.failed())


def test_drawn_first_lifts_the_test_of_the_index_alone() -> None:
    rows = make_versions(200, lambda rng, texts: 0)
    plain, lifted = draws_of_versions(rows).diagnostic, draws_of_versions(rows, drawn_first=True).diagnostic
    assert plain is not None
    assert lifted is not None
    assert (plain.outcome, lifted.outcome) == ("failed", "passed")
    for row in rows:
        row["versions"].sort(key=len)
    found = draws_of_versions(rows, drawn_first=True).diagnostic
    assert found is not None
    assert found.outcome == "failed"


def test_indices_0_of_documents_with_unequal_numbers_of_versions_contradict_the_draw() -> None:
    rows = [one for k in range(2, 22) for one in make_versions(2, lambda rng, texts: 0, seed=k, versions=k)]
    rows = [{**row, "id": str(number)} for number, row in enumerate(rows)]
    found = draws_of_versions(rows)
    assert found.check.failed()[0].about == "the published version is the first of all versions in 40 of 40 documents"


# --- items that are left out


@pytest.mark.parametrize("every", [True, False])
def test_a_plan_states_how_many_items_are_left_out_and_why(tmp_path: Path, every: bool) -> None:
    rows = make_items(60)
    for number, row in enumerate(rows):
        if every or number % 10 == 0:
            row["choices"] = [f"Statement {place + 1}: {text}" for place, text in enumerate(row["choices"])]
    lines = plan_checks(plan_of(write_rows(tmp_path / "items.jsonl", rows), PERMUTED))["lines"]
    (line,) = [line for line in lines if "left out" in line]
    assert line.startswith("warning: 60 of 60" if every else "note: 6 of 60")
    assert f": {60 if every else 6} with options that refer to others (first: " in line
    assert "(first: options that refer to others: 'Statement 1: " in line


# --- rows of a file


@pytest.mark.parametrize("numbered", [True, False])
def test_rows_with_their_numbers_contradict_the_shuffling_of_the_file(tmp_path: Path, numbered: bool) -> None:
    rng = random.Random(0)
    rows = [{"item": f"{f'{row}. ' * numbered}{name(rng)} {name(rng)} {name(rng)}"} for row in range(200)]
    versions = {"permute": "order", "window": 8}
    shuffle = preview_of(tmp_path / "rows.jsonl", rows, versions, text="item").shuffle
    assert shuffle.outcome == ("failed" if numbered else "passed")
    if numbered:
        assert "rows ascend by first number in 25 of 25 documents" in shuffle.sentence


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"marks": "none"}, "marks goes with permute and template"),
        ({"permute": "order", "window": 4, "marks": "none"}, "marks goes with permute and template"),
        ({**PERMUTED, "drawn_first": True}, "permute makes the versions: leave out drawn_first"),
        ({**PERMUTED, "marks": "all"}, "marks"),
    ],
)
def test_settings_that_do_not_apply_are_refused_in_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(VersionsConfig, settings)
