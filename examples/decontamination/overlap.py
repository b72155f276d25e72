"""How much of each item of a benchmark occurs in one document of a training corpus, as scores for `seenset run`.

    python -m examples.decontamination.overlap --corpus 'corpus/*.parquet' --items items.jsonl --out scored.parquet
    python -m examples.decontamination.overlap --decon report.jsonl --items items.jsonl --out scored.parquet

The score of an item is the largest share of its runs of eight words that one document of the corpus holds; or, of the
report of allenai/decon, the largest contamination score of its entries, and 0 without one.
"""

from __future__ import annotations

import argparse
import codecs
import glob
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import xxhash

from pipeline.errors import ExitCode, UserError, error_line

WORDS = 8
"""Words of a run. An item with fewer words has no score."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BATCH = 2_000
_LONGEST = 1 << 27
"""Bytes of a file of CSV that are read together, and so the longest record."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemRuns:
    """The distinct runs of words of all items, sorted by their hashes."""

    hashes: np.ndarray  # uint64, (distinct runs,), ascending
    first: np.ndarray  # int64, (distinct runs + 1,): places in `items` of the items that have a run
    items: np.ndarray  # int64: items by run
    counts: np.ndarray  # int64, (items,): distinct runs of each item

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> ItemRuns:
        """The runs of texts."""
        document, hashes = run_hashes(texts)
        pairs = np.unique(np.stack([hashes, document.astype(np.uint64)], axis=1), axis=0)
        distinct, first = np.unique(pairs[:, 0], return_index=True)
        items = pairs[:, 1].astype(np.int64)
        return cls(distinct, np.append(first, len(items)), items, np.bincount(items, minlength=len(texts)))


def run_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The runs of eight words of texts, without case and punctuation.

    Args:
        texts: any texts; one with fewer words has no run.

    Returns:
        The text of each run, int64, and its hash, uint64, both (runs,).
    """
    normal = pc.utf8_lower(pc.utf8_normalize(pa.array(texts, pa.string()), "NFKC"))
    words = pc.split_pattern_regex(normal, r"[^\p{L}\p{M}\p{N}]+")
    document, word = pc.list_parent_indices(words).to_numpy(), pc.list_flatten(words).dictionary_encode()
    of_word = np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in word.dictionary.to_pylist()], dtype=np.uint64)
    kept = word.indices.to_numpy() if len(word) else np.empty(0, dtype=np.int64)
    hashed = of_word[kept] if len(of_word) else np.empty(0, dtype=np.uint64)
    filled = hashed != np.uint64(xxhash.xxh3_64_intdigest(b""))  # punctuation at an end leaves an empty word
    document, hashed = document[filled], hashed[filled]
    runs = max(0, len(hashed) - WORDS + 1)
    combined = np.zeros(runs, dtype=np.uint64)
    for place in range(WORDS):
        combined = combined * _FACTOR + hashed[place : place + runs]
    inside = document[:runs] == document[WORDS - 1 : WORDS - 1 + runs]
    return document[:runs][inside], combined[inside]


def largest_shares(items: Sequence[str], corpus: Iterable[Sequence[str]]) -> np.ndarray:
    """The largest share of the runs of each item that one document of a corpus holds.

    Args:
        items: texts of the items.
        corpus: batches of documents.

    Returns:
        float64, (items,), in [0, 1]; NaN of an item with fewer than eight words.
    """
    runs = ItemRuns.from_texts(items)
    most = np.zeros(len(items), dtype=np.int64)
    for texts in corpus:
        document, hashes = run_hashes(texts)
        place = np.searchsorted(runs.hashes, hashes)
        inside = place < len(runs.hashes)
        inside[inside] = runs.hashes[place[inside]] == hashes[inside]
        pairs = np.unique(np.stack([document[inside], place[inside]], axis=1), axis=0)
        sizes = np.diff(runs.first)[pairs[:, 1]]
        start = np.repeat(runs.first[pairs[:, 1]], sizes)
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = np.stack([np.repeat(pairs[:, 0], sizes), runs.items[start + within]], axis=1)
        held, count = np.unique(held, axis=0, return_counts=True)
        np.maximum.at(most, held[:, 1], count)
    return np.divide(most, runs.counts, out=np.full(len(items), np.nan), where=runs.counts > 0)


def decon_scores(rows: Sequence[dict[str, Any]], report: Iterable[tuple[int, dict[str, Any]]], name: str) -> np.ndarray:
    """The largest contamination score of each item in a report of allenai/decon; 0 without an entry.

    Args:
        rows: items with `eval_key` and `eval_instance_index`, as in the reference files of decon.
        report: entries of the report, with the numbers of their lines.
        name: name of the report, for messages.

    Returns:
        float64, (items,).

    Raises:
        UserError: an item, or a line, without these fields.
    """
    best: dict[tuple[str, int], float] = {}
    for number, entry in report:
        try:
            key = str(entry["eval_key"]), int(entry["eval_instance_index"])
            best[key] = max(best.get(key, 0.0), float(entry["contamination_score"]))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{name} line {number} is no entry of a report of decon: {error!r}") from None
    if lacking := [row for row in rows if not {"eval_key", "eval_instance_index"} <= {*row}]:
        raise UserError(f"{len(lacking):,} items have no eval_key and eval_instance_index, as items of decon have")
    return np.array([best.get((str(row["eval_key"]), int(row["eval_instance_index"])), 0.0) for row in rows])


def read_corpus(patterns: Sequence[str], column: str) -> Iterator[list[str]]:
    """Batches of the texts of Parquet, Arrow, CSV and JSONL files; CSV and JSONL also as `.gz`.

    Raises:
        UserError: no file, one that cannot be read, no such column, or one that holds no texts.
    """
    files = sorted(file for pattern in patterns for file in glob.glob(pattern, recursive=True))
    if not files:
        raise UserError(f"no file of the corpus is named {', '.join(patterns)}")
    for file in files:
        suffix = Path(file.removesuffix(".gz")).suffix
        if suffix not in _READERS or (file.endswith(".gz") and suffix not in _TEXTS):
            raise UserError(f"{file} is none of {', '.join(_READERS)}; {' and '.join(_TEXTS)} may be compressed (.gz)")
        try:
            yield from _READERS[suffix](file, column)
        except (OSError, EOFError, pa.ArrowException) as error:
            why = "it is not UTF-8: convert it" if "UTF8" in str(error) else error_line(error)
            raise UserError(f"cannot read {file}: {why}") from None


def numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1. Only a line feed ends a line."""
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(codecs.BOM_UTF8)


