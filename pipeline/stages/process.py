"""Functions of all stages: readable documents of a shard, its file of rows, and its receipt."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from pipeline.corpus.documents import Document, id_key, read_shard
from pipeline.corpus.formats.base import Watch, unwatched
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import DamagedError, UserError
from pipeline.stages.base import Output, Rows, Stage, without
from pipeline.stages.events import QUARANTINE_SCHEMA
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_filed, read_receipt, write_filed, write_receipt

_OUTCOME = ("reason", "problem")
"""Columns for which only the latest table counts."""


def readable_documents(stage: Stage, shard: Shard, output: Output, watch: Watch = unwatched) -> Iterator[Document]:
    """The readable documents of a shard, each id once; the others are refused.

    Already audited documents are counted and left out.

    Args:
        stage: stage that processes them.
        shard: shard to read.
        output: output of the shard.
        watch: as in `read_shard`.

    Raises:
        UserError: the shard's file is damaged.
        ValueError: the shard and the stage have different transforms.
    """
    if shard.transform != stage.transform:
        raise ValueError(f"shard {shard.id} transforms texts by {shard.transform}, stage {stage.name} by another")
    ids: set[str] = set()
    already_audited = stage.already_audited if shard.role == "audit" else None
    for document in read_shard(shard, output.content, watch, notes=output.notes):
        if already_audited is not None and document.problem is None and already_audited.hold(document):
            ids.add(document.doc_id)
            output.n_judged += 1  # in a receipt, documents that earlier runs have audited
            continue
        problem = document.problem
        if document.doc_id in ids:
            problem = (Reason.DUPLICATE_ID, "the id stands earlier in the shard")
        ids.add(document.doc_id)
        if problem is None:
            yield document
        else:
            output.refuse(document, *problem)
            output.unread.add(document.row)


def read_rows(stage: Stage, shard: Shard, store: Store, output: Output | None = None) -> dict[int, dict[str, Any]]:
    """The rows of a finished shard, by row number.

    Args:
        stage: stage of the rows.
        shard: the shard.
        store: run directory.
        output: output of the reading stage, which must read the same documents; None: documents are not read.

    Raises:
        UserError: the stage has not finished the shard, or its file is damaged.
    """
    receipt = read_receipt(store, stage.name, shard.id)
    if receipt is None:
        raise UserError(f"stage {stage.name} has not finished shard {shard.id} of {shard.name} yet")
    if output is not None:
        output.earlier[stage.name] = receipt.documents
    return filed_rows(store, receipt)


def earlier_rows(stage: Stage, shard: Shard, store: Store, output: Output) -> Iterator[dict[str, Any]]:
    """Existing rows of a shard with another value of `stage.grows`, the last part of the stage's name.

    They are the base of the output, whose table then holds only the additions. Of several receipts the one that extends
    most others is used, because it includes them. Damaged rows are computed again.
    """
    parent, _, wanted = stage.name.rpartition("/")
    bases: list[tuple[int, int, Receipt]] = []
    for other in store.names(f"receipts/{parent}"):
        if not other.isdigit() or other == wanted:
            continue
        with suppress(DamagedError):
            receipt = read_receipt(store, f"{parent}/{other}", shard.id)
            if receipt is not None and without(receipt.fingerprint, stage.grows) == stage.identity(shard):
                bases.append((len(receipt.earlier), int(other), receipt))
    for _, number, receipt in sorted(bases, key=lambda base: base[:2], reverse=True):
        with suppress(DamagedError):
            output.base_rows = filed_rows(store, receipt)
            output.base = receipt
            output.earlier[f"{parent}/{number}"] = receipt.documents
            yield from output.base_rows.values()
            return


def file_rows(stage: Stage, shard: Shard, store: Store, output: Output, seconds: float) -> Receipt:
    """Write the rows of a finished shard, then its receipt.

    Raises:
        UserError: the documents differ from those that an earlier stage read.
    """
    documents = output.content.hexdigest()
    for earlier, digest in output.earlier.items():
        if digest != documents and digest and documents:
            raise UserError(changed_input(shard, earlier))
    spent = None if output.answers is None else output.answers.spent
    attempt = f"{shard.id}-{uuid.uuid4().hex[:8]}.parquet"
    rows = dict(output.rows)
    if not stage.quarantines:
        for number, (document, reason, message) in output.refused.items():
            if number not in output.unread:
                row = rows.get(number, {"doc_id": document.doc_id, "row": number})
                rows[number] = {**row, "reason": reason, "problem": message}
    data = f"{stage.folder}/{attempt}"
    table = pa.Table.from_pylist(list(new_rows(rows, output.base_rows)), schema=stage.schema)
    base = () if output.base is None else (*output.base.earlier, output.base.data)
    files = {name: output.base.files[name] for name in base if output.base is not None}
    files[data] = write_filed(store, data, table)
    quarantine = None
    if stage.quarantines and output.refused:
        quarantine = f"quarantine/{attempt}"
        files[quarantine] = write_filed(store, quarantine, _quarantine_table(stage, shard, output))
    n_in, n_refused = len(output.rows.keys() | output.refused.keys()), len(output.refused)
    receipt = Receipt(
        shard=shard.id,
        role=shard.role,
        n_in=n_in + output.n_judged,
        n_scored=n_in - n_refused,
        n_quarantined=n_refused,
        n_judged=output.n_judged,
        data=data,
        quarantine=quarantine,
        reasons=dict(sorted(Counter(reason for _, reason, _ in output.refused.values()).items())),
        fingerprint=stage.fingerprint_for(shard),
        files=files,
        documents=documents,
        tokens=output.tokens if spent is None or not spent.tokens else spent.tokens,
        n_truncated=output.n_truncated,
        seconds=round(seconds, 3),
        gradient=output.gradient,
        spent=None if spent is None else spent.to_dict(),
        earlier=base,
        notes=output.notes.counts if stage.quarantines else {},
    )
    filed = write_receipt(store, stage.name, receipt)
    output.filed = filed.data == data
    if not output.filed:  # another attempt finished first: these files are not used
        store.remove(data)
        if quarantine is not None:
            store.remove(quarantine)
    if output.answers is not None:
        output.answers.close()
    return filed


def changed_input(shard: Shard, stage: str) -> str:
    """The message for a shard whose documents differ from those that a stage read."""
    return (
        f"input {shard.name} changed since stage {stage} read it (shard {shard.id}): its documents have changed; "
        "restore those that were read, or start a new run directory"
    )


def _quarantine_table(stage: Stage, shard: Shard, output: Output) -> pa.Table:
    rows = [
        {
            "doc_id": document.doc_id,
            "role": shard.role,
            "source": shard.name,
            "row": number,
            "stage": stage.name,
            "reason": reason,
            "message": message,
            "id_key": id_key(document.doc_id),
        }
        for number, (document, reason, message) in sorted(output.refused.items())
    ]
    return pa.Table.from_pylist(rows, schema=QUARANTINE_SCHEMA)


# --- rows that grow: a table holds only additions to the tables of earlier receipts


def filed_rows(store: Store, receipt: Receipt) -> Rows:
    """The rows of a receipt, by row number, including the rows that they extend.

    Raises:
        DamagedError: a file is missing, or differs from its record in the receipt.
    """
    rows: Rows = {}
    for name in (*receipt.earlier, receipt.data):
        for row in read_filed(store, receipt, name=name).to_pylist():
            earlier = rows.get(row["row"])
            rows[row["row"]] = row if earlier is None else _joined(earlier, row)
    return rows


def new_rows(rows: Rows, earlier: Rows) -> Iterator[dict[str, Any]]:
    """The additions of rows to earlier rows, in row order.

    A list contains only new elements; other values that have not changed are omitted.
    """
    for number in sorted(rows):
        before = earlier.get(number)
        if before is None:
            yield rows[number]
            continue
        row = {**rows[number], **{name: rows[number].get(name) for name in _OUTCOME}}
        rest = {name: _rest(name, value, before) for name, value in row.items()}
        if any(isinstance(value, list) and value for value in rest.values()) or row["reason"] != before["reason"]:
            yield rest


def _rest(name: str, value: Any, before: Mapping[str, Any]) -> Any:
    if name in ("doc_id", "row", *_OUTCOME):
        return value
    if isinstance(value, list):
        return value[len(before[name] or []) :]
    return None if value == before[name] else value


def _joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(later)
    for name, value in earlier.items():
        if isinstance(value, list):
            row[name] = [*value, *(later[name] or [])]
        elif name not in _OUTCOME and later[name] is None:
            row[name] = value
    return row
