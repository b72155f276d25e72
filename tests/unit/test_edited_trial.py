"""The trial of edited training texts, on a tiny model: the edits, the table, and that models and scores are kept."""

import re
from pathlib import Path

import numpy as np
import pytest

from examples.trials.edited import EDITS, Sizes, exchanged, other_forms, run_edited, runs_kept, words_moved
from tests.helpers.made_up import write_rows

WORDS = ("the", "model", "reads", "a", "text", "twice", "and", "writes", "what", "it", "has", "seen", "before", "now")
TEXT = "It is also a large file, and we do not read all of it. For example, this does not fit into memory."


def test_an_exchange_moves_the_stated_share_of_words_and_keeps_all_of_them() -> None:
    text = " ".join(f"word{n}" for n in range(100))
    for share in (0.1, 0.3, 0.5):
        edited = exchanged(text, share)
        moved = sum(a != b for a, b in zip(text.split(), edited.split(), strict=True))
        assert moved == round(100 * share)
        assert sorted(edited.split()) == sorted(text.split())
        assert exchanged(text, share) == edited
        assert 0 < words_moved(text, edited) <= share
        assert runs_kept(text, edited) < 1 - share


def test_the_rules_of_mark_change_every_site_and_nothing_else() -> None:
    edited = other_forms(TEXT)
    assert edited != TEXT
    assert 0 < words_moved(TEXT, edited) < 0.5
    assert other_forms("Paris 2024") == "Paris 2024"
    assert (words_moved(TEXT, TEXT), runs_kept(TEXT, TEXT)) == (0, 1)


def test_the_table_has_a_row_for_each_edit_and_scores_are_kept(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "work" / "edited"
    folder.mkdir(parents=True)
    texts = [" ".join(rng.choice(WORDS, 30)) for _ in range(50)]
    write_rows(folder / "passages.jsonl", ({"id": f"p{n}", "text": text} for n, text in enumerate(texts)))
    sizes = Sizes(audited=20, unseen=30, epochs=1, repeats=5)
    assert run_edited(folder, {"path": str(tiny_model_folder)}, sizes) == 0
    printed = capsys.readouterr().out
    shown = (folder / "tables.md").read_text(encoding="utf-8")
    assert printed.endswith(shown)
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == list(EDITS)
    assert rows[0][1:3] == ["0.00", "1.00"]
    assert 0 < float(rows[1][1]) < float(rows[2][1]) < float(rows[3][1]) <= 0.5
    assert all(re.fullmatch(r"[01]\.\d{3} \[[01]\.\d{3}, [01]\.\d{3}\]", cell) for row in rows for cell in row[3:])
    assert "10 of 20 audited passages trained in 1 epochs, 30 calibrate; `bh` at alpha = 0.1, 5 splits." in shown

    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    assert len(kept) == len(EDITS)
    assert run_edited(folder, {"path": str(tiny_model_folder)}, sizes) == 0
    assert capsys.readouterr().out.endswith(shown)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == kept