def read_objects(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, with the numbers of their lines.

    Raises:
        UserError: a line is no JSON object.
    """
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number} is not JSON: {error_line(error)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is a JSON {type(row).__name__}, not an object")
        yield number, row


def _of_objects(path: str, column: str) -> Iterator[list[str]]:
    """Texts of a JSONL file, whose lines may have any length."""
    known, rows = set[str](), read_objects(path)
    while part := list(islice(rows, _BATCH)):
        known.update(*(row for _, row in part))
        if column not in known:
            raise UserError(f"no column {column!r} in {path}; columns: {', '.join(sorted(known))}")
        yield [text_of(row.get(column), f"{path} line {number}", column) for number, row in part]


def _of_table(path: str, column: str) -> Iterator[list[str]]:
    """Texts of a Parquet, Arrow or CSV file."""
    suffix, first = Path(path.removesuffix(".gz")).suffix.lstrip("."), 1
    in_quotes = ds.CsvFileFormat(
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types={column: pa.string()}),
        read_options=pa.csv.ReadOptions(block_size=_LONGEST),
    )
    dataset = ds.dataset(path, format=in_quotes if suffix == "csv" else suffix)
    if column not in dataset.schema.names:
        raise UserError(f"no column {column!r} in {path}; columns: {', '.join(dataset.schema.names)}")
    for batch in dataset.to_batches(columns=[column], batch_size=_BATCH):
        values = batch.column(column).to_pylist()
        yield [text_of(value, f"{path} row {row}", column) for row, value in enumerate(values, first)]
        first += len(values)


def text_of(value: Any, where: str, column: str) -> str:
    """A text, empty for null. Raises UserError: the value is no text."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds a {type(value).__name__}, not a text")
    return value or ""


_TEXTS = (".csv", ".jsonl", ".json")
_READERS: dict[str, Callable[[str, str], Iterator[list[str]]]] = {
    ".parquet": _of_table,
    ".arrow": _of_table,
    ".csv": _of_table,
    ".jsonl": _of_objects,
    ".json": _of_objects,
}


def write_scores(rows: Sequence[dict[str, Any]], scores: np.ndarray, column: str, out: Path) -> None:
    """Write items with their scores; those without one are left to the quarantine of the run.

    Raises:
        UserError: there are no items, or they have a column of this name.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    if not rows or column in names:
        raise UserError(f"the items have a column {column!r} already: rename it" if rows else "there are no items")
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pa.table({**columns, column: pa.array(scores, from_pandas=True)})
    pq.write_table(table, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the scores of items. Returns the exit code of the process."""
    parser = argparse.ArgumentParser(description="Share of each item's runs of 8 words in one document of a corpus.")
    parser.add_argument(
        "--corpus", nargs="+", help="Files of the corpus (Parquet, Arrow, CSV, JSONL, the last two also .gz), or globs."
    )
    parser.add_argument("--decon", help="JSONL report of allenai/decon, in the place of a corpus.")
    parser.add_argument("--items", required=True, type=Path, help="JSONL file of the items.")
    parser.add_argument("--text", default="text", help="Column of the texts of corpus and items.")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write.")
    given = parser.parse_args(arguments)
    try:
        items = str(given.items)
        numbered = list(read_objects(items))
        rows = [row for _, row in numbered]
        if (given.corpus is None) == (given.decon is None):
            raise UserError("give either --corpus or --decon")
        if given.decon is not None:
            scores = decon_scores(rows, read_objects(given.decon), given.decon)
            write_scores(rows, scores, "contamination", given.out)
        else:
            texts = [text_of(row.get(given.text), f"{items} line {number}", given.text) for number, row in numbered]
            write_scores(rows, largest_shares(texts, read_corpus(given.corpus, given.text)), "share", given.out)
    except (UserError, OSError, ValueError, TypeError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
