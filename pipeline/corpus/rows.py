"""The rows of a shard as they are written: one reader a format. What they hold is checked elsewhere."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.formats import HUB_SPLIT, open_plain, open_saved_dataset, rows_at_once
from pipeline.corpus.labels import role_of_label
from pipeline.corpus.lines import Overlong, bounded_lines, csv_records, skip_line
from pipeline.corpus.parquet import parquet_batches
from pipeline.corpus.picture_files import KEY, picture_of_file, sample_columns, samples_of
from pipeline.corpus.pictures import undecoded
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError

Watch = Callable[[int, bool], bool]
"""Called with the number of a row before it is read, and once more, with True, before whatever leads to the next one;
says whether that must not be done, because it kills the reader."""


def unwatched(row: int, between: bool) -> bool:
    """Every row may be read."""
    return False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In the place of a text: why the row has none."""

    reason: str
    message: str


DEADLY = Unreadable("model_error", "it was being read when its worker was killed, again and again")


def overlong(length: Overlong, unit: str, shard: Shard) -> Unreadable:
    """In the place of a text that is longer than the limits allow.

    Args:
        length: of it.
        unit: of its size: "bytes" or "characters".
        shard: that holds it.
    """
    limit = f"limits.document_bytes, which is {shard.limits.document_bytes:,}"
    return Unreadable("too_large", f"{'' if length.whole else 'at least '}{length.size:,} {unit}, more than {limit}")


Row = tuple[int, Any, Any, Any, Any, Any]  # number, text or picture, id, group, label and caption
_NOTHING = (None, None, None, None)
_MEASURED = 4  # times `limits.document_bytes` that a line is read to state its size


def rows_of(shard: Shard, watch: Watch) -> Iterator[Row]:
    """The rows of a shard that are of its role. Raises what the library of the format does."""
    rows = every_row(shard, watch) if shard.label_column is None else _rows_of_role(shard, watch)
    return itertools.islice(rows, shard.max_rows)


def _rows_of_role(shard: Shard, watch: Watch) -> Iterator[Row]:
    """The rows whose label gives them the shard's role; one without a label counts as unseen, and is refused."""
    for row, text, identity, group, label, caption in every_row(replace(shard, max_rows=None), watch):
        role = role_of_label(label, shard.name)
        if role == shard.role:
            yield row, text, identity, group, label, caption
        elif role is None and shard.role == "unseen":
            unlabelled = Unreadable("no_label", f"no label in column {shard.label_column!r}")
            yield row, text if isinstance(text, Unreadable) else unlabelled, identity, group, label, caption


def every_row(shard: Shard, watch: Watch) -> Iterator[Row]:
    """The rows that a shard reads over, whatever their role."""
    reader = {
        "parquet": _parquet_rows,
        "jsonl": _jsonl_rows,
        "csv": _csv_rows,
        "txt": _txt_rows,
        "picture": _picture_rows,
        "tar": _tar_rows,
        "dataset": _dataset_rows,
        "hub": _dataset_rows,
    }[shard.format]
    return reader(shard, watch)


def lines(shard: Shard) -> Iterator[tuple[int, bytes | Overlong]]:
    """(row number, line) of each line that begins in the shard's byte range; blank lines are left out."""
    count, document_bytes = 0, shard.limits.document_bytes
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        stop = shard.stop if shard.by_bytes and shard.stop is not None else None
        position = 0
        if shard.start > 0:
            file.seek(
                shard.start - 1
            )  # a line that goes on behind the shard is read up to there: another shard began it
            position = shard.start - 1 + skip_line(file, sys.maxsize if stop is None else stop - shard.start + 1)
        within = sys.maxsize if stop is None else stop - position
        passed = max(within, _MEASURED * document_bytes)
        for row, line in enumerate(bounded_lines(file, document_bytes, within, passed), shard.first_row):
            if isinstance(line, Overlong) or line.strip():
                yield row, line
                count += 1
                if count == shard.max_rows:
                    return
        if stop is not None and file.tell() < stop:
            raise EOFError(f"it ends at byte {file.tell()}; it was planned to byte {stop}")


def _jsonl_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    for row, line in lines(shard):
        if isinstance(line, Overlong):
            yield row, overlong(line, "bytes", shard), *_NOTHING
            continue
        if watch(row, False):
            yield row, DEADLY, *_NOTHING
            continue
        if row == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            value = json.loads(line.decode(shard.encoding, "surrogateescape"))
            repeated = _repeated_field(line, shard)
        except (ValueError, RecursionError) as error:
            yield row, Unreadable("undecodable", f"not a JSON line: {error}"), *_NOTHING
            continue
        except MemoryError:
            yield row, Unreadable("out_of_memory", f"its {len(line):,} bytes of JSON take too much"), *_NOTHING
            continue
        if repeated is not None:
            yield row, Unreadable("undecodable", f"field {repeated!r} stands twice in it"), *_NOTHING
            continue
        if not isinstance(value, dict):
            yield row, Unreadable("not_text", f"a JSON {type(value).__name__}, not an object"), *_NOTHING
            continue
        text = value.get(shard.text, Unreadable("not_text", f"no field {shard.text!r}"))
        yield row, text, *_fields(value, shard)


def _repeated_field(line: bytes, shard: Shard) -> str | None:
    """A field of a JSON object that is read and stands in it twice, so that nobody knows which is meant."""
    wanted = {name for name in (shard.text, *_columns(shard)) if name is not None}
    text = line.decode(shard.encoding, "surrogateescape")
    if all(text.count(json.dumps(name, ensure_ascii=False)) < 2 for name in wanted):
        return None
    pairs = json.loads(text, object_pairs_hook=tuple)
    names = [name for name, _ in pairs] if isinstance(pairs, tuple) else []
    return next((name for name in names if name in wanted and names.count(name) > 1), None)


