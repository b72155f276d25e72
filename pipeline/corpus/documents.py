"""Shards -> documents: one reader a format, and the checks that send a bad document to quarantine."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import sys
import unicodedata
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.content import ContentDigest
from pipeline.corpus.formats import HUB_SPLIT, open_plain, open_saved_dataset, rows_at_once
from pipeline.corpus.labels import role_of_label
from pipeline.corpus.lines import Overlong, bounded_lines, csv_records, skip_line
from pipeline.corpus.parquet import parquet_batches
from pipeline.corpus.shard import Shard
from pipeline.corpus.transforms import transform
from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class Document:
    """One row of a shard. `problem` is (reason, message) when it cannot be scored; its text is then empty."""

    row: int
    doc_id: str
    text: str
    group: str | None
    problem: tuple[str, str] | None = None


Watch = Callable[[int, bool], bool]
"""Called with the number of a row before it is read, and once more, with True, before whatever leads to the next one;
says whether that must not be done, because it kills the reader."""


def unwatched(row: int, between: bool) -> bool:
    """Every row may be read."""
    return False


def read_shard(shard: Shard, content: ContentDigest | None = None, watch: Watch = unwatched) -> Generator[Document]:
    """All documents of a shard, in order, good and bad. Memory holds one batch of them, within the shard's limits.

    Args:
        shard: to be read.
        content: takes in every row as it is read.
        watch: is told of every row before it is read.

    Args:
        shard: to be read.
        content: takes in every row as it is read.

    Raises:
        UserError: the file itself is damaged (truncated, corrupt, gone), or passes a limit.
    """
    row = shard.first_row
    try:
        for count, (row, text, identity, group, _) in enumerate(_rows(shard, watch)):
            if shard.stop is None and count == shard.limits.shard_documents:
                raise UserError(
                    f"{shard.name} holds more documents than limits.shard_documents, which is "
                    f"{shard.limits.shard_documents:,}: raise it, or write several files"
                )
            if content is not None and text is _DEADLY:
                content.skip()
            elif content is not None:
                content.add(row, (text.reason,) if isinstance(text, _Unreadable) else text, identity, group)
            yield _checked(shard, row, text, identity, group)
            if watch(row + 1, True):
                raise UserError(f"{shard.name} cannot be read beyond row {row}: that killed its reader again and again")
    except (OSError, EOFError, pa.ArrowException, csv.Error) as error:
        raise UserError(f"{shard.name} is damaged after row {row}: {' '.join(str(error).split())}") from None


def texts_of(shard: Shard, wanted: Container[int]) -> Generator[tuple[int, str]]:
    """Number and text of the wanted rows that have one, as a document's would be; nothing is checked.

    Raises:
        UserError: the file itself is damaged.
    """
    try:
        for row, text, *_ in _rows(shard, unwatched):
            if row in wanted and isinstance(text, str):
                yield row, text if shard.transform is None else transform(text, shard.transform)
    except (OSError, EOFError, pa.ArrowException, csv.Error) as error:
        raise UserError(f"{shard.name} is damaged: {' '.join(str(error).split())}") from None


def text_key(text: str) -> int:
    """A 64-bit key of the normalised text (NFKC, case folded, white space collapsed): equal texts are one document."""
    return _key(collapsed(unicodedata.normalize("NFKC", text).casefold()))


def collapsed(text: str) -> str:
    """A text with one blank for each run of white space, and none at its ends."""
    if text.isprintable() and "  " not in text and text[:1] != " " != text[-1:]:  # of white space it holds blanks alone
        return text
    return " ".join(text.split())


def id_key(doc_id: str) -> int:
    """A 64-bit key of an id."""
    return _key(doc_id)


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _checked(shard: Shard, row: int, text: Any, identity: Any, group: Any) -> Document:
    default = f"{shard.name}/{shard.files[row - shard.first_row]}" if shard.files not in ((), ("",)) else shard.name
    doc_id = _encodable(str(identity)) if identity is not None else _encodable(f"{default}#{0 if shard.files else row}")
    label = None if group is None else _encodable(str(group))
    problem = text if isinstance(text, _Unreadable) else _too_large(text, shard) or problem_of(text)
    if problem is None and shard.transform is not None:
        text = transform(text, shard.transform)
        if not text.strip():
            problem = _Unreadable("empty", "nothing is left of it by text_transform")
    if problem is not None:
        return Document(row, doc_id, "", label, (problem.reason, problem.message))
    return Document(row, doc_id, text, label)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """In the place of a text: why the row has none."""

    reason: str
    message: str


_DEADLY = _Unreadable("model_error", "it was being read when its worker was killed, again and again")


def _too_large(text: Any, shard: Shard) -> _Unreadable | None:
    most = shard.limits.document_bytes
    if not isinstance(text, str) or 4 * len(text) <= most:
        return None
    size = len(text.encode("utf-8", "surrogatepass"))
    return _overlong(size, "bytes", shard) if size > most else None


def _overlong(size: int, unit: str, shard: Shard) -> _Unreadable:
    limit = f"limits.document_bytes, which is {shard.limits.document_bytes:,}"
    return _Unreadable("too_large", f"{size:,} {unit}, more than {limit}")


def problem_of(text: Any) -> _Unreadable | None:
    """Why a value is no text that can be scored; None where it is one."""
    if text is None:
        return _Unreadable("not_text", "no text in this row")
    if not isinstance(text, str):
        return _Unreadable("not_text", f"{type(text).__name__}, not text")
    if not text.strip():
        return _Unreadable("empty", "nothing but white space")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return _Unreadable("undecodable", f"character {error.start} is {text[error.start]!a}: not valid Unicode text")
    return None


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_labels(shard: Shard) -> Iterator[Any]:
    """The label of every row that a shard reads over, of whatever role, as it is written there.

    Raises:
        UserError: the file itself is damaged.
    """
    try:
        for *_, label in _every_row(shard, unwatched):
            yield label
    except (OSError, EOFError, pa.ArrowException, csv.Error) as error:
        raise UserError(f"{shard.name} is damaged: {' '.join(str(error).split())}") from None


_Row = tuple[int, Any, Any, Any, Any]  # number, text, id, group and label


def _rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    rows = _every_row(shard, watch) if shard.label_column is None else _rows_of_role(shard, watch)
    return itertools.islice(rows, shard.max_rows)


def _rows_of_role(shard: Shard, watch: Watch) -> Iterator[_Row]:
    """The rows whose label gives them the shard's role; one without a label counts as unseen, and is refused."""
    for row, text, identity, group, label in _every_row(replace(shard, max_rows=None), watch):
        role = role_of_label(label, shard.name)
        if role == shard.role:
            yield row, text, identity, group, label
        elif role is None and shard.role == "unseen":
            unlabelled = _Unreadable("no_label", f"no label in column {shard.label_column!r}")
            yield row, text if isinstance(text, _Unreadable) else unlabelled, identity, group, label


