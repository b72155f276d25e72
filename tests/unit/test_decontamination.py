"""Claims about the search for benchmark items in a corpus: the shares of a plain loop, and one line of error."""

import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from examples.decontamination.overlap import decon_scores, largest_shares, main, read_corpus
from examples.decontamination.trial import EDITS
from tests.helpers.commands import user_error


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + 8]) for start in range(len(words) - 7)}


def test_shares_are_those_of_a_plain_loop_over_documents() -> None:
    rng = random.Random(1)
    vocabulary = [f"word{number}" for number in range(300)]
    documents = [" ".join(rng.choices(vocabulary, k=60)) for _ in range(90)]
    items = []
    for number in range(60):
        words = documents[number].split()[rng.randrange(20) :][:25]
        edited = list(EDITS.values())[number % len(EDITS)](words, rng)
        items.append(". ".join(edited) if number % 3 else " ".join(rng.choices(vocabulary, k=25)))
    items += [items[0], f"{documents[7]} {documents[8]}", "Größe straße naïve 東京 ألف бета γάμμα δ ε"]
    documents.append("x GRÖSSE größe Straße naïve, 東京 ألف Бета (Γάμμα) δ ε y")
    held = [runs_of(document) for document in documents]
    expected = [max(len(runs_of(item) & one) / len(runs_of(item)) for one in held) for item in items]
    assert max(expected) == 1
    for size in (1, 7, 200):
        batches = [documents[start : start + size] for start in range(0, len(documents), size)]
        assert largest_shares(items, batches).tolist() == expected
    assert np.isnan(largest_shares(["one two three four five six seven", "", "..."], [documents])).all()
    assert largest_shares(["a b c d e f g h"], []).tolist() == [0]
    assert largest_shares(["\U0001d400 b c d e f g h"], [["a b c d e f g h"]]).tolist() == [1]
    assert largest_shares(["कि की कु के को का कै कौ कं"], [["का " * 9]]).tolist() == [0]


def test_a_report_of_decon_gives_each_item_its_largest_score() -> None:
    entry = {
        "training_file": "part-0.jsonl",
        "training_line": 12,
        "eval_dataset": "mmlu",
        "eval_key": "mmlu",
        "eval_line": 4,
        "eval_instance_index": 3,
        "ngram_match_cnt": 9,
        "eval_unique_ngrams": 12,
        "contamination_score": 0.82,
        "length_adjusted_question_threshold": 0.8,
        "method": "simple",
        "eval_question_text": "which of these",
    }
    changes = ({}, {"contamination_score": 0.9}, {"eval_key": "arc"})
    report = [(number, {**entry, **changed}) for number, changed in enumerate(changes, 1)]
    rows = [{"eval_key": key, "eval_instance_index": number} for key in ("mmlu", "arc") for number in range(5)]
    assert decon_scores(rows, report, "report.jsonl").tolist() == [0, 0, 0, 0.9, 0, 0, 0, 0, 0.82, 0]
    line = user_error(decon_scores, rows, [(7, {})], "report.jsonl")
    assert line.startswith("report.jsonl line 7 is no entry of a report of decon")
    assert "1 items have no eval_key" in user_error(decon_scores, [{"id": 1}], report, "report.jsonl")


def test_long_lines_packed_files_and_line_separators_within_a_text_are_read(tmp_path: Path) -> None:
    texts = ["a long text " * 200_000, "one\u2028two\x85three", None, "four"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "plain.jsonl").write_text(f"\ufeff{lines}\n\n", encoding="utf-8")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pa.csv.write_csv(pa.table({"n": [1, 2, 3], "text": [*texts[:2], "4"]}), tmp_path / "table.csv")
    packed = gzip.compress((tmp_path / "table.csv").read_bytes())
    (tmp_path / "table.csv.gz").write_bytes(packed)
    for name, held in (("plain.jsonl", texts), ("packed.jsonl.gz", texts)):
        assert list(read_corpus([str(tmp_path / name)], "text")) == [[text or "" for text in held]]
    for name in ("table.csv", "table.csv.gz"):
        read = [text for batch in read_corpus([str(tmp_path / name)], "text") for text in batch]
        assert read == [*texts[:2], "4"]


def test_what_cannot_be_read_names_its_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text('{"text": "a b c d e f g h"}\n')
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    (tmp_path / "numbers.jsonl").write_text('{"text": "x"}\n\n{"text": 7}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:40])
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "latin.csv").write_bytes("n,text\n1,caf\xe9\n".encode("latin-1"))
    (tmp_path / "x.parquet.gz").write_bytes(b"")
    for name, line in (
        ("numbers.parquet", "row 1: column 'text' holds a int, not a text"),
        ("numbers.jsonl", "line 3: column 'text' holds a int, not a text"),
        ("broken.jsonl", "line 2 is not JSON"),
        ("list.jsonl", "line 1 is a JSON list, not an object"),
        ("other.jsonl", "columns: body"),
        ("cut.jsonl.gz", "cannot read"),
        ("cut.parquet", "cannot read"),
        ("latin.csv", "it is not UTF-8: convert it"),
        (
            "x.parquet.gz",
            "is none of .parquet, .arrow, .csv, .jsonl, .json; .csv and .jsonl and .json may be",
        ),
    ):
        arguments = ["--corpus", str(tmp_path / name), "--items", str(items), "--out", str(tmp_path / "out.parquet")]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / name) in error
        assert line in error
        assert error.count("\n") == 1
    assert main(["--corpus", str(items), "--items", str(tmp_path / "numbers.jsonl"), "--out", "out.parquet"]) == 2
    assert f"{tmp_path / 'numbers.jsonl'} line 3: column 'text' holds a int" in capsys.readouterr().err
    assert main(["--decon", str(tmp_path / "list.jsonl"), "--items", str(items), "--out", "out.parquet"]) == 2
    assert f"{tmp_path / 'list.jsonl'} line 1 is a JSON list" in capsys.readouterr().err


def test_the_command_writes_scores_that_an_audit_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [" ".join(f"w{number}{place}" for place in range(12)) for number in range(4)]
    pq.write_table(pa.table({"text": [texts[0], None, texts[2]]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": texts[3][:40]}) + "\n")
    items = tmp_path / "items.txt"
    items.write_text("".join(json.dumps({"id": f"i{n}", "text": text}) + "\n" for n, text in enumerate([*texts, "x"])))
    out = tmp_path / "scored.parquet"
    corpus = ["--corpus", str(tmp_path / "*.parquet"), str(tmp_path / "*.jsonl"), "--out", str(out)]
    assert main([*corpus, "--items", str(items)]) == 0
    scored = pq.read_table(out).to_pylist()
    assert [row["id"] for row in scored] == ["i0", "i1", "i2", "i3", "i4"]
    assert [row["share"] for row in scored[:3]] == [1, 0, 1]
    assert 0 < scored[3]["share"] < 1
    assert scored[4]["share"] is None
    for arguments, line in (
        ([*corpus, "--items", str(items), "--decon", "x"], "give either --corpus or --decon"),
        (["--corpus", "none/*.csv", "--items", str(items), "--out", str(out)], "no file of the corpus is named none"),
        ([*corpus, "--items", str(tmp_path / "none")], "No such file"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1
    assert "no column 'body' in" in user_error(lambda: list(read_corpus([str(tmp_path / "a.parquet")], "body")))
