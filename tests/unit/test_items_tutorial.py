"""The tutorial on items: summaries of functions as options, each in one item alone, and the answers of a model."""

import csv
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tutorials import items
from examples.tutorials.items import LETTERS, answers, item_text, main, make_items, read_items, write_items
from examples.tutorials.questions import documented
from pipeline.config.models import ModelConfig
from pipeline.models.load import open_model

SOURCE = '''
class Reader:
    """Read the rows of a table one by one."""

    def close(self):
        """Close the file that is read.

        It may be closed twice.
        """

    def _hidden(self):
        """Close the file that nobody reads."""


def brief():
    """Too short."""


def undocumented():
    pass


def questioned():
    """is this a sentence that begins with a capital."""
'''
ITEM = {"id": "item-0000", "question": "Which?", "A": "one", "B": "two", "C": "three", "D": "four", "answer": "C"}


def test_summaries_are_those_of_public_functions_and_no_two_share_five_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    monkeypatch.setattr(items, "source_files", lambda _: [(tmp_path / "module.py", "package.module")])
    known = [("package.module.Reader", "Read the rows of a table one by one.")]
    known += [("package.module.close", "Close the file that is read.")]
    assert list(items._summaries(["package"])) == known
    assert len(list(documented(tmp_path / "module.py"))) == 5
    again = ("other.close", "Please close the file that is read now.")
    assert list(items._distinct([*known, again, *known])) == known


def test_each_item_has_its_own_summaries_and_its_answer_in_any_place() -> None:
    made = make_items(6, 3)
    assert made == make_items(6, 3)
    options = [item[letter] for item in made for letter in LETTERS]
    assert len(set(options)) == 24
    assert [item["id"] for item in made] == [f"item-000{n}" for n in range(6)]
    assert len({item["answer"] for item in make_items(30, 0)}) == 4


def test_items_are_written_and_read_as_the_template_of_the_tutorial_reads_them(tmp_path: Path) -> None:
    write_items(tmp_path / "items.csv", [ITEM, {**ITEM, "A": 'a "quoted", one'}])
    assert read_items(tmp_path / "items.csv") == [ITEM, {**ITEM, "A": 'a "quoted", one'}]
    assert item_text(ITEM) == "Which?\nA. one\nB. two\nC. three\nD. four\nAnswer: C"


def test_the_answer_of_a_model_is_the_letter_that_it_prefers(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = open_model(ModelConfig(path=str(tiny_model_folder), dtype="float32"))
    write_items(tmp_path / "items.csv", [{**ITEM, "id": str(n), "answer": letter} for n, letter in enumerate(LETTERS)])
    rows = read_items(tmp_path / "items.csv")
    (letter,) = set(answers(lm, rows))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    ids = torch.tensor([lm.tokenizer("Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:")["input_ids"]])
    tokens = [lm.tokenizer(f" {one}", add_special_tokens=False)["input_ids"][0] for one in LETTERS]
    assert letter == LETTERS[int(model(ids).logits[0, -1, tokens].argmax())]
    out = tmp_path / "results.csv"
    arguments = [str(out), "--items", str(tmp_path / "items.csv"), "--model"]
    assert main([*arguments, f"tiny={tiny_model_folder}"]) == 0
    assert capsys.readouterr().out == "tiny: 1 of 4 right\n"
    with out.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["model", "item", "correct"],
            *(["tiny", str(n), str(int(one == letter))] for n, one in enumerate(LETTERS)),
        ]
    write_items(tmp_path / "truth.csv", rows[LETTERS.index(letter) :][:1])
    assert main([*arguments, f"tiny={tiny_model_folder}", "--truth", str(tmp_path / "truth.csv")]) == 0
    assert capsys.readouterr().out == f"tiny: 1 of 4 right, of those of {tmp_path / 'truth.csv'} 1 of 1\n"
    assert main([*arguments, "tiny"]) == 2
    assert capsys.readouterr().err == "items: --model must be NAME=FOLDER or NAME=FOLDER,ADAPTER, got 'tiny'\n"
