"""Lists in the place of data: ids and rows, and the samples that lm-evaluation-harness evaluates."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.export.verdicts import AnsweredRun
from pipeline.store.tables import read_filed

LIST_FILE = "list.jsonl"
SAMPLES_FILE = "samples.json"


@dataclass(frozen=True, slots=True)
class Samples:
    """Which items of each task are kept."""

    indices: dict[str, array[int]]  # of a task, ascending; none is empty
    empty: list[str]  # tasks of which none is kept
    without: int  # documents without a task


def write_list(answered: AnsweredRun, sources: Sequence[ExportSource], sink: BinaryIO) -> None:
    """Write a JSON object a line for every document that is kept: id, source, row. No input is read.

    The id of a document that has no column for it is made of its place, as in the run, but without the folders
    that all inputs have in common.

    Args:
        answered: the run.
        sources: its inputs.
        sink: to be written.

    Raises:
        UserError: a damaged file of the run.
    """
    for source in sources:
        for shard in source.shards:
            rows = answered.verdicts(shard).kept(answered.question)
            ids = _ids(answered, shard.id)
            for row in rows.tolist():
                doc_id = ids[row]
                if shard.id_column is None:
                    doc_id = source.name + doc_id.removeprefix(shard.name)
                line = {"id": doc_id, "source": source.name, "row": row}
                sink.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _ids(answered: AnsweredRun, shard: str) -> dict[int, str]:
    receipt, store = answered.receipts[shard], answered.question.store
    names = [receipt.data] + ([] if receipt.quarantine is None else [receipt.quarantine])
    table = pa.concat_tables([read_filed(store, receipt, ["doc_id", "row"], name) for name in names])
    return dict(zip(table["row"].to_pylist(), table["doc_id"].to_pylist(), strict=True))


def find_samples(answered: AnsweredRun, sources: Sequence[ExportSource]) -> Samples:
    """The items of each task that are kept, by their number in the task: the first is 0.

    With the name of a task all documents are its items, counted over all inputs in their order; else the group column
    names the task of each.

    Raises:
        UserError: nothing is kept; nobody knows to which task a document belongs, so that later ones cannot be counted.
    """
    question = answered.question
    counts, without = Counter[str](), 0
    indices: dict[str, array[int]] = {}
    for source in sources:
        for shard in source.shards:
            kept = set(answered.verdicts(shard).kept(question).tolist())
            for document in read_shard(shard):
                task = question.task if question.task is not None else document.group
                if task is None and document.problem is not None and _is_parsed(shard):
                    raise UserError(
                        f"row {document.row} of {shard.name} cannot be read, so nobody knows which task it is an item "
                        "of, and the indices of later ones: mend it and run anew, or export a task by itself"
                    )
                if task is None:
                    without += 1
                    continue
                if document.row in kept:
                    indices.setdefault(task, array("q")).append(counts[task])
                counts[task] += 1
    if not indices:
        raise UserError(
            "no item is kept, so there are no samples to write: lm-evaluation-harness takes an empty list for all items"
        )
    return Samples(indices, [task for task in counts if task not in indices], without)


def _is_parsed(shard: Shard) -> bool:
    """Whether a row that cannot be read has no group either."""
    unit = format_named(shard.format).unit
    return unit == "line" or (unit == "sample" and not shard.pictures)


def write_samples(samples: Samples, sink: BinaryIO) -> None:
    """Write `{"task": [indices]}`, which lm-evaluation-harness takes for --samples as a path or as it stands."""
    for piece in _pieces(samples):
        sink.write(piece.encode("utf-8", "backslashreplace"))


def _pieces(samples: Samples) -> Iterator[str]:
    for number, (task, indices) in enumerate(samples.indices.items()):
        yield f"{',' if number else '{'}\n  {json.dumps(task, ensure_ascii=False)}: ["
        for start in range(0, len(indices), 1 << 12):
            yield ("," if start else "") + ",".join(map(str, indices[start : start + (1 << 12)]))
        yield "]"
    yield "\n}\n"