def _csv_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for row, value in enumerate(csv_records(file, shard.limits.document_bytes, shard.dialect)):
            if isinstance(value, Overlong):
                yield row, overlong(value, "characters", shard), *_NOTHING
            else:
                yield row, DEADLY if watch(row, False) else value.get(shard.text), *_fields(value, shard)


def _txt_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    for row, inner in enumerate(shard.files, shard.first_row):
        deadly = watch(row, False)
        yield row, DEADLY if deadly else _text_of_file(shard, inner), *_NOTHING


def _text_of_file(shard: Shard, inner: str) -> Any:
    most = shard.limits.document_bytes
    with fsspec.open(f"{shard.path}/{inner}" if inner else shard.path, "rb") as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = len(data) + sum(map(len, iter(lambda: file.read(1 << 20), b"")))
            return overlong(Overlong(size), "bytes", shard)
    try:
        return data.decode(shard.dialect.codec)
    except UnicodeDecodeError as error:
        return Unreadable("undecodable", f"byte {error.start} is not {shard.dialect.label}")


def _picture_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    for row, inner in enumerate(shard.files, shard.first_row):
        if watch(row, False):
            yield row, DEADLY, *_NOTHING
            continue
        picture, caption = picture_of_file(shard.path, inner, shard.caption_column, shard.limits.document_bytes)
        yield row, picture, None, None, None, caption


def _tar_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    for row, sample in enumerate(samples_of(shard.path, shard.limits.document_bytes)):
        identity, group, label, caption = sample_columns(sample, _columns(shard))
        value = DEADLY if watch(row, False) else sample.get(shard.text)
        yield row, value, sample[KEY] if identity is None else identity, group, label, caption


def _parquet_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    assert shard.stop is not None
    columns = [name for name in (shard.text, *_columns(shard)) if name is not None]
    given, at_once = 0, partial(rows_at_once, column=shard.text)
    for first, batch in parquet_batches(shard.path, columns, shard.start, shard.stop, at_once):
        for values in _batch_rows(shard, batch, first):
            yield (values[0], DEADLY, *values[2:]) if watch(values[0], False) else values
        given += len(batch)
    if given != shard.stop - shard.start:
        raise UserError(
            f"{shard.name} is damaged: rows [{shard.start}, {shard.stop}) were planned from its footer, and only "
            f"{given} of them are in it"
        )


def _batch_rows(shard: Shard, batch: pa.RecordBatch, first: int) -> Iterator[Row]:
    column = batch.column(shard.text)
    texts = _picture_values(column) if shard.pictures else _decoded(column)
    *names, caption = _columns(shard)
    others = [batch.column(name).to_pylist() if name else itertools.repeat(None) for name in names]
    captions = _words_or_values(batch.column(caption)) if caption else itertools.repeat(None)
    for offset, (text, *rest) in enumerate(zip(texts, *others, captions, strict=False)):
        yield first + offset, text, *rest


def _picture_values(column: pa.Array) -> Iterator[Any]:
    """The values of a column of pictures: bytes, paths, or records of them. A bad path costs one document."""
    if not pa.types.is_struct(column.type):
        yield from _words_or_values(column)
        return
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    for values in zip(*map(_words_or_values, column.flatten()), strict=True):
        value = dict(zip(names, values, strict=True))
        path = value.get("path")
        yield path if isinstance(path, Unreadable) and value.get("bytes") is None else value


def _words_or_values(column: pa.Array) -> Iterator[Any]:
    """The values of an Arrow column, its texts as `_decoded`."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"
    return _decoded(column) if texts else iter(column.to_pylist())


def _decoded(column: pa.Array) -> Iterator[Any]:
    """The texts of an Arrow column. Bytes that are not UTF-8 cost one document, not the batch."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if str(column.type) == "string_view":
        column = pc.cast(column, pa.large_string())
    binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    for value in (column.cast(binary) if not pa.types.is_large_binary(column.type) else column).to_pylist():
        try:
            yield value if value is None else value.decode("utf-8")
        except UnicodeDecodeError as error:
            yield Unreadable("undecodable", f"byte {error.start} is not UTF-8")


def _dataset_rows(shard: Shard, watch: Watch) -> Iterator[Row]:
    assert shard.stop is not None
    if shard.format == "hub":
        import datasets

        dataset = datasets.load_dataset(shard.path, shard.subset, split=shard.split or HUB_SPLIT)
    else:
        dataset = open_saved_dataset(shard.path, shard.split, shard.name)
    if shard.pictures:
        dataset = undecoded(dataset, shard.text)
    if len(dataset) < shard.stop:
        raise UserError(f"{shard.name} has {len(dataset)} rows now; [{shard.start}, {shard.stop}) were planned")
    for row in range(shard.start, shard.stop):
        if watch(row, False):
            yield row, DEADLY, *_NOTHING
            continue
        value = dataset[row]
        yield row, value.get(shard.text), *_fields(value, shard)


def _columns(shard: Shard) -> tuple[str | None, ...]:
    return shard.id_column, shard.group_column, shard.label_column, shard.caption_column


def _fields(value: dict[str, Any], shard: Shard) -> tuple[Any, Any, Any, Any]:
    """Id, group, label and caption of a row; None without such a column."""
    identity, group, label, caption = (value.get(name) if name is not None else None for name in _columns(shard))
    return identity, group, label, caption