def _every_row(shard: Shard, watch: Watch) -> Iterator[_Row]:
    reader = {
        "parquet": _parquet_rows,
        "jsonl": _jsonl_rows,
        "csv": _csv_rows,
        "txt": _txt_rows,
        "dataset": _dataset_rows,
        "hub": _dataset_rows,
    }[shard.format]
    return reader(shard, watch)


def lines(shard: Shard) -> Iterator[tuple[int, bytes | Overlong]]:
    """(row number, line) of each line that begins in the shard's byte range; blank lines are left out."""
    count = 0
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        position = 0
        if shard.start > 0:
            file.seek(shard.start - 1)
            position = shard.start - 1 + skip_line(file)
        stop = shard.stop if shard.by_bytes and shard.stop is not None else None
        if shard.max_rows == 0:
            return
        most = sys.maxsize if stop is None else stop - position
        for row, line in enumerate(bounded_lines(file, shard.limits.document_bytes, most), shard.first_row):
            if isinstance(line, Overlong) or line.strip():
                yield row, line
                count += 1
                if count == shard.max_rows:
                    return
        if stop is not None and file.tell() < stop:
            raise EOFError(f"it ends at byte {file.tell()}; it was planned to byte {stop}")


def _jsonl_rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    for row, line in lines(shard):
        if isinstance(line, Overlong):
            yield row, _overlong(line.size, "bytes", shard), None, None, None
            continue
        if watch(row, False):
            yield row, _DEADLY, None, None, None
            continue
        if row == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            value = json.loads(line.decode("utf-8", "surrogateescape"))
            repeated = _repeated_field(line, shard)
        except (ValueError, RecursionError) as error:
            yield row, _Unreadable("undecodable", f"not a JSON line: {error}"), None, None, None
            continue
        except MemoryError:
            yield row, _Unreadable("out_of_memory", f"its {len(line):,} bytes of JSON take too much"), None, None, None
            continue
        if repeated is not None:
            yield row, _Unreadable("undecodable", f"field {repeated!r} stands twice in it"), None, None, None
            continue
        if not isinstance(value, dict):
            yield row, _Unreadable("not_text", f"a JSON {type(value).__name__}, not an object"), None, None, None
            continue
        text = value.get(shard.text, _Unreadable("not_text", f"no field {shard.text!r}"))
        yield row, text, *_fields(value, shard)


