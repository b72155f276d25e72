"""`seenset review`: the unseen documents with the highest scores, in a file to fill in."""

from __future__ import annotations

import hashlib
import io
import json

import numpy as np
import pyarrow as pa

from pipeline.audit.digests import scores_digest
from pipeline.audit.records import write_record
from pipeline.audit.review import COLUMNS, LISTED_FILE, ListedForReview, read_listed_for_review
from pipeline.audit.scored import Each, Scored, find_overlaps, without_reviewed
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import PLAIN
from pipeline.corpus.csv_records import escape_formula, record_of
from pipeline.corpus.keys import excerpts_of
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError

EXCERPT = 500
"""Maximum number of characters of the start of a document that are shown."""

_SHARD = "of shard"  # not a detector; a column of external scores may be called shard


def list_for_review(config: AuditConfig, scored: Scored, each: Each, texts: bool) -> tuple[ListedForReview, bytes]:
    """List the `review_count` calibration documents with the highest scores; an earlier list is kept.

    The score is that of the first detector of the first selection of direction members, or else of the first detector.
    Equal scores are ordered by the key of the id. The rows are in the order of the inputs and show no score, so that
    no score influences the review.

    Args:
        config: configuration of the run.
        scored: its finished score shards; the lock of the run must be held.
        each: reads the shards.
        texts: whether the start of each document is shown.

    Returns:
        The list, and the content of the CSV file.

    Raises:
        UserError: no `review_count`, fewer documents, or another list was made before.
    """
    count, _ = config.corpus.review
    if count is None:
        raise UserError(
            "corpus.unseen.review_count is not set: it is fixed in the configuration before the first score, so a "
            "review requires a new run"
        )
    seeking = [selection.detectors[0] for selection in config.selections if selection.direction == "members"]
    detector = next(iter([*seeking, *(parsed.column for parsed in parse_detectors(config.detectors))]))
    scored = without_reviewed(scored, None)
    kept = find_overlaps(scored, ["unseen"], config.model_copy(update={"overlap": "drop"}), each)["unseen"].keep
    parts = [
        scored.table(receipt, ["doc_id", "row", "id_key", "text_key", detector]).append_column(
            _SHARD, pa.array([receipt.shard] * scored.count(receipt), pa.string())
        )
        for receipt in scored.of("unseen")
    ]
    table = pa.concat_tables(parts).filter(pa.array(kept))
    if len(table) < count:
        raise UserError(f"corpus.unseen.review_count is {count:,}, and {len(table):,} unseen documents calibrate")
    order = np.lexsort((table["id_key"].to_numpy(), -table[detector].to_numpy()))
    table = table.take(pa.array(np.sort(order[:count])))
    identity = json.dumps([scores_digest(scored.of("unseen")), count, detector])
    listed = ListedForReview(
        review=hashlib.sha256(identity.encode()).hexdigest()[:16],
        count=count,
        detector=detector,
        documents=[str(name) for name in table["doc_id"].to_pylist()],
    )
    before = read_listed_for_review(scored.store)
    if before is not None and before != listed:
        raise UserError(
            f"{scored.store.url} has listed {before.count:,} documents by {before.detector} for a review, and now it "
            f"is {count:,} by {detector} or other scores: an existing list is not changed"
        )
    write_record(scored.store, LISTED_FILE, listed)
    return listed, _csv(table, scored, listed.review, texts)


def _csv(table: pa.Table, scored: Scored, review: str, texts: bool) -> bytes:
    """The documents as the rows of a file of `COLUMNS`."""
    shards, text = table[_SHARD].to_numpy(zero_copy_only=False), io.StringIO(newline="")
    excerpts: dict[int, str | None] = {}
    for shard in dict.fromkeys(shards.tolist()) if texts else ():
        places = np.flatnonzero(shards == shard)
        rows, keys = (table[name].take(pa.array(places)).to_pylist() for name in ("row", "text_key"))
        excerpts |= zip(places.tolist(), excerpts_of(scored.shards[shard], rows, keys, EXCERPT), strict=True)
    text.write(f"{record_of(COLUMNS, PLAIN)}\n")
    for place, (name, row) in enumerate(zip(table["doc_id"].to_pylist(), table["row"].to_pylist(), strict=True)):
        excerpt = excerpts.get(place)
        quoted = "" if excerpt is None else f"“{excerpt}”"
        texts_of_row = [name, scored.shards[shards[place]].name, quoted]
        doc_id, source, shown = map(escape_formula, texts_of_row)
        text.write(f"{record_of([doc_id, source, str(row), shown, review, ''], PLAIN)}\n")
    return text.getvalue().encode("utf-8", "replace")
