"""OptionMarks of places before options: which are recognised, whatever their order, and how they return by place."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from pipeline.config.corpus import CorpusConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import read_shard
from pipeline.corpus.draw_features import IN_PLACE, OUT_OF_PLACE, UNMARKED, ChoiceItem, item_features
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.marks import option_marks
from pipeline.corpus.options import order_options
from pipeline.corpus.shard import whole_shard
from pipeline.selection.version_scores import preference_residuals, redraw_p_value
from pipeline.store.files import Store
from tests.helpers.commands import ended
from tests.helpers.made_up_items import TEMPLATE, Row, write_rows
from tests.helpers.marked_runs import finite_scores, run_here, versions_audit

TEXTS = ("red as rust", "blue", "green", "grey")
MARKS: list[tuple[str, Any]] = [
    ("({}) ", "ABCD"),
    ("({})  ", "abcd"),
    ("[{}] ", "ABCD"),
    ("{}. ", "ABCD"),
    ("{}: ", "ABCD"),
    ("{}) ", "ABCD"),
    ("{}.\t", "1234"),
    ("{}) ", "1234"),
    ("({}) ", "0123"),
    ("{})  ", ("i", "ii", "iii", "iv")),
    ("({})   ", ("I", "II", "III", "IV")),
    ("Option {}: ", "1234"),
    ("option {}.  ", "abcd"),
    ("Choice {}) ", "ABCD"),
    ("\N{FULLWIDTH LEFT PARENTHESIS}{}\N{FULLWIDTH RIGHT PARENTHESIS} ", "\uff21\uff22\uff23\uff24"),  # A to D
    ("{}\N{FULLWIDTH FULL STOP}", "\uff21\uff22\uff23\uff24"),
    ("{}\N{FULLWIDTH FULL STOP} ", "\uff11\uff12\uff13\uff14"),  # 1 to 4
    ("{} ", "①②③④"),
    ("{}", "ⒶⒷⒸⒹ"),
    (" {} ", "⑴⑵⑶⑷"),
    ("{}  ", "⒈⒉⒊⒋"),
    ("{}.   ", "ⅠⅡⅢⅣ"),
    ("{}\N{IDEOGRAPHIC COMMA}", "ABCD"),
    ("{}\N{IDEOGRAPHIC COMMA} ", "一二三四"),
    ("{})    ", "абвг"),
    ("{}.    ", "가나다라"),
    ("({})    ", "कखगघ"),
    ("{}.     ", "١٢٣٤"),
    ("{})      ", ("الف", "ب", "ج", "د")),
    ("**{}.** ", "ABCD"),
    ("**{}**. ", "abcd"),
    ("**{}** ", "ABCD"),
    ("**({})** ", "ABCD"),
    ("*{})*  ", "ABCD"),
    ("__{}:__ ", "1234"),
    ("<b>{}.</b> ", "ABCD"),
    ("<strong>{}</strong> ", "ABCD"),
    ("\\textbf{{{}.}} ", "ABCD"),
    ("- {}. ", "ABCD"),
    ("* ({}) ", "1234"),
    ("({}). ", "ABCD"),
    ("[{}]: ", "ABCD"),
    ("\ufeff{}.      ", "ABCD"),
    ("\u200f{}. ", "אבגד"),
    ("{}.  ", "กขคง"),
    ("{}) ", "កខគឃ"),
    ("{})  ", "ກຂຄງ"),
    ("{}. ", "ሀለሐመ"),
    ("{}) ", "ԱԲԳԴ"),
    ("{}) ", "აბგდ"),
    ("{}) ", "அஆஇஈ"),
    ("{}   ", ("1\ufe0f\u20e3", "2\ufe0f\u20e3", "3\ufe0f\u20e3", "4\ufe0f\u20e3")),
]


def marked(form: str, symbols: Any, texts: Any = TEXTS) -> list[str]:
    return [form.format(symbol) + text for symbol, text in zip(symbols, texts, strict=True)]


@pytest.mark.parametrize(("form", "symbols"), MARKS)
def test_marks_of_every_style_are_taken_off_whatever_their_order(form: str, symbols: Any) -> None:
    for places in itertools.permutations(range(4)):
        options = marked(form, [symbols[place] for place in places])
        marks = option_marks(options)
        assert marks is not None
        assert (marks.places, marks.bare) == (places, TEXTS)
        assert marks.prefixes == tuple(form.format(symbol) for symbol in symbols)
        assert marks.in_place == (places == (0, 1, 2, 3))


@pytest.mark.parametrize(
    "options",
    [
        ["E. coli", "B. subtilis", "S. aureus"],
        ["1.5 metres", "2.5 metres"],
        ["1. 5", "1. 7"],
        ["A", "B"],
        ["A. ", "B. "],
        ["A Smith", "B Jones"],
        ["(A)red", "(B)blue"],  # no blank
        ["(A) red", "B) blue"],  # two styles
        ["(A) red", "(b) blue"],
        ["(B) red", "(C) blue"],  # not the first two
        ["(A) red", "(A) blue"],
        ["(A. red", "(B. blue"],
        ["A- red", "B- blue"],
        ["A - red", "B - blue"],
        ["$a$ + 1", "$b$ + 2"],
        ["**A red", "**B blue"],
        ["*A* red", "*B* blue"],  # names of planes
        ["Vitamin A: red", "Vitamin B: blue"],
        ["\uff11\N{FULLWIDTH FULL STOP}5", "\uff12\N{FULLWIDTH FULL STOP}5"],  # 1.5 and 2.5
        ["(A) red", "blue"],
        ["red"],
    ],
)
def test_what_is_no_mark_of_the_first_places_stays(options: list[str]) -> None:
    assert option_marks(options) is None
    assert item_features(ChoiceItem(options, {"question": "Which?"})).marks == UNMARKED


def made(options: list[str], keep: bool = False) -> tuple[list[str], int]:
    texts, index, _, _ = order_options(options, "choices", {"question": "Which?"}, "{question}\n{choices}", keep)
    return texts, index


def test_marks_return_by_place_in_every_version_and_the_published_one_is_unchanged() -> None:
    options = marked("({}) ", "ABCD")
    texts, index = made(options)
    assert len(texts) == 24
    assert texts[index] == "\n".join(["Which?", *options])
    for text in texts:
        assert [line[:4] for line in text.splitlines()[1:]] == ["(A) ", "(B) ", "(C) ", "(D) "]
    assert {tuple(line[4:] for line in text.splitlines()[1:]) for text in texts} == {*itertools.permutations(TEXTS)}


def test_the_versions_of_a_marked_item_do_not_depend_on_the_published_order() -> None:
    seen = {tuple(made(marked("({}) ", "ABCD", order))[0]) for order in itertools.permutations(TEXTS)}
    assert len(seen) == 1


def test_kept_marks_move_with_their_options() -> None:
    texts, index = made(["A. Smith", "B. Jones", "C. Brown"], keep=True)
    assert texts[index] == "Which?\nA. A. Smith\nB. B. Jones\nC. C. Brown"
    assert sum("A. C. Brown" in text for text in texts) == 2


def test_rules_of_items_that_are_left_out_read_options_without_marks() -> None:
    for options, cause in (
        (["(A) same", "(B) Same"], "equal options"),
        (["(A) 3 cm", "(B) 7 cm"], "ordered options"),
        (["1) water", "2) Both"], "options that refer to others"),
    ):
        left = order_options(options, "choices", {"question": "Which?"}, "{question}\n{choices}")
        assert (left.reason, left.cause) == ("not_permutable", cause)


def test_an_item_whose_marks_do_not_stand_in_place_is_known_as_such() -> None:
    others = {"question": "Which?"}
    assert item_features(ChoiceItem(marked("({}) ", "ABCD"), others)).marks == IN_PLACE
    assert item_features(ChoiceItem(marked("({}) ", "BACD"), others)).marks == OUT_OF_PLACE
    assert item_features(ChoiceItem(marked("({}) ", "BACD"), others, keep_marks=True)).marks == UNMARKED


def texts_of(path: Path, rows: list[Row]) -> dict[str, set[str]]:
    """The versions of each item of a file."""
    versions = {"permute": "choices", "template": TEMPLATE}
    corpus = build(CorpusConfig, {"audit": {"path": str(write_rows(path, rows)), "id": "id", "versions": versions}})
    (entry,), source = find_inputs(corpus), corpus.audit
    assert source is not None
    return {document.doc_id: {*document.texts} for document in read_shard(whole_shard(entry, source))}


@pytest.mark.slow
def test_a_model_that_cannot_know_lettered_items_is_accused_by_no_shuffle(
    tmp_path: Path, shared_folder: Path, smollm2_file: Path
) -> None:
    """With marks inside the options 39 of these 40 invented items were selected, and the verdict had p = .0001."""
    path = shared_folder / "cases/lettered_options.jsonl"
    source = {"path": str(path), "id": "id", "versions": {"permute": "choices", "template": TEMPLATE}}
    audit = versions_audit(tmp_path, smollm2_file, source)
    audit["model"]["dtype"] = "bfloat16"
    audit["selections"][0]["alpha"] = 0.1
    assert run_here(tmp_path, audit) == 0
    store = Store(str(tmp_path / "run"))
    summary = store.read_json("selection/list/summary.json")
    assert (summary["n_selected"], summary["conclusion"]) == (0, "supported")
    assert ended("verdict", tmp_path / "run", "--fail-if-trained") == 0
    assert store.read_json("verdict.json")["versions"]["p_value"] > 0.01
    rng, rows = random.Random(0), [json.loads(line) for line in path.read_text().splitlines()]
    original = texts_of(tmp_path / "items.jsonl", rows)
    for _ in range(3):  # another shuffle publishes another version of the same ones
        bare = [rng.sample([text[4:] for text in row["choices"]], 4) for row in rows]
        again = [{**row, "choices": marked("({}) ", "ABCD", some)} for row, some in zip(rows, bare, strict=True)]
        assert texts_of(tmp_path / "items.jsonl", again) == original
    scores, draws = preference_residuals(finite_scores(tmp_path / "audit.yaml")), np.random.default_rng(0)
    redrawn = [replace(scores, published=draws.integers(24, size=40)) for _ in range(300)]
    p_values = [redraw_p_value(one, number, redraws=999) for number, one in enumerate(redrawn)]
    assert kstest(p_values, "uniform").pvalue > 0.01