def _repeated_field(line: bytes, shard: Shard) -> str | None:
    """A field of a JSON object that is read and stands in it twice, so that nobody knows which is meant."""
    wanted = {name for name in (shard.text, *_columns(shard)) if name is not None}
    if all(line.count(json.dumps(name, ensure_ascii=False).encode()) < 2 for name in wanted):
        return None
    pairs = json.loads(line.decode("utf-8", "surrogateescape"), object_pairs_hook=tuple)
    names = [name for name, _ in pairs] if isinstance(pairs, tuple) else []
    return next((name for name in names if name in wanted and names.count(name) > 1), None)


def _csv_rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    with open_plain(shard.path, shard.limits.unpacked_bytes) as file:
        for row, value in enumerate(csv_records(file, shard.limits.document_bytes)):
            if isinstance(value, Overlong):
                yield row, _overlong(value.size, "characters", shard), None, None, None
            else:
                yield row, _DEADLY if watch(row, False) else value.get(shard.text), *_fields(value, shard)


def _txt_rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    for row, inner in enumerate(shard.files, shard.first_row):
        deadly = watch(row, False)
        yield row, _DEADLY if deadly else _text_of_file(shard, inner), None, None, None


def _text_of_file(shard: Shard, inner: str) -> Any:
    most = shard.limits.document_bytes
    with fsspec.open(f"{shard.path}/{inner}" if inner else shard.path, "rb") as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = len(data) + sum(map(len, iter(lambda: file.read(1 << 20), b"")))
            return _overlong(size, "bytes", shard)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _Unreadable("undecodable", f"byte {error.start} is not UTF-8")


def _parquet_rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    assert shard.stop is not None
    columns = [name for name in (shard.text, *_columns(shard)) if name is not None]
    given, at_once = 0, partial(rows_at_once, column=shard.text)
    for first, batch in parquet_batches(shard.path, columns, shard.start, shard.stop, at_once):
        for values in _batch_rows(shard, batch, first):
            yield (values[0], _DEADLY, *values[2:]) if watch(values[0], False) else values
        given += len(batch)
    if given != shard.stop - shard.start:
        raise UserError(
            f"{shard.name} is damaged: rows [{shard.start}, {shard.stop}) were planned from its footer, and only "
            f"{given} of them are in it"
        )


def _batch_rows(shard: Shard, batch: pa.RecordBatch, first: int) -> Iterator[_Row]:
    texts = _decoded(batch.column(shard.text))
    others = [batch.column(name).to_pylist() if name else itertools.repeat(None) for name in _columns(shard)]
    for offset, (text, identity, group, label) in enumerate(zip(texts, *others, strict=False)):
        yield first + offset, text, identity, group, label


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
            yield _Unreadable("undecodable", f"byte {error.start} is not UTF-8")


def _dataset_rows(shard: Shard, watch: Watch) -> Iterator[_Row]:
    assert shard.stop is not None
    if shard.format == "hub":
        import datasets

        dataset = datasets.load_dataset(shard.path, shard.subset, split=shard.split or HUB_SPLIT)
    else:
        dataset = open_saved_dataset(shard.path, shard.split, shard.name)
    if len(dataset) < shard.stop:
        raise UserError(f"{shard.name} has {len(dataset)} rows now; [{shard.start}, {shard.stop}) were planned")
    for row in range(shard.start, shard.stop):
        if watch(row, False):
            yield row, _DEADLY, None, None, None
            continue
        value = dataset[row]
        yield row, value.get(shard.text), *_fields(value, shard)


def _columns(shard: Shard) -> tuple[str | None, str | None, str | None]:
    return shard.id_column, shard.group_column, shard.label_column


def _fields(value: dict[str, Any], shard: Shard) -> tuple[Any, Any, Any]:
    """Id, group and label of a row; None without such a column."""
    identity, group, label = (value.get(name) if name is not None else None for name in _columns(shard))
    return identity, group, label


def fetch_texts(shards: Sequence[Shard], places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Texts of single rows, by (input name, row), for excerpts. Reads only the shards that hold them.

    Raises:
        UserError: an input is gone or damaged.
    """
    texts: dict[tuple[str, int], str] = {}
    rows_of: dict[str, set[int]] = {}
    for name, row in places:
        rows_of.setdefault(name, set()).add(row)
    for shard, following in itertools.zip_longest(shards, shards[1:]):
        rows = rows_of.get(shard.name, set())
        same = following is not None and (following.role, following.name) == (shard.role, shard.name)
        end = following.first_row if same and following is not None else None
        rows = {row for row in rows if row >= shard.first_row and (end is None or row < end)}
        if rows:
            texts.update(((shard.name, d.row), d.text) for d in read_shard(shard) if d.row in rows)
    return texts
